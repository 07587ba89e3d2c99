"""Certificates of a worker: stored as notified, requested when missing, unused from their last second on."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from tests.hbone.certificates import Authority
from tests.ztunnel.proxy.identity.material import CART, WEB, certificate
from tests.ztunnel.proxy.istio.nodes import StoppedClock
from xds.model.identity import SpiffeId
from ztunnel.proxy.identity.csr import IdentityError
from ztunnel.proxy.istio.certificates.manager import TlsPolicy
from ztunnel.proxy.istio.workers.certificate_replica import ReplicatedCertificates
from ztunnel.proxy.istio.workers.channel import Descriptors, IpcChannel, Refused, RequestBody
from ztunnel.proxy.istio.workers.messages import CertificateIssued, GetCertificate, Notification, Value

ROOT = Authority()


def notification(identity: SpiffeId) -> CertificateIssued:
    issued = certificate(ROOT, identity)
    return CertificateIssued(
        wanted=identity,
        identity=identity,
        chain_pem=issued.chain_pem,
        roots_pem=issued.roots_pem,
        key_pem=issued.key_pem,
    )


def replicated(body: Callable[[ReplicatedCertificates, StoppedClock], Awaitable[None]]) -> None:
    """Run ``body`` in a worker whose main process has a certificate of WEB only."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)

        async def apply(message: Notification, descriptors: Descriptors) -> None:
            assert isinstance(message, CertificateIssued)
            certificates.put(message)

        async def nothing(body: RequestBody, descriptors: Descriptors) -> AsyncIterator[Value]:
            raise Refused("nothing is requested of the worker")
            yield None

        async def issue(body: RequestBody, descriptors: Descriptors) -> AsyncIterator[Value]:
            assert isinstance(body, GetCertificate)
            if body.identity != WEB:
                raise IdentityError("no such pod")
            main_end.notify(notification(body.identity))
            return
            yield None

        async def refuse(message: Notification, descriptors: Descriptors) -> None:
            raise AssertionError(message)

        main_end, worker_end = IpcChannel(ours, refuse, issue), IpcChannel(theirs, apply, nothing, to_main=True)
        clock = StoppedClock()
        certificates = ReplicatedCertificates(worker_end, TlsPolicy.for_compliance(""), None, clock)
        async with asyncio.TaskGroup() as group:
            runs = [group.create_task(end.run()) for end in (main_end, worker_end)]
            try:
                await body(certificates, clock)
            finally:
                main_end.disconnect()
                await asyncio.gather(*runs)
                await main_end.close()
                await worker_end.close()

    asyncio.run(main())


def test_a_missing_certificate_is_requested() -> None:
    async def body(certificates: ReplicatedCertificates, clock: StoppedClock) -> None:
        assert certificates.current(WEB) is None
        fetched = await certificates.fetch(WEB)
        assert certificates.current(WEB) is fetched
        assert await certificates.fetch(WEB) is fetched
        with pytest.raises(IdentityError, match="no such pod"):
            await certificates.fetch(CART)
        certificates.forget({WEB})
        assert certificates.current(WEB) is None

    replicated(body)


def test_a_certificate_is_not_used_in_its_last_second() -> None:
    async def body(certificates: ReplicatedCertificates, clock: StoppedClock) -> None:
        message = notification(WEB)
        certificates.put(message)
        stored = certificates.current(WEB)
        assert stored is not None
        end_s = stored.issued.not_after.timestamp()
        clock.passed_s += end_s - 1 - clock.wall()
        assert certificates.current(WEB) is stored
        certificates.put(message)  # notified again: nothing is built anew
        assert certificates.current(WEB) is stored
        clock.passed_s += 1
        assert certificates.current(WEB) is None

    replicated(body)
