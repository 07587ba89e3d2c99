"""The common part of commands that serve: the stop, the address of a flag, the server of metrics."""

import asyncio
import os
import signal
import urllib.error
import urllib.request

import pytest

from xds.model.address import SocketAddress
from ztunnel.runtime.console.serving import bound_address, failed, metrics_server, stop_event, until_signal
from ztunnel.runtime.http.exposition import family


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_block_and_what_follows_runs(number: int) -> None:
    async def main() -> str:
        with until_signal():
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), number)
            await asyncio.Event().wait()
        await asyncio.sleep(0)  # the task is not cancelled any more
        return "after"

    assert asyncio.run(main()) == "after"


def test_another_cancellation_passes() -> None:
    async def main() -> None:
        with until_signal():
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())


def test_a_signal_sets_the_event() -> None:
    async def main() -> None:
        stop = stop_event()
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(20):
            await stop.wait()

    asyncio.run(main())


def test_the_address_of_a_flag() -> None:
    assert bound_address(None) is None
    assert bound_address("9090") == SocketAddress("0.0.0.0", 9090)
    assert bound_address("9090", host="127.0.0.1") == SocketAddress("127.0.0.1", 9090)
    assert bound_address("[::1]:9090") == SocketAddress("::1", 9090)
    with pytest.raises(ValueError, match=r"^--metrics: 'x' is neither a port nor ip:port$"):
        bound_address("x", "--metrics")
    with pytest.raises(ValueError, match=r"^'x' is neither"):
        bound_address("x")


def test_a_failure_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert failed("agent", FileNotFoundError(2, "No such file or directory", "/x")) == 1
    assert failed("agent", "needs more", 2) == 2
    assert capsys.readouterr().err == "ztunnel agent: /x: no such file or directory\nztunnel agent: needs more\n"


@pytest.mark.parametrize("awaited", [False, True])
def test_metrics_are_on_their_path_alone(*, awaited: bool) -> None:
    def made() -> list[object]:
        return [family("served", "gauge", "What is served", [((), 3.0)], ())]

    async def made_later() -> list[object]:
        await asyncio.sleep(0)
        return made()

    def asked(port: int) -> str:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=20)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as page:
            return str(page.read().decode())

    async def main() -> str:
        families = made_later if awaited else made
        async with metrics_server(SocketAddress("127.0.0.1", 0), families) as server:  # type: ignore[arg-type]
            return await asyncio.to_thread(asked, server.address.port)

    assert "served 3.0" in asyncio.run(main())


def test_readiness_is_beside_the_metrics_if_it_is_given() -> None:
    reasons = ["the table has not been applied yet", ""]

    def asked(port: int) -> list[tuple[int, str]]:
        found = []
        for path in ("/readyz", "/readyz", "/healthz"):
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=20) as page:
                    found.append((page.status, page.read().decode()))
            except urllib.error.HTTPError as error:
                found.append((error.code, error.read().decode()))
        return found

    async def main() -> list[tuple[int, str]]:
        address = SocketAddress("127.0.0.1", 0)
        async with metrics_server(address, list, lambda: reasons.pop(0)) as server:
            return await asyncio.to_thread(asked, server.address.port)

    assert asyncio.run(main()) == [
        (503, "the table has not been applied yet\n"),
        (200, "ready\n"),
        (200, "ok\n"),
    ]
