"""The command line of ``ztunnel intercept``."""

import argparse

import pytest

from ztunnel.node.intercept.command import add_arguments, flags_from
from ztunnel.node.intercept.description import Flags

LINE = (
    "--host-netns h --ztunnel-netns z --host-ip 172.18.0.2 --ztunnel-veth v --ztunnel-uplink e "
    "--ztunnel-ip 10.0.0.5 --pod u=10.0.0.1@p"
)


@pytest.mark.parametrize("action", ["apply", "show", "remove"])
def test_each_action_takes_the_flags_of_apply(action: str) -> None:
    """All actions take the same flags, so that a command line can be recalled and only its action changed."""
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_subparsers())
    args = parser.parse_args(["intercept", action, *LINE.split()])
    assert flags_from(args) == Flags(
        host_namespace="h",
        ztunnel_namespace="z",
        host_addresses=("172.18.0.2",),
        ztunnel_interface="v",
        ztunnel_uplink="e",
        ztunnel_addresses=("10.0.0.5",),
        pods=("u=10.0.0.1@p",),
    )
