"""The gate opens once there is a listener in the pod, and prints the reason while it waits."""

import contextlib
import socket

import pytest

from ztunnel.sidecar.inject.gate import wait


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.waits: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.waits.append(seconds)
        self.now_s += seconds


@contextlib.contextmanager
def reserved() -> "contextlib.AbstractContextManager[int]":  # type: ignore[misc]
    """Hold a port at which nothing listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_it_opens_for_a_listener_of_either_family(address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    lines: list[str] = []
    with socket.create_server((address, 0), family=family) as server:
        assert wait(0, port=server.getsockname()[1], say=lines.append) == 0
    assert "are in this pod" in lines[-1]


def test_the_gate_opens_when_the_listener_appears() -> None:
    clock = Clock()
    with contextlib.ExitStack() as stack, socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))

        def sleep(seconds: float) -> None:
            clock.sleep(seconds)
            if clock.now_s > 3:
                server.listen()

        port = server.getsockname()[1]
        assert wait(60, port=port, say=lambda _: None, monotonic=clock.monotonic, sleep=sleep) == 0
        stack.close()
    assert 3 < clock.now_s < 4
    assert clock.waits[:3] == [0.05, 0.1, 0.2]
    assert max(clock.waits) == 0.5


@pytest.mark.parametrize(("fail_open", "status"), [(False, 1), (True, 0)])
def test_the_gate_gives_up_after_its_timeout(fail_open: bool, status: int) -> None:
    clock = Clock()
    lines: list[str] = []
    with reserved() as port:
        done = wait(
            12, fail_open=fail_open, port=port, say=lines.append, monotonic=clock.monotonic, sleep=clock.sleep
        )
    assert done == status
    assert clock.now_s == pytest.approx(12, abs=0.01)
    assert "Connection refused" in lines[0]
    assert sum("waiting for the mesh" in line for line in lines) == 3
    assert ("OUTSIDE" in lines[-1]) is fail_open
