"""The process inside the sandbox that drives a browser: a page of one sample, from its first call to its end.

Started as pid 1 of the sandbox, by its file, next to `runner.py`, with the standard library alone. It starts Chromium
and speaks the DevTools protocol with it over two pipes. Guarantees:
1. the browser gets the files of one folder, as `http://site/`, and nothing else: every other request fails here, before
   a network that the sandbox does not have;
2. pages are read and operated from an isolated world: scripts of a page cannot change what is reported of it;
3. a call that does not end in its time ends the browser, and this process with it;
4. between calls all processes of the browser are stopped: its parent looks at their memory only during calls.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import mimetypes
import os
import resource
import runpy
import select
import signal
import sys
import time
from typing import Any
from urllib.parse import unquote, urlsplit

Frame = dict[str, Any]

_runner = runpy.run_path(os.path.join(os.path.dirname(__file__), "runner.py"))  # nothing else of ours is there
receive, send, become_nobody = _runner["receive"], _runner["send"], _runner["become_nobody"]

SITE = "site"  # host of the pages
PAGES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "pages")
START_S = 45.0
QUIET_S = 0.05  # without a message of the browser: the page is ready
BUSY_S = 2.0  # then a page that goes on loading is shown as it is
MAX_FILES, MAX_THREADS = 1024, 1024
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-breakpad", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-default-apps", "--disable-features=HttpsUpgrades,Translate,MediaRouter,OptimizationHints",
    "--disk-cache-size=1", "--mute-audio", "--no-zygote", "--in-process-gpu", "--remote-debugging-pipe",
)  # fmt: skip
STARTS = ("Page.frameRequestedNavigation", "Page.frameScheduledNavigation")  # sent before the answer to a click
ENDS = ("Page.loadEventFired", "Page.navigatedWithinDocument", "Page.frameStoppedLoading")
#: What the isolated world knows: numbered links and buttons, named fields.
HELPERS = """
const shown = e => e.getClientRects().length > 0;
const find = what => [...document.querySelectorAll(what)].filter(shown);
const buttons = 'input[type=submit],input[type=button],input[type=reset],input[type=checkbox],input[type=radio]';
const links = find('a[href],button,summary,[role=button],[onclick],' + buttons);
const fields = find('input,textarea,select').filter(e => !e.matches(buttons + ',input[type=hidden]'));
const label = e => (e.labels && e.labels.length ? e.labels[0].innerText : '') || e.getAttribute('aria-label') || '';
const text = e => (e.innerText || (e.matches('input[type=checkbox],input[type=radio]') ? '' : e.value) || label(e)
  || e.title || '').trim();
const name = e => (label(e) || e.placeholder || e.name || e.id || '').trim();
const match = (all, of, t) => all.find(e => of(e) === t) || all.find(e => of(e).toLowerCase() === t.toLowerCase())
  || all.find(e => of(e).toLowerCase().includes(t.toLowerCase()));
"""
READ = """
const added = [];
const mark = (e, t, inside) => {
  const n = document.createTextNode(t); inside ? e.prepend(n) : e.before(n); added.push(n); };
links.forEach((e, n) => e.matches('input')
  ? mark(e, `[${n + 1}] ${text(e)}${e.checked ? ' (on)' : ''} `, false) : mark(e, `[${n + 1}] `, true));
fields.forEach(e => mark(e, `{${name(e)}: ${e.value}} `, false));
const seen = document.body ? document.body.innerText : '';
added.forEach(n => n.remove());
return seen.replace(/[ \\t\\u00a0]+/g, ' ').replace(/\\s*\\n\\s*/g, '\\n').trim();
"""
CLICK = """
const number = /^\\[?(\\d+)\\]?$/.exec(target);
const e = number ? links[+number[1] - 1] : match(links, text, target);
if (!e) return `no link or button ${JSON.stringify(target)}`;
e.removeAttribute('target');
e.click();
return '';
"""
TYPE = """
const e = match(fields, name, target);
if (!e) return `no field ${JSON.stringify(target)}`;
const line = value.endsWith('\\n'), given = value.replace(/\\n$/, '');
if (e.matches('select')) {
  const option = [...e.options].find(o => o.text.trim() === given || o.value === given);
  if (!option) return `no choice ${JSON.stringify(given)}`;
  option.selected = true;
} else e.value = given;
e.dispatchEvent(new Event('input', {bubbles: true}));
e.dispatchEvent(new Event('change', {bubbles: true}));
if (line && e.form) e.form.requestSubmit();
return '';
"""


class Refused(Exception):
    """A call that cannot be answered; its text goes to the policy."""


class OutOfTime(Exception):
    """The browser did not answer in time."""


class Lost(Exception):
    """The browser, or its page, is gone."""


class Browser:
    """Chromium with one page."""

    def __init__(self, binary: str, folder: str) -> None:
        self._data = bytearray()
        self._number = 0
        self._session = self._frame = ""
        self._loading = False  # a navigation was requested and has not ended
        self._refused_at = 0.0  # unless it has not begun at this time: such as a link to a local file
        self._here, there = _pipe()
        their_input, self._there = _pipe()
        nothing = os.open(os.devnull, os.O_RDWR)
        actions = [(os.POSIX_SPAWN_DUP2, nothing, number) for number in range(3)]
        actions += [(os.POSIX_SPAWN_DUP2, their_input, 3), (os.POSIX_SPAWN_DUP2, there, 4)]
        command = [binary, *FLAGS, f"--user-data-dir={folder}/profile", "about:blank"]
        os.posix_spawn(binary, command, {**os.environ, "HOME": folder, "TMPDIR": folder}, file_actions=actions)
        for descriptor in (their_input, there, nothing):
            os.close(descriptor)
        self._open_page(time.monotonic() + START_S)

    def _open_page(self, deadline: float) -> None:
        self._ask("Browser.setDownloadBehavior", deadline, behavior="deny")
        while not self._frame:  # the page that it starts with; this is the name of its main frame, too
            found = self._ask("Target.getTargets", deadline)["targetInfos"]
            self._frame = next((one["targetId"] for one in found if one["url"] == "about:blank"), "")
        self._session = self._ask("Target.attachToTarget", deadline, targetId=self._frame, flatten=True)["sessionId"]
        self._ask("Page.enable", deadline)
        self._ask("Fetch.enable", deadline, patterns=[{"urlPattern": "*"}])

    def do(self, what: Frame, deadline: float) -> str:
        """Carry out a call; the page as text. Raises Refused, OutOfTime or Lost."""
        if what["do"] == "open":
            self._navigate(what["target"], deadline)
        elif what["do"] != "read" and (said := self._run(CLICK if what["do"] == "click" else TYPE, deadline, what)):
            raise Refused(said)
        self._settle(deadline)
        return self._run(READ, deadline, what)

    def _navigate(self, page: str, deadline: float) -> None:
        url = f"http://{SITE}/{page.removeprefix(f'http://{SITE}').lstrip('/')}"
        if not os.path.isfile(find_file(url)):
            raise Refused(f"no page {page!r}")
        self._loading, self._refused_at = True, float("inf")
        self._ask("Page.navigate", deadline, url=url)

    def _run(self, code: str, deadline: float, given: Frame) -> str:
        """Run JavaScript among the helpers in an isolated world of the page."""
        world = self._ask("Page.createIsolatedWorld", deadline, frameId=self._frame, worldName="asyncrl")
        arguments = f"const target = {json.dumps(given['target'])}, value = {json.dumps(given['text'])};"
        expression = f"(() => {{ {arguments} {HELPERS} {code} }})()"
        done = self._ask(
            "Runtime.evaluate",
            deadline,
            expression=expression,
            contextId=world["executionContextId"],
            returnByValue=True,
        )
        if "exceptionDetails" in done:
            raise Refused(done["exceptionDetails"].get("exception", {}).get("description", "the page cannot be read"))
        return str(done["result"].get("value", ""))

    def _settle(self, deadline: float) -> None:
        """Wait until a requested page is there, and its scripts have nothing more to load."""
        busy = float("inf")
        while time.monotonic() < min(deadline, busy):
            self._loading = self._loading and time.monotonic() < self._refused_at
            if not self._loading:
                busy = min(busy, time.monotonic() + BUSY_S)
            if self._take(QUIET_S) is None and not self._loading:
                return
        if time.monotonic() >= deadline:
            raise OutOfTime

    def _ask(self, method: str, deadline: float, **given: Any) -> Frame:
        """The answer to a command. Raises Lost if it is an error: for example the page crashed."""
        number = self._send(method, given)
        while time.monotonic() < deadline:
            message = self._take(min(1.0, max(0.0, deadline - time.monotonic())))
            if message is not None and message.get("id") == number:
                if "error" in message:
                    raise Lost(f"{method}: {message['error'].get('message')}")
                result: Frame = message["result"]
                return result
        raise OutOfTime

    def _send(self, method: str, given: Frame) -> int:
        self._number += 1
        session = {"sessionId": self._session} if self._session else {}
        data = json.dumps({"id": self._number, "method": method, "params": given, **session}).encode() + b"\0"
        view = memoryview(data)
        while view:
            view = view[os.write(self._there, view) :]
        return self._number

    def _take(self, wait_s: float) -> Frame | None:
        """The next message within this time. Events are answered here."""
        end = time.monotonic() + wait_s
        while b"\0" not in self._data:
            left = end - time.monotonic()
            if left <= 0 or not select.select([self._here], [], [], left)[0]:
                return None
            part = os.read(self._here, 1 << 20)
            if not part:
                raise Lost("it ended")
            self._data += part
        line, _, self._data = self._data.partition(b"\0")
        message: Frame = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, event: str, given: Frame) -> None:
        if event == "Fetch.requestPaused":
            self._serve(given)
        elif event == "Page.javascriptDialogOpening":
            self._send("Page.handleJavaScriptDialog", {"accept": True})
        elif event in STARTS and given["frameId"] == self._frame:
            self._loading, self._refused_at = True, time.monotonic() + BUSY_S
        elif event == "Page.frameStartedLoading" and given["frameId"] == self._frame:
            self._refused_at = float("inf")
        elif event in ENDS and given.get("frameId", self._frame) == self._frame:
            self._loading = False
        elif event in ("Inspector.targetCrashed", "Target.targetCrashed"):
            raise Lost("its page crashed")

    def _serve(self, given: Frame) -> None:
        """Answer a request of the browser from the folder, or refuse it."""
        place = find_file(given["request"]["url"])
        if not place:
            self._send("Fetch.failRequest", {"requestId": given["requestId"], "errorReason": "BlockedByClient"})
            return
        body, code = b"no such page", 404
        if os.path.isfile(place):
            with open(place, "rb") as stream:
                body, code = stream.read(), 200
        kind = mimetypes.guess_type(place)[0] or "text/plain"
        kind += "; charset=utf-8" if kind.startswith("text/") else ""
        headers = [{"name": "Content-Type", "value": kind if code == 200 else "text/plain"}]
        answer = {"requestId": given["requestId"], "responseCode": code, "responseHeaders": headers}
        self._send("Fetch.fulfillRequest", {**answer, "body": base64.b64encode(body).decode()})


def find_file(url: str) -> str:
    """The file behind an address of the site, that may not exist; empty for an address or a file outside of it."""
    parts = urlsplit(url)
    if (parts.scheme, parts.netloc) != ("http", SITE):
        return ""
    place = os.path.realpath(os.path.join(PAGES, unquote(parts.path).lstrip("/")))
    place = os.path.realpath(os.path.join(place, "index.html")) if os.path.isdir(place) else place
    return place if place.startswith(PAGES + os.sep) else ""


def _pipe() -> tuple[int, int]:
    """A pipe whose ends leave 3 and 4 free."""
    pair = os.pipe()
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pair)
    for end in pair:
        os.close(end)
    return high[0], high[1]


def set_limits(file_bytes: int) -> None:
    """Limits of each process of the browser. It reserves far more addresses than memory, so that its parent alone
    bounds its memory."""
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, MAX_FILES),
        (resource.RLIMIT_NPROC, MAX_THREADS),
    ):
        resource.setrlimit(kind, (value, value))


def main() -> None:
    """Serve the calls of a sample until the parent goes away."""
    settings: Frame = json.loads(sys.argv[1])
    become_nobody(settings["uid"], settings["gid"])
    folder = os.path.join(settings["folder"], "work")
    os.mkdir(folder, 0o700)
    set_limits(settings["file_bytes"])
    try:
        browser = Browser(settings["browser"], folder)
    except (OutOfTime, Lost, OSError) as error:
        sys.exit(f"the browser does not start: {error}")
    send({"ready": True})
    while True:
        job = receive()
        began = time.monotonic()
        result: Frame = {"status": "finished", "exit_code": 0, "stdout": "", "stderr": "", "files": {}}
        try:
            os.kill(-1, signal.SIGCONT)
            result["stdout"] = browser.do(json.loads(job["code"]), began + job["timeout_s"])[: job["output_bytes"]]
        except Refused as error:
            result |= {"exit_code": 1, "stderr": str(error)[: job["output_bytes"]]}
        except (OutOfTime, Lost, OSError) as error:
            status = "timeout" if isinstance(error, OutOfTime) else "killed"
            result |= {"status": status, "exit_code": 1, "stderr": str(error), "last": True}
        with contextlib.suppress(ProcessLookupError):  # it is gone
            os.kill(-1, signal.SIGSTOP)
        send({**result, "wall_s": time.monotonic() - began})
        if result.get("last"):
            return  # and with it, as pid 1, the browser


if __name__ == "__main__":
    main()
