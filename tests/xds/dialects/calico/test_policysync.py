"""PolicySync's messages: every field, both forms of policy lists, and what cannot be read."""

from ipaddress import ip_network

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from xds.dialects.calico.policysync import PolicyForm, decode, encode
from xds.errors import ConfigError
from xds.model import calico as c
from xds.proto.felix import policysync_pb2 as pb

POLICY = c.PolicyId("NetworkPolicy", "shop", "db")
SOURCE = c.PeerMatch(
    nets=(ip_network("10.0.0.0/8"), ip_network("fd00::/8")),
    not_nets=(ip_network("10.9.0.0/16"),),
    ports=((1, 1024),),
    not_ports=((22, 22),),
    named_ports=("n:a",),
    not_named_ports=("n:b",),
    ip_sets=("s:a", "s:b"),
    not_ip_sets=("s:c",),
    selector="has(app)",
    not_selector="quarantined == 'yes'",
    namespace_selector="env == 'prod'",
    account_names=("web",),
    account_selector="role == 'web'",
)
RULE = c.Rule(
    c.Action.ALLOW,
    SOURCE,
    c.PeerMatch(
        nets=(ip_network("10.1.0.0/16"),), ip_port_sets=("svc:a",), not_ports=((81, 82),), selector="all()"
    ),
    "tcp",
    17,
    4,
    c.HttpMatch(("GET", "*"), (c.PathMatch("/exact", False), c.PathMatch("/below/", True))),
)
ENDPOINT = c.EndpointId("k8s", "shop/web-0", "eth0")
UPDATES = [
    c.InSync(),
    c.IpSetUpdate("s:a", c.IpSetType.NET, ("10.0.0.0/8",)),
    c.IpSetUpdate("n:a", c.IpSetType.IP_AND_PORT, ()),
    c.IpSetDelta("s:a", ("10.0.0.1/32",), ("10.0.0.2/32",)),
    c.IpSetRemove("s:a"),
    c.PolicyUpdate(POLICY, c.Policy("shop", (RULE, c.Rule(c.Action.PASS)), (c.Rule(c.Action.LOG),))),
    c.PolicyUpdate(POLICY, None),
    c.ProfileUpdate("kns.shop", c.Policy("", (c.Rule(c.Action.DENY),))),
    c.ProfileUpdate("kns.shop", None),
    c.EndpointUpdate(
        ENDPOINT,
        c.Endpoint(
            "cali1",
            (ip_network("10.0.0.1/32"), ip_network("fd00::1/128")),
            (c.Tier("platform", (POLICY,), (), True), c.Tier("default", (), (POLICY,))),
            ("kns.shop", "ksa.shop.web"),
        ),
    ),
    c.EndpointUpdate(ENDPOINT, None),
    c.ServiceAccountUpdate("shop", "web", {"role": "web"}),
    c.ServiceAccountUpdate("shop", "web", None),
    c.NamespaceUpdate("shop", {"env": "prod"}),
    c.NamespaceUpdate("shop", None),
]


@pytest.mark.parametrize("update", UPDATES, ids=lambda update: type(update).__name__)
def test_updates_survive_the_wire(update: c.Update) -> None:
    assert decode(encode(update)) == update


def test_names_are_the_form_before_calico_3_32() -> None:
    old = c.PolicyId("", "default", "allow-web")
    endpoint = c.EndpointUpdate(ENDPOINT, c.Endpoint(tiers=(c.Tier("default", (old,), (old,)),)))
    data = encode(endpoint, PolicyForm.NAMES)
    message = pb.ToDataplane.FromString(data).workload_endpoint_update.endpoint
    assert list(message.tiers[0].ingress_policies) == [b"allow-web"]
    assert decode(data) == endpoint
    policy = c.PolicyUpdate(old, c.Policy("", (c.Rule(c.Action.ALLOW),)))
    assert decode(encode(policy, PolicyForm.NAMES)) == policy


@pytest.mark.parametrize("name", ["staged:web", "shop/staged:web", "shop/staged:knp.default.web"])
def test_a_name_says_that_a_policy_is_staged(name: str) -> None:
    data = pb.ToDataplane()
    data.active_policy_update.id.tier = "default"
    data.active_policy_update.id.name = name
    update = decode(data.SerializeToString())
    assert isinstance(update, c.PolicyUpdate)
    assert update.id.kind in c.STAGED_KINDS
    data.workload_endpoint_update.id.workload_id = "shop/web-0"
    data.workload_endpoint_update.endpoint.tiers.add(name="default", ingress_policies=[name.encode()])
    endpoint = decode(data.SerializeToString())
    assert isinstance(endpoint, c.EndpointUpdate)
    assert endpoint.endpoint is not None
    assert endpoint.endpoint.tiers[0].ingress == (update.id,)


def test_both_forms_as_written_by_hand() -> None:
    """Bytes as either release of Felix sends them: a tier ``t`` with one policy ``p``."""
    new = bytes.fromhex("0a01741206120170220147")  # PolicyID{name: p, kind: G}
    old = bytes.fromhex("0a0174120170")
    for tier, expected in ((new, c.PolicyId("G", "", "p")), (old, c.PolicyId("", "t", "p"))):
        message = pb.ToDataplane()
        message.workload_endpoint_update.id.workload_id = "shop/web-0"
        message.workload_endpoint_update.endpoint.tiers.append(pb.TierInfo.FromString(tier))
        update = decode(message.SerializeToString())
        assert isinstance(update, c.EndpointUpdate)
        assert update.endpoint is not None
        assert update.endpoint.tiers == (c.Tier("t", (expected,)),)


@given(st.text(alphabet=st.characters(min_codepoint=0x20, exclude_categories=("Cs",)), min_size=1))
def test_no_name_is_taken_for_a_message(name: str) -> None:
    assume("staged:" not in name)
    message = pb.ToDataplane()
    message.workload_endpoint_update.id.workload_id = "shop/web-0"
    message.workload_endpoint_update.endpoint.tiers.add(name="t", ingress_policies=[name.encode()])
    update = decode(message.SerializeToString())
    assert isinstance(update, c.EndpointUpdate)
    assert update.endpoint is not None
    assert update.endpoint.tiers[0].ingress == (c.PolicyId("", "t", name),)


@pytest.mark.parametrize("action", ["default", "Pass", "PASS", "pass"])
def test_a_tier_passes_by_that_word_only(action: str) -> None:
    message = pb.ToDataplane()
    message.workload_endpoint_update.id.workload_id = "shop/web-0"
    message.workload_endpoint_update.endpoint.tiers.add(name="t", default_action=action)
    update = decode(message.SerializeToString())
    assert isinstance(update, c.EndpointUpdate)
    assert update.endpoint is not None
    assert update.endpoint.tiers[0].passes is (action == "Pass")


def rule(message: pb.Rule) -> c.Rule:
    data = pb.ToDataplane()
    data.active_profile_update.id.name = "p"
    data.active_profile_update.profile.inbound_rules.append(message)
    update = decode(data.SerializeToString())
    assert isinstance(update, c.ProfileUpdate)
    assert update.profile is not None
    return update.profile.inbound[0]


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Allow", c.Action.ALLOW),
        ("DENY", c.Action.DENY),
        ("log", c.Action.LOG),
        ("Next-Tier", c.Action.PASS),
        ("pass", c.Action.PASS),
        ("", c.Action.UNKNOWN),
        ("permit", c.Action.UNKNOWN),
    ],
)
def test_actions_in_any_case(text: str, action: c.Action) -> None:
    assert rule(pb.Rule(action=text)).action is action


def test_a_rule_with_a_clause_that_is_not_known_has_no_known_action() -> None:
    known = pb.Rule(action="allow").SerializeToString()
    assert rule(pb.Rule.FromString(known + bytes.fromhex("aa3e0178"))).action is c.Action.UNKNOWN  # field 997
    path = pb.Rule(action="allow")
    path.http_match.paths.add()
    assert rule(path).action is c.Action.UNKNOWN
    assert rule(pb.Rule.FromString(known + bytes.fromhex("1005"))).action is c.Action.UNKNOWN  # ip_version 5


def test_texts_that_are_no_networks_are_kept_as_none() -> None:
    found = rule(pb.Rule(action="allow", src_net=["10.0.0.7/8", "nonsense", "::ffff:10.0.0.0/104"]))
    assert found.source.nets == (ip_network("10.0.0.0/8"), None, ip_network("10.0.0.0/8"))


def test_a_rule_about_icmp_is_about_nothing_else() -> None:
    assert rule(pb.Rule(action="allow", icmp_type=8)).icmp == c.IcmpMatch(8)
    both = pb.Rule(action="deny", not_icmp_type=8, icmp_type_code=pb.IcmpTypeAndCode(type=3, code=4))
    assert (rule(both).icmp, rule(both).not_icmp) == (c.IcmpMatch(3, 4), c.IcmpMatch(8))


@pytest.mark.parametrize(
    ("message", "place"),
    [
        (pb.ToDataplane(ipset_update=pb.IPSetUpdate(members=["10.0.0.1"])), "ipset_update.id"),
        (pb.ToDataplane(ipset_remove=pb.IPSetRemove()), "ipset_remove.id"),
        (pb.ToDataplane(active_policy_update=pb.ActivePolicyUpdate()), "active_policy_update.id"),
        (pb.ToDataplane(active_profile_remove=pb.ActiveProfileRemove()), "active_profile_remove.id"),
        (pb.ToDataplane(workload_endpoint_update=pb.WorkloadEndpointUpdate()), "workload_endpoint_update.id"),
        (pb.ToDataplane(namespace_update=pb.NamespaceUpdate()), "namespace_update.id"),
        (pb.ToDataplane(service_account_remove=pb.ServiceAccountRemove()), "service_account_remove.id"),
    ],
)
def test_an_object_without_an_id_is_refused_by_its_place(message: pb.ToDataplane, place: str) -> None:
    with pytest.raises(ConfigError) as refused:
        decode(message.SerializeToString())
    assert refused.value.path == place


def test_payloads_of_other_receivers_are_left_out() -> None:
    assert decode(b"") is None
    assert decode(bytes.fromhex("8a0100")) is None  # field 17, IPAMPoolRemove


def test_an_ip_set_of_an_unknown_type_is_none() -> None:
    assert decode(bytes.fromhex("12050a01611809")) == c.IpSetRemove("a")


@given(st.binary(max_size=60))
def test_any_bytes_are_an_update_or_refused(data: bytes) -> None:
    try:
        decode(data)
    except ConfigError:
        pass
