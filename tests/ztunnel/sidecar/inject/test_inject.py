"""What is added to pods, in reviews and in files."""

import base64
import copy
import json
from typing import Any

import jsonpatch
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ztunnel.runtime.formats.go_yaml import load_json
from ztunnel.sidecar.inject.config import ConfigFaults, InjectConfig, parse_config
from ztunnel.sidecar.inject.decision import INJECT, Reason
from ztunnel.sidecar.inject.inject import DATAPLANE_MODE, GATE, TEMPLATES_ANNOTATION, Denied, inject
from ztunnel.sidecar.inject.manual import BadDocument, inject_text
from ztunnel.sidecar.inject.review import MAX_BODY, answer

CONFIG = InjectConfig(image="example/ztunnel:1")


def pod(**metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "web", **metadata},
        "spec": {
            "initContainers": [{"name": "migrate", "image": "app"}],
            "containers": [{"name": "app", "image": "app"}],
        },
    }


def review(given_pod: Any, version: str = "v1", **request: Any) -> bytes:
    asked = {"uid": "u-1", "kind": {"kind": "Pod"}, "namespace": "shop", "object": given_pod, **request}
    return json.dumps(
        {"apiVersion": f"admission.k8s.io/{version}", "kind": "AdmissionReview", "request": asked}
    ).encode()


def response(body: bytes, config: InjectConfig = CONFIG) -> dict[str, Any]:
    answered = answer(body, "application/json", config)
    assert answered.status == 200
    document = json.loads(answered.body)
    assert document["kind"] == "AdmissionReview"
    result: dict[str, Any] = document["response"]
    return result


def test_the_patch_is_as_written_down() -> None:
    said = response(review(pod()))
    assert said["uid"] == "u-1"
    assert said["allowed"] is True
    assert said["patchType"] == "JSONPatch"
    patch = json.loads(base64.b64decode(said["patch"]))
    assert patch == [
        {"op": "add", "path": "/metadata/labels", "value": {"istio.io/dataplane-mode": "ambient"}},
        {
            "op": "add",
            "path": "/spec/initContainers/0",
            "value": {
                "name": "mesh-gate",
                "image": "example/ztunnel:1",
                "imagePullPolicy": "IfNotPresent",
                "args": ["gate", "--timeout=60"],
                "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}},
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "privileged": False,
                    "readOnlyRootFilesystem": True,
                    "runAsGroup": 1337,
                    "runAsNonRoot": True,
                    "runAsUser": 1337,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
            },
        },
    ]
    made = jsonpatch.apply_patch(pod(), patch)
    assert made == inject(pod(), "shop", CONFIG).pod
    assert [each["name"] for each in made["spec"]["initContainers"]] == [GATE, "migrate"]


@pytest.mark.parametrize("labels", [None, {}, {DATAPLANE_MODE: "ambient"}, {"app": "web"}])
def test_to_inject_again_changes_nothing(labels: dict[str, str] | None) -> None:
    given_pod = pod() if labels is None else pod(labels=labels)
    once = inject(given_pod, "shop", CONFIG).pod
    assert inject(once, "shop", CONFIG).pod == once
    assert "patch" not in response(review(once))
    # A later release of the injector has another image. Its gate replaces the old one.
    again = inject(once, "shop", InjectConfig(image="example/ztunnel:2")).pod
    gates = [each["image"] for each in again["spec"]["initContainers"] if each["name"] == GATE]
    assert gates == ["example/ztunnel:2"]


@pytest.mark.parametrize(
    "given_pod",
    [
        pod(labels={DATAPLANE_MODE: "none"}),
        pod(labels={INJECT: "false"}),
        pod(annotations={"sidecar.istio.io/status": "{}"}),
        {**pod(), "spec": {"hostNetwork": True, "containers": []}},
    ],
)
def test_pods_that_are_not_injected_stay_unchanged(given_pod: dict[str, Any]) -> None:
    before = copy.deepcopy(given_pod)
    said = response(review(given_pod))
    assert said["allowed"] is True
    assert "patch" not in said
    assert "patchType" not in said
    assert given_pod == before


def test_aliases_and_lists_of_templates() -> None:
    config = InjectConfig(aliases={"mesh": ("ambient",)})
    for named in ("ambient", "mesh", " ambient , mesh "):
        made = inject(pod(annotations={TEMPLATES_ANNOTATION: named}), "shop", config).pod
        assert made["spec"]["initContainers"][0]["name"] == GATE


@pytest.mark.parametrize("named", ["grpc-agent", "ambient,nope", "", ","])
def test_an_unknown_template_denies_the_pod_and_lists_the_known(named: str) -> None:
    said = response(review(pod(annotations={TEMPLATES_ANNOTATION: named})))
    assert said["allowed"] is False
    assert said["status"]["message"].endswith("known templates are ambient, sidecar, sidecar-classic")
    assert TEMPLATES_ANNOTATION in said["status"]["message"]
    with pytest.raises(Denied):
        inject(pod(annotations={TEMPLATES_ANNOTATION: named}), "shop", CONFIG)


def test_what_agents_would_ignore_is_a_warning_for_the_author() -> None:
    given_pod = pod(
        annotations={"ambient.istio.io/dns-capture": "on", "ambient.istio.io/bypass-inbound-capture": "true"},
        labels={INJECT: "yes"},
    )
    said = response(review(given_pod))
    assert said["warnings"] == [
        'sidecar.istio.io/inject=\'yes\' is ignored: only "true" and "false" count',
        "ambient.istio.io/dns-capture='on' is ignored: it must be true or false",
    ]
    assert said["allowed"] is True


@pytest.mark.parametrize("version", ["v1", "v1beta1"])
def test_the_answer_has_the_version_of_the_request(version: str) -> None:
    answered = answer(review(pod(), version), "application/json", CONFIG)
    assert json.loads(answered.body)["apiVersion"] == f"admission.k8s.io/{version}"
    assert answered.result == "injected"


@pytest.mark.parametrize(
    ("body", "content_type", "status"),
    [
        (b"{}", "text/plain", 415),
        (b"{}", "application/json; charset=utf-8", 415),
        (b"", "application/json", 400),
        (b" " * (MAX_BODY + 1), "application/json", 400),
    ],
)
def test_what_is_no_request_is_an_http_error(body: bytes, content_type: str, status: int) -> None:
    answered = answer(body, content_type, CONFIG)
    assert (answered.status, answered.result) == (status, "bad-request")


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"[" * 100_000,
        b"{}",
        b'{"apiVersion": "admission.k8s.io/v1"}',
        b'{"apiVersion": "admission.k8s.io/v2", "request": {}}',
        review(None),
        review([]),
        review({"kind": "Pod"}),
        review({"metadata": {"labels": {}}, "spec": {"initContainers": {"a": 1}}}),
        review(pod(), kind={"kind": "Service"}),
    ],
)
def test_what_is_no_pod_is_refused_with_a_text(body: bytes) -> None:
    said = response(body)
    assert said["allowed"] is False
    assert said["status"]["message"]


@given(
    given_pod=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=4),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["metadata", "spec", "labels", "annotations", "initContainers", INJECT, "name"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=15,
    )
)
def test_any_object_gets_an_answer(given_pod: Any) -> None:
    said = response(review(given_pod))
    if "patch" in said:
        patch = json.loads(base64.b64decode(said["patch"]))
        made = jsonpatch.apply_patch(copy.deepcopy(given_pod), patch)
        assert made["spec"]["initContainers"][0]["name"] == GATE


def test_every_workload_kind_and_lists_in_files() -> None:
    template = {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [{"name": "app"}]}}
    kinds = ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet", "ReplicationController", "Job")
    meta = {"name": "a"}
    documents: list[Any] = [{"kind": kind, "metadata": meta, "spec": {"template": template}} for kind in kinds]
    cron = {"jobTemplate": {"spec": {"template": template}}}
    documents += [{"kind": "CronJob", "metadata": meta, "spec": cron}, pod(), {"kind": "Service"}]
    documents.append({"kind": "List", "items": [pod(), {"kind": "ConfigMap"}]})
    notes: list[str] = []
    made = load_json(inject_text("\n".join(map(json.dumps, documents)), "shop", CONFIG, notes))
    assert made is not None
    made = [value for value, _, _ in made]
    for document in made[:6]:
        assert document["spec"]["template"]["spec"]["initContainers"][0]["name"] == GATE
    assert made[6]["spec"]["jobTemplate"]["spec"]["template"]["spec"]["initContainers"][0]["name"] == GATE
    assert made[7]["spec"]["initContainers"][0]["name"] == GATE
    assert made[8] == {"kind": "Service"}
    assert made[9]["items"][0]["spec"]["initContainers"][0]["name"] == GATE
    assert made[9]["items"][1] == {"kind": "ConfigMap"}
    assert len(notes) == 9
    assert notes[0] == f"Deployment a: {Reason.POLICY}"


@pytest.mark.parametrize(
    ("document", "said"),
    [
        (3, "document 0: is not a Kubernetes object"),
        ({"metadata": {"name": "x"}}, "document 0: is not a Kubernetes object: it has no kind"),
        ({"kind": "Deployment", "metadata": {"name": "x"}}, "document 0, Deployment x: has no spec.template"),
        ({"kind": "List", "items": 3}, "document 0.items: must be a list"),
        ({"kind": "List", "items": [{"kind": "Pod", "spec": 3}]}, r"document 0.items\[0\], Pod .*: spec: "),
        (pod(annotations={TEMPLATES_ANNOTATION: "x"}), "Pod web: annotation inject.istio.io/templates"),
    ],
)
def test_a_bad_document_is_named(document: Any, said: str) -> None:
    with pytest.raises(BadDocument, match=said):
        inject_text(json.dumps(document), "shop", CONFIG, [])


def test_a_configuration_is_read() -> None:
    config = parse_config("""
policy: disabled
neverInjectSelector: [{matchLabels: {app: job}}]
defaultTemplates: [mesh]
aliases: {mesh: [ambient]}
image: example/z:1
gate: {timeoutSeconds: 5, failOpen: true}
""")
    assert config.rules.policy == "disabled"
    assert len(config.rules.never) == 1
    assert config.templates == ("mesh",)
    made = inject(pod(labels={INJECT: "true"}), "shop", config).pod
    assert made["spec"]["initContainers"][0]["args"] == ["gate", "--timeout=5", "--fail-open"]
    assert parse_config("") == InjectConfig()


def test_every_fault_of_a_configuration_is_said_with_its_place() -> None:
    with pytest.raises(ConfigFaults) as raised:
        parse_config("""
policy: on
neverInjectSelector: [{matchLabels: {app: 1}}]
alwaysInjectSelector: 3
defaultTemplates: [nope]
aliases: {a: []}
imagePullPolicy: Sometimes
image: ''
gate: {timeoutSeconds: 0, failOpen: perhaps, more: 1}
unknown: 1
""")
    places = {fault.partition(":")[0] for fault in raised.value.faults}
    assert places == {
        "policy",
        "neverInjectSelector[0].matchLabels.app",
        "alwaysInjectSelector",
        "defaultTemplates",
        "aliases.a",
        "imagePullPolicy",
        "image",
        "gate.timeoutSeconds",
        "gate.failOpen",
        "gate.more",
        "file.unknown",
    }
