"""The templates with a proxy beside the application: reviewed pods, the author's changes, and to inject again."""

import base64
import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import jsonpatch
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ztunnel.proxy.istio.environment import config_from
from ztunnel.proxy.istio.settings.app_probes import parse_probers
from ztunnel.sidecar.inject.config import InjectConfig, SidecarConfig, parse_config
from ztunnel.sidecar.inject.inject import GATE, TEMPLATES_ANNOTATION, Denied, Outcome, inject
from ztunnel.sidecar.inject.manual import inject_text
from ztunnel.sidecar.inject.patch import diff
from ztunnel.sidecar.inject.review import answer, url_parts
from ztunnel.sidecar.inject.sidecar import INIT, OVERRIDES, PROXY, STATUS, strip

HERE = Path(__file__).parent / "goldens"
CONFIG = InjectConfig(image="example/ztunnel:1", templates=("sidecar",), pull_secrets=("registry",))
CLASSIC = InjectConfig(image="example/ztunnel:1", templates=("sidecar-classic",))
PROBED = {
    "name": "app",
    "image": "app",
    "ports": [{"name": "web", "containerPort": 8080}],
    "readinessProbe": {"httpGet": {"path": "/ready", "port": "web"}, "timeoutSeconds": 3, "periodSeconds": 5},
    "livenessProbe": {"tcpSocket": {"port": 8080}},
    "startupProbe": {"grpc": {"port": 9090, "service": "a.B"}},
    "lifecycle": {
        "preStop": {"httpGet": {"path": "/bye", "port": 8080}},
        "postStart": {"exec": {"command": ["x"]}},
    },
}


def pod(*containers: Any, **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "web-1", "labels": {"app": "web"}, **metadata},
        "spec": {
            "initContainers": [{"name": "migrate", "image": "app"}],
            "containers": list(containers) or [{"name": "app", "image": "app"}],
        },
    }


def made(given_pod: dict[str, Any], config: InjectConfig = CONFIG, **variables: str) -> dict[str, Any]:
    return dict(inject(given_pod, "shop", config, variables).pod)


def named(containers: list[dict[str, Any]]) -> list[str]:
    return [each["name"] for each in containers]


def part(injected: dict[str, Any], name: str) -> dict[str, Any]:
    spec = injected["spec"]
    [found] = [each for each in (*spec.get("initContainers", []), *spec["containers"]) if each["name"] == name]
    return dict(found)


def env(injected: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in part(injected, PROXY)["env"]}


def flags(injected: dict[str, Any]) -> dict[str, str]:
    _, *words = [each for each in part(injected, INIT)["args"] if not each.startswith("--")]
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize(
    ("name", "given_pod", "config"),
    [
        ("native", pod(), CONFIG),
        ("classic", pod(), CLASSIC),
        ("probes", pod(PROBED), CONFIG),
        (
            "annotated",
            pod(
                annotations={
                    "traffic.sidecar.istio.io/excludeOutboundPorts": "25",
                    "traffic.sidecar.istio.io/excludeInboundPorts": "22",
                    "sidecar.istio.io/proxyCPU": "250m",
                    "status.sidecar.istio.io/port": "16000",
                    "proxy.istio.io/config": "concurrency: 1",
                }
            ),
            CONFIG,
        ),
    ],
)
def test_a_pod_reads_as_reviewed(name: str, given_pod: dict[str, Any], config: InjectConfig) -> None:
    injected = made(given_pod, config)
    assert injected == yaml.safe_load((HERE / f"{name}.yaml").read_text())
    # Somebody else's implementation of RFC 6902 makes the same of the patch.
    assert jsonpatch.apply_patch(given_pod, diff(given_pod, injected)) == injected


def test_a_native_sidecar_comes_before_everything_of_the_pods() -> None:
    injected = made(pod())
    assert named(injected["spec"]["initContainers"]) == [INIT, PROXY, "migrate"]
    assert named(injected["spec"]["containers"]) == ["app"]
    assert part(injected, PROXY)["restartPolicy"] == "Always"
    assert part(injected, PROXY)["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_an_ordinary_one_holds_the_application_back_and_stays_for_its_end() -> None:
    injected = made(pod(), CLASSIC)
    assert named(injected["spec"]["initContainers"]) == ["migrate", INIT]
    assert named(injected["spec"]["containers"]) == [PROXY, "app"]
    proxy = part(injected, PROXY)
    assert proxy["lifecycle"] == {
        "preStop": {"exec": {"command": ["ztunnel", "drain", "--wait=20"]}},
        "postStart": {"exec": {"command": ["ztunnel", "gate", "--timeout=60"]}},
    }
    assert "restartPolicy" not in proxy
    asked_for = pod(annotations={"sidecar.istio.io/nativeSidecar": "false"})
    assert named(made(asked_for)["spec"]["containers"]) == [PROXY, "app"]


def test_the_proxy_can_read_what_it_is_given() -> None:
    injected = made(pod(PROBED, annotations={"proxy.istio.io/config": "proxyMetadata: {X: y}"}), NODE="edge")
    values = env(injected)
    known = {"POD_NAME": "web-1", "POD_NAMESPACE": "shop", "SERVICE_ACCOUNT": "web"}
    for name, value in known.items():
        values[name] = value
        values["PROXY_WORKLOAD_INFO"] = values["PROXY_WORKLOAD_INFO"].replace(f"$({name})", value)
    config = config_from(values, cpus=2, read_file=lambda path: None)
    assert config.warnings == ()
    assert config.sidecar
    assert config.workload is not None
    assert (config.workload.namespace, config.workload.name, config.workload.service_account) == (
        "shop",
        "web-1",
        "web",
    )
    assert set(config.app_probes) == {
        "/app-health/app/readyz",
        "/app-health/app/livez",
        "/app-health/app/startupz",
        "/app-lifecycle/app/prestopz",
    }
    assert config.app_probes["/app-health/app/readyz"].port == 8080


def test_probes_are_asked_of_the_proxy() -> None:
    app = part(made(pod(PROBED)), "app")
    for key, path in (("readinessProbe", "readyz"), ("livenessProbe", "livez"), ("startupProbe", "startupz")):
        assert app[key]["httpGet"] == {"path": f"/app-health/app/{path}", "port": 15020, "scheme": "HTTP"}
    assert app["readinessProbe"]["periodSeconds"] == 5
    assert app["lifecycle"]["preStop"]["httpGet"]["path"] == "/app-lifecycle/app/prestopz"
    assert app["lifecycle"]["postStart"] == {"exec": {"command": ["x"]}}


@pytest.mark.parametrize(
    "annotations",
    [{"sidecar.istio.io/rewriteAppHTTPProbers": "false"}, {"status.sidecar.istio.io/port": "0"}],
)
def test_probes_stay_where_the_author_wants_it(annotations: dict[str, str]) -> None:
    injected = made(pod(PROBED, annotations=annotations))
    assert part(injected, "app") == PROBED
    assert "ISTIO_KUBE_APP_PROBERS" not in env(injected)


@pytest.mark.parametrize("port", ["nope", "9" * 5000])
def test_a_probe_of_a_port_that_is_not_there_is_a_warning(port: str) -> None:
    container = {"name": "app", "readinessProbe": {"httpGet": {"port": port}}, "ports": [{"name": "web"}]}
    outcome = inject(pod(container), "shop", CONFIG)
    assert outcome.warnings == (
        f"container app: readinessProbe: no port is named {port!r}; the probe is left as it is",
    )
    assert part(dict(outcome.pod), "app")["readinessProbe"] == {"httpGet": {"port": port}}


def test_a_native_sidecar_of_the_pods_own_has_probes_too() -> None:
    given_pod = pod()
    probe = {"tcpSocket": {"port": 5}}
    given_pod["spec"]["initContainers"] = [{"name": "own", "restartPolicy": "Always", "startupProbe": probe}]
    assert parse_probers(env(made(given_pod))["ISTIO_KUBE_APP_PROBERS"]).keys() == {"/app-health/own/startupz"}


def test_annotations_become_flags_and_the_proxys_own_ports_stay_out() -> None:
    annotations = {
        "traffic.sidecar.istio.io/includeOutboundIPRanges": "10.0.0.0/8",
        "traffic.sidecar.istio.io/excludeInboundPorts": "22,23",
    }
    found = flags(made(pod(annotations=annotations)))
    assert found == {"-u": "1337", "-g": "1337", "-i": "10.0.0.0/8", "-b": "*", "-d": "15090,15021,15020,22,23"}
    none = made(pod(annotations={"sidecar.istio.io/interceptionMode": "NONE"}))
    assert named(none["spec"]["initContainers"]) == [PROXY, "migrate"]


def test_what_a_url_and_a_label_say_wins_over_the_configuration() -> None:
    config = InjectConfig(templates=("sidecar",), sidecar=SidecarConfig(network="one", env={"X": "1", "Y": "1"}))
    variables, templates = url_parts("/cluster/east/net/a--slash--b/templates/a,b/x/2/odd")
    assert templates == ("a", "b")
    assert variables == {"CLUSTER_ID": "east", "ISTIO_META_CLUSTER_ID": "east", "NETWORK": "a/b", "X": "2"}
    found = env(made(pod(), config, **variables))
    assert (found["ISTIO_META_CLUSTER_ID"], found["NETWORK"], found["X"], found["Y"]) == ("east", "a/b", "2", "1")
    labelled = pod(labels={"topology.istio.io/network": "own"})
    assert env(made(labelled, config, **variables))["NETWORK"] == "own"


def test_the_url_of_a_request_counts() -> None:
    asked = {"uid": "u", "kind": {"kind": "Pod"}, "namespace": "shop", "object": pod()}
    body = json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": asked}).encode()
    for path, config in (("/cluster/east", CONFIG), ("/templates/sidecar/cluster/east", InjectConfig())):
        said = json.loads(answer(body, "application/json", config, path).body)["response"]
        patch = json.loads(base64.b64decode(said["patch"]))
        assert env(jsonpatch.apply_patch(pod(), patch))["CLUSTER_ID"] == "east"


# The author's changes


def test_a_container_under_our_name_is_the_authors_change() -> None:
    written = {
        "name": PROXY,
        "image": "auto",
        "env": [{"name": "RUST_LOG", "value": "debug"}, {"name": "POD_NAME", "value": "fixed"}, {"name": "NEW"}],
        "volumeMounts": [{"name": "mine", "mountPath": "/tmp"}],
        "securityContext": {"runAsUser": 2000},
        "resources": {"limits": {"memory": "2Gi"}},
    }
    injected = made(pod({"name": "app"}, written))
    proxy = part(injected, PROXY)
    assert proxy["image"] == "example/ztunnel:1"
    found = {each["name"]: each for each in proxy["env"]}
    assert found["RUST_LOG"] == {"name": "RUST_LOG", "value": "debug"}
    assert found["POD_NAME"] == {"name": "POD_NAME", "value": "fixed"}
    assert "NEW" in found
    assert [each["name"] for each in proxy["volumeMounts"] if each["mountPath"] == "/tmp"] == ["mine"]
    assert proxy["resources"]["limits"] == {"memory": "2Gi"}
    # The rules know the proxy by its user.
    assert (flags(injected)["-u"], flags(injected)["-g"]) == ("2000", "1337")
    assert json.loads(injected["metadata"]["annotations"][OVERRIDES]) == {"containers": [written]}
    assert made(injected) == injected


@pytest.mark.parametrize("user", [0, -1, "root", True])
def test_the_proxy_cannot_be_root(user: object) -> None:
    with pytest.raises(Denied, match=f"container {PROXY}: must not run as user or group"):
        made(pod({"name": "app"}, {"name": PROXY, "securityContext": {"runAsUser": user}}))


@pytest.mark.parametrize(
    ("of_pod", "of_container", "of_proxy", "said"),
    [
        ({}, {"runAsUser": 1337}, {}, "user 1337"),
        ({}, {"runAsGroup": 1337}, {}, "group 1337"),
        ({"runAsGroup": 1337}, {"runAsUser": 1}, {}, "group 1337"),
        ({"runAsGroup": 1337}, {"runAsUser": 1337}, {}, "user 1337"),
        ({}, {"runAsUser": 2000}, {"runAsUser": 2000}, "user 2000"),
        ({}, {"runAsUser": 1337}, {"runAsUser": 2000}, ""),
        ({"runAsGroup": 1337}, {"runAsGroup": 5}, {}, ""),
    ],
)
def test_an_application_with_the_proxys_user_or_group_is_a_warning(
    of_pod: dict[str, int], of_container: dict[str, int], of_proxy: dict[str, int], said: str
) -> None:
    given_pod = pod({"name": "app", "securityContext": of_container}, {"name": PROXY, "securityContext": of_proxy})
    given_pod["spec"] |= {"initContainers": [], "securityContext": of_pod}
    outcome = inject(given_pod, "shop", CONFIG)
    line = f"container app runs as {said} like the proxy, so its connections are not captured"
    assert outcome.warnings == ((line,) if said else ())


@pytest.mark.parametrize(
    "config", [CONFIG, CLASSIC, InjectConfig()], ids=["sidecar", "sidecar-classic", "ambient"]
)
def test_a_null_in_a_file_is_an_absent_value(config: InjectConfig) -> None:
    """The API server drops nulls before it calls the webhook; Helm's output is full of them."""
    written: dict[str, Any] = {
        "name": PROXY,
        "image": None,
        **dict.fromkeys(("env", "volumeMounts", "ports", "resources", "lifecycle", "args")),
        "securityContext": {"runAsUser": None, "capabilities": None},
    }
    plain = pod(PROBED, {"name": PROXY})
    nulls = pod(PROBED, written)
    for each in (plain, nulls):
        del each["metadata"]["labels"]
    empty = {"metadata": None, "spec": {**nulls["spec"], "volumes": None, "imagePullSecrets": None}}
    nulls["metadata"] |= {"labels": None, "annotations": None}
    expected = made(plain, config)
    for given_pod in (nulls, empty):
        injected = made(given_pod, config)
        assert {each["name"]: each for each in injected["spec"]["initContainers"]}.keys() == {
            each["name"] for each in expected["spec"]["initContainers"]
        }
        for each in (*expected["spec"]["initContainers"], *expected["spec"]["containers"]):
            if config != InjectConfig() or each["name"] != PROXY:
                assert part(injected, each["name"]) == each
        assert (
            injected["metadata"]["labels"].items()
            >= {
                name: value for name, value in expected["metadata"]["labels"].items() if "canonical" not in name
            }.items()
        )


# Refusals


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (None, "spec: must be a mapping"),
        ({"containers": []}, "spec.containers: the pod has no container of its own"),
        ({"containers": [{"name": PROXY}]}, "the pod has no container of its own"),
        ({"containers": 3}, "spec.containers: must be a list of containers"),
        ({"containers": [{"name": "a"}], "volumes": 3}, "spec.volumes: must be a list"),
    ],
)
def test_a_pod_that_cannot_have_a_sidecar(spec: Any, said: str) -> None:
    with pytest.raises(Denied, match=said):
        made({"metadata": {}, "spec": spec})


def test_bad_annotations_deny_with_every_fault() -> None:
    annotations = {
        "traffic.sidecar.istio.io/excludeOutboundPorts": "smtp",
        "sidecar.istio.io/interceptionMode": "TPROXY",
    }
    with pytest.raises(Denied) as raised:
        made(pod(annotations=annotations))
    assert "annotation traffic.sidecar.istio.io/excludeOutboundPorts: 'smtp' is no port" in str(raised.value)
    assert "annotation sidecar.istio.io/interceptionMode: TPROXY needs" in str(raised.value)


@pytest.mark.parametrize("names", ["ambient,sidecar", "sidecar,sidecar-classic"])
def test_templates_exclude_each_other(names: str) -> None:
    with pytest.raises(Denied, match="exclude each other; name one"):
        made(pod(annotations={TEMPLATES_ANNOTATION: names}))


# Again


@pytest.mark.parametrize("config", [CONFIG, CLASSIC])
def test_to_inject_again_changes_nothing_and_a_later_injector_replaces_all(config: InjectConfig) -> None:
    given_pod = pod(PROBED, annotations={"a": "b"})
    once = made(given_pod, config)
    assert made(once, config) == once
    later = InjectConfig(image="example/ztunnel:2", templates=config.templates, revision="later")
    again = made(once, later)
    assert part(again, PROXY)["image"] == "example/ztunnel:2"
    assert again["metadata"]["annotations"]["istio.io/rev"] == "later"
    assert "registry" not in [each["name"] for each in again["spec"].get("imagePullSecrets", [])]
    assert again == made(given_pod, later) | {"spec": again["spec"]}
    # From one template to the other, and back to the first.
    other = CLASSIC if config is CONFIG else CONFIG
    assert made(made(once, other), config) == once


def test_anchors_of_yaml_do_not_make_two_containers_one() -> None:
    hooks = {"preStop": {"tcpSocket": {"port": 1}}}
    injected = made(pod({"name": "a", "lifecycle": hooks}, {"name": "b", "lifecycle": hooks}))
    for name in ("a", "b"):
        assert part(injected, name)["lifecycle"]["preStop"]["httpGet"]["path"] == f"/app-lifecycle/{name}/prestopz"
    endless: dict[str, Any] = {"name": "a"}
    endless["env"] = [endless]
    with pytest.raises(Denied, match="nested too deeply"):
        made(pod(endless))


def test_from_the_gate_to_a_sidecar() -> None:
    ambient = made(pod(), InjectConfig(templates=("ambient",)))
    assert GATE not in named(made(ambient)["spec"]["initContainers"])


def test_anothers_sidecar_is_left_alone() -> None:
    status = {STATUS: json.dumps({"revision": "x", "initContainers": ["istio-init"]})}
    outcome: Outcome = inject(pod(annotations=status), "shop", CONFIG)
    assert not outcome.decision.inject
    assert outcome.pod == pod(annotations=status)


names = st.sampled_from(["a", "b", PROXY, INIT, "istio-token"])
handlers = st.sampled_from(
    [{"httpGet": {"port": 80}}, {"tcpSocket": {"port": 1}}, {"exec": {}}, {"httpGet": {"port": "x"}}, 3, None]
)
containers = st.lists(
    st.fixed_dictionaries(
        {"name": names},
        optional={"readinessProbe": handlers, "env": st.just([{"name": "RUST_LOG"}]), "lifecycle": st.just({})},
    ),
    min_size=0,
    max_size=3,
    unique_by=lambda each: str(each["name"]),
)
texts = st.dictionaries(
    st.sampled_from(["app", "istio.io/rev", STATUS, OVERRIDES, "istio.io/dataplane-mode", "a"]),
    st.sampled_from(["x", "{}", "[]", '{"injector": "ztunnel-py"}', '{"containers": 3}', "ambient"]),
    max_size=3,
)
pods = st.fixed_dictionaries(
    {
        "metadata": st.fixed_dictionaries({}, optional={"labels": texts, "annotations": texts}),
        "spec": st.fixed_dictionaries(
            {"containers": containers},
            optional={
                "initContainers": containers,
                "volumes": st.lists(st.fixed_dictionaries({"name": names}), max_size=2),
            },
        ),
    }
)


@given(given_pod=pods, config=st.sampled_from([CONFIG, CLASSIC]))
def test_any_pod_is_injected_once_and_can_be_undone(given_pod: dict[str, Any], config: InjectConfig) -> None:
    given_pod = json.loads(json.dumps(given_pod))  # strategies share objects, JSON does not
    before = copy.deepcopy(given_pod)
    try:
        once = made(given_pod, config)
    except Denied:
        return
    assert given_pod == before
    assert jsonpatch.apply_patch(copy.deepcopy(given_pod), diff(given_pod, once)) == once
    if STATUS not in once.get("metadata", {}).get("annotations", {}) or once == given_pod:
        return
    assert made(once, config) == once
    undone = copy.deepcopy(once)
    strip(undone)
    assert made(undone, config) == once


@pytest.mark.parametrize(
    ("metadata", "name"),
    [
        ({"labels": {"app.kubernetes.io/name": "shop", "app": "web"}}, "shop"),
        ({"labels": {"app": "-" + "a" * 70}}, "a" * 62),
        ({"name": "web-1", "labels": {}}, "web-1"),
        ({"name": None, "generateName": "web-5d8f9c-", "labels": {}}, "web-5d8f9c"),
        ({"labels": {"pod-template-hash": "5d8f9c"}, "ownerReferences": [("ReplicaSet", "web-5d8f9c")]}, "web"),
        ({"labels": {}, "ownerReferences": [("ReplicaSet", "web-5d8f9c")]}, "web-5d8f9c"),
        ({"labels": {}, "ownerReferences": [("Job", "backup-28712345")]}, "backup"),
        ({"labels": {}, "ownerReferences": [("Job", "backup-1")]}, "backup-1"),
        ({"labels": {}, "ownerReferences": [("StatefulSet", "db")]}, "db"),
        ({"labels": {}, "ownerReferences": 3}, "web-1"),
    ],
)
def test_metrics_know_the_workload_and_not_the_pod(metadata: dict[str, Any], name: str) -> None:
    owners = metadata.get("ownerReferences")
    if isinstance(owners, list):
        listed = [{"kind": kind, "name": each, "controller": True} for kind, each in owners]
        metadata = {**metadata, "ownerReferences": [{"kind": "Other"}, *listed]}
    labels = made(pod(**metadata))["metadata"]["labels"]
    assert labels["service.istio.io/canonical-name"] == name
    assert labels["service.istio.io/canonical-revision"] == "latest"


def test_a_template_of_pods_has_its_workloads_name() -> None:
    template = {"spec": {"containers": [{"name": "app"}]}}
    document = {"kind": "Deployment", "metadata": {"name": "web"}, "spec": {"template": template}}
    found = json.loads(inject_text(json.dumps(document), "shop", CONFIG, []))
    assert found["spec"]["template"]["metadata"]["labels"]["service.istio.io/canonical-name"] == "web"


KEYS = [
    "name",
    "env",
    "ports",
    "volumeMounts",
    "resources",
    "securityContext",
    "runAsUser",
    "value",
    "mountPath",
    "containerPort",
    "lifecycle",
    "readinessProbe",
    "httpGet",
    "port",
    "preStop",
    "image",
    "ownerReferences",
    "controller",
    "kind",
    "labels",
    "annotations",
]
junk = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 90000) | st.sampled_from([PROXY, INIT, "a", ""]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=12,
)


@given(of_container=st.dictionaries(st.sampled_from(KEYS), junk, max_size=5), of_spec=junk, of_metadata=junk)
def test_a_misshapen_pod_is_injected_or_refused_with_a_text(
    of_container: dict[str, Any], of_spec: Any, of_metadata: Any
) -> None:
    spec = {"containers": [{"name": "a"}, of_container], "initContainers": of_spec, "securityContext": of_spec}
    for kind in ("volumes", "imagePullSecrets"):
        # Strategies share objects, JSON does not.
        given_pod = json.loads(json.dumps({"metadata": of_metadata, "spec": {**spec, kind: of_spec}}))
        with contextlib.suppress(Denied):
            outcome = inject(given_pod, "shop", CONFIG)
            assert jsonpatch.apply_patch(copy.deepcopy(given_pod), diff(given_pod, outcome.pod)) == outcome.pod


def test_a_configuration_of_sidecars_is_read() -> None:
    config = parse_config("""
defaultTemplates: [sidecar]
imagePullSecrets: [registry]
revision: canary
sidecar:
  xdsAddress: https://plane:15012
  trustDomain: example.org
  dnsCapture: true
  tokenSeconds: 3600
  resources: {requests: {cpu: 1}}
  excludeOutboundPorts: "25"
  env: {A: b}
""")
    assert (config.revision, config.pull_secrets) == ("canary", ("registry",))
    injected = made(pod(), config)
    assert env(injected)["XDS_ADDRESS"] == env(injected)["CA_ADDRESS"] == "https://plane:15012"
    assert (env(injected)["TRUST_DOMAIN"], env(injected)["A"]) == ("example.org", "b")
    assert "--capture-all-dns" in part(injected, INIT)["args"]
    assert flags(injected)["-o"] == "25"
    assert part(injected, PROXY)["resources"] == {"requests": {"cpu": 1}}
