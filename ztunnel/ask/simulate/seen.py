"""Reads observed connections from access logs, ours or the Rust ztunnel's, or from live connections. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from xds.model.address import SocketAddress, canonical
from ztunnel.ask.inspect.seen import fields_of

#: The text in the access lines of connections that were opened.
MESSAGE: Final = "connection complete"


class Seen(NamedTuple):
    """The facts that policies evaluate about one connection to a workload.

    Attributes:
        source: the client's address.
        identity: the proven identity. Empty for plain text.
        destination: the workload's address and the application's port.
    """

    source: str
    identity: str
    destination: SocketAddress


class Log(NamedTuple):
    """The inbound connections of a log.

    Attributes:
        seen: how often each connection occurred.
        unread: lines about inbound connections that lack facts.
        others: lines that are not access lines.
    """

    seen: dict[Seen, int]
    unread: int
    others: int


def read_log(lines: Iterable[str]) -> Log:
    """Read access lines, plain or JSON. Other lines are counted and ignored.

    Only lines of the destination's proxy count, because it enforces the policies and has the proven identity.
    """
    found: dict[Seen, int] = {}
    unread = others = 0
    for line in lines:
        if MESSAGE not in line:
            others += 1
            continue
        fields = fields_of(line)
        if fields.get("direction") != "inbound":
            continue
        try:
            # A tunnel request names the application; its TCP connection went to port 15008. If the request names a
            # host, take the address of the TCP connection, and the port from the name.
            host, port = split(fields["dst.addr"])
            if authority := fields.get("dst.hbone_addr"):
                named, port = split(authority)
                host = _address(named) or host
            connection = Seen(
                canonical(split(fields["src.addr"])[0]),
                fields.get("src.identity", ""),
                SocketAddress(canonical(host), port),
            )
        except (KeyError, ValueError):
            unread += 1
            continue
        found[connection] = found.get(connection, 0) + 1
    return Log(found, unread, others)


def open_now(pods: Mapping[str, Any], identity_at: Mapping[str, str]) -> Iterator[Seen]:
    """Yield the inbound connections of ``/connections`` (``workloadState`` of a dump).

    Args:
        pods: the page.
        identity_at: the identities of workloads by address. A Rust ztunnel's page does not show the proven
            identities.
    """
    for state in pods.values():
        for each in (state.get("connections") or {}).get("inbound") or []:
            host, port = split(each["actualDst"])
            source = canonical(split(each["src"])[0])
            identity = identity_at.get(source, "") if each.get("protocol") != "TCP" else ""
            if "srcIdentity" in each:
                identity = each["srcIdentity"] or ""
            yield Seen(source, identity, SocketAddress(canonical(host), port))


def split(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``.

    Raises:
        ValueError: the text has another form.
    """
    host, _, port = text.rpartition(":")
    number = int(port)
    if not host or not 0 < number < 1 << 16:
        raise ValueError(text)
    return host.strip("[]"), number


def _address(host: str) -> str | None:
    try:
        return canonical(host)
    except ValueError:
        return None
