"""Keeps one nftables table in its desired state with minimal changes, and detects changes by others.

:class:`~tproxy.aio.kernel.BlockingKernel` reads all resources before and after each change, which suits a few
dozen rules. A table of policies has thousands of sets, so the classes here remember the table's content, send the
difference in one transaction, and read back only the changed chains and sets. Changes by others arrive as
notifications. After such a notification, and after any failure, it reads the whole table.
"""

import asyncio
import contextlib
import errno
import logging
import socket
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from tproxy.aio.netlink import NETLINK_NETFILTER, NetlinkSocket, monitor_socket
from tproxy.aio.netns import Netns
from tproxy.diff import table_steps
from tproxy.errors import KernelRefused, MissingFeature
from tproxy.expressions import Family
from tproxy.operations import (
    AddChain,
    AddElements,
    AddSet,
    AppendRule,
    DeleteElements,
    DeleteTable,
    FlushChain,
    NftStep,
)
from tproxy.render import nf_tables as nf
from tproxy.render import nftables, nftables_dump
from tproxy.resources import Ownership, Table
from tproxy.wire import MalformedDump, attribute_map, read_text, text

log = logging.getLogger(__name__)
T = TypeVar("T")

_HEADER = struct.Struct("=IHHII")
_NFT_GROUP = 7  # NFNLGRP_NFTABLES


class BlockingTable:
    """One nftables table in one network namespace. Use it from one thread only.

    Args:
        netns: the table's namespace. None is the caller's own. The caller closes it, after this object.
        name: the table's name, which is ours alone.

    Raises:
        NeedCapability: CAP_NET_ADMIN is missing.
    """

    def __init__(self, name: str, netns: Netns | None = None, family: Family = Family.INET) -> None:
        self.name = name
        self._family = family
        self._nft = NetlinkSocket(NETLINK_NETFILTER, netns)
        self._found: Table | None = None
        self._known = False

    @property
    def port(self) -> int:
        """Notifications of changes made by this object have this port number."""
        return self._nft.port

    def close(self) -> None:
        """Close the netlink socket. Idempotent. The table stays in the kernel."""
        self._nft.close()

    def forget(self) -> None:
        """Make the next change read the whole table first, because another program can have changed the table."""
        self._known = False

    def read(self) -> Table | None:
        """Return the kernel's table with its counters, or None if there is no table.

        Raises:
            DumpInterrupted: other programs change tables faster than they can be read.
        """
        named = text(nf.NFTA_TABLE_NAME, self.name)

        def get(kind: int, *filters: bytes) -> list[bytes]:
            message = nftables.nft_message(kind, self._family, nftables.DUMP, *filters, about=f"read {self.name}")
            return [body for body in self._nft.dump(message) if _table_of(body) == self.name]

        tables = get(nftables.NFT_GETTABLE)
        if not tables:
            return None
        sets = get(nftables.NFT_GETSET, named)
        dump = nftables_dump.NftDump(
            tables,
            get(nftables.NFT_GETCHAIN),
            get(nftables.NFT_GETRULE, named),
            sets,
            {key: self._elements(key[2]) for key in map(nftables_dump.set_key, sets)},
        )
        [table], _ = nftables_dump.read_tables(dump, Ownership(frozenset({self.name}), ""))
        return table

    def _elements(self, name: str) -> list[bytes]:
        message = nftables.nft_message(
            nftables.NFT_GETSETELEM,
            self._family,
            nftables.DUMP,
            text(nf.NFTA_SET_ELEM_LIST_TABLE, self.name),
            text(nf.NFTA_SET_ELEM_LIST_SET, name),
            about=f"read set {self.name} {name}",
        )
        return self._nft.dump(message)

    def apply(self, wanted: Table | None) -> tuple[NftStep, ...]:
        """Make the kernel's table equal to the desired one (None: no table), and return the steps. Idempotent.

        Raises:
            TproxyError: the kernel refused, and the table is unchanged. If the kernel stored other values than
                those sent (KernelRefused with EAGAIN), the next call starts by reading the whole table.
        """
        if not self._known:
            self._found = self.read()
        steps = table_steps(self._found, wanted)
        if not steps:
            self._known, self._found = True, wanted
            return ()
        self._known = False
        try:
            self._nft.batch(nftables.nft_batch(steps))
        except KernelRefused as error:
            if error.code in (errno.EOPNOTSUPP, errno.EPROTONOSUPPORT):
                raise MissingFeature(error.doing, "nf_tables, nf_conntrack, nft_ct") from error
            raise
        self._check(wanted, steps)
        self._known, self._found = True, wanted
        return steps

    def _check(self, wanted: Table | None, steps: tuple[NftStep, ...]) -> None:
        """Read the changed chains and sets back and compare them with the desired table.

        Raises:
            KernelRefused: the kernel's table differs.
        """
        if wanted is None:
            return
        chains, sets = _touched(steps)
        if any(isinstance(step, DeleteTable) for step in steps) or len(chains) + len(sets) > 64:
            if found := table_steps(self.read(), wanted):
                raise KernelRefused(f"to keep {found[0]}", errno.EAGAIN)
            return
        for item in wanted.sets:
            if item.name in sets:
                found_here = nftables_dump.read_elements(self._elements(item.name), interval=item.interval)
                if found_here != item.elements:
                    raise KernelRefused(f"to keep the elements of set {item.name}", errno.EAGAIN)
        for chain in wanted.chains:
            if chain.name in chains:
                rules = tuple(nftables_dump.read_rule(body) for body in self._rules(chain.name))
                if rules != chain.rules:
                    raise KernelRefused(f"to keep the rules of chain {chain.name}", errno.EAGAIN)

    def _rules(self, chain: str) -> list[bytes]:
        message = nftables.nft_message(
            nftables.NFT_GETRULE,
            self._family,
            nftables.DUMP,
            text(nf.NFTA_RULE_TABLE, self.name),
            text(nf.NFTA_RULE_CHAIN, chain),
            about=f"read chain {self.name} {chain}",
        )
        return self._nft.dump(message)


def _touched(steps: tuple[NftStep, ...]) -> tuple[set[str], set[str]]:
    chains: set[str] = set()
    sets: set[str] = set()
    for step in steps:
        match step:
            case AddChain(chain=chain):
                chains.add(chain.name)
            case FlushChain(chain=name) | AppendRule(chain=name):
                chains.add(name)
            case AddSet(set=item):
                sets.add(item.name)
            case AddElements(set_name=name) | DeleteElements(set_name=name):
                sets.add(name)
    return chains, sets


def _table_of(body: bytes) -> str:
    """Return the table name in an nftables notification. It is attribute 1 of all messages except generation
    messages.
    """
    return read_text(attribute_map(body[4:]).get(nf.NFTA_TABLE_NAME, b""))


class KeptTable:
    """Runs a :class:`BlockingTable` in a separate thread, and detects changes by other programs.

    Use it as ``async with KeptTable(...) as table``.

    Attributes:
        disturbed: set when another program has changed the table. :meth:`apply` then reads the whole table. The
            user clears it.
    """

    def __init__(self, name: str, netns: Netns | None = None) -> None:
        self._name = name
        self._netns = netns
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="nftables")
        self._blocking: BlockingTable | None = None
        self._monitor: socket.socket | None = None
        self._stale = False
        self.disturbed = asyncio.Event()

    async def __aenter__(self) -> Self:
        try:
            self._blocking = await self.in_thread(lambda: BlockingTable(self._name, self._netns))
            self._monitor = monitor_socket(NETLINK_NETFILTER, (_NFT_GROUP,), self._netns)
            asyncio.get_running_loop().add_reader(self._monitor.fileno(), self._noticed)
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._monitor is not None:
            asyncio.get_running_loop().remove_reader(self._monitor.fileno())
            self._monitor.close()
            self._monitor = None
        # Wait until the thread has finished its current transaction.
        self._thread.shutdown(wait=True, cancel_futures=True)
        if self._blocking is not None:
            self._blocking.close()

    async def in_thread(self, work: Callable[[], T]) -> T:
        """Run other blocking work in this object's thread, so that the event loop does not wait for the kernel."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _ready(self) -> BlockingTable:
        if self._blocking is None:
            raise RuntimeError("use `async with KeptTable(...)`")
        return self._blocking

    async def read(self) -> Table | None:
        return await self.in_thread(self._ready().read)

    async def apply(self, wanted: Table | None) -> tuple[NftStep, ...]:
        """Run :meth:`BlockingTable.apply` in the thread. Cancelling it does not stop a running transaction."""
        blocking = self._ready()
        if self._stale:
            self._stale = False
            await self.in_thread(blocking.forget)
        return await self.in_thread(lambda: blocking.apply(wanted))

    def _noticed(self) -> None:
        """Read notifications, and set ``disturbed`` if another program has changed the table."""
        if self._monitor is None:
            return
        while True:
            try:
                data = self._monitor.recv(1 << 18)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    log.error("watching nftables failed error=%s", error.strerror)
                self._disturb()  # the kernel dropped some, which can have been about our table
                return
            if self._foreign(data):
                self._disturb()

    def _disturb(self) -> None:
        self._stale = True
        self.disturbed.set()

    def _foreign(self, data: bytes) -> bool:
        offset = 0
        ours = self._ready().port
        while offset + _HEADER.size <= len(data):
            length, kind, _, _, port = _HEADER.unpack_from(data, offset)
            if length < _HEADER.size:
                return False
            body = data[offset + _HEADER.size : offset + length]
            offset += (length + 3) & ~3
            if port == ours or kind >> 8 != nftables.NFT_SUBSYSTEM:
                continue
            with contextlib.suppress(MalformedDump):
                if _table_of(body) == self._name:
                    return True
        return False
