"""Decodes nftables' trace events (``enum nft_trace_attributes``): the rules that a marked packet matches. It does
no I/O.
"""

from dataclasses import dataclass
from ipaddress import ip_address

from tproxy.expressions import IpAddress, Verdict, VerdictCode
from tproxy.render import nf_tables as nf
from tproxy.render.expressions import verdict_of
from tproxy.render.nftables import NFT_SUBSYSTEM
from tproxy.render.nftables_dump import nft_parts
from tproxy.wire import read_be32, read_text

#: The multicast group of trace events.
GROUP = 9  # NFNLGRP_NFTRACE
_TRACE = NFT_SUBSYSTEM << 8 | 17
_TABLE, _CHAIN, _HANDLE, _KIND, _VERDICT, _ID, _NETWORK, _TRANSPORT = 1, 2, 3, 4, 5, 6, 8, 9
_OF_RULE, _OF_POLICY = 3, 1


@dataclass(frozen=True, slots=True)
class Header:
    """The addresses, protocol and ports of a traced packet."""

    source: IpAddress
    destination: IpAddress
    protocol: int
    source_port: int
    destination_port: int


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One rule that a packet has matched, or the policy of a base chain.

    Attributes:
        packet: identifies one packet at one hook.
        handle: the rule's handle, 0 for a policy.
        header: the packet's header, which only the first event of a packet contains.
    """

    packet: int
    table: str
    chain: str
    handle: int
    verdict: Verdict | None
    header: Header | None


def read_event(kind: int, body: bytes) -> TraceEvent | None:
    """Decode one notification. Return None if it is neither a match of a rule nor a policy.

    Raises:
        MalformedDump: the notification does not have the kernel's layout.
    """
    if kind != _TRACE:
        return None
    _, parts = nft_parts(body)
    what = read_be32(parts.get(_KIND, b""))
    if what not in (_OF_RULE, _OF_POLICY):
        return None
    nested = parts.get(_VERDICT)
    return TraceEvent(
        read_be32(parts.get(_ID, b"")),
        read_text(parts.get(_TABLE, b"")),
        read_text(parts.get(_CHAIN, b"")),
        int.from_bytes(parts.get(_HANDLE, b""), "big"),
        verdict_of(nested) if nested is not None else None,
        _header(parts.get(_NETWORK, b""), parts.get(_TRANSPORT, b"")),
    )


def handles(bodies: list[bytes]) -> dict[int, int]:
    """Return the position of each rule in a dump, by the rule's handle."""
    parts = (nft_parts(body)[1] for body in bodies)
    return {int.from_bytes(found.get(nf.NFTA_RULE_HANDLE, b""), "big"): at for at, found in enumerate(parts)}


def _header(network: bytes, transport: bytes) -> Header | None:
    version = network[0] >> 4 if network else 0
    if version == 4 and len(network) >= 20:
        ends, protocol = (network[12:16], network[16:20]), network[9]
    elif version == 6 and len(network) >= 40:
        ends, protocol = (network[8:24], network[24:40]), network[6]
    else:
        return None
    ports = (transport[:2], transport[2:4]) if protocol in (6, 17, 132, 136) else (b"", b"")
    numbers = [int.from_bytes(port, "big") for port in ports]
    return Header(ip_address(ends[0]), ip_address(ends[1]), protocol, numbers[0], numbers[1])


def verdict_text(verdict: Verdict | None) -> str:
    """Return a verdict in nft's words. Without a verdict, this is ``continue``."""
    if verdict is None:
        return "continue"
    try:
        name = VerdictCode(verdict.code).name.lower()
    except ValueError:
        name = "continue" if verdict.code == -1 else str(verdict.code)
    return f"{name} {verdict.chain}".strip()
