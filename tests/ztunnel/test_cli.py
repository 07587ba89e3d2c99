"""What a person at a shell reads when a command cannot start."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest


def ztunnel(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ztunnel", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


@pytest.mark.parametrize("source", ["ads", "files"])
def test_a_taken_admin_port_is_one_line(source: str, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if source == "ads":
            args = ["--control-plane", f"unix:{tmp_path}/nobody", "--node", "a", "--admin", f"127.0.0.1:{port}"]
        else:
            resources = "".join(
                f"  {kind}_config: {{path_config_source: {{path: {tmp_path}/{kind}.yaml}}}}\n"
                for kind in ("lds", "cds")
            )
            for kind in ("lds", "cds"):
                (tmp_path / f"{kind}.yaml").write_text("resources: []\n")
            bootstrap = tmp_path / "bootstrap.yaml"
            bootstrap.write_text(
                "node: {id: a, cluster: b}\n"
                f"admin: {{address: {{socket_address: {{address: 127.0.0.1, port_value: {port}}}}}}}\n"
                f"dynamic_resources:\n{resources}"
            )
            args = ["--bootstrap", str(bootstrap)]
        done = ztunnel("proxy", *args)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ztunnel: ")
    assert f"127.0.0.1:{port}" in last


def test_an_unknown_command_is_one_line_and_the_help() -> None:
    done = ztunnel("prxoy")
    assert done.returncode == 1
    assert done.stderr.splitlines()[0] == "unknown command: prxoy"
    assert "usage: ztunnel" in done.stderr
    assert done.stdout == ""


def test_help_and_version_go_to_standard_output() -> None:
    shown = ztunnel("help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "control-plane" in shown.stdout
    version = ztunnel("version")
    assert (version.returncode, version.stderr) == (0, "")
    assert version.stdout.startswith("version.BuildInfo{")
    assert version.stdout.count("\n") == 1


def test_without_a_command_it_is_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXY_MODE", "neither")
    monkeypatch.setenv("RUST_LOG", "loud")
    done = ztunnel()
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "Error: invalid env var PROXY_MODE=neither (must be one of shared, dedicated)",
        "Error: invalid env var RUST_LOG=loud (loud is neither a level nor target=level)",
    ]
