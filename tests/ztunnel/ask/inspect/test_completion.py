"""Candidates for a command line, and real shells that ask for them."""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ztunnel.ask.inspect.harness import pages
from tests.ztunnel.proxy.istio.admin.test_server import Harness, served
from tests.ztunnel.proxy.istio.path.test_route import BACK, CLIENT, cart
from ztunnel.ask.inspect.completion import SCRIPTS, candidates, names_for
from ztunnel.cli import main

ROOT = Path(__file__).parents[4]


def parser() -> argparse.ArgumentParser:
    program = argparse.ArgumentParser(prog="p")
    commands = program.add_subparsers()
    run = commands.add_parser("run")
    run.add_argument("--level", choices=["debug", "info"])
    run.add_argument("--quiet", action="store_true")
    run.add_argument("--file")
    run.add_argument("source")
    run.add_argument("way", choices=["in", "out"])
    commands.add_parser("rest").add_subparsers().add_parser("deep")
    return program


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("", ["rest", "run"]),
        ("r", ["rest", "run"]),
        ("ru", ["run"]),
        ("rest ", ["deep"]),
        ("run --l", ["--level"]),
        ("run --level ", ["debug", "info"]),
        ("run --level d", ["debug"]),
        ("run --file ", ["file-a", "file-b"]),
        ("run --quiet ", ["source-a", "source-b"]),
        ("run --level info ", ["source-a", "source-b"]),
        ("run source-a ", ["in", "out"]),
        ("run source-a in ", []),
        ("nothing ", ["rest", "run"]),
    ],
)
def test_what_a_word_may_become(line: str, found: list[str]) -> None:
    names = lambda argument: [f"{argument}-b", f"{argument}-a"]  # noqa: E731
    assert candidates(parser(), line.split(" "), names) == found


def test_explain_takes_names_of_a_running_proxy(capsys: pytest.CaptureFixture[str]) -> None:
    def words(*line: str) -> list[str]:
        assert main(["completion", "--words", *line]) == 0
        return capsys.readouterr().out.split()

    def ask(address: str) -> None:
        assert words("explain", "--address", address, "shop/c") == ["shop/client"]
        assert words("explain", "--address", address, "shop/client", "cart") == ["cart.example:80"]
        assert words("workloads", "--address", address, "") == []
        assert words("workloads", "--address", address, "--namespace", "s") == ["shop"]
        assert words("explain", "--address", address, "--identity", "spiffe://") == [
            "spiffe://cluster.local/ns/shop/sa/back",
            "spiffe://cluster.local/ns/shop/sa/client",
        ]
        assert words("config", "--address", address, "wo") == ["workloadState", "workloads"]
        assert words("config", "--address", address, "services", "") == ["cart"]
        assert words("config", "--address", address, "config", "netw") == ["network"]
        assert words("config", "--address", address, "nothing", "") == []
        assert words("log", "de") == ["debug"]
        assert names_for(["tap", ""], address)("pod") == ["shop/back", "shop/client"]

    async def check(harness: Harness) -> None:
        harness.proxy.mesh.apply([CLIENT, cart(), BACK])
        await asyncio.to_thread(ask, str(harness.addresses["admin"][0]))

    served(check)
    assert words("explain", "--address", "127.0.0.1:1", "") == []  # no server there
    live = {"uid": {"connections": {"inbound": [{"src": "10.0.0.1:4"}], "outbound": [{"src": "10.0.0.2:5"}]}}}
    envoys = {"connections": [{"source": "10.0.0.3:6"}]}
    for page, found in ((live, ["10.0.0.1:4", "10.0.0.2:5"]), (envoys, ["10.0.0.3:6"]), ([7], [])):
        with pages({"/connections": json.dumps(page).encode()}) as address:
            assert words("explain", "--address", address, "--connection", "") == found


#: Prints the candidates of a line, as the shell itself finds them.
ASKING = {
    "bash": 'COMP_LINE="{line}" COMP_POINT={length}; _ztunnel; printf "%s\\n" "${{COMPREPLY[@]}}"',
    "fish": "complete -C '{line}'",
}


@pytest.mark.parametrize("shell", ASKING)
def test_a_shell_completes(shell: str, tmp_path: Path) -> None:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"NOT TESTED: no {shell}")
    program = tmp_path / "ztunnel"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m ztunnel "$@"\n')
    program.chmod(0o755)

    def complete(line: str) -> list[str]:
        asked = SCRIPTS[shell] + ASKING[shell].format(line=line, length=len(line))
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [found, "-c", asked], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
        )
        assert done.stderr == ""
        return done.stdout.split()

    (tmp_path / "checks.yaml").touch()  # a file is no candidate where there are words
    assert complete("ztunnel cert") == ["certificates"]
    assert complete("ztunnel certificates --na") == ["--namespace"]
    assert complete("ztunnel policy ch") == ["check"]
    assert complete("ztunnel completion ") == ["bash", "fish", "zsh"]
    if shell == "fish":  # bash itself adds files, by "complete -o default"
        assert complete("ztunnel policy check che") == ["checks.yaml"]


def test_bash_gets_names_quoted(tmp_path: Path) -> None:
    if shutil.which("bash") is None:
        pytest.skip("NOT TESTED: no bash")
    program = tmp_path / "ztunnel"
    program.write_text("#!/bin/sh\nprintf '%s\\n' 'outbound|80||x' 'a$(exit)b' 'spiffe://td/ns/a/sa/b' --flag\n")
    program.chmod(0o755)

    def complete(line: str) -> list[str]:
        asked = SCRIPTS["bash"] + ASKING["bash"].format(line=line, length=len(line))
        environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
        done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, env=environment, check=False)
        assert done.stderr == ""
        return done.stdout.splitlines()

    words = ["outbound\\|80\\|\\|x", "a\\$\\(exit\\)b", "spiffe://td/ns/a/sa/b", "--flag"]
    assert complete("ztunnel config clusters ") == words
    program.write_text("#!/bin/sh\n")
    assert complete("ztunnel workloads ") == [""]  # of printf, which has no word


def test_each_shell_has_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    for shell, script in SCRIPTS.items():
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == script
        assert "ztunnel completion --words" in script
