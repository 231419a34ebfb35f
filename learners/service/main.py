"""The process of a training service: the HTTP front, and the trainer as its child.

Guarantees:
1. one service per run folder; the trainer dies with it, and is started again when it ends alone;
2. the API key is made once, in a file that only its owner can read;
3. SIGTERM and SIGINT end it; requests under way are in the log, and the next start goes on with them.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.config import Config, load
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.launcher.parent_guard import guard_command
from asyncrl.net.http_access import Access, read_secret
from asyncrl.runtime.child_environment import child_environment
from asyncrl.runtime.run_dir import RunDir, write_atomic
from learners.service.front import Front
from learners.service.messages import ServicePaths

READY = "ready"  # first line of the trainer
MOST_STARTS = 3  # starts in a row that end before it is ready
PAUSE_S = 0.5  # before a start again
END_S = 10.0  # for the request under way, at the end


class TrainerChild:
    def __init__(self, paths: ServicePaths, answered: Callable[[str | None], None]) -> None:
        self._paths = paths
        self._answered = answered
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    def wake(self) -> None:
        """Tell the trainer that there is a request. It also looks by itself."""
        if self._process is not None and self._process.stdin is not None and self._process.returncode is None:
            self._process.stdin.write(b"\n")

    async def run(self) -> None:
        """Keep it running. Raises the error of a trainer that cannot start."""
        failures = 0
        while not self._stopping:
            is_ready = await self._run_once()
            failures = 0 if is_ready else failures + 1
            self._answered(None)
            if failures == MOST_STARTS and not self._stopping:
                what = f"it ended {failures} times before it was ready; see {self._paths.trainer_log}"
                raise AsyncRLError("internal", what, where="trainer")
            await asyncio.sleep(0.0 if self._stopping else PAUSE_S)

    async def _run_once(self) -> bool:
        words = guard_command([sys.executable, "-m", "learners.service.trainer", str(self._paths.config)])
        with self._paths.trainer_log.open("ab") as log:
            self._process = process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                env=child_environment(more={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
            )
        assert process.stdout is not None
        is_ready = False
        async for line in process.stdout:  # bounded: the life of the trainer
            word = line.decode().strip()
            if word == READY:
                is_ready = True
                print(f"trainer: ready (pid {process.pid})", flush=True)
            else:
                self._answered(word)
        code = await process.wait()  # bounded: its output has ended
        if not self._stopping:
            print(f"trainer: ended with {code}; starting it again", flush=True)
        return is_ready

    async def stop(self) -> None:
        """End it after the request under way, or after `END_S`."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        if process.stdin is not None:
            process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_S)
        except TimeoutError:
            process.kill()  # the log and the states are on disk


def read_key(path: Path) -> str:
    """The key of this service; it is made if there is none. The client demands its prefix."""
    if not path.exists():
        write_atomic(path, f"tml-{secrets.token_hex(24)}\n".encode())
        path.chmod(0o600)
    return read_secret(str(path), where="service key")


async def serve(config: Config, paths: ServicePaths) -> None:
    from aiohttp import web

    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    front = Front(model=config.model.path, paths=paths, key=read_key(paths.key))
    child = TrainerChild(paths, front.answered)
    front.wake_trainer = child.wake
    runner: Any = web.AppRunner(front.application(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    host, port = config.service.host, config.service.port
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError("net.port_in_use", f"{host}:{port}: {error.strerror}", where="service.port") from None
    url = f"http://{Access(host).join_port(port)}"
    print(f"training service of {config.model.path} at {url}", flush=True)
    print(f"  export TINKER_BASE_URL={url} TINKER_API_KEY=$(cat {paths.key.absolute()})", flush=True)
    running, stopped = asyncio.create_task(child.run()), asyncio.create_task(stop.wait())  # bounded: as the next line
    await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)  # bounded: the life of the service
    await child.stop()
    await runner.cleanup()
    stopped.cancel()
    await running  # bounded: the trainer has ended
    print("training service: ended; the same command goes on", flush=True)


def main(config_file: str) -> int:
    os.umask(0o077)
    try:
        config = load(Path(config_file))
        paths = ServicePaths(config.run_dir)
        with RunDir(config.run_dir).lock("service"):
            asyncio.run(serve(config, paths))
    except AsyncRLError as error:
        print(error.render(), file=sys.stderr, flush=True)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
