"""The deployed manifests follow the contract of istiod, istio-cni and kubelet with the node proxy, field by field.

The kustomize base is read as YAML. The chart is a text with templates: without a ``helm`` binary only the names it
refers to can be checked; with one its output must equal the base.
"""

import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.labels import OF_HELM, STANDARD, without
from tests.programs import needed
from ztunnel.proxy.addons.settings import addon_settings
from ztunnel.proxy.istio.environment import config_from
from ztunnel.proxy.istio.settings.config import ProxyMode
from ztunnel.runtime.http import liveness

DEPLOY = Path(__file__).parents[2] / "deploy"
BASE = DEPLOY / "kustomize" / "base"
CHART = DEPLOY / "helm" / "ztunnel"
FILES = {
    "./var/run/secrets/istio/root-cert.pem": "istiod-ca-cert",
    "./var/run/secrets/tokens/istio-token": "istio-token",
}

#: The values that files written for Istio's chart may set.
ISTIOS_VALUES = """
dnsPolicy dnsConfig
    hub tag variant image imagePullPolicy imagePullSecrets resourceName labels annotations podLabels podAnnotations
    affinity nodeSelector tolerations updateStrategy resources seLinuxOptions volumes volumeMounts env meshConfig
    terminationGracePeriodSeconds revision caAddress xdsAddress istioNamespace network multiCluster platform
    profile compatibilityVersion
    logLevel logAsJson peerCaCrl global resourceScope resourceQuotas podMonitor trustBundleName
"""

OF_NAMESPACE = ("ServiceAccount", "DaemonSet")
OF_CLUSTER = ("ClusterRole", "ClusterRoleBinding")

Object = dict[str, Any]


def documents(text: str) -> dict[str, Object]:
    return {document["kind"]: document for document in yaml.safe_load_all(text) if document}


def base() -> dict[str, Object]:
    kustomization = yaml.safe_load((BASE / "kustomization.yaml").read_text())
    return documents("\n---\n".join((BASE / name).read_text() for name in kustomization["resources"]))


@pytest.fixture(name="pod")
def _pod() -> Object:
    pod: Object = base()["DaemonSet"]["spec"]["template"]
    return pod


@pytest.fixture(name="container")
def _container(pod: Object) -> Object:
    (container,) = pod["spec"]["containers"]
    found: Object = container
    return found


def environment(container: Object) -> dict[str, str]:
    """Return the environment as the process sees it. Values that Kubernetes fills in are replaced by examples."""
    filled = {
        "metadata.name": "ztunnel-x7k2p",
        "metadata.namespace": "istio-system",
        "spec.nodeName": "worker",
        "status.podIP": "10.244.1.5",
        "spec.serviceAccountName": "ztunnel",
        "limits.cpu": "2",
    }
    found = {}
    for entry in container["env"]:
        if "value" in entry:
            value = entry["value"]
            assert isinstance(value, str), f"{entry['name']}: Kubernetes takes texts only"
        else:
            ((_, source),) = entry["valueFrom"].items()
            value = filled[source.get("fieldPath") or source["resource"]]
        assert entry["name"] not in found
        found[entry["name"]] = value
    return found


def test_every_variable_of_the_manifest_is_known_to_the_proxy(container: Object) -> None:
    given = environment(container)
    given["KUBERNETES_SERVICE_HOST"] = "10.96.0.1"
    asked: set[str] = set()

    class Asked(dict[str, str]):
        def get(self, key: str, default: Any = None) -> Any:
            asked.add(key)
            return super().get(key, default)

    config = config_from(Asked(given), cpus=4, read_file=lambda path: None)
    assert config.warnings == ()
    without_meaning = {"RUST_BACKTRACE", "INPOD_ENABLED"}  # of Rust, and of releases before all pods were in-pod
    assert set(given) - asked == without_meaning
    assert config.proxy_mode is ProxyMode.SHARED
    assert config.xds_address == config.ca_address == "https://istiod.istio-system.svc:15012"
    assert config.node == "worker"
    assert config.cluster_id == "Kubernetes"
    assert config.instance_ip == "10.244.1.5"
    assert config.drain_s == 25.0
    assert config.worker_threads == 1
    own = config.own_pod
    assert own is not None
    assert (own.namespace, own.name, own.service_account) == ("istio-system", "ztunnel-x7k2p", "ztunnel")


def test_an_unknown_variable_would_be_noticed(container: Object) -> None:
    given = environment(container) | {"ZTUNNEL_WORKERS": "2"}
    warnings = config_from(given, cpus=4, read_file=lambda path: None).warnings
    assert ["ZTUNNEL_WORKERS" in warning for warning in warnings] == [True]


def test_the_container_has_only_the_privileges_that_the_proxy_needs(container: Object) -> None:
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": True,
        "privileged": False,
        "capabilities": {"drop": ["ALL"], "add": ["NET_ADMIN", "SYS_ADMIN", "NET_RAW"]},
        "readOnlyRootFilesystem": True,
        "runAsGroup": 1337,
        "runAsNonRoot": False,
        "runAsUser": 0,
    }


def test_the_container_is_started_and_probed_as_istios(container: Object) -> None:
    assert container["name"] == "istio-proxy"
    assert container["args"] == ["proxy", "ztunnel"]
    assert "command" not in container
    assert container["ports"] == [{"containerPort": 15020, "name": "ztunnel-stats", "protocol": "TCP"}]
    assert container["readinessProbe"] == {"httpGet": {"port": 15021, "path": "/healthz/ready"}}
    live = container["livenessProbe"]
    assert live["httpGet"] == {"port": 15021, "path": "/healthz/live"}
    # A restart ends every connection of the node: not for less than a minute without an answer.
    assert live["periodSeconds"] * live["failureThreshold"] >= 60
    assert live["timeoutSeconds"] > liveness._TURN_S
    assert container["resources"] == {"requests": {"cpu": "200m", "memory": "512Mi"}}


def test_mounts_are_where_the_defaults_look(pod: Object, container: Object) -> None:
    mounts = {entry["mountPath"]: entry["name"] for entry in container["volumeMounts"]}
    assert mounts == {
        "/var/run/secrets/istio": "istiod-ca-cert",
        "/var/run/secrets/tokens": "istio-token",
        "/var/run/ztunnel": "cni-ztunnel-sock-dir",
        "/tmp": "tmp",
    }
    volumes = {volume.pop("name"): volume for volume in pod["spec"]["volumes"]}
    assert volumes == {
        "istio-token": {
            "projected": {
                "sources": [
                    {
                        "serviceAccountToken": {
                            "path": "istio-token",
                            "expirationSeconds": 43200,
                            "audience": "istio-ca",
                        }
                    }
                ]
            }
        },
        "istiod-ca-cert": {"configMap": {"name": "istio-ca-root-cert"}},
        "cni-ztunnel-sock-dir": {"hostPath": {"path": "/var/run/ztunnel", "type": "DirectoryOrCreate"}},
        "tmp": {"emptyDir": {}},
    }
    config = config_from(environment(container), cpus=4, read_file=lambda path: None)
    for path, volume in FILES.items():
        assert mounts[str(Path("/", path).parent)] == volume
    assert config.xds_root_ca == config.ca_root_ca == "./var/run/secrets/istio/root-cert.pem"
    assert mounts[str(Path(config.inpod_uds).parent)] == "cni-ztunnel-sock-dir"


def test_the_pod_is_outside_the_mesh_and_tolerates_every_taint(pod: Object) -> None:
    assert pod["metadata"]["labels"] == {
        "app": "ztunnel",
        "app.kubernetes.io/name": "ztunnel",
        "app.kubernetes.io/instance": "ztunnel",
        "app.kubernetes.io/part-of": "istio",
        "app.kubernetes.io/version": "0.1.0",
        "istio.io/rev": "default",
        "istio.io/dataplane-mode": "none",
        "sidecar.istio.io/inject": "false",
    }
    assert pod["metadata"]["annotations"] == {
        "sidecar.istio.io/inject": "false",
        "prometheus.io/port": "15020",
        "prometheus.io/scrape": "true",
    }
    spec = pod["spec"]
    assert spec["priorityClassName"] == "system-node-critical"
    assert spec["serviceAccountName"] == "ztunnel"
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux"}
    assert spec["tolerations"] == [
        {"effect": "NoSchedule", "operator": "Exists"},
        {"key": "CriticalAddonsOnly", "operator": "Exists"},
        {"effect": "NoExecute", "operator": "Exists"},
    ]
    assert "hostNetwork" not in spec


def test_an_upgrade_overlaps_and_kubelet_waits_as_long_as_the_proxy_drains(pod: Object, container: Object) -> None:
    assert base()["DaemonSet"]["spec"]["updateStrategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }
    grace = pod["spec"]["terminationGracePeriodSeconds"]
    assert environment(container)["TERMINATION_GRACE_PERIOD_SECONDS"] == str(grace) == "30"


def test_the_account_is_the_one_istiod_trusts() -> None:
    objects = base()
    assert set(objects) == {"ServiceAccount", "DaemonSet"}
    for each in objects.values():
        assert (each["metadata"]["name"], each["metadata"]["namespace"]) == ("ztunnel", "istio-system")
    selector = objects["DaemonSet"]["spec"]["selector"]["matchLabels"]
    assert selector.items() <= objects["DaemonSet"]["spec"]["template"]["metadata"]["labels"].items()


def test_openshift_adds_one_permission() -> None:
    objects = documents((DEPLOY / "kustomize" / "openshift" / "rbac.yaml").read_text())
    assert objects["ClusterRole"]["rules"] == [
        {
            "apiGroups": ["security.openshift.io"],
            "resources": ["securitycontextconstraints"],
            "resourceNames": ["privileged"],
            "verbs": ["use"],
        }
    ]
    assert objects["ClusterRoleBinding"]["roleRef"]["name"] == objects["ClusterRole"]["metadata"]["name"]
    (subject,) = objects["ClusterRoleBinding"]["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": "ztunnel", "namespace": "istio-system"}


# The chart


def values() -> Object:
    loaded: Object = yaml.safe_load((CHART / "values.yaml").read_text())
    return loaded


def templates() -> list[Path]:
    return sorted((CHART / "templates").iterdir())


def references(path: Path) -> set[str]:
    # Keys below one that can be null are written as (.Values.a).b.
    return set(re.findall(r"\.Values\.([\w.]+)", re.sub(r"[()]", "", path.read_text())))


@pytest.mark.parametrize("path", templates(), ids=lambda path: path.name)
def test_templates_refer_to_values_that_exist(path: Path) -> None:
    unknown = set()
    for reference in references(path):
        found: Any = values()
        for key in reference.split("."):
            if not isinstance(found, dict) or key not in found:
                unknown.add(reference)
                break
            found = found[key]
    assert unknown == set()


def test_every_value_is_used() -> None:
    used = {reference for path in templates() for reference in references(path)}
    unused = []

    def look(prefix: str, value: Any) -> None:
        if any(prefix == name or prefix.startswith(f"{name}.") for name in used):
            return
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                look(f"{prefix}.{key}", inner)
        else:
            unused.append(prefix)

    for key, value in values().items():
        look(key, value)
    assert unused == []


def test_the_values_are_named_as_in_istios_chart() -> None:
    assert set(values()) == {
        *ISTIOS_VALUES.split(),
        "netpol",
        "prometheusRule",
        "dashboard",
        "handover",
        "holdSockets",
        "addons",
    }  # our own


@pytest.mark.parametrize("path", templates(), ids=lambda path: path.name)
def test_templates_are_balanced_and_call_what_is_defined(path: Path) -> None:
    text = path.read_text()
    actions = re.findall(r"\{\{-?\s*(.*?)\s*-?\}\}", text, re.DOTALL)
    assert text.count("{{") == text.count("}}") == len(actions)
    depth = 0
    for action in actions:
        word = action.split()[0]
        depth += word in ("if", "with", "range", "define")
        depth -= word == "end"
        assert depth >= 0, action
    assert depth == 0
    helpers = (CHART / "templates" / "_helpers.tpl").read_text()
    defined = set(re.findall(r'define "([^"]+)"', helpers))
    assert set(re.findall(r'include "([^"]+)"', text)) <= defined


def test_the_chart_sets_the_variables_of_the_base(container: Object) -> None:
    text = (CHART / "templates" / "daemonset.yaml").read_text()
    env = text[text.index("        env:\n") : text.index("        volumeMounts:\n")]
    named = set(re.findall(r"- name: ([A-Z_]+)$", env, re.MULTILINE))
    optional = {"LOG_FORMAT", "NETWORK", "CRL_PATH", "ZTUNNEL_RESOURCE_CPU_LIMIT", "POLICY_SYNC"}
    optional |= {"ZTUNNEL_ADDONS", "ZTUNNEL_ADDON_OPTION", "ZTUNNEL_HOLD_SOCKETS"}
    assert named == {*environment(container), *optional}


def rendered(values_file: Path | None = None, given: Object | None = None) -> dict[str, Object]:
    command = [needed("helm"), "template", "ztunnel", str(CHART), "--namespace", "istio-system"]
    if values_file is not None:
        command += ["--values", str(values_file)]
    if given is not None:
        command += ["--values", "-"]
    text = json.dumps(given)
    return documents(subprocess.run(command, check=True, capture_output=True, text=True, input=text).stdout)


def test_addons_are_mounted_and_named() -> None:
    addons = {
        "configMap": "our-addons",
        "load": ["rate_limit.py", "canary.py@sha256:" + "ab" * 32, "pack:Cls"],
        "options": {
            "rate-limit": {"per_second": 50, "namespaces": ["a", "b", 1000000]},
            "canary": {"labels": {"version": "v2"}},
        },
    }
    pod = rendered(given={"addons": addons})["DaemonSet"]["spec"]["template"]["spec"]
    env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    settings, faults = addon_settings(env)
    assert not faults
    assert settings is not None
    assert [spec.file or spec.text for spec in settings.specs] == [
        "/etc/ztunnel/addons/rate_limit.py",
        "/etc/ztunnel/addons/canary.py",
        "pack:Cls",
    ]
    given = {(name, key): each.value for name, keys in settings.options.items() for key, each in keys.items()}
    assert given == {
        ("canary", "labels"): "version=v2",
        ("rate-limit", "namespaces"): "a,b,1000000",
        ("rate-limit", "per_second"): "50",
    }
    assert {"name": "addons", "configMap": {"name": "our-addons"}} in pod["volumes"]
    mount = {"mountPath": "/etc/ztunnel/addons", "name": "addons", "readOnly": True}
    assert mount in pod["containers"][0]["volumeMounts"]


def test_the_chart_renders_the_kustomize_base() -> None:
    assert without(rendered(), OF_HELM) == base()


def test_objects_and_pods_have_the_labels_of_istios_charts() -> None:
    for given, revision in (({}, "default"), ({"revision": 7}, "7")):
        objects = rendered(given=given)
        pod = objects["DaemonSet"]["spec"]["template"]
        for each in (*objects.values(), pod):
            labels = each["metadata"]["labels"]
            assert labels.keys() >= {*STANDARD, "app.kubernetes.io/name"}
            assert labels["app.kubernetes.io/managed-by"] == "Helm"
            assert labels["app.kubernetes.io/version"] == "0.1.0"
            assert labels["helm.sh/chart"] == "ztunnel-0.1.0"
            assert labels["istio.io/rev"] == revision


def test_labels_of_the_user_replace_those_of_the_chart_except_the_selector() -> None:
    given = {
        "labels": {"app.kubernetes.io/part-of": "mine", "app": "x"},
        "podLabels": {"app.kubernetes.io/version": 2},
    }
    daemon_set = rendered(given=given)["DaemonSet"]
    labels = daemon_set["spec"]["template"]["metadata"]["labels"]
    assert daemon_set["metadata"]["labels"]["app.kubernetes.io/part-of"] == "mine"
    assert (labels["app"], labels["app.kubernetes.io/version"]) == ("ztunnel", "2")


ACCEPTED: list[Object] = [
    {"profile": "ambient"},
    {"profile": "openshift-ambient", "global": {"platform": "openshift"}},
    {"compatibilityVersion": "1.24"},
    {"compatibilityVersion": 1.24},
    {"resourceScope": "all"},
    {"env": None},
    {"meshConfig": None},
    {"multiCluster": None, "global": None, "hub": "h", "tag": "t"},
    {"global": {"multiCluster": None, "networkPolicy": None}},
    {"podMonitor": None, "peerCaCrl": None, "resourceQuotas": None, "netpol": None},
    {"prometheusRule": None, "dashboard": None},
    {"labels": None, "annotations": None, "podLabels": None, "podAnnotations": None, "nodeSelector": None},
    {"labels": {"a": 1}, "podLabels": {"b": 2.5, "c": True}, "podAnnotations": {"prometheus.io/port": 15020}},
    {"network": 1, "revision": 2, "tag": 1, "multiCluster": {"clusterName": 3}, "nodeSelector": {"zone": 4}},
    {"terminationGracePeriodSeconds": "60"},
]


@pytest.mark.parametrize("given", ACCEPTED, ids=repr)
def test_values_that_istios_chart_takes_are_taken(given: Object) -> None:
    objects = rendered(given=given)
    assert objects.keys() >= {*OF_NAMESPACE}
    for each in objects.values():
        for texts in (each["metadata"].get("labels"), each["metadata"].get("annotations")):
            assert all(isinstance(value, str) for value in (texts or {}).values())


def test_large_numbers_are_written_out() -> None:
    given = {"env": {"A": 12345678}, "network": 12345678, "podLabels": {"a": 12345678}, "revision": 12345678}
    pod = rendered(given=given)["DaemonSet"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    env = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert (env["A"], env["NETWORK"], pod["metadata"]["labels"]["a"]) == ("12345678",) * 3
    assert env["XDS_ADDRESS"] == "istiod-12345678.istio-system.svc:15012"


def test_the_openshift_profile_sets_the_selinux_type() -> None:
    (container,) = rendered(given={"profile": "openshift-ambient"})["DaemonSet"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}


@pytest.mark.parametrize(
    ("given", "image"),
    [
        ({"hub": "h", "tag": "1", "variant": "pure"}, "h/ztunnel-py:1-pure"),
        ({"hub": "h", "tag": "1", "global": {"variant": "distroless"}}, "h/ztunnel-py:1"),
        ({"hub": "h", "tag": "1", "variant": "debug", "global": {"hub": "docker.io/istio"}}, "h/ztunnel-py:1"),
        ({"global": {"hub": "h", "tag": 2, "variant": "pure"}}, "h/ztunnel-py:2-pure"),
        ({"image": "h/own:3", "global": {"variant": "pure"}}, "h/own:3"),
    ],
)
def test_image_has_no_variant_of_istios(given: Object, image: str) -> None:
    (container,) = rendered(given=given)["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == image


def test_the_chart_renders_the_alert_and_dashboard_files(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    base = "https://docs.example.com/"
    rule = {"enabled": True, "labels": {"release": "p"}, "runbookBase": base}
    given = {"prometheusRule": rule, "dashboard": {"enabled": True}}
    file.write_text(yaml.safe_dump(given))
    objects = rendered(file)
    files = CHART / "files"
    rules = (files / "ztunnel.rules.yaml").read_text().replace("runbook_url: ", f"runbook_url: {base}")
    assert objects["PrometheusRule"]["spec"] == yaml.safe_load(rules)
    assert objects["PrometheusRule"]["metadata"]["labels"]["release"] == "p"
    found = objects["ConfigMap"]
    assert found["data"]["ztunnel.json"].strip() == (files / "ztunnel.dashboard.json").read_text().strip()
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"


def test_every_value_goes_where_it_belongs(tmp_path: Path) -> None:
    given: Object = {
        "global": {"hub": "registry.example.com", "caAddress": "ca.example.com:443"},
        "tag": "1.2",
        "variant": "pure",
        "imagePullPolicy": "Always",
        "imagePullSecrets": ["mine"],
        "resourceName": "my-ztunnel",
        "labels": {"team": "net"},
        "annotations": {"a": "b"},
        "podLabels": {"colour": "blue"},
        "podAnnotations": {"p": "q"},
        "dnsPolicy": "None",
        "dnsConfig": {"nameservers": ["192.0.2.53"]},
        "affinity": {"nodeAffinity": {"preferred": []}},
        "nodeSelector": {"zone": "one"},
        "tolerations": [{"operator": "Exists"}],
        "updateStrategy": {"type": "OnDelete", "rollingUpdate": None},
        "resources": {"limits": {"cpu": 8}, "requests": {"cpu": "500m", "memory": "1Gi"}},
        "seLinuxOptions": {"type": "spc_t"},
        "volumes": [{"name": "more", "emptyDir": {}}],
        "volumeMounts": [{"name": "more", "mountPath": "/more"}],
        "env": {"ZTUNNEL_SPIN_US": 20},
        "meshConfig": {"defaultConfig": {"proxyMetadata": {"ISTIO_META_DNS_CAPTURE": "false"}}},
        "terminationGracePeriodSeconds": 3600,
        "revision": "canary",
        "istioNamespace": "mesh",
        "network": "net-1",
        "multiCluster": {"clusterName": "cluster-1"},
        "platform": "openshift",
        "logLevel": "debug",
        "logAsJson": True,
        "peerCaCrl": {"enabled": True},
        "resourceQuotas": {"enabled": True, "pods": 70},
        "podMonitor": {"enabled": True},
        "trustBundleName": "my-roots",
    }
    given["global"]["networkPolicy"] = {"enabled": True}
    file = tmp_path / "values.yaml"
    file.write_text(yaml.safe_dump(given))
    objects = rendered(file)
    assert set(objects) == {*OF_NAMESPACE, "ResourceQuota", "NetworkPolicy", "PodMonitor", *OF_CLUSTER}
    assert objects["ResourceQuota"]["spec"]["hard"] == {"pods": "70"}
    assert objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"] == {"app": "ztunnel"}
    (endpoint,) = objects["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert {each["metadata"]["name"] for each in objects.values()} == {"my-ztunnel"}
    for each in objects.values():
        labels = each["metadata"]["labels"]
        assert (labels["team"], labels["istio.io/rev"]) == ("net", "canary")
    assert objects["ServiceAccount"]["imagePullSecrets"] == [{"name": "mine"}]
    assert objects["ServiceAccount"]["metadata"]["annotations"] == {"a": "b"}
    (subject,) = objects["ClusterRoleBinding"]["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": "my-ztunnel", "namespace": "istio-system"}
    daemon_set = objects["DaemonSet"]
    assert daemon_set["metadata"]["annotations"] == {"a": "b"}
    assert daemon_set["spec"]["updateStrategy"] == {"type": "OnDelete"}
    pod = daemon_set["spec"]["template"]
    assert pod["metadata"]["labels"]["colour"] == "blue"
    assert pod["metadata"]["annotations"]["p"] == "q"
    spec = pod["spec"]
    assert spec["serviceAccountName"] == "my-ztunnel"
    assert spec["terminationGracePeriodSeconds"] == 3600
    assert (spec["dnsPolicy"], spec["dnsConfig"]) == ("None", given["dnsConfig"])
    assert spec["affinity"] == given["affinity"]
    assert spec["nodeSelector"] == {"kubernetes.io/os": "linux", "zone": "one"}
    assert spec["tolerations"] == given["tolerations"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["more"] == {"name": "more", "emptyDir": {}}
    roots, lists = volumes["istiod-ca-cert"]["projected"]["sources"]
    assert roots == {"configMap": {"name": "my-roots"}}
    (container,) = spec["containers"]
    assert endpoint["port"] in [port["name"] for port in container["ports"]]
    assert container["image"] == "registry.example.com/ztunnel-py:1.2-pure"
    assert container["imagePullPolicy"] == "Always"
    assert container["resources"] == given["resources"]
    assert container["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    mounts = {entry["name"]: entry["mountPath"] for entry in container["volumeMounts"]}
    assert mounts["more"] == "/more"
    env = environment(container)
    assert env["CRL_PATH"] == f"{mounts['istiod-ca-cert']}/{lists['configMap']['items'][0]['path']}"
    config = config_from(env, cpus=8, read_file=lambda path: None)
    assert config.warnings == ()
    assert config.xds_address == "https://istiod-canary.mesh.svc:15012"
    assert config.ca_address == "https://ca.example.com:443"
    assert (config.network, config.cluster_id) == ("net-1", "cluster-1")
    assert (config.log_filter, config.log_json) == ("debug", True)
    assert (config.drain_s, config.spin_us, config.dns_proxy) == (3595.0, 20, False)
    assert config.worker_threads == 2


def write(folder: Path, given: Object) -> Path:
    file = folder / "values.yaml"
    file.write_text(yaml.safe_dump(given))
    return file


@pytest.mark.parametrize(("scope", "kinds"), [("CLUSTER", OF_CLUSTER), ("NAMESPACE", OF_NAMESPACE)])
def test_two_accounts_can_install_it(tmp_path: Path, scope: str, kinds: tuple[str, ...]) -> None:
    given = {"resourceScope": scope, "platform": "openshift", "global": {"networkPolicy": {"enabled": False}}}
    assert set(rendered(write(tmp_path, given))) == set(kinds)


@pytest.mark.parametrize("revoking", [False, True])
def test_roots_can_come_from_a_cluster_trust_bundle(tmp_path: Path, revoking: bool) -> None:
    given: Object = {"env": {"ENABLE_CLUSTER_TRUST_BUNDLE_API": True}, "peerCaCrl": {"enabled": revoking}}
    spec = rendered(write(tmp_path, given))["DaemonSet"]["spec"]["template"]["spec"]
    (volume,) = [volume for volume in spec["volumes"] if volume["name"] == "istiod-ca-cert"]
    roots = volume["projected"]["sources"][0]
    assert roots == {"clusterTrustBundle": {"name": "istio.io:istiod-ca:root-cert", "path": "root-cert.pem"}}
    assert len(volume["projected"]["sources"]) == 1 + revoking


def test_openshift_lets_the_proxy_write_where_istio_cni_does(tmp_path: Path) -> None:
    pod = rendered(write(tmp_path, {"global": {"platform": "openshift"}}))["DaemonSet"]["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    assert container["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}


def test_the_schema_has_every_value_and_no_other() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert list(schema["properties"]) == list(values())
    assert schema["additionalProperties"] is False


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"resorces": {}}, "resorces"),
        ({"terminationGracePeriodSeconds": "long"}, "terminationGracePeriodSeconds"),
        ({"resourceScope": "some"}, "resourceScope"),
        ({"peerCaCrl": {"enable": True}}, "enable"),
        ({"netpol": {"tunnels": "ignore"}}, "tunnels"),
        ({"env": {"A": {"valueFrom": {}}}}, "env"),
    ],
)
def test_what_the_chart_would_ignore_is_refused_by_name(tmp_path: Path, given: Object, said: str) -> None:
    command = [needed("helm"), "template", "ztunnel", str(CHART), "--values", str(write(tmp_path, given))]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert said in refused.stderr


def test_kustomize_accepts_base_and_overlay() -> None:
    kubectl = needed("kubectl")
    for folder in (BASE, DEPLOY / "kustomize" / "openshift"):
        built = subprocess.run([kubectl, "kustomize", str(folder)], check=True, capture_output=True, text=True)
        objects = documents(built.stdout)
        assert objects["ServiceAccount"] == base()["ServiceAccount"]
        if folder == BASE:
            assert objects == base()
        else:
            context = objects["DaemonSet"]["spec"]["template"]["spec"]["containers"][0]["securityContext"]
            assert context["seLinuxOptions"] == {"type": "spc_t"}


def test_the_overlay_of_the_docs_names_the_image(tmp_path: Path) -> None:
    text = (DEPLOY.parent / "docs" / "running.md").read_text()
    (overlay,) = re.findall(r"kustomization.yaml <<EOF\n(.*?)EOF\n", text, re.DOTALL)
    folder = tmp_path / "mine"
    folder.mkdir()
    (tmp_path / "deploy").symlink_to(DEPLOY)
    (folder / "kustomization.yaml").write_text(overlay.replace("$HUB", "registry.example.com"))
    command = [needed("kubectl"), "kustomize", str(folder)]
    built = subprocess.run(command, check=True, capture_output=True, text=True)
    (container,) = documents(built.stdout)["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    assert container["image"] == "registry.example.com/ztunnel-py:0.1.0"


# The image


def test_the_image_installs_what_is_locked_and_runs_as_the_chart_expects() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    stages = [index for index, line in enumerate(lines) if line.startswith("FROM ")]
    assert len(stages) == 2
    installs = [line for line in lines if line.startswith("RUN") and "pip install" in line and "/dist" not in line]
    assert [re.findall(r"-r /src/([\w./]+)", line) for line in installs] == [
        ["requirements/runtime.lock"],
        ["requirements/cel.lock"],
        ["requirements/otlp.lock"],
        ["requirements/runtime.lock", "requirements/compile.lock"],
    ]
    assert all("--require-hashes --only-binary :all:" in " ".join(line.split()) for line in installs)
    final = lines[stages[1] :]
    # The base image has no byte code of the standard library, and at run time none can be written.
    compiled = next(line for line in lines if "compileall" in line)
    cache = re.search(r"PYTHONPYCACHEPREFIX=(\S+)", compiled)
    assert cache is not None
    assert 'get_path("stdlib")' in compiled
    level = re.search(r"compileall -q -o (\d) ", compiled)
    assert level is not None, "the interpreter reads only byte code of its own level"
    assert any(f" PYTHONOPTIMIZE={level[1]}" in line for line in final if line.startswith("ENV "))
    assert any(f" PYTHONPYCACHEPREFIX={cache[1]} " in line for line in final if line.startswith("ENV "))
    assert cache[1].startswith("/opt/ztunnel/"), "the last stage copies that folder"
    assert not any(line.startswith(("RUN", "ADD")) for line in final), "the last stage only copies"
    assert "USER 0:1337" in final
    assert "WORKDIR /" in final
    assert 'ENTRYPOINT ["ztunnel"]' in final
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (DEPLOY.parent / source).exists(), line


def test_the_image_may_copy_what_it_copies() -> None:
    allowed = {
        line.removeprefix("!")
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    }
    copied = {
        source
        for line in (DEPLOY / "Dockerfile").read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    }
    assert copied == allowed
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    packages = {name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= copied
