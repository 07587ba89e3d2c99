"""deploy/kustomize/netpol: the role is what the command asks of the API server and no more; arguments are read."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import yaml

from ztunnel.netpol import add_arguments
from ztunnel.netpol.kinds import SELECTIONS

FOLDER = Path(__file__).parents[2] / "deploy" / "kustomize" / "netpol"


def documents(name: str) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all((FOLDER / name).read_text())}


def test_every_file_is_in_the_kustomization() -> None:
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert set(listed) == {path.name for path in FOLDER.iterdir()} - {"kustomization.yaml"}


def test_the_role_is_what_the_command_asks_for() -> None:
    given = {
        (group, resource, verb)
        for rule in documents("rbac.yaml")["ClusterRole"]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    asked = {
        (selection.kind.api_version.rpartition("/")[0], selection.kind.plural, verb)
        for selection in SELECTIONS
        for verb in ("list", "watch")
    }
    assert given == asked | {("", "events", "create"), ("", "events", "patch")}


def test_the_account_is_the_bound_one() -> None:
    objects = documents("rbac.yaml")
    [subject] = objects["ClusterRoleBinding"]["subjects"]
    account = objects["ServiceAccount"]["metadata"]
    pod = documents("daemonset.yaml")["DaemonSet"]["spec"]["template"]["spec"]
    assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    assert pod["serviceAccountName"] == account["name"]
    assert objects["ClusterRoleBinding"]["roleRef"]["name"] == objects["ClusterRole"]["metadata"]["name"]


def test_the_container_may_change_the_nodes_tables_and_nothing_else() -> None:
    pod = documents("daemonset.yaml")["DaemonSet"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["hostNetwork"] is True
    security = container["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["NET_ADMIN"]}
    assert (security["privileged"], security["allowPrivilegeEscalation"]) == (False, False)
    assert "volumes" not in pod


def test_the_arguments_are_the_commands() -> None:
    [container] = documents("daemonset.yaml")["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    parser = ArgumentParser()
    add_arguments(parser.add_subparsers())
    args = parser.parse_args(container["args"])
    assert (args.node, args.metrics, args.objects, args.tunnels) == ("$(NODE_NAME)", "15022", None, "judge")
    assert [entry["name"] for entry in container["env"]] == ["NODE_NAME"]
    [port] = container["ports"]
    assert str(port["containerPort"]) == args.metrics
