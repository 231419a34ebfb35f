"""The tool `browser` with a real Chromium in the real sandbox: pages, state, limits, and what a page cannot reach."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sandbox_lab import needs_browser, needs_bubblewrap

from asyncrl.environment import ToolCall
from asyncrl.errors import ConfigError
from asyncrl.runtime.host_facts import descendants
from producers.sandbox import SandboxLimits, chromium, open_sandbox
from producers.sandbox.bubblewrap import is_privileged
from producers.tools.base import SampleTools, Toolbox, make_toolbox

PAGE = "<!doctype html><meta charset=utf-8>"
PAGES = {
    "index.html": PAGE + "<h1>Shop</h1><a href=more.html target=_blank>More</a> <a href='/sub/deep.html'>Deep</a>"
    "<button onclick=\"document.getElementById('n').textContent++\">Add</button> <b id=n>0</b>"
    "<p style='display:none'>hidden <a href=x>never</a></p>",
    "more.html": PAGE + "<p>Behind the link</p><a href=index.html>back</a>",
    "sub/deep.html": PAGE + "<p>deep</p><a href='../index.html'>up</a><a href=gone.html>gone</a>",
    "form.html": PAGE + "<form action=found.html><label>City <input name=q></label>"
    "<select name=s><option>one<option>two</select><input type=submit value=Go></form>",
    "found.html": PAGE + "<p id=p></p><script>p.textContent = 'asked ' + location.search</script>",
    "late.html": PAGE + "<p id=p>empty</p><script>fetch('data.json').then(r => r.json()).then(d => "
    "p.textContent = d.word)</script>",
    "data.json": '{"word": "loaded"}',
    "loop.html": PAGE + "<p>loop</p><button onclick='while (true);'>wait</button>",
    "hungry.html": PAGE + '<p>hungry</p><button onclick="setInterval(() => { const a = new Uint8Array(1 << 26).fill(7);'
    ' (window.all ||= []).push(a); }, 1)">eat</button>',
}
LIMITS = SandboxLimits(timeout_s=40.0, memory_bytes=700 << 20)


class Player:
    """Two samples of one toolbox, played by name."""

    def __init__(self, pages: Path, limits: SandboxLimits = LIMITS, **settings: Any) -> None:
        args = {"browser": {"pages": str(pages), **settings}}
        self.loop = asyncio.new_event_loop()
        self.box: Toolbox = make_toolbox(["browser"], args, sandbox=lambda: open_sandbox("bubblewrap", limits))
        self.loop.run_until_complete(self.box.open())
        self.samples: dict[str, SampleTools] = {}

    def __call__(self, tool: str, *, sample: str = "one", **arguments: Any) -> str:
        mine = self.samples.setdefault(sample, self.box.begin())
        call = mine.call(ToolCall(f"browser_{tool}", arguments), timeout_s=120.0)
        shown = self.loop.run_until_complete(asyncio.wait_for(call, 150))
        assert isinstance(shown, str)
        return shown

    def end(self) -> None:
        for sample in self.samples.values():
            self.loop.run_until_complete(sample.end())
        self.samples = {}

    def close(self) -> None:
        self.end()
        self.loop.run_until_complete(self.box.close())
        self.loop.close()


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    needs_bubblewrap()
    needs_browser()
    folder = tmp_path / "site"
    for name, text in PAGES.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return folder


@pytest.fixture
def play(pages: Path) -> Iterator[Player]:
    made = Player(pages)
    yield made
    made.close()


def test_pages_are_opened_read_and_operated(play: Player) -> None:
    assert play("read") == ""
    first = "Shop\n[1] More [2] Deep[3] Add 0"
    assert play("open", page="index.html") == first
    assert play("click", target="Add").endswith("[3] Add 1") and play("click", target="3").endswith("[3] Add 2")
    assert play("read").endswith("Add 2"), "state stays"
    assert play("click", target="more") == "Behind the link\n[1] back"
    assert play("click", target="[1]") == first
    assert play("click", target="Deep") == "deep\n[1] up[2] gone"
    assert play("click", target="gone") == "no such page"
    assert play("click", target="nowhere") == 'error: no link or button "nowhere"'
    assert play("open", page="other.html") == "error: no page 'other.html'"
    assert play("open", page="late.html") == "loaded"
    assert "browser_open" in play("close") and "missing required field `page`" in play("open")


def test_forms(play: Player) -> None:
    assert play("open", page="form.html") == "City {City: } {s: one}\none\ntwo\n[1] Go"
    assert "{City: Ulm é}" in play("type", field="city", text="Ulm é")
    assert "{s: two}" in play("type", field="s", text="two")
    assert play("type", field="s", text="three") == 'error: no choice "three"'
    assert play("type", field="street", text="x") == 'error: no field "street"'
    assert play("click", target="Go") == "asked ?q=Ulm+%C3%A9&s=two"
    play("open", page="form.html")
    assert play("type", field="City", text="Rom\n") == "asked ?q=Rom&s=one"


def test_samples_have_a_browser_each_and_it_ends_with_them(play: Player) -> None:
    before = set(descendants(os.getpid()))
    play("open", page="index.html")
    play("click", target="Add")
    assert play("read", sample="other") == ""
    assert play("open", sample="other", page="index.html").endswith("Add 0") and play("read").endswith("Add 1")
    assert set(descendants(os.getpid())) - before
    play.end()
    assert not set(descendants(os.getpid())) - before


def test_limits_close_the_browser_and_the_next_call_begins_anew(pages: Path) -> None:
    play = Player(pages, SandboxLimits(timeout_s=40.0, memory_bytes=500 << 20), timeout_s=10.0)
    try:
        play("open", page="loop.html")
        lost = "; the browser is closed: open a page again"
        assert play("click", target="wait") == f"error: timeout{lost}"
        assert play("read") == ""
        play("open", page="hungry.html")
        play("click", target="eat")
        assert next(said for _ in range(200) if (said := play("read")).startswith("error")) == f"error: memory{lost}"
        assert play("open", page="more.html").startswith("Behind")
        (browser,) = [pid for pid in descendants(os.getpid()) if is_browser(pid)][:1]
        os.kill(browser, signal.SIGKILL)
        assert play("read") == f"error: killed{lost}"
        assert play("open", page="more.html").startswith("Behind")
    finally:
        play.close()


def is_browser(pid: int) -> bool:
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return b"/chrom" in words[0] and b"--remote-debugging-pipe" in words
    return False


def test_a_page_reaches_neither_the_network_nor_other_files(pages: Path) -> None:
    (pages.parent / "secret.html").write_text("a secret")
    (pages / "way.html").symlink_to(pages.parent / "secret.html")
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_server(("127.0.0.1", 0)) as other:
        port, second = listener.getsockname()[1], other.getsockname()[1]
        tries = [f"http://127.0.0.1:{port}/", f"http://localhost:{port}/", "http://1.1.1.1/", "file:///etc/passwd"]
        tries += ["file:///proc/self/environ", "/../secret.html", "/%2e%2e/secret.html", "/way.html", "http://other/"]
        script = f"""
        const said = [];
        const attempt = async u => {{ try {{ const r = await fetch(u, {{mode: 'no-cors'}});
          said.push(r.ok ? 'read ' + await r.text() : 'no ' + r.status); }} catch (e) {{ said.push('no'); }} }};
        const socket = new Promise(end => {{ const s = new WebSocket('ws://127.0.0.1:{second}/');
          s.onopen = () => end('open'); s.onerror = () => end('no'); }});
        (async () => {{ for (const u of {tries}) await attempt(u); said.push(await socket);
          p.textContent = said.join(',') + ' end'; }})();
        """
        (pages / "evil.html").write_text(
            f"{PAGE}<p id=p></p><a href='http://127.0.0.1:{port}/'>out</a> <a href='file:///etc/passwd'>file</a>"
            f"<img src='http://127.0.0.1:{port}/x.png'><script>{script}</script>"
        )
        play = Player(pages)
        try:
            shown = play("open", page="evil.html")
            for _ in range(20):
                if " end" in shown:
                    break
                shown = play("read")
            assert " end" in shown and "read" not in shown and "open" not in shown and "secret" not in shown, shown
            for link in ("out", "file"):
                play("open", page="evil.html")
                after = play("click", target=link)
                assert "root:" not in after and "secret" not in after, after
            for page in (
                "../secret.html",
                "/etc/passwd",
                "file:///etc/passwd",
                f"http://127.0.0.1:{port}/",
                "way.html",
            ):
                assert play("open", page=page) == f"error: no page '{page}'"
        finally:
            play.close()
        for end in (listener, other):
            end.setblocking(False)
            with pytest.raises(BlockingIOError):
                end.accept()


def test_it_is_refused_where_it_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make(kind: str, pages: Path = tmp_path) -> Toolbox:
        return make_toolbox(["browser"], {"browser": {"pages": str(pages)}}, sandbox=lambda: open_sandbox(kind))

    with pytest.raises(ConfigError, match="there is no such folder"):
        make("bubblewrap", tmp_path / "none")
    with pytest.raises(ConfigError, match="a browser runs only in bubblewrap"):
        make("none")
    with pytest.raises(ConfigError, match="keeps no state between programs"):
        make("http://127.0.0.1:9")
    monkeypatch.setattr(chromium, "BINARIES", ("/no/chromium",))
    with pytest.raises(ConfigError, match="there is no browser: none of /no/chromium") as found:
        make("bubblewrap")
    assert found.value.remedy == "apt-get install chromium-headless-shell"


@pytest.mark.parametrize("closed", [".", "sub", "more.html"])
def test_pages_that_the_browser_could_not_read_are_refused(pages: Path, closed: str) -> None:
    (pages / closed).chmod(0o700)
    if not is_privileged():
        Player(pages).close()  # then the browser runs as the user of the files
        return
    with pytest.raises(ConfigError, match="may not read it") as caught:
        Player(pages)
    assert caught.value.where == str(pages / closed) and str(pages) in caught.value.remedy
