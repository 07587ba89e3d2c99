"""One thread for all calls that read or change the kernel's rules of pods, so that these calls do not overlap."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class KernelThread:
    """Runs blocking functions, one after the other. The owner closes it."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="pods")

    async def run(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run ``work`` in the thread; returns, or raises CancelledError, only once it has finished.

        Callers close namespaces after this returns. If it returned early, the thread would use a descriptor that
        is closed, or reused for another file.
        """
        working = asyncio.get_running_loop().run_in_executor(self._executor, lambda: work(*args, **kwargs))
        cancelled: asyncio.CancelledError | None = None
        while not working.done():
            try:
                await asyncio.wait([working])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            working.exception()  # retrieved, so that asyncio does not log it as unhandled
            raise cancelled
        return working.result()

    def close(self) -> None:
        """Wait for the running function, and end the thread; idempotent."""
        self._executor.shutdown(wait=True, cancel_futures=True)
