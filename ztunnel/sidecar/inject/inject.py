"""Injects the parts of the mesh into a pod. Pure: one function for the webhook and for files.

The template ``ambient`` adds the label for enrolment by node agents, and a first init container, which waits until
the proxy's listeners are in the pod. Without this container, the first connections of an application could leave
before its rules exist. There are no other changes. The pod does not get the annotation
``sidecar.istio.io/status``, because Istio's and our node agents leave out pods with this annotation. ``sidecar``
and ``sidecar-classic`` are in :mod:`ztunnel.sidecar.inject.sidecar`.

Injecting a pod again does not change it: the added parts are found, by name or by the status, and replaced.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ztunnel.kube.objects import Object
from ztunnel.runtime.formats.go_values import parse_bool
from ztunnel.sidecar.inject.config import TEMPLATES, InjectConfig
from ztunnel.sidecar.inject.decision import Decision, decide, mapping
from ztunnel.sidecar.inject.option_annotations import BadAnnotations, asked
from ztunnel.sidecar.inject.sidecar import STATUS, BadPod, add, ensured, is_ours, strip

TEMPLATES_ANNOTATION: Final = "inject.istio.io/templates"
DATAPLANE_MODE: Final = "istio.io/dataplane-mode"
GATE: Final = "mesh-gate"
#: Annotations that node agents read. They ignore a value that is not a boolean, so the pod's author gets a warning
#: here.
_BOOLEANS: Final = ("ambient.istio.io/bypass-inbound-capture", "ambient.istio.io/dns-capture")


class Denied(Exception):
    """The pod must not be created in its present form; the text goes to its author."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of an injection.

    Attributes:
        pod: a new object if any part was added, otherwise the given one.
        decision: whether the pod was injected, and why.
        warnings: for the author of the pod.
    """

    pod: Object
    decision: Decision
    warnings: tuple[str, ...] = ()


def inject(
    pod: Object,
    namespace: str,
    config: InjectConfig,
    variables: Mapping[str, str] | None = None,
    *,
    workload: str = "",
) -> Outcome:
    """Return the pod with the parts that its templates add, or the unchanged pod.

    Args:
        pod: the pod, which is not modified.
        namespace: the namespace in the request. The pod's own field can be empty.
        config: the configuration of the injector.
        variables: further environment of a sidecar, by the URL of the webhook.
        workload: the owner of the pod template. Empty means the owner in the pod.

    Raises:
        Denied: an annotation names an unknown template or has an unusable value, or the object is not a pod.
    """
    decision = decide(pod, namespace, config.rules)
    warnings = [decision.warning] if decision.warning else []
    if not decision.inject:
        return Outcome(pod, decision, tuple(warnings))
    metadata = mapping(pod, "metadata")
    annotations = mapping(metadata, "annotations")
    names = _templates(annotations, config)
    if STATUS in annotations and not is_ours(annotations):
        # Istio's injector has already injected the pod, so node agents would leave it out, and the gate would wait
        # for ever.
        warnings.append(f"the pod has a sidecar already ({STATUS}); nothing is injected")
        return Outcome(pod, Decision(False, decision.reason), tuple(warnings))
    try:
        made = _unshared(pod)
    except RecursionError as error:
        raise Denied("the pod is nested too deeply") from error
    strip(made)
    if "ambient" in names:
        for name in _BOOLEANS:
            if name in annotations:
                try:
                    parse_bool(str(annotations[name]))
                except ValueError:
                    warnings.append(f"{name}={annotations[name]!r} is ignored: it must be true or false")
        _ambient(made, config)
    else:
        warnings += _sidecar(made, config, variables or {}, native="sidecar" in names, workload=workload)
    return Outcome(made, decision, tuple(warnings))


def _unshared(value: Any) -> Any:
    """Return a copy without shared parts. YAML's anchors, for example, create shared parts."""
    if isinstance(value, Mapping):
        return {key: _unshared(each) for key, each in value.items()}
    return [_unshared(each) for each in value] if isinstance(value, list) else value


def _templates(annotations: Mapping[str, Any], config: InjectConfig) -> tuple[str, ...]:
    named = annotations.get(TEMPLATES_ANNOTATION)
    asked = config.templates
    if named is not None:
        asked = tuple(name for part in str(named).split(",") if (name := part.strip()))
    expanded = tuple(each for name in asked for each in config.aliases.get(name, (name,)))
    unknown = [name for name in expanded if name not in TEMPLATES]
    if unknown or not expanded:
        known = ", ".join((*TEMPLATES, *config.aliases))
        what = ", ".join(repr(name) for name in unknown) or "an empty list"
        if named is None:
            raise Denied(f"there is no template {what}; known templates are {known}")
        raise Denied(f"annotation {TEMPLATES_ANNOTATION} names {what}; known templates are {known}")
    if len(set(expanded)) > 1:
        what = " and ".join(sorted(set(expanded)))
        raise Denied(f"annotation {TEMPLATES_ANNOTATION}: {what} exclude each other; name one")
    return expanded


def _sidecar(
    pod: dict[str, Any], config: InjectConfig, variables: Mapping[str, str], *, native: bool, workload: str
) -> list[str]:
    try:
        asks = asked(mapping(mapping(pod, "metadata"), "annotations"), config.sidecar)
        spec = mapping(pod, "spec")
        if isinstance(spec, dict) and isinstance(spec.get("initContainers"), list):
            # A pod that the other template injected before must not keep its gate, because its listeners start
            # later.
            spec["initContainers"] = [
                each for each in spec["initContainers"] if not isinstance(each, dict) or each.get("name") != GATE
            ]
        native = native if asks.native is None else asks.native
        return add(pod, asks, config, variables, native=native, workload=workload)
    except (BadAnnotations, BadPod) as error:
        raise Denied(str(error)) from error


def _ambient(pod: dict[str, Any], config: InjectConfig) -> None:
    spec = pod.get("spec")
    if not isinstance(spec, dict) or not isinstance(spec.get("initContainers") or [], list):
        raise Denied("spec: the pod has no spec that can be read")
    try:
        labels = ensured(ensured(pod, "metadata"), "labels", "metadata.labels")
    except BadPod as error:
        raise Denied(str(error)) from error
    # A pod with the mode ``none``, or with an unknown mode, stays out of the mesh. A gate in such a pod would
    # never open.
    if labels.setdefault(DATAPLANE_MODE, "ambient") != "ambient":
        return
    others = [
        container
        for container in spec.get("initContainers") or []
        if not isinstance(container, dict) or container.get("name") != GATE
    ]
    # The gate comes before the user's own init containers and native sidecars, which may use the network, too.
    spec["initContainers"] = [_gate(config), *others]


def _gate(config: InjectConfig) -> dict[str, Any]:
    arguments = ["gate", f"--timeout={config.gate_timeout_s}"]
    if config.gate_fail_open:
        arguments.append("--fail-open")
    return {
        "name": GATE,
        "image": config.image,
        "imagePullPolicy": config.pull_policy,
        "args": arguments,
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
    }
