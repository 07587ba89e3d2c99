"""Converts PolicySync's messages to updates of the model, and back.

Calico's releases differ in how a tier lists its policies: by name until 3.31, as messages since 3.32, with the
same field numbers (see :class:`PolicyForm`). The reader accepts both. A rule with an unknown part gets an unknown
action. A flow that reaches such a rule causes an error. So the rule never matches too many flows.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, Final, Literal

from google.protobuf.message import DecodeError

from xds.errors import ConfigError
from xds.model import calico as c
from xds.model.address import IpNetwork, parse_network
from xds.proto.felix import policysync_pb2 as pb
from xds.proto.unknown import unknown_fields

_ACTIONS: Final = {
    "allow": c.Action.ALLOW,
    "deny": c.Action.DENY,
    "log": c.Action.LOG,
    "pass": c.Action.PASS,
    "next-tier": c.Action.PASS,
}


_STAGED: Final = "staged:"


class PolicyForm(Enum):
    """How PolicySync messages list the policies of a tier, and how they write a policy's id."""

    MESSAGES = "messages"
    """Since Calico 3.32, a policy's id is a PolicyID with kind, namespace and name."""
    NAMES = "names"
    """Until Calico 3.31, tiers list policies by name, and a policy's id has tier and name."""


def decode(data: bytes) -> c.Update | None:
    """Decode one ``ToDataplane`` message.

    Returns:
        The update, or None for an unknown payload that changes no policy.

    Raises:
        ConfigError: the bytes are not a ``ToDataplane`` message, or the object has no id.
    """
    message = pb.ToDataplane()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ConfigError(f"not a ToDataplane message: {error}") from error
    kind = message.WhichOneof("payload")
    if kind is None:
        return None
    try:
        return _READERS[kind](getattr(message, kind))
    except ConfigError as error:
        raise error.under(kind) from error


def encode(update: c.Update, form: PolicyForm = PolicyForm.MESSAGES) -> bytes:
    """Return an update as one ``ToDataplane`` message; the inverse of :func:`decode`."""
    message = pb.ToDataplane()
    _write(message, update, form)
    return message.SerializeToString()


def _ip_set(message: pb.IPSetUpdate) -> c.Update:
    try:
        kind = c.IpSetType(message.type)
    except ValueError:
        # An IP set of an unknown type is not stored. Clauses that name the set fail, and a rule with such a clause
        # allows no connection.
        return c.IpSetRemove(_id(message.id))
    return c.IpSetUpdate(_id(message.id), kind, tuple(message.members))


def _ip_set_delta(message: pb.IPSetDeltaUpdate) -> c.Update:
    return c.IpSetDelta(_id(message.id), tuple(message.added_members), tuple(message.removed_members))


def _policy(message: pb.ActivePolicyUpdate) -> c.Update:
    policy = message.policy
    return c.PolicyUpdate(
        _policy_id(message.id),
        c.Policy(policy.namespace, _rules(policy.inbound_rules), _rules(policy.outbound_rules)),
    )


def _profile(message: pb.ActiveProfileUpdate) -> c.Update:
    profile = message.profile
    rules = c.Policy("", _rules(profile.inbound_rules), _rules(profile.outbound_rules))
    return c.ProfileUpdate(_id(message.id.name), rules)


def _endpoint(message: pb.WorkloadEndpointUpdate) -> c.Update:
    endpoint = message.endpoint
    addresses = [parse_network(text) for text in (*endpoint.ipv4_nets, *endpoint.ipv6_nets)]
    return c.EndpointUpdate(
        _endpoint_id(message.id),
        c.Endpoint(
            endpoint.name,
            tuple(network for network in addresses if network is not None),
            tuple(map(_tier, endpoint.tiers)),
            tuple(endpoint.profile_ids),
        ),
    )


_READERS: Final[Mapping[str, Callable[[Any], c.Update | None]]] = {
    "in_sync": lambda message: c.InSync(),
    "ipset_update": _ip_set,
    "ipset_delta_update": _ip_set_delta,
    "ipset_remove": lambda message: c.IpSetRemove(_id(message.id)),
    "active_profile_update": _profile,
    "active_profile_remove": lambda message: c.ProfileUpdate(_id(message.id.name), None),
    "active_policy_update": _policy,
    "active_policy_remove": lambda message: c.PolicyUpdate(_policy_id(message.id), None),
    "workload_endpoint_update": _endpoint,
    "workload_endpoint_remove": lambda message: c.EndpointUpdate(_endpoint_id(message.id), None),
    "service_account_update": lambda message: c.ServiceAccountUpdate(
        _id(message.id.namespace), _id(message.id.name), dict(message.labels)
    ),
    "service_account_remove": lambda message: c.ServiceAccountUpdate(
        _id(message.id.namespace), _id(message.id.name), None
    ),
    "namespace_update": lambda message: c.NamespaceUpdate(_id(message.id.name), dict(message.labels)),
    "namespace_remove": lambda message: c.NamespaceUpdate(_id(message.id.name), None),
}


def _id(text: str) -> str:
    if not text:
        raise ConfigError("is empty", "id")
    if "\0" in text:
        raise ConfigError("has a NUL, which no id of Kubernetes or Calico has", "id")
    return text


def _endpoint_id(message: pb.WorkloadEndpointID) -> c.EndpointId:
    return c.EndpointId(message.orchestrator_id, _id(message.workload_id), message.endpoint_id)


def _policy_id(message: pb.PolicyID) -> c.PolicyId:
    if message.kind:
        return c.PolicyId(message.kind, message.namespace, _id(message.name))
    return _named_policy(message.tier, _id(message.name))


def _named_policy(tier: str, name: str) -> c.PolicyId:
    """Return the id of a policy in the form of names. Until Calico 3.31 the names of staged policies have a prefix
    (PolicyNamePrefixStaged in libcalico-go/lib/backend/model/policy.go), behind the namespace if there is one.
    """
    namespace, _, last = name.rpartition("/")
    kind = ""
    if last.startswith(_STAGED):
        kind = "StagedNetworkPolicy" if namespace else "StagedGlobalNetworkPolicy"
    return c.PolicyId(kind, tier, name)


def _tier(message: pb.TierInfo) -> c.Tier:
    # Only the exact action "Pass" passes. Any other action denies, and so does a missing action. Felix sends no
    # action for a missing tier.
    passes = message.default_action == "Pass"
    ingress, egress = (
        tuple(_listed(message.name, item) for item in items)
        for items in (message.ingress_policies, message.egress_policies)
    )
    return c.Tier(message.name, ingress, egress, passes)


def _listed(tier: str, item: bytes) -> c.PolicyId:
    """Read one policy of a tier, given as a name or as a message.

    A name cannot be mistaken for a message, because messages begin with a field's tag, which is a control
    character.
    """
    message = pb.PolicyID()
    try:
        message.ParseFromString(item)
        if message.name and message.kind and not message.tier and not unknown_fields(message):
            return _policy_id(message)
    except DecodeError:
        pass
    try:
        return _named_policy(tier, _id(item.decode()))
    except UnicodeDecodeError as error:
        raise ConfigError(f"neither a PolicyID nor a name: {item!r}", "endpoint.tiers") from error


def _rules(messages: Iterable[pb.Rule]) -> tuple[c.Rule, ...]:
    return tuple(map(_rule, messages))


def _rule(message: pb.Rule) -> c.Rule:
    action = _ACTIONS.get(message.action.lower(), c.Action.UNKNOWN)
    http = c.HttpMatch(
        tuple(message.http_match.methods),
        tuple(
            c.PathMatch(path.prefix or path.exact, path.WhichOneof("path_match") == "prefix")
            for path in message.http_match.paths
        ),
    )
    # The rule gets an unknown action, because an unknown clause or path match narrows the rule in a way that
    # cannot be evaluated here.
    if unknown_fields(message) or any(not path.path for path in http.paths) or message.ip_version not in (0, 4, 6):
        action = c.Action.UNKNOWN
    return c.Rule(
        action,
        _source(message),
        _destination(message),
        _protocol(message.protocol) if message.HasField("protocol") else None,
        _protocol(message.not_protocol) if message.HasField("not_protocol") else None,
        int(message.ip_version),
        http,
        _icmp(message, "icmp"),
        _icmp(message, "not_icmp"),
    )


def _icmp(message: pb.Rule, choice: Literal["icmp", "not_icmp"]) -> c.IcmpMatch | None:
    match message.WhichOneof(choice):
        case None:
            return None
        case "icmp_type":
            return c.IcmpMatch(message.icmp_type)
        case "not_icmp_type":
            return c.IcmpMatch(message.not_icmp_type)
        case "icmp_type_code":
            return c.IcmpMatch(message.icmp_type_code.type, message.icmp_type_code.code)
        case _:
            return c.IcmpMatch(message.not_icmp_type_code.type, message.not_icmp_type_code.code)


def _source(message: pb.Rule) -> c.PeerMatch:
    return c.PeerMatch(
        nets=_networks(message.src_net),
        not_nets=_networks(message.not_src_net),
        ports=_ranges(message.src_ports),
        not_ports=_ranges(message.not_src_ports),
        named_ports=tuple(message.src_named_port_ip_set_ids),
        not_named_ports=tuple(message.not_src_named_port_ip_set_ids),
        ip_sets=tuple(message.src_ip_set_ids),
        not_ip_sets=tuple(message.not_src_ip_set_ids),
        selector=message.original_src_selector,
        not_selector=message.original_not_src_selector,
        namespace_selector=message.original_src_namespace_selector,
        account_names=tuple(message.src_service_account_match.names),
        account_selector=message.src_service_account_match.selector,
    )


def _destination(message: pb.Rule) -> c.PeerMatch:
    return c.PeerMatch(
        nets=_networks(message.dst_net),
        not_nets=_networks(message.not_dst_net),
        ports=_ranges(message.dst_ports),
        not_ports=_ranges(message.not_dst_ports),
        named_ports=tuple(message.dst_named_port_ip_set_ids),
        not_named_ports=tuple(message.not_dst_named_port_ip_set_ids),
        ip_sets=tuple(message.dst_ip_set_ids),
        not_ip_sets=tuple(message.not_dst_ip_set_ids),
        ip_port_sets=tuple(message.dst_ip_port_set_ids),
        selector=message.original_dst_selector,
        not_selector=message.original_not_dst_selector,
        namespace_selector=message.original_dst_namespace_selector,
        account_names=tuple(message.dst_service_account_match.names),
        account_selector=message.dst_service_account_match.selector,
    )


def _protocol(message: pb.Protocol) -> int | str:
    return message.name if message.WhichOneof("number_or_name") == "name" else message.number


def _ranges(messages: Iterable[pb.PortRange]) -> tuple[tuple[int, int], ...]:
    return tuple((message.first, message.last) for message in messages)


def _networks(texts: Iterable[str]) -> tuple[IpNetwork | None, ...]:
    return tuple(map(parse_network, texts))


def _write(message: pb.ToDataplane, update: c.Update, form: PolicyForm) -> None:
    match update:
        case c.InSync():
            message.in_sync.SetInParent()
        case c.IpSetUpdate():
            message.ipset_update.id = update.id
            message.ipset_update.type = pb.IPSetUpdate.IPSetType.ValueType(update.type.value)
            message.ipset_update.members.extend(update.members)
        case c.IpSetDelta():
            message.ipset_delta_update.id = update.id
            message.ipset_delta_update.added_members.extend(update.added)
            message.ipset_delta_update.removed_members.extend(update.removed)
        case c.IpSetRemove():
            message.ipset_remove.id = update.id
        case c.PolicyUpdate(policy=None):
            _write_policy_id(message.active_policy_remove.id, update.id, form)
        case c.PolicyUpdate(policy=policy):
            assert policy is not None
            _write_policy_id(message.active_policy_update.id, update.id, form)
            target = message.active_policy_update.policy
            target.namespace = policy.namespace
            target.inbound_rules.extend(map(_rule_message, policy.inbound))
            target.outbound_rules.extend(map(_rule_message, policy.outbound))
        case c.ProfileUpdate(profile=None):
            message.active_profile_remove.id.name = update.name
        case c.ProfileUpdate(profile=profile):
            assert profile is not None
            message.active_profile_update.id.name = update.name
            message.active_profile_update.profile.inbound_rules.extend(map(_rule_message, profile.inbound))
            message.active_profile_update.profile.outbound_rules.extend(map(_rule_message, profile.outbound))
        case c.EndpointUpdate(endpoint=None):
            _write_endpoint_id(message.workload_endpoint_remove.id, update.id)
        case c.EndpointUpdate(endpoint=endpoint):
            assert endpoint is not None
            _write_endpoint_id(message.workload_endpoint_update.id, update.id)
            _write_endpoint(message.workload_endpoint_update.endpoint, endpoint, form)
        case c.ServiceAccountUpdate(labels=None):
            message.service_account_remove.id.namespace = update.namespace
            message.service_account_remove.id.name = update.name
        case c.ServiceAccountUpdate(labels=labels):
            message.service_account_update.id.namespace = update.namespace
            message.service_account_update.id.name = update.name
            message.service_account_update.labels.update(labels or {})
        case c.NamespaceUpdate(labels=None):
            message.namespace_remove.id.name = update.name
        case c.NamespaceUpdate(labels=labels):
            message.namespace_update.id.name = update.name
            message.namespace_update.labels.update(labels or {})


def _write_policy_id(message: pb.PolicyID, policy: c.PolicyId, form: PolicyForm) -> None:
    message.name = policy.name
    if form is PolicyForm.NAMES:
        message.tier = policy.namespace
        return
    message.kind = policy.kind
    message.namespace = policy.namespace


def _write_endpoint_id(message: pb.WorkloadEndpointID, endpoint: c.EndpointId) -> None:
    message.orchestrator_id = endpoint.orchestrator
    message.workload_id = endpoint.workload
    message.endpoint_id = endpoint.endpoint


def _write_endpoint(message: pb.WorkloadEndpoint, endpoint: c.Endpoint, form: PolicyForm) -> None:
    message.state = "active"
    message.name = endpoint.name
    message.profile_ids.extend(endpoint.profiles)
    message.ipv4_nets.extend(str(network) for network in endpoint.addresses if network.version == 4)
    message.ipv6_nets.extend(str(network) for network in endpoint.addresses if network.version == 6)
    for tier in endpoint.tiers:
        target = message.tiers.add()
        target.name = tier.name
        target.default_action = "Pass" if tier.passes else "Deny"
        target.ingress_policies.extend(_policy_list(tier.ingress, form))
        target.egress_policies.extend(_policy_list(tier.egress, form))


def _policy_list(policies: Sequence[c.PolicyId], form: PolicyForm) -> list[bytes]:
    if form is PolicyForm.NAMES:
        return [policy.name.encode() for policy in policies]
    messages = []
    for policy in policies:
        message = pb.PolicyID()
        _write_policy_id(message, policy, form)
        messages.append(message.SerializeToString())
    return messages


_ACTION_TEXTS: Final = {
    c.Action.ALLOW: "allow",
    c.Action.DENY: "deny",
    c.Action.LOG: "log",
    c.Action.PASS: "next-tier",
    c.Action.UNKNOWN: "unknown",
}


def _rule_message(rule: c.Rule) -> pb.Rule:
    source, destination = rule.source, rule.destination
    message = pb.Rule(
        action=_ACTION_TEXTS[rule.action],
        ip_version=pb.IPVersion.ValueType(rule.ip_version),
        src_net=map(_net_text, source.nets),
        not_src_net=map(_net_text, source.not_nets),
        src_ports=map(_port_range, source.ports),
        not_src_ports=map(_port_range, source.not_ports),
        src_named_port_ip_set_ids=source.named_ports,
        not_src_named_port_ip_set_ids=source.not_named_ports,
        src_ip_set_ids=source.ip_sets,
        not_src_ip_set_ids=source.not_ip_sets,
        original_src_selector=source.selector,
        original_not_src_selector=source.not_selector,
        original_src_namespace_selector=source.namespace_selector,
        dst_net=map(_net_text, destination.nets),
        not_dst_net=map(_net_text, destination.not_nets),
        dst_ports=map(_port_range, destination.ports),
        not_dst_ports=map(_port_range, destination.not_ports),
        dst_named_port_ip_set_ids=destination.named_ports,
        not_dst_named_port_ip_set_ids=destination.not_named_ports,
        dst_ip_set_ids=destination.ip_sets,
        not_dst_ip_set_ids=destination.not_ip_sets,
        dst_ip_port_set_ids=destination.ip_port_sets,
        original_dst_selector=destination.selector,
        original_not_dst_selector=destination.not_selector,
        original_dst_namespace_selector=destination.namespace_selector,
    )
    for target, peer in (
        (message.src_service_account_match, source),
        (message.dst_service_account_match, destination),
    ):
        target.selector = peer.account_selector
        target.names.extend(peer.account_names)
    for field, protocol in ((message.protocol, rule.protocol), (message.not_protocol, rule.not_protocol)):
        if isinstance(protocol, int):
            field.number = protocol
        elif protocol is not None:
            field.name = protocol
    if rule.icmp is not None and rule.icmp.code is None:
        message.icmp_type = rule.icmp.type
    elif rule.icmp is not None:
        message.icmp_type_code.type, message.icmp_type_code.code = rule.icmp.type, rule.icmp.code or 0
    if rule.not_icmp is not None and rule.not_icmp.code is None:
        message.not_icmp_type = rule.not_icmp.type
    elif rule.not_icmp is not None:
        message.not_icmp_type_code.type = rule.not_icmp.type
        message.not_icmp_type_code.code = rule.not_icmp.code or 0
    message.http_match.methods.extend(rule.http.methods)
    for path in rule.http.paths:
        added = message.http_match.paths.add()
        if path.prefix:
            added.prefix = path.path
        else:
            added.exact = path.path
    return message


def _net_text(network: IpNetwork | None) -> str:
    return str(network) if network is not None else "invalid"


def _port_range(ports: tuple[int, int]) -> pb.PortRange:
    return pb.PortRange(first=ports[0], last=ports[1])


_PROFILE: Final = "Profile"


def encode_report(report: c.FlowReport) -> bytes:
    """Return a report as one ``DataplaneStats`` message; the inverse of :func:`decode_report`."""
    message = pb.DataplaneStats(
        src_ip=report.source_ip,
        dst_ip=report.destination_ip,
        src_port=report.source_port,
        dst_port=report.destination_port,
        action=pb.ALLOWED if report.allowed else pb.DENIED,
    )
    if isinstance(report.protocol, int):
        message.protocol.number = report.protocol
    else:
        message.protocol.name = report.protocol
    trace = message.rules.add(rule_num=report.index)
    if report.policy is None:
        trace.none = True
    elif report.policy.kind == _PROFILE:
        trace.profile.name = report.policy.name
    else:
        _write_policy_id(trace.policy, report.policy, PolicyForm.MESSAGES)
    for kind, value in ((pb.Statistic.PACKETS, report.packets), (pb.Statistic.BYTES, report.octets)):
        if value:
            message.stats.add(relativity=pb.Statistic.DELTA, kind=kind, action=message.action, value=value)
    return message.SerializeToString()


def decode_report(data: bytes) -> c.FlowReport:
    """Decode one ``DataplaneStats`` message. The last rule in its rule trace is the rule that decided. Absolute
    counts are ignored.

    Raises:
        ConfigError: the bytes are not a ``DataplaneStats`` message.
    """
    message = pb.DataplaneStats()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise ConfigError(f"not a DataplaneStats message: {error}") from error
    policy, index = None, -1
    if message.rules:
        trace = message.rules[-1]
        index = trace.rule_num
        if trace.WhichOneof("id") == "policy":
            policy = _policy_id(trace.policy)
        elif trace.WhichOneof("id") == "profile":
            policy = c.PolicyId(_PROFILE, "", _id(trace.profile.name))
    counted = {
        kind: sum(
            max(0, each.value)
            for each in message.stats
            if each.kind == kind and each.relativity == pb.Statistic.DELTA
        )
        for kind in (pb.Statistic.PACKETS, pb.Statistic.BYTES)
    }
    named = message.protocol.WhichOneof("number_or_name") == "name"
    return c.FlowReport(
        source_ip=message.src_ip,
        destination_ip=message.dst_ip,
        source_port=message.src_port,
        destination_port=message.dst_port,
        protocol=message.protocol.name if named else message.protocol.number,
        allowed=message.action == pb.ALLOWED,
        policy=policy,
        index=index,
        packets=counted[pb.Statistic.PACKETS],
        octets=counted[pb.Statistic.BYTES],
    )
