"""``ztunnel stat`` and ``edges``: counting pairs, and a real proxy measured twice."""

import asyncio
import io
import json
import tarfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import msgspec
import pytest

from tests.limits import WAIT_S
from tests.ztunnel.ask.inspect.harness import pages
from tests.ztunnel.proxy.istio.accounting.test_flows import DENIED, record
from tests.ztunnel.proxy.istio.admin.test_server import Harness, served
from tests.ztunnel.proxy.istio.path.test_route import BACK, CLIENT
from xds.model.address import SocketAddress
from ztunnel.ask.stat.graph import dot
from ztunnel.ask.stat.traffic import (
    Edge,
    NodeReadings,
    PairKey,
    edges,
    flow_of,
    pairs,
    plain_because,
    quantile,
    reading,
    stats,
)
from ztunnel.cli import main
from ztunnel.proxy.istio.accounting.access_record import Direction, Record
from ztunnel.proxy.istio.accounting.metrics import PeerLabels

Output = pytest.CaptureFixture[str]
SCHEMAS = Path(__file__).parents[4] / "docs" / "schemas"
WEB, BANK = ("shop", "web"), ("gold", "bank")
SECURED, PLAIN = PairKey(WEB, BANK, True), PairKey(WEB, BANK, False)


def page(reporter: str = "source", security: str = "mutual_tls", **numbers: float) -> str:
    labels = (
        f'reporter="{reporter}",source_workload="web",source_workload_namespace="shop",destination_workload="bank",'
        f'destination_workload_namespace="gold",response_flags="-",connection_security_policy="{security}"'
    )
    names = {"opened": "connections_opened", "closed": "connections_closed", "failed": "connections_failed"}
    return "# HELP x y\nother_total 1\n" + "".join(
        f"istio_tcp_{names.get(name, name)}_total{{{labels}}} {value}\n" for name, value in numbers.items()
    )


def flow(verdict: str = "FORWARDED", connect_s: float | None = None, way: str = "EGRESS") -> dict[str, Any]:
    return {
        "flow": {
            "verdict": verdict,
            "IP": {"encrypted": True},
            "traffic_direction": way,
            "source": {"namespace": "shop", "workloads": [{"name": "web"}]},
            "destination": {"namespace": "gold", "workloads": [{"name": "bank"}]},
            "extensions": {"value": {} if connect_s is None else {"connect_seconds": connect_s}},
        }
    }


def node(before: str, after: str, *flows: dict[str, Any]) -> NodeReadings:
    return NodeReadings(before=reading(before), after=reading(after), flows=[*map(flow_of, flows)])


def test_counters_are_compared_between_two_readings() -> None:
    before = page(opened=10, closed=4, received_bytes=100, sent_bytes=7)
    after = page(opened=15, closed=6, failed=1, received_bytes=350, sent_bytes=9)
    found = pairs([node(before, after)])
    counted = found[SECURED]
    assert (counted.opened, counted.closed, counted.failed, counted.open_now) == (5, 2, 1, 9)
    # Istio's metrics take the server's view: it has received what the client sent.
    assert (counted.sent, counted.received) == (250, 2)


def test_a_pair_that_both_proxies_report_counts_once() -> None:
    found = pairs([node("", page(opened=5)), node("", page("destination", opened=5))])
    assert found[SECURED].opened == 5
    found = pairs([node("", page(opened=5)), node("", page("destination", opened=7))])  # other clients of its name
    assert found[SECURED].opened == 7


def test_a_counter_that_went_down_is_a_new_processs() -> None:
    assert pairs([node(page(opened=100), page(opened=3))])[SECURED].opened == 3


def test_pairs_without_a_connection_are_left_out_and_open_ones_are_not() -> None:
    assert pairs([node(page(opened=5, closed=5), page(opened=5, closed=5))]) == {}
    assert pairs([node(page(opened=5, closed=4), page(opened=5, closed=4))])[SECURED].open_now == 1


def test_the_recorder_adds_denials_and_times() -> None:
    flows = [*(flow(connect_s=number / 1000) for number in range(100)), flow("DROPPED", way="INGRESS")]
    found = pairs([node("", page(opened=100, closed=100), *flows)])
    (stat,) = stats(found, 10.0, by="destination")
    assert (stat.namespace, stat.workload, stat.connections, stat.denied) == ("gold", "bank", 100, 1)
    assert (stat.connect_p50_seconds, stat.connect_p99_seconds, stat.per_second) == (0.05, 0.099, 10.0)
    (client,) = stats(found, 10.0, by="source")
    assert client.workload == "web"


def test_shares_of_mtls_and_plain_pairs_first() -> None:
    found = pairs([node("", page(opened=3, closed=3) + page(security="unknown", opened=1, closed=1))])
    (stat,) = stats(found, 0.0, by="destination")
    assert stat.encrypted == 0.75
    assert [each.security for each in edges(found, 1.0, lambda key: "x")] == ["plain", "mTLS"]


@pytest.mark.parametrize(
    ("workloads", "reason"),
    [
        ([("shop", "web", "HBONE"), ("gold", "bank", "TCP")], "the destination takes no tunnels"),
        ([("shop", "web", "TCP"), ("gold", "bank", "HBONE")], "the source is not in the mesh"),
        ([("shop", "web", "HBONE"), ("gold", "bank", "HBONE")], "both are in the mesh"),
    ],
)
def test_why_a_pair_is_plain(workloads: list[tuple[str, str, str]], reason: str) -> None:
    listed = [{"namespace": n, "workloadName": w, "protocol": p} for n, w, p in workloads]
    assert plain_because({"workloads": listed})(PLAIN).startswith(reason)


def test_quantiles() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3.0], 0.99) == 3.0
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0


# Commands


def printed_json(capsys: Output) -> Any:
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, json.loads((SCHEMAS / f"{found['kind']}.json").read_text()))
    return found


NAMED = replace(CLIENT, workload_name="client"), replace(BACK, workload_name="back")


def named(found: Record) -> Record:
    found.source_workload, found.destination_workload = NAMED
    found.source_labels, found.destination_labels = map(PeerLabels.of, NAMED)
    return found


@pytest.mark.parametrize("ahead_s", [0, 3600, -3600])  # the clock of this machine can differ from the node's
def test_a_real_proxy_is_measured(ahead_s: float, capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(harness: Harness) -> None:
        harness.proxy.mesh.apply(NAMED)
        address = str(harness.addresses["admin"][0])
        loop = asyncio.get_running_loop()

        async def traffic() -> None:
            for _ in range(3):
                closed = named(record(harness, Direction.OUTBOUND))
                closed.opened()
                closed.complete()
            denied = named(record(harness, Direction.INBOUND))
            denied.opened()
            denied.complete(DENIED)
            plain = Record(
                harness.proxy.node,
                Direction.OUTBOUND,
                SocketAddress("10.0.0.1", 1),
                SocketAddress("192.0.2.1", 80),
            )
            plain.opened()

        async def ask(*words: str) -> int:
            return await asyncio.to_thread(main, [*words, "--address", address, "-o", "json"])

        def between(_wait_s: float) -> None:
            asyncio.run_coroutine_threadsafe(traffic(), loop).result(WAIT_S)

        await traffic()  # not in the window
        # Its sleep is called between the two readings.
        clock = SimpleNamespace(time=lambda: time.time() + ahead_s, sleep=between)
        monkeypatch.setattr("ztunnel.ask.stat.command.time", clock)
        assert await ask("edges", "-t", "1s", "--fail-on", "plain") == 1
        found = printed_json(capsys)
        assert found["summary"]["plain"] == 1
        plain, secured = found["items"]
        assert (plain["security"], plain["because"]) == ("plain", "the destination is outside the mesh")
        assert (secured["source"], secured["connections"], secured["denied"]) == ("shop/client", 3, 1)
        assert secured["connectP50Seconds"] is not None
        assert await asyncio.to_thread(main, ["edges", "--total", "--address", address, "-o", "dot"]) == 0
        graph = capsys.readouterr().out
        assert graph.startswith("digraph mesh {\n")
        assert '"shop/client" -> "shop/back"' in graph
        assert await ask("stat", "--total") == 0
        assert {each["workload"] for each in printed_json(capsys)["items"]} == {"back", "unknown"}

    served(check)


def test_fail_on_plain_exits_with_0_without_plain_connections(capsys: Output) -> None:
    bodies = {"/metrics": page(opened=5, closed=5).encode(), "/flows": b""}
    with pages(bodies) as address:
        assert main(["edges", "--total", "--fail-on", "plain", "--address", address]) == 0
        assert "1 pairs, 0 of them plain" in capsys.readouterr().out
        assert main(["edges", "-t", "0s", "--address", address, "-n", "nowhere"]) == 0
        assert capsys.readouterr().out == "No pairs with connections found.\n"


def test_a_proxy_without_metrics_on_its_admin_server_is_named(capsys: Output) -> None:
    with pages({"/config_dump": b"{}"}) as address:
        assert main(["stat", "--total", "--address", address]) == 2
    assert "its admin server has no /metrics" in capsys.readouterr().err
    assert main(["stat", "--window", "soon"]) == 2


def test_pairs_are_a_graph() -> None:
    good = Edge(
        source="shop/web", destination="shop/db", security="mTLS", window_seconds=1.0, connections=3, failed=0,
        denied=0, open=0, bytes_sent=0, bytes_received=0, connect_p99_seconds=0.002,
    )  # fmt: skip
    more = {"source": 'a"b', "security": "plain", "connections": 1, "failed": 1, "connect_p99_seconds": None}
    found = "\n".join(dot([good, msgspec.structs.replace(good, **more)]))
    assert 'subgraph cluster_0 { label="shop";' in found
    assert '"shop/web" -> "shop/db" [label="3 connections, p99 2.0 ms", color=darkgreen];' in found
    assert '"a\\"b" -> "shop/db" [label="1 connections, 1 failed, 0 denied", color=red, style=dashed];' in found


@pytest.mark.parametrize(
    "bad", [{"source": {"workloads": [[]]}}, {"extensions": {"value": {"connect_seconds": {}}}}]
)
def test_a_flow_of_another_form_is_named(bad: dict[str, Any], capsys: Output) -> None:
    line = json.dumps({"flow": {**flow()["flow"], **bad}}).encode()
    with pages({"/metrics": page(opened=1).encode(), "/flows": line}) as address:
        assert main(["stat", "--total", "--address", address]) == 2
    assert capsys.readouterr().err == f"ztunnel stat: {address}: /flows has a line that is no flow\n"


def test_pairs_are_shown_without_a_reason_if_the_mesh_is_unknown(capsys: Output) -> None:
    with pages({"/metrics": page(security="unknown", opened=1).encode(), "/config_dump": b"{broken"}) as address:
        assert main(["edges", "--total", "--address", address, "-o", "json"]) == 0
    (item,) = json.loads(capsys.readouterr().out)["items"]
    assert (item["security"], item["because"]) == ("plain", None)


def archive(folder: Path, **nodes: dict[str, str]) -> str:
    """Write an archive with pages of nodes, by their names in it. Return its path."""
    path = folder / "report.tar.gz"
    files = {f"nodes/{node}/proxy/{name}": body for node, found in nodes.items() for name, body in found.items()}
    with tarfile.open(path, "w:gz") as tar:
        for name, body in {"index.json": "{}", **files}.items():
            entry = tarfile.TarInfo(f"report/{name}")
            entry.size = len(body)
            tar.addfile(entry, io.BytesIO(body.encode()))
    return str(path)


def test_archive_with_one_reading_has_totals_and_no_rates(tmp_path: Path, capsys: Output) -> None:
    """``bug-report --quick`` reads metrics once."""
    path = archive(tmp_path, n1={"metrics": page(opened=500)})
    assert main(["stat", "--file", path, "-o", "json"]) == 0
    (item,) = json.loads(capsys.readouterr().out)["items"]
    assert (item["connections"], item["perSecond"], item["windowSeconds"]) == (500, 0.0, 0.0)


def test_archive_with_two_readings_has_rates_or_totals(tmp_path: Path, capsys: Output) -> None:
    both = {"metrics": page(opened=500), "metrics_later": page(opened=520)}
    path = archive(tmp_path, n1=both, n2={"metrics": page(opened=7)})
    assert main(["stat", "--file", path, "-o", "json"]) == 2
    answer = json.loads(capsys.readouterr().out)
    (item,) = answer["items"]
    assert (item["connections"], item["perSecond"]) == (20, 2.0)
    assert [each["node"] for each in answer["silent"]] == ["n2"]
    assert main(["stat", "--file", path, "--total", "-o", "json"]) == 0
    (item,) = json.loads(capsys.readouterr().out)["items"]
    assert (item["connections"], item["perSecond"]) == (527, 0.0)


@pytest.mark.parametrize(
    ("words", "interval_s", "pause_s"),
    [([], 10.0, 0.0), (["-t", "3s"], 3.0, 0.0), (["-t", "250ms"], 1.0, 0.75), (["--total"], 1.0, 1.0)],
)
def test_top_shows_how_often_it_redraws(
    words: list[str], interval_s: float, pause_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each table takes the time between its two readings, so no pause is needed in addition."""
    watched: list[float] = []

    def watch(
        look: object, interval_s: float, *args: object, pause: Callable[[float], None], **more: object
    ) -> int:
        watched.append(interval_s)
        pause(interval_s)
        return 0

    monkeypatch.setattr("ztunnel.ask.stat.command.watch", watch)
    monkeypatch.setattr("ztunnel.ask.stat.command.time", SimpleNamespace(sleep=watched.append))
    assert main(["top", *words]) == 0
    assert watched == [interval_s, pause_s]
