"""The proxy as a whole where Calico's policies are in force; every pod is at 127.0.0.1."""

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

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
    cluster,
    listener,
    page,
    rbac,
    run,
    tunnel,
)
from ztunnel.policy.calico.guard import results
from ztunnel.policy.calico.settings import PolicySettings
from ztunnel.proxy.envoy.admin.readiness import pending
from ztunnel.proxy.envoy.config.settings import settings_from
from ztunnel.proxy.envoy.config.state import State
from ztunnel.proxy.envoy.path.calico import POLICY_CHANGE
from ztunnel.proxy.envoy.path.connect import Connector
from ztunnel.runtime.settings import SettingsError

POD = """
apiVersion: v1
kind: Pod
metadata: {name: all, namespace: a, uid: u, labels: {app: all}}
spec: {serviceAccountName: client, nodeName: "n"}
status: {podIPs: [{ip: 127.0.0.1}]}
---
apiVersion: projectcalico.org/v3
kind: GlobalNetworkPolicy
metadata: {name: both}
spec:
  selector: app == 'all'
  types: [Ingress, Egress]
"""


def policies(ingress: str = "[{action: Allow}]", egress: str = "[{action: Allow}]", staged: str = "") -> str:
    more = ""
    if staged:
        more = f"""
---
apiVersion: projectcalico.org/v3
kind: StagedGlobalNetworkPolicy
metadata: {{name: soon}}
spec: {{selector: app == 'all', order: 1, types: [Ingress], ingress: {staged}}}
"""
    return f"{POD}  ingress: {ingress}\n  egress: {egress}\n{more}"


class CalicoHarness:
    """A harness whose proxy has the policies of a folder."""

    def __init__(self, harness: Harness, folder: Path) -> None:
        self.harness = harness
        self._folder = folder
        assert harness.proxy.policies is not None
        self.policies = harness.proxy.policies

    async def change(self, text: str) -> None:
        """Change them, and wait until connections have been reviewed."""
        before = self.policies.changes
        (self._folder / "new").write_text(text)
        (self._folder / "new").rename(self._folder / "all.yaml")
        await self.harness.until(lambda: self.policies.changes > before)


def with_calico(
    folder: Path, text: str, body: Callable[[CalicoHarness], Awaitable[None]], *resources: tuple[str, Json]
) -> None:
    there = folder / "policies"
    there.mkdir()
    (there / "all.yaml").write_text(text)

    async def with_policies(harness: Harness) -> None:
        made = CalicoHarness(harness, there)
        await harness.until(lambda: made.policies.source.in_sync)
        await body(made)

    run(folder, with_policies, *resources, policies=PolicySettings(directory=str(there)))


def test_listeners_open_once_the_policies_are_complete(tmp_path: Path) -> None:
    """Otherwise a rollout would end a predecessor that has policies for a successor that admits no connection."""
    folder = tmp_path / "policies"
    folder.mkdir()
    (folder / "all.yaml").write_text("kind: [")

    async def body(harness: Harness) -> None:
        async with application(b"hi ") as port:
            harness.publish(listener(), cluster(port))
            await harness.until(lambda: harness.proxy.listeners.active)
            await harness.until(lambda: pending(harness.proxy) == ["policies"])
            assert harness.proxy.state is State.INITIALIZING
            assert "policies" in page(harness, "/init_dump")
            with pytest.raises(ConnectionRefusedError):
                await ask(harness.port("l"))
            (folder / "new").write_text(policies())
            (folder / "new").rename(folder / "all.yaml")
            await harness.until(lambda: harness.proxy.state is State.LIVE)
            assert await ask(harness.port("l"), b"there") == b"hi there"

    run(tmp_path, body, policies=PolicySettings(directory=str(folder)), live=False)


BY_CLIENT = "[{action: Allow, source: {serviceAccounts: {names: [client]}}}]"
BY_OTHER = "[{action: Allow, source: {serviceAccounts: {names: [other]}}}]"


def test_calico_policy_judges_a_tunnel_by_its_certificate_at_its_end(tmp_path: Path) -> None:
    async def body(made: CalicoHarness) -> None:
        harness = made.harness
        async with application(b"hi ") as port:
            await tunnel(harness, port, Identities(), access_log=access_log(tmp_path))
            assert await ask(harness.port("l"), b"there") == b"hi there"
            await made.change(policies(ingress=BY_OTHER))
            assert await ask(harness.port("l"), b"there") == b""
            (denied,) = json.loads(page(harness, "/denials"))
            assert (denied["identity"], denied["reason"]) == (
                CLIENT,
                "calico_access_denied[default|GlobalNetworkPolicy/both|end of tier]",
            )
            assert (await harness.log(2))[-1]["failure"] == "tunnel_response:403"
            key = ("default", "end of tier", "denied")
            assert dict(results(made.policies.guard.uses))[key] == 1
            assert harness.count("policy.default.end of tier.denied.decisions") == 1

    with_calico(tmp_path, policies(ingress=BY_CLIENT), body)


@pytest.mark.parametrize("calico", [True, False])
def test_rbac_filters_and_calico_policies_must_both_allow(tmp_path: Path, calico: bool) -> None:
    async def body(made: CalicoHarness) -> None:
        async with application(b"hi ") as port:
            await tunnel(
                made.harness, port, Identities(), rbac(CLIENT if not calico else "spiffe://td/ns/a/sa/other")
            )
            assert await ask(made.harness.port("l"), b"there") == b""

    with_calico(tmp_path, policies(ingress=BY_CLIENT if calico else BY_OTHER), body)


def test_calico_egress_judges_the_port_named_by_the_connect(tmp_path: Path) -> None:
    to_80 = "[{action: Allow, protocol: TCP, destination: {ports: [80]}}]"

    async def body(made: CalicoHarness) -> None:
        harness = made.harness
        async with application(b"hi ") as port:
            await tunnel(harness, port, Identities(), access_log=access_log(tmp_path))
            assert await ask(harness.port("l"), b"there") == b"hi there"
            await made.change(policies(egress="[{action: Deny, protocol: TCP, destination: {ports: [80]}}]"))
            assert await ask(harness.port("l"), b"there") == b""
            line = (await harness.log(2))[-1]
            assert line["details"] == "calico_access_denied[default|GlobalNetworkPolicy/both|rule_0]"
            assert harness.count("cluster.tunnel.upstream_cx_connect_fail") == 0

    with_calico(tmp_path, policies(egress=to_80), body)


def test_plain_connection_is_judged_at_both_ends_and_after_changes(tmp_path: Path) -> None:
    async def body(made: CalicoHarness) -> None:
        harness = made.harness
        async with application() as port:
            await harness.published(cluster(port), listener(access_log=access_log(tmp_path)))
            connection = await Open.to(harness.port("l"))
            assert await connection.say(b"hello") == b"hello"
            await made.change(policies(ingress="[{action: Allow}, {action: Deny}]"))
            assert await connection.say(b"still") == b"still"
            await made.change(policies(ingress="[{action: Deny}]"))
            assert await connection.ended()
            await connection.close()
            (line,) = await harness.log()
            assert line["details"] == (
                f"{POLICY_CHANGE.replace(' ', '_')}:_calico_access_denied[default|GlobalNetworkPolicy/both|rule_0]"
            )
            assert await ask(harness.port("l")) == b""
            await made.change(policies(egress="[{action: Deny}]"))
            assert await ask(harness.port("l")) == b""
            await made.change(policies())
            assert await ask(harness.port("l")) == b"ping"

    with_calico(tmp_path, policies(), body)


def test_live_tunnels_end_when_policies_change(tmp_path: Path) -> None:
    async def body(made: CalicoHarness) -> None:
        harness = made.harness
        async with application() as port:
            await tunnel(harness, port, Identities())
            connection = await Open.to(harness.port("l"))
            assert await connection.say(b"hello") == b"hello"
            await made.change(policies(ingress="[{action: Deny}]"))
            assert await connection.ended()
            await connection.close()
            await harness.until(lambda: harness.count("http.inbound.downstream_rq_active") == 0)

    with_calico(tmp_path, policies(), body)


def test_unknown_pods_are_denied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ztunnel.policy.calico.live.GRACE_S", 0.05)

    async def body(made: CalicoHarness) -> None:
        harness = made.harness
        async with application() as port:
            await harness.published(cluster(port), listener(access_log=access_log(tmp_path)))
            assert await ask(harness.port("l")) == b""
            (line,) = await harness.log()
            assert line["details"] == ("calico_access_denied[the_policies_know_no_pod_with_the_address_127.0.0.1]")

    with_calico(tmp_path, policies().replace("ip: 127.0.0.1", "ip: 10.0.0.1"), body)


def test_staged_policies_are_counted_and_not_enforced(tmp_path: Path) -> None:
    async def body(made: CalicoHarness) -> None:
        harness = made.harness
        async with application() as port:
            (log,) = access_log(tmp_path)
            names = ("tier", "name", "rule", "dry_run")
            log["typed_config"]["log_format"]["json_format"] = {
                name: f"%DYNAMIC_METADATA(calico.policy:{name})%" for name in names
            }
            await harness.published(cluster(port), listener(access_log=[log]))
            assert await ask(harness.port("l")) == b"ping"
            assert await harness.log() == [
                {
                    "tier": "default",
                    "name": "GlobalNetworkPolicy/both",
                    "rule": "0",
                    "dry_run": "denied by default|StagedGlobalNetworkPolicy/soon|rule 0",
                }
            ]
            key = ("default", "StagedGlobalNetworkPolicy/soon", "staged denied")
            assert dict(results(made.policies.guard.uses))[key] == 1

    with_calico(tmp_path, policies(staged="[{action: Deny}]"), body)


def test_proxy_without_calico_policies_has_no_enforcer(tmp_path: Path) -> None:
    async def body(harness: Harness) -> None:
        assert harness.proxy.policies is None
        assert type(harness.proxy.connector) is Connector

    run(tmp_path, body, cluster(1), listener())


def test_policy_pages_show_current_policies_and_explain_them(tmp_path: Path) -> None:
    async def body(made: CalicoHarness) -> None:
        harness = made.harness
        async with application() as port:
            await harness.published(cluster(port), listener())
            assert await ask(harness.port("l")) == b"ping"
        shown = json.loads(page(harness, "/policies"))
        (policy,) = shown["tiers"][0]["policies"]
        assert (policy["policy"], policy["allowed"]) == ("GlobalNetworkPolicy/both", 2)
        assert shown["source"]["in_sync"]
        told = json.loads(page(harness, "/policies/explain", "from=a/all&to=127.0.0.1&port=1"))
        assert (told["allowed"], told["lines"][-1]) == (
            True,
            "  => allowed by default|GlobalNetworkPolicy/both|rule 0",
        )
        assert page(harness, "/policies/explain", "from=x") == (
            "from: 'x' is neither namespace/pod, an IP address nor a SPIFFE id\n"
        )

    with_calico(tmp_path, policies(), body)


def test_calico_policy_settings_are_parsed() -> None:
    env = {"ZTUNNEL_CONTROL_PLANE": "unix:/x", "NODE_NAME": "n"}
    assert settings_from({}, env).policies is None
    assert settings_from({"policy": "/p"}, env).policies == PolicySettings(directory="/p")
    found = settings_from({"policy_sync": "/run/s", "unknown_pods": "allow"}, env).policies
    assert found == PolicySettings(sync="unix:/run/s", allow_unknown=True)
    with pytest.raises(SettingsError) as error:
        settings_from({"policy": "/p"}, {**env, "POLICY_SYNC": "/s"})
    assert error.value.faults == ["CALICO_POLICY_DIR and POLICY_SYNC exclude each other"]
