"""What policies decide is counted by policy, and who was denied is listed: a whole proxy, then the bounds."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    Harness,
    Identities,
    Json,
    Open,
    access_log,
    application,
    ask,
    chain,
    cluster,
    listener,
    page,
    rbac,
    run,
    tcp,
    tunnel,
)
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts, PeerCertificate
from ztunnel.policy.calico.guard import note
from ztunnel.policy.calico.verdict import Code, Verdict
from ztunnel.policy.ledger import Use
from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo
from ztunnel.proxy.envoy.telemetry.decisions import Decisions
from ztunnel.runtime.clock import SystemClock

OTHER = "spiffe://td/ns/a/sa/other"


def named(name: str, judging: Json) -> Json:
    """An RBAC filter whose policy has this name."""
    rules = judging["typed_config"]["rules"]
    rules["policies"] = {name: rules["policies"].pop("rule")}
    return judging


def uses(harness: Harness) -> dict[str, Any]:
    found = {each["policy"]: each for each in json.loads(page(harness, "/rbac"))["policies"]}
    for each in found.values():
        if each["decisions"] is not None:
            assert each["decisions"].pop("lastTime").endswith("Z")
    return found


def test_plain_connections_are_counted_and_listed(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            anybody, nobody = named("open", rbac(None)), named("closed", rbac(None, "DENY"))
            await harness.published(listener(chain(anybody, tcp(), name="c")), cluster(port))
            assert await ask(harness.port("l")) == b"ping"
            assert json.loads(page(harness, "/denials")) == []
            assert uses(harness) == {
                "open": {
                    "policy": "open",
                    "action": "ALLOW",
                    "mode": "enforced",
                    "chains": 1,
                    "decisions": {"allowed": 1, "denied": 0, "ended": 0},
                }
            }
            live = await Open.to(harness.port("l"))
            assert await live.say(b"a") == b"a"
            await harness.published(listener(chain(anybody, nobody, tcp(), name="c")), cluster(port))
            assert await live.ended()
            await live.close()
            assert await ask(harness.port("l")) == b""
            found = uses(harness)
            assert found["open"]["decisions"] == {"allowed": 3, "denied": 0, "ended": 0}
            assert found["closed"]["decisions"] == {"allowed": 0, "denied": 1, "ended": 1}
            assert harness.count("rbac.policy.closed.denied") == 1
            denied, ended = json.loads(page(harness, "/denials"))
            where = SocketAddress("127.0.0.1", harness.port("l"))
            assert denied.pop("lastAddress").startswith("127.0.0.1:")
            assert denied.pop("lastTime").endswith("Z")
            assert denied == {
                "listener": "l",
                "chain": "c",
                "source": "127.0.0.1",
                "identity": "",
                "destination": str(where),
                "reason": "rbac_access_denied_matched_policy[closed]",
                "count": 1,
            }
            details = "connection closed due to policy change: rbac_access_denied_matched_policy[closed]"
            assert ended["reason"] == details

    run(tmp_path, body)


def test_a_tunnels_client_is_listed_by_its_identity(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await tunnel(harness, port, Identities(), rbac(OTHER))
            assert await ask(harness.port("l")) == b""
            (denied,) = json.loads(page(harness, "/denials"))
            assert (denied["identity"], denied["listener"]) == (CLIENT, "inbound")
            assert denied["reason"] == "rbac_access_denied_matched_policy[none]"
            found = uses(harness)
            assert found["none"]["decisions"] == {"allowed": 0, "denied": 1, "ended": 0}
            assert (found["rule"]["decisions"], found["rule"]["chains"]) == (None, 1)

    run(tmp_path, body)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines about denials, from the listener on."""
    name = "ztunnel.proxy.envoy.telemetry.decisions"
    return [each.getMessage() for each in caplog.records if each.name == name]


def test_without_access_logs_a_denial_has_a_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            anybody, nobody = named("open", rbac(None)), named("closed", rbac(None, "DENY"))
            await harness.published(listener(chain(anybody, tcp(), name="c")), cluster(port))
            live = await Open.to(harness.port("l"))
            assert await live.say(b"a") == b"a"
            await harness.published(listener(chain(anybody, nobody, tcp(), name="c")), cluster(port))
            assert await live.ended()
            await live.close()
            assert await ask(harness.port("l")) == b""
            logged = chain(nobody, tcp(access_log=access_log(tmp_path)), name="c")
            await harness.published(listener(logged), cluster(port))
            assert await ask(harness.port("l")) == b""  # the access log has it
            where = f"dst=127.0.0.1:{harness.port('l')} listener=l chain=c"
            end = f"identity=- {where} policy=closed rule=always"
            ended, denied = said(caplog)
            assert ended.startswith("connection ended by policy src=127.0.0.1:")
            assert denied.startswith("connection denied by policy src=127.0.0.1:")
            assert ended.endswith(end)
            assert denied.endswith(end)

    with caplog.at_level("INFO", "ztunnel.proxy.envoy.telemetry.decisions"):
        run(tmp_path, body)


def test_the_line_about_a_tunnel_has_its_clients_identity(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            await tunnel(harness, port, Identities(), rbac(OTHER), access_log=access_log(tmp_path))
            assert await ask(harness.port("l")) == b""
            (line,) = said(caplog)
            assert f"identity={CLIENT} " in line
            assert line.endswith("listener=inbound chain=one policy=none rule=none of 1 policies matches")

    with caplog.at_level("INFO", "ztunnel.proxy.envoy.telemetry.decisions"):
        run(tmp_path, body)


def test_dry_runs_are_counted_apart(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        async with application() as port:
            judging = named("trial", rbac(None, "DENY"))
            config = judging["typed_config"]
            config["shadow_rules"] = config.pop("rules")
            await harness.published(listener(chain(judging, tcp())), cluster(port))
            assert await ask(harness.port("l")) == b"ping"
            trial = uses(harness)["trial"]
            assert (trial["mode"], trial["decisions"]["shadow_denied"]) == ("shadow", 1)
            assert trial["decisions"]["denied"] == 0
            assert json.loads(page(harness, "/denials")) == []

    run(tmp_path, body)


def test_reset_counters_clears_the_decisions(tmp_path: Path) -> None:
    stats = Stats()
    decisions = Decisions(stats, SystemClock())
    decisions.count("p:1", Use.DENIED)
    note(decisions.ledger.calico, Verdict(Code.OK), 1.0)
    shown = {metric.name: (metric.family, metric.labels, metric.value) for metric in stats}  # type: ignore[union-attr]
    assert shown == {
        "rbac.policy.p_1.denied": ("rbac_policy_denied", (("policy", "p:1"),), 1),
        "policy.none.OK.allowed.decisions": (
            *("policy_decisions", (("tier", "none"), ("policy", "OK"), ("result", "allowed"))),
            1,
        ),
    }
    stats.reset_counters()
    assert list(stats) == []


@pytest.mark.parametrize(
    ("sans", "shown"), [((CLIENT,), CLIENT), (("spiffe://td/odd", "b"), "spiffe://td/odd,b"), (None, "")]
)
def test_denial_shows_the_names_of_the_certificate(sans: tuple[str, ...] | None, shown: str) -> None:
    peer = PeerCertificate(uri_sans=sans) if sans is not None else None
    address = SocketAddress("10.0.0.1", 1)
    facts = ConnectionFacts(source=address, direct_source=address, destination=address, peer=peer)
    info = StreamInfo(connection_id=1, facts=facts, started=0.0, started_at=0.0, listener="l")
    decisions = Decisions(Stats(), SystemClock())
    decisions.denied(info, facts, "why")
    assert [denial.pair.identity for denial in decisions.ledger.denials] == [shown]
