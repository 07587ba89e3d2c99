"""The description is read whole, and everything wrong with it is said at once."""

import contextlib
from ipaddress import ip_address

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tproxy.node import Member
from ztunnel.node.intercept.description import BadDescription, Flags, namespaces, parse

GOOD = """
host: {namespace: node, addresses: [172.18.0.2, "fd00:172:18::2"]}
ztunnel: {namespace: 4711, interface: veth1, addresses: [10.244.1.5]}
pods:
- {uid: a-b, addresses: [10.244.1.10, "fd00::10"], interface: veth2}
"""


def test_a_good_file() -> None:
    told = parse(GOOD, Flags())
    assert (told.host_namespace, told.ztunnel_namespace) == ("node", "4711")
    assert (told.node.ztunnel_device, told.node.uplink, told.node.versions) == ("veth1", "eth0", (4,))


def test_an_ip_version_the_ztunnel_lacks_is_left_out_of_the_members() -> None:
    [member] = parse(GOOD, Flags()).node.members
    assert member == Member(uid="a-b", addresses=(ip_address("10.244.1.10"),), device="veth2")


def test_flags_win_over_the_file() -> None:
    told = parse(
        GOOD,
        Flags(
            host_namespace="other",
            ztunnel_addresses=("10.244.1.6",),
            ztunnel_uplink="ens3",
            pods=("u=10.1.1.1,10.1.1.2@v9",),
        ),
    )
    assert told.host_namespace == "other"
    assert told.node.ztunnel_addresses == (ip_address("10.244.1.6"),)
    assert told.node.uplink == "ens3"
    [member] = told.node.members
    assert (member.uid, member.device, len(member.addresses)) == ("u", "v9", 2)


@pytest.mark.parametrize(
    ("text", "flags", "problem"),
    [
        ("", Flags(), "ztunnel.namespace: is missing"),
        ("[]", Flags(), "file: must be a mapping"),
        ("a: b: c", Flags(), "file: "),
        (GOOD.replace("namespace: node", "netns: node"), Flags(), "host.netns: unknown"),
        (GOOD.replace("interface: veth1", "interface: a-name-that-is-too-long"), Flags(), "ztunnel.interface"),
        (
            GOOD.replace("10.244.1.10", "10.244.1.300"),
            Flags(),
            "pods[0].addresses: must be IP addresses, not '10.244.1.300'",
        ),
        (GOOD.replace("uid: a-b", "uid: 7"), Flags(), "pods[0].uid"),
        (GOOD.replace("10.244.1.5", "fd00::5").replace(', "fd00:172:18::2"', ""), Flags(), "no IP version"),
        (GOOD, Flags(pods=("nonsense",)), "UID=ADDRESS"),
    ],
)
def test_each_fault_of_the_file_is_named(text: str, flags: Flags, problem: str) -> None:
    with pytest.raises(BadDescription) as failure:
        parse(text, flags)
    assert problem in str(failure.value)


def test_all_faults_are_reported_together() -> None:
    with pytest.raises(BadDescription) as failure:
        parse("host: 1\nztunnel: {interface: 5}\nextra: 1\npods: {}\n", Flags())
    assert len(failure.value.faults) >= 6


def test_removal_needs_only_the_namespaces() -> None:
    assert namespaces(None, Flags(ztunnel_namespace="z")) == (None, "z")
    assert namespaces("host: {addresses: wrong}\nztunnel: {namespace: z}", Flags()) == (None, "z")


leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.sampled_from(["10.0.0.1", "eth0"])
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["host", "ztunnel", "pods", "uid", "addresses", "interface", "namespace"]), inner
        )
    ),
    max_leaves=12,
)


@given(trees)
def test_any_document_is_read_or_refused(tree: object) -> None:
    with contextlib.suppress(BadDescription):
        parse(yaml.safe_dump(tree), Flags())
