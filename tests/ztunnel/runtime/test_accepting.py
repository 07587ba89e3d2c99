"""Listening sockets, over loopback: the accepted connections, and replacement without effect for clients."""

import asyncio
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest
import uvloop

from hbone.aio.poller import Poller
from tproxy.aio import sockets
from xds.model.address import SocketAddress
from ztunnel.runtime import accepting
from ztunnel.runtime.accepting import ListeningSocket
from ztunnel.runtime.predecessor_ports import PredecessorPorts

HOST = "127.0.0.1"
GENERATIONS = 30


class Server:
    """Answers each connection with its own name, and ends it."""

    def __init__(
        self,
        poller: Poller,
        port: int,
        name: bytes,
        *,
        reuse_port: bool = True,
        kind: type[socket.socket] = socket.socket,
    ) -> None:
        sock = kind(fileno=sockets.listen(HOST, port, reuse_port=reuse_port, backlog=0).detach())
        self.port: int = sock.getsockname()[1]
        self.count = 0
        self._name = name
        self.listening = ListeningSocket(sock, SocketAddress(HOST, self.port), 128, poller)
        self.listening.start(self.take)

    def take(self, client: socket.SocketType, peer: tuple[str, int]) -> None:
        with closing(client):
            self.count += 1
            client.send(self._name)


@contextmanager
def poller() -> Iterator[Poller]:
    with closing(Poller()) as found:
        yield found


def ask(port: int) -> bytes:
    with socket.create_connection((HOST, port), timeout=5) as sock:
        return sock.recv(10)


class Failing(socket.socket):
    """Its next calls of ``accept`` report errors that the network had for connections not yet accepted."""

    errors: tuple[int, ...] = ()

    def _accept(self) -> tuple[int, tuple[str, int]]:
        if self.errors:
            number, *rest = self.errors
            self.errors = tuple(rest)
            raise OSError(number, os.strerror(number))
        found: tuple[int, tuple[str, int]] = super()._accept()  # type: ignore[misc]
        return found


@pytest.mark.parametrize(
    "name",
    [
        "ENETDOWN",
        "EPROTO",
        "ENOPROTOOPT",
        "EHOSTDOWN",
        "ENONET",
        "EHOSTUNREACH",
        "EOPNOTSUPP",
        "ENETUNREACH",
        "ECONNABORTED",
        "EPERM",
        "EACCES",
    ],
)
@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_an_error_of_one_connection_leaves_the_others_accepted(run: Callable[..., None], name: str) -> None:
    """The epoll is edge-triggered: a connection that is not accepted now waits for the next one."""

    async def main() -> None:
        with poller() as shared:
            server = Server(shared, 0, b"a", kind=Failing)
            assert isinstance(server.listening.sock, Failing)
            server.listening.sock.errors = (getattr(errno, name),) * 3
            answers = await asyncio.gather(*(asyncio.to_thread(ask, server.port) for _ in range(5)))
            assert answers == [b"a"] * 5
            assert server.listening.sock.errors == ()
            server.listening.close()

    run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_an_error_that_no_list_knows_is_logged_and_accepting_goes_on(
    run: Callable[..., None], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "_PAUSE_S", 0.05)

    async def main() -> None:
        with poller() as shared:
            server = Server(shared, 0, b"a", kind=Failing)
            assert isinstance(server.listening.sock, Failing)
            server.listening.sock.errors = (errno.ENOSYS,)
            assert await asyncio.to_thread(ask, server.port) == b"a"
            server.listening.close()

    run(main())
    assert "Function not implemented; waiting 0.05 s" in caplog.text


def test_what_is_connected_is_accepted_before_the_end() -> None:
    async def main() -> None:
        with poller() as shared:
            server = Server(shared, 0, b"a")
            waiting = [socket.create_connection((HOST, server.port), timeout=5) for _ in range(100)]
            server.listening.accept_queued()
            server.listening.close()
            assert server.count == 100
            for sock in waiting:
                with sock:
                    assert sock.recv(10) == b"a"

    asyncio.run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_queued_connections_are_accepted_when_descriptors_are_free_again(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accepting, "_PAUSE_S", 0.05)

    async def main() -> None:
        with poller() as shared:
            server = Server(shared, 0, b"a", reuse_port=False, kind=Failing)
            assert isinstance(server.listening.sock, Failing)
            waiting = [socket.create_connection((HOST, server.port), timeout=5) for _ in range(3)]
            server.listening.sock.errors = (errno.EMFILE,) * 3
            await accepting.hand_over([server.listening])
            server.listening.close()
            assert server.count == 3
            for sock in waiting:
                with sock:
                    assert sock.recv(10) == b"a"

    run(main())


def test_a_hand_over_without_free_descriptors_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "_PAUSE_S", 0.01)
    monkeypatch.setattr(accepting, "_QUEUED_S", 0.05)

    async def main() -> None:
        with poller() as shared:
            server = Server(shared, 0, b"a", reuse_port=False, kind=Failing)
            assert isinstance(server.listening.sock, Failing)
            server.listening.sock.errors = (errno.EMFILE,) * 10_000
            with socket.create_connection((HOST, server.port), timeout=5):
                await accepting.hand_over([server.listening])
                server.listening.close()
            assert server.count == 0

    asyncio.run(main())


class Undirected(socket.socket):
    """A socket whose port cannot be given to one process."""

    def setsockopt(self, *arguments: Any) -> None:
        if arguments[:2] == (socket.SOL_SOCKET, sockets._SO_ATTACH_REUSEPORT_CBPF):
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        super().setsockopt(*arguments)


def test_a_hand_over_continues_if_the_kernel_cannot_direct_connections(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with poller() as shared:
            server = Server(shared, 0, b"a", kind=Undirected)
            with socket.create_connection((HOST, server.port), timeout=5) as sock:
                await accepting.hand_over([server.listening])
                server.listening.close()
                assert sock.recv(10) == b"a"
            ports = PredecessorPorts()
            ports.begin()
            with Undirected() as other:
                ports.listening(other)
            ports.take()

    asyncio.run(main())
    assert caplog.text.count("new connections of a port go to both of its processes") == 2
    assert "Cannot allocate memory" in caplog.text


def test_new_connections_go_to_the_successor_on_the_same_port() -> None:
    async def main() -> None:
        with poller() as shared:
            old = Server(shared, 0, b"old")
            new = Server(shared, old.port, b"new")
            assert old.listening.leave_to_successor()
            answers = [await asyncio.to_thread(ask, old.port) for _ in range(30)]
            assert answers == [b"new"] * 30
            old.listening.close()
            assert await asyncio.to_thread(ask, old.port) == b"new"
            new.listening.close()

    asyncio.run(main())


def test_new_connections_stay_with_the_predecessor_until_they_are_taken() -> None:
    async def main() -> None:
        with poller() as shared:
            ports = PredecessorPorts()
            ports.begin()
            old = Server(shared, 0, b"old")
            ports.listening(old.listening.sock)
            ports.take()
            ports.begin()
            new = Server(shared, old.port, b"new")
            ports.listening(new.listening.sock)
            assert [await asyncio.to_thread(ask, old.port) for _ in range(30)] == [b"old"] * 30
            ports.take()
            ports.take()
            assert [await asyncio.to_thread(ask, old.port) for _ in range(30)] == [b"new"] * 30
            old.listening.close()
            assert await asyncio.to_thread(ask, old.port) == b"new"
            new.listening.close()

    asyncio.run(main())


def test_a_successor_takes_the_ports_that_a_crashed_one_left_to_the_predecessor() -> None:
    """The kernel keeps the choice of a process that is gone. The next one can listen on a port of a pod before or
    after it takes connections.
    """

    async def main(taken_first: bool) -> None:
        with poller() as shared:
            old = Server(shared, 0, b"old")
            crashed = Server(shared, old.port, b"new")
            ports = PredecessorPorts()
            ports.begin()
            ports.listening(crashed.listening.sock)
            crashed.listening.close()
            ports = PredecessorPorts()
            ports.begin()
            if taken_first:
                ports.take()
            new = Server(shared, old.port, b"new")
            ports.listening(new.listening.sock)
            ports.take()
            assert [await asyncio.to_thread(ask, old.port) for _ in range(30)] == [b"new"] * 30
            old.listening.close()
            new.listening.close()

    for taken_first in (False, True):
        asyncio.run(main(taken_first))


@pytest.mark.parametrize("first", ["old", "new"])
def test_connections_come_to_the_process_that_is_left(first: str) -> None:
    async def main() -> None:
        with poller() as shared:
            ports = PredecessorPorts()
            ports.begin()
            servers = {"old": Server(shared, 0, b"old")}
            servers["new"] = Server(shared, servers["old"].port, b"new")
            ports.listening(servers["new"].listening.sock)
            servers.pop(first).listening.close()
            ((name, left),) = servers.items()
            assert [await asyncio.to_thread(ask, left.port) for _ in range(10)] == [name.encode()] * 10
            ports.take()
            assert await asyncio.to_thread(ask, left.port) == name.encode()
            left.listening.close()

    asyncio.run(main())


def test_without_a_successor_connections_are_still_accepted_here() -> None:
    async def main() -> None:
        with poller() as shared:
            alone = Server(shared, 0, b"alone")
            assert alone.listening.leave_to_successor()
            assert await asyncio.to_thread(ask, alone.port) == b"alone"
            alone.listening.close()

    asyncio.run(main())


def test_a_port_that_is_not_shared_cannot_be_left() -> None:
    async def main() -> None:
        with poller() as shared:
            server = Server(shared, 0, b"x", reuse_port=False)
            assert not server.listening.leave_to_successor()
            assert await asyncio.to_thread(ask, server.port) == b"x"
            server.listening.close()

    asyncio.run(main())


def test_no_connection_is_refused_when_a_successor_takes_the_port() -> None:
    """Closing a listener resets its queued connections. A client that connects all the time would be affected."""

    async def main() -> None:
        faults: list[str] = []
        answers: set[bytes] = set()
        stopped = threading.Event()

        def ask_on(port: int) -> None:
            while not stopped.is_set():
                try:
                    answers.add(ask(port))
                except OSError as error:
                    faults.append(str(error))

        with poller() as shared:
            server = Server(shared, 0, b"0")
            port = server.port
            callers = [threading.Thread(target=ask_on, args=(port,)) for _ in range(2)]
            for caller in callers:
                caller.start()
            for number in range(1, GENERATIONS):
                while not server.count:
                    await asyncio.sleep(0)
                old, server = server, Server(shared, port, str(number).encode())
                old.listening.leave_to_successor()
                while not server.count:  # until connections to the old process have been handled
                    await asyncio.sleep(0)
                old.listening.accept_queued()
                old.listening.close()
            stopped.set()
            for caller in callers:
                await asyncio.to_thread(caller.join)
            server.listening.close()
        assert faults == []
        assert answers == {str(number).encode() for number in range(GENERATIONS)}

    asyncio.run(main())


class Sharing:
    """A process that accepts from the same socket as others."""

    def __init__(self, sock: socket.socket, poller: Poller, name: bytes) -> None:
        self.ours = True
        self.asked = 0
        self._name = name
        port: int = sock.getsockname()[1]
        self.listening = ListeningSocket(sock.dup(), SocketAddress(HOST, port), 128, poller, is_ours=self._is_ours)
        self.listening.start(self.take)

    def _is_ours(self) -> bool:
        self.asked += 1
        return self.ours

    def take(self, client: socket.SocketType, peer: tuple[str, int]) -> None:
        with closing(client):
            client.send(self._name)


def test_a_shared_socket_gives_each_connection_to_whose_turn_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accepting, "_COURTESY_S", 60.0)  # on a busy machine a process can be late for its turn

    async def main() -> None:
        with sockets.listen(HOST, 0) as sock, closing(Poller()) as one, closing(Poller()) as other:
            a, b = Sharing(sock, one, b"a"), Sharing(sock, other, b"b")
            for turn in (b"a", b"b", b"b", b"a"):
                a.ours, b.ours = turn == b"a", turn == b"b"
                assert await asyncio.to_thread(ask, sock.getsockname()[1]) == turn
            a.listening.close()
            b.listening.close()

    asyncio.run(main())


def test_connections_of_a_shared_socket_are_taken_out_of_turn() -> None:
    async def main() -> None:
        with sockets.listen(HOST, 0) as sock, closing(Poller()) as one, closing(Poller()) as other:
            port: int = sock.getsockname()[1]
            a, b = Sharing(sock, one, b"a"), Sharing(sock, other, b"b")
            a.ours = b.ours = False
            answers = [await asyncio.to_thread(ask, port) for _ in range(20)]
            assert set(answers) <= {b"a", b"b"}
            assert len(answers) == 20
            # The remaining process accepts all connections, including simultaneous ones.
            b.listening.close()
            waiting = [socket.create_connection((HOST, port), timeout=5) for _ in range(50)]
            for client in waiting:
                with client:
                    assert await asyncio.to_thread(client.recv, 10) == b"a"
            a.listening.close()

    asyncio.run(main())


def test_a_connection_that_is_not_taken_does_not_hold_up_the_next() -> None:
    async def main() -> None:
        with poller() as polled:
            server = Server(polled, 0, b"here")

            def fail_once(client: socket.socket, peer: tuple[str, int]) -> None:
                server.listening.start(server.take)
                raise MemoryError

            server.listening.start(fail_once)
            # Both are queued before the loop runs, so that one event reports them.
            clients = [socket.create_connection((HOST, server.port), timeout=5) for _ in range(2)]
            try:
                answers = [await asyncio.to_thread(client.recv, 10) for client in clients]
            finally:
                for client in clients:
                    client.close()
            assert answers == [b"", b"here"]
            server.listening.close()

    uvloop.run(main())


class Shut:
    """A gate that a test opens."""

    def __init__(self) -> None:
        self.open = False
        self.asked = 0
        self.numbers: list[int] = []

    def admits(self) -> bool:
        self.asked += 1
        return self.open

    def accepted(self, number: int) -> None:
        self.numbers.append(number)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_gate_keeps_connections_in_the_queue(run: Callable[..., None]) -> None:
    async def main() -> None:
        with poller() as shared, sockets.listen(HOST, 0, backlog=0) as sock:
            gate, taken = Shut(), asyncio.Event()
            port: int = sock.getsockname()[1]
            listening = ListeningSocket(sock.dup(), SocketAddress(HOST, port), 128, shared, gate=gate)

            def take(client: socket.socket, peer: tuple[str, int]) -> None:
                client.close()
                taken.set()

            listening.start(take)
            with ExitStack() as clients:
                for _ in range(2):
                    clients.enter_context(socket.create_connection((HOST, port)))
                while not gate.asked:
                    await asyncio.sleep(0)
                assert not taken.is_set()
                listening.accept_queued()  # at the end, when the alternative is a reset
                assert taken.is_set()
                assert gate.numbers == []
                gate.open = True
                taken.clear()
                clients.enter_context(socket.create_connection((HOST, port)))
                async with asyncio.timeout(30):
                    await taken.wait()
                assert len(gate.numbers) == 1
                listening.close()

    run(main())
