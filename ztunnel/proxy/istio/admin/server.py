"""Runs the HTTP servers of the process: admin on loopback, metrics and readiness on all addresses."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from tproxy.errors import TproxyError
from xds.digits import whole_number
from xds.model.address import SocketAddress
from ztunnel.proxy.addons.report import page as addon_page
from ztunnel.proxy.dataplane.handover import page as handover_page
from ztunnel.proxy.istio.accounting.flows import shape
from ztunnel.proxy.istio.accounting.logs import InvalidLevel
from ztunnel.proxy.istio.admin import config_dump
from ztunnel.proxy.istio.admin.inspected import InspectedProxy, InspectedWorkers
from ztunnel.proxy.istio.path.pod_sockets import PASSTHROUGH4, PASSTHROUGH6
from ztunnel.proxy.istio.settings.app_probes import PREFIXES
from ztunnel.proxy.tap.request import refusal
from ztunnel.runtime.http import liveness
from ztunnel.runtime.http.page import HTML, JSON, PLAIN, Page, PageRequest, Query, not_found, printable, text
from ztunnel.runtime.http.server import Pages, PageServer

if TYPE_CHECKING:
    from ztunnel.proxy.istio.accounting.metrics import Metrics
    from ztunnel.proxy.istio.zds.pods import RunningPod
    from ztunnel.proxy.ui.pages import LivePages

log = logging.getLogger(__name__)

_PRODUCT = "ztunnel-py"
_LO_WITHOUT_IPV6 = Path("/proc/sys/net/ipv6/conf/lo/disable_ipv6")

_USAGE = """usage: POST /logging						(To list current level)
usage: POST /logging?level=<level>				(To change global levels)
usage: POST /logging?level={mod1}={level1},{mod2}={level2}	(To change specific mods' logging level)

hint: loglevel:	error|warn|info|debug|trace|off
hint: mod_name:	the module name, i.e. ztunnel::proxy
"""
_NO_POLICIES = "no policies of Calico: give CALICO_POLICY_DIR or POLICY_SYNC\n"
_METRICS_PATHS = ("/metrics", "/stats/prometheus")
_SIDECAR_PATHS = ("/drain", "/quitquitquit")
_PAGES = {
    "/addons": "addons with their calls, time, denials and faults",
    "/config_dump": "everything this proxy knows: ?part=KEY for one key, &name=NAME for entries of it",
    "/connections": "live connections, by pod",
    "/denials": "the last connections that policies denied or ended, by pair of workloads",
    "/check": "facts of this node for ztunnel check; ?reach=ADDRESS tries port 15008 of a workload",
    "/metrics": "the metrics of the stats port, for commands that ask through one port",
    "/profile": "folded stacks of the event loop's thread for a flame graph: ?seconds=N, of memory: &of=heap",
    "/flows": "the last connections that ended, as JSON lines of Hubble's flows: ?last=N&after=NANOSECONDS",
    "/explain": "what would become of a connection: ?source=NAMESPACE/POD&destination=SERVICE.NAMESPACE:PORT",
    "/ui": "the live page: the mesh of this node as it is now",
    "/policies": "Calico's policies in force, with their counts; /policies/explain?from=...&to=... says why",
    "/logging": "levels of the log (POST)",
    "/handover": "open connections that move to the next process: state, or begin (POST)",
    "/quitquitquit": "end in order (POST)",
    "/debug/pprof/profile": "not available: use py-spy",
    "/debug/pprof/heap": "not available",
}


class Servers:
    """A context manager that serves the admin, metrics and readiness pages.

    Attributes:
        addresses: the bound addresses of each server, by its name.

    Raises:
        TproxyError: from ``async with``: a port is taken.
    """

    def __init__(self, proxy: InspectedProxy) -> None:
        self._proxy = proxy
        self._stack = AsyncExitStack()
        self._live: LivePages | None = None
        self.addresses: dict[str, list[SocketAddress]] = {}

    async def __aenter__(self) -> Servers:
        local, wildcard = self._hosts()
        config = self._proxy.config
        async with AsyncExitStack() as stack:
            await self._serve(stack, "admin", local, config.admin_port, self._admin)
            await self._serve(stack, "stats", wildcard, config.stats_port, self._stats)
            await self._serve(stack, "readiness", wildcard, config.readiness_port, self._ready)
            self._stack = stack.pop_all()
        return self

    def _hosts(self) -> tuple[list[str], list[str]]:
        """Return the loopback and the wildcard addresses to bind, including IPv6 if the host supports it."""
        config = self._proxy.config
        ipv6 = config.ipv6 and Path("/proc/sys/net/ipv6").exists()
        wildcard = ["::" if ipv6 else "0.0.0.0"]
        local = ["127.0.0.1", "::1"] if ipv6 and _LO_WITHOUT_IPV6.read_text().strip() != "1" else ["127.0.0.1"]
        return local, wildcard

    async def _serve(self, stack: AsyncExitStack, name: str, hosts: list[str], port: int, pages: Pages) -> None:
        for host in hosts:
            address = SocketAddress(host, port)
            # SO_REUSEPORT lets a new proxy start while the old one still listens, as on the pods' ports.
            server = PageServer(name, address, pages, self._proxy.clock, product=_PRODUCT, reuse_port=True)
            try:
                await stack.enter_async_context(server)
            except TproxyError as error:
                raise TproxyError(f"failed to bind to address {address}: {error}") from error
            log.info("listener established address=%s component=%s", server.address, name)
            self.addresses.setdefault(name, []).append(server.address)

    async def __aexit__(self, *exc: object) -> None:
        await self._stack.aclose()

    async def stop_listening(self) -> None:
        """Close the servers, so that new requests reach a successor. Requests in progress are answered.
        Idempotent.
        """
        await self._stack.aclose()

    # Pages

    def _ready(self, request: PageRequest) -> Page | Awaitable[Page]:
        if request.path == liveness.PATH:
            return liveness.page(self._proxy.poller, request)
        if request.path != "/healthz/ready":
            return not_found(["/healthz/ready", liveness.PATH])
        if request.method != "GET":
            return text("", 405, PLAIN)
        pending = self._proxy.readiness.pending
        if not pending:
            return text("ready\n", content_type=PLAIN)
        return text(f"not ready, pending: {', '.join(sorted(pending))}\n", 500, PLAIN)

    def _stats(self, request: PageRequest) -> Page | Awaitable[Page]:
        config = self._proxy.config
        if request.path.startswith(PREFIXES):
            return self._app_probe(request)
        if request.path not in _METRICS_PATHS:
            if config.sidecar and request.path in _SIDECAR_PATHS:
                return self._sidecar(request)
            return not_found((*_METRICS_PATHS, *(_SIDECAR_PATHS if config.sidecar else ()), *config.app_probes))
        if self._proxy.workers is not None:
            return self._stats_of_all(self._proxy.workers, request)
        return _metrics_page(self._proxy.metrics, request)

    def _app_probe(self, request: PageRequest) -> Page | Awaitable[Page]:
        config = self._proxy.config
        probe = config.app_probes.get(request.path)
        if probe is None:
            return not_found([*_METRICS_PATHS, *config.app_probes])
        # imported here, because only a proxy that answers an application's probes needs it
        from ztunnel.proxy.istio.admin.prober import answer

        ipv6 = ":" in config.instance_ip
        address = ("::1" if ipv6 else "127.0.0.1") if config.app_probes_localhost else config.instance_ip
        source = (PASSTHROUGH6 if ipv6 else PASSTHROUGH4) if config.sidecar else None
        return answer(probe, address, source)

    def _sidecar(self, request: PageRequest) -> Page:
        """Shut down a sidecar at the request of another container of the pod, such as the container of a finished
        job.
        """
        if request.method != "POST":
            return text("POST it\n", 405, PLAIN)
        if not request.local:
            return text("only from this pod, by a loopback address\n", 403, PLAIN)
        if request.path == "/quitquitquit":
            self._proxy.shut_down()
            return text("shutdown now\n", content_type=PLAIN)
        return text(f"{self._proxy.send_goaway()} connections are open\n", content_type=PLAIN)

    @staticmethod
    async def _stats_of_all(workers: InspectedWorkers, request: PageRequest) -> Page:
        return _metrics_page(await workers.metrics(), request)

    async def _dump_of_all(self, workers: InspectedWorkers, query: Query) -> Page:
        return self._dump(query, await workers.connections(), await workers.metrics())

    def _dump(
        self,
        query: Query,
        connections: Mapping[RunningPod, object] | None = None,
        metrics: Metrics | None = None,
    ) -> Page:
        wanted = (query.get("part") or "", query.get("name") or "")
        try:
            return Page(content_type=JSON, body=config_dump.pieces(self._proxy, connections, metrics, *wanted))
        except LookupError as error:
            return text(f"{error.args[0]}\n", 404, PLAIN)

    def _admin(self, request: PageRequest) -> Page | Awaitable[Page]:
        match request.path:
            case "/":
                rows = "".join(f'<li><a href="{path}">{path}</a>: {what}</li>' for path, what in _PAGES.items())
                return Page(content_type=HTML, body=(f"<!doctype html><title>ztunnel</title><ul>{rows}</ul>\n",))
            case path if path.startswith("/ui"):
                return self._live_page(request)
            case "/config_dump":
                if self._proxy.workers is not None:
                    return self._dump_of_all(self._proxy.workers, request.query)
                return self._dump(request.query)
            case "/logging":
                return self._logging(request)
            case "/quitquitquit":
                if request.method != "POST":
                    return text("", 405, PLAIN)
                self._proxy.shut_down()
                return text("shutdown now\n", content_type=PLAIN)
            case "/handover":
                return handover_page.page(self._proxy.handover, self._proxy.shut_down, request)
            case "/debug/pprof/profile":
                return _profile(request)
            case "/debug/pprof/heap" | "/debug/pprof/heap/profiling":
                return text("jemalloc not enabled\n", 500, PLAIN)
            case "/connections":
                return self._connections()
            case "/addons":
                return self._addons()
            case "/denials":
                return self._denials()
            case "/check":
                from ztunnel.proxy.istio.admin.check_page import check_page  # rarely requested

                return check_page(self._proxy, request)
            case path if path in _METRICS_PATHS:
                return self._stats(request)
            case "/profile":
                from ztunnel.runtime.http import profile  # most proxies never make one

                return profile.page(request.query)
            case "/flows":
                from ztunnel.proxy.flows.page import flows_page

                proxy = self._proxy
                more = proxy.workers.flows if proxy.workers is not None else None
                return flows_page(request.query, proxy.metrics.flows, shape(proxy.config), more)
            case "/explain":
                from ztunnel.proxy.istio.admin.explain_page import explain_page

                return explain_page(self._proxy, request.query)
            case "/tap":
                return text(refusal(self._proxy.config.tap_socket), 403, PLAIN)
            case "/policies":
                return self._policies()
            case "/policies/explain":
                return self._explained(request)
            case _:
                return not_found(["/", *_PAGES])

    def _live_page(self, request: PageRequest) -> Page | Awaitable[Page]:
        from ztunnel.proxy.istio.admin import live_page  # most proxies never show it
        from ztunnel.proxy.ui import pages, setting

        proxy = self._proxy
        if not pages.is_below(request.path):
            return not_found(["/", *_PAGES])
        if not all(setting.is_on(proxy.config.ui, address.host) for address in self.addresses["admin"]):
            return pages.off(f"{setting.VARIABLE}=true")
        if self._live is None:
            self._live = pages.LivePages(lambda: live_page.seen(proxy), proxy.clock)
        return self._live.answer(request)

    async def _connections(self) -> Page:
        """Return the pods with their open connections: the most frequently changing part of the config dump."""
        workers = self._proxy.workers
        carried = await workers.connections() if workers is not None else {}
        return Page(content_type=JSON, body=config_dump.connections(self._proxy, carried))

    async def _addons(self) -> Page:
        workers = self._proxy.workers
        metrics = await workers.metrics() if workers is not None else self._proxy.metrics
        return text(json.dumps(addon_page(metrics.addons), indent=2) + "\n", content_type=JSON)

    async def _denials(self) -> Page:
        workers = self._proxy.workers
        metrics = await workers.metrics() if workers is not None else self._proxy.metrics
        return text(json.dumps(config_dump.denials(metrics), indent=2) + "\n", content_type=JSON)

    async def _policies(self) -> Page:
        """Return the page about Calico's policies, with the decision counts of this process and its workers."""
        policies, workers = self._proxy.policies, self._proxy.workers
        if policies is None:
            return text(_NO_POLICIES, 404, PLAIN)
        from ztunnel.policy.calico.report import in_force

        counted = await workers.metrics() if workers is not None else self._proxy.metrics
        store = policies.source.evaluator.store
        body = in_force(store, policies.state, counted.ledger.calico)
        return Page(content_type=JSON, body=body)

    def _explained(self, request: PageRequest) -> Page:
        policies = self._proxy.policies
        if policies is None:
            return text(_NO_POLICIES, 404, PLAIN)
        from ztunnel.policy.calico.explain import BadQuestion, answer

        try:
            allowed, lines = answer(policies.source.evaluator, dict(request.query.pairs))
        except BadQuestion as error:
            return text(f"{printable(str(error))}\n", 400, PLAIN)
        return text(json.dumps({"allowed": allowed, "lines": lines}) + "\n", content_type=JSON)

    def _logging(self, request: PageRequest) -> Page:
        if request.method != "POST":
            return text("Invalid HTTP method\n" + _USAGE, 405, PLAIN)
        logs = self._proxy.logs
        level, reset = request.query.get("level"), "reset" in request.query
        if level is None and not reset:
            return text(f"current log level is {logs.levels}\n", content_type=PLAIN)
        try:
            self._proxy.change_log_filter(level or "", reset=reset)
        except InvalidLevel as error:
            return text(f"{error}\n{_USAGE}", 400, PLAIN)
        log.info("new log filter is %s", logs.levels)
        return text(f"current log level is {logs.levels}\n", content_type=PLAIN)


def _metrics_page(metrics: Metrics, request: PageRequest) -> Page:
    from ztunnel.proxy.istio.accounting.families import families
    from ztunnel.runtime.http import exposition  # imported at the first scrape; its documentation says why

    return exposition.page(families(metrics), request)


def _profile(request: PageRequest) -> Page:
    """Return Rust ztunnel's error for an invalid parameter, or else the error that profiling is not supported."""
    for name, largest in (("seconds", 300), ("frequency", 1000)):
        value = request.query.get(name)
        if value is not None and not whole_number(value, largest):
            return text(f"invalid {name} value; expected 1-{largest}\n", 400, PLAIN)
    return text("profiling is not built in; use py-spy on this process\n", 500, PLAIN)
