"""Draws the folders of the product and the imports between them: `docs/images/architecture-imports.svg`.

An arrow points from a folder to one that it imports. An arrow that follows from others is left out. `docs/generate.py`
writes the file; it depends on the source alone.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("asyncrl", "buffers", "weightsync", "producers", "learners")
ROWS = (("producers", "learners"), ("buffers", "weightsync"), ("asyncrl",))
WIDTH, HEIGHT, GAP, LEVEL, MARGIN = 124, 26, 10, 62, 14  # of a folder's box, between boxes, between ranks
ENTRY = "(entry)"  # modules of a package that are in no folder and that its folders do not import


STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328; text-anchor: middle; dominant-baseline: central }
  .package { fill: #f6f8fa; stroke: #8c959f } .folder { fill: #ffffff; stroke: #57606a }
  .title { font-weight: 600; font-size: 14px } path { fill: none; stroke: #6e7781; stroke-width: 1.1 }
  .between { stroke: #0969da; stroke-width: 2 } marker path { fill: #6e7781; stroke: none }
  #blue path { fill: #0969da }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .package { fill: #161b22; stroke: #6e7681 } .folder { fill: #0d1117; stroke: #8b949e }
    path { stroke: #8b949e } .between { stroke: #58a6ff } marker path { fill: #8b949e } #blue path { fill: #58a6ff }
  }
"""


def imports(path: Path, known: Iterable[str]) -> set[str]:
    """The modules of the product that a file imports, lazy imports included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module for name in full}
    return {name for name in found if name.partition(".")[0] in PACKAGES}


def folder_imports() -> dict[str, set[str]]:
    """Folder -> folders that its modules import."""
    paths = {path: path.relative_to(ROOT).with_suffix("") for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    modules = {path: ".".join(one.parts).removesuffix(".__init__") for path, one in paths.items()}
    targets = {module: imports(path, set(modules.values())) for path, module in modules.items()}
    home = {module: ".".join(paths[path].parts[:-1]) for path, module in modules.items()}
    inside = {module: found for module, found in targets.items() if home[module] not in PACKAGES}
    used = {one for module, found in inside.items() for one in found if one.split(".")[0] == module.split(".")[0]}
    while more := {one for module in used for one in targets.get(module, ()) if home.get(one) in PACKAGES} - used:
        used |= more
    for module, folder in home.items():
        if folder in PACKAGES:
            home[module] = module if module in used else f"{folder}.{ENTRY}"
    edges: dict[str, set[str]] = {folder: set() for folder in sorted(home.values())}
    for module, found in targets.items():
        if module not in PACKAGES:  # an `__init__` imports what it re-exports
            edges[home[module]] |= {home[one] for one in found if one not in PACKAGES} - {home[module]}
    return edges


def reachable(edges: Mapping[str, set[str]], start: str) -> set[str]:
    """Everything that can be reached from the folders that `start` imports."""
    found: set[str] = set()
    stack = list(edges[start])
    while stack:
        name = stack.pop()
        if name not in found:
            found.add(name)
            stack += edges[name]
    return found


def reduce(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The same reachability with as few arrows as possible."""
    reach = {name: reachable(edges, name) for name in edges}
    return {
        name: {
            one
            for one in targets
            if not any(one in reach[other] and other not in reach[one] for other in targets - {one})
        }
        for name, targets in edges.items()
    }


def ranks(edges: Mapping[str, set[str]]) -> dict[str, int]:
    """The length of the longest way down; folders of a circle have one rank."""
    reach = {name: reachable(edges, name) for name in edges}
    below = {name: {one for one in reach[name] if name not in reach[one]} for name in edges}
    found: dict[str, int] = {}
    for name in sorted(edges, key=lambda one: (len(below[one]), one)):
        found[name] = max((found[one] + 1 for one in below[name]), default=0)
    return found


def draw_package(name: str, edges: Mapping[str, set[str]], left: int, top: int) -> tuple[list[str], int, int]:
    """One package; the elements, its width and its height."""
    own = {one: {other for other in targets if other.startswith(f"{name}.")} for one, targets in edges.items()}
    own = {one: targets for one, targets in own.items() if one.startswith(f"{name}.")}
    levels: dict[int, list[str]] = defaultdict(list)
    for one, rank in ranks(own).items():
        levels[rank].append(one)
    widest = max(len(level) for level in levels.values())
    width = 2 * MARGIN + widest * (WIDTH + GAP) - GAP
    height = 30 + MARGIN + (max(levels) + 1) * LEVEL - (LEVEL - HEIGHT)
    places: dict[str, tuple[float, float]] = {}
    for rank, level in sorted(levels.items()):
        start = left + (width - len(level) * (WIDTH + GAP) + GAP) / 2
        for number, one in enumerate(sorted(level)):
            places[one] = start + number * (WIDTH + GAP) + WIDTH / 2, top + 30 + (max(levels) - rank) * LEVEL
    out = [
        f'<rect class="package" x="{left}" y="{top}" width="{width}" height="{height}" rx="8"/>',
        f'<text class="title" x="{left + width / 2:g}" y="{top + 15}">{name}</text>',
    ]
    for one, targets in reduce(own).items():
        for other in sorted(targets):
            (x, y), (to_x, to_y) = places[one], places[other]
            y, to_y = (y + HEIGHT, to_y - 2) if to_y > y else (y, to_y + HEIGHT + 2)
            middle = (y + to_y) / 2
            curve = f"M{x:g} {y:g}C{x:g} {middle:g} {to_x:g} {middle:g} {to_x:g} {to_y:g}"
            out.append(f'<path marker-end="url(#grey)" d="{curve}"/>')
    for one, (x, y) in places.items():
        label = one.removeprefix(f"{name}.")
        out += [
            f'<rect class="folder" x="{x - WIDTH / 2:g}" y="{y:g}" width="{WIDTH}" height="{HEIGHT}" rx="5"/>',
            f'<text x="{x:g}" y="{y + HEIGHT / 2:g}">{label}</text>',
        ]
    return out, width, height


def between(edges: Mapping[str, set[str]], rows: Sequence[Sequence[str]]) -> list[tuple[str, str]]:
    """Arrows from package to package, to the next row alone: all import those below them."""
    found = {(one.partition(".")[0], other.partition(".")[0]) for one, targets in edges.items() for other in targets}
    row = {name: number for number, names in enumerate(rows) for name in names}
    return sorted((one, other) for one, other in found if row[other] == row[one] + 1)


def draw() -> str:
    """The picture as SVG."""
    edges = folder_imports()
    out: list[str] = []
    boxes: dict[str, tuple[int, int, int, int]] = {}
    top = MARGIN
    for row in ROWS:
        left, tallest = MARGIN, 0
        for name in row:
            elements, width, height = draw_package(name, edges, left, top)
            out += elements
            boxes[name] = left, top, width, height
            left, tallest = left + width + 3 * MARGIN, max(tallest, height)
        top += tallest + 4 * MARGIN
    for one, other in between(edges, ROWS):
        (x, y, width, height), (to_x, to_y, to_width, _) = boxes[one], boxes[other]
        low, high = max(x, to_x), min(x + width, to_x + to_width)
        start = (low + high) / 2 if low < high else x + width / 2
        end = start if low < high else to_x + to_width / 2
        out.append(f'<path class="between" marker-end="url(#blue)" d="M{start:g} {y + height}L{end:g} {to_y - 3}"/>')
    wide = max(x + width for x, _, width, _ in boxes.values()) + MARGIN
    marker = '<marker id="{}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
    arrow = '<path d="M0 0L8 4L0 8z"/></marker>'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {top - 3 * MARGIN}" role="img" '
        f'aria-label="Folders of the packages and the imports between them"><style>{STYLE}</style>'
        f"<defs>{marker.format('grey')}{arrow}{marker.format('blue')}{arrow}</defs>"
    )
    return head + "\n" + "\n".join(out) + "\n</svg>\n"
