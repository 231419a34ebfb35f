"""Runs user code that may block: a thread for each call.

Guarantees:
1. a call that never returns blocks only its own thread, unlike a place in a pool;
2. the process ends without it: the thread is a daemon, and the end of `asyncio.run` does not wait for it;
3. a cancelled caller returns at once; the call goes on, and its result is dropped;
4. `sys.exit` in a call is an error of that call, not the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


def wrap_error(error: BaseException) -> RuntimeError:
    """An ordinary error instead of one with a meaning for the event loop."""
    return RuntimeError(f"{type(error).__name__}: {error}")


async def run_blocking(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a plain function, or its error."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def settle_future(settle: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            settle(value)

    def run() -> None:
        try:
            settle, value = result.set_result, function(*args, **kwargs)
        except Exception as error:  # every error goes to the caller
            stops = isinstance(error, StopIteration)  # a future cannot hold one
            settle, value = result.set_exception, wrap_error(error) if stops else error  # type: ignore[assignment]
        except BaseException as error:  # for example `sys.exit`, which would end the event loop
            settle, value = result.set_exception, wrap_error(error)  # type: ignore[assignment]
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(functools.partial(settle_future, settle, value))

    threading.Thread(target=run, name=f"run_blocking-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return await result  # bounded: by the caller
