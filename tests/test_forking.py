"""Forked workers run every test once, and report what happens in them as one process would."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import forking
from tests.forking import Units
from tests.limits import WAIT_S

ROOT = Path(__file__).parents[1]
NODE_IDS = ["a.py::x", "b.py::x", "b.py::y", "tests/netns/c.py::x", "b.py::z"]
NAMES = ["a", "b", "b", "c", "b"]


def test_a_worker_takes_units_of_its_kind_first_the_longest_before_others() -> None:
    units = Units(NAMES, NODE_IDS)
    assert [units.take(0), units.take(0), units.take(0), units.take(0)] == [[3], [1, 2, 4], [0], []]
    units = Units(NAMES, NODE_IDS)
    assert [units.take(1), units.take(1), units.take(1), units.take(1)] == [[1, 2, 4], [0], [3], []]


def test_the_rest_of_a_unit_whose_worker_died_is_taken_again() -> None:
    units = Units(NAMES, NODE_IDS)
    _, *rest = units.take(1)
    units.give_back(rest)
    assert units.take(1) == [2, 4]


def test_the_share_of_idle_time_is_that_since_the_last_call(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 1000 20 0 3 0 9 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n")
    cores = forking.IdleCores(stat)
    assert cores.share() == 0.0
    stat.write_text("cpu  150 5 65 1010 30 0 13 0 9 0\n")
    assert cores.share() == 0.2
    stat.write_text("cpu  150 5 65 1510 30 0 13 500 9 0\n")
    assert cores.share() == 0.5


def test_further_workers_are_started_while_cores_are_idle(tmp_path: Path) -> None:
    for number in range(4):
        tmp_path.joinpath(f"test_{number}.py").write_text(
            f"""
import os, time
from pathlib import Path

def test_waits_until_all_have_begun():
    Path({str(tmp_path)!r}, "begun-{number}").touch()
    deadline = time.monotonic() + {WAIT_S}
    while len(list(Path({str(tmp_path)!r}).glob("begun-*"))) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
"""
        )
    tmp_path.joinpath("conftest.py").write_text(
        "from tests import forking\nforking.IDLE_S, forking.IDLE_SHARE, forking.FURTHER = 0.0, -1.0, 2\n"
    )
    assert "4 passed" in run(tmp_path)


def run(folder: Path, *options: str) -> str:
    """Return the output of a run of the tests in a folder by three workers."""
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "--forks", "3"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "-ra", "COLUMNS": "200"}
    done = subprocess.run(
        [*command, *options, "--rootdir", str(folder), "-c", os.devnull, str(folder)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=WAIT_S,
    )
    return done.stdout


def test_outcomes_of_forked_workers_are_those_of_one_process(tmp_path: Path) -> None:
    tmp_path.joinpath("test_a.py").write_text(
        """
import os, pathlib, signal, time, warnings, pytest

@pytest.fixture(scope="session")
def shared():
    yield os.getpid()
    pathlib.Path(f"down-{os.getpid()}").touch()

def test_before(): pass
def test_fails(): print("printed before"); assert 1 == 2
def test_exits(shared): os._exit(3)
def test_is_killed(): os.kill(os.getpid(), signal.SIGKILL)
@pytest.mark.skip(reason="left out")
def test_skipped(): pass
@pytest.mark.xfail
def test_expected(): assert False
@pytest.mark.timeout(0.1)
def test_hangs():
    while True: time.sleep(1)
def test_warns(): warnings.warn("be warned")
@pytest.mark.parametrize("n", range(3))
def test_shares(shared, n): assert shared == os.getpid()
"""
    )
    tmp_path.joinpath("test_b.py").write_text(
        """
def test_other(shared_between=[]): pass
"""
    )
    shown = run(tmp_path)
    assert re.search(r"4 failed, 6 passed, 1 skipped, 1 xfailed, 1 warning in", shown), shown
    assert "printed before" in shown
    assert "UserWarning: be warned" in shown
    assert "FAILED test_a.py::test_exits - the worker process ended with status 3 while it ran this test" in shown
    assert "FAILED test_a.py::test_is_killed - the worker process ended with status -9" in shown
    assert "FAILED test_a.py::test_hangs - Failed: Timeout" in shown
    # By the worker that ended in order, once, after the tests that share the fixture.
    assert len(list(tmp_path.glob("down-*"))) == 1


def test_workers_tear_down_their_fixtures_when_the_first_failure_ends_the_run(tmp_path: Path) -> None:
    tmp_path.joinpath("test_a.py").write_text(
        """
import pathlib, time

def test_fails():
    while not pathlib.Path("up").exists(): time.sleep(0.01)
    assert False
"""
    )
    tmp_path.joinpath("test_b.py").write_text(
        """
import pathlib, time, pytest

@pytest.fixture(scope="session")
def shared():
    pathlib.Path("up").touch()
    yield
    pathlib.Path("down").touch()

def test_hangs(shared):
    while True: time.sleep(1)
"""
    )
    shown = run(tmp_path, "-x")
    assert re.search("^FAILED test_a.py::test_fails", shown, re.M), shown
    assert "1 failed in" in shown
    assert (tmp_path / "down").exists()


def test_a_worker_that_its_timeout_does_not_end_is_killed(tmp_path: Path) -> None:
    tmp_path.joinpath("test_a.py").write_text(
        """
import signal, time, pytest
from tests import forking

forking.SILENT_S = 0.5

@pytest.mark.timeout(0.1)
def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    time.sleep(600)

@pytest.mark.timeout(0.1)
def test_hangs_for_every_signal():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM, signal.SIGABRT])
    time.sleep(600)

def test_after(): pass
"""
    )
    shown = run(tmp_path)
    assert "2 failed, 1 passed in" in shown, shown
    assert "FAILED test_a.py::test_hangs - the worker process ended with status -6" in shown
    assert "FAILED test_a.py::test_hangs_for_every_signal - the worker process ended with status -9" in shown
    assert 'test_a.py", line 10 in test_hangs' in shown


def test_a_run_that_is_terminated_names_failures_and_the_tests_that_ran(tmp_path: Path) -> None:
    tmp_path.joinpath("test_a.py").write_text(
        """
import os, pathlib, signal, time

def test_fails(): assert 1 == 2

def test_hangs():
    os.kill(os.getppid(), signal.SIGTERM)
    while True: time.sleep(1)
"""
    )
    shown = run(tmp_path)
    assert re.search("Interrupted: terminated; these tests ran:\n *test_a.py::test_hangs for [0-9]+", shown), shown
    assert "FAILED test_a.py::test_fails - assert 1 == 2" in shown


def test_errors_of_collection_are_reported_without_a_worker(tmp_path: Path) -> None:
    tmp_path.joinpath("test_a.py").write_text("import nothing_of_this_name")
    assert "1 error in" in run(tmp_path)


def test_files_without_bytecode_are_compiled_from_the_last_to_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.syspath_prepend(tmp_path)
    files = [tmp_path / "ahead" / f"test_{number}.py" for number in range(4)]
    caches = [file.parent / "__pycache__" / f"{file.stem}.cpython-311-pytest-0.pyc" for file in files]
    caches[1].parent.mkdir(parents=True)
    caches[2].touch()
    for file in files:
        file.write_text(f"open({str(file.with_suffix('.imported'))!r}, 'w').close()")
    with forking.compiled_ahead(files):
        deadline = time.monotonic() + WAIT_S
        while not files[0].with_suffix(".imported").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert [file.with_suffix(".imported").exists() for file in files] == [True, True, False, True]


def test_nothing_is_compiled_ahead_if_the_last_file_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forked"))
    file = tmp_path / "test_a.py"
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "test_a.cpython-311-pytest-0.pyc").touch()
    with forking.compiled_ahead([file]), forking.compiled_ahead([]):
        pass
