"""``ztunnel tap`` on a node captures a pod's traffic in tunnels, with one process that carries it and with
several.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.netns.istio import HELLO, ROOT, NodeProxy, ask, eventually, mesh_of
from tests.netns.toys import app
from tests.ztunnel.proxy.tap.reader import Capture, read
from tests.ztunnel.proxy.tap.tshark import complaints, tshark

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]
NODES = {"w1": ["client", "near"], "w2": ["far"]}
UNPRIVILEGED = 65534


async def tap(*arguments: str) -> asyncio.subprocess.Process:
    """Start the command."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "ztunnel", "tap", *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )


async def begun(made: asyncio.subprocess.Process) -> str:
    assert made.stderr is not None
    return (await asyncio.wait_for(made.stderr.readline(), 20)).decode()


async def ended(made: asyncio.subprocess.Process) -> tuple[int, str]:
    """Interrupt it, and return its status and its last words."""
    made.send_signal(signal.SIGINT)
    _, errors = await asyncio.wait_for(made.communicate(), 20)
    assert made.returncode is not None
    return made.returncode, errors.decode()


def lines_of(proxy: NodeProxy, text: str) -> list[str]:
    return [str(line["message"]) for line in proxy.log() if str(line.get("message", "")).startswith(text)]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_pods_streams_are_captured(tmp_path: Path, workers: str) -> None:
    async def main() -> None:
        env = {"ZTUNNEL_TAP_SOCKET": f"{tmp_path}/{{node}}.tap", "ZTUNNEL_WORKER_THREADS": workers}
        async with (
            mesh_of(NODES, tmp_path, env=env) as mesh,
            app(mesh.lab.pod("near")),
            app(mesh.lab.pod("far")),
        ):
            client, proxy = mesh.lab.pod("client"), mesh.proxies["w1"]
            for each in mesh.proxies.values():
                await eventually(lambda each=each: each.metric("ztunnel_workers") == int(workers), "workers")
            socket, file = f"{tmp_path}/w1.tap", tmp_path / "client.pcapng"
            at_client = await tap("default/client", "--socket", socket, "-w", str(file))
            said = await begun(at_client)
            assert said == "ztunnel tap: default/client, every connection for 60s; no connection is open yet\n"
            at_far = await tap("default/far", "--socket", f"{tmp_path}/w2.tap", "-w", "-")
            await begun(at_far)
            for server in ("near", "far"):
                for _ in range(4):
                    await ask(client, mesh.lab.pod(server).ipv4, 8080)
            status, said = await ended(at_client)
            assert status == 0
            assert said.startswith("ztunnel tap: 8 connections, ")
            assert said.endswith("; the reader has ended it\n")
            at_far.send_signal(signal.SIGINT)
            inbound, _ = await asyncio.wait_for(at_far.communicate(), 20)

            found = read(file.read_bytes())
            assert file.stat().st_mode & 0o777 == 0o600
            hosts = {str(mesh.lab.pod(server).ipv4): 0 for server in ("near", "far")}
            for (source, server), (sent, received) in found.streams().items():
                assert source[0] == str(client.ipv4)
                assert server[1] == 8080
                assert sent == HELLO
                assert received
                hosts[server[0]] += 1
            assert set(hosts.values()) == {4}
            there = read(inbound)
            far = {
                names: both
                for names, both in found.streams().items()
                if names[1][0] == str(mesh.lab.pod("far").ipv4)
            }
            assert there.streams() == far, "the same connections, seen at both ends"
            _check_with_tshark(file.read_bytes(), found)

            text = await eventually(lambda: lines_of(proxy, "tap ends"), "the line of the end")
            assert f"pod=default/client port=any peer=any uid=0 pid={at_client.pid} reason='the reader" in text[0]
            assert len(lines_of(proxy, "tap begins pod=default/client")) == 1

            status, said = proxy.get(15000, "/tap?pod=default/client")
            assert (status, said) == (403, f"taps are for root, at the local socket {socket}: ztunnel tap\n")
            await _refused(socket)

    asyncio.run(main())
    assert list(tmp_path.glob("*.tap")) == []


def _check_with_tshark(data: bytes, found: Capture) -> None:
    if shutil.which("tshark") is None:
        print("NOT TESTED: tshark is not installed")
        return
    assert complaints(data) == []
    assert len(tshark(data).splitlines()) == len(found.packets)
    assert HELLO.decode() in tshark(data, "-q", "-z", "follow,tcp,ascii,0")


async def _refused(socket: str) -> None:
    for arguments, reason in (
        (("default/other", "--socket", socket), "default/other: this proxy carries no such pod; pods are named"),
        (
            ("default/client", "--socket", f"{socket}.not"),
            f"{socket}.not: no proxy listens there; is a proxy here",
        ),
        (("default/client", "--socket", socket, "--for", "1h"), "for: 1h must be more than 0"),
    ):
        made = await tap(*arguments, "-w", "-")
        _, errors = await asyncio.wait_for(made.communicate(), 20)
        assert (made.returncode, errors.decode().startswith(f"ztunnel tap: {reason}")) == (2, True), errors
    # Users other than root cannot even connect: where the folder can be entered, the socket's mode forbids it. Run
    # by setpriv, because a change of user in this process would need a fork, which disturbs its gRPC server.
    made = await asyncio.create_subprocess_exec(
        *("setpriv", f"--reuid={UNPRIVILEGED}", f"--regid={UNPRIVILEGED}", "--clear-groups"),
        *("/usr/bin/python3", "-c", f"import socket; socket.socket(socket.AF_UNIX).connect({socket!r})"),
        stderr=subprocess.PIPE,
    )
    _, errors = await made.communicate()
    assert b"Permission denied" in errors
    assert os.stat(socket).st_mode & 0o777 == 0o600
