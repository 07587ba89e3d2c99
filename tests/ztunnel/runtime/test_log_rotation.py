"""The signals of log rotation."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest
import uvloop

from ztunnel.runtime.log_rotation import reopen_on_rotation


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_sigusr1_reopens_and_sighup_changes_nothing(run: object) -> None:
    reopened = 0

    async def main() -> None:
        def reopen() -> None:
            nonlocal reopened
            reopened += 1

        reopen_on_rotation(reopen)
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR1):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.02)

    run(main())  # type: ignore[operator]  # either of the two
    assert reopened == 2


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGHUP"])
def test_process_that_ignores_rotation_survives_its_signals(name: str) -> None:
    script = (
        "import os, signal; from ztunnel.runtime.log_rotation import ignore_rotation; ignore_rotation(); "
        f"os.kill(os.getpid(), signal.{name}); print('lives')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "lives\n"
