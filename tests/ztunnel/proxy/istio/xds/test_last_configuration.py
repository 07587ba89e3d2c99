"""The configuration that a proxy under a holder leaves to the next one."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import msgspec
import pytest

from tproxy.aio import held_sockets
from xds.model.identity import SpiffeId
from xds.model.mesh import Mesh
from xds.proto.istio.workload import workload_pb2
from xds.proto.well_known import Any as AnyMessage
from xds.protocol.client_state import ISTIO, ClientOptions
from xds.protocol.delta import DeltaClient
from xds.protocol.resource import Resource, Update
from ztunnel.proxy.identity.csr import IdentityError, IssuedCertificate
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.certificates.fake_ca import FakeCertificateAuthority
from ztunnel.proxy.istio.environment import config_from
from ztunnel.proxy.istio.xds.control import ControlPlane
from ztunnel.proxy.istio.xds.last_configuration import NAME, SCHEMA, LastConfiguration, Saved
from ztunnel.runtime.clock import SystemClock

KIND, OTHER = "type.googleapis.com/istio.workload.Address", "type.googleapis.com/istio.security.Authorization"
WANTED = SpiffeId.parse("spiffe://td/ns/shop/sa/cart")


@pytest.fixture
def channel() -> Iterator[tuple[held_sockets.Holder, socket.socket]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = held_sockets.Holder(ours)
    yield made, theirs
    made.close()
    theirs.close()


def resource(name: str, version: str = "1", value: bytes = b"x") -> Resource:
    return Resource(name=name, version=version, body=AnyMessage(type_url=KIND, value=value), aliases=(f"@{name}",))


def update(*resources: Resource, removed: tuple[str, ...] = ()) -> Update:
    return Update(type_url=KIND, version="v", resources=resources, removed=removed)


def left(far: socket.socket) -> bytes:
    """Return the sealed memory of the last packet, as the next process reads it."""
    packet, (number,), _, _ = socket.recv_fds(far, 100, 1)
    assert packet == held_sockets.KEEP + b"memory/" + NAME.encode()
    with pytest.raises(PermissionError):
        os.write(number, b"more")
    with open(number, "rb") as memory:
        memory.seek(0)
        return memory.read()


def given(data: bytes | None) -> held_sockets.Holder:
    """Return a channel on which the process before has left ``data``."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made = held_sockets.Holder(ours)
    if data is not None:
        number = os.memfd_create("test")
        os.write(number, data)
        socket.send_fds(theirs, [held_sockets.HELD + b"memory/" + NAME.encode()], [number])
        os.close(number)
    theirs.send(held_sockets.END)
    assert made.take() == 0
    theirs.close()
    return made


def next_process(data: bytes | None, then: Callable[[LastConfiguration], None]) -> None:
    async def main() -> None:
        holder = given(data)
        last = LastConfiguration(holder, SystemClock())
        then(last)
        last.close()
        holder.close()

    asyncio.run(main())


def issued(lifetime: timedelta = timedelta(hours=1)) -> IssuedCertificate:
    authority = FakeCertificateAuthority(now=lambda: datetime.now(UTC), lifetime_s=lifetime.total_seconds())
    return asyncio.run(authority.issue(WANTED))


def test_saved_configuration_is_restored(
    channel: tuple[held_sockets.Holder, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ztunnel.proxy.istio.xds.last_configuration._CALM_S", 0.0)
    holder, far = channel
    certificate = issued()

    async def main() -> None:
        last = LastConfiguration(holder, SystemClock())
        assert last.update(KIND) is None
        last.note(update(resource("a"), resource("b"), resource("bad")), rejected=["bad"])
        last.note(update(resource("b", "2", b"y"), removed=("a", "bad")))
        last.note_certificate(WANTED, certificate)
        await asyncio.sleep(0.01)  # the timer of one writing for all changes
        last.close()

    asyncio.run(main())
    data = left(far)
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(1)

    def then(last: LastConfiguration) -> None:
        assert last.update(KIND) == Update(type_url=KIND, version="", resources=(resource("b", "2", b"y"),))
        assert last.update(OTHER) is None
        found = last.certificate(WANTED)
        assert found is not None
        assert found == certificate
        assert last.certificate(WANTED) is None  # the next answer is the authority's

    next_process(data, then)


@pytest.mark.parametrize(
    "data", [None, b"", b"rubbish", msgspec.msgpack.encode(Saved(SCHEMA + 1, {KIND: []}, []))]
)
def test_unreadable_saved_configuration_is_ignored(data: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    def then(last: LastConfiguration) -> None:
        assert last.update(KIND) is None
        assert last.certificate(WANTED) is None

    next_process(data, then)
    assert len(caplog.records) == (data is not None)


def test_an_expired_certificate_and_one_of_another_identity_are_not_restored(
    channel: tuple[held_sockets.Holder, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ztunnel.proxy.istio.xds.last_configuration._CALM_S", 0.0)
    holder, far = channel
    other = SpiffeId.parse("spiffe://td/ns/shop/sa/other")
    certificate = issued(timedelta(seconds=-5))

    async def main() -> None:
        last = LastConfiguration(holder, SystemClock())
        last.note_certificate(WANTED, certificate)
        last.note_certificate(other, certificate)
        await asyncio.sleep(0.01)
        last.close()

    asyncio.run(main())

    def then(last: LastConfiguration) -> None:
        assert last.certificate(WANTED) is None
        assert last.certificate(other) is None

    next_process(left(far), then)


def test_authority_is_asked_without_a_saved_certificate(
    channel: tuple[held_sockets.Holder, socket.socket],
) -> None:
    certificate = issued()
    holder, _ = channel

    class Once:
        asked = 0

        async def issue(self, identity: SpiffeId) -> IssuedCertificate:
            self.asked += 1
            if self.asked > 1:
                raise IdentityError("away")
            return certificate

    async def main() -> None:
        last = LastConfiguration(holder, SystemClock())
        before = last.before(Once())
        assert await before.issue(WANTED) is certificate
        with pytest.raises(IdentityError):  # certificates fetched by this process are not returned to itself
            await before.issue(WANTED)
        last.close()

    asyncio.run(main())


def test_the_first_request_lists_the_versions_of_the_process_before() -> None:
    from xds.proto.envoy.config.core.v3.core_pb2 import Node

    client = DeltaClient(ClientOptions(node=Node(id="n"), node_on_first_only=True, dialect=ISTIO))
    client.resume(KIND, {"a": "7"})
    client.want(KIND, None)
    client.stream_opened()
    (request,) = client.requests_to_send()
    assert dict(request.initial_resource_versions) == {"a": "7"}


def test_a_refused_resource_is_saved_without_a_version_unless_there_is_a_readable_one(
    channel: tuple[held_sockets.Holder, socket.socket],
) -> None:
    async def main() -> None:
        last = LastConfiguration(channel[0], SystemClock())
        last.note(update(resource("a"), resource("new")), rejected=["new"])
        last.note(update(resource("a", "2", b"unreadable"), resource("new", "2", b"y")), rejected=["a", "new"])
        saved = last.update(KIND)
        assert saved is not None
        assert saved.resources == (resource("a"), resource("new", "", b"y"))
        last.note(update(resource("new", "3", b"z")))
        saved = last.update(KIND)
        assert saved is not None
        assert saved.resources[1] == resource("new", "3", b"z")
        last.close()

    asyncio.run(main())


def test_a_process_started_from_saved_configuration_refuses_the_same_addresses() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        holder = held_sockets.Holder(ours)
        last = LastConfiguration(holder, SystemClock())
        new = workload_pb2.Workload(uid="new", namespace="shop", addresses=[b"\n\0\0\1"], tunnel_protocol=9)
        value = workload_pb2.Address(workload=new).SerializeToString()
        last.note(update(resource("new", value=value)), rejected=["new"])
        last.note(Update(type_url=OTHER, version="", resources=()))
        config = config_from({"XDS_ADDRESS": "unix:/nowhere/xds.sock"}, cpus=1, read_file=lambda path: None)
        mesh = Mesh(node="n")
        async with ControlPlane(config, mesh, Metrics("", 100), last):
            assert mesh.refused_at("", "10.0.0.1") is not None
        last.close()
        holder.close()
        theirs.close()

    asyncio.run(main())


def test_saved_resources_that_are_refused_now_are_requested_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        config = config_from({"XDS_ADDRESS": "unix:/nowhere/xds.sock"}, cpus=1, read_file=lambda path: None)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        holder = held_sockets.Holder(ours)
        last = LastConfiguration(holder, SystemClock())
        good = workload_pb2.Address(workload=workload_pb2.Workload(uid="u", name="a", namespace="shop"))
        last.note(update(resource("u", value=good.SerializeToString()), resource("bad", value=b"\xff")))
        last.note(Update(type_url=OTHER, version="", resources=()))
        mesh = Mesh(node="n")
        plane = ControlPlane(config, mesh, Metrics("", 100), last)
        async with plane:
            assert plane.ready.is_set()
            assert mesh.counts()["workloads"] == 1
            assert plane._client is not None
            client = plane._client._stream.state
            assert isinstance(client, DeltaClient)
            assert client._type(KIND).held == {"u": "1", "bad": ""}
        last.close()
        holder.close()
        theirs.close()

    asyncio.run(main())
    assert "the crashed process's resources cannot be read error=bad" in caplog.text
