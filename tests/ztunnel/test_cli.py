"""What a person at a shell reads when a command cannot start."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import ztunnel
from tests.hbone.certificates import Authority
from tests.limits import WAIT_S
from ztunnel.cli import COMMANDS, GROUPS, _parser, complete_for_kubectl, main


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


@pytest.mark.parametrize("package", COMMANDS)
def test_the_table_has_the_commands_of_each_package(package: str) -> None:
    added = argparse.ArgumentParser().add_subparsers()
    importlib.import_module(f"ztunnel.{package}").add_arguments(added)
    assert tuple(added.choices) == COMMANDS[package]


@pytest.mark.parametrize(("given", "hint"), [("prxoy", "did you mean proxy? "), ("x", ""), ("get", "")])
def test_an_unknown_command_is_one_line_that_says_what_to_do(given: str, hint: str) -> None:
    done = ztunnel(given)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"unknown command: {given}; {hint}`ztunnel help` lists them\n"


def test_help_of_a_command_is_its_own_without_docstrings_too() -> None:
    command = [sys.executable, "-OO", "-m", "ztunnel", "help", "explain"]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert "usage: ztunnel explain" in asked.stdout
    assert asked.stdout == ztunnel("explain", "--help").stdout


@pytest.mark.parametrize("command", ["check --list", "completion bash"])
def test_a_reader_that_has_seen_enough_is_no_error(command: str) -> None:
    """The reader behaves like ``| head -1``: the pipe breaks at the first write, or at the last flush."""
    words = [sys.executable, "-m", "ztunnel", *command.split()]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.close()
        assert running.stderr is not None
        assert running.stderr.read() == b""
        assert running.wait(30) == 141


@pytest.mark.parametrize("command", ["version", "status --help", "completion bash"])
def test_an_output_that_cannot_be_written_is_one_line(command: str) -> None:
    with open("/dev/full", "w") as full:
        words = [sys.executable, "-m", "ztunnel", *command.split()]
        # argparse ignores errors of writing help, so with this variable only the last flush would fail.
        env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(
            words, stdout=full, stderr=subprocess.PIPE, text=True, timeout=WAIT_S, check=False, env=env
        )
    assert (done.returncode, done.stderr) == (
        2,
        "ztunnel: the output cannot be written: No space left on device\n",
    )


@pytest.mark.parametrize(
    ("closed", "command", "status", "out"),
    [
        (">&-", "version", 0, ""),
        ("2>&-", "status --address 127.0.0.1:1", 2, ""),  # the error is not written to standard output
        ("<&-", "connections --file -", 2, ""),
        ("<&- >&- 2>&-", "connections --file -", 2, ""),
    ],
)
def test_closed_standard_streams_are_empty(closed: str, command: str, status: int, out: str) -> None:
    words = f"{sys.executable} -m ztunnel {command} {closed}"
    done = subprocess.run(words, shell=True, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (done.returncode, done.stdout) == (status, out)
    assert "Traceback" not in done.stderr


def test_ctrl_c_ends_a_command_without_a_traceback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words = [sys.executable, "-m", "ztunnel", "status", "--address", f"127.0.0.1:{silent.getsockname()[1]}"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
            connection, _ = silent.accept()
            with connection:
                connection.recv(1000)  # the command waits for the answer
                running.send_signal(signal.SIGINT)
                out, errors = running.communicate(timeout=WAIT_S)
    assert (running.returncode, out, errors) == (130, "", "")


@pytest.mark.parametrize("form", ["table", "yaml"])
def test_a_name_that_the_terminal_cannot_show_is_escaped(form: str, tmp_path: Path) -> None:
    dump = tmp_path / "dump.json"
    workload = {"name": "caf\u00e9\ud800", "namespace": "shop", "workloadIps": ["10.0.0.1"]}
    dump.write_text(json.dumps({"workloads": [workload], "certificates": []}))
    words = [sys.executable, "-m", "ztunnel", "config" if form == "yaml" else "workloads", "-f", str(dump)]
    env = {**os.environ, "PYTHONIOENCODING": "ascii"}
    if form == "yaml":
        words += ["workloads", "-o", "yaml"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=WAIT_S, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, "")
    assert r"caf\xe9" in done.stdout


@pytest.mark.parametrize("form", ["json", "yaml", "name", "jsonpath={.items[*].name}", "custom-columns=N:.name"])
def test_a_lone_surrogate_of_a_dump_is_escaped(
    form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = tmp_path / "dump.json"
    workload = {"name": "a\ud800", "namespace": "shop", "workloadIps": ["10.0.0.1"]}
    dump.write_text(json.dumps({"workloads": [workload], "certificates": []}))
    assert main(["workloads", "-f", str(dump), "-o", form, "--sort-by", ".name"]) == 0
    shown = capsys.readouterr().out
    assert (json.loads(shown)["items"][0]["name"] if form == "json" else shown.strip()).count(r"a\ud800") == 1


def test_help_and_version_go_to_standard_output() -> None:
    shown = ztunnel("help")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "control-plane" in shown.stdout
    version = ztunnel("version")
    assert (version.returncode, version.stderr) == (0, "")
    assert version.stdout.startswith("version.BuildInfo{")
    assert version.stdout.count("\n") == 1
    told = json.loads(ztunnel("version", "--json").stdout)
    assert f'Version:"{told["version"]}"' in version.stdout
    assert {"buildProfile", "istioVersion"} < told.keys()


def test_without_a_command_it_says_which_there_are() -> None:
    shown = ztunnel()
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout == ztunnel("help").stdout
    assert "the daemon is ztunnel proxy" in shown.stdout


def test_the_version_is_a_flag_too() -> None:
    assert ztunnel("--version").stdout == ztunnel("version").stdout


@pytest.mark.parametrize(
    "command", [("proxy",), ("agent",), ("control-plane", "mesh.yaml"), ("intercept", "apply")], ids=" ".join
)
def test_an_unknown_flag_shows_the_usage_of_its_command(command: tuple[str, ...]) -> None:
    done = ztunnel(*command, "--bogus")
    assert done.returncode == 2
    words = " ".join(word for word in command if "." not in word)
    assert done.stderr.startswith(f"usage: ztunnel {words} ")
    assert done.stderr.endswith(f"ztunnel {words}: error: unknown arguments: --bogus\n")


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("agent", "--socket", "/proc/absent/a.sock"), "/proc/absent"),
        (("control-plane", "/proc/absent"), "/proc/absent: no such file or directory"),
        (("intercept", "apply", "-f", "/proc/absent"), "/proc/absent: no such file or directory"),
        (("intercept", "apply"), "host.addresses: must be a list of IP addresses, and is missing"),
        (("agent", "--check"), "--check needs --state FILE"),
        (("agent", "--probe-user", "x"), "argument --probe-user: must be a whole number, not negative: 'x'"),
        (
            ("connections", "--watch", "x"),
            "argument -w/--watch: must be a number of seconds, at most a hundred years",
        ),
        (("connections", "--address", "a b"), "a b: not an address, HOST:PORT or a URL"),
        (("drain", "--port", "70000"), "argument --port: must be a port, 1 to 65535: '70000'"),
        (("policy", "explain", "--from", "a/b", "--to", "c/d", "--server", "a b"), "a b: no server's address"),
        (("proxy", "--spin-us", "x"), "--spin-us=x: must be a whole number, not negative"),
        (("proxy", "--admin", "1:2:3"), "--admin=1:2:3: must be ip:port, a port, or off"),
        (("proxy", "--tunnel-source", "x"), "--tunnel-source=x: must be one of client-pod, envoy"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)
def test_wrong_arguments_and_missing_files_are_one_line(command: tuple[str, ...], words: str) -> None:
    """No name of a Python type, no number of an error, no word of the language's own."""
    done = ztunnel(*command)
    assert done.returncode in (1, 2)
    assert words in done.stderr
    assert not _python(done.stderr)


_PYTHON = re.compile(
    r"Traceback|Errno|\bNone|NoneType|invalid (literal|\w+ value)|is not a valid|could not convert|codec|urlopen"
    r"|Expecting value|has no attribute|[a-z]Error\b|<class|object at 0x"
)


def _python(told: str) -> list[str]:
    return [line for line in told.splitlines() if _PYTHON.search(line)]


def _leaves(parser: argparse.ArgumentParser, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every sub-command that has none itself, and its parser."""
    inner = next((each for each in parser._actions if isinstance(each, argparse._SubParsersAction)), None)
    if inner is None or not inner.required:
        yield words, parser
    for name, each in ({} if inner is None else inner.choices).items():
        yield from _leaves(each, (*words, name))


def _refusal(parser: argparse.ArgumentParser, action: argparse.Action, value: str) -> str:
    try:
        parser._get_value(action, value)
    except argparse.ArgumentError as error:
        return str(error)
    return ""


def test_a_bad_value_of_any_option_is_told_in_words() -> None:
    """Checks every option and argument of every command that reads its value."""
    tried = 0
    for words, parser in _leaves(_parser(["help"])):
        for action in parser._actions:
            if action.type is None or action.type is Path:
                continue
            for value in ("", "x", "-1", "nan", "inf", "1e400", "9" * 20, "/dev/null"):
                tried += 1
                assert not _python(_refusal(parser, action, value)), (words, value)
    assert tried > 80


_FOLDER = Path(__file__).parents[2] / "examples"
_READERS = [
    ("agent", "--check", "--state"),
    ("control-plane", "--check"),
    ("inject", "--file", str(_FOLDER / "pods.yaml"), "--config"),
    ("inject", "--file"),
    ("intercept", "apply", "-f"),
    ("intercept", "remove", "-f"),
    ("netpol", "explain", "a/b", "c/d", "80", "--objects"),
    ("netpol", "run", "--kubeconfig"),
    ("policy", "check"),
    ("proxy", "--validate", "--bootstrap"),
    ("simulate", "--file"),
    ("status", "--file"),
    ("workloads", "--file"),
]
#: No file of any kind that a command reads.
_BYTES = {"binary": b"\x97\xff\x00", "list": b"- 1\n- two\n"}


@pytest.mark.parametrize("kind", [*_BYTES, "folder"])
@pytest.mark.parametrize("command", _READERS, ids=" ".join)
def test_a_file_that_is_no_such_file_is_told_in_words(command: tuple[str, ...], kind: str, tmp_path: Path) -> None:
    path = tmp_path / "given.yaml"
    if kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(_BYTES[kind])
    done = ztunnel(*command, str(tmp_path if command[:2] == ("netpol", "explain") else path))
    if (kind, command[0]) == ("folder", "policy"):  # reads the files in the folder, which is empty
        assert done.returncode == 0
    else:
        assert done.returncode in (1, 2)
        assert done.stderr
    assert not _python(done.stderr)


def test_a_valid_environment_says_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDS_ADDRESS", "https://istiod:15012")
    monkeypatch.setenv("ZTUNEL_SPIN_US", "5")
    done = ztunnel("proxy", "--validate")
    assert done.returncode == 0
    assert "ZTUNEL_SPIN_US is not known; did you mean ZTUNNEL_SPIN_US?" in done.stderr
    assert "configuration is valid: control plane https://istiod:15012" in done.stderr


_GARBAGE = "-----BEGIN CERTIFICATE-----\nYQ==\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("name", ["XDS_ROOT_CA", "CA_ROOT_CA", "CRL_PATH"])
@pytest.mark.parametrize("content", [b"nothing", _GARBAGE.encode(), None], ids=["text", "garbage", "folder"])
def test_a_file_of_tls_that_cannot_be_used_is_a_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, content: bytes | None
) -> None:
    path = tmp_path / "file.pem"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    monkeypatch.setenv(name, str(path))
    done = ztunnel("proxy", "--validate")
    assert done.returncode == 1
    [fault] = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert fault.startswith(f"Error: {name}: ")
    assert str(path) in fault
    assert "valid" not in fault
    assert not _python(done.stderr)


def test_a_file_of_tls_that_is_used_is_told_and_one_that_is_not_there_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NODE_NAME", "w1")
    good = tmp_path / "root.pem"
    good.write_bytes(Authority().pem)
    monkeypatch.setenv("XDS_ROOT_CA", str(good))
    monkeypatch.setenv("CA_ROOT_CA", str(tmp_path / "later.pem"))
    monkeypatch.setenv("CRL_PATH", str(tmp_path / "crl.pem"))
    done = ztunnel("proxy", "--validate")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        f"Warning: CA_ROOT_CA: {tmp_path}/later.pem: not there, and not checked",
        f"Warning: CRL_PATH: {tmp_path}/crl.pem: not there, and not checked",
        "configuration is valid: control plane https://localhost:15012, certificates from "
        "https://localhost:15012, TLS contexts 1, warnings 2",
    ]


def test_the_default_root_that_is_not_there_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NODE_NAME", "w1")
    done = ztunnel("proxy", "--validate")
    assert done.returncode == 0
    assert done.stderr.splitlines()[:2] == [
        f"Warning: {name}: ./var/run/secrets/istio/root-cert.pem (the default): not there, and not checked"
        for name in ("XDS_ROOT_CA", "CA_ROOT_CA")
    ]
    assert done.stderr.endswith("warnings 2\n")


def test_every_fault_of_the_files_is_listed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("NODE_NAME", "w1")
    for name in ("XDS_ROOT_CA", "CA_ROOT_CA", "CRL_PATH", "LOCAL_XDS_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    done = ztunnel("proxy", "--validate")
    assert done.returncode == 1
    assert [line.split(":")[1].strip() for line in done.stderr.splitlines()] == [
        *("XDS_ROOT_CA", "CA_ROOT_CA", "CRL_PATH"),
        str(tmp_path),
    ]


def test_a_local_file_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "mesh.yaml"
    monkeypatch.setenv("LOCAL_XDS_PATH", str(path))
    done = ztunnel("proxy", "--validate")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"Error: {path}: cannot be read: No such file or directory"
    path.write_text("workloads: [{colour: red}]\n")
    done = ztunnel("proxy", "--validate")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"Error: {path}: workloads[0]")
    path.write_text((Path(__file__).parents[2] / "examples/local.yaml").read_text())
    done = ztunnel("proxy", "--validate")
    assert done.returncode == 0
    assert f"local file {path} (workloads 2, services 1, policies 1)" in done.stderr


def test_a_valid_bootstrap_says_what_was_checked(tmp_path: Path) -> None:
    path = tmp_path / "bootstrap.yaml"
    path.write_text("static_resources: {clusters: [{name: a}, {name: b}]}\n")
    done = ztunnel("proxy", "--bootstrap", str(path), "--validate")
    assert (done.returncode, done.stderr) == (0, "configuration is valid: 2 resources, 0 TLS contexts\n")


def test_a_variable_that_is_nearly_one_of_envoys_dialect_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "bootstrap.yaml"
    path.write_text("static_resources: {}\n")
    monkeypatch.setenv("ZTUNEL_TUNNEL_SOURCE", "envoy")
    done = ztunnel("proxy", "--bootstrap", str(path), "--validate")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "Warning: environment variable ZTUNEL_TUNNEL_SOURCE is not known; did you mean ZTUNNEL_TUNNEL_SOURCE?",
        "configuration is valid: 0 resources, 0 TLS contexts",
    ]


def test_the_proxy_reports_every_fault_of_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXY_MODE", "neither")
    monkeypatch.setenv("RUST_LOG", "loud")
    done = ztunnel("proxy")
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "Error: invalid env var PROXY_MODE=neither (must be one of shared, dedicated)",
        "Error: invalid env var RUST_LOG=loud (loud is neither a level nor target=level)",
    ]


def test_the_help_groups_every_command_once() -> None:
    grouped = [name for names in GROUPS.values() for name in names]
    added = [name for names in COMMANDS.values() for name in names]
    assert sorted(grouped) == sorted([*added, "proxy", "version"])


def test_kubectls_plugin_has_its_name_and_completes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["/usr/bin/kubectl-ztunnel", "help"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("usage: kubectl ztunnel COMMAND")
    with pytest.raises(SystemExit):
        main(["status", "--help"])
    assert capsys.readouterr().out.startswith("usage: kubectl ztunnel status [-h]")
    monkeypatch.setattr("sys.argv", ["kubectl_complete-ztunnel", "conn"])
    assert complete_for_kubectl() == 0
    assert capsys.readouterr().out == "connections\n:0\n"
