"""deploy/kustomize/agent: the role permits exactly the agent's requests to the API server."""

import json
import subprocess
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
import yaml

from tests.deploy.labels import STANDARD, without
from tests.programs import needed
from ztunnel.node.agent import add_arguments
from ztunnel.node.agent.enroller import selections

FOLDER = Path(__file__).parents[2] / "deploy" / "kustomize" / "agent"
CHART = Path(__file__).parents[2] / "deploy" / "helm" / "ztunnel-agent"


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
    # The agent's own pods are never enrolled, whatever the labels of their namespace.
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


def rendered(*options: str) -> dict[str, Any]:
    """Return the chart's objects by kind. Of two objects of a kind only the last one is returned."""
    command = [needed("helm"), "template", "agent", str(CHART), "--namespace", "istio-system", *options]
    built = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {document["kind"]: document for document in yaml.safe_load_all(built)}


def test_the_chart_is_what_kustomize_deploys() -> None:
    objects = rendered()
    for name in ("rbac.yaml", "daemonset.yaml"):
        for kind, wanted in documents(name).items():
            assert without(objects[kind], STANDARD) == wanted


def test_the_chart_with_the_plugin_is_the_overlay() -> None:
    plain = documents("daemonset.yaml")["DaemonSet"]
    patch = yaml.safe_load((FOLDER.parent / "agent-cni" / "plugin.yaml").read_text())
    made = rendered("--set=cni.install=true")["DaemonSet"]
    assert without(made, STANDARD) == jsonpatch.apply_patch(plain, patch)


def test_the_chart_has_the_labels_of_istios_charts() -> None:
    daemon_set = rendered()["DaemonSet"]
    for each in (daemon_set, daemon_set["spec"]["template"]):
        labels = each["metadata"]["labels"]
        assert labels.keys() >= STANDARD - {"istio.io/rev"}
        assert labels["app.kubernetes.io/version"] == "0.1.0"


def test_the_charts_values_become_arguments_that_are_read() -> None:
    values = {
        "systemNamespace": "mesh", "excludeNamespaces": "{kube-system,mesh}", "established": "capture",
        "dnsCapture": "false", "graceSeconds": "60", "probeUser": "0", "cni.install": "true", "cni.owned": "true",
        "cni.socket": "/run/x/plugin.sock", "cni.binDir": "/home/cni/bin",
    }  # fmt: skip
    pod = rendered(*(f"--set={key}={value}" for key, value in values.items()))["DaemonSet"]["spec"]["template"][
        "spec"
    ]
    [container] = pod["containers"]
    parser = ArgumentParser()
    add_arguments(parser.add_subparsers())
    args = parser.parse_args(container["args"])
    assert (args.exclude, args.system_namespace, args.established) == ("kube-system,mesh", "mesh", "capture")
    assert (args.no_dns_capture, args.grace, args.probe_user, args.cni_owned) == (True, 60.0, 0, True)
    assert args.install_cni == "/host/home/cni/bin:/host/etc/cni/net.d"
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {"/run/x", "/host/home/cni/bin"} <= mounts


def test_chart_can_have_prometheus_operator_scrape_the_agents() -> None:
    assert "PodMonitor" not in rendered()
    objects = rendered("--set=podMonitor.enabled=true")
    spec, template = objects["PodMonitor"]["spec"], objects["DaemonSet"]["spec"]["template"]
    assert spec["selector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    assert [each["port"] for each in spec["podMetricsEndpoints"]] == [each["name"] for each in container["ports"]]


def test_large_numbers_of_a_values_file_have_no_exponent(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("{tag: 20261127, probeUser: 1000650000, graceSeconds: 1000000}")
    [container] = rendered("--values", str(file))["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert container["image"].endswith(":20261127")
    assert {"--probe-user=1000650000", "--grace=1000000"} <= set(container["args"])


@pytest.mark.parametrize("option", ["established=reset", "probeUser=kubelet", "cni.socket=x", "typo=1"])
def test_the_chart_refuses_malformed_and_unknown_values(option: str) -> None:
    command = [needed("helm"), "template", "agent", str(CHART), f"--set={option}"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert option.partition("=")[0].rpartition(".")[2] in done.stderr


def test_the_charts_defaults_are_in_its_schema_and_nothing_else() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    assert set(values) == set(schema) - {"global"}
    assert set(values["cni"]) == set(schema["cni"]["properties"])
    assert set(values["podMonitor"]) == set(schema["podMonitor"]["properties"])
