"""Runs one addon: times each call of its hooks, and suspends it after a fault.

Hooks run on the event loop that carries the connections, so a slow hook delays them. Four limits apply:

* A ``def`` hook's calls above its time budget are counted, and logged at most once a minute.
* A hook that blocks the loop for :data:`ztunnel.proxy.addons.interrupt.LIMIT_S` is interrupted and has failed.
* An ``async def`` hook above its time limit is cancelled and has failed. If it does not end within
  :data:`_ENDS_S` then, the addon is suspended.
* An addon that uses more than its share of the loop (:mod:`ztunnel.proxy.addons.budget`) is suspended, and so is
  an addon whose hook raises an exception.

A suspended addon is not called until it is replaced. Meanwhile ``on_error`` sets whether its deciding hooks deny
or are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from asyncio import _get_running_loop, _set_running_loop
from collections.abc import Coroutine, Generator, Iterator, Mapping
from time import perf_counter_ns
from typing import Any, Final

from ztunnel.addons import Cut, Delay, Deny, Metric, Prefer, Verdict
from ztunnel.proxy.addons.budget import MOST_NS, QUICK_NS, HookAccount, HookCounts, LoopShare, too_much
from ztunnel.proxy.addons.decide import fault_of, fault_of_metric
from ztunnel.proxy.addons.interrupt import CurrentCall
from ztunnel.proxy.addons.load import LoadedAddon, where

log = logging.getLogger(__name__)

#: The time within which a cancelled hook must end, in seconds.
_ENDS_S: Final = 1.0
#: Seconds between two log lines about calls of one addon that exceeded its budget.
_LINE_EVERY_NS: Final = 60 * 1_000_000_000
#: The most waiting tasks of one addon, one per connection. If there are more, they probably never end.
_MOST_WAITING: Final = 10_000


class Hook:
    """One hook of a running addon.

    Attributes:
        addon: the addon's name.
        name: the hook's name.
        function: the bound method, with one argument.
        waits: whether it is ``async def``.
        account: the counts of its calls.
    """

    __slots__ = ("account", "addon", "function", "name", "waits")

    def __init__(self, addon: str, name: str, function: Any, *, waits: bool) -> None:
        self.addon = addon
        self.name = name
        self.function = function
        self.waits = waits
        self.account = HookAccount()

    def count(self, result: str) -> None:
        """Count a call by its result."""
        results = self.account.results
        results[result] = results.get(result, 0) + 1

    def __str__(self) -> str:
        return f"addon {self.addon}, hook {self.name}"


class RunningAddon:
    """An addon between its start and its end.

    Args:
        loaded: the loaded addon.
        current: the process's current call, for interrupting and naming hooks that block.

    Attributes:
        loaded: see the argument.
        name: its name.
        suspended: why it is no longer called. Empty if it is called.
        hooks: its hooks by name.
        replaced_by: the version that has replaced this one. ``None`` if this is the newest.
    """

    __slots__ = (
        "_budget_ns",
        "_current",
        "_guards_loop",
        "_lined_ns",
        "_share",
        "_waiting",
        "hooks",
        "loaded",
        "name",
        "replaced_by",
        "suspended",
    )

    def __init__(self, loaded: LoadedAddon, current: CurrentCall) -> None:
        self.loaded = loaded
        self.name = loaded.name
        self.suspended = ""
        self.replaced_by: RunningAddon | None = None
        self.hooks = {
            name: Hook(loaded.name, name, _with_argument(name, function), waits=name in loaded.waits)
            for name, function in loaded.hooks.items()
            if name != "configured"  # already called once, when the addon was loaded
        }
        self._current = current
        self._guards_loop = loaded.names_asyncio
        self._budget_ns = int(loaded.common.budget_us * 1000)
        self._share = LoopShare(perf_counter_ns())
        self._lined_ns = 0
        self._waiting: dict[asyncio.Task[Any], _Steps] = {}

    # Hooks that decide

    def decide(self, hook: Hook, facts: object) -> Verdict | None:
        """Call a ``def`` hook and return its verdict. If the hook fails, return the verdict set by ``on_error``.
        Never raises.
        """
        if self.suspended:
            return self._not_called(hook)
        try:
            answer = self._call(hook, facts)
        except _Failed as failed:
            return self._on_error(hook, str(failed))
        if answer is None:
            hook.account.silent += 1
            return None
        return self._checked(hook, answer)

    async def decide_later(self, hook: Hook, facts: object) -> Verdict | None:
        """Run an ``async def`` hook and return its verdict. If it fails, return the verdict set by ``on_error``.

        The hook runs in its own task. Cancelling this call also cancels the task, without waiting for its end.
        """
        if self.suspended:
            return self._not_called(hook)
        if len(self._waiting) >= _MOST_WAITING:
            self.suspend(f"{_MOST_WAITING} calls of {hook.name} wait at the same time")
            return self._not_called(hook)
        limit_s = self.loaded.common.time_limit_s
        steps = _Steps(self, hook, facts)
        task = asyncio.get_running_loop().create_task(_run(steps), name=str(hook))
        self._waiting[task] = steps
        task.add_done_callback(self._waiting.pop)
        try:
            done, _ = await asyncio.wait({task}, timeout=limit_s)
        except asyncio.CancelledError:
            self._cancel(task, hook)
            hook.count("cancelled")
            raise
        hook.account.took(steps.used_ns)
        if not done:
            self._cancel(task, hook)
            hook.count("timeout")
            log.warning("addon %s: hook %s did not answer within %gs", self.name, hook.name, limit_s)
            return self._denial(f"its hook {hook.name} did not answer within {limit_s:g} s")
        if task.cancelled():
            return self._on_error(hook, self._raised(hook, asyncio.CancelledError("the hook cancelled itself")))
        error = task.exception()
        if error is not None:
            return self._on_error(hook, self._raised(hook, error))
        answer = task.result()
        if answer is None:
            hook.account.silent += 1
            return None
        return self._checked(hook, answer)

    def _checked(self, hook: Hook, answer: object) -> Verdict | None:
        fault = fault_of(hook.name, answer)
        if fault:
            if asyncio.iscoroutine(answer):
                answer.close()
            self.suspend(f"its hook {hook.name} {fault}")
            return self._on_error(hook, f"its hook {hook.name} {fault}")
        hook.count(type(answer).__name__.lower())
        assert isinstance(answer, Deny | Delay | Prefer | Cut)
        return answer

    def _not_called(self, hook: Hook) -> Verdict | None:
        hook.count("suspended")
        return self._denial(f"it is suspended: {self.suspended}")

    def _on_error(self, hook: Hook, text: str) -> Verdict | None:
        hook.count("fault")
        return self._denial(text)

    def _denial(self, text: str) -> Verdict | None:
        return Deny(text) if self.loaded.common.denies else None

    # Hooks that observe

    def inform(self, hook: Hook, argument: object) -> None:
        """Call an observing hook. Never raises."""
        if self.suspended:
            return
        try:
            self._call(hook, argument)
        except _Failed:
            hook.count("fault")
        else:
            hook.account.silent += 1

    def families(self) -> list[Metric]:
        """Call the hook ``metrics`` and return its families. An invalid family suspends the addon. Never
        raises.
        """
        hook = self.hooks.get("metrics")
        if hook is None or self.suspended:
            return []
        try:
            answer = self._call(hook, None)
        except _Failed:
            hook.count("fault")
            return []
        assert isinstance(answer, list)
        fault = next(filter(None, map(fault_of_metric, answer)), "")
        if fault:
            self.suspend(f"its hook metrics {fault}")
            hook.count("fault")
            return []
        hook.account.silent += 1
        return answer

    # One call

    def _call(self, hook: Hook, argument: object) -> object:
        """Call a ``def`` hook, and add its duration to the addon's counts.

        Raises:
            _Failed: the hook raised an exception, and the addon is suspended.
        """
        current, account, share = self._current, hook.account, self._share
        loop = None
        if self._guards_loop:
            # The event loop is hidden from the hook: a ``def`` hook does not need it, and could stop it.
            loop = _get_running_loop()
            _set_running_loop(None)
        began = current.began_ns = perf_counter_ns()
        try:
            # This is inside the try block, because an exception interrupts a blocking hook from the moment when
            # ``hook`` is set.
            current.hook = hook
            answer = hook.function(argument)
            current.hook = None
        except BaseException as error:  # noqa: BLE001  SystemExit of an addon must not end the proxy either
            current.hook = None
            current.interrupted = False
            if loop is not None:
                _set_running_loop(loop)
            self.charge(hook, perf_counter_ns() - began)
            raise _Failed(self._raised(hook, error)) from None
        took = perf_counter_ns() - began
        if loop is not None:
            _set_running_loop(loop)
        share.used_ns += took
        if took <= QUICK_NS:
            account.quick += 1
            account.total_ns += took
        else:
            current.interrupted = False
            account.took(took)
        if share.used_ns > MOST_NS and share.exceeded(began + took):
            self.suspend(too_much(share.used_ns))
        if took > self._budget_ns:
            self._over_budget(hook, took, began + took)
        return answer

    def charge(self, hook: Hook, took_ns: int) -> None:
        """Charge event-loop time to the addon. If the addon has exceeded its share, suspend it."""
        if not hook.waits:
            hook.account.took(took_ns)
        if self._share.use(took_ns, perf_counter_ns()):
            self.suspend(too_much(self._share.used_ns))

    def _over_budget(self, hook: Hook, took_ns: int, now_ns: int) -> None:
        hook.account.over_budget += 1
        if now_ns - self._lined_ns < _LINE_EVERY_NS and self._lined_ns:
            return
        self._lined_ns = now_ns
        log.warning(
            "addon %s: hook %s took %.0f us, more than its budget of %.0f us; %d calls did so far",
            self.name,
            hook.name,
            took_ns / 1000,
            self._budget_ns / 1000,
            hook.account.over_budget,
        )

    def _raised(self, hook: Hook, error: BaseException) -> str:
        text = f"its hook {hook.name} raised {where(error)}"
        self.suspend(text)
        return text

    def suspend(self, reason: str) -> None:
        """Stop calling the addon's hooks, and log the reason. After a first reason, later ones are ignored."""
        if self.suspended:
            return
        self.suspended = reason
        decides = self.hooks.keys() & {"connecting", "accepting"}
        effect = (
            "connections that it would decide about are denied" if self.loaded.common.denies else "it is ignored"
        )
        log.error(
            "addon %s is suspended: %s; %s",
            self.name,
            reason,
            effect if decides else "it only observed",
        )

    def _cancel(self, task: asyncio.Task[Any], hook: Hook) -> None:
        task.cancel()
        # The cancelled hook's answer is not used, so its errors are ignored as well.
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        asyncio.get_running_loop().call_later(_ENDS_S, self._must_have_ended, task, hook)

    def _must_have_ended(self, task: asyncio.Task[Any], hook: Hook) -> None:
        if not task.done():
            self.suspend(f"its hook {hook.name} did not end within {_ENDS_S:g} s of its cancellation")
            self._abandon(task)

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        """End a hook's task, even if the hook survives the cancellation."""
        self._waiting[task].abandoned = True
        task.cancel()

    # Its counts and its end

    @property
    def newest(self) -> RunningAddon:
        """The newest version of this addon."""
        found = self
        while found.replaced_by is not None:
            found = found.replaced_by
        return found

    @property
    def waiting(self) -> int:
        """The number of calls of ``async def`` hooks that have not ended."""
        return len(self._waiting)

    def counts(self) -> Iterator[HookCounts]:
        """Iterate over the counts of its hooks."""
        for name, hook in self.hooks.items():
            yield hook.account.copy(self.name, name)

    def continue_from(self, old: RunningAddon) -> None:
        """Replace an older version, and take over its counters, so that no counter decreases."""
        old.replaced_by = self
        for name, hook in self.hooks.items():
            if name in old.hooks:
                hook.account = old.hooks[name].account

    def end(self, *, cancel: bool) -> None:
        """Call the hook ``done``. The caller must call this only once.

        Args:
            cancel: cancel waiting calls, too. Otherwise they continue until they return.
        """
        if cancel:
            for task in list(self._waiting):
                self._abandon(task)  # otherwise a hook that survives its cancellation would keep the process alive
        done = self.hooks.get("done")
        if done is not None:
            try:
                self._call(done, None)
            except _Failed as failed:
                log.error("addon %s: %s", self.name, failed)


def _with_argument(name: str, function: Any) -> Any:
    """Return a hook with any signature as a function of one argument."""
    match name:
        case "metrics":
            # Steps of a generator and copies of mappings can run code of the addon, so they are part of the timed
            # call.
            return lambda _: [_copied(each) for each in function()]
        case "done":
            return lambda _: function()
        case _:
            return function


def _copied(family: object) -> object:
    """Return a family with a copy of its values, because threads of the addon can change the original later."""
    if type(family) is Metric and isinstance(family.values, Mapping):
        return family._replace(values=dict(family.values))
    return family


class _Failed(Exception):
    """A hook raised. The text describes the error."""


class _Steps:
    """Awaits an ``async def`` hook, and charges each step's time to the addon.

    Attributes:
        used_ns: the loop time that the hook has used so far, without its waits.
        abandoned: whether the next cancellation ends the task and its hook.
    """

    def __init__(self, addon: RunningAddon, hook: Hook, facts: object) -> None:
        self._addon = addon
        self._hook = hook
        self._facts = facts
        self.used_ns = 0
        self.abandoned = False

    def __await__(self) -> Generator[Any, Any, Any]:
        addon, hook = self._addon, self._hook
        current = addon._current
        coroutine: Coroutine[Any, Any, Any] = hook.function(self._facts)
        value: Any = None
        error: BaseException | None = None
        while True:
            began = perf_counter_ns()
            try:
                current.began_ns, current.hook = began, hook
                yielded = coroutine.send(value) if error is None else coroutine.throw(error)
                current.hook = None
            except StopIteration as stop:
                return stop.value
            finally:
                current.hook = None
                current.interrupted = False
                took = perf_counter_ns() - began
                self.used_ns += took
                addon.charge(hook, took)
            error = None
            try:
                value = yield yielded
            except BaseException as thrown:
                if self.abandoned:
                    with contextlib.suppress(
                        RuntimeError
                    ):  # the hook ignores the close as well, and is left to the garbage collector
                        coroutine.close()
                    raise
                error = thrown


async def _run(steps: _Steps) -> Any:
    try:
        return await steps
    except (SystemExit, KeyboardInterrupt) as error:  # a task would pass them on to the loop, which ends
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
