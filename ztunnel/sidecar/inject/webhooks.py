"""The API server's configurations for calling the injector, and the labels that select pods. Pure.

For sidecars there are Istio's four entries: a namespace or a pod requests injection by ``istio.io/rev``, for one
revision of the injector, or by ``istio-injection`` and ``sidecar.istio.io/inject``, for the default one. A
revision tag is a separate configuration that maps another name to a revision. For the template ``ambient``, two
entries select by ``istio.io/dataplane-mode``. The path of the URL selects the template of a pod that names none.

API servers call configurations in the order of their names. The webhooks for sidecars come after the gate's, so a
pod selected by both gets a sidecar: the later injection removes the gate.

The names of entries do not end like Istio's. In configurations of its revision, istiod puts its own CA into every
entry with such a name.
"""

from collections.abc import Sequence
from typing import Any, Final

SYSTEM_NAMESPACES: Final = ("kube-system", "kube-public", "kube-node-lease", "local-path-storage")
_SUFFIX: Final = "inject.ztunnel-py.io"
_INJECTION, _REVISION, _INJECT = "istio-injection", "istio.io/rev", "sidecar.istio.io/inject"
_MODE: Final = "istio.io/dataplane-mode"
_TIMEOUT_S: Final = 5
DEFAULT: Final = "default"

Requirement = dict[str, Any]


def sidecar_name(revision: str) -> str:
    """Return the name of the webhook configuration of a revision."""
    return "ztunnel-sidecar-injector" if revision == DEFAULT else f"ztunnel-sidecar-injector-{revision}"


def sidecars(
    revision: str, service: str, namespace: str, *, template: str = "sidecar", every_namespace: bool = False
) -> dict[str, Any]:
    """Return the webhook configuration for pods that request a sidecar.

    Args:
        revision: the injector's revision. ``default`` also serves pods that name none.
        service, namespace: the injector's Service and namespace.
        template: the template of pods that name none.
        every_namespace: whether to include unlabelled namespaces, except for system namespaces.
    """
    return _configuration(sidecar_name(revision), revision, service, namespace, template, every_namespace)


def tag(name: str, revision: str, service: str, namespace: str, *, template: str = "sidecar") -> dict[str, Any]:
    """Return the webhook configuration of a revision tag. With it, the revision's injector also serves pods that
    request ``name``.
    """
    made = _configuration(f"ztunnel-revision-tag-{name}", name, service, namespace, template, False)
    made["metadata"]["labels"] = {"istio.io/rev": revision, "istio.io/tag": name}
    return made


def ambient(service: str, namespace: str) -> dict[str, Any]:
    """Return the webhook configuration for pods of an ambient mesh, which get the gate."""
    entries = [
        _entry(
            "namespace",
            [_in(_MODE, "ambient")],
            [_not_in(_MODE, "none"), _not_in(_INJECT, "false")],
            "/inject",
            service,
            namespace,
        ),
        _entry(
            "object",
            [_not_in(_MODE, "ambient")],
            [_in(_MODE, "ambient"), _not_in(_INJECT, "false")],
            "/inject",
            service,
            namespace,
        ),
    ]
    return _object("ztunnel-injector", entries)


def _configuration(
    name: str, revision: str, service: str, namespace: str, template: str, every_namespace: bool
) -> dict[str, Any]:
    path = f"/inject/templates/{template}"
    silent = [_absent(_REVISION), _absent(_INJECTION)]
    asked: list[tuple[str, list[Requirement], list[Requirement]]] = [
        ("rev.namespace", [_in(_REVISION, revision), _absent(_INJECTION)], [_not_in(_INJECT, "false")]),
        ("rev.object", silent, [_not_in(_INJECT, "false"), _in(_REVISION, revision)]),
    ]
    if revision == DEFAULT:
        asked += [
            ("namespace", [_in(_INJECTION, "enabled")], [_not_in(_INJECT, "false")]),
            ("object", silent, [_in(_INJECT, "true"), _absent(_REVISION)]),
        ]
    if every_namespace:
        asked.append(("auto", silent, [_absent(_INJECT), _absent(_REVISION)]))
    entries = [
        _entry(f"{kind}.sidecar", of_namespace, of_pod, path, service, namespace)
        for kind, of_namespace, of_pod in asked
    ]
    made = _object(name, entries)
    made["metadata"]["labels"] = {"istio.io/rev": revision}
    return made


def _object(name: str, entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "MutatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": list(entries),
    }


def _entry(
    kind: str,
    of_namespace: list[Requirement],
    of_pod: list[Requirement],
    path: str,
    service: str,
    namespace: str,
) -> dict[str, Any]:
    # The injector's own pods are excluded, because they must start while no injector answers.
    system = _not_in("kubernetes.io/metadata.name", *dict.fromkeys((*SYSTEM_NAMESPACES, namespace)))
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    return {
        "name": f"{kind}.{_SUFFIX}",
        "clientConfig": {"service": {"name": service, "namespace": namespace, "path": path, "port": 443}},
        "rules": [{**rule, "scope": "Namespaced"}],
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "timeoutSeconds": _TIMEOUT_S,
        # A failing webhook only blocks pods that requested injection. Without it they would send traffic outside
        # the mesh.
        "failurePolicy": "Fail",
        "reinvocationPolicy": "Never",
        "namespaceSelector": {"matchExpressions": [*of_namespace, system]},
        "objectSelector": {"matchExpressions": of_pod},
        "matchConditions": [
            {
                "name": "not-host-network",
                "expression": "!has(object.spec.hostNetwork) || !object.spec.hostNetwork",
            }
        ],
    }


def _in(key: str, *values: str) -> Requirement:
    return {"key": key, "operator": "In", "values": list(values)}


def _not_in(key: str, *values: str) -> Requirement:
    return {"key": key, "operator": "NotIn", "values": list(values)}


def _absent(key: str) -> Requirement:
    return {"key": key, "operator": "DoesNotExist"}
