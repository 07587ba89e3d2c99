"""Runs the tests of one collection in forked worker processes: ``pytest --forks N``.

Workers of pytest-xdist each collect all tests again, 12 s of processor time per worker, and 32 s in a fresh clone,
where each of them also compiles all modules. Here one process collects, and forks workers that have everything
imported. It sends them units of tests (``tests/lanes.py``), receives a message with the reports of each test, and
passes these to pytest's plugins as if the tests had run in it.

While cores are idle, up to :data:`FURTHER` more workers are started, one after the other, because tests of some
phases of a run mostly wait.

A worker asks for its next unit before the last test of the current one, because pytest keeps fixtures that the
next test shares. If a worker dies, the test that ran fails, and a new worker takes the rest of its unit. A worker
whose test exceeds its timeout by :data:`SILENT_S` is killed: pytest-timeout's signal does not end a test that
waits outside the interpreter. A run that is terminated reports its failures, and which tests ran.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import signal
import socket
import sys
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from tests.lanes import order, prefers_waiting, unit_of

ROOT = Path(__file__).parents[1]
#: After an interruption a worker has this time to tear its fixtures down; after SIGTERM, whose sender waits, less.
LEAVE_S = 60.0
TERMINATED_LEAVE_S = 5.0
#: A test may exceed its timeout by this, for its stacks to be written and its fixtures to be torn down.
SILENT_S = 60.0
#: For tests without a timeout.
UNLIMITED_S = 86_400.0
#: How many workers can be added, and how idle the cores must have been for so long.
FURTHER = 2
IDLE_S = 10.0
IDLE_SHARE = 0.1


@dataclass(eq=False)
class Worker:
    """A forked process, as the process that collected sees it.

    Attributes:
        number: from 0; it decides which kind of tests the worker takes first.
        left: indexes of the assigned tests that have not ended; the first one runs.
        since: when the first one began, as :func:`time.monotonic` has it.
        overdue: it was told to end, because its test ran for too long.
    """

    number: int
    pid: int
    pidfd: int
    connection: Connection
    left: deque[int] = field(default_factory=deque)
    since: float = field(default_factory=time.monotonic)
    overdue: bool = False

    def close(self) -> int:
        """Close its descriptors; return its status once it has ended."""
        self.connection.close()
        _, status = os.waitpid(self.pid, 0)
        os.close(self.pidfd)
        return status


class Units:
    """The units of tests that no worker has yet.

    Args:
        names: by the index of each test, the name of its unit.
        node_ids: by the index of each test.
    """

    def __init__(self, names: Sequence[str], node_ids: Sequence[str]) -> None:
        units: dict[str, list[int]] = {}
        for index, name in enumerate(names):
            units.setdefault(name, []).append(index)
        self._node_ids = node_ids
        # Among equals the longest begin first.
        self._units = sorted(units.values(), key=lambda unit: -len(unit))

    def __len__(self) -> int:
        return len(self._units)

    def take(self, worker: int) -> list[int]:
        """Return the unit that a worker runs next; empty if there is none."""
        if not self._units:
            return []
        waits = prefers_waiting(worker)
        unit = min(self._units, key=lambda unit: order(self._node_ids[unit[0]], waits=waits))
        self._units.remove(unit)
        return unit

    def give_back(self, unit: Iterable[int]) -> None:
        """Return the rest of a unit, whose worker died."""
        if rest := list(unit):
            self._units.insert(0, rest)


class IdleCores:
    """Measures the share of time in which this machine's cores were idle."""

    def __init__(self, stat: Path = Path("/proc/stat")) -> None:
        self._stat = stat
        self._idle, self._all = self._read()

    def share(self) -> float:
        """Return the share since the last call, from 0 to 1."""
        idle, every = self._read()
        gone, self._idle, self._all = (idle - self._idle, every - self._all), idle, every
        return gone[0] / gone[1] if gone[1] else 0.0

    def _read(self) -> tuple[int, int]:
        # proc(5): user, nice, system, idle, iowait, irq, softirq, steal; guests are part of user
        times = [int(each) for each in self._stat.read_text().split("\n", 1)[0].split()[1:9]]
        return times[3] + times[4], sum(times)


class Pool:
    """The workers of a session, and what is left for them to do."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._cores = IdleCores()
        self._measured_s = time.monotonic()
        self._units = Units([unit_of(grouped(item)) for item in session.items], [i.nodeid for i in session.items])
        self._workers: list[Worker] = []
        self._leave_s = LEAVE_S

    def run(self, count: int) -> None:
        """Run all tests.

        Raises:
            pytest.Session.Failed, pytest.Session.Interrupted: as without workers, and if SIGTERM arrives.
        """
        before = signal.signal(signal.SIGTERM, self._terminated)
        try:
            self._run(count)
        finally:
            signal.signal(signal.SIGTERM, before)

    def _run(self, count: int) -> None:
        # Tests that start commands have been collected if this module is imported.
        most = count + FURTHER
        servers = commands.start(most) if (commands := sys.modules.get("tests.commands")) else []
        try:
            for number in range(count):
                self._start(number, servers)
            for server in servers[:count]:
                server.close()  # a forking process ends with its worker
            started = count
            while self._workers:
                if started < most and self._units and self._is_idle():
                    self._start(started, servers)
                    started += 1
                sources = [source for worker in self._workers for source in (worker.connection, worker.pidfd)]
                ready = wait(sources, min(self._patience(), IDLE_S))
                for worker in list(self._workers):
                    if worker.connection in ready or worker.pidfd in ready:
                        self._receive(worker)
                        self._stop_if_asked()
                    elif not self._patience(worker):
                        # At SIGABRT, pytest's faulthandler writes the stacks of a process that still can.
                        os.kill(worker.pid, signal.SIGKILL if worker.overdue else signal.SIGABRT)
                        worker.overdue, worker.since = True, time.monotonic()
        finally:
            for server in servers[count:]:
                server.close()
            self._end()

    def _is_idle(self) -> bool:
        """Return whether the cores were idle for a part of the last :data:`IDLE_S`."""
        now_s = time.monotonic()
        if now_s < self._measured_s + IDLE_S:
            return False
        self._measured_s = now_s
        return self._cores.share() > IDLE_SHARE

    def _patience(self, *workers: Worker) -> float:
        """Return in how many seconds the first of some workers, or of all, is to be killed."""
        now = time.monotonic()
        return max(0.0, min(each.since + self._limit(each) for each in workers or self._workers) - now)

    def _limit(self, worker: Worker) -> float:
        """Return how long a worker may send nothing, in seconds."""
        if worker.overdue or not worker.left:
            return SILENT_S
        config = self._session.config
        marker = self._session.items[worker.left[0]].get_closest_marker("timeout")
        limit = float((marker.args[0] if marker else config.getoption("timeout") or config.getini("timeout")) or 0)
        return limit + SILENT_S if limit else UNLIMITED_S

    def _terminated(self, number: int, frame: object) -> NoReturn:
        now = time.monotonic()
        items = self._session.items
        tests = [
            f"\n  {items[each.left[0]].nodeid} for {now - each.since:.0f} s" for each in self._workers if each.left
        ]
        self._leave_s = TERMINATED_LEAVE_S
        raise self._session.Interrupted(f"terminated; these tests ran:{''.join(tests)}")

    def _start(self, number: int, servers: Sequence[socket.socket] = ()) -> None:
        ours, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        if not (pid := os.fork()):
            ours.close()
            for other in self._workers:
                other.connection.close()
            for place, server in enumerate(servers):
                if place == number:
                    sys.modules["tests.commands"].use(server)
                else:
                    server.close()
            _become_worker(self._session, theirs)
        theirs.close()
        worker = Worker(number, pid, os.pidfd_open(pid), ours)
        self._workers.append(worker)
        self._assign(worker)

    def _assign(self, worker: Worker) -> None:
        unit = self._units.take(worker.number)
        try:
            worker.connection.send(unit)
        except ConnectionError:  # it died, which its descriptor will show
            self._units.give_back(unit)
        else:
            worker.left.extend(unit)

    def _receive(self, worker: Worker) -> None:
        """Take a message, or what is left of a worker without a message: its process has ended."""
        try:
            message = worker.connection.recv() if worker.connection.poll() else None
        except (EOFError, ConnectionError):
            message = None
        if message is None:
            self._ended(worker)
            return
        kind, content = message
        hook = self._session.config.hook
        if kind == "next":
            self._assign(worker)
        elif kind == "warning":
            hook.pytest_warning_recorded.call_historic(kwargs=content)
        elif kind == "stopped":
            self._session.shouldstop = content
        else:
            index = worker.left.popleft()
            worker.since = time.monotonic()
            for data in content:
                report = hook.pytest_report_from_serializable(config=self._session.config, data=data)
                hook.pytest_runtest_logreport(report=report)
            item = self._session.items[index]
            hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _ended(self, worker: Worker) -> None:
        """A worker's process has ended. If tests are left, it died."""
        self._workers.remove(worker)
        status = worker.close()
        if not worker.left:
            return
        index = worker.left.popleft()
        item = self._session.items[index]
        code = os.waitstatus_to_exitcode(status)
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"the worker process ended with status {code} while it ran this test",
            when="call",
        )
        self._session.config.hook.pytest_runtest_logreport(report=report)
        self._units.give_back(worker.left)
        self._start(worker.number)

    def _stop_if_asked(self) -> None:
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _end(self) -> None:
        """Interrupt the workers that are left, and wait until they have torn their fixtures down."""
        for worker in self._workers:
            os.kill(worker.pid, signal.SIGINT)
        for worker in self._workers:
            end = time.monotonic() + self._leave_s
            try:
                while worker.connection.poll(max(0.0, end - time.monotonic())):
                    worker.connection.recv()
            except (EOFError, ConnectionError):
                pass
            else:
                os.kill(worker.pid, signal.SIGKILL)
            worker.close()


def grouped(item: pytest.Item) -> str:
    """Return a test's node ID, with ``@`` and the name of its ``group`` if it has one."""
    group = item.get_closest_marker("group")
    return f"{item.nodeid}@{group.args[0]}" if group else item.nodeid


@contextlib.contextmanager
def compiled_ahead(files: Sequence[Path]) -> Iterator[None]:
    """While entered, a process imports test files from the last to the first, without those whose bytecode is
    stored. In a fresh clone that halves the time of collection, two thirds of which compile modules.
    """
    if sys.dont_write_bytecode or not files or _is_compiled(files[-1]):
        yield
        return
    sys.stdout.flush()
    sys.stderr.flush()
    if not (pid := os.fork()):
        _import_backwards(files)
    yield
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def _is_compiled(file: Path) -> bool:
    return any((file.parent / "__pycache__").glob(f"{file.stem}.*-pytest-*.pyc"))


def _import_backwards(files: Sequence[Path]) -> NoReturn:
    """Import the files that have no bytecode yet, and end the process.

    Files with bytecode do not show that all files before them have it: a file can be imported by another one.
    """
    try:
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        for file in reversed(files):
            if _is_compiled(file):
                continue
            with contextlib.suppress(BaseException):  # collection reports it
                importlib.import_module(".".join(file.relative_to(ROOT).with_suffix("").parts))
    finally:
        os._exit(0)


class Sender:
    """A worker's plugin: it sends what terminal reporters and others of the first process need."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection
        self._reports: list[dict[str, Any]] = []

    def send(self, kind: str, content: object = None) -> None:
        self._connection.send((kind, content))

    def flush(self) -> None:
        """Send the reports of a test that has ended."""
        self.send("reports", self._reports)
        self._reports = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._reports.append(data)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: object
    ) -> None:
        text = f"{warning_message.category.__name__}: {warning_message.message}"
        plain = warnings.WarningMessage(
            UserWarning(text), UserWarning, warning_message.filename, warning_message.lineno
        )
        self.send("warning", {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location})


def _become_worker(session: pytest.Session, connection: Connection) -> NoReturn:
    """Run units of tests until there are no more, and end the process."""
    status = 1
    try:
        random.seed()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        plugins = session.config.pluginmanager
        reporter = plugins.unregister(name="terminalreporter")
        # pytest-timeout writes the stacks of a test's threads by it.
        plugins.register(SimpleNamespace(_tw=getattr(reporter, "_tw", None)), "terminalreporter")
        # Its files are shared with the other workers.
        if (capture := plugins.getplugin("capturemanager")) is not None:
            capture.stop_global_capturing()
            capture.start_global_capturing()
            capture.suspend_global_capture()
        sender = Sender(session.config, connection)
        plugins.register(sender)
        _work(session, connection, sender)
        status = 0
    except (BrokenPipeError, EOFError):
        pass
    except BaseException as error:  # noqa: BLE001  the process ends here
        if not _is_interrupt(error):
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _is_interrupt(error: BaseException | None) -> bool:
    """Return whether an interrupt ended the test; plugins can raise other errors while it passes through them."""
    return error is not None and (isinstance(error, KeyboardInterrupt) or _is_interrupt(error.__context__))


def _work(session: pytest.Session, connection: Connection, sender: Sender) -> None:
    items = session.items
    unit = connection.recv()
    try:
        while unit:
            following: list[int] = []
            for place, index in enumerate(unit, 1):
                if place < len(unit):
                    after = unit[place]
                else:
                    sender.send("next")
                    following = connection.recv()
                    after = following[0] if following else None
                nextitem = None if after is None else items[after]
                items[index].config.hook.pytest_runtest_protocol(item=items[index], nextitem=nextitem)
                sender.flush()
            unit = following
    except pytest.exit.Exception as stopped:
        sender.send("stopped", str(stopped))
        raise
    finally:
        session._setupstate.teardown_exact(None)
