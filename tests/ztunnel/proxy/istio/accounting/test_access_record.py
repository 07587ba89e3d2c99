"""A connection's lines against samples of the Rust ztunnel, and its part in metrics."""

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.ztunnel.proxy.istio.nodes import LOCAL, Lines, StoppedClock, a_node
from tests.ztunnel.proxy.istio.pages import samples
from tests.ztunnel.proxy.istio.path.test_route import BACK
from xds.model.address import SocketAddress
from xds.model.service import Service
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.istio.accounting.access_record import Direction, Record
from ztunnel.proxy.istio.accounting.metrics import PeerLabels
from ztunnel.proxy.istio.accounting.outcome import DRAINED, RECURSIVE_CALL, EarlyDeny, Failed, of_reason
from ztunnel.proxy.istio.path.node import Node
from ztunnel.runtime.bounded_counts import BoundedCounts

SERVICE = Service(name="example", namespace="default", hostname="example.com")


def with_node(
    folder: Path, check: Callable[[Node, StoppedClock, Lines], None], env: Mapping[str, str] | None = None
) -> None:
    async def main() -> None:
        with a_node(folder, env) as (node, clock, lines):
            check(node, clock, lines)

    asyncio.run(main())


def a_record(node: Node, *, direction: Direction = Direction.OUTBOUND, port: int = 39204) -> Record:
    record = Record(node, direction, SocketAddress("127.0.0.1", port), SocketAddress("127.0.0.1", 15008))
    record.source_workload = record.destination_workload = LOCAL
    record.source_labels = record.destination_labels = node.labels_of(LOCAL).secured
    record.source_identity = record.destination_identity = LOCAL.identity
    record.secured = True
    record.hbone_authority = "127.0.0.1:8080"
    return record


def move(record: Record, sent: int, received: int) -> None:
    record.counts._sent, record.counts._received = sent, received


def test_a_complete_connection(tmp_path: Path) -> None:
    def check(node: Node, clock: StoppedClock, lines: Lines) -> None:
        record = a_record(node)
        record.service = SERVICE
        record.opened()
        move(record, 5, 5)
        clock.passed_s = 0.0029
        record.complete()
        (line,) = lines
        assert line == (
            "2026-11-21T11:14:46.000847Z\tinfo\taccess\tconnection complete\tsrc.addr=127.0.0.1:39204 "
            'src.workload="local" src.namespace="default" '
            'src.identity="spiffe://cluster.local/ns/default/sa/default" '
            'dst.addr=127.0.0.1:15008 dst.hbone_addr=127.0.0.1:8080 dst.service="example.com" '
            'dst.workload="local" '
            'dst.namespace="default" dst.identity="spiffe://cluster.local/ns/default/sa/default" '
            'direction="outbound" bytes_sent=5 bytes_recv=5 duration="2ms"'
        )

    with_node(tmp_path, check)


def test_complete_connection_as_json(tmp_path: Path) -> None:
    def check(node: Node, clock: StoppedClock, lines: Lines) -> None:
        record = a_record(node, port=33176)
        record.opened()
        move(record, 5, 5)
        clock.passed_s = 0.2125
        record.complete()
        (line,) = lines
        time = json.loads(line)["time"]
        assert line == (
            f'{{"level":"info","time":"{time}","scope":"access","message":"connection complete",'
            '"src.addr":"127.0.0.1:33176","src.workload":"local","src.namespace":"default",'
            '"src.identity":"spiffe://cluster.local/ns/default/sa/default","dst.addr":"127.0.0.1:15008",'
            '"dst.hbone_addr":"127.0.0.1:8080","dst.workload":"local","dst.namespace":"default",'
            '"dst.identity":"spiffe://cluster.local/ns/default/sa/default","direction":"outbound",'
            '"bytes_sent":5,"bytes_recv":5,"duration":"212ms"}'
        )

    with_node(tmp_path, check, {"LOG_FORMAT": "json"})


def test_early_denial_has_one_warning_line(tmp_path: Path) -> None:
    def check(node: Node, clock: StoppedClock, lines: Lines) -> None:
        record = a_record(node, port=39232)
        record.denied_early(EarlyDeny(RECURSIVE_CALL, Reason.RECURSIVE_CALL))
        record.complete()
        (line,) = lines
        assert line == (
            "2026-11-21T11:14:45.997947Z\twarn\taccess\tconnection failed\tsrc.addr=127.0.0.1:39232 "
            'dst.addr=127.0.0.1:15008 direction="outbound" error="attempted recursive call to ourselves"'
        )
        assert not node.metrics.series

    with_node(tmp_path, check)


@pytest.mark.parametrize(("env", "level"), [({}, "info"), ({"ZTUNNEL_WARN_UNMATCHED": "true"}, "warn")])
def test_connection_without_service_or_workload_can_be_a_warning(
    tmp_path: Path, env: dict[str, str], level: str
) -> None:
    async def main() -> None:
        with a_node(tmp_path, env) as (node, _, lines):
            for direction, workload in (
                (Direction.OUTBOUND, None),
                (Direction.OUTBOUND, BACK),
                (Direction.INBOUND, None),
            ):
                ends = SocketAddress("10.0.0.1", 4000), SocketAddress("192.0.2.1", 443)
                record = Record(node, direction, *ends)
                record.destination_workload = workload
                record.opened()
                record.complete()
            assert [line.split("\t")[1] for line in lines] == [level, "info", "info"]

    asyncio.run(main())


def test_an_error_is_last_and_at_error_level(tmp_path: Path) -> None:
    def check(node: Node, clock: StoppedClock, lines: Lines) -> None:
        record = a_record(node)
        record.dry_run = "denied by ns/p"
        record.opened()
        record.complete(Failed('io error: "x"'))
        (line,) = lines
        assert line.split("\t")[1:4] == ["error", "access", "connection complete"]
        assert line.endswith('policy.dry_run="denied by ns/p" duration="0ms" error="io error: \\"x\\""')

    with_node(tmp_path, check)


def test_inbound_counts_bytes_as_the_application_does(tmp_path: Path) -> None:
    def check(node: Node, clock: StoppedClock, lines: Lines) -> None:
        record = a_record(node, direction=Direction.INBOUND)
        record.opened()
        move(record, 3, 8)
        record.complete()
        (line,) = lines
        assert 'direction="inbound" bytes_sent=8 bytes_recv=3' in line
        assert list(samples(node.metrics, "istio_tcp_received_bytes_total").values()) == [3]
        assert list(samples(node.metrics, "istio_tcp_sent_bytes_total").values()) == [8]

    with_node(tmp_path, check)


def test_unknown_workloads_are_left_out_of_the_line(tmp_path: Path) -> None:
    def check(node: Node, clock: StoppedClock, lines: Lines) -> None:
        record = Record(node, Direction.INBOUND, SocketAddress("192.0.2.1", 1), SocketAddress("2001:db8::1", 80))
        record.opened()
        record.complete()
        (line,) = lines
        assert line.split("\t")[4].startswith(
            'src.addr=192.0.2.1:1 dst.addr=[2001:db8::1]:80 direction="inbound" bytes_sent=0'
        )

    with_node(tmp_path, check)


def test_names_come_from_baggage_if_the_workload_is_unknown(tmp_path: Path) -> None:
    def check(node: Node, clock: StoppedClock, lines: Lines) -> None:
        record = a_record(node)
        record.source_workload = None
        record.source_labels = PeerLabels(canonical_service="svc", namespace="far", cluster="c2", known=True)
        record.opened()
        record.complete()
        (line,) = lines
        assert 'src.workload="svc" src.namespace="far"' in line
        assert 'src.cluster="c2" dst.addr' in line

    with_node(tmp_path, check)


def test_opening_is_logged_at_debug_level(tmp_path: Path) -> None:
    def check(node: Node, clock: StoppedClock, lines: Lines) -> None:
        record = a_record(node)
        record.opened()
        (line,) = lines
        assert line.split("\t")[1:4] == ["debug", "access", "connection opened"]
        assert line.endswith('direction="outbound"')

    with_node(tmp_path, check, {"RUST_LOG": "info,access=debug"})


def test_refusals_by_the_peers_policy_are_counted_by_pair(tmp_path: Path) -> None:
    def check(node: Node, clock: StoppedClock, lines: Lines) -> None:
        for failure in (None, Failed("io error", Reason.REFUSED), Failed("http status: 401", Reason.PEER_DENIED)):
            record = a_record(node)
            record.opened()
            record.complete(failure)
        (series,) = node.metrics.series
        assert (series.opened, series.closed, series.refused) == (3, {"-": 1, "CONNECT": 2}, 1)
        (there,) = node.metrics.page_with().series
        assert there.refused == 1

    with_node(tmp_path, check)


def test_log_filter_can_disable_access_lines(tmp_path: Path) -> None:
    def check(node: Node, clock: StoppedClock, lines: Lines) -> None:
        for failure in (None, Failed("x")):
            record = a_record(node)
            record.opened()
            record.complete(failure)
        a_record(node).denied_early(EarlyDeny("y", Reason.DNS))
        assert [line.split("\t")[1] for line in lines] == ["error"]

    with_node(tmp_path, check, {"RUST_LOG": "error"})


def test_connection_completes_once(tmp_path: Path) -> None:
    def check(node: Node, clock: StoppedClock, lines: Lines) -> None:
        record = a_record(node)
        record.opened()
        record.complete(Failed("x", Reason.POLICY))
        record.complete()
        assert len(list(lines)) == 1
        (labels,) = samples(node.metrics, "istio_tcp_connections_closed_total")
        assert 'response_flags="DENY"' in labels
        assert list(samples(node.metrics, "istio_tcp_connections_failed_total").values()) == [1]

    with_node(tmp_path, check)


def test_a_drained_connection_has_not_failed(tmp_path: Path) -> None:
    def check(node: Node, clock: StoppedClock, lines: Lines) -> None:
        record = a_record(node)
        record.opened()
        record.complete(of_reason(DRAINED))
        assert list(samples(node.metrics, "istio_tcp_connections_closed_total").values()) == [1]
        assert samples(node.metrics, "istio_tcp_connections_failed_total") == {}
        assert 'error="connection closed due to connection drain"' in next(iter(lines))

    with_node(tmp_path, check)


def test_connection_retried_elsewhere_is_counted_once(tmp_path: Path) -> None:
    """A connection is counted only when the answering endpoint is known, so that no counter ever decreases."""

    def check(node: Node, clock: StoppedClock, lines: Lines) -> None:
        record = a_record(node)
        record.opened(settled=False)
        assert samples(node.metrics, "istio_tcp_connections_opened_total") == {}
        record.destination_labels = PeerLabels(workload="second", known=True)
        record.settled()
        record.settled()
        (labels,) = samples(node.metrics, "istio_tcp_connections_opened_total")
        assert 'destination_workload="second"' in labels
        record.complete()
        assert list(samples(node.metrics, "istio_tcp_connections_opened_total").values()) == [1]
        assert list(samples(node.metrics, "istio_tcp_connections_closed_total").values()) == [1]

    with_node(tmp_path, check)


def test_a_connection_that_never_settles_counts_at_its_end(tmp_path: Path) -> None:
    def check(node: Node, clock: StoppedClock, lines: Lines) -> None:
        record = a_record(node)
        record.opened(settled=False)
        record.complete(Failed("x"))
        assert list(samples(node.metrics, "istio_tcp_connections_opened_total").values()) == [1]
        assert list(samples(node.metrics, "istio_tcp_connections_failed_total").values()) == [1]

    with_node(tmp_path, check)


@pytest.mark.parametrize("wanted", [False, True])
def test_connections_can_be_counted_by_port(tmp_path: Path, wanted: bool) -> None:
    async def main() -> None:
        with a_node(tmp_path, {"ZTUNNEL_METRIC_PORTS": str(wanted).lower()}) as (node, _, _lines):
            assert node.config.metric_ports is wanted
            node.metrics.ports = BoundedCounts() if wanted else None
            for authority, failure in (("10.0.0.2:8080", None), ("", Failed("x", Reason.REFUSED))):
                ends = SocketAddress("10.0.0.1", 4000), SocketAddress("192.0.2.1", 443)
                record = Record(node, Direction.OUTBOUND, *ends)
                record.hbone_authority = authority
                record.opened()
                record.complete(failure)
            found = samples(node.metrics.page_with(), "ztunnel_connections_by_port_total")
            assert set(found.values()) == ({1.0} if wanted else set())
            ends_of = [labels.partition("destination_port=")[2] for labels in found]
            assert ends_of == (['"8080",result="ok"}', '"443",result="failed"}'] if wanted else [])

    asyncio.run(main())
