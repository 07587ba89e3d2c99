"""Reads AuthorizationPolicies as people write them, and the mesh that a ``config_dump`` shows. Pure.

It supports the parts of Istio's API (security.istio.io/v1) that a ztunnel enforces: sources by identity,
namespace, account and address, and operations by port. istiod sends the other parts to waypoints, or leaves their
rules out. A policy with other parts is refused by name, because an answer about a part of the policy would be
misleading.
"""

import ipaddress
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from xds.dialects.istio.local_file import LocalMesh, parse_local_file
from xds.digits import whole_number
from xds.errors import ConfigError
from xds.model.authorization import AuthorizationPolicy, PolicyScope
from xds.model.workload import PolicyKey, Workload
from ztunnel.runtime.formats.go_values import parse_bool
from ztunnel.runtime.formats.go_yaml import load_all

_GROUP: Final = "security.istio.io/"
_DRY_RUN: Final = "istio.io/dry-run"
#: The label keys from which the control plane derives attributes of workloads, each with its attribute.
_KNOWN_LABELS: Final = {
    "service.istio.io/canonical-name": "canonical_name",
    "app.kubernetes.io/name": "canonical_name",
    "app": "canonical_name",
    "service.istio.io/canonical-revision": "canonical_revision",
    "app.kubernetes.io/version": "canonical_revision",
    "version": "canonical_revision",
}
#: The keys of workloads and policies in a dump that an evaluation of policies needs.
_OF_WORKLOAD: Final = (
    *("uid", "name", "namespace", "serviceAccount", "trustDomain", "workloadIps", "network", "protocol"),
    *("canonicalName", "canonicalRevision", "authorizationPolicies"),
)
_OF_POLICY: Final = ("name", "namespace", "scope", "action", "rules")

_Read = Callable[[object, str], object]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proposed policy.

    Attributes:
        labels: the labels of the selected workloads. Empty if its scope is not a selector.
        place: the file and the document, for errors.
    """

    policy: AuthorizationPolicy
    labels: Mapping[str, str]
    place: str


def mesh_of(dump: Mapping[str, Any]) -> LocalMesh:
    """Return the workloads and policies of a dump, ours or the Rust ztunnel's.

    Raises:
        ConfigError: the dump's policies or workloads are unreadable.
    """
    try:
        workloads = [
            {key: each[key] for key in _OF_WORKLOAD if each.get(key) is not None} | {"services": {}}
            for each in dump.get("workloads") or []
        ]
        policies = [
            {key: each.get(key) for key in _OF_POLICY} | {"dryRun": bool(each.get("dryRun"))}
            for each in dump.get("policies") or []
        ]
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"not the workloads and policies of a config_dump: {error}") from None
    # A YAML reader can read JSON. A dump has the form of a local file, except for keys that do not affect access.
    return parse_local_file(json.dumps({"workloads": workloads, "policies": policies}, ensure_ascii=False))


def read_policies(text: str, file: str, root_namespace: str) -> list[Proposal]:
    """Return the AuthorizationPolicies of a YAML file with one or several documents, or a List.

    Args:
        text: the file's text.
        file: its name, for errors.
        root_namespace: the namespace whose policies without a selector apply to the whole mesh.

    Raises:
        ConfigError: a document has another kind, or a part that a ztunnel does not enforce. The text has its
            place.
    """
    try:
        documents = [each for each in load_all(text) if each is not None]
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    found: list[Proposal] = []
    for number, document in enumerate(documents):
        place = file if len(documents) == 1 else f"{file}: document {number + 1}"
        if isinstance(document, dict) and document.get("kind") == "List":
            items = _list(document.get("items"), f"{place}: items")
            found += [_proposal(each, f"{place}: items[{at}]", root_namespace) for at, each in enumerate(items)]
        else:
            found.append(_proposal(document, place, root_namespace))
    if not found:
        raise ConfigError(f"{file}: no AuthorizationPolicy in it")
    return found


def applied(
    mesh: LocalMesh,
    proposals: Sequence[Proposal],
    *,
    removed: Sequence[str] = (),
    enforced: Sequence[str] = (),
    same_selector: Collection[str] = (),
) -> LocalMesh:
    """Return the mesh as it would be after a change of policies.

    Args:
        mesh: the current mesh. proposals: replace policies of the same name.
        removed: keys of policies to remove.
        enforced: keys of dry-run policies to enforce.
        same_selector: keys of policies whose selector equals the active policy's, so it can have any labels.

    Raises:
        ConfigError: a named policy is missing, or a selector has labels that the mesh does not have.
    """
    policies = {policy.key: policy for policy in mesh.policies}
    for name in enforced:
        trial = policies.get(PolicyKey(name))
        if trial is None or not trial.dry_run:
            raise ConfigError(f"--enforce {name}: the mesh has no such dry-run policy")
        policies[trial.key] = replace(trial, dry_run=False)
    for name in removed:
        if policies.pop(PolicyKey(name), None) is None:
            raise ConfigError(f"--remove {name}: the mesh has no such policy")
    # If a policy is deleted, or now applies to every workload, remove its name from the workloads, like the
    # control plane does. A remaining name would cause every connection to be refused, like a policy that has not
    # arrived.
    unnamed = {PolicyKey(name) for name in removed}
    unnamed |= {each.policy.key for each in proposals if each.policy.scope is not PolicyScope.WORKLOAD_SELECTOR}
    workloads = [
        replace(
            each, authorization_policies=tuple(key for key in each.authorization_policies if key not in unnamed)
        )
        if unnamed.intersection(each.authorization_policies)
        else each
        for each in mesh.workloads
    ]
    for proposal in proposals:
        policy, old = proposal.policy, policies.get(proposal.policy.key)
        policies[policy.key] = policy
        if policy.scope is not PolicyScope.WORKLOAD_SELECTOR:
            continue
        if policy.key in same_selector:
            if old is None or old.scope is not PolicyScope.WORKLOAD_SELECTOR:
                raise ConfigError(f"--same-selector {policy.key}: the mesh has no such policy with a selector")
            continue  # the control plane, which knows all labels, has evaluated this selector
        active = old is not None and old.scope is PolicyScope.WORKLOAD_SELECTOR
        workloads = [_with(each, policy.key, _selects(proposal, each, active=active)) for each in workloads]
    return replace(mesh, workloads=tuple(workloads), policies=tuple(policies.values()))


def _with(workload: Workload, key: PolicyKey, selected: bool) -> Workload:
    """Return a workload with a policy's name added or removed."""
    others = tuple(each for each in workload.authorization_policies if each != key)
    if selected is (len(others) < len(workload.authorization_policies)):
        return workload
    return replace(workload, authorization_policies=(*others, key) if selected else others)


def _selects(proposal: Proposal, workload: Workload, *, active: bool) -> bool:
    for label, value in proposal.labels.items():
        attribute = _KNOWN_LABELS.get(label)
        if attribute is None:
            key = proposal.policy.key
            hint = f"; if the selector is that of the active policy, --same-selector {key}" if active else ""
            raise ConfigError(
                f"{proposal.place}: spec.selector.matchLabels.{label}: the mesh does not contain this label; it "
                f"tells {', '.join(_KNOWN_LABELS)}{hint}"
            )
        if getattr(workload, attribute) != value:
            return False
    return workload.namespace == proposal.policy.namespace


# One document


def _proposal(document: object, place: str, root_namespace: str) -> Proposal:
    whole = _mapping(document, place)
    kind, version = whole.get("kind"), str(whole.get("apiVersion") or "")
    if kind != "AuthorizationPolicy" or not version.startswith(_GROUP):
        raise ConfigError(
            f"{place}: {version or 'no apiVersion'}, kind {kind}: not an AuthorizationPolicy of Istio"
        )
    metadata = _mapping(whole.get("metadata"), f"{place}: metadata")
    name = _text(metadata.get("name"), f"{place}: metadata.name")
    namespace = _text(metadata.get("namespace") or "default", f"{place}: metadata.namespace")
    annotations = _mapping(metadata.get("annotations") or {}, f"{place}: metadata.annotations")
    spec = _mapping(whole.get("spec") or {}, f"{place}: spec")
    _only(spec, ("selector", "action", "rules"), f"{place}: spec")
    action = spec.get("action") or "ALLOW"
    if action not in ("ALLOW", "DENY"):
        raise ConfigError(f"{place}: spec.action: {action!r}: a ztunnel obeys ALLOW and DENY")
    labels: Mapping[str, str] = {}
    if spec.get("selector") is not None:
        selector = _mapping(spec["selector"], f"{place}: spec.selector")
        _only(selector, ("matchLabels",), f"{place}: spec.selector")
        given = _mapping(selector.get("matchLabels") or {}, f"{place}: spec.selector.matchLabels")
        labels = {
            label: _text(value, f"{place}: spec.selector.matchLabels.{label}") for label, value in given.items()
        }
    if labels:
        scope = PolicyScope.WORKLOAD_SELECTOR
    else:
        scope = PolicyScope.GLOBAL if namespace == root_namespace else PolicyScope.NAMESPACE
    where = f"{place}: spec.rules"
    rules = [
        list(_clauses(each, f"{where}[{at}]", namespace))
        for at, each in enumerate(_list(spec.get("rules") or [], where))
    ]
    local = {
        "name": name,
        "namespace": namespace,
        "scope": scope.value,
        "action": action.capitalize(),
        "dryRun": _is_dry_run(annotations),
        "rules": rules,
    }
    try:
        mesh = parse_local_file(json.dumps({"policies": [local]}, ensure_ascii=False))
    except ConfigError as error:
        raise ConfigError(f"{place}: {error.reason}") from None
    return Proposal(mesh.policies[0], labels, place)


def _is_dry_run(annotations: Mapping[str, Any]) -> bool:
    """Return whether the annotation is true as istiod reads it. With another value the policy is enforced."""
    try:
        return parse_bool(str(annotations.get(_DRY_RUN)))
    except ValueError:
        return False


def _clauses(value: object, place: str, namespace: str) -> Iterator[object]:
    """Yield the clauses of a rule in the form of a local file. All clauses must match."""
    rule = _mapping(value or {}, place)
    _only(rule, ("from", "to", "when"), place)
    readers: tuple[tuple[str, str, Mapping[str, tuple[str, _Read]]], ...] = (
        ("from", "source", _source(namespace)),
        ("to", "operation", _OPERATION),
    )
    for key, inner, attributes in readers:
        if rule.get(key) is not None:
            where = f"{place}.{key}"
            yield [
                _match(_one(each, inner, f"{where}[{at}]"), attributes, f"{where}[{at}].{inner}")
                for at, each in enumerate(_list(rule[key], where))
            ]
    for at, each in enumerate(_list(rule.get("when") or [], f"{place}.when")):
        yield [_condition(each, f"{place}.when[{at}]", namespace)]


def _one(value: object, key: str, place: str) -> Mapping[str, Any]:
    outer = _mapping(value, place)
    _only(outer, (key,), place)
    return _mapping(outer.get(key) or {}, f"{place}.{key}")


def _match(given: Mapping[str, Any], attributes: Mapping[str, tuple[str, _Read]], place: str) -> dict[str, object]:
    _only(given, attributes, place)
    match: dict[str, object] = {}
    for key, values in given.items():
        name, read = attributes[key]
        where = f"{place}.{key}"
        match[name] = [read(each, f"{where}[{at}]") for at, each in enumerate(_list(values, where))]
    if not match:
        raise ConfigError(f"{place}: empty; it would match nothing")
    return match


def _condition(value: object, place: str, namespace: str) -> object:
    given = _mapping(value, place)
    _only(given, ("key", "values", "notValues"), place)
    key = _text(given.get("key"), f"{place}.key")
    known = {
        "source.ip": ("sourceIps", _network),
        "source.namespace": ("namespaces", _matched),
        "source.principal": ("principals", _principal),
        "source.serviceAccount": ("serviceAccounts", _account(namespace)),
        "destination.ip": ("destinationIps", _network),
        "destination.port": ("destinationPorts", _number),
    }
    if key not in known:
        raise ConfigError(f"{place}.key: {key}: a ztunnel does not obey it; it obeys {', '.join(known)}")
    name, read = known[key]
    renamed = {each: given[each] for each in ("values", "notValues") if given.get(each)}
    return _match(renamed, {"values": (name, read), "notValues": (_negated(name), read)}, place)


def _negated(name: str) -> str:
    return f"not{name[0].upper()}{name[1:]}"


def _pairs(names: Mapping[str, tuple[str, _Read]]) -> Mapping[str, tuple[str, _Read]]:
    negated = {_negated(key): (_negated(name), read) for key, (name, read) in names.items()}
    return {**names, **negated}


def _source(namespace: str) -> Mapping[str, tuple[str, _Read]]:
    return _pairs(
        {
            "principals": ("principals", _principal),
            "namespaces": ("namespaces", _matched),
            "serviceAccounts": ("serviceAccounts", _account(namespace)),
            "ipBlocks": ("sourceIps", _network),
        }
    )


def _account(namespace: str) -> _Read:
    def read(value: object, place: str) -> object:
        first, slash, second = _text(value, place).partition("/")
        named = (first, second) if slash else (namespace, first)
        if not all(named) or "*" in "".join(named):
            raise ConfigError(f"{place}: {value!r} is not SERVICE-ACCOUNT or NAMESPACE/SERVICE-ACCOUNT")
        return {"namespace": named[0], "serviceAccount": named[1]}

    return read


# Values


def _matched(value: object, place: str) -> object:
    """Return a string match. ``*`` alone matches any value that is present; at one end of the text it matches a
    suffix or prefix.
    """
    text = _text(value, place)
    if text == "*":
        return {"Presence": []}
    if text.startswith("*"):
        return {"Suffix": text[1:]}
    return {"Prefix": text[:-1]} if text.endswith("*") else {"Exact": text}


def _principal(value: object, place: str) -> object:
    if "spiffe://" in _text(value, place):
        raise ConfigError(f"{place}: {value!r} never matches: principals are written without spiffe://")
    return _matched(value, place)


def _network(value: object, place: str) -> object:
    try:
        return str(ipaddress.ip_network(_text(value, place), strict=False))
    except ValueError:
        raise ConfigError(f"{place}: {value!r} is no address or block of addresses") from None


def _number(value: object, place: str) -> object:
    text = _text(value, place)
    number = whole_number(text, 65535)
    if not number:
        raise ConfigError(f"{place}: {text!r} is no port")
    return number


_OPERATION: Final = _pairs({"ports": ("destinationPorts", _number)})


def _text(value: object, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{place}: {'is required' if value is None else f'{value!r} is not a text'}")
    return value


def _list(value: object, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise ConfigError(f"{place}: must be a list")
    return value


def _mapping(value: object, place: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{place}: must be a mapping")
    return value


def _only(given: Mapping[str, Any], known: Sequence[str] | Mapping[str, object], place: str) -> None:
    for key in given:
        if key not in known:
            raise ConfigError(f"{place}.{key}: a ztunnel does not obey it; it obeys {', '.join(known)}")
