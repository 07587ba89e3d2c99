"""Hubble's own program, unmodified, as the judge of our lines and of our filters: ``make hubble`` builds it."""

import asyncio
import json
import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from tests.hbone.certificates import Authority
from tests.programs import needed
from tests.ztunnel.proxy.flows.observers import fill, relaying, secret, serving
from tests.ztunnel.proxy.istio.admin.test_server import Harness, served
from tests.ztunnel.proxy.istio.admin.test_server import harness as harness_of_another
from ztunnel.cli import main
from ztunnel.proxy.flows.settings import HubbleSettings, Peer

#: Between two looks at a program that starts.
AGAIN_S = 0.1


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The page of a proxy with three flows, and what its service answers to each question."""
    needed("hubble")  # before the proxy starts: a skip must not pass through its task group
    folder = tmp_path_factory.mktemp("flows")
    path = folder / "flows.json"
    found: dict[str, str] = {}

    async def check(harness: Harness) -> None:
        fill(harness)
        path.write_text((await harness.ask("admin", "/flows")).text)
        async with serving(harness, HubbleSettings(address=f"unix:{folder}/hubble.sock")):
            server = ("--server", f"unix://{folder}/hubble.sock")
            for theirs, _ in QUESTIONS:
                words = ("observe", *server, "--last", "100", "-o", "jsonpb", *theirs)
                found[" ".join(theirs)] = await asyncio.to_thread(run_hubble, folder, *words)
            for words in (("status",), ("list", "nodes"), ("list", "namespaces"), ("observe", "--last", "1")):
                found[words[0] if words[0] != "list" else words[1]] = await asyncio.to_thread(
                    run_hubble, folder, *words, *server
                )

    served(check)
    return path, found


@pytest.fixture(scope="module")
def page(answers: tuple[Path, dict[str, str]]) -> Path:
    """Lines of a proxy: a tunnel that closed, one that a policy refused, a plain connection that failed."""
    return answers[0]


def run_hubble(home: Path, *words: str) -> str:
    environment = {**os.environ, "HOME": str(home)}  # it reads a configuration there
    done = subprocess.run(
        [needed("hubble"), *words], capture_output=True, text=True, timeout=60, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "level=warn" not in done.stderr
    return done.stdout


def hubble(page: Path, *words: str) -> list[str]:
    return run_hubble(page.parent, "observe", "--input-file", str(page), *words).splitlines()


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


def uuids(lines: str) -> list[str]:
    return [json.loads(line)["flow"]["uuid"] for line in lines.splitlines()]


@pytest.mark.parametrize("theirs", [" ".join(q[0]) for q in QUESTIONS])
def test_the_service_filters_like_the_program(theirs: str, answers: tuple[Path, dict[str, str]]) -> None:
    wanted = "\n".join(hubble(answers[0], "-o", "jsonpb", *theirs.split()))
    assert uuids(answers[1][theirs]) == uuids(wanted)


def test_the_program_shows_the_service(answers: tuple[Path, dict[str, str]]) -> None:
    _, found = answers
    assert "Healthcheck (via" in found["status"]
    assert "Current/Max Flows: 3/4,096" in found["status"]
    assert "c1/n1" in found["nodes"]
    assert "shop" in found["namespaces"]
    assert "to-stack ERROR" in found["observe"]


@pytest.mark.parametrize("secured", [False, True], ids=["plain", "mTLS"])
def test_an_unmodified_relay_shows_two_proxies(secured: bool, tmp_path: Path) -> None:
    needed("hubble-relay")  # before the proxies start
    root = Authority()
    names = [Peer(name=f"c1/{node}", address="x").server_name for node in ("n1", "n2")]
    tls = str(secret(tmp_path / "server", root, *names, "hubble-peer.c1.hubble-grpc.cilium.io")) if secured else ""
    client = secret(tmp_path / "client", root, "relay")

    async def check(harness: Harness) -> None:
        fill(harness)
        async with harness_of_another() as other:
            fill(other)
            async with serving(other, HubbleSettings(address="127.0.0.1:0", tls=tls), "c1/n2") as far:
                peers = (Peer(name="c1/n2", address=far.address),)
                settings = HubbleSettings(address="127.0.0.1:0", tls=tls, peers=peers)
                async with serving(harness, settings) as near:
                    with relaying(near.address, "c1", client if secured else None) as relay:

                        async def ask(*words: str) -> str:
                            return await asyncio.to_thread(run_hubble, tmp_path, *words, "--server", relay)

                        while True:
                            await asyncio.sleep(AGAIN_S)
                            with suppress(AssertionError):
                                if "Connected Nodes: 2/2" in await ask("status"):
                                    break
                        lines = (await ask("observe", "--last", "10", "--verdict", "DROPPED")).splitlines()
                        assert len(lines) == 2
                        nodes = await ask("list", "nodes")
                        assert "c1/n1" in nodes
                        assert "c1/n2" in nodes

    served(check)


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
