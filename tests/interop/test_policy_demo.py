"""Application policy with a real Envoy: the demo, whose expectations are the assertions."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.interop.proxies import ENVOY

LIMIT_S = 120.0
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.interop
@pytest.mark.skipif(not ENVOY.exists(), reason="NOT TESTED: no Envoy here")
def test_the_policy_demo_comes_out_as_expected() -> None:
    command = [sys.executable, "-m", "deploy.demo", "--mode", "policy"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FAIL" not in done.stdout
    assert "Everything came out as expected." in done.stdout
