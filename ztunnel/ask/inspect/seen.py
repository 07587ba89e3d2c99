"""Converts observed connections, live or from a log, to questions for ``/explain``. Pure.

A question describes the connection as its proxy saw it: with the dialled address or, at the other end, with the
request and the proven identity. The answer is about the current configuration, which can have changed since.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from xds.model.address import SocketAddress

Page = Mapping[str, Any]

#: A field ``k=v`` of a plain log line. A text value is quoted like in JSON.
_FIELD: Final = re.compile(r'([A-Za-z_][\w.]*)=("(?:[^"\\]|\\.)*"|\S+)')
#: The required fields of istiod's access log format of 2022 for Envoy, which ``ztunnel control-plane`` also
#: configures.
_ENVOY_LINE: Final = re.compile(
    r'\[[^\]]*\] "(?P<method>\S+) \S+ \S+" (?P<code>\S+) (?P<flags>\S+) (?P<details>\S+) (?P<termination>.+?) '
    r'"(?P<failure>[^"]*)" \S+ \S+ \S+ \S+ "[^"]*" "[^"]*" "[^"]*" "(?P<authority>[^"]*)" "(?P<upstream>[^"]*)" '
    r".* (?P<destination>\S+:\d+) (?P<source>\S+:\d+) \S+ "
)
#: The fields of JSON lines in Envoy's dialect, as configured by ``ztunnel control-plane``.
_ENVOY_FIELDS: Final = frozenset(("source", "destination", "upstream", "termination"))
_NOTHING: Final = ("", "-")


class BadLine(ValueError):
    """An access log line lacks facts that a question needs; the text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """An observed connection.

    Attributes:
        shown: the observed facts, with stable keys, which the answer shows.
        asked: the parameters of ``/explain``.
        taken: addresses that show which of several routes the connection took, the most specific first.
    """

    shown: Mapping[str, str]
    asked: Mapping[str, str]
    taken: tuple[str, ...] = ()


# Live connections


def live(page: Page, wanted: str, identity_at: Mapping[str, str] | None = None) -> Iterator[Seen]:
    """Yield the live connections that are selected. If both ends of one are on this node, both directions are
    yielded, outbound first.

    Args:
        page: ``/connections`` of either dialect, or ``workloadState`` of a dump.
        wanted: ``SRC:PORT``, ``SRC:PORT-DST:PORT`` with DST as the dialled or the actual destination, or in
            Envoy's dialect the id.
        identity_at: the identities of workloads by their address, for dumps that do not show what was proven.
    """
    if isinstance(page.get("connections"), list):
        for each in page["connections"]:
            if wanted == str(each.get("id")) or _is_meant(
                each, wanted, "source", ("destination", "upstream_host")
            ):
                yield _of_envoy(each)
        return
    tables = [state.get("connections") or {} for state in page.values()]
    for each in (each for carried in tables for each in carried.get("outbound") or []):
        if _is_meant(each, wanted, "src", ("originalDst", "actualDst")):
            yield _outbound(each)
    for each in (each for carried in tables for each in carried.get("inbound") or []):
        if _is_meant(each, wanted, "src", ("actualDst", "originalDst")):
            yield _inbound(each, identity_at or {})


def _is_meant(each: Page, wanted: str, source: str, destinations: tuple[str, ...]) -> bool:
    # The first dash ends the source, which is an address. A destination dialled by SOCKS can be a host name with
    # dashes.
    first, dash, second = wanted.partition("-")
    if str(each.get(source)) != first:
        return False
    return not dash or second in [str(each.get(key)) for key in destinations]


def _outbound(each: Page) -> Seen:
    source, target = str(each["src"]), str(each["actualDst"])
    dialled = str(each.get("originalDst") or target)
    return Seen(
        shown=_told(direction="outbound", source=source, destination=dialled, target=target),
        asked={"source": source, "destination": dialled, "direction": "outbound"},
        taken=(target,),
    )


def _inbound(each: Page, identity_at: Mapping[str, str]) -> Seen:
    source, application = str(each["src"]), str(each["actualDst"])
    identity = ""
    if "srcIdentity" in each:
        identity = each["srcIdentity"] or ""
    elif each.get("protocol") != "TCP":
        identity = identity_at.get(source.rpartition(":")[0].strip("[]"), "")
    return Seen(
        shown=_told(direction="inbound", source=source, destination=application, identity=identity),
        asked=_told(source=source, destination=application, identity=identity, direction="inbound"),
    )


def _of_envoy(each: Page) -> Seen:
    source, destination = str(each["source"]), str(each["destination"])
    identity = next(iter(each.get("peer_identities") or []), "")
    listener = str(each.get("listener") or "")
    hops = [each, *(each.get("inner_hops") or [])]
    hosts = tuple(str(hop["upstream_host"]) for hop in hops if hop.get("upstream_host"))
    return Seen(
        shown=_told(
            id=str(each.get("id")),
            source=source,
            destination=destination,
            identity=identity,
            target=hosts[-1] if hosts else "",
        ),
        asked=_told(source=source, destination=destination, identity=identity, listener=listener),
        taken=hosts,
    )


def _told(**values: str) -> dict[str, str]:
    return {name: value for name, value in values.items() if value}


# Access lines


def fields_of(line: str) -> Mapping[str, str]:
    """Return the fields of a log line in JSON, or of a plain one with ``k=v`` at its end. Empty if it has no
    fields.

    Text before the line is skipped: ``kubectl logs --prefix`` adds the pod's name.
    """
    _, brace, rest = line.partition("{")
    if brace and line.rstrip().endswith("}"):
        try:
            entry = json.loads(brace + rest)
        except ValueError:
            return {}
        return {key: str(value) for key, value in entry.items()} if isinstance(entry, dict) else {}
    return {name: _value(text) for name, text in _FIELD.findall(line)}


def logged(line: str, identity: str = "") -> Seen | None:
    """Return the connection of an access line, ``None`` for any other line.

    In an Istio mesh the lines are our proxy's or the Rust ztunnel's, plain or JSON. In Envoy's dialect they have
    istiod's format, which has no identities, or JSON as configured by ``ztunnel control-plane``.

    Args:
        line: a line of a log.
        identity: the client's identity, if the line does not have it.

    Raises:
        BadLine: it is an access line that lacks facts for a question.
    """
    if (found := _ENVOY_LINE.search(line)) is not None:
        return _logged_by_envoy(found.groupdict(), identity)
    fields = fields_of(line)
    if fields.keys() >= _ENVOY_FIELDS:
        return _logged_by_envoy(fields, identity)
    if "src.addr" not in fields:
        return None
    source, target = _address(fields, "src.addr"), fields.get("dst.addr", "")
    authority, service = fields.get("dst.hbone_addr", ""), fields.get("dst.service", "")
    identity = fields.get("src.identity", "")
    shown = {
        "direction": fields.get("direction", ""),
        "source": source,
        "identity": identity,
        "target": target,
        "authority": authority,
        "service": service,
        "error": fields.get("error", ""),
    }
    if fields.get("direction") == "inbound":
        host, _, port = _address(fields, "dst.addr").rpartition(":")
        # A tunnel request names the application; its TCP connection went to port 15008 of the same pod.
        application = f"{host}:{authority.rpartition(':')[2] or port}"
        asked = _told(source=source, destination=application, identity=identity, direction="inbound")
        return Seen(shown=_told(**shown), asked=asked)
    reached = authority or _address(fields, "dst.addr")
    # An access line with the service's name has the port of the application, not of the service.
    asked = {"destination": service, "endpoint": reached} if service else {"destination": reached}
    return Seen(
        shown=_told(**shown),
        asked={"source": source, **asked, "direction": "outbound"},
        taken=tuple(filter(None, (target, authority))),
    )


def line_of_flow(flow: Mapping[str, Any]) -> dict[str, str]:
    """Return an entry of the flight recorder as the fields of its access line.

    Raises:
        KeyError, TypeError: the flow has no addresses.
    """
    more = (flow.get("extensions") or {}).get("value") or {}
    tcp = flow["l4"]["TCP"]
    outbound = flow.get("traffic_direction") == "EGRESS"
    source = SocketAddress(str(flow["IP"]["source"]), int(tcp["source_port"]))
    application = SocketAddress(str(flow["IP"]["destination"]), int(tcp["destination_port"]))
    tunnel = str(more.get("hbone_address") or "")
    secured = bool(flow["IP"].get("encrypted"))
    return _told(
        **{
            "direction": "outbound" if outbound else "inbound",
            "src.addr": str(source),
            "dst.addr": tunnel if outbound and tunnel else str(application),
            "dst.hbone_addr": str(application) if secured else "",
            "src.identity": str(more.get("source_identity") or "") if secured else "",
            "error": str(more.get("reason") or ""),
        }
    )


def _logged_by_envoy(fields: Mapping[str, str], given: str) -> Seen:
    source, destination = _address(fields, "source"), _address(fields, "destination")
    upstream = _said(fields, "upstream")
    authority = _said(fields, "authority")
    identity = _said(fields, "client_identity").partition(",")[0] or (given if authority else "")
    error = " ".join(filter(None, (_said(fields, key) for key in ("flags", "termination", "failure"))))
    shown = _told(
        source=source,
        destination=destination,
        identity=identity,
        target=upstream,
        authority=authority,
        error=error,
    )
    if authority and not identity:
        raise BadLine("the line of a tunnel does not say the client's identity: give --identity")
    asked = _told(source=source, destination=authority or destination, identity=identity)
    return Seen(shown=shown, asked=asked, taken=tuple(filter(None, (upstream,))))


def _said(fields: Mapping[str, str], key: str) -> str:
    value = fields.get(key, "")
    return "" if value in _NOTHING or value == "None" else value


def _address(fields: Mapping[str, str], key: str) -> str:
    value = fields.get(key, "")
    try:
        return str(SocketAddress.parse(value))
    except ValueError:
        raise BadLine(f"{key} is no IP:PORT: {value!r}") from None


def _value(text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        return str(json.loads(text))
    except ValueError:
        return text


# Answers


def told_of(seen: Seen, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer that starts with the observed facts, and marks the route taken."""
    told: dict[str, Any] = {"seen": dict(seen.shown), **answer}
    ways = told.get("ways")
    places = ways if ways is not None else list(_endpoints(told.get("hop", {})))
    taken = False
    for address in seen.taken:
        for place in places:
            if address in (place.get("target"), place.get("authority"), place.get("address")):
                place["taken"] = taken = True
        if taken and ways is not None:
            break  # routes through several waypoints share one authority: only the address distinguishes them
    if seen.taken and len(places) > 1 and not taken:
        told["taken"] = "none of these: the configuration has changed since"
    return told


def _endpoints(hop: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the endpoints that a hop and all later hops can reach (Envoy's dialect)."""
    for cluster in hop.get("clusters", []):
        for endpoint in cluster.get("endpoints", []):
            yield endpoint
            yield from _endpoints(endpoint.get("hop", {}))
