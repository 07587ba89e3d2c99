"""The fuzz targets: one for each reader of bytes from the network, a file or the kernel.

Each target accepts its input or refuses it with the error that its module declares; anything else is a finding.

A target is a function of bytes and some valid inputs to begin with. Those come from our own encoders, so that they
stay valid when a format changes; ``corpus/<target>/`` holds inputs that once were findings.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, ip_address, ip_interface, ip_network
from pathlib import Path
from typing import Any, cast

import hpack

from hbone.engine import Engine
from hbone.errors import InvalidHeader, LocalProtocolError
from hbone.events import ConnectionFailed, DataReceived, RequestReceived, StreamEnded
from hbone.frames import frame
from hbone.head import parse_request, parse_response
from hbone.hpack_cache import BlockDecoder, HeaderBlockError
from hbone.reader import PREFACE
from hbone.settings import Role, client_settings, server_settings
from hbone.tunnel_headers import first, forwarded_host, parse_authority, parse_baggage
from tproxy.aio import rtnetlink
from tproxy.render import nf_tables as nf
from tproxy.render.nftables_dump import NftDump, read_tables, set_key
from tproxy.resources import Address, IpRule, Ownership, Route
from tproxy.wire import MalformedDump, attribute, attributes, be32, nest, text
from xds.dialects.calico import policysync
from xds.dialects.istio.addresses import compile_address
from xds.dialects.istio.authorization import compile_authorization
from xds.dialects.istio.dumped_mesh import read_dump
from xds.dialects.istio.local_file import parse_local_file
from xds.errors import ConfigError
from xds.model import calico
from xds.model.address import SocketAddress
from xds.model.format_string import parse_format
from xds.model.mesh import Mesh
from xds.proto.envoy.config.bootstrap.v3.bootstrap_pb2 import Bootstrap
from xds.proto.istio.security import authorization_pb2 as security
from xds.proto.istio.workload import workload_pb2 as wds
from xds.proto.json import parse_text
from xds.protocol.file import parse_file
from ztunnel.policy.calico.evaluator import Evaluator
from ztunnel.policy.calico.read import read_resources
from ztunnel.policy.calico.store import Store
from ztunnel.policy.engine import compiled
from ztunnel.proxy.dataplane import client_hello, proxy_protocol
from ztunnel.proxy.envoy.config.bootstrap import read_bootstrap
from ztunnel.proxy.envoy.telemetry.format import renderer
from ztunnel.proxy.istio.dns import message as dns
from ztunnel.proxy.istio.path import socks5
from ztunnel.proxy.istio.xds import mesh_dump
from ztunnel.proxy.istio.zds import messages as zds
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.formats.config_reader import Faults
from ztunnel.runtime.http.page import text as text_page
from ztunnel.runtime.http.server import PageServer, _Connection

_HERE = Path(__file__).parent
_DATA = _HERE.parent / "data"


@dataclass(frozen=True, slots=True)
class Target:
    """A reader of bytes, and its inputs.

    Attributes:
        run: called with each input; raises an exception for a finding.
        seeds: returns valid inputs.
        most_bytes: the longest input to try.
    """

    name: str
    run: Callable[[bytes], object]
    seeds: Callable[[], list[bytes]]
    most_bytes: int = 4096

    def corpus(self) -> list[bytes]:
        """Return the seeds and every input that was a finding."""
        folder = _HERE / "corpus" / self.name
        kept = [path.read_bytes() for path in sorted(folder.iterdir())] if folder.is_dir() else []
        return [*self.seeds(), *kept]


# HTTP/2


def _frames(data: bytes) -> bytes:
    """Return ``data`` as frames with right lengths: kind, flags, stream and length take a byte each."""
    wire, position = [], 0
    while position + 4 <= len(data):
        kind, flags, stream, length = data[position : position + 4]
        payload = data[position + 4 : position + 4 + length]
        wire.append(frame(kind % 11, flags, stream % 9, payload))
        position += 4 + length
    return b"".join(wire)


#: Kind, flags, stream, payload, as :func:`_frames` reads them.
def _framed(*items: tuple[int, int, int, bytes]) -> bytes:
    return b"".join(bytes((kind, flags, stream, len(payload))) + payload for kind, flags, stream, payload in items)


def _pieces(data: bytes, size: int) -> Iterator[bytes]:
    for start in range(0, len(data), size):
        yield data[start : start + size]


def _engine(role: Role) -> Callable[[bytes], None]:
    """Return a target: the first byte says whether the rest is frames or raw, and how the network cuts it."""

    def run(data: bytes) -> None:
        how, body = (data[0], data[1:]) if data else (0, b"")
        server = role is Role.SERVER
        engine = Engine(role, server_settings() if server else client_settings())
        engine.start()
        if not server:
            for _ in range(3):
                engine.open_stream(((b":method", b"CONNECT"), (b":authority", b"10.0.0.1:80")))
        if how & 1:
            body = _frames(body)
        if how & 2:
            body = (PREFACE if server else b"") + frame(4, 0, 0) + body
        now_s = 0.0
        for piece in _pieces(body, (1, 7, 64, 65536)[how >> 2 & 3]):
            for event in engine.receive_data(piece, now_s, 1000 if how & 16 else 2**31):
                _react(engine, event, reply=bool(how & 32))
            while engine.unparsed and not engine.failed:
                for event in engine.receive_data(b"", now_s, 1000):
                    _react(engine, event, reply=bool(how & 32))
            now_s += 0.01
        # However much it was sent, it holds no more streams than it announced, and closes in order.
        assert engine.open_streams <= (server_settings().max_concurrent_streams or 0) + 3
        engine.drain()
        engine.goaway()
        assert not any(isinstance(event, RequestReceived) for event in engine.receive_data(b"", now_s))

    return run


def _react(engine: Engine, event: object, *, reply: bool) -> None:
    """Do what an application does, also on streams that later events of the same read have ended."""
    if isinstance(event, ConnectionFailed):
        assert engine.failed
    elif isinstance(event, RequestReceived):
        with contextlib.suppress(LocalProtocolError):
            if reply:
                engine.respond(event.stream_id, 200)
                engine.send_data(event.stream_id, b"hello")
            else:
                engine.respond(event.stream_id, 403, body=b"no", reset_code=0)
    elif isinstance(event, DataReceived):
        assert event.size >= sum(map(len, event.chunks)) >= 0  # padding is credited, too
        engine.acknowledge(event.stream_id, event.size)
    elif isinstance(event, StreamEnded):
        with contextlib.suppress(LocalProtocolError):
            engine.end_stream(event.stream_id)


def _block(*fields: tuple[str, str]) -> bytes:
    return bytes(hpack.Encoder().encode(fields))


_CONNECT = _block((":method", "CONNECT"), (":authority", "10.0.0.1:80"), ("baggage", "k8s.pod.name=a"))
_OK = _block((":status", "200"))


def _server_seeds() -> list[bytes]:
    return [
        bytes((3 | 12,))
        + _framed((1, 4, 1, _CONNECT), (0, 0, 1, b"hello"), (8, 0, 1, b"\0\0\1\0"), (0, 1, 1, b"")),
        bytes((3 | 12 | 32,)) + _framed((1, 5, 1, _CONNECT), (3, 0, 1, b"\0\0\0\x08"), (6, 0, 0, bytes(8))),
        bytes((3 | 4 | 16 | 32,))
        + _framed(
            (1, 0, 1, _CONNECT[:9]), (9, 4, 1, _CONNECT[9:]), (0, 8, 1, b"\3abc\0\0\0"), (2, 0, 1, bytes(5))
        ),
        bytes((2 | 8,)) + frame(4, 0, 0, b"\0\3\0\0\0\1\0\4\0\1\0\0") + frame(4, 1, 0) + frame(7, 0, 0, bytes(8)),
        bytes((0,)) + PREFACE + frame(4, 0, 0) + frame(1, 4, 1, _CONNECT),
    ]


def _client_seeds() -> list[bytes]:
    return [
        bytes((3 | 12,)) + _framed((1, 4, 1, _OK), (0, 0, 1, b"hello"), (8, 0, 0, b"\0\0\1\0"), (0, 1, 1, b"")),
        bytes((3 | 4,)) + _framed((1, 5, 1, _OK), (1, 4, 3, _OK), (3, 0, 3, b"\0\0\0\x08"), (6, 1, 0, bytes(8))),
        bytes((3 | 12 | 32,))
        + _framed((1, 4, 5, _block((":status", "100"))), (1, 4, 5, _OK), (7, 0, 0, bytes(8))),
        bytes((2,)) + frame(4, 0, 0, b"\0\4\0\0\0\0\0\5\0\0\x40\0"),
    ]


def _hpack(data: bytes) -> None:
    decoder: BlockDecoder[object] = BlockDecoder(65_536, parse_request, None)
    # Several blocks on one connection: the dynamic table of one is what the next refers to.
    for block in data.split(b"\xff\xff\xff"):
        try:
            decoder.decode(block)
        except HeaderBlockError:
            return


def _heads(data: bytes) -> None:
    pieces = data.split(b"\0")
    fields = tuple(zip(pieces[::2], pieces[1::2], strict=False))
    parse_request(fields)
    parse_response(fields)
    parse_baggage(fields)
    forwarded_host(fields)
    with contextlib.suppress(InvalidHeader):
        str(parse_authority(first(fields, b":authority")))


def _head_seeds() -> list[bytes]:
    return [
        b"\0".join(
            (b":method", b"CONNECT", b":authority", b"[fd00::1]:80", b"baggage", b"k8s.pod.name=a,service.name=b")
        ),
        b"\0".join((b":method", b"CONNECT", b":authority", b"web.shop.svc:80", b"forwarded", b'for="a";host=b')),
        b"\0".join((b":method", b"GET", b":path", b"/", b":scheme", b"https", b"x", b"y")),
        b"\0".join((b":status", b"200", b"x", b"y")),
    ]


# DNS, PROXY, SOCKS, ClientHello, ZDS


_ADDRESS = IPv4Address("10.0.0.1")


def _question(name: str = "web.shop.svc.cluster.local.") -> bytes:
    return dns.address_query(name, ipv6=False, number=7)


def _dns_query(data: bytes) -> None:
    try:
        query = dns.read_query(data)
    except dns.Malformed:
        return
    dns.server_failure(query)
    if query.wants_address:
        answer = dns.local_answer(query, (_ADDRESS, _ADDRESS), query.name.lower(), 30, 512)
        assert len(answer) <= max(512, len(query.question) + 64)
        _dns_response(query, answer)
    str(query.cache_key)


def _dns_response(query: dns.Query, response: bytes) -> None:
    if dns.is_answer_to(query, query.id, response):
        passed = dns.passed_on(query, response)
        dns.fitting(query, passed, 512)
        kept = dns.keep(query, response)
        if kept is not None:
            kept.aged(query, 1.0)
        dns.rcode(response), dns.is_cut(response), dns.answer_count(response)
        dns.first_address(response)


def _dns_answer(data: bytes) -> None:
    query = dns.read_query(_question())
    _dns_response(query, data)
    # A response is only parsed if its id is the query's, which the fuzzer should not have to guess.
    _dns_response(query, query.wire[:2] + data[2:])
    dns.first_address(data)


def _dns_answers() -> list[bytes]:
    query = dns.read_query(_question())
    answer = dns.local_answer(query, (_ADDRESS,), query.name.lower(), 30, 512)
    name = b"\xc0\x0c"
    header = struct.pack(">6H", 7, 0x8180, 1, 2, 0, 1)
    chaos = name + struct.pack(">HHIH", 1, 3, 9, 4) + b"\1\2\3\4"
    alias = name + struct.pack(">HHIH", 5, 1, 9, 2) + name
    options = b"\0" + struct.pack(">HHIH", 41, 1232, 0, 0)
    return [answer, dns.server_failure(query), header + query.question + chaos + alias + options]


def _proxy(data: bytes) -> None:
    with contextlib.suppress(proxy_protocol.NoHeader, proxy_protocol.NeedMore, proxy_protocol.BadHeader):
        proxy_protocol.parse_header(data)


def _proxy_seeds() -> list[bytes]:
    pairs = (("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2"))
    seeds = [
        proxy_protocol.encode_header(SocketAddress(a, 1234), SocketAddress(b, 80), "spiffe://td/ns/a/sa/b")
        for a, b in pairs
    ]
    return [*seeds, b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n", b"PROXY UNKNOWN\r\n"]


class _Client:
    """A SOCKS client all of whose bytes have arrived; see :class:`hbone.aio.socket.PlainSocket`."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.sock = self

    async def read(self, most: int) -> bytes:
        data, self._data = self._data[:most], self._data[most:]
        return data

    def send_first(self, data: bytes) -> None:
        assert data[0] == 5

    def recv(self, most: int) -> bytes:
        return b""

    def getpeername(self) -> tuple[str, int]:
        return ("10.0.0.9", 1)


@lru_cache(maxsize=1)
def _loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


async def _resolve(name: str, *, ipv6: bool) -> str | None:
    return "10.0.0.1" if name.endswith("shop") else None


def _socks(data: bytes) -> None:
    with contextlib.suppress(ConnectionResetError):
        _loop().run_until_complete(socks5.accept(cast(Any, _Client(data)), _resolve))


def _hello(data: bytes) -> None:
    with contextlib.suppress(client_hello.NeedMore, client_hello.NotTls):
        client_hello.parse_client_hello(data)


def _hellos() -> list[bytes]:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="a.shop").do_handshake()
    return [outgoing.read()]


def _zds(data: bytes) -> None:
    for read in (zds.read_hello, zds.read_answer, lambda wire: zds.read_request(wire, 1)):
        with contextlib.suppress(zds.ZdsError):
            read(data)


def _zds_seeds() -> list[bytes]:
    info = zds.PodInfo(name="a", namespace="b", service_account="c")
    uid = zds.PodUid("u")
    requests = (zds.AddPod(uid, info), zds.KeepPod(uid), zds.DeletePod(uid), zds.SnapshotSent())
    return [zds.hello_bytes(), zds.answer_bytes("no"), *(zds.request_bytes(request) for request in requests)]


# HTTP/1.1 of the pages


class _Writer:
    """The part of :class:`asyncio.StreamWriter` that a page server uses."""

    def __init__(self) -> None:
        self.transport = self

    def write(self, data: bytes) -> None:
        pass

    async def drain(self) -> None:
        pass

    def close(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def get_extra_info(self, name: str) -> object:
        return ("127.0.0.1", 1) if name == "peername" else None


async def _serve(data: bytes) -> None:
    reader = asyncio.StreamReader(limit=16 * 1024)
    reader.feed_data(data)
    reader.feed_eof()
    server = PageServer("admin", SocketAddress("127.0.0.1", 0), lambda request: text_page("x"), SystemClock())
    connection = _Connection(server, reader, cast(Any, _Writer()))
    await connection.serve(lambda request: text_page(f"{request.path} {request.query.get('level')}"))


def _http(data: bytes) -> None:
    _loop().run_until_complete(_serve(data))


# Configuration


def _format(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        renderer(parse_format(data.decode(errors="replace")))
    parse_format.cache_clear()


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _bootstrap(data: bytes) -> None:
    document = _text(data)
    if document is None:
        return
    with contextlib.suppress(ConfigError):
        read_bootstrap(parse_text(document, Bootstrap).message)
    faults: list[ConfigError] = []
    with contextlib.suppress(ConfigError):
        read_bootstrap(parse_text(document, Bootstrap, faults=faults).message, faults)


def _resources(data: bytes) -> None:
    for name in ("a.yaml", "a.json", "a.pb", "a.pb_text"):
        with contextlib.suppress(ConfigError):
            parse_file(name, data)


def _local_file(data: bytes) -> None:
    document = _text(data)
    if document is not None:
        with contextlib.suppress(ConfigError):
            parse_local_file(document)


def _dumped_mesh(data: bytes) -> None:
    try:
        dump = json.loads(data)
    except ValueError:
        return
    if isinstance(dump, dict):
        with contextlib.suppress(ConfigError):
            read_dump(dump)


def _dumps() -> list[bytes]:
    local = parse_local_file((_DATA / "local_mesh.yaml").read_text())
    mesh = Mesh()
    mesh.apply([*local.workloads, *local.policies, *local.services])
    lists = {"workloads": mesh_dump.workloads(mesh), "services": mesh_dump.services(mesh)}
    return [json.dumps({name: list(values)}).encode() for name, values in lists.items()]


def _address(data: bytes) -> None:
    with contextlib.suppress(ConfigError):
        compile_address(data, "name")


def _addresses() -> list[bytes]:
    return [
        wds.Address(
            workload=wds.Workload(
                uid="cluster//Pod/shop/cart",
                namespace="shop",
                addresses=[bytes((10, 0, 0, 1))],
                services={"shop/cart.example": wds.PortList(ports=[wds.Port(service_port=80, target_port=8080)])},
                waypoint=wds.GatewayAddress(address=wds.NetworkAddress(address=bytes(16)), hbone_mtls_port=15008),
                authorization_policies=["shop/p"],
            )
        ).SerializeToString(),
        wds.Address(
            service=wds.Service(
                name="cart",
                namespace="shop",
                hostname="cart.example",
                addresses=[wds.NetworkAddress(network="n", address=bytes((10, 0, 0, 9)))],
                ports=[wds.Port(service_port=80, target_port=8080)],
            )
        ).SerializeToString(),
    ]


def _authorization(data: bytes) -> None:
    try:
        policy = compile_authorization(data)
    except ConfigError:
        return
    compiled(policy.condition)


def _policies() -> list[bytes]:
    match = security.Match(
        namespaces=[security.StringMatch(exact="shop")],
        not_principals=[security.StringMatch(prefix="cluster.local/")],
        source_ips=[security.Address(address=bytes((10, 0, 0, 0)), length=8)],
        destination_ports=[80],
    )
    clause = security.Clause(matches=[match])
    rules = [security.Rule(clauses=[clause, clause])]
    return [security.Authorization(name="p", namespace="shop", rules=rules).SerializeToString()]


# Calico's policy, from a PolicySync server and as resources


def _messages(data: bytes) -> Iterator[bytes]:
    """Yield the messages of a stream; two bytes before each have its length."""
    while len(data) >= 2:
        length = int.from_bytes(data[:2], "big")
        yield data[2 : 2 + length]
        data = data[2 + length :]


def _policysync(data: bytes) -> None:
    evaluator = Evaluator(Store())
    for message in _messages(data):
        with contextlib.suppress(ConfigError):
            update = policysync.decode(message)
            if update is not None:
                evaluator.apply(update)
    # Whatever it was, it is answered, and answered alike when the evaluator remembers.
    flow = calico.Flow(source_ip="10.0.0.1", destination_ip="10.0.0.2", destination_port=80)
    for endpoint in (None, *evaluator.store.endpoints):
        for direction in calico.Direction:
            assert evaluator.check(endpoint, flow, direction) == evaluator.check(endpoint, flow, direction)
    assert evaluator.store.in_sync or not evaluator.check(None, flow).allowed


def _streams() -> list[bytes]:
    policy = calico.PolicyId("NetworkPolicy", "shop", "web")
    source = calico.PeerMatch(nets=(ip_network("10.0.0.0/8"),), ip_sets=("s:a",), ports=((1, 99),))
    rules = (calico.Rule(calico.Action.ALLOW, protocol=6, source=source), calico.Rule(calico.Action.DENY))
    tier = calico.Tier("default", (policy,), (policy,))
    endpoint = calico.Endpoint("web", (ip_network("10.0.0.2/32"),), (tier,), ("kns.shop",))
    updates: tuple[calico.Update, ...] = (
        calico.IpSetUpdate("s:a", calico.IpSetType.NET, ("10.0.0.0/24", "fd00::/8")),
        calico.IpSetDelta("s:a", ("10.0.1.0/24",), ("fd00::/8",)),
        calico.PolicyUpdate(policy, calico.Policy("shop", rules, rules)),
        calico.ProfileUpdate("kns.shop", calico.Policy("", rules[1:])),
        calico.EndpointUpdate(calico.EndpointId("k8s", "shop/web-0", "eth0"), endpoint),
        calico.ServiceAccountUpdate("shop", "web", {"app": "web"}),
        calico.NamespaceUpdate("shop", {"tier": "a"}),
        calico.InSync(),
    )
    streams = [[policysync.encode(update, form) for update in updates] for form in policysync.PolicyForm]
    return [b"".join(len(message).to_bytes(2, "big") + message for message in stream) for stream in streams]


def _calico_resources(data: bytes) -> None:
    document = _text(data)
    if document is not None:
        with contextlib.suppress(Faults):
            read_resources({"a.yaml": document})


def _calico_documents() -> list[bytes]:
    return [
        b"""{"apiVersion": "projectcalico.org/v3", "kind": "NetworkPolicy", "metadata": {"name": "p",
 "namespace": "shop"}, "spec": {"order": 10, "selector": "app == 'web' && has(x)", "types": ["Ingress"],
 "ingress": [{"action": "Allow", "protocol": "TCP", "http": {"methods": ["GET"], "paths": [{"prefix": "/a"}]},
 "source": {"nets": ["10.0.0.0/8"], "serviceAccounts": {"names": ["a"]}, "notSelector": "all()"},
 "destination": {"ports": [80, "90:99", "http"]}}]}}""",
        b"""{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "p",
 "namespace": "shop"}, "spec": {"podSelector": {"matchExpressions": [{"key": "a", "operator": "In",
 "values": ["b"]}]}, "policyTypes": ["Egress"], "egress": [{"to": [{"ipBlock": {"cidr": "10.0.0.0/8",
 "except": ["10.1.0.0/16"]}}], "ports": [{"port": 80, "endPort": 90}]}]}}""",
    ]


# The kernel's replies


_NAMES = {1: "lo", 2: "eth0"}
_OURS = Ownership(frozenset({"ztunnel"}), "memory")


def _netlink(data: bytes) -> None:
    which, body = (data[0] % 9, data[1:]) if data else (0, b"")
    readers: tuple[Callable[[], object], ...] = (
        lambda: list(attributes(body)),
        lambda: rtnetlink.read_link(body),
        lambda: rtnetlink.read_address(body, _NAMES),
        lambda: rtnetlink.read_route(body, 162, _NAMES),
        lambda: rtnetlink.read_rule(body, 162),
        lambda: _tables(tables=[body]),
        lambda: _tables(chains=[body]),
        lambda: _tables(rules=[body]),
        lambda: _sets(body),
    )
    with contextlib.suppress(MalformedDump):
        readers[which]()


def _tables(**bodies: Any) -> None:
    read_tables(NftDump(**({"tables": (), "chains": (), "rules": (), "sets": (), "elements": {}} | bodies)), _OURS)


def _sets(body: bytes) -> None:
    head, _, rest = body.partition(b"\xff\xff")
    _tables(sets=[head], elements={set_key(head): [rest]})


def _netlink_seeds() -> list[bytes]:
    header = bytes((2, 0, 0, 0))
    table = header + text(nf.NFTA_TABLE_NAME, "ztunnel")
    hook = nest(nf.NFTA_CHAIN_HOOK, be32(nf.NFTA_HOOK_HOOKNUM, 0), be32(nf.NFTA_HOOK_PRIORITY, 5))
    chain = header + text(nf.NFTA_CHAIN_TABLE, "ztunnel") + text(nf.NFTA_CHAIN_NAME, "c") + hook
    rule = header + text(nf.NFTA_RULE_TABLE, "ztunnel") + text(nf.NFTA_RULE_CHAIN, "c")
    rule += nest(nf.NFTA_RULE_EXPRESSIONS, nest(1, text(1, "meta"), nest(2, be32(1, 2), be32(2, 1))))
    found = header + text(nf.NFTA_SET_TABLE, "ztunnel") + text(nf.NFTA_SET_NAME, "s")
    found += be32(nf.NFTA_SET_KEY_TYPE, 7)
    index = {name: number for number, name in _NAMES.items()}
    route = Route(table=254, destination=ip_network("10.0.0.0/8"), device="eth0", gateway=ip_address("10.0.0.1"))
    route_body = rtnetlink.route_message(24, route, 162, index.__getitem__).body
    rule_body = rtnetlink.rule_message(32, IpRule(version=4, priority=9, table=100, mark=1, mask=1), 162).body
    address = rtnetlink.address_message(20, Address("eth0", ip_interface("10.0.0.1/24")), 2).body
    link = rtnetlink.create_bridge("br0").body
    bodies = (attribute(1, b"abc"), link, address, route_body, rule_body, table, chain, rule, found + b"\xff\xff")
    return [bytes((number,)) + body for number, body in enumerate(bodies)]


def _files(*names: str) -> Callable[[], list[bytes]]:
    return lambda: [(_DATA / name).read_bytes() for name in names]


TARGETS = {
    target.name: target
    for target in (
        Target("engine-server", _engine(Role.SERVER), _server_seeds),
        Target("engine-client", _engine(Role.CLIENT), _client_seeds),
        Target("hpack", _hpack, lambda: [_CONNECT, _OK, _CONNECT + b"\xff\xff\xff" + _CONNECT]),
        Target("heads", _heads, _head_seeds, 1024),
        Target("dns-query", _dns_query, lambda: [_question(), _question("a.b.")], 600),
        Target("dns-answer", _dns_answer, _dns_answers, 1500),
        Target("proxy-protocol", _proxy, _proxy_seeds, 600),
        Target("socks", _socks, lambda: [b"\5\1\0\5\1\0\1\n\0\0\1\0\x50", b"\5\1\0\5\1\0\3\6a.shop\0\x50"], 600),
        Target("client-hello", _hello, _hellos, 1500),
        Target("zds", _zds, _zds_seeds, 1024),
        Target(
            "http",
            _http,
            lambda: [
                b"GET /logging?level=a HTTP/1.1\r\nhost: a\r\n\r\n",
                b"POST /a HTTP/1.1\r\nhost: a\r\ncontent-type: application/x-www-form-urlencoded\r\n"
                b"content-length: 3\r\n\r\na=b",
                b"POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n",
            ],
        ),
        Target(
            "format",
            _format,
            lambda: [b'%START_TIME(%s%3f)% %REQ(:METHOD):9% %% %DYNAMIC_METADATA(["a","b"])%', b"%PROTOCOL%"],
            600,
        ),
        Target("bootstrap", _bootstrap, _files("reference/w1/bootstrap.yaml", "reference/w2/bootstrap.yaml")),
        Target("resources", _resources, _files("reference/w2/eds.yaml", "reference/w2/cds.yaml"), 2048),
        Target("local-file", _local_file, _files("local_mesh.yaml")),
        Target("dumped-mesh", _dumped_mesh, _dumps),
        Target("address", _address, _addresses, 2048),
        Target("authorization", _authorization, _policies, 2048),
        Target("policysync", _policysync, _streams, 2048),
        Target("calico-resources", _calico_resources, _calico_documents, 2048),
        Target("netlink", _netlink, _netlink_seeds, 1024),
    )
}
