"""``ztunnel authz`` and ``dikastes`` as processes: serving, asking, health, ending, and refusals in one line."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests import commands
from ztunnel.policy.calico.settings import sync_target

LIMIT_S = 30.0


def ztunnel(*args: str, program: str = "ztunnel") -> subprocess.CompletedProcess[str]:
    if program == "ztunnel":
        return commands.ztunnel("authz", *args)
    return subprocess.run(command(program, *args), capture_output=True, text=True, timeout=LIMIT_S, check=False)


def command(program: str, *args: str) -> list[str]:
    if program == "ztunnel":
        return [sys.executable, "-m", "ztunnel", "authz", *args]
    function = {"dikastes": "main", "healthz": "healthz"}[program]
    return [
        sys.executable,
        "-c",
        f"import ztunnel.policy.authz.dikastes as d, sys; sys.exit(d.{function}())",
        *args,
    ]


@contextmanager
def served(program: str, *args: str, env: dict[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(program, *args), stderr=subprocess.PIPE, text=True, env={**os.environ, **(env or {})}
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "serving ext_authz on" in line:
                break
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/a/b.sock", "unix:/a/b.sock"),
        ("unix:/a/b.sock", "unix:/a/b.sock"),
        ("unix:///a/b.sock", "unix:/a/b.sock"),
        ("./b.sock", "unix:./b.sock"),
        ("localhost:50051", "localhost:50051"),
        ("[::1]:50051", "[::1]:50051"),
    ],
)
def test_addresses_in_every_spelling(text: str, expected: str) -> None:
    assert sync_target(text) == expected


@pytest.mark.parametrize("text", ["", "host", "host:", ":1", "host:0", "host:65536", "unix:", "host:port"])
def test_other_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"neither|has no path|has no host"):
        sync_target(text)


def test_a_server_without_policies_denies_and_ends_by_signal(tmp_path: Path) -> None:
    path = tmp_path / "authz.sock"
    with served("ztunnel", "serve", "-l", str(path), "-d", f"unix://{tmp_path}/felix.sock") as process:
        asked = ztunnel("check", "shop", "web", "--method", "GET", "--path", "/", "-d", str(path))
        assert (asked.returncode, asked.stdout) == (1, "UNAVAILABLE: no policy has been received yet\n")
        assert ztunnel("health", "liveness", "-d", str(path)).returncode == 0
        ready = ztunnel("health", "readiness", "-d", f"unix:{path}")
        assert (ready.returncode, ready.stdout) == (3, "unhealthy\n")
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    assert not path.exists()
    assert ztunnel("health", "liveness", "-d", str(path)).returncode == 2


def test_calicos_own_command_line(tmp_path: Path) -> None:
    path = str(tmp_path / "dikastes.sock")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    env = {"DIKASTES_HTTP_BIND_PORT": str(port), "DIKASTES_HTTP_BIND_ADDR": "127.0.0.1"}
    with served("dikastes", "server", "-l", path, "-d", f"{tmp_path}/felix.sock", env=env) as process:
        asked = ztunnel("client", "shop", "web", "--method", "GET", "-d", path, program="dikastes")
        assert (asked.returncode, asked.stdout) == (0, "UNAVAILABLE: no policy has been received yet\n")
        assert ztunnel("client", "shop", "web", "-d", f"{path}.none", program="dikastes").returncode == 2
        assert ztunnel("health", "liveness", "--dial-path", path, program="dikastes").returncode == 0
        assert ztunnel("readiness", "-dialPath", path, program="healthz").returncode == 3
        assert ztunnel("health", "nonsense", program="dikastes").returncode == 1
        until = time.monotonic() + LIMIT_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/terminate", timeout=LIMIT_S) as answer:
                    assert answer.read() == b"terminating Dikastes\n"
                break
            except OSError:  # the HTTP port is served after the socket
                assert time.monotonic() < until
        assert process.wait(LIMIT_S) == 0


def test_an_empty_port_of_the_terminator_is_none_and_a_file_at_the_path_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "dikastes.sock"
    path.write_text("left over")
    env = {"DIKASTES_HTTP_BIND_PORT": ""}
    with served("dikastes", "server", "-l", str(path), "-d", f"{tmp_path}/felix.sock", env=env):
        assert path.is_socket()
        assert ztunnel("health", "liveness", "--dial-path", str(path), program="dikastes").returncode == 0
    folder = tmp_path / "folder"
    folder.mkdir()
    done = ztunnel("serve", "-l", str(folder))
    assert (done.returncode, "File exists" in done.stderr) == (1, True)


def test_metrics_of_a_server(tmp_path: Path) -> None:
    path = str(tmp_path / "authz.sock")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with served("ztunnel", "serve", "-l", path, "-d", f"{tmp_path}/felix", "--metrics", f"127.0.0.1:{port}"):
        for _ in range(2):
            assert ztunnel("check", "shop", "web", "-d", path).returncode == 1
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as answer:
            lines = answer.read().decode().splitlines()
    assert 'authz_checks_total{code="UNAVAILABLE"} 2.0' in lines
    assert "authz_policysync_in_sync 0.0" in lines
    assert "authz_policies 0.0" in lines
    assert 'authz_policy_decisions_total{policy="UNAVAILABLE",result="denied",tier="none"} 2.0' in lines


def test_the_admin_page_and_the_command_that_asks_it(tmp_path: Path) -> None:
    path = str(tmp_path / "authz.sock")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]

    def explain(*args: str) -> subprocess.CompletedProcess[str]:
        return commands.ztunnel("policy", "explain", "--server", f"127.0.0.1:{port}", *args)

    with served("ztunnel", "serve", "-l", path, "-d", f"{tmp_path}/felix", "--admin", str(port)):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/policies", timeout=LIMIT_S) as answer:
            told = json.load(answer)
        assert (told["source"]["name"], told["store"]["complete"]) == (f"unix:{tmp_path}/felix", False)
        done = explain("--from", "10.0.0.1", "--to", "10.0.0.2")
        assert (done.returncode, done.stdout.splitlines()[0]) == (0, "egress of 10.0.0.1")
        done = explain("--from", "x", "--to", "10.0.0.2")
        assert done.returncode == 2
        assert "400 from: 'x' is neither namespace/pod" in done.stderr
    done = explain("--from", "10.0.0.1", "--to", "10.0.0.2")
    assert done.returncode == 2
    assert "connection refused" in done.stderr


def test_bad_modes_are_named(tmp_path: Path) -> None:
    done = ztunnel("serve", "--socket-mode", "9")
    assert done.returncode == 2
    assert "'9' is no mode such as 770" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("serve", "-l", "host"), "'host' is neither host:port nor unix:/path"),
        (("serve", "-d", "unix:"), "'unix:' has no path"),
        (("serve", "--terminate", "x"), "'x' is neither a port nor ip:port"),
        (("serve", "--metrics", "localhost:1"), "'localhost:1' is neither a port nor ip:port"),
        (("check", "a", "b", "--source", "x"), "'x' is neither an IP address nor one with a port"),
        (("check", "a", "b", "--destination", "x"), "'x' is neither an IP address nor one with a port"),
        (("serve", "-l", "/nowhere/a.sock"), "cannot serve on unix:/nowhere/a.sock: No such file or directory"),
    ],
)
def test_bad_arguments_are_one_line(args: tuple[str, ...], words: str) -> None:
    done = ztunnel(*args)
    assert done.returncode == 1
    assert words in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
