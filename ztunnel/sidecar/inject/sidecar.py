"""The templates ``sidecar`` and ``sidecar-classic``, which add our proxy to a pod as a container, and undoing
them. Pure.

A native sidecar is an init container that keeps running (``restartPolicy: Always``): kubelet starts it before the
user's own init containers and ends it after the application. For clusters without native sidecars,
``sidecar-classic`` makes the proxy the first of the ordinary containers. The proxy's hook delays the other
containers until it accepts connections.

The added parts are recorded in ``sidecar.istio.io/status``, whose presence makes node agents leave the pod alone.
Injecting again first removes all added parts. So a later injector or configuration replaces an earlier one, and a
repetition has no effect. If a container in the pod has the same name as our container, it contains the author's
changes to ours. It is merged over the template's container, and kept in ``proxy.istio.io/overrides`` for the next
injection.

The label ``security.istio.io/tlsMode`` is not added, because it makes a mesh's Envoys use Istio's own mTLS, which
this proxy does not speak. Envoys reach the pod by HBONE (``networking.istio.io/tunnel``), or in plain text.
"""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ztunnel.sidecar.inject import probes
from ztunnel.sidecar.inject.config import InjectConfig
from ztunnel.sidecar.inject.decision import mapping
from ztunnel.sidecar.inject.option_annotations import Asked

STATUS: Final = "sidecar.istio.io/status"
OVERRIDES: Final = "proxy.istio.io/overrides"
PROXY: Final = "istio-proxy"
INIT: Final = "mesh-init"
INJECTOR: Final = "ztunnel-py"
USER: Final = 1337
READINESS_PORT: Final = 15021
_PROMETHEUS_PORT: Final = 15090
_TOKEN_VOLUME, _ROOT_VOLUME, _TMP_VOLUME = "istio-token", "istiod-ca-cert", "mesh-proxy-tmp"
#: For each list in a container, the member that identifies its elements when two containers are merged.
_KEYS: Final = {
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
    "volumeDevices": "devicePath",
}
_TUNNEL, _MODE = "networking.istio.io/tunnel", "istio.io/dataplane-mode"
_CANONICAL_NAME, _CANONICAL_REVISION = "service.istio.io/canonical-name", "service.istio.io/canonical-revision"
_LABEL_LENGTH: Final = 63


class BadPod(ValueError):
    """A pod cannot have a sidecar in its present form; the text says why."""


def is_ours(annotations: Mapping[str, Any]) -> bool:
    """Return whether this injector wrote a pod's injection status, so that it can undo the injection."""
    return _status(annotations).get("injector") == INJECTOR


def strip(pod: dict[str, Any]) -> None:
    """Undo an injection of ours in place. Without such an injection this has no effect.

    The original probes are restored. If the pod's author had declared a container with the name of an injected
    one, to change its settings, only the author's declaration remains.
    """
    metadata, spec = pod.get("metadata"), pod.get("spec")
    if not isinstance(metadata, dict) or not isinstance(spec, dict):
        return
    annotations = mapping(metadata, "annotations")
    status = _status(annotations)
    if status.get("injector") != INJECTOR:
        return
    every = [each for kind in ("initContainers", "containers") for each in _listed(spec, kind)]
    proxy = next((each for each in every if each.get("name") == PROXY), {})
    probes.restore(every, _json_object(_variable(proxy, probes.VARIABLE)))
    for kind in ("initContainers", "containers", "volumes", "imagePullSecrets"):
        names = _names(status.get(kind))
        if kind in spec:
            spec[kind] = [each for each in _listed(spec, kind) if each.get("name") not in names]
            if not spec[kind] and kind != "containers":
                del spec[kind]
    for kind, written in _json_object(annotations.get(OVERRIDES)).items():
        if kind in ("containers", "initContainers") and isinstance(written, list):
            spec[kind] = [*_listed(spec, kind), *(each for each in written if isinstance(each, dict))]
    for kind in ("labels", "annotations"):
        added = _names(status.get(f"added{kind.capitalize()}"))
        kept = {name: value for name, value in mapping(metadata, kind).items() if name not in added}
        if kind == "annotations":
            kept.pop(STATUS, None)
            kept.pop(OVERRIDES, None)
        metadata[kind] = kept
        if not kept:
            del metadata[kind]


def add(
    pod: dict[str, Any],
    asked: Asked,
    config: InjectConfig,
    variables: Mapping[str, str],
    *,
    native: bool,
    workload: str = "",
) -> list[str]:
    """Put a sidecar into a pod without one, in place, and return warnings for its author.

    Args:
        pod: the API's object.
        asked: the options from its annotations.
        config: the injector's.
        variables: further environment of the proxy, which overrides the configuration's.
        native: whether to use a native sidecar instead of an ordinary container.
        workload: the owner of the pod. Empty means the owner in the pod.

    Raises:
        BadPod: the pod is misshapen, or its changes to our containers cannot be obeyed.
    """
    spec = _object(pod, "spec")
    metadata = ensured(pod, "metadata")
    containers, inits = _containers(spec, "containers"), _containers(spec, "initContainers")
    overrides = {
        kind: [copy.deepcopy(each) for each in listed if each.get("name") in (PROXY, INIT)]
        for kind, listed in (("containers", containers), ("initContainers", inits))
    }
    written = {each["name"]: each for listed in overrides.values() for each in listed}
    containers = [each for each in containers if each.get("name") != PROXY and each.get("name") != INIT]
    inits = [each for each in inits if each.get("name") != PROXY and each.get("name") != INIT]
    if not containers:
        raise BadPod("spec.containers: the pod has no container of its own")
    proxy = _merged(_proxy(pod, asked, config, variables, containers, native=native), written.get(PROXY), config)
    user, group = _ids(proxy)
    warnings = [*asked.warnings, *_id_warnings(spec, [*containers, *inits], user, group)]
    if asked.rewrite and asked.status_port:
        rewritten = probes.rewrite([*containers, *inits], asked.status_port, warnings)
        if rewritten:
            text = json.dumps(rewritten, separators=(",", ":"), sort_keys=True)
            proxy["env"] = [*proxy.get("env", []), {"name": probes.VARIABLE, "value": text}]
    rules = []
    if asked.capture:
        rules = [_merged(_init(asked, config, user, group), written.get(INIT), config)]
    if native:
        spec["containers"], all_inits = containers, [*rules, proxy, *inits]
    else:
        # The container that installs the rules comes last, because no proxy runs yet while the user's init
        # containers need the network.
        spec["containers"], all_inits = [proxy, *containers], [*inits, *rules]
    if all_inits:
        spec["initContainers"] = all_inits
    else:
        spec.pop("initContainers", None)
    status: dict[str, Any] = {
        "injector": INJECTOR,
        "revision": config.revision,
        "initContainers": [each["name"] for each in (*rules, *([proxy] if native else []))],
        "containers": [] if native else [PROXY],
        "volumes": _added(spec, "volumes", [*_volumes(config), *asked.volumes]),
        "imagePullSecrets": _added(spec, "imagePullSecrets", [{"name": name} for name in config.pull_secrets]),
    }
    _record(metadata, status, overrides, str(containers[0].get("name", "")), workload)
    return warnings


def _record(
    metadata: dict[str, Any],
    status: dict[str, Any],
    overrides: Mapping[str, list[dict[str, Any]]],
    first: str,
    workload: str,
) -> None:
    """Set the labels and annotations of an injected pod. ``first`` is the first of the pod's own containers."""
    labels = {
        # Tunnels end in the pod itself, so no proxy of the node captures it.
        _TUNNEL: "http",
        _MODE: "none",
        **_canonical(mapping(metadata, "labels"), workload or _workload(metadata)),
    }
    annotations = {
        "istio.io/rev": status["revision"],
        "kubectl.kubernetes.io/default-container": first,
        "kubectl.kubernetes.io/default-logs-container": first,
    }
    status["addedLabels"] = _set(metadata, "labels", labels)
    status["addedAnnotations"] = _set(metadata, "annotations", annotations)
    metadata["annotations"].pop(OVERRIDES, None)  # without our status no injector uses it
    if any(overrides.values()):
        kept = {kind: listed for kind, listed in overrides.items() if listed}
        metadata["annotations"][OVERRIDES] = json.dumps(kept, separators=(",", ":"), sort_keys=True)
    metadata["annotations"][STATUS] = json.dumps(status, separators=(",", ":"))


# Added parts


def _init(asked: Asked, config: InjectConfig, user: int, group: int) -> dict[str, Any]:
    excluded = [
        str(_PROMETHEUS_PORT),
        str(READINESS_PORT),
        *([str(asked.status_port)] if asked.status_port else []),
    ]
    given = asked.flags.get("-d", "")
    flags = {
        "-u": str(user),
        "-g": str(group),
        "-i": "*",
        "-b": "*",
        **asked.flags,
        "-d": ",".join([*excluded, *([given] if given else [])]),
    }
    arguments = ["init", *(word for flag, value in flags.items() for word in (flag, value))]
    if config.sidecar.dns_capture:
        arguments.append("--capture-all-dns")
    return {
        "name": INIT,
        "image": asked.image or config.image,
        "imagePullPolicy": config.pull_policy,
        "args": arguments,
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "128Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"add": ["NET_ADMIN"], "drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "runAsGroup": 0,
            "runAsNonRoot": False,
            "runAsUser": 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def _proxy(
    pod: Mapping[str, Any],
    asked: Asked,
    config: InjectConfig,
    variables: Mapping[str, str],
    containers: Sequence[Mapping[str, Any]],
    *,
    native: bool,
) -> dict[str, Any]:
    ready = {"httpGet": {"path": "/healthz/ready", "port": READINESS_PORT}}
    drain = ["ztunnel", "drain", *([f"--port={asked.status_port}"] if asked.status_port != 15020 else [])]
    lifecycle: dict[str, Any] = {"preStop": {"exec": {"command": drain}}} if asked.status_port else {}
    made: dict[str, Any] = {
        "name": PROXY,
        "image": asked.image or config.image,
        "imagePullPolicy": config.pull_policy,
        "args": ["proxy", "sidecar"],
        "env": _environment(pod, asked, config, variables),
        "ports": [{"name": "http-mesh-prom", "containerPort": asked.status_port, "protocol": "TCP"}]
        if asked.status_port
        else [],
        "resources": copy.deepcopy(dict(asked.resources)),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "privileged": False,
            "readOnlyRootFilesystem": True,
            "runAsGroup": USER,
            "runAsNonRoot": True,
            "runAsUser": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumeMounts": [
            {"name": _ROOT_VOLUME, "mountPath": "/var/run/secrets/istio", "readOnly": True},
            {"name": _TOKEN_VOLUME, "mountPath": "/var/run/secrets/tokens", "readOnly": True},
            {"name": _TMP_VOLUME, "mountPath": "/tmp"},
            *copy.deepcopy(list(asked.mounts)),
        ],
    }
    if asked.status_port:
        made["startupProbe"] = {
            **copy.deepcopy(ready),
            "periodSeconds": 1,
            "failureThreshold": 600,
            "timeoutSeconds": 3,
        }
        made["readinessProbe"] = {
            **ready,
            "initialDelaySeconds": 0,
            "periodSeconds": 15,
            "failureThreshold": 4,
            "timeoutSeconds": 3,
            **asked.readiness,
        }
    if native:
        made["restartPolicy"] = "Always"
    elif asked.status_port:
        # All containers get SIGTERM at once. The proxy waits before ending, because the application can still have
        # data to send.
        lifecycle["preStop"]["exec"]["command"] = [*drain, f"--wait={config.sidecar.drain_s}"]
    if not native:
        # Kubelet starts the next container after this hook has ended.
        lifecycle["postStart"] = {"exec": {"command": ["ztunnel", "gate", f"--timeout={config.gate_timeout_s}"]}}
    if lifecycle:
        made["lifecycle"] = lifecycle
    return {name: value for name, value in made.items() if value != []}


def _environment(
    pod: Mapping[str, Any], asked: Asked, config: InjectConfig, variables: Mapping[str, str]
) -> list[dict[str, Any]]:
    sidecar = config.sidecar
    fields = {
        "POD_NAME": "metadata.name",
        "POD_NAMESPACE": "metadata.namespace",
        "POD_UID": "metadata.uid",
        "SERVICE_ACCOUNT": "spec.serviceAccountName",
        "NODE_NAME": "spec.nodeName",
        "INSTANCE_IP": "status.podIP",
        "HOST_IP": "status.hostIP",
    }
    made: list[dict[str, Any]] = [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]
    values = {
        "PROXY_MODE": "dedicated",
        # Kubelet substitutes references to variables that are defined earlier in the list.
        "PROXY_WORKLOAD_INFO": "$(POD_NAMESPACE)/$(POD_NAME)/$(SERVICE_ACCOUNT)",
        "ZTUNNEL_SIDECAR": "true",
        "XDS_ADDRESS": sidecar.xds_address,
        "CA_ADDRESS": sidecar.ca_address or sidecar.xds_address,
        "TRUST_DOMAIN": sidecar.trust_domain,
        "CLUSTER_DOMAIN": sidecar.cluster_domain,
        "CLUSTER_ID": sidecar.cluster_id,
        "ISTIO_META_CLUSTER_ID": sidecar.cluster_id,
        "NETWORK": sidecar.network,
        "ISTIO_META_DNS_CAPTURE": str(sidecar.dns_capture).lower(),
        "RUST_LOG": asked.log_level,
    }
    grace = mapping(pod, "spec").get("terminationGracePeriodSeconds")
    if isinstance(grace, int) and not isinstance(grace, bool) and grace > 0:
        values["TERMINATION_GRACE_PERIOD_SECONDS"] = str(grace)
    proxy_config = dict(asked.proxy_config)
    if asked.status_port not in (0, 15020):
        proxy_config["statsPort"] = asked.status_port
    if proxy_config:
        proxy_config.setdefault("proxyMetadata", {})
        values["PROXY_CONFIG"] = json.dumps(proxy_config, separators=(",", ":"), sort_keys=True)
    network = mapping(mapping(pod, "metadata"), "labels").get("topology.istio.io/network")
    values |= dict(sidecar.env) | dict(variables)
    if isinstance(network, str) and network:
        values["NETWORK"] = network
    made += [{"name": name, "value": value} for name, value in values.items() if name not in fields]
    return made


def _volumes(config: InjectConfig) -> list[dict[str, Any]]:
    sidecar = config.sidecar
    token = {"path": "istio-token", "expirationSeconds": sidecar.token_s, "audience": sidecar.token_audience}
    return [
        {"name": _TOKEN_VOLUME, "projected": {"sources": [{"serviceAccountToken": token}]}},
        {"name": _ROOT_VOLUME, "configMap": {"name": sidecar.root_config_map}},
        {"name": _TMP_VOLUME, "emptyDir": {"sizeLimit": "16Mi"}},
    ]


def _workload(metadata: Mapping[str, Any]) -> str:
    """Return the name of the workload that a pod belongs to, like in Istio. It stays the same for all pods and
    revisions of the workload.
    """
    owners = metadata.get("ownerReferences")
    listed = [each for each in owners if isinstance(each, Mapping)] if isinstance(owners, list) else []
    owner = next((each for each in listed if each.get("controller") is True), {})
    kind, name = owner.get("kind"), str(owner.get("name") or "")
    template_hash = mapping(metadata, "labels").get("pod-template-hash")
    if kind == "ReplicaSet" and template_hash:
        return name.removesuffix(f"-{template_hash}")  # the Deployment's name
    if kind == "Job":
        return re.sub(r"-\d{8,}$", "", name)  # the CronJob's name; it appends the time in minutes
    return name or str(metadata.get("name") or metadata.get("generateName") or "").rstrip("-")


def _canonical(labels: Mapping[str, Any], workload: str) -> dict[str, str]:
    """Return the names of the workload for metrics, derived from its labels like in Istio."""
    named = [labels.get(key) for key in (_CANONICAL_NAME, "app.kubernetes.io/name", "app")]
    name = next((each for each in named if isinstance(each, str) and each), workload)
    revised = [labels.get(key) for key in (_CANONICAL_REVISION, "app.kubernetes.io/version", "version")]
    revision = next((each for each in revised if isinstance(each, str) and each), "latest")
    found = {_CANONICAL_REVISION: revision[:_LABEL_LENGTH].strip("-_.")}
    if trimmed := re.sub(r"[^A-Za-z0-9_.-]", "-", name)[:_LABEL_LENGTH].strip("-_."):
        found[_CANONICAL_NAME] = trimmed
    return found


# The author's changes


def _merged(made: dict[str, Any], written: Mapping[str, Any] | None, config: InjectConfig) -> dict[str, Any]:
    """Return one of our containers with the changes that the pod's author has written."""
    if written is None:
        return made
    for name, key in _KEYS.items():
        listed = written.get(name)
        fine = isinstance(listed, list) and all(
            isinstance(each, Mapping) and isinstance(each.get(key), (str, int)) for each in listed
        )
        if listed is not None and not fine:
            raise BadPod(f"container {made['name']}: {name} must be a list whose elements have a {key}")
    changes = {name: value for name, value in written.items() if not (name == "image" and value in ("auto", ""))}
    # Null values count as absent, like for the API server, also in a file.
    result = _over(made, changes)
    assert isinstance(result, dict)
    return result


def _over(made: Any, written: Any, name: str = "") -> Any:
    if isinstance(made, dict) and isinstance(written, Mapping):
        result = dict(made)
        for key, value in written.items():
            if value is None:
                continue
            result[key] = _over(made[key], value, key) if key in made else copy.deepcopy(value)
        return result
    key = _KEYS.get(name)
    if key is not None and isinstance(made, list) and isinstance(written, list):
        later = {each.get(key): each for each in written if isinstance(each, Mapping)}
        kept = [_replaced(each, later.pop(each.get(key))) if each.get(key) in later else each for each in made]
        return [*kept, *(copy.deepcopy(each) for each in later.values())]
    return copy.deepcopy(written)


def _replaced(made: Mapping[str, Any], written: Mapping[str, Any]) -> dict[str, Any]:
    """Return a list's element merged over one of ours. A variable then has either ``value`` or ``valueFrom``."""
    result: dict[str, Any] = _over(dict(made), written)
    if written.get("value") is not None:
        result.pop("valueFrom", None)
    elif written.get("valueFrom") is not None:
        result.pop("value", None)
    return result


def _ids(proxy: Mapping[str, Any]) -> tuple[int, int]:
    """Return the proxy's user and group, which the rules match.

    Raises:
        BadPod: the user or group is root, so the rules would not capture any process of root.
    """
    context = mapping(proxy, "securityContext")
    ids = [context.get(name, USER) for name in ("runAsUser", "runAsGroup")]
    for number in ids:
        if isinstance(number, bool) or not isinstance(number, int) or number <= 0:
            raise BadPod(
                f"container {PROXY}: must not run as user or group {number!r}: the rules do not capture"
                " packets of these, whichever process sends them"
            )
    return ids[0], ids[1]


def _id_warnings(
    spec: Mapping[str, Any], containers: Sequence[Mapping[str, Any]], user: int, group: int
) -> list[str]:
    """Return a warning for each container that runs as the proxy's user or group. The rules do not capture such a
    container.
    """
    found = []
    for each in containers:
        context = dict(mapping(spec, "securityContext"))
        context |= {name: value for name, value in mapping(each, "securityContext").items() if value is not None}
        same = [
            f"{kind} {number}"
            for kind, name, number in (("user", "runAsUser", user), ("group", "runAsGroup", group))
            if context.get(name) == number
        ]
        if same:
            who = f"container {each.get('name')} runs as {same[0]} like the proxy"
            found.append(f"{who}, so its connections are not captured")
    return found


# Objects


def _object(holder: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = holder.get(name)
    if not isinstance(found, dict):
        raise BadPod(f"{name}: must be a mapping")
    return found


def ensured(holder: dict[str, Any], name: str, place: str = "") -> dict[str, Any]:
    """Return a mapping inside an object. If it is absent or null, add an empty one.

    Raises:
        BadPod: it has another type.
    """
    if holder.get(name) is None:
        holder[name] = {}
    found = holder[name]
    if not isinstance(found, dict):
        raise BadPod(f"{place or name}: must be a mapping")
    return found


def _containers(spec: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    found = spec.get(kind)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise BadPod(f"spec.{kind}: must be a list of containers")
    return found


def _listed(spec: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    found = spec.get(kind)
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _added(spec: dict[str, Any], kind: str, wanted: Sequence[Mapping[str, Any]]) -> list[str]:
    """Add the elements whose names are not in the list yet, and return their names."""
    if spec.get(kind) is not None and not isinstance(spec[kind], list):
        raise BadPod(f"spec.{kind}: must be a list")
    there = [each.get("name") for each in _listed(spec, kind)]
    new = [copy.deepcopy(dict(each)) for each in wanted if each["name"] not in there]
    if new:
        spec[kind] = [*(spec.get(kind) or []), *new]
    return [str(each["name"]) for each in new]


def _set(metadata: dict[str, Any], kind: str, wanted: Mapping[str, str]) -> list[str]:
    """Set labels or annotations that the pod does not have yet, and return their names."""
    found = ensured(metadata, kind, f"metadata.{kind}")
    new = [name for name in wanted if name not in found]
    found.update({name: wanted[name] for name in new})
    return new


def _names(value: object) -> frozenset[str]:
    return frozenset(each for each in value if isinstance(each, str)) if isinstance(value, list) else frozenset()


def _status(annotations: Mapping[str, Any]) -> Mapping[str, Any]:
    return _json_object(annotations.get(STATUS))


def _json_object(text: object) -> Mapping[str, Any]:
    try:
        found = json.loads(text) if isinstance(text, str) else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _variable(container: Mapping[str, Any], name: str) -> str:
    listed = container.get("env")
    for each in listed if isinstance(listed, list) else ():
        if isinstance(each, dict) and each.get("name") == name:
            return str(each.get("value") or "")
    return ""
