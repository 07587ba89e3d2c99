"""A kit for tests of addons: builders of facts, and a playbook that calls hooks without sockets or a proxy.

::

    def test_strangers_are_refused() -> None:
        play = Playbook(Gate, allowed="frontend")
        play.connecting(outbound("frontend.shop", "cart.shop"), expect=None)
        play.connecting(outbound("stranger.shop", "cart.shop"), expect=Deny)

A hook that raises, returns an invalid value or exceeds its time limit causes a :class:`HookFault`. A proxy would
suspend the addon.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from time import perf_counter_ns
from types import MappingProxyType
from typing import Any

from ztunnel.addons import Direction, Facts, MeshSummary, Metric, Path, Record, Verdict, Workload
from ztunnel.proxy.addons.decide import fault_of, fault_of_metric
from ztunnel.proxy.addons.load import AddonError, load_class, where
from ztunnel.proxy.addons.settings import Given

__all__ = ["AddonError", "HookFault", "Playbook", "inbound", "outbound", "record", "workload"]

_ANY = object()


class HookFault(AssertionError):
    """A hook failed in a way that makes a proxy suspend its addon, or its verdict is not the expected one."""


def workload(text: str, labels: Mapping[str, str] | None = None, **more: Any) -> Workload:
    """Return a workload from ``name.namespace``. Its service account and label ``app`` are its name.

    Args:
        text: the name. Without a namespace, the workload is in ``default``.
        labels: labels that replace the default ones.
        more: further attributes of :class:`ztunnel.addons.Workload`.
    """
    name, _, namespace = text.partition(".")
    found = {"app": name} if labels is None else dict(labels)
    values: dict[str, Any] = {"namespace": namespace or "default", "service_account": name, "node": "node1"}
    return Workload(name=name, labels=MappingProxyType(found), **(values | more))


def outbound(source: str | Workload = "client", destination: str | Workload = "server", **more: Any) -> Facts:
    """Return facts of a connection that a pod opens through a tunnel, as ``connecting`` gets them.

    Args:
        source, destination: ``name.namespace``, or a workload.
        more: further attributes of :class:`ztunnel.addons.Facts`.
    """
    near, far = _side(source), _side(destination)
    values: dict[str, Any] = {
        "destination_address": "10.96.0.10",
        "endpoint": "10.244.2.20:15008",
        "service": f"{far.name}.{far.namespace}.svc.cluster.local" if far.name else "",
    }
    return _facts(near, far, Direction.OUTBOUND, values | more)


def inbound(source: str | Workload = "client", destination: str | Workload = "server", **more: Any) -> Facts:
    """Return the facts of an inbound connection, as ``accepting`` gets them; see :func:`outbound`."""
    values: dict[str, Any] = {"destination_address": "10.244.2.20"}
    return _facts(_side(source), _side(destination), Direction.INBOUND, values | more)


def record(facts: Facts | None = None, **more: Any) -> Record:
    """Return the record of an ended connection.

    Args:
        facts: ``None`` means the facts of :func:`outbound`.
        more: further attributes of :class:`ztunnel.addons.Record`.
    """
    values: dict[str, Any] = {"bytes_sent": 100, "bytes_received": 200, "duration_s": 0.5}
    return Record(facts if facts is not None else outbound(), **(values | more))


def _side(side: str | Workload) -> Workload:
    return workload(side) if isinstance(side, str) else side


def _facts(near: Workload, far: Workload, direction: Direction, more: dict[str, Any]) -> Facts:
    values: dict[str, Any] = {
        "connection": 1,
        "direction": direction,
        "path": Path.TUNNEL,
        "source": near,
        "source_address": "10.244.1.10",
        "source_port": 40000,
        "source_identity": _identity(near),
        "destination": far,
        "destination_port": 8080,
        "destination_identity": _identity(far),
    }
    return Facts(**(values | more))


def _identity(side: Workload) -> str:
    if not side.service_account:
        return ""
    return f"spiffe://cluster.local/ns/{side.namespace}/sa/{side.service_account}"


class Playbook:
    """Calls the hooks of one addon in a test.

    Args:
        addon: the addon's class.
        options: texts as given by ``--addon-option``, or values of the options' types.

    Attributes:
        addon: the addon's instance.
        slowest_us: the duration of the slowest ``def`` call so far.

    Raises:
        AddonError: the addon cannot be loaded with these options.
    """

    def __init__(self, addon: type, **options: Any) -> None:
        # The loader looks up options by the addon's name, which only the class defines. So every name gets these
        # options.
        given = {key: Given(_as_yaml(value), "the test") for key, value in options.items()}
        self._loaded = load_class(addon, _Everyone(given))
        self.addon: Any = self._loaded.instance
        self.slowest_us = 0.0

    def connecting(self, facts: Facts | None = None, *, expect: object = _ANY) -> Verdict | None:
        """Call the hook ``connecting`` and return its verdict.

        Args:
            facts: ``None`` means the facts of :func:`outbound`.
            expect: a verdict, the class of one, or ``None``. If omitted, any verdict is accepted.

        Raises:
            HookFault: the hook fails, or returns another verdict.
        """
        return self._decide("connecting", facts if facts is not None else outbound(), expect)

    def accepting(self, facts: Facts | None = None, *, expect: object = _ANY) -> Verdict | None:
        """Call the hook ``accepting`` and return its verdict; see :meth:`connecting`."""
        return self._decide("accepting", facts if facts is not None else inbound(), expect)

    def opened(self, facts: Facts | None = None) -> None:
        """Call the hook."""
        self._call("opened", facts if facts is not None else outbound())

    def closed(self, ended: Record | None = None) -> None:
        """Call the hook."""
        self._call("closed", ended if ended is not None else record())

    def refused(self, ended: Record | None = None) -> None:
        """Call the hook."""
        self._call("refused", ended if ended is not None else record(reason="refused"))

    def mesh_changed(self, summary: MeshSummary | None = None) -> None:
        """Call the hook."""
        self._call("mesh_changed", summary if summary is not None else MeshSummary(10, 5, 2))

    def metrics(self) -> list[Metric]:
        """Call the hook ``metrics`` and return its families."""
        families = list(self._call("metrics") or ())
        for family in families:
            fault = fault_of_metric(family)
            if fault:
                raise HookFault(f"addon {self._loaded.name}: its hook metrics {fault}")
        return families

    def done(self) -> None:
        """Call the hook."""
        self._call("done")

    def _decide(self, hook: str, facts: Facts, expect: object) -> Verdict | None:
        answer = self._call(hook, facts)
        fault = fault_of(hook, answer)
        if fault:
            raise HookFault(f"addon {self._loaded.name}: its hook {hook} {fault}")
        right = expect is _ANY or (isinstance(answer, expect) if isinstance(expect, type) else answer == expect)
        if not right:
            wanted = expect.__name__ if isinstance(expect, type) else repr(expect)
            raise HookFault(f"addon {self._loaded.name}: {hook} said {answer!r}, expected {wanted}")
        return answer  # type: ignore[no-any-return]

    def _call(self, hook: str, *arguments: object) -> Any:
        function = self._loaded.hooks.get(hook)
        if function is None:
            return None
        began = perf_counter_ns()
        try:
            answer = function(*arguments)
            if inspect.iscoroutine(answer):
                return asyncio.run(_within(answer, self._loaded.common.time_limit_s))
            if hook == "metrics":
                answer = list(answer)
        except (Exception, SystemExit) as error:
            raise HookFault(f"addon {self._loaded.name}: its hook {hook} raised {where(error)}") from error
        self.slowest_us = max(self.slowest_us, (perf_counter_ns() - began) / 1000)
        return answer


class _Everyone(dict[str, Mapping[str, Given]]):
    """Returns the same options for every addon name."""

    def __init__(self, given: Mapping[str, Given]) -> None:
        super().__init__()
        self._given = given

    def get(self, key: str, default: Any = None) -> Mapping[str, Given]:
        return self._given


def _as_yaml(value: object) -> object:
    return list(value) if isinstance(value, tuple | set | frozenset) else value


async def _within(answer: Any, limit_s: float) -> Any:
    try:
        async with asyncio.timeout(limit_s):
            return await answer
    except TimeoutError:
        raise HookFault(f"the hook did not answer within {limit_s:g} s") from None
