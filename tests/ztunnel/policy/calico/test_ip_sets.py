"""IP sets: members of each type, found by address; updates, and the state after them."""

from ipaddress import ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xds.model.calico import IpSetType
from ztunnel.policy.calico.ip_sets import IpSets

NET, IP, IP_AND_PORT = IpSetType.NET, IpSetType.IP, IpSetType.IP_AND_PORT


def sets(kind: IpSetType, *members: str) -> IpSets:
    found = IpSets()
    found.replace("a", kind, members)
    return found


@pytest.mark.parametrize(
    ("member", "inside", "outside"),
    [
        ("10.0.0.0/8", "10.255.0.1", "11.0.0.0"),
        ("10.0.0.128/25", "10.0.0.128", "10.0.0.127"),
        ("10.0.0.1/32", "10.0.0.1", "10.0.0.2"),
        ("10.0.0.1", "10.0.0.1", "10.0.0.0"),
        ("10.0.0.77/24", "10.0.0.1", "10.0.1.1"),
        ("0.0.0.0/0", "1.2.3.4", "::1"),
        ("::/0", "fd00::1", "1.2.3.4"),
        ("FD00:0::/64", "fd00::1", "fd00:0:0:1::1"),
        ("::ffff:10.0.0.0/104", "10.1.2.3", "11.0.0.1"),
        ("10.0.0.1", "::ffff:10.0.0.1", "::10.0.0.1"),
    ],
)
def test_networks(member: str, inside: str, outside: str) -> None:
    found = sets(NET, member)
    assert found.containing(inside) == {"a"}
    assert found.containing(outside) == set()
    assert found.containing(None) == set()
    found.replace("b", NET, (outside,))  # an entry of two sets, or of another
    assert [found.holds("a", address) for address in (inside, outside, None)] == [True, False, False]
    found.replace("b", NET, (member,))
    assert found.holds("a", inside)
    found.remove("a")
    assert not found.holds("a", inside)


def test_addresses_with_ports() -> None:
    found = sets(IP_AND_PORT, "10.0.0.1,tcp:80", "10.0.0.1,SCTP:81", "fd00::1,udp:53", "10.0.0.1,47:1")
    assert found.containing_port("10.0.0.1", 6, 80) == {"a"}
    assert found.containing_port("10.0.0.1", 17, 80) == set()
    assert found.containing_port("10.0.0.1", 132, 81) == {"a"}
    assert found.containing_port("10.0.0.1", 47, 1) == {"a"}
    assert found.containing_port("fd00:0::1", 17, 53) == {"a"}
    assert found.containing("10.0.0.1") == set()


@pytest.mark.parametrize(
    ("kind", "member"),
    [
        (NET, "10.0.0.0/33"),
        (NET, "10.0.0.256"),
        (NET, "10.0.0.1/"),
        (NET, "host"),
        (NET, ""),
        (NET, "10.0.0.1,tcp:80"),
        (IP_AND_PORT, "10.0.0.1"),
        (IP_AND_PORT, "10.0.0.1,tcp:65536"),
        (IP_AND_PORT, "10.0.0.1,nonsense:1"),
        (IP_AND_PORT, "10.0.0.1,tcp:x"),
        (IP_AND_PORT, "x,tcp:1"),
        (IP_AND_PORT, f"10.0.0.1,tcp:{'8' * 5000}"),
        (IP_AND_PORT, f"10.0.0.1,{'6' * 5000}:80"),
    ],
)
def test_of_a_set_with_a_member_that_cannot_be_read_the_others_are_known(kind: IpSetType, member: str) -> None:
    found = sets(kind, *(["10.0.0.1"] if kind is NET else ["10.0.0.1,tcp:80"]), member)
    assert "a" not in found
    known, unknown = (
        found.containing(f"10.0.0.{end}") | found.containing_port(f"10.0.0.{end}", 6, 80) for end in (1, 2)
    )
    assert (known, unknown) == ({"a"}, set())
    assert list(found.broken()) == [("a", member)]
    assert not found.holds("a", "10.0.0.1")
    before = found.generation
    found.change("a", (), (member,))
    assert "a" in found
    assert found.generation > before
    assert found.containing("10.0.0.1") | found.containing_port("10.0.0.1", 6, 80) == {"a"}


def test_updates_are_idempotent() -> None:
    found = sets(NET, "10.0.0.0/8")
    for _ in range(2):
        assert found.change("a", ("10.0.0.1", "10.0.0.1"), ())
    assert (found.members, len(found)) == (2, 1)
    for _ in range(2):
        assert found.change("a", (), ("10.0.0.1", "10.9.9.9"))
    assert found.members == 1
    assert not found.change("b", ("10.0.0.1",), ())
    found.remove("b")
    found.remove("a")
    found.remove("a")
    assert (len(found), found.members, "a" in found) == (0, 0, False)


def test_a_set_that_is_replaced_over_and_over_leaves_nothing() -> None:
    found = IpSets()
    found.replace("other", NET, ("10.0.0.7",))
    for turn in range(50):
        found.replace("a", NET, (f"10.0.{turn}.{index}" for index in range(200)))
    assert sum(len(table) for tables in found._tables.values() for table in tables.values()) < 1_500
    assert found.containing("10.0.0.7") == {"other"}
    assert found.containing("10.0.49.7") == {"a"}
    assert found.containing("10.0.48.7") == set()


MEMBERS = st.sampled_from(("10.0.0.0/8", "10.0.0.0/31", "10.0.0.1/32", "fd00::/8", "fd00::1/128", "0.0.0.0/0"))
CHANGES = st.lists(
    st.tuples(st.sampled_from(("replace", "add", "remove", "drop")), st.sampled_from("abc"), st.sets(MEMBERS))
)


@given(CHANGES)
def test_any_order_of_updates_leaves_what_plain_sets_would(changes: list[tuple[str, str, set[str]]]) -> None:
    found, plain = IpSets(), dict[str, set[str]]()
    for what, set_id, members in changes:
        if what == "replace":
            found.replace(set_id, NET, members)
            plain[set_id] = set(members)
        elif what == "drop":
            found.remove(set_id)
            plain.pop(set_id, None)
        elif found.change(set_id, members if what == "add" else (), members if what == "remove" else ()):
            plain[set_id] = plain[set_id] | members if what == "add" else plain[set_id] - members
        if len(changes) % 3 == 0:
            found._sweep()
    assert found.members == sum(map(len, plain.values()))
    for address in ("10.0.0.0", "10.0.0.1", "10.0.0.2", "fd00::1", "11.0.0.1"):
        expected = {
            set_id
            for set_id, members in plain.items()
            if any(ip_address(address) in ip_network(member) for member in members)
        }
        assert found.containing(address) == expected
