"""Calls the hooks of all addons of this process in order. Both front ends use this module.

A front end without addons creates no :class:`AddonHost`. Its connections then only compare a field with ``None``.
Addon state is per process: with several workers, each worker has its own addon objects.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from hbone.aio.relay import ByteCounts
from ztunnel.addons import Cut, Delay, Facts, MeshSummary, Record, Verdict
from ztunnel.proxy.addons.budget import HookCounts
from ztunnel.proxy.addons.decide import NOTHING, Labels, combined, cut_reason
from ztunnel.proxy.addons.interrupt import CurrentCall
from ztunnel.proxy.addons.load import LoadedAddon
from ztunnel.proxy.addons.report import AddonFamily, AddonReport, AddonState
from ztunnel.proxy.addons.running import Hook, RunningAddon
from ztunnel.proxy.dataplane.life_table import State
from ztunnel.proxy.dataplane.live_table import Life

log = logging.getLogger(__name__)

#: Seconds between two checks of the byte count of a connection that has a byte limit.
_LOOK_S: Final = 0.01
#: The shortest time between two calls of the hook ``mesh_changed``, in seconds.
_MESH_EVERY_S: Final = 1.0


#: The addons that implement one hook, each with its method for this hook.
Hooks = tuple[tuple[RunningAddon, Hook], ...]


class Asked:
    """The state of one connection's addon calls: its facts and the verdicts so far.

    Attributes:
        facts: the latest facts about the connection. The front end replaces them when more is known.
        outcome: the verdicts so far.
        is_open: whether ``opened`` was called.
        waited: whether an addon has made the connection wait, so that its facts are possibly outdated.
        undecided: the hooks that :meth:`AddonHost.ask_now` has left to :meth:`AddonHost.decide_rest`.
    """

    __slots__ = ("_cut", "_host", "facts", "is_open", "outcome", "undecided", "waited")

    def __init__(self, host: AddonHost, facts: Facts) -> None:
        self._host = host
        self.facts = facts
        self.outcome = NOTHING
        self.is_open = self.waited = False
        self.undecided: tuple[Hooks, int, Verdict | None] | None = None
        self._cut: _Cutting | None = None

    @property
    def addon(self) -> str:
        """The addons that returned a verdict, joined by commas."""
        names = self.outcome.addons
        return ",".join(names) if names else ""

    @property
    def prefer(self) -> tuple[Labels, ...]:
        """The preferred endpoint labels."""
        return self.outcome.prefer

    def opened(self, life: Life, counts: ByteCounts) -> None:
        """Inform the addons that the connection's relay runs, and start to enforce the limits of a ``Cut``.

        Args:
            life: the connection's table entry, which is ended when a limit is reached.
            counts: the bytes of its relay.
        """
        self.is_open = True
        outcome = self.outcome
        if outcome.cut is not None:
            self._cut = _Cutting(life, counts, outcome.cut, cut_reason(outcome.addons, outcome.cut))
        self._host.opened(self.facts)

    def ended(self, record: Record) -> None:
        """Inform the addons that the connection has ended, even if it was never opened."""
        if self._cut is not None:
            self._cut.stop()
        self._host.ended(record, was_open=self.is_open)


class _Cutting:
    """Ends a connection when it reaches its time or byte limit."""

    __slots__ = ("_counts", "_life", "_limit", "_reason", "_timers")

    def __init__(self, life: Life, counts: ByteCounts, limits: Cut, reason: str) -> None:
        self._life = life
        self._counts = counts
        self._limit = limits.after_bytes
        self._reason = reason
        loop = asyncio.get_running_loop()
        self._timers: list[asyncio.TimerHandle] = []
        if limits.after_s is not None:
            self._timers.append(loop.call_later(limits.after_s, life.end, reason))
        if self._limit is not None:
            self._timers.append(loop.call_later(_LOOK_S, self._look))

    def _look(self) -> None:
        counts, limit = self._counts, self._limit
        assert limit is not None
        if counts.sent + counts.received >= limit:
            self._life.end(self._reason)
            return
        self._timers[-1] = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()


class AddonHost:
    """The addons of one process.

    Args:
        loaded: the addons in calling order.

    Attributes:
        current: the hook that is running now, for the watchdog.
        problems: for each addon whose changed file could not be loaded, the reason, by addon name.
    """

    def __init__(self, loaded: Sequence[LoadedAddon]) -> None:
        self.current = CurrentCall()
        self.problems: dict[str, str] = {}
        self.addons: tuple[RunningAddon, ...] = tuple(RunningAddon(each, self.current) for each in loaded)
        self._numbers = itertools.count(1)
        self._mesh_timer: asyncio.TimerHandle | None = None
        self._mesh_called_s = -_MESH_EVERY_S
        for each in loaded:
            for warning in each.warnings:
                log.warning("%s", warning)
        self._index()

    def _index(self) -> None:
        #: For each hook, the addons that have it, in calling order.
        self.connecting = self._with("connecting")
        self.accepting = self._with("accepting")
        self._opened = self._with("opened")
        self._closed = self._with("closed")
        self._refused = self._with("refused")
        self._mesh = self._with("mesh_changed")
        #: The optional facts that at least one addon needs.
        self.needs = frozenset().union(*(each.loaded.needs for each in self.addons))

    def _with(self, name: str) -> Hooks:
        return tuple((each, hook) for each in self.addons if (hook := each.hooks.get(name)) is not None)

    def next_number(self) -> int:
        """Return the next connection's number, for :attr:`ztunnel.addons.Facts.connection`."""
        return next(self._numbers)

    # Decisions

    def ask_now(self, hooks: Hooks, asked: Asked) -> bool:
        """Call deciding hooks in order, up to the first hook that returns a verdict or is ``async def``.

        Args:
            hooks: :attr:`connecting` or :attr:`accepting`.
            asked: the connection.

        Returns:
            True if every hook was called and none returned a verdict. After False, call :meth:`decide_rest`.
        """
        facts = asked.facts
        for place, (addon, hook) in enumerate(hooks):
            verdict = None if hook.waits else addon.decide(hook, facts)
            if verdict is not None or hook.waits:
                asked.undecided = hooks, place, verdict
                return False
        return True

    async def decide(self, hooks: Hooks, life: Life, asked: Asked) -> None:
        """Call all deciding hooks, and wait for their answers and delays.

        Args:
            hooks: see :meth:`ask_now`.
            life: the connection's table entry. It is in :attr:`State.HELD` while this waits, and afterwards in its
                previous state.
            asked: the connection; its outcome is set.
        """
        if not self.ask_now(hooks, asked):
            await self.decide_rest(life, asked)

    async def decide_rest(self, life: Life, asked: Asked) -> None:
        """Call the hooks that :meth:`ask_now` has not called, and wait for their answers and all delays.

        Args:
            life: see :meth:`decide`.
            asked: the connection; its outcome is set.
        """
        if asked.undecided is None:
            return
        (hooks, place, verdict), asked.undecided = asked.undecided, None
        for addon, hook in hooks[place:]:
            if verdict is None:  # otherwise ask_now has already called this hook
                # The addon can have been replaced while the connection waited for an earlier hook.
                addon = addon.newest
                newest = addon.hooks.get(hook.name)
                if newest is None:
                    continue
                if newest.waits:
                    asked.waited = True
                    with held(life):
                        verdict = await addon.decide_later(newest, asked.facts)
                else:
                    verdict = addon.decide(newest, asked.facts)
            if verdict is None:
                continue
            outcome = asked.outcome = combined(asked.outcome, addon.name, verdict)
            if outcome.denied:
                return
            if type(verdict) is Delay:
                asked.waited = True
                with held(life):
                    await asyncio.sleep(verdict.seconds)
            verdict = None

    # Observation

    def opened(self, facts: Facts) -> None:
        """Inform the addons that a connection's relay runs."""
        for addon, hook in self._opened:
            addon.inform(hook, facts)

    def ended(self, record: Record, *, was_open: bool) -> None:
        """Inform the addons that a connection has ended."""
        for addon, hook in self._closed if was_open else self._refused:
            addon.inform(hook, record)

    def mesh_changed(self, summary: Callable[[], MeshSummary]) -> None:
        """Schedule a notification to the addons that the mesh has changed, at most once a second."""
        if not self._mesh or self._mesh_timer is not None:
            return
        loop = asyncio.get_running_loop()
        at_s = max(loop.time(), self._mesh_called_s + _MESH_EVERY_S)
        self._mesh_timer = loop.call_at(at_s, self._call_mesh_changed, summary)

    def _call_mesh_changed(self, summary: Callable[[], MeshSummary]) -> None:
        self._mesh_timer = None
        self._mesh_called_s = asyncio.get_running_loop().time()
        value = summary()
        for addon, hook in self._mesh:
            addon.inform(hook, value)

    # Pages

    def report(self) -> AddonReport:
        """Return the counts of this process's addons, including the addons' own metric families."""
        report = AddonReport()
        report.add(self.counts(), self.families(), self.states())
        return report

    def families(self) -> Iterator[AddonFamily]:
        """Yield the metric families that the addons return from their hooks ``metrics``."""
        for addon in self.addons:
            for each in addon.families():
                yield AddonFamily(addon.name, each.name, each.help, each.kind, each.labels, dict(each.values))

    def counts(self) -> Iterator[HookCounts]:
        """Yield the call counts of every hook of every addon."""
        for addon in self.addons:
            yield from addon.counts()

    def states(self) -> list[AddonState]:
        """Return the state of every addon, in their order."""
        return [
            AddonState(
                name=each.name,
                source=each.loaded.spec.text,
                sha256=each.loaded.sha256,
                suspended=each.suspended,
                on_error=each.loaded.common.on_error,
                hooks=tuple(each.hooks),
                problem=self.problems.get(each.name, ""),
            )
            for each in self.addons
        ]

    # Change and end

    def replace(self, old: RunningAddon, loaded: LoadedAddon) -> None:
        """Replace an addon by a new version, which keeps its position in the calling order, and end the old
        version.

        Waiting calls of the old version continue until they return.
        """
        new = RunningAddon(loaded, self.current)
        new.continue_from(old)
        self.addons = tuple(new if each is old else each for each in self.addons)
        self.problems.pop(new.name, None)
        self._index()
        old.end(cancel=False)
        for warning in loaded.warnings:
            log.warning("%s", warning)

    def close(self) -> None:
        """End every addon; idempotent."""
        if self._mesh_timer is not None:
            self._mesh_timer.cancel()
        addons, self.addons = self.addons, ()
        self._index()
        for addon in addons:
            addon.end(cancel=True)


@contextmanager
def held(life: Life) -> Iterator[None]:
    """Context manager that keeps a connection's table entry in :attr:`State.HELD`."""
    before = life.state
    life.state = State.HELD
    try:
        yield
    finally:
        if life.state is State.HELD:  # otherwise it was closed meanwhile
            life.state = before
