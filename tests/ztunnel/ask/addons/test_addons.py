"""The commands about addons: new, check, and the list of a running proxy."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ztunnel.cli import main


def test_new_writes_an_addon_whose_test_passes_and_which_has_no_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["addon", "new", "closed-door", "-C", str(tmp_path)]) == 0
    tests = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_closed_door.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "2 passed" in tests.stdout, tests.stdout
    assert main(["addon", "check", str(tmp_path / "closed_door.py")]) == 0
    out = capsys.readouterr().out
    assert "addon closed-door: hooks configured, connecting, sha256:" in out
    assert "connecting    median " in out
    assert main(["addon", "new", "closed-door", "-C", str(tmp_path)]) == 1
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["Upper", "a--b", "../x", ""])
def test_new_refuses_other_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["addon", "new", name]) == 2


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("class A:\n  def connecting(self, facts: int): pass", "connecting takes Facts, not int"),
        ("class A:\n  def accepting(self, facts) -> bool: return None", "accepting cannot return bool"),
        (
            "class A:\n  def accepting(self, facts): return True",
            "its hook accepting returned a value of type bool",
        ),
        ("class A:\n  def opened(self, facts): 1 / 0", "its hook opened raised"),
        ("class A:\n  def done(self): 1 / 0", "its hook done raised"),
        ("class A:\n  def done(self): exit(3)", "its hook done raised"),
        ("class A:\n  def opened(self, facts): exit(3)", "its hook opened raised"),
        (
            "import time\nclass A:\n  budget_us = 1\n  def opened(self, facts): time.sleep(1e-5)",
            "its budget of 1 us",
        ),
        ("class A(:", "SyntaxError"),
    ],
)
def test_check_names_what_is_wrong(
    tmp_path: Path, text: str, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.py").write_text(text)
    assert main(["addon", "check", "--no-mypy", str(tmp_path / "a.py")]) == 1
    assert fault in capsys.readouterr().err


def test_check_runs_mypy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.py").write_text(
        "from ztunnel.addons import Facts\n\n"
        "class A:\n    def opened(self, facts: Facts) -> None:\n        print(facts.no_such_fact)\n"
    )
    assert main(["addon", "check", str(tmp_path / "a.py")]) == 1
    assert '"Facts" has no attribute "no_such_fact"' in capsys.readouterr().err


def test_check_takes_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["addon", "new", "door", "-C", str(tmp_path)]) == 0
    file = str(tmp_path / "door.py")
    assert main(["addon", "check", "--no-mypy", file, "--addon-option", "door.namespace=vault"]) == 0
    assert main(["addon", "check", "--no-mypy", file, "--addon-option", "door.namspace=vault"]) == 1
    assert "did you mean namespace?" in capsys.readouterr().err


def listed(**more: Any) -> dict[str, Any]:
    hook = {"calls": 4, "seconds": 8e-6, "overBudget": 1, "results": {"deny": 1, "none": 2, "timeout": 1}}
    entry: dict[str, Any] = {"name": "gate", "source": "/etc/gate.py", "sha256": "ab", "state": "active"}
    entry |= {"problem": "", "onError": "deny", "processes": 1, "calls": 4, "seconds": 8e-6}
    return {**entry, "denials": 1, "faults": 1, "hooks": {"connecting": hook}, **more}


@contextmanager
def serving(answer: object) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/addons"
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_list_has_calls_time_denials_and_faults(capsys: pytest.CaptureFixture[str]) -> None:
    with serving([listed()]) as address:
        assert main(["addons", "--address", address]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert lines[1] == ["gate", "-", "4", "2.0us", "1", "1", "1", "active"]
        assert lines[2] == ["-", "connecting", "4", "2.0us", "1", "1", "1", "-"]
        assert main(["addons", "-o", "json", "--address", address]) == 0
        (item,) = json.loads(capsys.readouterr().out)["items"]
        assert (item["name"], item["calls"], item["denials"], item["overBudget"]) == ("gate", 4, 1, 1)
        assert item["hooks"][0]["results"] == {"deny": 1, "none": 2, "timeout": 1}


def test_a_suspended_addon_is_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with serving([listed(state="suspended: it raised", problem="a.py: SyntaxError")]) as address:
        assert main(["addons", "--address", address]) == 1
    assert "suspended: it raised; its changed file is not used: a.py: SyntaxError" in capsys.readouterr().out
    with serving([]) as address:
        assert main(["addons", "--address", address]) == 0
    assert "No addons found." in capsys.readouterr().out
