"""The admin server's pages by path, with their handlers, methods and parameters.

:data:`COMMANDS` is the table that the dispatcher, ``/help`` and the home page read.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable

from xds.model import re2
from xds.proto.dump import format_json, to_dict
from xds.proto.envoy.admin.v3 import admin_pb2 as admin
from ztunnel.proxy.addons.report import page as addon_page
from ztunnel.proxy.dataplane.handover import page as handover_page
from ztunnel.proxy.envoy.admin import (
    certs,
    clusters,
    config_dump,
    connections,
    decisions,
    dump,
    loggers,
    process,
    readiness,
    server_info,
)
from ztunnel.proxy.envoy.admin.dump import address_message
from ztunnel.proxy.envoy.admin.help import Command, Parameter, help_text, home_page
from ztunnel.proxy.envoy.admin.inspected import Asked, Drain, InspectedProxy
from ztunnel.proxy.envoy.stats import stats_page
from ztunnel.proxy.tap.request import refusal
from ztunnel.runtime.http.page import HTML, JSON, Page, PageRequest, Query, printable, text
from ztunnel.runtime.http.server import Pages

_NO_POLICIES = "no policies of Calico: give --policy or --policy-sync\n"
_NO_CONTENTION = "Mutex contention tracing is not enabled. To enable, run Envoy with flag --enable-mutex-tracing."


def answer(proxy: InspectedProxy, drain: Drain, live_page: Pages, request: PageRequest) -> Page | Awaitable[Page]:
    """Answer one request to the admin server. ``live_page`` answers the paths below ``/ui``."""
    allowed = proxy.bootstrap.admin_allow_paths
    if allowed and not any(match.matches(request.target) for match in allowed):
        return text(f"request to path {printable(request.target)} not allowed", 403)  # Envoy's text
    path = request.path.rstrip("/") or "/"
    command = _BY_PATH.get("/ui" if path.startswith("/ui/") else path)
    if command is None:
        return text("invalid path. " + help_text(COMMANDS), 404)
    if command.mutates and request.method != "POST":
        return text(f"Method {printable(request.method)} not allowed, POST required.", 405)
    return command.answer(Asked(proxy, drain, lambda: live_page(request), request))


# Pages that show


def _home(_: Asked) -> Page:
    return text(home_page(COMMANDS), content_type=HTML)


def _help(_: Asked) -> Page:
    return text(help_text(COMMANDS))


def _addons(asked: Asked) -> Page:
    addons = asked.proxy.addons
    shown = addon_page(addons.host.report()) if addons is not None else []
    return text(json.dumps(shown, indent=2) + "\n", content_type=JSON)


def _certs(asked: Asked) -> Page:
    return certs.page(asked.proxy)


def _config_dump(asked: Asked) -> Page:
    return config_dump.page(asked.proxy, asked.query)


def _clusters(asked: Asked) -> Page:
    expression = asked.query.get("filter")
    try:
        shown = re2.Pattern(expression).search if expression else dump.everything
    except re2.Re2Error:
        return text("Invalid re2 regex", 400)
    if asked.query.get("format") == "json":
        return Page(content_type=JSON, body=clusters.json_pieces(asked.proxy, shown))
    return Page(body=clusters.text_pieces(asked.proxy, shown))


def _connections(asked: Asked) -> Page:
    return connections.connections_page(asked.proxy)


def _denials(asked: Asked) -> Page:
    return decisions.denials_page(asked.proxy)


def _rbac(asked: Asked) -> Page:
    return decisions.rbac_page(asked.proxy)


def _explain(asked: Asked) -> Page:
    return connections.explain_page(asked.proxy, asked.query)


def _policies(asked: Asked) -> Page:
    policies = asked.proxy.policies
    if policies is None:
        return text(_NO_POLICIES, 404)
    from ztunnel.policy.calico.report import in_force

    body = in_force(policies.source.evaluator.store, policies.state, policies.guard.uses)
    return Page(content_type=JSON, body=body)


def _tap(asked: Asked) -> Page:
    return text(refusal(asked.proxy.settings.tap_socket), 403)


def _flows(asked: Asked) -> Awaitable[Page]:
    from ztunnel.proxy.flows.page import flows_page  # most proxies never show it

    account = asked.proxy.account
    return flows_page(asked.query, account.ring, account.shape)


def _profile(asked: Asked) -> Awaitable[Page]:
    from ztunnel.runtime.http import profile  # most proxies never make one

    return profile.page(asked.query)


def _explain_policies(asked: Asked) -> Page:
    policies = asked.proxy.policies
    if policies is None:
        return text(_NO_POLICIES, 404)
    from ztunnel.policy.calico.explain import BadQuestion, answer

    try:
        allowed, lines = answer(policies.source.evaluator, dict(asked.query.pairs))
    except BadQuestion as error:
        return text(f"{printable(str(error))}\n", 400)
    return text(json.dumps({"allowed": allowed, "lines": lines}) + "\n", content_type=JSON)


def _listeners(asked: Asked) -> Page:
    listeners = asked.proxy.listeners.active
    if asked.query.get("format") != "json":
        lines = (f"{printable(each.name)}::{printable(each.address_text)}\n" for each in listeners)
        return text("".join(lines))
    message = admin.Listeners()
    for each in listeners:
        status = message.listener_statuses.add(name=each.name)
        if each.model.internal:
            status.local_address.envoy_internal_address.server_listener_name = each.name
            continue
        first, *others = [sock.address for sock in each.sockets] or each.model.addresses
        address_message(status.local_address, first)
        for other in others:
            address_message(status.additional_local_addresses.add(), other)
    return text(format_json(to_dict(message)), content_type=JSON)


def _ready(asked: Asked) -> Page:
    state = asked.proxy.state
    return text(f"{state}\n", 200 if state == "LIVE" else 503)


def _server_info(asked: Asked) -> Page:
    return text(format_json(server_info.server_info(asked.proxy)), content_type=JSON)


def _memory(_: Asked) -> Page:
    return text(format_json({name: str(value) for name, value in process.memory().items()}), content_type=JSON)


def _init_dump(asked: Asked) -> Page:
    """Return the init targets that the proxy's start still waits for. The result is empty after the start."""
    proxy = asked.proxy
    message = admin.UnreadyTargetsDumps()
    waiting = [f"Cluster {cluster.model.name}" for cluster in readiness.unready_clusters(proxy)]
    if readiness.lacks_policies(proxy):
        waiting.append("policies")
    if waiting and asked.query.get("mask") != "listener":
        message.unready_targets_dumps.add(name="init manager Server", target_names=waiting)
    for listener in proxy.listeners.warming:
        missing = sorted(
            {
                f"SdsApi {ref.name}"
                for chain in listener.live_chains
                if chain.tls is not None and chain.tls.current is None
                for ref in chain.model.secret_refs
            }
        )
        name = f"init manager Listener-init-target {listener.name}"
        message.unready_targets_dumps.add(name=name, target_names=missing or [f"Listener {listener.name}"])
    return text(format_json(to_dict(message)), content_type=JSON)


def _runtime(_: Asked) -> Page:
    return text(format_json({"entries": {}, "layers": []}), content_type=JSON)


def _stats(asked: Asked) -> Page:
    query, stats = asked.query, asked.proxy.stats
    try:
        choice = _choice(query)
    except ValueError as error:
        return text(str(error), 400)
    match query.get("format") or "text":
        case "text":
            found = stats_page.chosen(stats, choice)
            return Page(body=stats_page.text_pieces(found, choice.buckets))
        case "json":
            found = stats_page.chosen(stats, choice)
            return Page(content_type=JSON, body=stats_page.json_pieces(found, choice.buckets))
        case "prometheus":
            return _prometheus(asked)
        case "html" | "active-html":
            body = stats_page.text_pieces(stats_page.chosen(stats, choice), choice.buckets)
            return Page(content_type=HTML, body=stats_page.html_pieces(body))
        case _:
            return text("usage: /stats?format=(html|active-html|json|prometheus|text)\n\n", 400)


def _prometheus(asked: Asked) -> Page:
    query, stats = asked.query, asked.proxy.stats
    try:
        choice = _choice(query)
    except ValueError as error:
        return text(str(error), 400)
    found = stats_page.chosen(stats, choice)
    texts = found.texts if "text_readouts" in query else []
    summaries = choice.buckets is stats_page.Buckets.SUMMARY
    from ztunnel.proxy.envoy.stats import prometheus  # with the first page: see ztunnel.runtime.http.exposition

    body = prometheus.envoy_text([*found.numbers, *found.histograms], texts, summaries=summaries)
    return Page(body=body)


def _choice(query: Query) -> stats_page.Choice:
    """Read the parameters of ``/stats``.

    Raises:
        ValueError: a parameter is invalid. The text is Envoy's answer.
    """
    pattern = None
    expression = query.get("filter")
    if expression:
        try:
            pattern = re2.Pattern(expression)
        except re2.Re2Error as error:
            raise ValueError(f"Invalid re2 regex: {error}") from None
    try:
        kind = stats_page.Kind(query.get("type") or "All")
    except ValueError:
        raise ValueError("invalid &type= param") from None
    try:
        buckets = stats_page.Buckets(query.get("histogram_buckets") or "")
    except ValueError:
        raise ValueError("usage: /stats?histogram_buckets=(cumulative|disjoint|detailed|summary)\n") from None
    hidden = query.get("hidden") or "exclude"
    if hidden not in ("include", "only", "exclude"):
        raise ValueError("usage: /stats?hidden=(include|only|exclude)\n\n")
    return stats_page.Choice(
        kind=kind,
        pattern=pattern,
        invert="invert_filter" in query,
        used_only="usedonly" in query,
        buckets=buckets,
        hidden_only=hidden == "only",
    )


# Pages that act


def _ok(_: object = None) -> Page:
    return text("OK\n")


def _fail_health_checks(asked: Asked) -> Page:
    asked.proxy.failing_health_checks = True
    return _ok()


def _pass_health_checks(asked: Asked) -> Page:
    asked.proxy.failing_health_checks = False
    return _ok()


def _drain_listeners(asked: Asked) -> Page:
    query = asked.query
    asked.drain(inbound_only="inboundonly" in query, graceful="graceful" in query, skip_exit="skip_exit" in query)
    return _ok()


def _reset_counters(asked: Asked) -> Page:
    asked.proxy.stats.reset_counters()
    return _ok()


def _reopen_logs(asked: Asked) -> Page:
    asked.proxy.logs.writer.reopen()
    return _ok()


def _handover(asked: Asked) -> Page:
    return handover_page.page(asked.proxy.handover, asked.proxy.shut_down, asked.request)


def _quit(asked: Asked) -> Page:
    asked.proxy.shut_down()
    return _ok()


def _runtime_modify(_: Asked) -> Page:
    return text("No admin layer specified", 503)


def _constant(answer: str) -> Callable[[Asked], Page]:
    return lambda _: text(answer)


_FORMAT = Parameter("format", "File format to use; One of (text, json)")
_STATS_PARAMETERS = (
    Parameter("usedonly", "Only include stats that have been written by system since restart", flag=True),
    Parameter("filter", "Regular expression for filtering stats"),
    Parameter("invert_filter", "Invert the filter regex", flag=True),
)

COMMANDS: tuple[Command, ...] = (
    Command("/", "Admin home page", _home),
    Command("/addons", "print addons with their calls, time, denials and faults", _addons),
    Command("/certs", "print certs on machine", _certs),
    Command(
        "/clusters",
        "upstream cluster status",
        _clusters,
        parameters=(Parameter("filter", "Regular expression for filtering clusters by name"), _FORMAT),
    ),
    Command(
        "/config_dump",
        "dump current configs",
        _config_dump,
        parameters=(
            Parameter("resource", "The resource to dump"),
            Parameter(
                "mask",
                "The mask to apply. When both resource and mask are specified, the mask is applied to every "
                "element in the desired repeated field so that only a subset of fields are returned",
            ),
            Parameter(
                "name_regex",
                "Dump only the currently loaded configurations whose names match the specified regex. Can be used "
                "with both resource and mask query parameters",
            ),
            Parameter(
                "include_eds", "Dump currently loaded configuration including EDS: the hosts in use", flag=True
            ),
        ),
    ),
    Command("/connections", "print live connections with what was decided about them", _connections),
    Command("/contention", "dump current mutex contention stats (if enabled)", _constant(_NO_CONTENTION)),
    Command("/denials", "print the last connections that policies denied or ended", _denials),
    Command(
        "/drain_listeners",
        "drain listeners",
        _drain_listeners,
        mutates=True,
        parameters=(
            Parameter("graceful", "Enter a graceful drain period prior to closing listeners", flag=True),
            Parameter("skip_exit", "Drain the connections but never stop the listeners", flag=True),
            Parameter("inboundonly", "Drain listeners of traffic_direction INBOUND only", flag=True),
        ),
    ),
    Command(
        "/explain",
        "print which way a connection would take, and why",
        _explain,
        parameters=(
            Parameter("source", "IP address of the client, with or without a port"),
            Parameter("destination", "IP address and port that the client dials"),
            Parameter("identity", "SPIFFE identity of the client, for a connection that arrives in a tunnel"),
            Parameter("listener", "Name of the listener that takes the connection, when it is not the usual one"),
        ),
    ),
    Command(
        "/flows",
        "print the last connections that ended, as JSON lines of Hubble's flows",
        _flows,
        parameters=(
            Parameter("last", "The number of the newest connections to print"),
            Parameter("after", "Print only those that ended after this time, in nanoseconds"),
        ),
    ),
    Command("/handover", "print whether open connections move to a successor; POST moves them now", _handover),
    Command("/healthcheck/fail", "cause the server to fail health checks", _fail_health_checks, mutates=True),
    Command("/healthcheck/ok", "cause the server to pass health checks", _pass_health_checks, mutates=True),
    Command("/help", "print out list of admin commands", _help),
    Command("/hot_restart_version", "print the hot restart compatibility version", _constant("disabled")),
    Command(
        "/init_dump",
        "dump what the start waits for",
        _init_dump,
        parameters=(Parameter("mask", "listener: only what listeners wait for"),),
    ),
    Command("/listeners", "print listener info", _listeners, parameters=(_FORMAT,)),
    Command(
        "/logging",
        "query/change logging levels",
        lambda asked: loggers.page(asked.query),
        mutates=True,
        parameters=(
            Parameter(
                "paths",
                "Change multiple logging levels by setting to "
                "<logger_name1>:<desired_level1>,<logger_name2>:<desired_level2>",
            ),
            Parameter(
                "level",
                "desired logging level, this will change all loggers's level; "
                "One of (, trace, debug, info, warning, error, critical, off)",
            ),
        ),
    ),
    Command("/memory", "print current allocation/heap usage", _memory),
    Command("/policies", "print Calico's policies in force with their counts", _policies),
    Command(
        "/policies/explain",
        "print which of Calico's rules decides about a connection, and why",
        _explain_policies,
        parameters=(
            Parameter("from", "namespace/pod, IP address or SPIFFE id of the client"),
            Parameter("to", "namespace/pod or IP address of the server"),
            Parameter("port", "Port of the server (default 80)"),
        ),
    ),
    Command(
        "/profile",
        "print where the event loop's thread is, as folded stacks for a flame graph",
        _profile,
        parameters=(
            Parameter("seconds", "How long to sample (default 5, at most 60)"),
            Parameter("of", "cpu (default), or heap for memory that was allocated meanwhile and kept"),
        ),
    ),
    Command("/quitquitquit", "exit the server", _quit, mutates=True),
    Command("/rbac", "print the policies of RBAC filters with what they decided", _rbac),
    Command("/ready", "print server state, return 200 if LIVE, otherwise return 503", _ready),
    Command("/reopen_logs", "reopen access logs", _reopen_logs, mutates=True),
    Command("/reset_counters", "reset all counters to zero", _reset_counters, mutates=True),
    Command("/runtime", "print runtime values", _runtime),
    Command(
        "/runtime_modify",
        "Adds or modifies runtime values (there is no admin layer)",
        _runtime_modify,
        mutates=True,
    ),
    Command("/server_info", "print server version/status information", _server_info),
    Command(
        "/stats",
        "print server stats",
        _stats,
        parameters=(
            *_STATS_PARAMETERS,
            Parameter("format", "Format to use; One of (html, active-html, text, json)"),
            Parameter("type", "Stat types to include.; One of (All, Counters, Histograms, Gauges, TextReadouts)"),
            Parameter(
                "histogram_buckets",
                "Histogram bucket display mode; One of (cumulative, disjoint, detailed, summary)",
            ),
        ),
    ),
    Command(
        "/stats/prometheus",
        "print server stats in prometheus format",
        _prometheus,
        parameters=(
            *_STATS_PARAMETERS,
            Parameter("text_readouts", "Render text_readouts as new gauges with value 0", flag=True),
            Parameter("histogram_buckets", "Histogram bucket display mode; One of (cumulative, summary)"),
        ),
    ),
    Command("/tap", "captures of a pod's decrypted streams: refused here, see ztunnel tap", _tap),
    Command("/ui", "show the mesh of this node in a browser, as it is now", lambda asked: asked.live_page()),
)

_BY_PATH = {command.path: command for command in COMMANDS}
