"""Checks access to the cluster, and the workloads deployed for the mesh. Pure."""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator, Mapping
from typing import Any, Final

from cryptography import x509

from hbone.x509_errors import UNREADABLE
from ztunnel.ask.check.rules import objects as o
from ztunnel.ask.check.rules.model import Check, Facts, Finding, NotGathered, Object, error, warning

#: The lowest minor version of Kubernetes 1 with the APIs used here (except ``MutatingAdmissionPolicy``), and the
#: highest minor version of a cluster on which this release has run (README.md).
LEAST_MINOR: Final = 28
TESTED_MINOR: Final = 36
#: A normal rollout is shorter than this, although each node's connections drain for minutes. A longer one is stuck
#: at a pod.
_ROLLOUT_S: Final = 600.0
_WEBHOOK_WARN_S: Final = 7 * 86400.0


def api_server(facts: Facts) -> Iterator[Finding]:
    """Check whether the API server answers."""
    if not facts.cluster_asked:
        raise NotGathered(facts.cluster_error)
    if facts.cluster_error:
        yield error(facts.cluster_error)


def permissions(facts: Facts) -> Iterator[Finding]:
    """Check whether the caller may read the objects that checks need."""
    if facts.cluster_error:
        raise NotGathered(facts.cluster_error)
    if not facts.access:
        raise NotGathered("the API server did not answer about access")
    for what, allowed in facts.access.items():
        if not allowed:
            yield warning(f"not allowed: {what}; the checks that need it are skipped")


def versions(facts: Facts) -> Iterator[Finding]:
    """Check the versions of the server and of Gateway API."""
    if facts.cluster_error:
        raise NotGathered(facts.cluster_error)
    found = re.match(r"\d+", str(facts.version.get("minor") or ""))
    if found is None:
        raise NotGathered("the API server did not say its version")
    minor = int(found[0])
    if minor < LEAST_MINOR:
        yield error(f"Kubernetes 1.{minor} is older than 1.{LEAST_MINOR}")
    elif minor > TESTED_MINOR + 2:
        yield warning(f"Kubernetes 1.{minor} was not tested with this release; 1.{TESTED_MINOR} was")
    for item in facts.listed("CustomResourceDefinition"):
        if o.key(item)[1] == "gateways.gateway.networking.k8s.io":
            version = o.annotated(item).get("gateway.networking.k8s.io/bundle-version", "")
            if re.match(r"v0\.", version):
                yield warning(f"Gateway API {version} is older than v1: waypoints need Gateway of v1")


def daemon_sets(facts: Facts) -> Iterator[Finding]:
    """Check whether each node with pods of the mesh has a ready proxy, and whether rollouts advance."""
    sets = [item for item in facts.listed("DaemonSet") if _app(item) in (o.PROXY, o.AGENT, o.ISTIO_CNI)]
    if not any(_app(item) == o.PROXY for item in sets):
        yield error("no DaemonSet with the label app=ztunnel: no node has a proxy")
    for item in sets:
        yield from _rollout(facts, item)
    proxies = o.of_app(facts, o.PROXY)
    ready = {o.spec(pod).get("nodeName") for pod in proxies if o.is_ready(pod)}
    waiting: dict[str, int] = {}
    for pod in o.captured(facts):
        node = str(o.spec(pod).get("nodeName") or "")
        if node and node not in ready:
            waiting[node] = waiting.get(node, 0) + 1
    for node, number in sorted(waiting.items()):
        yield error(f"{number} pods of the mesh run here, and no proxy is ready", node=node)
    for node, reason in facts.silent.items():
        yield error(f"the proxy's admin server does not answer: {reason}", node=node)


def _rollout(facts: Facts, item: Object) -> Iterator[Finding]:
    state = o.status(item)
    desired, ready = int(state.get("desiredNumberScheduled") or 0), int(state.get("numberReady") or 0)
    if ready < desired:
        yield warning(f"{ready} of {desired} pods are ready", o.named(item, "daemonset"))
    updated = int(state.get("updatedNumberScheduled") or 0)
    if updated >= desired:
        return
    starts = [o.seconds_of(o.metadata(pod).get("creationTimestamp")) for pod in o.of_app(facts, _app(item))]
    newest = max((start for start in starts if start is not None), default=None)
    if newest is not None and facts.now_s - newest > _ROLLOUT_S:
        ago = int((facts.now_s - newest) / 60)
        yield warning(
            f"{updated} of {desired} pods are updated, and none was replaced for {ago} minutes",
            o.named(item, "daemonset"),
        )


def _app(item: Object) -> str:
    template = (o.spec(item).get("template") or {}).get("metadata") or {}
    found = template.get("labels") or {}
    return str(found.get("app") or found.get("k8s-app") or "")


def privileges(facts: Facts) -> Iterator[Finding]:
    """Check whether privileged pods are admitted, and whether each node has one agent."""
    homes = {o.key(item)[0] for item in facts.listed("DaemonSet") if _app(item) in (o.PROXY, o.AGENT)}
    for item in facts.listed("Namespace"):
        name = o.key(item)[1]
        level = o.labels(item).get("pod-security.kubernetes.io/enforce", "privileged")
        if name in (homes or {"istio-system"}) and level != "privileged":
            yield error(
                f"Pod Security enforces {level!r}, which refuses the proxy's capabilities", f"namespace {name}"
            )
    ours = {o.spec(pod).get("nodeName") for pod in o.of_app(facts, o.AGENT)}
    for pod in o.of_app(facts, o.ISTIO_CNI):
        node = str(o.spec(pod).get("nodeName"))
        if node in ours:
            yield error("istio-cni and ztunnel-agent both enrol pods here", node=node)


def proxy_versions(facts: Facts) -> Iterator[Finding]:
    """Check whether all proxies have the same version, and whether it is close to istiod's."""
    found: dict[str, list[str]] = {}
    minors: dict[str, int] = {}
    for node, dump in facts.dumps():
        version = dump.get("version") or {}
        shown = f"{version.get('version')} {version.get('gitRevision') or ''}".strip()
        found.setdefault(shown, []).append(node)
        minor = _minor(str(version.get("istioVersion") or version.get("version") or ""))
        if minor is not None:
            minors[node] = minor
    if len(found) > 1:
        parts = (f"{version} on {_few(nodes)}" for version, nodes in sorted(found.items()))
        yield warning(f"proxies of {len(found)} versions: {'; '.join(parts)}")
    if facts.cluster_error or isinstance(facts.objects.get("Pod", ""), str):
        return
    planes = {
        tag
        for pod in o.of_app(facts, "istiod")
        for each in o.spec(pod).get("containers") or ()
        if (tag := _tag_minor(each)) is not None
    }
    for node, minor in minors.items() if planes else ():
        # With several revisions of istiod, a proxy is upgraded after the istiod of its own revision.
        nearest = min(planes, key=lambda plane: abs(plane - minor))
        apart = abs(minor - nearest)
        if apart > 1:
            make = error if apart > 2 else warning
            yield make(f"the proxy is of Istio 1.{minor}, istiod of 1.{nearest}", node=node)


def _tag_minor(container: Mapping[str, Any]) -> int | None:
    return _minor(str(container.get("image") or "").rpartition(":")[2])


def _minor(version: str) -> int | None:
    found = re.match(r"v?1\.(\d{1,3})(\.|-|$)", version)
    return int(found[1]) if found is not None else None


def _few(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def webhooks(facts: Facts) -> Iterator[Finding]:
    """Check the registration of our injector: the webhook's CA certificate and failure policy."""
    found = False
    for item in facts.listed("MutatingWebhookConfiguration"):
        name = o.key(item)[1]
        if "ztunnel" not in name:
            continue
        found = True
        for hook in item.get("webhooks") or ():
            yield from _webhook(facts, f"webhook {name}/{hook.get('name')}", hook)
    if not found:
        raise NotGathered("no MutatingWebhookConfiguration of ours: the injector is not installed")


def _webhook(facts: Facts, about: str, hook: Mapping[str, Any]) -> Iterator[Finding]:
    bundle = str((hook.get("clientConfig") or {}).get("caBundle") or "")
    try:
        held = x509.load_pem_x509_certificates(b64decode(bundle)) if bundle else []
    except UNREADABLE as reason:
        yield error(f"its CA bundle cannot be read: {reason}", about)
        held = []
    else:
        if not held:
            yield error("it has no CA bundle: the API server cannot call it", about)
    if held:
        # During a rotation the bundle also has the previous certificate, which can be expired already.
        certificate = max(held, key=lambda each: each.not_valid_after_utc)
        left_s = certificate.not_valid_after_utc.timestamp() - facts.now_s
        ends = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
        if left_s < 0:
            yield error(f"its CA certificate ended on {ends}", about)
        elif left_s < _WEBHOOK_WARN_S:
            yield warning(f"its CA certificate ends on {ends}", about)
    if hook.get("failurePolicy", "Fail") == "Fail" and not hook.get("namespaceSelector"):
        yield warning("failurePolicy is Fail, and no namespace is excluded: kube-system depends on it", about)


CHECKS: Final = (
    Check(
        id="ACC1", before=True, asks="kubectl and the API server answer", judge=api_server,
        remedy="Check kubectl's context. For 401 or 403, give the role the permission that the message names.",
    ),
    Check(
        id="ACC2", before=True, asks="the caller may read what checks need", judge=permissions,
        remedy="Ask for the verbs listed.",
    ),
    Check(
        id="ACC3", before=True, asks="versions of Kubernetes and Gateway API", judge=versions,
        remedy="Upgrade, or use a release that supports the version.",
    ),
    Check(
        id="DEP1", asks="each node with pods of the mesh has a ready proxy", judge=daemon_sets,
        remedy="See the pod's events; check quotas and tolerations.",
    ),
    Check(
        id="DEP2", before=True, asks="privileged pods are admitted, one agent per node", judge=privileges,
        remedy="Label the namespace privileged; keep one agent.",
    ),
    Check(
        id="DEP3", asks="versions of proxies and istiod", judge=proxy_versions,
        remedy="Finish the rollout; upgrade istiod first.",
    ),
    Check(
        id="DEP4", asks="the injector's webhook can be called", judge=webhooks,
        remedy="Renew its certificate; exclude kube-system.",
    ),
)  # fmt: skip
