"""The password of Redis is in no dump, and is found again by who connects."""

from pathlib import Path

import pytest

from asyncrl.config import dump, parse, redact
from asyncrl.config.redis_url import FILE, HIDDEN, VARIABLE, hide_password, keep, restore_password, url_password
from asyncrl.errors import ConfigError
from asyncrl.launcher.launch import changes

SECRET = "to/p s:e@cret%"
QUOTED = "to%2Fp%20s%3Ae%40cret%25"
URLS = {
    f"redis://user:{QUOTED}@host:6379/0": "redis://user:***@host:6379/0",
    f"rediss://:{QUOTED}@host": "rediss://:***@host",
    f"redis://host:1/0?password={QUOTED}&db=1": "redis://host:1/0?password=***&db=1",
    f"unix://user@/run/redis.sock?password={QUOTED}": "unix://user@/run/redis.sock?password=***",
}
TEXT = '[model]\npath = "m"\n[data]\npath = "d.jsonl"\n[[reward]]\nfunction = "a:b"\n[buffer]\nredis_url = "URL"\n'


@pytest.mark.parametrize("url", URLS)
def test_a_password_is_hidden_and_comes_back(url: str, tmp_path: Path) -> None:
    shown = hide_password(url)
    assert shown == URLS[url] and url_password(url) == SECRET and url_password(shown) == ""
    assert hide_password(shown) == shown
    with pytest.raises(ConfigError, match=VARIABLE):
        restore_password(shown, tmp_path, {})
    keep(url, tmp_path)
    assert (tmp_path / FILE).stat().st_mode & 0o177 == 0 and (tmp_path / FILE).read_text() == SECRET
    assert url_password(restore_password(shown, tmp_path, {})) == SECRET
    assert url_password(restore_password(shown, tmp_path, {VARIABLE: "o:ther"})) == "o:ther"
    keep(shown, tmp_path)  # a resumed run: nothing is lost
    assert (tmp_path / FILE).read_text() == SECRET
    assert restore_password(url, tmp_path, {VARIABLE: "other"}) == url, "what the user spelled out wins"


def test_the_environment_serves_a_url_without_a_password(tmp_path: Path) -> None:
    assert restore_password("redis://host:1/0", tmp_path, {VARIABLE: "pw"}) == "redis://:pw@host:1/0"
    assert restore_password("redis://host:1/0", tmp_path, {}) == "redis://host:1/0"


@pytest.mark.parametrize("url", URLS)
def test_no_dump_and_no_change_shows_it(url: str, tmp_path: Path) -> None:
    config = parse(TEXT.replace("URL", url))
    text = dump(config)
    assert QUOTED not in text and SECRET not in text and HIDDEN in text
    assert parse(text) == redact(config)
    path = tmp_path / "config.toml"
    path.write_text(dump(parse(TEXT.replace("URL", ""))))
    [line] = changes(path, redact(config))
    assert QUOTED not in line and HIDDEN in line
    path.write_text(text)
    assert changes(path, redact(config)) == []


def test_a_comparison_shows_no_password(tmp_path: Path) -> None:
    from asyncrl.configure.diff import read

    path = tmp_path / "mine.toml"
    path.write_text(TEXT.replace("URL", next(iter(URLS))))
    assert read(path).buffer.redis_url == URLS[next(iter(URLS))]
