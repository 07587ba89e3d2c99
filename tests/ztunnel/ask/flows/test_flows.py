"""``ztunnel flows``: filters, bounds, forms, following, and all nodes at once."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.ztunnel.ask.inspect.harness import pages
from ztunnel.ask.flows import command
from ztunnel.ask.flows.model import BadFilter, Filter, chosen, make, read
from ztunnel.ask.inspect.ages import time_ns
from ztunnel.ask.inspect.fleet import Found
from ztunnel.ask.inspect.source import Pages
from ztunnel.cli import main

Output = pytest.CaptureFixture[str]
SCHEMA = Path(__file__).parents[4] / "docs" / "schemas" / "FlowList.json"


def line(number: int, verdict: str = "FORWARDED", **more: Any) -> dict[str, Any]:
    time = f"2026-11-26T12:00:{number:02}.000000001Z"
    flow = {
        "time": time,
        "uuid": f"id-{number}",
        "verdict": verdict,
        "IP": {"source": "10.0.0.1", "destination": "10.0.0.2", "encrypted": more.get("encrypted", True)},
        "l4": {"TCP": {"source_port": 4000 + number, "destination_port": 8080, "flags": {"FIN": True}}},
        "source": {"namespace": "shop", "pod_name": more.get("source", "web-1")},
        "destination": {"namespace": "bank", "pod_name": "vault-1"},
        "traffic_direction": more.get("direction", "INGRESS"),
        "extensions": {
            "value": {
                "bytes_sent": 10,
                "duration_seconds": 0.25,
                "source_identity": "spiffe://td/ns/shop/sa/web",
                **more.get("value", {}),
            }
        },
    }
    return {"flow": flow, "node_name": "c/n1", "time": time}


LINES = [
    line(1),
    line(2, "DROPPED", value={"reason": "explicitly denied by: bank/p", "policy": "bank/p"}),
    line(3, encrypted=False, source="cron-1"),
    line(4, "ERROR", direction="EGRESS"),
]
PAGE = "".join(f"{json.dumps(each)}\n" for each in LINES).encode()


def shown(capsys: Output, *words: str) -> list[str]:
    with pages({"/flows": PAGE}) as address:
        assert main(["flows", "--address", address, "-o", "name", *words]) == 0
    return [each.partition("/id-")[2] for each in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ([], "1 2 3 4"),
        (["--last", "2"], "3 4"),
        (["--last", "0"], ""),
        (["--verdict", "dropped"], "2"),
        (["--verdict", "dropped", "--verdict", "error"], "2 4"),
        (["--verdict", "forwarded", "--plain"], "3"),
        (["--not", "--plain"], "1 2 4"),
        (["--not", "--verdict", "forwarded", "--encrypted"], "2 4"),
        (["--from", "shop/web"], "1 2 4"),
        (["--from", "shop/"], "1 2 3 4"),
        (["--from", "/cron"], "3"),
        (["--from", "web"], ""),  # of namespace default
        (["--to", "shop/"], ""),
        (["--pod", "bank/vault"], "1 2 3 4"),
        (["--to", "10.0.0.0/30"], "1 2 3 4"),
        (["--from", "10.0.0.2"], ""),
        (["--identity", "spiffe://td/ns/shop/*"], "1 2 3 4"),
        (["--identity", "spiffe://td/ns/other/*"], ""),
        (["--port", "4003"], "3"),
        (["--direction", "outbound"], "4"),
        (["-n", "nowhere"], ""),
        (["-n", "bank"], "1 2 3 4"),
        (["-n", "bank", "--pod", "shop/cron"], "3"),  # the namespace restricts further filters
        (["-n", "nowhere", "--pod", "shop/cron"], ""),
        (["--since", "2026-11-26T12:00:03Z"], "3 4"),
        (["--since", "2026-11-26T12:00:02Z", "--until", "2026-11-26T12:00:04Z"], "2 3"),
        (["--since", "2026-11-26T12:00:00Z", "--last", "1"], "4"),
    ],
)
def test_filters_and_bounds(words: list[str], found: str, capsys: Output) -> None:
    assert shown(capsys, *words) == found.split()


def test_a_time_before_1970_has_all_flows(capsys: Output) -> None:
    """A proxy refuses a negative time."""
    asked: list[str] = []
    with pages({"/flows": PAGE}, asked=asked) as address:
        assert main(["flows", "--address", address, "--since", "800000h", "-o", "name"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert asked == ["/flows"]


def test_a_table_says_what_was_refused_and_why(capsys: Output) -> None:
    with pages({"/flows": PAGE}) as address:
        assert main(["flows", "--address", address, "--verdict", "dropped"]) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split()[:5] == ["TIME", "VERDICT", "DIRECTION", "SOURCE", "DESTINATION"]
    assert row.split()[:6] == [
        *("2026-11-26T12:00:02.000Z", "DROPPED", "inbound"),
        *("shop/web-1", "bank/vault-1:8080", "mTLS"),
    ]
    assert row.endswith("explicitly denied by: bank/p")


def test_json_has_its_schema_and_jsonpb_is_the_proxys_line(capsys: Output) -> None:
    with pages({"/flows": PAGE}) as address:
        assert main(["flows", "--address", address, "-o", "json"]) == 0
        found = json.loads(capsys.readouterr().out)
        jsonschema.validate(found, json.loads(SCHEMA.read_text()))
        assert found["items"][1]["policy"] == "bank/p"
        assert main(["flows", "--address", address, "-o", "jsonpb", "--last", "1"]) == 0
    assert json.loads(capsys.readouterr().out) == LINES[-1]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--since", "soon"], "--since: neither a duration such as 5m nor a time: 'soon'"),
        (["--not"], "--not: no filter follows"),
    ],
)
def test_a_wrong_command_line(words: list[str], error: str, capsys: Output) -> None:
    assert main(["flows", *words]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("verdict", "lost"), ("port", "http"), ("port", "\u00b2"), ("port", "9" * 5000), ("port", "65536")),
        *(("direction", "ingress"), ("colour", "red")),
    ],
)
def test_a_bad_filter_is_named(name: str, value: str) -> None:
    with pytest.raises(BadFilter):
        make(name, value)


def test_a_proxy_without_a_recorder_is_named(capsys: Output) -> None:
    with pages({"/config_dump": b"{}"}) as address:
        assert main(["flows", "--address", address]) == 2
    assert "it has no flight recorder (/flows)" in capsys.readouterr().err
    for line in ("nonsense", '{"flow": {"time": "soon"}}', '{"lost_events": 5}'):
        with pages({"/flows": f"{{}}\n{line}\n".encode()}) as address:
            assert main(["flows", "--address", address]) == 2
        assert "/flows has a line that is no flow" in capsys.readouterr().err


def test_following_prints_each_flow_once(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = threading.Event()
    asked = 0

    def pause(seconds: float) -> None:
        nonlocal asked
        asked += 1
        if asked == 3:
            seen.set()
            raise KeyboardInterrupt

    monkeypatch.setattr("ztunnel.ask.flows.command.time.sleep", pause)
    with pages({"/flows": PAGE}) as address:
        words = ["flows", "-f", "--address", address, "--since", "2026-11-26T12:00:02Z", "--not", "--plain"]
        assert main([*words, "-o", "json"]) == 0
    found = [json.loads(each)["uuid"] for each in capsys.readouterr().out.splitlines()]
    assert found == ["id-2", "id-4"]
    assert seen.is_set()


class Recorder:
    """The pages of one proxy, whose recorder can get flows between two requests.

    Attributes:
        flows: the lines of its recorder.
        after: the parameter ``after`` of each request.
    """

    def __init__(self, *flows: dict[str, Any]) -> None:
        self.name = "here"
        self.saved = False
        self.flows = [*flows]
        self.after: list[str] = []

    def text(self, path: str, parameters: Mapping[str, str | None] | None = None) -> str:
        asked = parameters or {}
        after, last = str(asked.get("after", "0")), int(asked.get("last") or len(self.flows))
        self.after.append(after)
        found = [each for each in self.flows if time_ns(each["time"]) > int(after)]
        return "".join(f"{json.dumps(each)}\n" for each in found[-last:] if last)

    def json(self, path: str, parameters: Mapping[str, str | None] | None = None) -> Any:
        policy = {"policy": "bank/p", "action": "Deny", "holds": True, "because": "all"}
        return {"inbound": {"policies": [policy], "refused": "explicitly denied by: bank/p"}}


def followed(
    recorders: Mapping[str, Recorder],
    between: Sequence[Callable[[], None]],
    words: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    since: bool = True,
) -> None:
    """Follow these nodes, call each of ``between`` before one further request, and press Ctrl-C."""
    steps = iter(between)

    def pause(seconds: float) -> None:
        step = next(steps, None)
        if step is None:
            raise KeyboardInterrupt
        step()

    def gather(args: Any, look: Callable[[str, Pages], Any]) -> Found[Any]:
        return Found({node: look(node, each) for node, each in recorders.items()}, across="" not in recorders)

    monkeypatch.setattr("ztunnel.ask.flows.command.time.sleep", pause)
    monkeypatch.setattr("ztunnel.ask.flows.command.gather_by_node", gather)
    since = ["--since", "2026-11-26T12:00:00Z"] if since else []
    assert main(["flows", "-f", "-o", "json", *since, *words]) == 0


def test_following_asks_only_for_flows_after_those_that_filters_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    here = Recorder(*LINES)
    followed({"": here}, [lambda: None], ["--port", "4001"], monkeypatch)
    assert here.after[1] == str(time_ns("2026-11-26T12:00:04.000000001Z"))


def test_a_quiet_node_does_not_make_requests_to_other_nodes_repeat_flows(
    capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, quiet = Recorder(line(1)), Recorder()
    later = [lambda: busy.flows.append(line(5)), lambda: quiet.flows.append(line(3))]  # its clock is behind
    followed({"n1": busy, "n2": quiet}, later, [], monkeypatch)
    start, first, second = (
        str(time_ns(f"2026-11-26T12:00:{time}Z")) for time in ("00", "01.000000001", "05.000000001")
    )
    assert (busy.after, quiet.after) == ([start, first, second], [start, start, start])
    found = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert [(each["node"], each["uuid"]) for each in found] == [("n1", "id-1"), ("n1", "id-5"), ("n2", "id-3")]


def test_following_does_not_depend_on_the_clocks_of_nodes(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of this machine can be ahead of a node's, or behind."""
    for now in ("2020-01-01T00:00:00Z", "2030-01-01T00:00:00Z"):
        nodes = {"old": Recorder(line(1), line(2)), "empty": Recorder()}
        later = [
            lambda nodes=nodes: nodes["old"].flows.append(line(3)),
            lambda nodes=nodes: nodes["empty"].flows.append(line(4)),
        ]
        now_s = time_ns(now) / 1e9
        monkeypatch.setattr("ztunnel.ask.flows.command.time.time", lambda now_s=now_s: now_s)
        followed(nodes, later, [], monkeypatch, since=False)
        found = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
        assert [(each["node"], each["uuid"]) for each in found] == [("old", "id-3"), ("empty", "id-4")]


def test_following_adds_clauses_and_ends_at_a_time(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    followed({"": Recorder(*LINES)}, [], ["--why", "--until", "2026-11-26T12:00:03Z"], monkeypatch)
    found = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert [(each["uuid"], each["clause"]) for each in found] == [("id-1", None), ("id-2", "bank/p: all")]


def _policy(name: str, action: str, *, holds: bool) -> dict[str, Any]:
    return {"policy": f"bank/{name}", "action": action, "holds": holds, "because": f"{action} {holds}"}


@pytest.mark.parametrize(
    ("policies", "refused", "clause"),
    [
        # A DENY that does not match is not the reason; explain lists it before the ALLOW policies.
        ([_policy("d", "Deny", holds=False), _policy("a", "Allow", holds=False)], True, "bank/a: Allow False"),
        ([_policy("d", "Deny", holds=True), _policy("a", "Allow", holds=False)], True, "bank/d: Deny True"),
        ([_policy("a", "Allow", holds=True), _policy("d", "Deny", holds=True)], True, "bank/d: Deny True"),
        # The policies have changed since: no clause refuses the connection now.
        ([_policy("b", "Allow", holds=True), _policy("a", "Allow", holds=False)], False, None),
        ([_policy("d", "Deny", holds=False)], False, None),
        ([], True, None),
    ],
)
def test_the_clause_is_one_that_refuses(policies: list[dict[str, Any]], refused: bool, clause: str | None) -> None:
    inbound = {"policies": policies, **({"refused": "for a reason"} if refused else {"allowed_by": "bank/b"})}
    assert command.clause_of({"inbound": inbound}) == clause


def test_kinds_of_filters_are_joined_and_their_values_are_alternatives() -> None:
    flow = read(LINES[1])
    assert flow is not None
    filters: list[Filter] = [make("verdict", "ERROR"), make("verdict", "DROPPED"), make("from", "shop/web")]
    assert chosen(filters)(flow)
    assert not chosen([*filters, make("plain", "")])(flow)
    assert not chosen([*filters, make("pod", "bank/", negated=True)])(flow)
    assert time_ns("2026-11-26T12:00:02.000000001Z") % 1_000_000_000 == 1
