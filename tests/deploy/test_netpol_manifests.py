"""Manifests of network policy: the role permits exactly the command's requests, and the chart equals the
kustomization.
"""

import json
import subprocess
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.kustomization import Kustomization, asked
from tests.deploy.labels import STANDARD, without
from tests.programs import needed
from ztunnel.policy.netpol import add_arguments
from ztunnel.policy.policysync.kinds import SELECTIONS

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = Kustomization("netpol")


def test_every_file_is_in_the_kustomization() -> None:
    assert MANIFESTS.lists_every_file()


def test_the_role_is_what_the_command_asks_for() -> None:
    core = {("", "events", "create"), ("", "events", "patch"), ("", "nodes", "get")}
    assert MANIFESTS.given() == asked(SELECTIONS) | core


def test_the_account_is_the_bound_one() -> None:
    assert MANIFESTS.binds_its_account()


def test_the_container_may_change_the_nodes_tables_and_nothing_else() -> None:
    pod = MANIFESTS.pod()
    [container] = pod["containers"]
    assert pod["hostNetwork"] is True
    security = container["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN"]}
    assert (security["privileged"], security["allowPrivilegeEscalation"]) == (False, False)
    assert "volumes" not in pod


def test_the_arguments_are_the_commands() -> None:
    [container] = MANIFESTS.pod()["containers"]
    parser = ArgumentParser()
    add_arguments(parser.add_subparsers())
    args = parser.parse_args(container["args"])
    assert (args.node, args.metrics, args.objects, args.tunnels) == ("$(NODE_NAME)", "15022", None, "judge")
    assert [entry["name"] for entry in container["env"]] == ["NODE_NAME"]
    [port] = container["ports"]
    assert str(port["containerPort"]) == args.metrics
    # Otherwise a rollout would continue although the new version's table is not in the kernel.
    assert container["readinessProbe"]["httpGet"] == {"port": port["containerPort"], "path": "/readyz"}
    assert container["livenessProbe"]["httpGet"] == {"port": port["containerPort"], "path": "/healthz"}


# The chart


def rendered(tmp_path: Path, **values: Any) -> dict[tuple[str, str], Any]:
    """Return what the chart makes, by kind and name."""
    path = tmp_path / "values.yaml"
    path.write_text(json.dumps(values))
    command = [needed("helm"), "template", "ztunnel", str(DEPLOY / "helm" / "ztunnel"), "--values", str(path)]
    made = subprocess.run([*command, "--namespace", "kube-system"], check=True, capture_output=True, text=True)
    found = [document for document in yaml.safe_load_all(made.stdout) if document]
    return {(document["kind"], document["metadata"]["name"]): document for document in found}


def test_the_chart_makes_what_the_kustomization_does(tmp_path: Path) -> None:
    made = rendered(tmp_path, netpol={"enabled": True})
    named = {key: value for key, value in made.items() if key[1] == "ztunnel-netpol"}
    wanted = {**MANIFESTS.documents("rbac.yaml"), **MANIFESTS.documents("daemonset.yaml")}
    assert {kind for kind, _ in named} == set(wanted)
    for kind, document in wanted.items():
        document["metadata"]["labels"] = {"app": "ztunnel-netpol", "app.kubernetes.io/name": "ztunnel-netpol"}
        assert without(named[kind, "ztunnel-netpol"], STANDARD) == document
    assert rendered(tmp_path) == {key: value for key, value in made.items() if key not in named}


def test_the_chart_connects_proxies_with_netpol(tmp_path: Path) -> None:
    made = rendered(
        tmp_path,
        netpol={"enabled": True, "tunnels": "allow", "closedAtBirth": True},
        podMonitor={"enabled": True},
        resourceName="mine",
    )
    netpol, proxy = (made["DaemonSet", name]["spec"]["template"]["spec"] for name in ("mine-netpol", "mine"))
    [container], [tunnels] = netpol["containers"], proxy["containers"]
    parser = ArgumentParser()
    add_arguments(parser.add_subparsers())
    args = parser.parse_args(container["args"])
    [socket] = [entry["value"] for entry in tunnels["env"] if entry["name"] == "POLICY_SYNC"]
    assert (args.tunnels, args.policy_sync, args.pod_cidr) == ("allow", socket, ["node"])
    folders = []
    for pod, of in ((netpol, container), (proxy, tunnels)):
        [mount] = [mount for mount in of["volumeMounts"] if socket.startswith(mount["mountPath"] + "/")]
        folders += [volume["hostPath"] for volume in pod["volumes"] if volume["name"] == mount["name"]]
    assert folders[0] == folders[1]
    monitor = made["PodMonitor", "mine-netpol"]["spec"]
    labels = made["DaemonSet", "mine-netpol"]["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert [end["port"] for end in monitor["podMetricsEndpoints"]] == [port["name"] for port in container["ports"]]


def test_the_chart_may_follow_nodes(tmp_path: Path) -> None:
    made = rendered(tmp_path, netpol={"enabled": True, "nodePeers": True})
    [container] = made["DaemonSet", "ztunnel-netpol"]["spec"]["template"]["spec"]["containers"]
    parser = ArgumentParser()
    add_arguments(parser.add_subparsers())
    assert parser.parse_args(container["args"]).node_peers
    rules = made["ClusterRole", "ztunnel-netpol"]["rules"]
    [verbs] = [rule["verbs"] for rule in rules if rule["resources"] == ["nodes"]]
    assert verbs == ["get", "list", "watch"]


def test_the_chart_may_follow_calico(tmp_path: Path) -> None:
    made = rendered(tmp_path, netpol={"enabled": True, "calico": True})
    [container] = made["DaemonSet", "ztunnel-netpol"]["spec"]["template"]["spec"]["containers"]
    parser = ArgumentParser()
    add_arguments(parser.add_subparsers())
    assert parser.parse_args(container["args"]).calico
    # It has what the PolicySync server's role has, which follows the same kinds, and its own Node.
    rules = [made["ClusterRole", "ztunnel-netpol"]["rules"]]
    served = yaml.safe_load_all((DEPLOY / "kustomize" / "policy" / "rbac.yaml").read_text())
    rules += [document["rules"] for document in served if document["kind"] == "ClusterRole"]
    ours, theirs = (
        {
            (group, resource, verb)
            for rule in listed
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
        for listed in rules
    )
    assert ours == theirs | {("", "nodes", "get")}


@pytest.mark.parametrize(
    ("scope", "kinds"),
    [("CLUSTER", {"ClusterRole", "ClusterRoleBinding"}), ("NAMESPACE", {"DaemonSet", "ServiceAccount"})],
)
def test_two_accounts_can_install_it(tmp_path: Path, scope: str, kinds: set[str]) -> None:
    made = rendered(tmp_path, netpol={"enabled": True}, resourceScope=scope)
    assert {kind for kind, name in made if name == "ztunnel-netpol"} == kinds
