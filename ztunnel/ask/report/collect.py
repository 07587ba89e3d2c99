"""Collects each node's files for an archive. A page that is missing or too big is named in the index."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from ztunnel.ask.inspect.archive import file_of
from ztunnel.ask.inspect.fleet import MOST_AT_ONCE
from ztunnel.ask.inspect.kubectl import AGENT, PROXY, Daemon, Kubectl, Unreachable, kubectl_of
from ztunnel.ask.inspect.source import ANSWER_S, AskFailed, ask

#: Pages of a proxy's admin server, of either dialect. Missing pages are left out.
PAGES: Final = (
    *("/config_dump", "/check", "/connections", "/denials", "/flows", "/policies"),
    *("/server_info", "/clusters", "/certs", "/init_dump", "/rbac", "/stats"),
)
AGENT_PAGES: Final = ("/check", "/audit", "/pods", "/metrics")
#: The metrics port of a proxy in an Istio mesh.
STATS: Final = Daemon("ztunnel", "ztunnel", 15020)
#: Seconds between the two readings of a proxy's metrics.
BETWEEN_S: Final = 10.0
MAX_PAGE: Final = 128 << 20
MAX_LOG: Final = 10 << 20
_NOT_FOUND: Final = 404
#: The query parameters for pages of Envoy's dialect: in JSON, and with the endpoints, which ``explain`` needs.
_PARAMETERS: Final[Mapping[str, Mapping[str, str | None]]] = {
    "/config_dump": {"include_eds": ""},
    "/clusters": {"format": "json"},
    "/stats": {"format": "json"},
}


@dataclass(slots=True)
class Collected:
    """The files of one node, by their paths below the node's folder in the archive, and the missing pages."""

    files: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of a collection: the deadline (monotonic seconds), the age of the oldest log line, whether to be
    quick, and the time for one answer.
    """

    until_s: float
    since: str = ""
    quick: bool = False
    answer_s: float = ANSWER_S

    @property
    def over(self) -> bool:
        return time.monotonic() > self.until_s


def collect(args: argparse.Namespace, bounds: Bounds, done: Callable[[str, Collected], None]) -> dict[str, str]:
    """Collect from the nodes that the flags select. Call ``done`` with the files of each node, never concurrently.

    Returns:
        The nodes that did not answer, with the reason.

    Raises:
        AskFailed: there is no node, or kubectl does not answer.
    """
    if not args.all_nodes and args.node is None and args.pod is None:
        found = Collected()
        _pages(found, args.address, PAGES, "proxy", bounds)
        if not found.files:
            raise AskFailed("; ".join(found.missing[:1]) or "no page was answered")
        if args.stats_address:
            _metrics(found, lambda: contextlib.nullcontext(args.stats_address), bounds)
        done("", found)
        return {}
    kubectl = kubectl_of(args)
    try:
        if args.node is not None:
            places = {args.node: kubectl.of_node(args.node, PROXY)}
        elif args.pod is not None:
            places = {args.pod.replace("/", "."): kubectl.of_pod(args.pod, PROXY)}
        else:
            places = kubectl.of_all_nodes(PROXY)
    except Unreachable as error:
        hint = " (--address HOST:PORT queries one proxy)" if args.all_nodes else ""
        raise AskFailed(f"{error}{hint}") from None
    try:
        agents = kubectl.of_all_nodes(AGENT)
    except Unreachable:
        agents = {}
    silent: dict[str, str] = {}
    with ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="node") as pool:
        work = pool.map(lambda node: (node, _node(kubectl, places[node], agents.get(node), bounds)), places)
        for node, found in work:
            if not any(name.startswith("proxy/") for name in found.files):
                silent[node] = next(iter(found.missing), "no answer")
            done(node, found)
    return silent


def _node(kubectl: Kubectl, proxy: tuple[str, str], agent: tuple[str, str] | None, bounds: Bounds) -> Collected:
    found = Collected()
    with _noted(found, "proxy"), kubectl.forwarded(*proxy, PROXY.port) as address:
        _pages(found, address, PAGES, "proxy", bounds)
    _metrics(found, lambda: kubectl.forwarded(*proxy, STATS.port), bounds)
    if agent is not None:
        with _noted(found, "agent"), kubectl.forwarded(*agent, AGENT.port) as address:
            _pages(found, address, AGENT_PAGES, "agent", bounds)
    for name, place in (("proxy", proxy), ("agent", agent)):
        for previous in (False, True):
            if place is None or bounds.over:
                continue
            with _noted(found, f"{name}'s log{' before its restart' if previous else ''}"):
                limit = MAX_LOG // 10 if bounds.quick else MAX_LOG
                text = kubectl.logs(*place, previous=previous, limit_bytes=limit, since=bounds.since)
                found.files[f"logs/{name}{'-previous' if previous else ''}.log"] = text
    return found


@contextlib.contextmanager
def _noted(found: Collected, what: str) -> Iterator[None]:
    try:
        yield
    except (AskFailed, Unreachable) as error:
        found.missing.append(f"{what}: {error}")


def _pages(found: Collected, address: str, paths: tuple[str, ...], folder: str, bounds: Bounds) -> None:
    for path in paths:
        if bounds.over:
            found.missing.append(f"{folder}{path}: the time was over")
            continue
        try:
            text = ask(address, path, _PARAMETERS.get(path), limit_s=bounds.answer_s)
        except AskFailed as error:
            if error.status != _NOT_FOUND:
                found.missing.append(f"{folder}{path}: {error}")
            continue
        if len(text) > MAX_PAGE:
            found.missing.append(f"{folder}{path}: {len(text)} characters are more than an archive takes")
        else:
            found.files[f"{folder}/{file_of(path)}"] = text


def _metrics(
    found: Collected, reach: Callable[[], contextlib.AbstractContextManager[str]], bounds: Bounds
) -> None:
    """Read the metrics twice, so that the archive shows rates."""
    with _noted(found, "metrics"), reach() as address:
        found.files["proxy/metrics"] = ask(address, "/metrics", limit_s=bounds.answer_s)
        if not bounds.quick and time.monotonic() + BETWEEN_S < bounds.until_s:
            time.sleep(BETWEEN_S)
            found.files["proxy/metrics_later"] = ask(address, "/metrics", limit_s=bounds.answer_s)
