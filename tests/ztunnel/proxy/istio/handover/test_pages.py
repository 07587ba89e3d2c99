"""What an operator sees of hand-overs: the admin server's page, the command, metrics, settings."""

import asyncio
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.ztunnel.proxy.istio.admin.test_server import Harness, served
from tests.ztunnel.proxy.istio.handover.scripted import GREETING
from ztunnel.cli import main
from ztunnel.proxy.dataplane.handover.counts import HandoverCounts
from ztunnel.proxy.dataplane.handover.messages import encode
from ztunnel.proxy.istio.environment import config_from
from ztunnel.runtime.settings import SettingsError

Output = pytest.CaptureFixture[str]


def asked(capsys: Output, check: Callable[[Harness, Callable[..., Any]], Any], env: Mapping[str, str]) -> None:
    async def with_command(harness: Harness) -> None:
        address = harness.addresses["admin"][0]

        async def command(*words: str) -> tuple[int, str, str]:
            status = await asyncio.to_thread(main, ["handover", *words, "--address", str(address)])
            said = capsys.readouterr()
            return status, said.out, said.err

        await check(harness, command)

    served(with_command, env)


def test_handover_page_without_a_folder_names_the_variable(capsys: Output) -> None:
    async def check(harness: Harness, command: Callable[..., Any]) -> None:
        answer = await harness.ask("admin", "/handover")
        assert answer.status == 404
        assert "ZTUNNEL_HANDOVER_DIR" in answer.text
        status, _, err = await command()
        assert status == 2
        assert "ZTUNNEL_HANDOVER_DIR" in err

    asked(capsys, check, {})


def test_handover_page_shows_state_and_needs_a_successor(capsys: Output, tmp_path: Path) -> None:
    async def check(harness: Harness, command: Callable[..., Any]) -> None:
        handover = harness.proxy.handover
        assert handover is not None
        handover.statistics.count("kept", "declined: pod not carried", 2)
        shown = json.loads((await harness.ask("admin", "/handover")).text)
        assert shown["socket"] == f"{tmp_path}/handover.sock"
        assert (shown["listening"], shown["successor"]) == (False, None)
        assert shown["connections"] == {"kept (declined)": 2}
        handover.begin()
        while not handover.status()["listening"]:
            await asyncio.sleep(0.01)
        status, out, _ = await command("status")
        assert status == 0
        assert "waits for a successor" in out
        assert "kept (declined)" in out
        status, _, err = await command("now")
        assert status == 2
        assert "no successor waits" in err
        assert not harness.proxy._stop.is_set()
        await handover.close()

    asked(capsys, check, {"ZTUNNEL_HANDOVER_DIR": str(tmp_path)})


def test_handover_command_gives_connections_at_once(capsys: Output, tmp_path: Path) -> None:
    async def check(harness: Harness, command: Callable[..., Any]) -> None:
        handover = harness.proxy.handover
        assert handover is not None
        handover.begin()
        while not handover.status()["listening"]:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "handover.sock"))
        message = encode(GREETING)
        writer.write(len(message).to_bytes(4) + b"\0\0" + message)
        await reader.read(10)
        assert handover.successor_waits
        status, out, _ = await command("now")
        assert status == 0
        assert "handing over" in out
        assert harness.proxy._stop.is_set()
        writer.close()
        await handover.close()

    asked(capsys, check, {"ZTUNNEL_HANDOVER_DIR": str(tmp_path)})


def test_metrics_count_results_and_pauses() -> None:
    async def check(harness: Harness) -> None:
        text = (await harness.ask("stats", "/metrics")).text
        assert "ztunnel_handover" not in text.replace("# HELP ztunnel_handover", "").replace("# TYPE ztunnel", "")
        counts = harness.proxy.metrics.handovers
        counts.offered("given", "", 3, 0.004)
        counts.offered("kept", "no answer in time", 1, 2.0)
        counts.offered("kept", "within a record", 1, 9.0)
        text = (await harness.ask("stats", "/metrics")).text
        assert 'ztunnel_handover_connections_total{reason="",result="given"} 3' in text or (
            'ztunnel_handover_connections_total{result="given",reason=""} 3' in text
        )
        assert 'ztunnel_handover_pause_seconds_bucket{le="0.005"} 1' in text
        assert 'ztunnel_handover_pause_seconds_bucket{le="2.5"} 2' in text
        assert 'ztunnel_handover_pause_seconds_bucket{le="+Inf"} 3' in text
        assert "ztunnel_handover_pause_seconds_count 3" in text

    served(check)


def test_buckets_are_cumulative() -> None:
    counts = HandoverCounts()
    for pause_s in (0.0005, 0.001, 0.3, 99.0):
        counts.offered("given", "", 1, pause_s)
    found = dict(counts.cumulative())
    assert (found["0.001"], found["0.25"], found["0.5"], found["+Inf"]) == (2, 2, 3, 4)
    assert counts.offers == 4
    both = HandoverCounts()
    for _ in range(2):
        both.add(counts.connections, counts.pauses, counts.paused_s)
    assert dict(both.cumulative())["+Inf"] == both.offers == 8
    assert both.connections == {("given", ""): 8}
    assert both.paused_s == 2 * counts.paused_s


def config(env: Mapping[str, str]) -> Any:
    return config_from(env, cpus=2, read_file=lambda path: None)


@pytest.mark.parametrize(
    ("env", "fault"),
    [
        ({"ZTUNNEL_HANDOVER_DIR": "here"}, "absolute"),
        ({"ZTUNNEL_HANDOVER_DIR": "/" + "x" * 100}, "bytes long"),
        ({"ZTUNNEL_REPLACE": "true"}, "ZTUNNEL_HANDOVER_DIR"),
    ],
)
def test_settings_that_cannot_be_used_are_refused(env: Mapping[str, str], fault: str) -> None:
    with pytest.raises(SettingsError) as caught:
        config(env)
    assert any(fault in each for each in caught.value.faults)


def test_settings_decide_whether_connections_move() -> None:
    assert not config({}).moves
    assert not config({}).tls_policy.movable
    with_folder = config({"ZTUNNEL_HANDOVER_DIR": "/run/x", "ZTUNNEL_WORKER_THREADS": "1"})
    assert with_folder.moves
    assert with_folder.tls_policy.movable
    assert config({"ZTUNNEL_HANDOVER_DIR": "/run/x", "ZTUNNEL_WORKER_THREADS": "2"}).moves
