"""The command line of ``ztunnel intercept``."""

import argparse
import asyncio
import io
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from tproxy.node import node
from tproxy.operations import Operation
from tproxy.resources import State
from ztunnel.node.intercept import command
from ztunnel.node.intercept.command import add_arguments, flags_from
from ztunnel.node.intercept.description import Flags, parse

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


class Applied(Exception):
    """Ends a watch."""


@pytest.mark.parametrize(("pods", "stay"), [("", ["u"]), ("# none\n", []), ("pods: []\n", [])])
def test_emptied_file_keeps_its_pods_captured(tmp_path: Path, pods: str, stay: list[str]) -> None:
    line = "--ztunnel-netns z --host-ip 172.18.0.2 --ztunnel-veth v --ztunnel-ip 10.0.0.5 --watch"
    file = tmp_path / "pods.yaml"
    parser = argparse.ArgumentParser()
    add_arguments(parser.add_subparsers())
    args = parser.parse_args(["intercept", "apply", "-f", str(file), *line.split()])
    text = "pods: [{uid: u, addresses: [10.0.0.1], interface: p}]\n"
    description = parse(text, flags_from(args))
    said, states = io.StringIO(), []

    class Kernel:
        async def keep(
            self, wanted: Callable[[], State], *, changed: object
        ) -> AsyncIterator[tuple[Operation, ...]]:
            file.write_text(pods)
            states.append(wanted())
            yield ()
            raise Applied

    async def main() -> None:
        await command._watch(cast(Any, Kernel()), args, description, io.StringIO(), said)

    with pytest.raises(ExceptionGroup) as ended:
        asyncio.run(main())
    assert ended.group_contains(Applied)
    assert states == [node(replace(description.node, members=description.node.members if stay else ()))]
    assert (f"{file}: is empty, as while it is written" in said.getvalue()) is bool(stay)
