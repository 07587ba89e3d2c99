"""What processes say to each other, as bytes: cut anywhere, and of foreign makers."""

import ipaddress
import os
import pickle
import tracemalloc
from enum import Enum

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
from ztunnel.istio.config import PodName, config_from
from ztunnel.istio.metrics import Metrics
from ztunnel.istio.outcome import Flags
from ztunnel.istio.workers.link import (
    MOST_BYTES,
    Ask,
    Begin,
    CertificateIssued,
    CertificateWanted,
    ConnectionsPart,
    Corrupt,
    Decoder,
    Listening,
    MeshChange,
    Message,
    Reply,
    StartPod,
    encode,
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
MESSAGES: tuple[Message, ...] = (
    Begin(config=CONFIG, index=1, workers=2, log_filter="info"),
    MeshChange(put=(SERVICE, WORKLOAD, policy()), removed=("a", "b"), removed_policies=("c",), more=True),
    CertificateIssued(wanted=WHO, identity=WHO, chain_pem=b"chain", roots_pem=b"roots", key_pem=b"key"),
    Ask(
        7,
        StartPod(
            number=3,
            name=PodName(name="web", namespace="default", service_account="web"),
            has_namespace=True,
            listening=(Listening(port=15008, host="::", transparent=True),),
        ),
    ),
    Ask(8, CertificateWanted(WHO)),
    Reply(number=8, refused="no"),
    Reply(
        number=9,
        value=ConnectionsPart(
            number=1, direction="inbound", entries=({"src": "10.0.0.1:1", "originalDst": None},)
        ),
        more=True,
    ),
)


def decoded(*pieces: bytes, trusted: bool = False) -> list[tuple[Message, int]]:
    decoder, found = Decoder(trusted=trusted), []
    for piece in pieces:
        decoder.receive(piece)
        found += list(decoder)
    return found


WIRE = b"".join(encode(message, number) for number, message in enumerate(MESSAGES))
WANTED = [(message, number) for number, message in enumerate(MESSAGES)]


@pytest.mark.parametrize("trusted", [True, False])
def test_what_is_said_is_what_is_heard(*, trusted: bool) -> None:
    assert decoded(WIRE, trusted=trusted) == WANTED


def test_enumerations_are_written_alike_by_every_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def by_name(member: Enum, _: int) -> tuple[object, ...]:  # as Python 3.11.0 to 3.11.3
        return getattr, (type(member), member.name)

    for kind in (Protocol, AppProtocol, Health, Scope, BalancerMode, HealthPolicy, IpFamilies):
        monkeypatch.setattr(kind, "__reduce_ex__", by_name)
    assert b"getattr" in pickle.dumps(Protocol.HBONE, protocol=5)
    assert b"".join(encode(message, number) for number, message in enumerate(MESSAGES)) == WIRE


def test_frames_do_not_depend_on_how_bytes_arrive() -> None:
    for cut in range(len(WIRE) + 1):
        assert decoded(WIRE[:cut], WIRE[cut:]) == WANTED, cut


def test_frames_arrive_byte_by_byte() -> None:
    assert decoded(*(WIRE[index : index + 1] for index in range(len(WIRE)))) == WANTED


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(noise: bytes) -> None:
    try:
        decoded(noise, encode(MESSAGES[0]))
    except Corrupt:
        pass


@given(st.binary(max_size=100), st.integers(0, len(WIRE)))
def test_any_change_is_read_or_refused(noise: bytes, at: int) -> None:
    try:
        decoded(WIRE[:at] + noise + WIRE[at:])
    except Corrupt:
        pass


def framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + b"\0" + body


class _Runs:
    def __reduce__(self) -> tuple[object, ...]:
        return os.getpid, ()


class _Reads:
    def __reduce__(self) -> tuple[object, ...]:
        return config_from, ({},)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (_Runs(), "a value of posix.getpid"),
        (_Reads(), "ztunnel.istio.config.config_from, which is no value"),
        (Reply(number=1, value=Flags.DENY), "a value of ztunnel.istio.outcome.Flags"),
        (WORKLOAD, "a frame that is no message: Workload"),
        ("text", "a frame that is no message: str"),
    ],
)
@pytest.mark.parametrize("trusted", [True, False])
def test_only_values_of_the_named_classes_are_made(value: object, said: str, *, trusted: bool) -> None:
    with pytest.raises(Corrupt, match=said):
        decoded(encode(value), trusted=trusted)  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [b"r" + (1 << 24).to_bytes(4, "little"), b"p%d\n" % (1 << 24)])
def test_a_worker_cannot_take_memory_with_a_number(number: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(Corrupt, match="no message: list"):
            decoded(framed(b"\x80\x05]" + number + b"."))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_length_beyond_reason_is_refused_before_it_is_waited_for() -> None:
    with pytest.raises(Corrupt, match="descriptors"):
        decoded((MOST_BYTES + 1).to_bytes(4, "big") + b"\0")
    with pytest.raises(Corrupt, match="200 descriptors"):
        decoded((1).to_bytes(4, "big") + b"\xc8")


def test_what_cannot_be_read_is_not_sent() -> None:
    with pytest.raises(ValueError, match="MeshChange is too much"):
        encode(MeshChange(removed=("x" * (MOST_BYTES + 1),)))
    with pytest.raises(ValueError, match="too much"):
        encode(MESSAGES[0], descriptors=9)


def test_keys_are_not_shown() -> None:
    assert "key" not in repr(MESSAGES[2]).replace("key_pem", "")


def test_counts_of_enumerated_labels_can_be_sent() -> None:
    metrics = Metrics("1", 100)
    counts = ByteCounts()
    metrics.opened(("source", "x"), ("uid",), counts, 0.0).finished(Flags.DENY, counts)
    metrics.on_demand_dns[(Protocol.HBONE, "x")] = 2
    for part in metrics.counts():
        assert decoded(encode(Reply(number=1, value=part))) == [(Reply(number=1, value=part), 0)]
