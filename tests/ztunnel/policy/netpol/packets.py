"""Packets for hypothesis: between the addresses of one family, with every protocol that policies can name."""

from collections.abc import Sequence
from ipaddress import ip_address

from hypothesis import strategies as st

from tproxy.packets import Packet


@st.composite
def packets(draw: st.DrawFn, hosts: Sequence[tuple[str, str]]) -> Packet:
    """A first packet of a connection; ``hosts`` have an IPv4 and an IPv6 address each."""
    version = draw(st.integers(0, 1))
    source, destination = (ip_address(draw(st.sampled_from(hosts))[version]) for _ in range(2))
    protocol = draw(st.sampled_from((6, 6, 17, 132, 1 if version == 0 else 58)))
    if protocol in (1, 58):
        return Packet(
            source=source,
            destination=destination,
            protocol=protocol,
            icmp_type=draw(st.sampled_from((0, 3, 8, 128))),
            icmp_code=draw(st.integers(0, 1)),
        )
    ports = st.sampled_from((80, 81, 82, 443))
    return Packet(
        source=source,
        destination=destination,
        protocol=protocol,
        source_port=draw(ports),
        destination_port=draw(ports),
    )
