"""Nodes to want in tests."""

from ipaddress import ip_address

from tproxy.node import Member, Node


def member(number: int, *, ipv6: bool = True) -> Member:
    addresses = [ip_address(f"10.244.1.{number}")] + ([ip_address(f"fd00:10:244:1::{number}")] if ipv6 else [])
    return Member(uid=f"uid-{number}", addresses=tuple(addresses), device=f"veth{number}")


def described(*members: Member, ipv6: bool = True) -> Node:
    keep = 2 if ipv6 else 1
    return Node(
        host_addresses=(ip_address("172.18.0.1"), ip_address("fd00:172:18::1"))[:keep],
        ztunnel_addresses=(ip_address("10.244.1.5"), ip_address("fd00:10:244:1::5"))[:keep],
        ztunnel_device="veth-zt",
        members=members,
    )
