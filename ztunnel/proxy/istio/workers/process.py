"""Controls one worker process from the main process: starts it, sends requests, reads its output, ends it."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from asyncio.subprocess import DEVNULL, Process, create_subprocess_exec
from collections.abc import Mapping, Sequence
from typing import Final

from ztunnel.proxy.istio.accounting.logs import LogStream
from ztunnel.proxy.istio.accounting.metrics import Counts
from ztunnel.proxy.istio.workers.channel import ChannelClosed, IpcChannel, RequestBody
from ztunnel.proxy.istio.workers.messages import Turn
from ztunnel.proxy.otlp.settings import SECRETS as OTLP_SECRETS
from ztunnel.runtime.log_pressure import LogPressure
from ztunnel.runtime.unused_imports import WITHOUT_SSL, left_out

log = logging.getLogger(__name__)

#: The time limit for every request except draining and hand-over. Starting a pod takes a millisecond.
ANSWER_S: Final = 10.0
#: How long to wait for a worker to end by itself after its channel has closed. Then it is killed.
_END_S: Final = 3.0
_READ_BYTES: Final = 64 * 1024
#: The longest line of a worker's output. A longer one is cut, so that a compromised worker that never ends its
#: line does not fill the main process's memory.
_LINE_BYTES: Final = 1024 * 1024
#: While the main process's log is behind, a worker's output stays in its pipe (64 KiB). The log is checked at this
#: interval.
_PRESSURE_S: Final = 0.05
#: The interval of a worker's liveness checks.
_BEAT_S: Final = 5.0
#: The time limit for the answer to a liveness check. Ending a worker ends its connections, so this limit is longer
#: than any pause of the machine that connections survive.
_HUNG_S: Final = 30.0


class OutputReader:
    """Copies a worker's output to the main process's log, in whole lines.

    Args:
        descriptor: the pipe's descriptor. This object becomes the owner.
        logs: the main process's log.
        pressure: pauses reading while this log is behind, so that the worker notices the delay, too. ``None``:
            never pause.
    """

    def __init__(self, descriptor: int, logs: LogStream, pressure: LogPressure | None = None) -> None:
        self._descriptor = descriptor
        self._logs = logs
        self._pressure = pressure
        self._begun = b""
        self.ended = asyncio.Event()
        os.set_blocking(descriptor, False)
        self._start()

    def _start(self) -> None:
        if not self.ended.is_set():
            asyncio.get_running_loop().add_reader(self._descriptor, self._readable)

    def _readable(self) -> None:
        if self._pressure is not None and not self._pressure.admits():
            loop = asyncio.get_running_loop()
            loop.remove_reader(self._descriptor)
            loop.call_later(_PRESSURE_S, self._start)
            return
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        complete, newline, rest = data.rpartition(b"\n")
        if newline:
            self._logs.queue.pass_on(self._begun + complete + newline)
            self._begun = rest
        else:
            self._begun += rest
        if len(self._begun) >= _LINE_BYTES:
            self._logs.queue.pass_on(self._begun + b"\n")
            self._begun = b""
        if not data:
            self.close()

    def close(self) -> None:
        """Stop reading; idempotent."""
        if self.ended.is_set():
            return
        self.ended.set()
        if self._begun:  # the worker died in the middle of a line
            self._logs.queue.pass_on(self._begun + b"\n")
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)


class WorkerProcess:
    """One worker, from its start to its end.

    Attributes:
        notified: whether the worker has been sent the snapshot, so that it must be sent every later change.
        synced: whether the worker has applied the snapshot and can receive pods.
        serves: whether the worker has received all pods.
        counts: the worker's latest reported counters.
    """

    def __init__(self, index: int, channel: IpcChannel, process: Process, output: OutputReader) -> None:
        self.index = index
        self.channel = channel
        self.process = process
        self._output = output
        self.notified = False
        self.synced = False
        self.serves = False
        self.counts: Sequence[Counts] = ()

    async def request(
        self, body: RequestBody, descriptors: Sequence[int] = (), within_s: float | None = ANSWER_S
    ) -> None:
        """Send the worker a request and wait for its answer. ``None`` sets no time limit.

        Raises:
            Refused: the worker cannot carry out the request.
            ChannelClosed: the worker has ended, or was killed because it did not answer in time.
        """
        try:
            async with asyncio.timeout(within_s):
                await self.channel.request(body, descriptors)
        except TimeoutError:
            log.error("worker does not answer, ending it worker=%d request=%s", self.index, type(body).__name__)
            self.kill()
            raise ChannelClosed from None
        except ChannelClosed:
            self.synced = False
            raise

    async def watch(self, beat_s: float = _BEAT_S, hung_s: float = _HUNG_S) -> None:
        """Ping the worker's event loop repeatedly. Return when the worker has ended, or was killed because it
        hung.
        """
        try:
            while True:
                await asyncio.sleep(beat_s)
                await self.request(Turn(), within_s=hung_s)
        except ChannelClosed:
            return

    def kill(self) -> None:
        """Kill the worker now; idempotent."""
        self.synced = False
        if self.process.returncode is None:
            self.process.kill()
        self.channel.disconnect()

    async def ended(self) -> None:
        """Wait until the worker has ended, which it does when its channel closes, and log how it ended."""
        process = self.process
        try:
            async with asyncio.timeout(_END_S):
                status = await process.wait()
        except TimeoutError:
            process.kill()
            status = await process.wait()
        try:
            async with asyncio.timeout(_END_S):
                await self._output.ended.wait()
        except TimeoutError:
            self._output.close()
        if status:
            how = f"signal {_signal_name(-status)}" if status < 0 else f"status {status}"
            log.error("worker ended worker=%d pid=%d by=%r", self.index, process.pid, how)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # most real-time signals have no name
        return str(number)


async def spawn(
    logs: LogStream, pressure: LogPressure | None = None
) -> tuple[socket.socket, Process, OutputReader]:
    """Start a worker process. Return our end of the channel, the process, and the reader of its output.

    Args:
        logs, pressure: see :class:`OutputReader`.

    Raises:
        OSError: the worker process cannot be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        process = await create_subprocess_exec(
            *(sys.executable, "-m", "ztunnel", "worker", str(theirs.fileno())),
            *((WITHOUT_SSL,) if left_out() else ()),
            stdin=DEVNULL,
            stdout=writing,
            stderr=writing,
            pass_fds=(theirs.fileno(),),
            env=without_credentials(os.environ),
        )
    except BaseException:
        ours.close()
        os.close(reading)
        raise
    finally:
        theirs.close()
        os.close(writing)
    ours.setblocking(False)
    return ours, process, OutputReader(reading, logs, pressure)


def without_credentials(env: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the environment without variables that can hold credentials. Workers do not need these,
    because they get their configuration over the channel.
    """
    return {
        name: value
        for name, value in env.items()
        if name != "AUTH_TOKEN" and not name.startswith(("XDS_HEADER_", "CA_HEADER_")) and name not in OTLP_SECRETS
    }
