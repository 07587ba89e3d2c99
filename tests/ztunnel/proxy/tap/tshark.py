"""Wireshark's own reader, where it is installed: what it finds in a capture."""

import shutil
import subprocess

import pytest

needs_tshark = pytest.mark.skipif(
    shutil.which("tshark") is None, reason="NOT TESTED: tshark is not installed (package tshark)"
)


def tshark(capture: bytes, *arguments: str) -> str:
    """Return tshark's output for a capture. Fail if the file is faulty."""
    options = ("-o", "tcp.check_checksum:TRUE", "-o", "ip.check_checksum:TRUE")
    done = subprocess.run(
        ["tshark", "-n", "-r", "-", *options, *arguments], input=capture, capture_output=True, timeout=120
    )
    # Run by root it says on standard error that it should not be.
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def complaints(capture: bytes) -> list[str]:
    """Return tshark's expert infos of level warning or error, and of checksums."""
    shown = tshark(
        capture,
        "-Y",
        '_ws.expert.severity >= "Warning" || tcp.checksum.status != "Good"',
        *("-T", "fields", "-e", "frame.number", "-e", "_ws.expert.message", "-e", "tcp.checksum.status"),
    )
    return shown.splitlines()
