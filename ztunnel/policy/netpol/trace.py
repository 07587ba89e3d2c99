"""Traces live packets between two addresses through the node's table, and prints the rules that they meet."""

import asyncio
import errno
import struct
from collections.abc import AsyncGenerator, Iterator
from ipaddress import ip_address

from tproxy.aio.netlink import NETLINK_NETFILTER, NetlinkSocket, drain, monitor_socket
from tproxy.aio.netns import Netns
from tproxy.aio.table import BlockingTable
from tproxy.errors import KernelRefused
from tproxy.expressions import Immediate, Meta, MetaKey, Phrase, destination_is, source_is
from tproxy.render import nf_tables as nf
from tproxy.render import nftables
from tproxy.render.nftables_dump import read_rule
from tproxy.render.text import rule_text
from tproxy.render.trace import GROUP, Header, TraceEvent, handles, read_event, verdict_text
from tproxy.resources import Chain, Hook, HookPoint, Rule, Table
from tproxy.wire import text
from xds.model import calico as c
from ztunnel.policy.netpol.table_builder import TABLE

#: The name of the table that marks packets while a trace runs.
TRACE_TABLE = "ztunnel-netpol-trace"
_MARKS_AT = -300
#: The number of packets whose headers are remembered.
_MOST_HEADERS = 1024
_HEADER = struct.Struct("=IHHII")
_NAMES = {number: name for name, number in c.PROTOCOLS.items()}


def marking(source: str, destination: str) -> Table:
    """Return a table that marks packets between two addresses, in both directions, for tracing.

    Raises:
        ValueError: a text is not an address, or the IP versions differ.
    """
    ends = ip_address(source), ip_address(destination)
    if ends[0].version != ends[1].version:
        raise ValueError(f"{source} and {destination} are of different IP versions")
    mark: Phrase = (Immediate(b"\1"), Meta(MetaKey.NFTRACE, sreg=1))
    rules = tuple(
        Rule((*source_is(one), *destination_is(other)[2:], *mark), "traced") for one, other in (ends, ends[::-1])
    )
    hook = Hook(kind="filter", point=HookPoint.FORWARD, priority=_MARKS_AT)
    return Table(TRACE_TABLE, chains=(Chain("mark", rules, hook),))


async def trace(source: str, destination: str, netns: Netns | None = None) -> AsyncGenerator[str, None]:
    """Yield lines about traced packets until closed, then remove the marks.

    Raises:
        TproxyError: the kernel refuses. ValueError: see :func:`marking`.
    """
    wanted = marking(source, destination)
    table = BlockingTable(TRACE_TABLE, netns)
    arrived = asyncio.Event()
    loop = asyncio.get_running_loop()
    sock = monitor_socket(NETLINK_NETFILTER, (GROUP,), netns)
    try:
        loop.add_reader(sock.fileno(), arrived.set)
        table.apply(wanted)
        rules = _Rules(netns)
        yield f"tracing {source} and {destination}; rules of {TABLE} that packets match:"
        while True:
            await arrived.wait()
            arrived.clear()
            try:
                data = sock.recv(1 << 18)
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise KernelRefused("trace events", error.errno or 0) from error
                drain(sock)
                yield "(packets came faster than they could be read; some are missing)"
                continue
            arrived.set()  # more messages may follow
            for event in _events(data):
                for line in rules.lines(event):
                    yield line
    finally:
        loop.remove_reader(sock.fileno())
        sock.close()
        table.apply(None)
        table.close()


def _events(data: bytes) -> Iterator[TraceEvent]:
    offset = 0
    while offset + _HEADER.size <= len(data):
        length, kind, _, _, _ = _HEADER.unpack_from(data, offset)
        if length < _HEADER.size:
            return
        event = read_event(kind, data[offset + _HEADER.size : offset + length])
        if event is not None:
            yield event
        offset += (length + 3) & ~3


class _Rules:
    """The texts of the table's rules by handle. The table is read again for an unknown handle."""

    def __init__(self, netns: Netns | None) -> None:
        self._netns = netns
        self._texts: dict[int, str] = {}
        self._packet = -1
        #: Headers of the last packets by number, because the events of packets on different processors are
        #: interleaved.
        self._headers: dict[int, Header] = {}

    def lines(self, event: TraceEvent) -> Iterator[str]:
        if event.header is not None:
            self._headers.pop(event.packet, None)  # a number is used again after the packet's end
            self._headers[event.packet] = event.header
            if len(self._headers) > _MOST_HEADERS:
                del self._headers[next(iter(self._headers))]
        header = self._headers.get(event.packet)
        if header is not None and event.packet != self._packet:
            self._packet = event.packet
            name = _NAMES.get(header.protocol, str(header.protocol))
            ports = f":{header.source_port}", f":{header.destination_port}"
            one, other = ports if header.destination_port else ("", "")
            yield f"{header.source}{one} > {header.destination}{other} {name}"
        if event.table != TABLE:
            return
        verdict = verdict_text(event.verdict)
        if not event.handle:
            yield f"  {event.chain}: no rule decides: {verdict}"
        else:
            yield f"  {event.chain}: {self._text(event.handle)}: {verdict}"

    def _text(self, handle: int) -> str:
        if handle not in self._texts:
            with NetlinkSocket(NETLINK_NETFILTER, self._netns) as nft:
                bodies = nft.dump(
                    nftables.nft_message(
                        nftables.NFT_GETRULE, 1, nftables.DUMP, text(nf.NFTA_RULE_TABLE, TABLE), about="read rules"
                    )
                )
            for number, at in handles(bodies).items():
                rule = read_rule(bodies[at])
                self._texts[number] = rule.comment or rule_text(rule.phrase)
        return self._texts.get(handle, f"rule {handle}")
