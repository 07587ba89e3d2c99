"""Lists of ports, ranges and devices: read, or refused with what is wrong."""

from collections.abc import Callable
from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ztunnel.sidecar.capture_lists import all_or_networks, all_or_ports, interfaces, networks, ports


def test_lists_keep_their_order_and_each_value_once() -> None:
    assert ports(" 443 ,80,,443") == (443, 80)
    assert networks("10.0.0.0/8, fd00::/8,10.2.3.4,10.0.0.0/8") == (
        ip_network("10.0.0.0/8"),
        ip_network("fd00::/8"),
        ip_network("10.2.3.4/32"),
    )
    assert interfaces("eth1, tap0,eth1, tap+") == ("eth1", "tap0", "tap+")
    for read in (ports, networks, interfaces, all_or_ports, all_or_networks):
        assert read("") == read(" , ") == ()
    for either in (all_or_ports, all_or_networks):
        assert either(" * ") is None


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (ports, "0", "'0' is no port from 1 to 65535"),
        (ports, "65536", "'65536' is no port"),
        (ports, "-1", "'-1' is no port"),
        (ports, "80-90", "'80-90' is no port"),
        (ports, "²", "'²' is no port"),
        (ports, "*", "'*' is no port"),
        (all_or_ports, "*,80", r"mixes \* with ports"),
        (networks, "10.0.0.1/33", "is no IP range"),
        (networks, "example.com", "'example.com' is no IP range"),
        (all_or_networks, "10.0.0.0/8,*", r"mixes \* with ranges"),
        (interfaces, "sixteen-letters-", "no name of a network interface"),
        (interfaces, "+", "no name of a network interface"),
        (interfaces, "a/b", "no name of a network interface"),
        (interfaces, "..", "no name of a network interface"),
        (interfaces, 'a"b', "no name of a network interface"),
    ],
)
def test_what_is_wrong_is_said(read: Callable[[str], object], text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read(text)


@given(text=st.text(alphabet="0123456789.:/,*- aé\x00", max_size=20))
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (ports, networks, interfaces, all_or_ports, all_or_networks):
        try:
            found = read(text)
        except ValueError:
            continue
        assert found is None or isinstance(found, tuple)
