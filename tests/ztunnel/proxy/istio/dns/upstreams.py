"""Name servers for tests, on loopback addresses and one port: UDP and TCP, with scripted behaviour."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any, Self

import dns.flags
import dns.message
import dns.rcode
import dns.rrset

#: Makes the answers to one query: none, one, or several.
Behaviour = Callable[[dns.message.Message, str], list[bytes]]


def plain(*texts: str, code: int = 0) -> Behaviour:
    """Answers with these records."""

    def behave(query: dns.message.Message, protocol: str) -> list[bytes]:
        response = dns.message.make_response(query)
        for text in texts:
            name, ttl, kind, data = text.split(" ", 3)
            response.answer.append(dns.rrset.from_text(name, int(ttl), "IN", kind, data))
        response.set_rcode(code)
        wire = response.to_wire(max_size=65535)
        if protocol == "udp" and len(wire) > 512:
            response.answer.clear()
            response.flags |= dns.flags.TC
            wire = response.to_wire()
        return [wire]

    return behave


def silent(query: dns.message.Message, protocol: str) -> list[bytes]:
    """Says nothing."""
    return []


class Upstream(asyncio.DatagramProtocol):
    """One server. ``queries`` has the received queries, with their protocol and source port."""

    def __init__(self, host: str, port: int, behave: Behaviour) -> None:
        self.host = host
        self.port = port
        self.behave = behave
        self.queries: list[tuple[dns.message.Message, str, int]] = []

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._tcp = await asyncio.start_server(self._stream, self.host, self.port)
        self.port = self._tcp.sockets[0].getsockname()[1]
        self._udp, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=(self.host, self.port))
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._udp.close()
        self._tcp.close()
        await asyncio.sleep(0)

    def _answers(self, wire: bytes, protocol: str, port: int) -> list[bytes]:
        query = dns.message.from_wire(wire)
        self.queries.append((query, protocol, port))
        return self.behave(query, protocol)

    def datagram_received(self, data: bytes, addr: tuple[Any, ...]) -> None:
        for answer in self._answers(data, "udp", addr[1]):
            self._udp.sendto(answer, addr)

    async def _stream(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            length = int.from_bytes(await reader.readexactly(2), "big")
            for answer in self._answers(await reader.readexactly(length), "tcp", 0):
                writer.write(len(answer).to_bytes(2, "big") + answer)
            await writer.drain()
        finally:
            writer.close()


def open_socket(family: socket.AddressFamily, kind: socket.SocketKind) -> socket.socket:
    return socket.socket(family, kind)
