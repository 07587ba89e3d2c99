"""The manifests of the PolicySync server: the role is what the command asks for, and the process gets no more."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import yaml

from ztunnel.policysync import add_arguments
from ztunnel.policysync.kinds import SERVED

FOLDER = Path(__file__).parents[2] / "deploy" / "kustomize" / "policy"


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
        for selection in SERVED
        for verb in ("list", "watch")
    }
    # Calico's API server asks whether an account may read the tier of a policy.
    tiered = {
        ("projectcalico.org", f"tier.{selection.kind.plural}", verb)
        for selection in SERVED
        if selection.kind.api_version == "projectcalico.org/v3"
        and selection.kind.name
        in ("NetworkPolicy", "GlobalNetworkPolicy", "StagedNetworkPolicy", "StagedGlobalNetworkPolicy")
        for verb in ("get", "list", "watch")
    }
    events = {("", "events", "create"), ("", "events", "patch")}
    assert given == asked | tiered | events | {("projectcalico.org", "tiers", "get")}


def test_the_account_is_the_bound_one() -> None:
    objects = documents("rbac.yaml")
    [subject] = objects["ClusterRoleBinding"]["subjects"]
    account = objects["ServiceAccount"]["metadata"]
    pod = documents("daemonset.yaml")["DaemonSet"]["spec"]["template"]["spec"]
    assert (subject["name"], subject["namespace"]) == (account["name"], account["namespace"])
    assert pod["serviceAccountName"] == account["name"]
    assert objects["ClusterRoleBinding"]["roleRef"]["name"] == objects["ClusterRole"]["metadata"]["name"]


def test_the_container_has_its_folder_and_no_privilege() -> None:
    pod = documents("daemonset.yaml")["DaemonSet"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    security = container["securityContext"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert (security["privileged"], security["allowPrivilegeEscalation"]) == (False, False)
    assert "hostNetwork" not in pod
    parser = ArgumentParser()
    add_arguments(parser.add_subparsers())
    args = parser.parse_args(container["args"])
    assert (args.kube, args.files, args.node) == (True, [], "$(NODE_NAME)")
    [mount], [volume] = container["volumeMounts"], pod["volumes"]
    assert str(args.prefix) == mount["mountPath"] == volume["hostPath"]["path"]
    assert mount["name"] == volume["name"]
    [port] = container["ports"]
    assert str(port["containerPort"]) == args.metrics
