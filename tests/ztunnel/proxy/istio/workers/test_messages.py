"""What processes say to each other, as bytes: cut anywhere, and of foreign makers."""

import ipaddress
import os
import pickle
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hbone.aio.relay import ByteCounts
from xds.dialects.istio.authorization import compile_authorization
from xds.model.authorization import AuthorizationPolicy
from xds.model.identity import SpiffeId
from xds.model.service import (
    BalancerMode,
    CidrAddress,
    HealthPolicy,
    IpFamilies,
    LoadBalancing,
    Scope,
    Service,
    WeightedWaypoint,
)
from xds.model.workload import (
    ApplicationTunnel,
    AppProtocol,
    GatewayAddress,
    Health,
    Locality,
    NamespacedHostname,
    NetworkAddress,
    PolicyKey,
    Protocol,
    ServiceKey,
    Workload,
    WorkloadUid,
)
from xds.proto.istio.security import authorization_pb2 as security
from ztunnel.policy.ledger import TierPolicy, Use
from ztunnel.proxy.flows.history import Totals
from ztunnel.proxy.istio.accounting.denials import Pair
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.accounting.outcome import Flags
from ztunnel.proxy.istio.environment import config_from
from ztunnel.proxy.istio.settings.config import PodName
from ztunnel.proxy.istio.workers.messages import (
    MAX_BYTES,
    MAX_WORKER_BYTES,
    Barrier,
    Begin,
    CertificateIssued,
    ConnectionsPart,
    CountsPart,
    FrameDecoder,
    GetCertificate,
    Listening,
    MeshChange,
    Message,
    ProtocolViolation,
    Request,
    Response,
    StartPod,
    encode,
    pickled,
)

WHO = SpiffeId("cluster.local", "default", "web")
WORKLOAD = Workload(
    uid=WorkloadUid("Kubernetes//Pod/default/web"),
    namespace="default",
    name="web",
    addresses=("10.0.0.1", "fd00::1"),
    protocol=Protocol.HBONE,
    waypoint=GatewayAddress(NetworkAddress("n", "10.0.0.9"), 15008),
    network_gateway=GatewayAddress(NamespacedHostname("istio-system", "east.local"), 15008),
    application_tunnel=ApplicationTunnel(AppProtocol.PROXY, 80),
    services={ServiceKey("default/web.local"): {80: 8080}},
    authorization_policies=(PolicyKey("default/deny"),),
    status=Health.UNHEALTHY,
    locality=Locality("eu", "eu-1"),
)
SERVICE = Service(
    name="web",
    namespace="default",
    hostname="web.local",
    vips=(NetworkAddress("n", "10.1.0.1"),),
    cidr_vips=(
        CidrAddress("n", ipaddress.ip_network("10.2.0.0/16")),
        CidrAddress("", ipaddress.ip_network("fd00::/8")),
    ),
    ports={80: 8080},
    weighted_waypoints=(WeightedWaypoint(GatewayAddress(NetworkAddress("n", "10.0.0.9"), 15008), 5),),
    load_balancing=LoadBalancing((Scope.ZONE,), BalancerMode.FAILOVER, HealthPolicy.ALLOW_ALL),
    ip_families=IpFamilies.DUAL,
)


def policy() -> AuthorizationPolicy:
    """One with a condition of every kind that Istio's policies have."""
    match = security.Match(
        namespaces=[security.StringMatch(exact="a"), security.StringMatch(prefix="b")],
        not_namespaces=[security.StringMatch(suffix="c")],
        principals=[security.StringMatch(suffix="z")],
        not_principals=[security.StringMatch(exact="d")],
        source_ips=[security.Address(address=bytes([10, 0, 0, 0]), length=8)],
        not_source_ips=[security.Address(address=bytes(16), length=64)],
        destination_ips=[security.Address(address=bytes([10, 0, 0, 1]), length=32)],
        destination_ports=[80],
        not_destination_ports=[443],
        service_accounts=[security.ServiceAccountMatch(namespace="default", serviceAccount="web")],
    )
    message = security.Authorization(
        name="deny",
        namespace="default",
        scope=security.WORKLOAD_SELECTOR,
        action=security.DENY,
        rules=[security.Rule(clauses=[security.Clause(matches=[match])])],
    )
    return compile_authorization(message.SerializeToString())


CONFIG = config_from(
    {"PROXY_MODE": "dedicated", "PROXY_WORKLOAD_INFO": "default/web/web"}, cpus=2, read_file=lambda path: None
)
FROM_MAIN: tuple[Message, ...] = (
    Begin(pickled_config=pickled(CONFIG), index=1, workers=2, log_filter="info"),
    MeshChange(
        pickled=pickled((SERVICE, WORKLOAD, policy())), removed=("a", "b"), removed_policies=("c",), more=True
    ),
    CertificateIssued(wanted=WHO, identity=WHO, chain_pem=b"chain", roots_pem=b"roots", key_pem=b"secret"),
    Request(
        7,
        StartPod(
            number=3,
            name=PodName(name="web", namespace="default", service_account="web"),
            has_namespace=True,
            listening=(Listening(port=15008, host="::", transparent=True),),
        ),
    ),
    Response(number=8, refused="no"),
)
FROM_WORKER: tuple[Message, ...] = (
    Request(8, GetCertificate(WHO)),
    Response(number=8, refused="no"),
    Response(
        number=9,
        value=ConnectionsPart(
            number=1, direction="inbound", entries=({"src": "10.0.0.1:1", "originalDst": None},)
        ),
        more=True,
    ),
    Response(number=10, value=True),
    Response(number=11, value="10.0.0.1"),
)


def decoded(*pieces: bytes, from_main: bool = False) -> list[tuple[Message, int]]:
    decoder, found = FrameDecoder(from_main=from_main), []
    for piece in pieces:
        decoder.receive(piece)
        found += list(decoder)
    return found


def wire(messages: tuple[Message, ...]) -> bytes:
    return b"".join(encode(message, number) for number, message in enumerate(messages))


WIRE = wire(FROM_WORKER)
WANTED = [(message, number) for number, message in enumerate(FROM_WORKER)]


@pytest.mark.parametrize(("messages", "from_main"), [(FROM_MAIN, True), (FROM_WORKER, False)])
def test_messages_survive_encoding(messages: tuple[Message, ...], *, from_main: bool) -> None:
    wanted = [(message, number) for number, message in enumerate(messages)]
    assert decoded(wire(messages), from_main=from_main) == wanted


def test_mesh_and_configuration_survive_encoding() -> None:
    begin, change = (message for message, _ in decoded(wire(FROM_MAIN[:2]), from_main=True))
    assert isinstance(begin, Begin)
    assert begin.config == CONFIG
    assert isinstance(change, MeshChange)
    assert change.put == (SERVICE, WORKLOAD, policy())
    assert MeshChange().put == ()


def test_frames_do_not_depend_on_how_bytes_arrive() -> None:
    for cut in range(len(WIRE) + 1):
        assert decoded(WIRE[:cut], WIRE[cut:]) == WANTED, cut


def test_frames_arrive_byte_by_byte() -> None:
    assert decoded(*(WIRE[index : index + 1] for index in range(len(WIRE)))) == WANTED


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(noise: bytes) -> None:
    try:
        decoded(noise, encode(FROM_WORKER[0]))
    except ProtocolViolation:
        pass


@given(st.binary(max_size=100), st.integers(0, len(WIRE)))
def test_any_change_is_read_or_refused(noise: bytes, at: int) -> None:
    try:
        decoded(WIRE[:at] + noise + WIRE[at:])
    except ProtocolViolation:
        pass


def framed(value: object) -> bytes:
    body = msgspec.msgpack.encode(value)
    return len(body).to_bytes(4, "big") + b"\0" + body


class _Runs:
    def __reduce__(self) -> tuple[object, ...]:
        return os.abort, ()


@pytest.mark.parametrize(
    "value",
    [
        *FROM_MAIN[:4],
        Request(1, Barrier()),
        {"type": "Request", "number": 1, "body": {"type": "StopPod", "number": 1}},
        {"type": "Response", "number": "one"},
        {"type": "Response", "number": 1, "value": {"type": "CountsPart", "counts": {"traffic": [["x"]]}}},
        {"type": "Response", "number": 1, "value": {"type": "CountsPart", "counts": {"connect_retries": "many"}}},
        {
            "type": "Response",
            "number": 1,
            "value": {"type": "ConnectionsPart", "number": 1, "direction": "up", "entries": []},
        },
        {"type": "Response", "number": 1.5},
        {"type": "MeshChange", "pickled": pickle.dumps(_Runs())},
        ["Response", 1],
        "text",
        None,
    ],
)
def test_worker_can_send_only_its_own_messages(value: object) -> None:
    with pytest.raises(ProtocolViolation, match="a frame that is no message"):
        decoded(framed(value))


def test_the_main_process_reads_no_pickle_of_a_worker() -> None:
    for noise in (pickle.dumps(_Runs()), pickle.dumps(Response(number=1))):
        with pytest.raises(ProtocolViolation):
            decoded(len(noise).to_bytes(4, "big") + b"\0" + noise)


def test_deep_nesting_is_refused() -> None:
    body = b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(ProtocolViolation):
        decoded(len(body).to_bytes(4, "big") + b"\0" + body)


@pytest.mark.parametrize("header", [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff"])
def test_a_worker_cannot_take_memory_with_a_length(header: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ProtocolViolation):
            decoded(len(header).to_bytes(4, "big") + b"\0" + header)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_length_beyond_reason_is_refused_before_it_is_waited_for() -> None:
    for from_main, limit in ((True, MAX_BYTES), (False, MAX_WORKER_BYTES)):
        assert decoded(limit.to_bytes(4, "big") + b"\0", from_main=from_main) == []
        with pytest.raises(ProtocolViolation, match="descriptors"):
            decoded((limit + 1).to_bytes(4, "big") + b"\0", from_main=from_main)
    with pytest.raises(ProtocolViolation, match="200 descriptors"):
        decoded((1).to_bytes(4, "big") + b"\xc8")


def test_too_large_message_is_not_sent() -> None:
    with pytest.raises(ValueError, match="MeshChange is too much"):
        encode(MeshChange(removed=("x" * (MAX_BYTES + 1),)))
    with pytest.raises(ValueError, match="too much"):
        encode(FROM_MAIN[0], descriptors=9)


def test_private_keys_are_not_printed() -> None:
    assert "secret" not in repr(FROM_MAIN[2])


def test_counts_survive_encoding() -> None:
    metrics = Metrics("1", 100)
    counts = ByteCounts()
    metrics.opened(("source", "x"), ("uid",), counts, 0.0).finished(Flags.DENY, counts)
    metrics.on_demand_dns[("a",) * 9] = 2
    metrics.ledger.calico.note(TierPolicy("default", "p"), Use.DENIED, 2.5)
    metrics.ledger.own.note("shop/p", Use.ENDED, 1.5)
    metrics.ledger.early.note("inbound", Use.REFUSED_EARLY, 1.5)
    metrics.ledger.denials.note(Pair("inbound", "a", "", "b:80", "no"), "10.0.0.1:1", 1.5)
    metrics.crl_rejections["source"] = 4
    for now_s in (100.0, 110.0):
        metrics.history.sample(now_s, Totals(connections=int(now_s)))
    for part in metrics.counts():
        response = Response(number=1, value=CountsPart(part))
        assert decoded(encode(response)) == [(response, 0)]
