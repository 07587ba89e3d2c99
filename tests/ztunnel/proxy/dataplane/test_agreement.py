"""Two certificates against the verdict of a handshake: each way in which they may differ."""

import weakref
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from tests.hbone.certificates import Authority
from tests.hbone.test_verification import CLIENT_ONLY, SERVER_ONLY, Chain, Link
from ztunnel.proxy.dataplane.agreement import Credentials, Party, would_shake_hands
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.identity.peer import is_of_trust_domain, is_one_of

ROOT, OTHER = Authority(), Authority("other")
CLIENT, SERVER = "spiffe://td/ns/a/sa/client", "spiffe://td/ns/a/sa/server"
NOW = datetime.now(UTC)
SECOND = timedelta(seconds=1)


def shown(
    name: str,
    authority: Authority = ROOT,
    anchors: tuple[Authority, ...] | None = (ROOT,),
    *,
    lists: RevocationLists | None = None,
    from_day: float = -1,
    to_day: float = 1,
    intermediates: bool = True,
) -> Credentials:
    leaf = authority.issue(name, from_day=from_day, to_day=to_day, intermediates=intermediates)
    chain = tuple(x509.load_pem_x509_certificates(leaf.chain_pem))
    roots = None if anchors is None else tuple(each.certificate for each in anchors)
    return Credentials(chain, roots) if lists is None else Credentials(chain, roots, lists.is_revoked)


def agree(client: Credentials, server: Credentials, now: datetime = NOW, *, expected: str = SERVER) -> bool:
    return would_shake_hands(Party(client, is_one_of((expected,))), Party(server, is_of_trust_domain("td")), now)


def test_certificates_of_one_root_and_trust_domain_agree() -> None:
    assert agree(shown(CLIENT), shown(SERVER))


def test_intermediates_lead_to_the_root() -> None:
    middle = Authority("middle", parent=ROOT)
    assert agree(shown(CLIENT, middle), shown(SERVER))
    assert agree(shown(CLIENT), shown(SERVER, middle))
    assert not agree(shown(CLIENT, middle, intermediates=False), shown(SERVER))


def test_chain_that_includes_its_root_agrees() -> None:
    leaf = shown(CLIENT)
    assert agree(Credentials((*leaf.chain, ROOT.certificate), leaf.anchors), shown(SERVER))
    middle = Authority("middle", parent=ROOT)
    pinned = Credentials(shown(SERVER, middle).chain, (ROOT.certificate,))
    assert agree(Credentials(leaf.chain, (middle.certificate,)), pinned), "an intermediate can be the anchor"


def test_unrelated_intermediate_does_not_complete_a_chain() -> None:
    leaf = shown(CLIENT, OTHER)
    chain = (*leaf.chain, *shown(CLIENT, Authority("middle", parent=ROOT)).chain[1:])
    assert not agree(Credentials(chain, leaf.anchors), shown(SERVER))


@pytest.mark.parametrize("which", [0, 1], ids=["client", "server"])
@pytest.mark.parametrize(("from_day", "to_day"), [(-2, -1), (1, 2)], ids=["expired", "not yet valid"])
def test_validity_period_is_checked_on_both_sides(which: int, from_day: float, to_day: float) -> None:
    both = [shown(CLIENT), shown(SERVER)]
    both[which] = shown((CLIENT, SERVER)[which], from_day=from_day, to_day=to_day)
    assert not agree(both[0], both[1])


@pytest.mark.parametrize("which", [0, 1], ids=["client", "server"])
@pytest.mark.parametrize(
    ("bound", "inside", "outside"),
    [
        (lambda leaf: leaf.not_valid_before_utc, timedelta(), -SECOND),
        (lambda leaf: leaf.not_valid_after_utc, timedelta(), SECOND),
        (lambda leaf: leaf.not_valid_after_utc, timedelta(microseconds=999_999), SECOND),
    ],
    ids=["notBefore", "notAfter", "within the last second"],
)
def test_certificate_is_valid_at_the_bounds_of_its_period(
    which: int, bound: Callable[[x509.Certificate], datetime], inside: timedelta, outside: timedelta
) -> None:
    """RFC 5280, 4.1.2.5."""
    both = [shown(CLIENT, from_day=-3, to_day=3), shown(SERVER, from_day=-3, to_day=3)]
    both[which] = shown((CLIENT, SERVER)[which])
    moment = bound(both[which].chain[0])
    assert agree(both[0], both[1], moment + inside)
    assert not agree(both[0], both[1], moment + outside)


def test_certificates_of_different_roots_do_not_agree() -> None:
    assert not agree(shown(CLIENT, OTHER, (OTHER,)), shown(SERVER))
    assert not agree(shown(CLIENT, OTHER), shown(SERVER))
    assert not agree(shown(CLIENT), shown(SERVER, OTHER))
    assert not agree(shown(CLIENT, anchors=(OTHER,)), shown(SERVER))
    assert not agree(shown(CLIENT), shown(SERVER, anchors=(OTHER,)))


def test_either_root_is_accepted_during_rotation() -> None:
    both = (ROOT, OTHER)
    assert agree(shown(CLIENT, OTHER, both), shown(SERVER, ROOT, both))


@pytest.mark.parametrize("order", [1, -1], ids=["expired first", "expired last"])
def test_certificates_agree_if_only_the_earlier_certificate_of_an_issuer_has_expired(order: int) -> None:
    middle = Authority("middle", parent=ROOT)
    leaf = shown(CLIENT, middle).chain[0]
    middles = (middle.reissued(0.2).certificate, middle.certificate)[::order]
    roots = (ROOT.reissued(0.1).certificate, ROOT.certificate)[::order]
    client, server = Credentials((leaf, *middles), roots), Credentials(shown(SERVER).chain, roots)
    for hours in (0, 4, 6, 0):
        assert agree(client, server, NOW + timedelta(hours=hours)), f"after {hours} h"
    assert not agree(client, server, NOW + timedelta(days=1, hours=1)), "the leaf has expired"


def test_names_are_checked_on_both_sides() -> None:
    assert not agree(shown("spiffe://elsewhere/ns/a/sa/client"), shown(SERVER))
    assert not agree(shown(CLIENT), shown("spiffe://elsewhere/ns/a/sa/server"))
    assert not agree(shown(CLIENT), shown("spiffe://td/ns/a/sa/another"))
    assert agree(shown(CLIENT), shown("spiffe://td/ns/a/sa/another"), expected="spiffe://td/ns/a/sa/another")


def test_a_revoked_certificate_does_not_agree() -> None:
    client, server = shown(CLIENT), shown(SERVER)

    def by(lists: RevocationLists) -> tuple[Credentials, Credentials]:
        return (
            Credentials(client.chain, client.anchors, lists.is_revoked),
            Credentials(server.chain, server.anchors, lists.is_revoked),
        )

    for revoked in (client, server):
        assert not agree(*by(RevocationLists.parse(ROOT.revoke(revoked.chain[0]))))
    assert agree(*by(RevocationLists.parse(ROOT.revoke(shown(CLIENT).chain[0]))))


def test_a_server_without_validation_agrees_with_none() -> None:
    assert not agree(shown(CLIENT), shown(SERVER, anchors=None))


def test_a_client_without_validation_accepts_every_server() -> None:
    assert agree(shown(CLIENT, anchors=None), shown("spiffe://elsewhere/x", OTHER, (ROOT,)))


def test_side_without_a_certificate_does_not_agree() -> None:
    assert not agree(Credentials((), (ROOT.certificate,)), shown(SERVER))
    assert not agree(shown(CLIENT), Credentials((), (ROOT.certificate,)))


def test_credentials_that_are_no_longer_used_are_freed_at_once() -> None:
    """Certificates are renewed, and many others have judged each. The cached results must not keep old ones
    alive.
    """
    kept, old = shown(CLIENT), shown(SERVER)
    assert agree(kept, old)
    assert agree(old, kept, expected=CLIENT)
    gone = weakref.ref(old)
    del old
    assert gone() is None
    assert agree(kept, shown(SERVER))


def chained(*links: Link) -> Credentials:
    chain = Chain(links)
    return Credentials(tuple(chain.shown), (chain.certificates[0], ROOT.certificate))


@pytest.mark.parametrize(
    ("links", "as_client", "as_server"),
    [
        ((Link(), Link(ca=False), Link()), False, False),
        ((Link(), Link(usages=SERVER_ONLY)), False, True),
        ((Link(), Link(usages=CLIENT_ONLY)), True, False),
        ((Link(path_length=0), Link(), Link()), False, False),
    ],
    ids=["issuer without CA", "only for servers", "only for clients", "path too long"],
)
def test_a_chain_that_a_handshake_refuses_does_not_agree(
    links: tuple[Link, ...], as_client: bool, as_server: bool
) -> None:
    """``hbone/test_verification.py`` compares all of these with handshakes; here the role counts."""
    shows = chained(*links)
    other = Credentials(shown(CLIENT).chain, shows.anchors)
    parties = Party(shows, lambda names: True), Party(other, lambda names: True)
    assert would_shake_hands(*parties, NOW) is as_client
    assert would_shake_hands(*reversed(parties), NOW) is as_server
