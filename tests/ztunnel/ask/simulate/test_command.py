"""The command as people type it: on a saved dump of the Rust ztunnel's form, and on a running proxy."""

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.ztunnel.ask.inspect.harness import pages
from tests.ztunnel.ask.simulate.test_policies import DUMP, written
from tests.ztunnel.ask.simulate.test_seen import DENIED, TUNNELLED
from tests.ztunnel.proxy.istio.admin.test_server import Harness, served
from tests.ztunnel.proxy.istio.path.test_route import BACK, CLIENT
from ztunnel.cli import main
from ztunnel.proxy.istio.accounting.logs import plain_line

Output = pytest.CaptureFixture[str]
ONLY_WEB = {"from": [{"source": {"principals": ["cluster.local/ns/shop/sa/web"]}}]}


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Return the arguments that name a dump and a log; a policy is beside them."""
    dump = {**DUMP, "workloads": DUMP["workloads"][:1], "certificates": []}
    (tmp_path / "dump.json").write_text(json.dumps(dump))
    lines = [
        plain_line("t", "info", "access", "connection complete", each) for each in (TUNNELLED, DENIED, TUNNELLED)
    ]
    lines.append(plain_line("t", "info", "access", "connection complete", [("direction", "inbound")]))
    (tmp_path / "access.log").write_text("".join(lines))
    (tmp_path / "new.yaml").write_text(written(ONLY_WEB))
    return ["simulate", "-f", str(tmp_path / "dump.json"), "--from-log", str(tmp_path / "access.log")]


def test_what_would_be_newly_refused(files: list[str], tmp_path: Path, capsys: Output) -> None:
    assert main([*files, "--policy", str(tmp_path / "new.yaml")]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "CHANGE         SOURCE    IDENTITY                                  DESTINATION     CONNECTIONS  BECAUSE",
        "newly refused  10.0.0.1  spiffe://cluster.local/ns/shop/sa/client  back.shop:8080  3            "
        "allow policies exist, but none allowed",
        "3 connections: 3 newly refused, 0 newly allowed, 0 allowed as before, 0 refused as before",
        "lines of the log that do not say enough, not judged: 1",
    ]


def test_the_answer_as_json(files: list[str], capsys: Output) -> None:
    assert main([*files, "--remove", "shop/old", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    summary = answer["summary"]
    assert summary["totals"]["allowed as before"] == summary["connections"] == 3
    assert answer["items"][0]["because"] == "no policy denies it, and none allows only some"
    assert (summary["unknownDestinations"], summary["unreadLines"]) == (0, 1)


def test_a_suggestion_can_be_simulated(files: list[str], tmp_path: Path, capsys: Output) -> None:
    assert main([*files, "--suggest"]) == 0
    (tmp_path / "new.yaml").write_text(capsys.readouterr().out)
    assert main([*files, "-p", str(tmp_path / "new.yaml")]) == 0
    assert "allowed as before  10.0.0.1" in capsys.readouterr().out


def test_in_envoys_dialect_it_says_what_to_use(files: list[str], tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "dump.json").write_text('{"configs": []}')
    assert main([*files, "--suggest"]) == 2
    assert "in Envoy's dialect shadow_rules" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["root:x:0:0:root:/root:/bin/bash\n" * 3, "{}\n"])
def test_a_file_without_access_lines_is_no_answer(
    files: list[str], tmp_path: Path, capsys: Output, text: str
) -> None:
    (tmp_path / "access.log").write_text(text)
    assert main([*files, "--suggest"]) == 2
    lines = text.count("\n")
    assert f"access.log: none of its {lines} lines is an access line of a ztunnel" in capsys.readouterr().err


def test_standard_input_that_is_no_text_is_named(
    files: list[str], capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n"), encoding="utf-8"))
    assert main([*files[:-1], "-", "--suggest"]) == 2
    assert capsys.readouterr().err == "ztunnel simulate: standard input: not text\n"


def test_a_suggestion_needs_connections(files: list[str], tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "access.log").write_text("")
    assert main([*files, "--suggest"]) == 0
    assert "no connection was seen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ([], "nothing to simulate: give --policy, --remove, --enforce or --suggest"),
        (["--remove", "a/b"], "--remove a/b: the mesh has no such policy"),
        (["--policy", "/nowhere.yaml"], "/nowhere.yaml: no such file or directory"),
    ],
)
def test_what_cannot_be_answered(files: list[str], more: list[str], error: str, capsys: Output) -> None:
    assert main([*files, *more]) == 2
    assert capsys.readouterr().err == f"ztunnel simulate: {error}\n"


def test_live_connections_need_a_duration_and_a_proxy(files: list[str], capsys: Output) -> None:
    dump = files[:3]
    assert main([*dump, "--remove", "shop/old", "--live", "soon"]) == 2
    assert "--live soon: must be a duration such as" in capsys.readouterr().err
    assert main([*dump, "--remove", "shop/old", "--live", "1s"]) == 2
    assert "--live asks a running proxy: not with --file" in capsys.readouterr().err


@pytest.mark.parametrize("connections", [[], {"u": 1}, {"u": {"connections": {"inbound": [{"src": "x"}]}}}])
def test_connections_of_another_form_are_one_line(connections: Any, capsys: Output) -> None:
    bodies = {"/config_dump": {"workloads": [], "policies": [], "certificates": []}, "/connections": connections}
    with pages({path: json.dumps(body).encode() for path, body in bodies.items()}) as address:
        assert main(["simulate", "--address", address, "--suggest", "--live", "0s"]) == 2
    assert "/connections has another form than a ztunnel's" in capsys.readouterr().err


def test_a_running_proxy_is_asked(tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "new.yaml").write_text(written(ONLY_WEB))

    def ask(address: str) -> None:
        given = ["simulate", "--address", address, "--policy", str(tmp_path / "new.yaml"), "--live", "0s"]
        assert main(given) == 0
        assert capsys.readouterr().out.startswith("0 connections: 0 newly refused")

    async def check(harness: Harness) -> None:
        harness.proxy.mesh.apply([CLIENT, BACK])
        await asyncio.to_thread(ask, str(harness.addresses["admin"][0]))

    served(check)


GATE = """
from ztunnel.addons import Addon, Deny

class Gate(Addon):
    def accepting(self, facts):
        {body}
"""


def test_an_addon_is_replayed_against_a_log(files: list[str], tmp_path: Path, capsys: Output) -> None:
    addon = tmp_path / "gate.py"
    addon.write_text(
        GATE.format(body="return Deny(f'not {facts.source.name}') if facts.source_identity else None")
    )
    assert main([*files, "--addon", str(addon)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("newly refused") or lines[1].startswith("refused as before")
    assert "addon gate: deny: not " in lines[1]
    assert lines[-2].startswith("3 connections: 2 newly refused")
    addon.write_text(GATE.format(body="return None"))
    assert main([*files, "--addon", str(addon)]) == 0
    assert "addon gate: nothing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("1 / 0", "line 1 of the log: its hook accepting raised"),
        ("exit(0)", "SystemExit: 0"),
        ("return 5", "returned a value of type int"),
    ],
)
def test_a_faulty_addon_is_no_answer(
    files: list[str], tmp_path: Path, capsys: Output, body: str, said: str
) -> None:
    addon = tmp_path / "gate.py"
    addon.write_text(GATE.format(body=body))
    assert main([*files, "--addon", str(addon)]) == 2
    assert said in capsys.readouterr().err
    assert main([*files, "--addon", str(tmp_path / "missing.py")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main([*files, "--addon", str(addon), "--remove", "shop/old"]) == 2


@pytest.mark.parametrize("dump", [{"policies": [5]}, {"policies": 5}])
def test_a_dump_of_another_form_is_one_line(dump: Any, tmp_path: Path, capsys: Output) -> None:
    file = tmp_path / "dump.json"
    file.write_text(json.dumps({"workloads": [], "certificates": [], **dump}))
    assert main(["simulate", "--file", str(file), "--remove", "a/b", "--from-log", "/dev/null"]) == 2
    assert "not the workloads and policies of a config_dump" in capsys.readouterr().err
