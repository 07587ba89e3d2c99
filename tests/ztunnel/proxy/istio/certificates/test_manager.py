"""The manager of certificates: who waits for what, what is kept, what is forgotten."""

import asyncio
import datetime
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from cryptography import x509

from hbone.errors import TlsReason
from tests.hbone import virtual_time
from tests.hbone.certificates import Authority
from tests.limits import WAIT_S
from tests.ztunnel.proxy.identity.material import CART, WEB, certificate, handshake, issued
from xds.model.identity import SpiffeId
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.identity.csr import AuthorityUnreachable
from ztunnel.proxy.istio.certificates.manager import (
    CertificateManager,
    IdentityError,
    IssuedCertificate,
    TlsPolicy,
    WorkloadCertificate,
)

ROOT = Authority()
MIDDLE = Authority("middle", ROOT)


def with_issuer_until(day: float) -> IssuedCertificate:
    """A certificate for three days, whose issuer's certificate ends sooner or later."""
    return issued(MIDDLE.reissued(day).issue(str(WEB), to_day=3), ROOT.pem)


class Desk:
    """An authority whose answers the test gives."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[tuple[SpiffeId, asyncio.Future[IssuedCertificate]]] = asyncio.Queue()
        self.cancelled: list[SpiffeId] = []

    async def issue(self, identity: SpiffeId) -> IssuedCertificate:
        answer: asyncio.Future[IssuedCertificate] = asyncio.get_running_loop().create_future()
        self.asked.put_nowait((identity, answer))
        try:
            return await answer
        except asyncio.CancelledError:
            self.cancelled.append(identity)
            raise

    async def next(self) -> tuple[SpiffeId, asyncio.Future[IssuedCertificate]]:
        return await asyncio.wait_for(self.asked.get(), WAIT_S)


class Lists:
    """Revocation lists that the test replaces."""

    def __init__(self) -> None:
        self.current = RevocationLists()
        self.changed: Callable[[], None] = lambda: None

    def watch(self, changed: Callable[[], None]) -> None:
        self.changed = changed


class Fixture:
    def __init__(self, *, concurrency: int = 8) -> None:
        self.desk = Desk()
        self.lists = Lists()
        self.ahead = datetime.timedelta()
        self.manager = CertificateManager(
            self.desk, now=self.now, jitter=lambda: 0.0, concurrency=concurrency, revocations=self.lists
        )

    def now(self) -> datetime.datetime:
        return datetime.datetime.now(datetime.UTC) + self.ahead


def run(body: Callable[[Fixture], Awaitable[None]], *, concurrency: int = 8) -> None:
    async def main() -> None:
        fixture = Fixture(concurrency=concurrency)
        try:
            async with asyncio.timeout(WAIT_S):
                await body(fixture)
        finally:
            await fixture.manager.close()

    asyncio.run(main())


def test_concurrent_callers_share_one_fetch() -> None:
    async def body(f: Fixture) -> None:
        async with asyncio.TaskGroup() as tasks:
            waiting = [tasks.create_task(f.manager.fetch(WEB)) for _ in range(5)]
            identity, answer = await f.desk.next()
            assert identity == WEB
            assert f.manager.states() == {WEB: "Initializing"}
            answer.set_result(certificate(ROOT))
        assert len({id(task.result()) for task in waiting}) == 1
        assert f.desk.asked.empty()
        assert f.manager.current(WEB) is waiting[0].result()
        assert f.manager.states() == {WEB: waiting[0].result()}

    run(body)


def test_a_certificate_is_not_used_in_its_last_second() -> None:
    """RFC 5280 permits it, but OpenSSL at the other end refuses it from notAfter on."""

    async def main() -> None:
        made = certificate(ROOT)
        now = [made.not_after - datetime.timedelta(seconds=1)]
        desk = Desk()
        manager = CertificateManager(desk, now=lambda: now[0], jitter=lambda: 0.0)
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(manager.fetch(WEB))
            (await desk.next())[1].set_result(made)
        assert manager.current(WEB) is waiting.result()
        now[0] = made.not_after
        assert manager.current(WEB) is None
        await manager.close()

    asyncio.run(main())


def test_failed_fetch_is_raised_at_once_until_a_retry_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    async def body(f: Fixture) -> None:
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(_outcome(f.manager, WEB))
            (await f.desk.next())[1].set_exception(IdentityError("signing gRPC error (UNAVAILABLE): away"))
        assert waiting.result() == "signing gRPC error (UNAVAILABLE): away"
        assert await _outcome(f.manager, WEB) == "signing gRPC error (UNAVAILABLE): away"
        assert f.manager.states() == {WEB: "Unavailable: signing gRPC error (UNAVAILABLE): away"}
        with pytest.raises(IdentityError, match="UNAVAILABLE"):
            f.manager.at_once(WEB)
        assert f.manager.at_once(CART) is None, "a fetch would wait"
        assert f.desk.asked.empty()
        (await f.desk.next())[1].set_result(certificate(ROOT))  # the first retry, a second later
        while f.manager.current(WEB) is None:
            await asyncio.sleep(0)
        made = await _outcome(f.manager, WEB)
        assert made is f.manager.at_once(WEB)
        assert isinstance(made, WorkloadCertificate)
        moments = f.manager.moments()
        assert moments.fetches == {"ok": 1, "failed": 1}
        assert moments.ends == {str(WEB): made.not_after.timestamp()}
        assert moments.root_s == min(root.not_valid_after_utc.timestamp() for root in made.issued.roots)
        f.manager.forget((WEB,))
        assert (f.manager.moments().ends, f.manager.moments().root_s) == ({}, None)

    run(body)
    assert "certificate fetch failed" in caplog.text


def test_first_certificates_wait_for_an_unreachable_authority_and_not_for_a_refusal() -> None:
    async def body(f: Fixture) -> None:
        assert await f.manager.first_certificates(30.0) == [], "nothing is needed"
        f.manager.prefetch((WEB, CART))
        waiting = asyncio.ensure_future(f.manager.first_certificates(0.0))  # noqa: TID251  awaited below
        asked = dict([await f.desk.next(), await f.desk.next()])
        asked[WEB].set_exception(AuthorityUnreachable("signing gRPC error (UNAVAILABLE): away"))
        asked[CART].set_exception(IdentityError("signing gRPC error (UNAUTHENTICATED): no such pod"))
        await asyncio.sleep(0.05)
        assert not waiting.done(), "past its limit, but the authority has not answered for one of them"
        f.ahead = datetime.timedelta(seconds=2)
        f.manager.prefetch((WEB,))  # both are due
        asked = dict([await f.desk.next(), await f.desk.next()])
        asked[WEB].set_result(certificate(ROOT))
        asked[CART].set_exception(IdentityError("signing gRPC error (UNAUTHENTICATED): no such pod"))
        assert await waiting == [CART]

    run(body)


def test_first_certificates_wait_a_while_for_a_refused_identity() -> None:
    async def body(f: Fixture) -> None:
        f.manager.prefetch((WEB,))
        waiting = asyncio.ensure_future(f.manager.first_certificates(WAIT_S))  # noqa: TID251  awaited below
        (await f.desk.next())[1].set_exception(IdentityError("no such pod"))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        f.ahead = datetime.timedelta(seconds=2)
        f.manager.prefetch((WEB,))
        (await f.desk.next())[1].set_result(certificate(ROOT))
        assert await waiting == []

    run(body)


@pytest.mark.parametrize("event", ["forgotten", "closed"])
def test_first_certificates_end_with_what_they_wait_for(event: str) -> None:
    async def body(f: Fixture) -> None:
        f.manager.prefetch((WEB,))
        waiting = asyncio.ensure_future(f.manager.first_certificates(WAIT_S))  # noqa: TID251  awaited below
        await f.desk.next()
        if event == "closed":
            await f.manager.close()
            assert await waiting == [WEB]
        else:
            f.manager.forget((WEB,))
            assert await waiting == []

    run(body)


def test_identities_that_did_not_reach_the_authority_are_retried_when_it_answers() -> None:
    async def body(f: Fixture) -> None:
        f.manager.prefetch((WEB,))
        (await f.desk.next())[1].set_exception(AuthorityUnreachable("away"))
        f.manager.prefetch((CART,))
        identity, answer = await f.desk.next()
        assert identity == CART
        answer.set_result(certificate(ROOT))
        began_s = asyncio.get_running_loop().time()
        assert (await f.desk.next())[0] == WEB
        assert asyncio.get_running_loop().time() - began_s < 0.8, "not after its back-off of a second"

    run(body)


async def _outcome(manager: CertificateManager, identity: SpiffeId) -> WorkloadCertificate | str:
    try:
        return await manager.fetch(identity)
    except IdentityError as error:
        return str(error)


def test_unexpected_authority_error_is_a_failed_fetch(caplog: pytest.LogCaptureFixture) -> None:
    async def body(f: Fixture) -> None:
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(_outcome(f.manager, WEB))
            (await f.desk.next())[1].set_exception(ZeroDivisionError("oops"))
        assert waiting.result() == "internal error: ZeroDivisionError('oops')"

    run(body)
    assert "certificate fetch broke" in caplog.text


def test_unusable_ca_answer_is_a_failed_fetch_and_retried(caplog: pytest.LogCaptureFixture) -> None:
    async def body(f: Fixture) -> None:
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(_outcome(f.manager, WEB))
            (await f.desk.next())[1].set_result(None)  # type: ignore[arg-type]
        assert "internal error" in str(waiting.result())
        f.ahead = datetime.timedelta(seconds=10)
        f.manager.prefetch((WEB,))
        (await f.desk.next())[1].set_result(certificate(ROOT))

    run(body)
    assert "certificate fetch broke" in caplog.text


def test_failing_watcher_does_not_affect_other_watchers(caplog: pytest.LogCaptureFixture) -> None:
    told: list[WorkloadCertificate] = []

    def breaks(identity: SpiffeId, certificate: WorkloadCertificate) -> None:
        raise ValueError("no")

    async def body(f: Fixture) -> None:
        f.manager.watch(breaks)
        f.manager.watch(lambda identity, certificate: told.append(certificate))
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(f.manager.fetch(WEB))
            (await f.desk.next())[1].set_result(certificate(ROOT))
        assert told == [waiting.result()]
        f.lists.changed()
        assert len(told) == 2

    run(body)
    assert "no" in caplog.text


def test_renewal_changes_the_generation_and_a_failed_renewal_does_not() -> None:
    async def body(f: Fixture) -> None:
        seen: list[WorkloadCertificate] = []
        f.manager.watch(lambda identity, certificate: seen.append(certificate))
        f.manager.prefetch([WEB])
        (await f.desk.next())[1].set_result(certificate(ROOT, to_day=1))
        while not seen:
            await asyncio.sleep(0)
        f.ahead = datetime.timedelta(hours=1)  # half of the two days is over an hour later at most
        f.manager.prefetch([])  # time has passed: look
        _, answer = await f.desk.next()
        answer.set_exception(IdentityError("away"))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert f.manager.current(WEB) is seen[0]
        _, answer = await f.desk.next()
        answer.set_result(certificate(ROOT, to_day=3))
        while len(seen) < 2:
            await asyncio.sleep(0)
        assert f.manager.current(WEB) is seen[1]
        assert seen[1].generation > seen[0].generation

    run(body)


@pytest.mark.parametrize(
    ("renewed", "words"),
    [
        (lambda: certificate(ROOT, from_day=1, to_day=3), "is valid from"),
        (lambda: with_issuer_until(-0.1), "the issuer of the certificate from CA expired"),
        (lambda: certificate(ROOT, CART, to_day=3), "is of spiffe://cluster.local/ns/shop/sa/cart"),
        (
            lambda: replace(certificate(ROOT, to_day=3), key_pem=certificate(ROOT).key_pem),
            "cannot be used: OpenSSL refused",
        ),
    ],
    ids=["not yet valid", "expired issuer", "another identity", "another key"],
)
def test_a_bad_renewal_does_not_replace_a_good_certificate(
    renewed: Callable[[], IssuedCertificate], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def body(f: Fixture) -> None:
        f.manager.prefetch([WEB])
        (await f.desk.next())[1].set_result(certificate(ROOT))
        while (good := f.manager.current(WEB)) is None:
            await asyncio.sleep(0)
        f.ahead = datetime.timedelta(hours=1)
        f.manager.prefetch([])
        (await f.desk.next())[1].set_result(renewed())
        while words not in caplog.text:
            await asyncio.sleep(0)
        assert f.manager.current(WEB) is good
        (await f.desk.next())[1].set_result(certificate(ROOT, to_day=3))  # the retry
        while f.manager.current(WEB) is good:
            await asyncio.sleep(0)

    run(body)


def test_certificate_is_renewed_and_dropped_in_time_if_its_issuer_expires_sooner() -> None:
    async def body(f: Fixture) -> None:
        f.manager.prefetch([WEB])
        (await f.desk.next())[1].set_result(first := with_issuer_until(0.5))
        while f.manager.current(WEB) is None:
            await asyncio.sleep(0)
        issuer = first.chain[1]
        assert f.manager.moments().ends == {str(WEB): issuer.not_valid_after_utc.timestamp()}
        f.ahead = datetime.timedelta(hours=1)  # the leaf's half life is a day later
        f.manager.prefetch([])
        _, renewal = await f.desk.next()
        f.ahead = datetime.timedelta(hours=13)
        assert f.manager.current(WEB) is None, "peers refuse the chain"
        renewal.set_result(with_issuer_until(2))
        while f.manager.current(WEB) is None:
            await asyncio.sleep(0)

    run(body)


def test_first_certificate_can_become_valid_minutes_later() -> None:
    minute = 1 / 24 / 60

    async def body(f: Fixture) -> None:
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(_outcome(f.manager, WEB))
            (await f.desk.next())[1].set_result(certificate(ROOT, from_day=1))
        assert "check the clocks" in str(waiting.result())
        (await f.desk.next())[1].set_result(certificate(ROOT, from_day=5 * minute))
        while f.manager.current(WEB) is None:
            await asyncio.sleep(0)

    run(body)


@pytest.mark.parametrize("first", ["the new one becomes valid", "the old one ends"])
def test_renewed_certificate_of_an_authority_whose_clock_is_ahead_is_used_in_time(first: str) -> None:
    """If this host's clock is slow, each new certificate begins in the future. The old one ends for peers with
    right clocks before it ends here.
    """
    minute = 1 / 24 / 60

    async def body(f: Fixture) -> None:
        old = certificate(ROOT, to_day=1)
        if first == "the old one ends":
            old = certificate(ROOT, to_day=61 * minute)
        f.manager.prefetch([WEB])
        (await f.desk.next())[1].set_result(old)
        while (good := f.manager.current(WEB)) is None:
            await asyncio.sleep(0)
        f.ahead = datetime.timedelta(hours=1)
        f.manager.prefetch([])
        new = certificate(ROOT, from_day=65 * minute, to_day=3)
        (await f.desk.next())[1].set_result(new)
        while f.manager.fetches["ok"] < 2:
            await asyncio.sleep(0)
        assert f.manager.current(WEB) is good
        assert f.manager.fetches["failed"] == 0
        if first == "the old one ends":
            f.ahead = datetime.timedelta(minutes=62)
        else:
            f.ahead = datetime.timedelta(minutes=66)
            f.manager.prefetch([])
        assert (await f.manager.fetch(WEB)).issued is new
        assert f.desk.asked.empty()

    run(body)


@pytest.mark.parametrize("event", ["forgotten", "revoked"])
def test_upcoming_certificate_is_not_used_if_it_is_no_longer_good(event: str) -> None:
    minute = 1 / 24 / 60

    async def body(f: Fixture) -> None:
        f.manager.prefetch([WEB])
        (await f.desk.next())[1].set_result(certificate(ROOT))
        while f.manager.current(WEB) is None:
            await asyncio.sleep(0)
        f.ahead = datetime.timedelta(hours=1)
        f.manager.prefetch([])
        upcoming = certificate(ROOT, from_day=65 * minute, to_day=3)
        (await f.desk.next())[1].set_result(upcoming)
        while f.manager.fetches["ok"] < 2:
            await asyncio.sleep(0)
        if event == "forgotten":
            f.manager.forget([WEB])
        else:
            f.lists.current = revoking(ROOT, upcoming.chain[0])
            f.lists.changed()
            await f.desk.next()
        f.ahead = datetime.timedelta(hours=2)
        f.manager.prefetch([])
        current = f.manager.current(WEB)
        assert (current is None) is (event == "forgotten")
        assert current is None or current.issued is not upcoming

    run(body)


def test_expired_certificate_is_not_used() -> None:
    async def body(f: Fixture) -> None:
        f.manager.prefetch([WEB])
        (await f.desk.next())[1].set_result(certificate(ROOT))
        while f.manager.current(WEB) is None:
            await asyncio.sleep(0)
        f.ahead = datetime.timedelta(days=2)
        assert f.manager.current(WEB) is None
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(_outcome(f.manager, WEB))
            (await f.desk.next())[1].set_result(certificate(ROOT))
        assert "check the clocks" in str(waiting.result())

    run(body)


def test_forgotten_identity_is_no_longer_fetched() -> None:
    async def body(f: Fixture) -> None:
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(_outcome(f.manager, WEB))
            await f.desk.next()
            f.manager.forget([WEB])
        assert waiting.result() == "the identity is no longer needed"
        assert f.manager.states() == {}
        assert f.desk.cancelled == [WEB]

    run(body)


@pytest.mark.parametrize("prefetched", [False, True])
def test_identity_without_workload_is_not_fetched_forever(prefetched: bool) -> None:
    """A connection that begins before its pod is removed can fetch the identity after it was forgotten."""

    attempts = 0

    class Refusing:
        async def issue(self, identity: SpiffeId) -> IssuedCertificate:
            nonlocal attempts
            attempts += 1
            raise IdentityError("no such pod")

    async def main() -> None:
        loop, began = asyncio.get_running_loop(), datetime.datetime.now(datetime.UTC)
        manager = CertificateManager(
            Refusing(), now=lambda: began + datetime.timedelta(seconds=loop.time()), jitter=lambda: 0.0
        )
        manager.prefetch([WEB])
        manager.forget([WEB])
        if prefetched:
            manager.prefetch([WEB])
        assert await _outcome(manager, WEB) == "no such pod"
        await asyncio.sleep(300)  # virtual time
        assert manager.states() == {WEB: "Unavailable: no such pod"}, "another attempt can succeed"
        await asyncio.sleep(600)
        assert bool(manager.states()) is prefetched
        before = attempts
        await asyncio.sleep(600)
        assert (attempts > before) is prefetched
        assert await _outcome(manager, WEB) == "no such pod"
        assert manager.states(), "a later connection fetches it again"
        await manager.close()

    virtual_time.run(main)


def test_forgetting_a_fetch_starts_the_next() -> None:
    async def body(f: Fixture) -> None:
        f.manager.prefetch([WEB, CART])
        identity, _ = await f.desk.next()
        assert f.desk.asked.empty()
        f.manager.forget([identity])
        assert (await f.desk.next())[0] == ({WEB, CART} - {identity}).pop()

    run(body, concurrency=1)


def test_cancelled_caller_does_not_cancel_the_fetch() -> None:
    async def body(f: Fixture) -> None:
        async with asyncio.TaskGroup() as tasks:
            impatient = tasks.create_task(f.manager.fetch(WEB))
            patient = tasks.create_task(f.manager.fetch(WEB))
            _, answer = await f.desk.next()
            impatient.cancel()
            await asyncio.sleep(0)
            answer.set_result(certificate(ROOT))
        assert isinstance(patient.result(), WorkloadCertificate)

    run(body)


def test_new_revocation_lists_renew_the_contexts_of_all_certificates(caplog: pytest.LogCaptureFixture) -> None:
    async def body(f: Fixture) -> None:
        f.manager.prefetch([WEB])
        made = certificate(ROOT)
        (await f.desk.next())[1].set_result(made)
        while (before := f.manager.current(WEB)) is None:
            await asyncio.sleep(0)
        seen: list[WorkloadCertificate] = []
        f.manager.watch(lambda identity, certificate: seen.append(certificate))
        f.lists.current = RevocationLists([x509.load_pem_x509_crl(ROOT.revoke(made.chain[0]))])
        f.lists.changed()
        after = f.manager.current(WEB)
        assert after is not None
        assert seen == [after]
        assert after.issued is before.issued
        assert after.generation > before.generation
        peer = WorkloadCertificate(made, 1, TlsPolicy())
        assert handshake(peer.client_context((str(WEB),)), before.server_context())[1].error is None
        refused = handshake(peer.client_context((str(WEB),)), after.server_context())[1].error
        assert refused is not None
        assert refused.reason is TlsReason.REVOKED
        assert f.desk.asked.empty(), "a workload whose own certificate is revoked gets no other one in exchange"

    run(body)
    assert "our own certificate is revoked" in caplog.text


def revoking(issuer: Authority, revoked: x509.Certificate) -> RevocationLists:
    return RevocationLists([x509.load_pem_x509_crl(issuer.revoke(revoked))])


def test_certificate_of_a_revoked_issuer_is_renewed_at_once_and_until_the_authority_has_another() -> None:
    """The authority can have a new issuer for long, while renewals are due in half of a lifetime."""

    async def body(f: Fixture) -> None:
        f.manager.prefetch([WEB, CART])
        for _ in range(2):
            identity, answer = await f.desk.next()
            answer.set_result(certificate(ROOT, CART) if identity == CART else with_issuer_until(3))
        while f.manager.fetches["ok"] < 2:
            await asyncio.sleep(0)
        before = f.manager.current(WEB)
        assert before is not None
        f.lists.current = revoking(ROOT, before.issued.chain[1])
        f.lists.changed()
        identity, answer = await f.desk.next()
        assert identity == WEB
        assert f.desk.asked.empty(), "only the revoked certificate"
        answer.set_result(replace(before.issued))
        while not f.manager.fetches["failed"]:
            await asyncio.sleep(0)
        _, answer = await f.desk.next()
        answer.set_result(with_issuer_until(4))
        while f.manager.fetches["ok"] < 3:
            await asyncio.sleep(0)
        after = f.manager.current(WEB)
        assert after is not None
        assert not after.is_revoked_by(f.lists.current)

    run(body)


@pytest.mark.parametrize("first", [True, False])
def test_revoked_certificate_from_the_authority_is_refused(first: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def body(f: Fixture) -> None:
        f.manager.prefetch([WEB])
        good = None
        if not first:
            (await f.desk.next())[1].set_result(certificate(ROOT))
            while (good := f.manager.current(WEB)) is None:
                await asyncio.sleep(0)
        revoked = with_issuer_until(3)
        f.lists.current = revoking(ROOT, revoked.chain[1])
        f.lists.changed()
        good = f.manager.current(WEB)
        f.ahead = datetime.timedelta(hours=1)
        f.manager.prefetch([])
        (await f.desk.next())[1].set_result(revoked)
        while not f.manager.fetches["failed"]:
            await asyncio.sleep(0)
        assert f.manager.current(WEB) is good

    run(body)
    assert "the certificate from CA is revoked by the revocation lists" in caplog.text


def test_unreadable_lists_revoke_no_certificate_of_our_own(caplog: pytest.LogCaptureFixture) -> None:
    async def body(f: Fixture) -> None:
        f.lists.current = RevocationLists(unreadable=True)
        f.manager.prefetch([WEB])
        (await f.desk.next())[1].set_result(certificate(ROOT))
        while f.manager.current(WEB) is None:
            await asyncio.sleep(0)
        f.lists.changed()
        await asyncio.sleep(0)
        assert f.desk.asked.empty()

    run(body)
    assert "revoked" not in caplog.text


@pytest.mark.parametrize("trusted", ["both roots", "old root"])
def test_list_counts_only_for_the_chain_that_a_handshake_would_verify(trusted: str) -> None:
    """After a rotation with a certificate of the old root for the new root's key, this certificate is revoked."""
    new = Authority("new root")
    cross = new.signed_by(ROOT)
    roots = new.pem + ROOT.pem if trusted == "both roots" else ROOT.pem
    leaf = new.issue(str(WEB), intermediates=False)
    lists = RevocationLists([x509.load_pem_x509_crl(ROOT.revoke(cross.certificate))])
    made = issued(replace(leaf, chain_pem=leaf.chain_pem + cross.pem), roots)
    ours = WorkloadCertificate(made, 1, TlsPolicy(), lists)
    peer = WorkloadCertificate(certificate(new), 1, TlsPolicy())
    client, _ = handshake(ours.client_context((str(WEB),)), ours.server_context())
    assert (client.error is not None) is (trusted == "old root")
    assert ours.is_revoked_by(lists) is (trusted == "old root")
    assert not peer.is_revoked_by(lists)


def test_closed_manager_fetches_no_certificates() -> None:
    async def body(f: Fixture) -> None:
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(_outcome(f.manager, WEB))
            await f.desk.next()
            await f.manager.close()
        assert waiting.result() == "the identity is no longer needed"
        assert await _outcome(f.manager, CART) == "the identity is no longer needed"
        assert f.desk.cancelled == [WEB]

    run(body)
