"""deploy/kustomize/agent: the role is what the agent asks of the API server, and no more."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import jsonpatch
import yaml

from ztunnel.agent import add_arguments
from ztunnel.agent.enroller import selections

FOLDER = Path(__file__).parents[2] / "deploy" / "kustomize" / "agent"


def documents(name: str) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all((FOLDER / name).read_text())}


def test_every_file_is_in_the_kustomization() -> None:
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    assert set(listed) == {path.name for path in FOLDER.iterdir()} - {"kustomization.yaml"}


def given(kind: str) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in documents("rbac.yaml")[kind]["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_role_is_what_the_agent_asks_for() -> None:
    followed = {("", each.kind.plural, verb) for each in selections("n") for verb in ("list", "watch")}
    writes = {("", "pods/status", "patch"), ("", "events", "create"), ("", "events", "patch")}
    assert given("ClusterRole") == followed | writes | {("", "nodes", "get")}
    assert given("Role") == {("apps", "daemonsets", "get")}
    [rule] = documents("rbac.yaml")["Role"]["rules"]
    assert rule["resourceNames"] == [documents("daemonset.yaml")["DaemonSet"]["metadata"]["name"]]


def test_the_container_has_what_its_work_needs_and_nothing_else() -> None:
    pod = documents("daemonset.yaml")["DaemonSet"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["hostNetwork"] is True
    assert "hostPID" not in pod
    security = container["securityContext"]
    assert security["privileged"] is False
    assert security["capabilities"] == {
        "drop": ["ALL"], "add": ["NET_ADMIN", "SYS_ADMIN", "SYS_PTRACE", "DAC_OVERRIDE"]
    }  # fmt: skip
    mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
    assert mounts["/host/proc"]["readOnly"] is True
    assert mounts["/var/run/netns"]["mountPropagation"] == "HostToContainer"
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    # The agent's own pods are never enrolled, whatever their namespace says.
    labels = documents("daemonset.yaml")["DaemonSet"]["spec"]["template"]["metadata"]["labels"]
    assert labels["istio.io/dataplane-mode"] == "none"


def test_the_arguments_are_the_commands_with_and_without_the_plugin() -> None:
    parser = ArgumentParser()
    add_arguments(parser.add_subparsers())
    plain = documents("daemonset.yaml")["DaemonSet"]
    patch = yaml.safe_load((FOLDER.parent / "agent-cni" / "plugin.yaml").read_text())
    patched = jsonpatch.apply_patch(plain, patch)
    for daemon_set, folders in ((plain, None), (patched, "/host/opt/cni/bin:/host/etc/cni/net.d")):
        pod = daemon_set["spec"]["template"]["spec"]
        [container] = pod["containers"]
        args = parser.parse_args(container["args"])
        assert args.kube
        assert args.install_cni == folders
        assert {mount["name"] for mount in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert folders is None or set(folders.split(":")) <= mounts
