"""What a handshake checks of a peer's names."""

import pytest

from hbone.errors import TlsReason
from hbone.tls_context import Refusal
from tests.hbone.certificates import Authority
from ztunnel.proxy.identity.crl import RevocationLists
from ztunnel.proxy.identity.peer import is_of_trust_domain, is_one_of, none_revoked, of_trust_domain, one_of

ROOT = Authority()
WEB, CART = "spiffe://cluster.local/ns/shop/sa/web", "spiffe://cluster.local/ns/shop/sa/cart"


def test_the_only_name_of_a_leaf_is_judged() -> None:
    chain = [ROOT.issue(WEB).certificate]
    assert of_trust_domain("cluster.local")(chain) is None
    assert one_of([CART, WEB])(chain) is None
    assert "got spiffe://cluster.local/ns/shop/sa/web" in str(one_of([CART])(chain))
    assert of_trust_domain("elsewhere")(chain) is not None
    assert one_of([])(chain) is not None


@pytest.mark.parametrize(
    "names", [(WEB, CART), (WEB, WEB), (WEB, "https://x"), ("https://x", WEB), (), (WEB + "?x",)]
)
def test_leaf_without_exactly_one_uri_name_is_refused(names: tuple[str, ...]) -> None:
    chain = [ROOT.issue(*names).certificate]
    for refusal in (of_trust_domain("cluster.local")(chain), one_of([WEB, CART])(chain)):
        assert refusal is not None
        assert (f"got {len(names)} URI names" in str(refusal)) is (len(names) > 1)
    assert not is_of_trust_domain("cluster.local")(names)
    assert not is_one_of([WEB, CART])(names)


def test_revoked_chain_is_refused_and_the_names_of_others_are_judged() -> None:
    revoked, other = ROOT.issue(WEB).certificate, ROOT.issue(WEB).certificate
    lists = RevocationLists.parse(ROOT.revoke(revoked))
    refusal = none_revoked(lists, one_of([WEB]))([revoked, ROOT.certificate])
    assert isinstance(refusal, Refusal)
    assert refusal.reason is TlsReason.REVOKED
    assert none_revoked(lists, one_of([WEB]))([other, ROOT.certificate]) is None
    assert "got spiffe://cluster.local/ns/shop/sa/web" in str(none_revoked(lists, one_of([CART]))([other]))
