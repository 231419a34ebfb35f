"""Code of others that may block, beside the event loop: a thread for each call.

Guarantees:
1. a call that never returns costs its own thread alone: others do not wait for it, as they would for a place in a pool;
2. the process ends without it: the thread is a daemon, and the end of `asyncio.run` waits for none of them;
3. whoever is cancelled while waiting is free at once; the call goes on, and its result is dropped;
4. `sys.exit` in a call is an error of that call, and not the end of the process.
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


def said(error: BaseException) -> RuntimeError:
    """An ordinary error in place of one that means something to an event loop."""
    return RuntimeError(f"{type(error).__name__}: {error}")


async def beside(function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a plain function. Raises what it raises."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def told(settle: Callable[[Any], None], value: Any) -> None:
        if not result.done():
            settle(value)

    def run() -> None:
        try:
            settle, value = result.set_result, function(*args, **kwargs)
        except Exception as error:  # whatever it raises is the caller's
            stops = isinstance(error, StopIteration)  # a future cannot hold one
            settle, value = result.set_exception, said(error) if stops else error  # type: ignore[assignment]
        except BaseException as error:  # such as `sys.exit`, which would end the event loop
            settle, value = result.set_exception, said(error)  # type: ignore[assignment]
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            loop.call_soon_threadsafe(functools.partial(told, settle, value))

    threading.Thread(target=run, name=f"beside-{getattr(function, '__name__', 'call')}", daemon=True).start()
    return await result  # bounded: by the caller
