"""What the live page shows of an Istio mesh, and that the admin server answers for it."""

import asyncio
import json
from dataclasses import replace
from typing import Any

from hbone.aio.relay import ByteCounts
from tests.ztunnel.proxy.istio.admin.test_server import Harness, served
from tests.ztunnel.proxy.istio.path.test_route import BACK, CLIENT
from xds.model.authorization import Action, AuthorizationPolicy, PolicyScope
from xds.model.policy import Always
from xds.proto.well_known import Any as AnyMessage
from xds.protocol.resource import Resource, Update, UpdateRejected
from ztunnel.policy.ledger import Use
from ztunnel.proxy.flows.history import STEP_S, Totals
from ztunnel.proxy.istio.accounting.denials import Pair
from ztunnel.proxy.istio.accounting.metrics import PeerLabels, traffic_labels
from ztunnel.proxy.istio.accounting.outcome import Flags

HOSTILE = '<img src=x onerror=alert(1)>"\u2028</script>'


class End:
    """The part of a relay's end that counts its bytes."""

    def __init__(self, read_bytes: int) -> None:
        self.read_bytes = read_bytes


def moved(sent: int, received: int) -> ByteCounts:
    counts = ByteCounts()
    counts.follow(End(sent), End(received))  # type: ignore[arg-type]
    return counts


async def data(harness: Harness) -> Any:
    answer = await harness.ask("admin", "/ui/data")
    assert answer.status == 200, answer.text
    return json.loads(answer.text)


def test_the_page_is_off_where_the_setting_says_so() -> None:
    async def off(harness: Harness) -> None:
        for path in ("/ui", "/ui/events", "/ui/data"):
            answer = await harness.ask("admin", path)
            assert answer.status == 404
            assert "ZTUNNEL_UI=true" in answer.text

    async def on(harness: Harness) -> None:
        answer = await harness.ask("admin", "/ui")
        assert (answer.status, answer.headers["x-content-type-options"]) == (200, "nosniff")
        assert "/ui" in (await harness.ask("admin", "/")).text
        assert (await harness.ask("admin", "/uix")).status == 404
        assert (await harness.ask("admin", "/ui", Host="evil.example")).status == 403

    served(off, {"ZTUNNEL_UI": "false"})
    served(on)


def test_traffic_is_a_graph_of_workloads() -> None:
    async def check(harness: Harness) -> None:
        metrics = harness.proxy.metrics
        client = PeerLabels.of(replace(CLIENT, workload_name="client"), str(CLIENT.identity))
        back = PeerLabels.of(replace(BACK, workload_name="back"), str(BACK.identity))
        # Two series of one pair: they differ in a label that the graph does not have.
        for zone, flags in (("a", Flags.NONE), ("b", Flags.DENY)):
            labels = traffic_labels("source", client._replace(zone=zone), back, None, secured=True)
            counts = moved(100, 900)
            series = metrics.opened(labels, [CLIENT.uid, BACK.uid], counts, 1.0)
            series.finished(flags, counts)
            series.refused += 1
        plain_text = traffic_labels("destination", PeerLabels(), back, None, secured=False)
        metrics.opened(plain_text, [], moved(7, 0), 1.0)
        now_s = harness.proxy.clock.monotonic()
        for place in (0, 1):
            metrics.history.sample(now_s + place * STEP_S, Totals(connections=7 * place))
        shown = await data(harness)
        assert shown["past"]["connections"] == [7]
        told = {(each["source"], each["destination"]): each for each in shown["flows"]["shown"]}
        client_key, back_key = "shop/client", "shop/back"
        secured, plain = told[client_key, back_key], told["?", back_key]
        assert (secured["security"], plain["security"]) == ("mTLS", "plain")
        assert [secured[name] for name in ("opened", "open", "failed", "denied", "refused")] == [2, 0, 1, 1, 2]
        assert (secured["bytes_sent"], secured["bytes_received"]) == (200, 1800)
        assert (plain["open"], plain["bytes_sent"]) == (1, 7)
        named = {each["key"]: each for each in shown["workloads"]["shown"]}
        assert named[client_key]["identity"] == str(CLIENT.identity)
        assert named["?"]["name"] == "outside the mesh"

    served(check)


def test_policies_denials_certificates_and_sources_are_shown() -> None:
    async def check(harness: Harness) -> None:
        proxy = harness.proxy
        name = HOSTILE
        policy = AuthorizationPolicy(
            name=name, namespace="shop", scope=PolicyScope.NAMESPACE, action=Action.DENY, condition=Always()
        )
        proxy.mesh.apply([CLIENT, policy])
        proxy.metrics.ledger.own.note(policy.key, Use.DENIED, 5.0)
        proxy.metrics.ledger.denials.note(Pair("inbound", HOSTILE, "", "back.shop:80", "why"), "10.0.0.9:1", 7.0)
        await proxy.certificates.fetch(CLIENT.identity)
        shown = await data(harness)
        (told,) = shown["policies"]["shown"]
        assert (told["name"], told["denied"], told["last_s"]) == (policy.key, 1, 5.0)
        (denial,) = shown["denials"]["shown"]
        assert (denial["source"], denial["count"], denial["last_s"]) == (HOSTILE, 1, 7.0)
        (certificate,) = shown["certificates"]["shown"]
        assert (certificate["identity"], certificate["state"]) == (str(CLIENT.identity), "Available")
        assert certificate["valid_from_s"] <= shown["time_s"] < certificate["expires_s"]
        assert shown["facts"]["totals"] == {"workloads": 1, "services": 0, "policies": 1}

    served(check)


def test_refused_resources_are_named_until_a_readable_one_comes() -> None:
    async def check(harness: Harness) -> None:
        feed = harness.proxy.control._feed
        broken = Resource(name="shop/broken", version="1", body=AnyMessage())
        try:
            await feed.receive_authorizations(Update(type_url="t", version="1", resources=(broken,)))
        except UpdateRejected:
            pass
        (refused,) = (await data(harness))["refusals"]["shown"]
        assert refused == {"kind": "policy", "name": "shop/broken", "reason": "XDS payload without resource"}
        await feed.receive_authorizations(
            Update(type_url="t", version="2", resources=(), removed=("shop/broken",))
        )
        assert (await data(harness))["refusals"]["shown"] == []

    served(check)


def test_events_come_as_a_stream() -> None:
    async def check(harness: Harness) -> None:
        address = harness.addresses["admin"][0]
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(b"GET /ui/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        while not (line := await reader.readline()).startswith(b"data: "):
            assert line
        assert json.loads(line.removeprefix(b"data: "))["facts"]["dialect"] == "istio"
        writer.close()
        await writer.wait_closed()

    served(check)
