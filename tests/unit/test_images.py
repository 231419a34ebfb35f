"""Images of prompts: what is accepted, how rows are normalised, how they are stored and read again."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from small_folder import CHAT, write_folder

import producers.data.images as prompt_images
from asyncrl.config import DataConfig, parse
from asyncrl.errors import ConfigError
from asyncrl.images.decoding import MAX_BYTES, ImageProblem, check_image, encode_png, open_image
from asyncrl.images.digests import image_digest, image_digests
from asyncrl.images.folder import ImageFolder
from asyncrl.images.rows import Normalised, normalise_row, takes_images
from asyncrl.preflight import code as check_code
from asyncrl.preflight.files import check_data
from asyncrl.preflight.images import check_images
from asyncrl.python_api.settings import write_rows as write_python_rows
from producers.data.prompts import BadPrompt, Prompts, encode_prompt

WIDE = (7, 4)


def picture(size: tuple[int, int] = WIDE, colour: Any = (200, 30, 30), mode: str = "RGB") -> Image.Image:
    return Image.new(mode, size, colour)


def encoded(kind: str = "PNG", image: Image.Image | None = None, **options: Any) -> bytes:
    buffer = BytesIO()
    (image or picture()).save(buffer, kind, **options)
    return buffer.getvalue()


def png_of(width: int, height: int) -> bytes:
    """A small PNG whose header claims this size."""

    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))

# ---------------------------------------------------------------- decoding


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_known_kinds_are_opened(kind: str) -> None:
    data = encoded(kind)
    assert check_image(data) == WIDE
    image = open_image(data)
    assert (image.mode, image.size) == ("RGB", WIDE)
    assert abs(image.getpixel((0, 0))[0] - 200) < 12


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no reader of PNG"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>", "no reader of PNG"),
        (b"<!DOCTYPE html><img src='x.png'>", "no reader of PNG"),
        (b"%PDF-1.7", "no reader of PNG"),
        (encoded("TIFF"), "no reader of PNG"),
        (encoded()[:20], "image: "),
        (png_of(30_000, 30_000), "too many pixels"),
        (png_of(10_000, 10_000), "10000 x 10000 pixels"),
        (png_of(0, 5), "image: "),
        (encoded() + b"\0" * MAX_BYTES, "bytes"),
    ],
    ids=["empty", "svg", "html", "pdf", "tiff", "header", "bomb", "large", "zero", "long"],
)
def test_other_bytes_are_refused_by_their_header(data: bytes, words: str) -> None:
    with pytest.raises(ImageProblem) as refused:
        check_image(data)
    assert refused.value.reason.startswith("image: ") and words in refused.value.reason
    with pytest.raises(ImageProblem):
        open_image(data)


def test_the_limit_of_pixels_is_that_of_the_caller() -> None:
    assert check_image(encoded(), max_pixels=28) == WIDE
    with pytest.raises(ImageProblem, match="at most 27"):
        check_image(encoded(), max_pixels=27)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP"])
def test_a_truncated_file_is_refused_when_it_is_opened(kind: str) -> None:
    data = encoded(kind, NOISE)
    with pytest.raises(ImageProblem):
        open_image(data[: len(data) * 2 // 3])


def test_images_are_upright_and_on_white() -> None:
    turned = Image.Exif()
    turned[0x0112] = 6
    data = encoded("JPEG", exif=turned.tobytes())
    assert check_image(data) == open_image(data).size == (4, 7)
    clear = encoded("PNG", picture(colour=(0, 0, 0, 0), mode="RGBA"))
    assert open_image(clear).getpixel((0, 0)) == (255, 255, 255)
    palette = encoded("GIF", picture(mode="P", colour=0), transparency=0)
    assert open_image(palette).getpixel((0, 0)) == (255, 255, 255)


def test_pil_images_become_png() -> None:
    data = encode_png(picture(mode="CMYK", colour=(0, 0, 0, 0)))
    assert data.startswith(b"\x89PNG") and open_image(data).getpixel((0, 0)) == (255, 255, 255)
    truncated = Image.open(BytesIO(encoded("PNG", NOISE)[:300]))
    with pytest.raises(ImageProblem):
        encode_png(truncated)


# ---------------------------------------------------------------- the folder


def test_a_folder_returns_what_it_was_given(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path / "images")
    data = encoded()
    assert not folder.has(image_digest(data))
    digest = folder.put(data)
    assert digest == image_digest(data) == folder.put(data) and folder.has(digest) and folder.get(digest) == data
    [file] = [path for path in folder.path.rglob("*") if path.is_file()]
    assert file == folder.path / digest[:2] / digest


def test_a_changed_or_missing_image_is_refused_and_put_again(tmp_path: Path) -> None:
    folder = ImageFolder(tmp_path)
    digest = folder.put(encoded())
    (tmp_path / digest[:2] / digest).write_bytes(encoded("GIF"))
    with pytest.raises(ImageProblem, match="changed"):
        folder.get(digest)
    assert folder.put(encoded()) == digest and folder.get(digest) == encoded()
    (tmp_path / digest[:2] / digest).unlink()
    with pytest.raises(ImageProblem, match="missing"):
        folder.get(digest)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "A" * 64, "0" * 63, "0" * 64 + "\n"])
def test_a_name_that_is_no_digest_is_no_path(tmp_path: Path, name: str) -> None:
    with pytest.raises(ImageProblem, match="no digest"):
        ImageFolder(tmp_path).get(name)


# ---------------------------------------------------------------- rows

RED, BLUE = encoded(), encoded("PNG", picture(colour=(0, 0, 250)))
HEX = [image_digest(RED), image_digest(BLUE)]
PLACE = {"type": "image"}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def chat(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def normalised(row: dict[str, Any], folder: Path = Path(), **keys: str) -> Normalised:
    return normalise_row(row, **{"prompt_key": "prompt", "image_key": "images", **keys}, folder=folder)


def data_uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def test_verl_rows_get_digests_at_the_places_of_their_images() -> None:
    row = {
        "data_source": "geo",
        "prompt": [{"role": "system", "content": "Think."}, *chat("<image>and <image>: what differs?")],
        "images": [{"bytes": RED, "path": None}, {"bytes": BLUE, "path": "b.png"}],
    }
    found, images = normalised(row)
    assert found["images"] == HEX and images == dict(zip(HEX, [RED, BLUE], strict=True))
    assert found["prompt"][0] == {"role": "system", "content": "Think."}
    assert found["prompt"][1]["content"] == [PLACE, text("and "), PLACE, text(": what differs?")]
    assert found["data_source"] == "geo" and image_digests(found) == tuple(HEX)
    json.dumps(found)


def test_every_form_of_an_image_is_read(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a b.png").write_bytes(RED)
    forms: list[Any] = [
        RED,
        {"bytes": RED, "path": "elsewhere.png"},
        {"bytes": None, "path": "in/a b.png"},
        "in/a b.png",
        str(tmp_path / "in" / "a b.png"),
        f"file://{tmp_path}/in/a%20b.png",
        data_uri(RED),
        {"image": data_uri(RED)},
    ]
    row = {"prompt": chat("<image>" * len(forms)), "images": forms}
    assert normalised(row, tmp_path).row["images"] == [HEX[0]] * len(forms)
    [digest] = normalised({"prompt": chat("<image>"), "images": picture()}).row["images"]
    assert digest == image_digest(encode_png(picture()))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": data_uri(BLUE)},
        {"type": "image", "bytes": BLUE},
        {"type": "image", "path": "b.png"},
        {"type": "image_url", "image_url": {"url": data_uri(BLUE)}},
        {"type": "image_url", "image_url": "b.png"},
        {"type": "image", "text": None, "image": picture(colour=(0, 0, 250))},
        PLACE,
    ],
    ids=["uri", "bytes", "path", "url", "plain", "pil", "column"],
)
def test_parts_hold_images_or_stand_for_those_of_the_column(part: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "b.png").write_bytes(BLUE)
    column = [RED, BLUE] if part is PLACE else [RED]
    row = {"prompt": chat([text("<image>then"), part, {**text("?"), "image": None}]), "images": column}
    found = normalised(row, tmp_path).row
    assert found["prompt"] == chat([PLACE, text("then"), PLACE, text("?")])
    assert found["images"] == HEX


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"prompt": chat("what?"), "images": [RED]}, "1 images in column 'images', and 0 places"),
        ({"prompt": chat("<image><image>"), "images": [RED]}, "1 images in column 'images', and 2 places"),
        ({"prompt": chat("<image>what?")}, "0 images in column 'images', and 1 places"),
        ({"prompt": chat([PLACE])}, "0 images in column 'images', and 1 places"),
        ({"prompt": "<image>what?", "images": [RED]}, "data.as_chat"),
        ({"prompt": chat("<image>"), "images": ["absent.png"]}, "no file"),
        ({"prompt": chat("<image>"), "images": ["https://h/x.png"]}, "over the network"),
        ({"prompt": chat("<image>"), "images": ["data:image/png;base64,???"]}, "not base64"),
        ({"prompt": chat("<image>"), "images": [5]}, "int is no image"),
        ({"prompt": chat("<image>"), "images": [RED], "videos": ["v.mp4"]}, "column 'videos'"),
        ({"prompt": chat("<image>"), "images": [RED], "videos": ["v.mp4"]}, "ffmpeg"),
        ({"prompt": chat([{"type": "video", "video": "v.mp4"}])}, "a part 'video'"),
        ({"prompt": chat([{"type": "video", "video": []}])}, "a part 'video'"),
        ({"prompt": chat("<video>"), "videos": [{"video": "v.mp4"}]}, "column 'videos'"),
        ({"prompt": chat("<video>"), "videos": [[RED], [BLUE]]}, "2 videos in column 'videos', and 1 places"),
        ({"prompt": chat([{"type": "video"}])}, "0 videos in column 'videos', and 1 places"),
        ({"prompt": chat("what?"), "videos": [[RED]]}, "1 videos in column 'videos', and 0 places"),
        ({"prompt": "<video>", "videos": [[RED]]}, "data.as_chat"),
        ({"prompt": chat("<video>"), "videos": [["absent.png"]]}, "no file"),
        ({"prompt": chat("x"), "chosen": chat([PLACE])}, "column 'chosen'"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_reason(row: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ImageProblem) as refused:
        normalised(row, tmp_path)
    assert refused.value.reason.startswith("image: ") and words in refused.value.reason


def test_rows_without_images_stay() -> None:
    for row in (
        {"prompt": "what?", "images": []},
        {"prompt": chat("hm"), "answer": "1"},
        {"prompt": chat([text("a")])},
    ):
        assert normalised(row) == (row, {}) and image_digests(row) == ()


def test_another_column_may_hold_the_images() -> None:
    row = {"prompt": chat("<image>"), "picture": {"bytes": RED, "path": None}}
    assert normalised(row, image_key="picture").row == {"prompt": chat([PLACE]), "images": HEX[:1]}
    with pytest.raises(ImageProblem, match="is taken"):
        normalised({**row, "images": [BLUE]}, image_key="picture")


# ---------------------------------------------------------------- prompts


def write_rows(folder: Path, rows: list[dict[str, Any]], name: str = "rows.parquet") -> str:
    path = folder / name
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def verl_row(data: bytes, **more: Any) -> dict[str, Any]:
    return {"prompt": chat("<image>which colour?"), "images": [{"bytes": data, "path": None}], **more}


def test_prompts_give_references_and_the_bytes_apart(tmp_path: Path) -> None:
    data = DataConfig(path=write_rows(tmp_path, [verl_row(RED), verl_row(BLUE)]), shuffle=False)
    prompts = Prompts(data, seed=0, sees=True)
    rows = [prompts.row_for(group) for group in range(4)]
    assert [row["images"] for row in rows] == [[HEX[0]], [HEX[1]]] * 2
    assert rows[0]["prompt"] == chat([PLACE, text("which colour?")])
    assert [prompts.images_of(row) for row in rows[:2]] == [(RED,), (BLUE,)]
    json.dumps(rows)


def test_a_video_is_read_as_its_frames(tmp_path: Path) -> None:
    """Of verl's column and of parts, mixed with images, in the order of appearance."""
    (tmp_path / "b.png").write_bytes(BLUE)
    row = {
        "prompt": [
            {"role": "user", "content": "<image>then <video> and"},
            {"role": "user", "content": [{"type": "video"}, {"type": "video", "video": [data_uri(RED), "b.png"]}]},
        ],
        "images": [BLUE],
        "videos": [[RED, {"bytes": BLUE, "path": None}], {"video": ["b.png"], "fps": 2}],
    }
    made = normalised(row, tmp_path)
    assert made.row["images"] == [image_digest(one) for one in (BLUE, RED, BLUE, BLUE, RED, BLUE)]
    shown = [PLACE, text("then "), PLACE, PLACE, text(" and")]
    assert made.row["prompt"] == [*chat(shown), *chat([PLACE] * 3)] and "videos" not in made.row
    words = {"prompt": chat("the tag <video>")}
    assert normalised(words).row == words  # without such a column it is text
    path = write_rows(tmp_path, [{**row, "images": ["b.png"], "videos": [["b.png", "b.png"], ["b.png"]]}], "rows.jsonl")
    prompts = Prompts(DataConfig(path=path, shuffle=False), seed=0, sees=True)
    assert len(prompts.images_of(prompts.row_for(0))) == 6


def test_an_image_that_was_dropped_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_images, "CACHE_BYTES", 1)
    for name, data in (("a.png", RED), ("b.png", BLUE)):
        (tmp_path / name).write_bytes(data)
    rows = [{"prompt": chat("<image><image>"), "images": names} for names in (["a.png", "b.png"], ["b.png", "b.png"])]
    prompts = Prompts(DataConfig(path=write_rows(tmp_path, rows, "rows.jsonl"), shuffle=False), seed=0, sees=True)
    first, second = prompts.row_for(0), prompts.row_for(1)
    assert prompts.images_of(first) == (RED, BLUE) and prompts.images_of(second) == (BLUE, BLUE)
    (tmp_path / "a.png").write_bytes(BLUE)
    with pytest.raises(BadPrompt, match=r"image: .* no longer in the data"):
        prompts.images_of(first)


def test_a_bad_image_sets_its_row_aside(tmp_path: Path) -> None:
    damaged = encoded("PNG", NOISE)[:2000]
    rows = [verl_row(RED), verl_row(damaged), verl_row(b"<svg/>")]
    prompts = Prompts(DataConfig(path=write_rows(tmp_path, rows), shuffle=False), seed=0, sees=True)
    assert prompts.row_for(0)["images"] == HEX[:1]
    for group in (1, 2):
        with pytest.raises(BadPrompt, match="image: "):
            prompts.row_for(group)
    sampled = list(prompts.sample(3))
    assert isinstance(sampled[0], dict) and [type(one) for one in sampled[1:]] == [BadPrompt, BadPrompt]


def test_a_text_model_gets_no_digests_as_text(tmp_path: Path) -> None:
    """Digests in the data of a text model are images that it does not see."""
    rows = [{"prompt": "what?"}, {"prompt": "what?", "images": HEX}]
    prompts = Prompts(DataConfig(path=write_rows(tmp_path, rows, "rows.jsonl"), shuffle=False), seed=0)
    with pytest.raises(BadPrompt, match="text alone"):
        prompts.row_for(1)
    place = write_rows(tmp_path, [{"prompt": "what?", "picture": "a.png"}], "other.jsonl")
    with pytest.raises(ConfigError, match="column 'picture'"):
        Prompts(DataConfig(path=place, image_key="picture"), seed=0)


def test_videos_are_an_error_of_the_data_of_any_model(tmp_path: Path) -> None:
    place = write_rows(tmp_path, [{"prompt": "what?", "videos": ["v.mp4"]}], "rows.jsonl")
    with pytest.raises(ConfigError, match="column 'videos'") as refused:
        Prompts(DataConfig(path=place), seed=0, sees=True)
    assert "ffmpeg" in refused.value.remedy
    frames = write_rows(tmp_path, [{"prompt": "what?", "videos": [["a.png"]]}], "frames.jsonl")
    with pytest.raises(ConfigError, match="column 'videos'"):
        Prompts(DataConfig(path=frames), seed=0)


class Words:
    """A tokenizer that shows what a template would get."""

    def __init__(self) -> None:
        self.seen: Any = None

    def encode_chat(self, messages: Any, tools: Any = ()) -> list[int]:
        self.seen = messages
        return [1, 2]


def test_normalised_rows_are_encoded_and_others_are_not(tmp_path: Path) -> None:
    data, words = DataConfig(path=write_rows(tmp_path, [verl_row(RED)]), shuffle=False), Words()
    row = Prompts(data, seed=0, sees=True).row_for(0)
    assert encode_prompt(row, data, words).tolist() == [1, 2] and words.seen == row["prompt"]  # type: ignore[arg-type]
    for other in ({**row, "images": ["a.png"]}, {**row, "videos": ["v"]}):
        with pytest.raises(BadPrompt, match="media: "):
            encode_prompt(other, data, words)  # type: ignore[arg-type]


def test_a_model_says_whether_it_sees(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_vl", "vision_config": {}}')
    assert takes_images(tmp_path) and not takes_images(tmp_path / "none")


# ---------------------------------------------------------------- the check before a run


@pytest.mark.parametrize(
    ("case", "row", "words"),
    [
        ("parquet", verl_row(RED), ""),
        ("parquet", verl_row(b"<html>"), "row 2: image 0 of it: no reader of PNG"),
        ("parquet", verl_row(png_of(30_000, 30_000)), "row 2: image 0 of it: it has too many pixels"),
        ("parquet", {**verl_row(RED), "prompt": chat("what?")}, "row 2: 1 images in column 'images', and 0 places"),
        ("jsonl", {"prompt": chat("<image>"), "images": ["a.png"]}, ""),
        ("jsonl", {"prompt": chat("<image>"), "images": ["b.png"]}, "row 2: no file"),
        ("jsonl", {"prompt": "<image>what?", "images": ["a.png"]}, "data.as_chat = true"),
        ("jsonl", {"prompt": "what?", "videos": ["v.mp4"]}, "row 2: media: it has column 'videos'"),
    ],
)
def test_the_check_looks_at_the_images_of_the_first_rows(
    case: str, row: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_folder(tmp_path / "model", template=CHAT, model_type="qwen2_vl", vision_config={})
    monkeypatch.setattr(check_code, "_problem", lambda command, **_: "")
    (tmp_path / "a.png").write_bytes(RED)
    good = verl_row(RED) if case == "parquet" else {"prompt": chat("<image>"), "images": ["a.png"]}
    path = write_rows(tmp_path, [good, good, row], f"rows.{case}")
    config = parse(f'model.path = "{model}"\ndata.path = "{path}"\n[[reward]]\nfunction = "a:b"\n')
    found = list(check_data(config))
    assert [(error.code, words in error.message) for error in found] == [("config.data", True)] * bool(words)
    for error in found:
        assert f"data.path = {path!r}" in error.where and error.remedy


def test_plain_texts_may_become_chats_with_images(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(RED)
    path = write_rows(tmp_path, [{"prompt": "<image>what?", "images": "a.png"}], "rows.jsonl")
    config = parse(f'model.path = "m"\ndata.path = "{path}"\ndata.as_chat = true\n[[reward]]\nfunction = "a:b"\n')
    assert not list(check_images(config, Path(path), where="data.path"))
    assert Prompts(config.data, seed=0, sees=True).row_for(0)["prompt"] == chat([PLACE, text("what?")])


def test_rows_of_python_become_files_that_hold_their_images(tmp_path: Path) -> None:
    """`asyncrl.train` with bytes, PIL images and those of `datasets`."""
    rows = [
        {"prompt": chat("<image>"), "images": [held]} for held in (RED, picture(), {"bytes": RED, "path": "elsewhere"})
    ] + [{"prompt": chat([{"type": "image", "image": picture()}])}]
    data = DataConfig(path=write_python_rows(rows, tmp_path / "rows.jsonl"), shuffle=False)
    prompts = Prompts(data, seed=0, sees=True)
    assert [prompts.images_of(prompts.row_for(group)) for group in range(4)] == [(RED,)] * 4
    assert encode_png(picture()) == RED


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ([], ""),
        (["environment.name=chat"], ""),
        (["environment.name=my:own"], ""),
        (["environment.name=verifiers"], "environment.name"),
        (["environment.name=agent", 'environment.agent.command=["a"]'], "environment.name"),
        (["environment.name=chat", "producers.engine=vllm"], "producers.engine"),
        (["producers.engine=vllm"], ""),
    ],
)
def test_some_environments_and_engines_take_no_images_in_turns(settings: list[str], where: str, tmp_path: Path) -> None:
    path = Path(write_rows(tmp_path, [verl_row(RED)]))
    text = f'model.path = "m"\ndata.path = "{path}"\n[[reward]]\nfunction = "a:b"\n'
    found = list(check_images(parse(text, overrides=settings), path, where="data.path"))
    assert [(error.code, error.where) for error in found] == [("config.conflict", where)] * bool(where)
    assert all("row 0 has images" in error.message and error.remedy for error in found)
