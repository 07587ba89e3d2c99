"""Hubble's own program, unmodified, as the judge of our lines and of our filters: ``make hubble`` builds it."""

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.programs import needed
from tests.ztunnel.proxy.istio.accounting.test_flows import DENIED, record
from tests.ztunnel.proxy.istio.admin.test_server import Rig, served
from xds.model.address import SocketAddress
from ztunnel.cli import main
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.istio.accounting.outcome import Failed
from ztunnel.proxy.istio.accounting.record import Direction, Record


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Lines of a proxy: a tunnel that closed, one that a policy refused, a plain connection that failed."""
    path = tmp_path_factory.mktemp("flows") / "flows.json"

    async def check(rig: Rig) -> None:
        closed = record(rig, Direction.OUTBOUND)
        closed.trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        closed.opened()
        closed.complete()
        denied = record(rig, Direction.INBOUND)
        denied.opened()
        denied.complete(DENIED)
        ends = SocketAddress("10.0.0.7", 4001), SocketAddress("192.0.2.1", 443)
        failed = Record(rig.proxy.node, Direction.OUTBOUND, *ends)
        failed.opened()
        failed.complete(Failed("io error: Connection refused", Reason.REFUSED))
        path.write_text((await rig.ask("admin", "/flows")).text)

    served(check)
    return path


def hubble(page: Path, *words: str) -> list[str]:
    command = [needed("hubble"), "observe", "--input-file", str(page), *words]
    environment = {**os.environ, "HOME": str(page.parent)}  # it reads a configuration there
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_its_lines_name_both_sides_the_verdict_the_policy_and_the_reason(page: Path) -> None:
    closed, refused, failed = hubble(page, "--print-policy-names")
    assert "shop/client:4000 (ID:" in closed
    assert "-> shop/back:8080 (ID:" in closed
    assert "to-network FORWARDED (HBONE 10.0.0.2:15008: closed after" in closed
    assert "Auth: SPIRE" in closed
    assert "INGRESS DENIED BY no-web (AuthorizationPolicy) (TCP: connection closed due to policy rejec" in refused
    assert "explicitly denied by: shop/no-web" in refused
    assert "10.0.0.7:4001 (world) -> 192.0.2.1:443 (world) to-stack ERROR" in failed


#: The same question in its words and in ours.
QUESTIONS = [
    ([], []),
    (["--verdict", "DROPPED"], ["--verdict", "dropped"]),
    (["--verdict", "DROPPED", "--verdict", "ERROR"], ["--verdict", "dropped", "--verdict", "error"]),
    (["--not", "--verdict", "FORWARDED"], ["--not", "--verdict", "forwarded"]),
    (["--pod", "shop/client"], ["--pod", "shop/client"]),
    (["--from-pod", "shop/cl"], ["--from", "shop/cl"]),
    (["--to-pod", "/back"], ["--to", "/back"]),
    (["--to-pod", "back"], ["--to", "back"]),
    (["--namespace", "shop"], ["-n", "shop"]),
    (["--from-ip", "10.0.0.0/29"], ["--from", "10.0.0.0/29"]),
    (["--to-ip", "192.0.2.1"], ["--to", "192.0.2.1"]),
    (["--encrypted"], ["--encrypted"]),
    (["--port", "443"], ["--port", "443"]),
    (["--traffic-direction", "ingress"], ["--direction", "inbound"]),
    (["--trace-id", "0af7651916cd43dd8448eb211c80319c"], ["--trace", "0af7651916cd43dd8448eb211c80319c"]),
    (
        ["--from-pod", "shop/client", "--not", "--to-pod", "shop/back"],
        ["--from", "shop/client", "--not", "--to", "shop/back"],
    ),
]


@pytest.mark.parametrize(("theirs", "ours"), QUESTIONS, ids=[" ".join(q[1]) or "all" for q in QUESTIONS])
def test_our_filters_mean_what_its_filters_mean(
    theirs: list[str], ours: list[str], page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = [json.loads(line)["flow"]["uuid"] for line in hubble(page, "-o", "jsonpb", *theirs)]

    async def ask() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            body = page.read_bytes()
            writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            words = ["flows", "--address", f"127.0.0.1:{port}", "-o", "jsonpb", *ours]
            assert await asyncio.to_thread(main, words) == 0

    asyncio.run(ask())
    assert [json.loads(line)["flow"]["uuid"] for line in capsys.readouterr().out.splitlines()] == wanted
