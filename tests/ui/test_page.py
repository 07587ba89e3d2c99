"""The live page in a browser with values of tests: the graph's geometry, links to a state, filters, and health."""

import json
import random
from dataclasses import replace
from typing import Any

import pytest

from tests.ui.browser import Browser
from tests.ui.serving import served
from tests.ztunnel.proxy.ui.values import FACTS, connection, flow, seen, workload
from ztunnel.ask.flows.model import chosen, make, read
from ztunnel.proxy.ui.seen import Seen, Source
from ztunnel.runtime.http.page import Page, PageRequest, text

pytestmark = pytest.mark.timeout(180)

PLANE = Source(name="control plane (xDS)", address="istiod:15012", connected=True)
WIDTHS = (400, 700, 1280)


def mesh(random_: random.Random, services: int, workloads: int) -> Seen:
    """Return a mesh with calls that form chains, circles and loops."""
    keys = [f"ns{number % 4}/workload-{number}-{'x' * (number % 30)}" for number in range(workloads)]
    flows = []
    for number in range(3 * workloads):
        service = random_.randrange(2 * services)
        name = f"service-{service}" if service < services else ""
        flows.append(
            flow(
                source=random_.choice(keys),
                destination=random_.choice(keys),
                service=f"{name}.ns1.svc" if name else "",
                service_namespace="ns1" if name else "",
                opened=number,
                failed=min(number, random_.choice((0, 0, number))),
                denied=0,
                bytes_sent=random_.randrange(1 << 40),
            )
        )
    flows = list({each.key: each for each in flows}.values())
    return seen(flows=flows, workloads=[workload(key) for key in keys], sources=[PLANE])


def counting(before: Seen) -> Seen:
    """Return the mesh a moment later: every pair has opened and failed more."""
    flows = [
        replace(
            each, opened=each.opened + 3, failed=each.failed + (each.failed > 0), bytes_sent=each.bytes_sent + 9000
        )
        for each in before.flows
    ]
    return replace(before, flows=flows)


#: Rectangles of the graph in its own coordinates: boxes, nodes and labels with text.
_RECTANGLES = """(() => {
  const of = (selector) => [...document.querySelectorAll(selector)]
    .filter(each => each.getAttribute('visibility') !== 'hidden')
    .map(each => { const box = each.getBoundingClientRect(); return [box.left, box.top, box.right, box.bottom]; });
  return {boxes: of('#graph .namespace rect'), nodes: of('#graph .node .box'),
    labels: of('#graph .labels > g').filter(([left, , right]) => right > left)};
})()"""


def apart(one: list[float], other: list[float]) -> bool:
    return one[2] <= other[0] or other[2] <= one[0] or one[3] <= other[1] or other[3] <= one[1]


@pytest.mark.parametrize("seed", range(3))
def test_nothing_of_the_graph_is_cut_or_covered(seed: int) -> None:
    current = mesh(random.Random(seed), services=2 + seed, workloads=6 + 5 * seed)

    def moving() -> Seen:
        nonlocal current
        current = counting(current)
        return current

    def use(page: Browser, origin: str) -> None:
        page.open(f"{origin}/ui")
        page.until("document.querySelectorAll('.edge text').length > 0")
        for width in WIDTHS:
            page.look(width=width)
            page.until(
                f"innerWidth === {width} && document.querySelector('#graph svg').width.baseVal.value <= {width}"
            )
            found = page.evaluate(_RECTANGLES)
            assert len(found["boxes"]) >= 3
            assert len(found["nodes"]) > 6
            assert found["labels"]
            for kind in ("boxes", "nodes", "labels"):
                rectangles = found[kind]
                assert all(each[0] >= 0 and each[2] <= width for each in rectangles), (width, kind)
                for place, each in enumerate(rectangles):
                    assert all(apart(each, other) for other in rectangles[:place]), (width, kind, each)
            assert all(apart(label, node) for label in found["labels"] for node in found["nodes"]), width
            overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert overflow <= 0, width
        pairs = page.evaluate("[...document.querySelectorAll('.edges .edge')].map(each => each.dataset.key)")
        assert len(pairs) == len(set(pairs)), "one edge per pair"
        assert page.problems == []

    served(moving, use)


def test_health_is_of_the_last_minute_and_names_the_peers_policy() -> None:
    """Source and destination can both report a pair. The text names the side that refused."""
    growth: dict[str, dict[str, int]] = {
        "good": {"opened": 100},
        "some": {"opened": 100, "failed": 2},
        "failing": {"opened": 100, "failed": 50},
        "denied": {"opened": 4, "failed": 4, "denied": 4},
        "peer": {"opened": 4, "failed": 4, "refused": 4},
        "idle": {},
        "old": {"opened": 3},  # it failed before this minute
    }

    def flows(*, later: bool) -> list[dict[str, Any]]:
        common = {"destination": "x", "service": "", "reporter": "source", "security": "mTLS", "open": 0}
        counts = ("opened", "failed", "denied", "refused")
        return [
            {**common, "source": name, **{each: 10 + later * grown.get(each, 0) for each in counts}}
            for name, grown in growth.items()
        ]

    def use(page: Browser, origin: str) -> None:
        page.open(f"{origin}/ui")
        found = page.evaluate(
            "import('/ui/mesh.js').then(({Recent, edgesOf}) => { const recent = new Recent();"
            f"recent.of({json.dumps(flows(later=False))}, 100, true);"
            f"const edges = edgesOf(recent.of({json.dumps(flows(later=True))}, 110, true));"
            "return edges.map(each => [each.source, each.kind, each.trouble]); })"
        )
        assert found == [
            ["good", "good", []],
            ["some", "some", ["2 % failed"]],
            ["failing", "failing", ["50 % failed"]],
            ["denied", "refused", ["100 % denied", "by policy"]],
            ["peer", "refused", ["100 % refused by", "the peer's policy"]],
            ["idle", "quiet", []],
            ["old", "good", []],
        ]
        both = [
            {
                **flows(later=True)[0],
                "reporter": reporter,
                "service": service,
                "opened": 7,
                "failed": failed,
                "denied": failed,
            }
            for reporter, service, failed in (("source", "web", 0), ("destination", "", 3))
        ]
        (client, server) = page.evaluate(
            "import('/ui/mesh.js').then(({Recent, edgesOf}) => "
            f"edgesOf(new Recent().of({json.dumps(both)}, 1, true))"
            ".map(each => [each.target, each.opened, each.failed]))"
        )
        assert client == ['["service","web"]', 7, 3], "a connection within the node is one, through its service"
        assert server == ["x", 7, 3]

    served(seen, use)


def test_a_link_shows_what_its_sender_saw() -> None:
    shown = seen(
        facts=replace(FACTS, flows_kept=0),
        flows=[flow(), flow(source="shop/c", service="")],
        workloads=[workload("shop/a"), workload("shop/b"), workload("shop/c")],
        connections=[connection(1)],
        connections_open=1,
        sources=[replace(PLANE, connected=False, away_s=3.0)],
    )

    def use(page: Browser, origin: str) -> None:
        page.open(f"{origin}/ui#connections?contains=10.0.0.1&direction=outbound&security=plain")
        page.until("document.getElementById('matches').textContent === '1 of 1 shown'")
        for name, value in (("filter", "10.0.0.1"), ("direction", "outbound"), ("security", "plain")):
            assert page.evaluate(f"document.getElementById('{name}').value") == value
        page.click("#filter")
        page.type("x y")
        page.until("location.hash.includes('contains=10.0.0.1x+y')")
        page.show("mesh")
        assert page.evaluate("location.hash") == "#mesh"
        page.evaluate("location.hash = '#mesh?node=shop%2Fc'")
        page.until("document.querySelectorAll('#traffic tbody tr').length === 1")
        assert page.evaluate("document.querySelector('.node.chosen').textContent").startswith("c")
        page.click("#clear")
        page.until("location.hash === '#mesh' && document.querySelectorAll('#traffic tbody tr').length === 2")
        page.show("connections")
        assert "contains=10.0.0.1x+y" in page.evaluate("location.hash"), "a view keeps its filters"
        page.evaluate("location.hash = '#flows?pod=shop%2Fa&security=plain'")
        page.until("document.getElementById('flow-pod').value === 'shop/a'")
        page.until("document.getElementById('flows-table').textContent.includes('The flight recorder is off')")
        page.evaluate("location.hash = '#nothing?x=1'")
        page.until("location.hash === '#mesh'")
        assert page.text("#plane").startswith("control plane gone since ")

    served(lambda: shown, use, lambda request: text(""))


#: Values of ``--pod``, each alone; some match nothing or are other kinds of text.
_PODS = (
    *(
        "default/web",
        "web",
        "shop/",
        "/we",
        "/",
        "",
        "10.0.0.7",
        "10.0.0.0/24",
        "10.0.0.0/33",
        "fd00::7",
        "fd00::/16",
    ),
    *("spiffe://td/ns/shop/sa/*", "spiffe://td/*/web", "spiffe://td/ns/shop/sa/web", "1.2.3", "::", "a.b(c"),
)


def _line(number: int) -> dict[str, Any]:
    hosts = ("10.0.0.7", "10.0.1.7", "fd00::7", "")
    names = (("default", "web-1"), ("shop", "web-2"), ("shop", "db"), ("", ""))
    (namespace, pod), (other_namespace, other) = names[number % 4], names[number // 4 % 4]
    side = {"namespace": namespace, "pod_name": pod} if pod else {}
    there = {"namespace": other_namespace, "workloads": [{"name": other}]} if other else {}
    ip = {"source": hosts[number % 4], "destination": hosts[number // 4 % 4], "encrypted": number % 3 == 0}
    more = {"source_identity": "spiffe://td/ns/shop/sa/web"} if number % 2 else {}
    time = f"2026-01-01T00:00:{number:02}.000000001Z"
    verdict = ("FORWARDED", "DROPPED", "ERROR")[number % 3]
    return {
        "flow": {
            "uuid": str(number),
            "time": time,
            "verdict": verdict,
            "IP": ip,
            "source": side,
            "destination": there,
        }
        | {"extensions": {"value": more}}
    }


def test_filters_mean_what_those_of_the_command_mean() -> None:
    lines = [_line(number) for number in range(48)]
    cases: list[tuple[dict[str, str], list[Any]]] = [
        ({}, []),
        ({"verdict": "dropped"}, [make("verdict", "dropped")]),
        ({"security": "plain"}, [make("plain", "")]),
        ({"security": "encrypted", "verdict": "error"}, [make("encrypted", ""), make("verdict", "error")]),
        *(({"pod": each}, [make("pod", each)] if each else []) for each in _PODS),
    ]
    flows = [found for found in map(read, lines) if found is not None]
    expected = [[found.uuid for found in flows if chosen(filters)(found)] for _, filters in cases]
    assert any(not each for each in expected)
    assert len({len(each) for each in expected}) > 5

    def use(page: Browser, origin: str) -> None:
        page.open(f"{origin}/ui")
        found = page.evaluate(
            "import('/ui/flow.js').then(({readFlow, chosenBy}) => {"
            f"const flows = {json.dumps(lines)}.map(readFlow);"
            f"return {json.dumps([filters for filters, _ in cases])}"
            ".map(each => flows.filter(chosenBy(each)).map(flow => flow.id)); })"
        )
        for (filters, _), here, there in zip(cases, found, expected, strict=True):
            assert here == there, filters

    served(seen, use)


def test_flows_follow_and_a_pause_stops_them() -> None:
    asked: list[dict[str, str]] = []

    def others(request: PageRequest) -> Page:
        if request.path != "/flows":
            return text("", 404)
        asked.append(dict(request.query.pairs))
        return text(
            "".join(json.dumps(_line(number)) + "\n" for number in range(2 * len(asked) - 2, 2 * len(asked)))
        )

    def use(page: Browser, origin: str) -> None:
        page.open(f"{origin}/ui#flows")
        page.until("document.querySelectorAll('#flows-table tbody tr').length >= 4")
        assert asked[0] == {"last": "1000"}
        assert asked[1] == {"after": "1767225601000000001", "last": "500"}
        assert page.rows("#flows-table")[-1][0] == "00:00:00.000"
        page.click("#pause")
        page.until("document.getElementById('pause').textContent === 'Resume'")
        page.until("document.getElementById('age').textContent === 'paused'")
        number = len(asked)
        assert len(page.rows("#flows-table")) <= 2 * number
        page.click("#pause")
        while len(asked) == number:
            page.evaluate("new Promise(done => setTimeout(done, 20))")

    served(seen, use, others)
