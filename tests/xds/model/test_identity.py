"""Identities of workloads, as texts."""

import pytest

from xds.model.identity import SpiffeId


def test_a_text_and_back() -> None:
    text = "spiffe://cluster.local/ns/shop/sa/web"
    assert SpiffeId.parse(text) == SpiffeId("cluster.local", "shop", "web")
    assert str(SpiffeId.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "spiffe://",
        "cluster.local/ns/shop/sa/web",
        "SPIFFE://cluster.local/ns/shop/sa/web",
        "spiffe://cluster.local/ns/shop/sa/",
        "spiffe:///ns/shop/sa/web",
        "spiffe://cluster.local/ns/shop/sa/web/",
        "spiffe://cluster.local/ns/shop/sa/web/more",
        "spiffe://cluster.local/sa/shop/ns/web",
        "spiffe://cluster.local/ns/shop/sa/web\x00",
        "spiffe://cluster.local/ns/shop/sa/web?query",
        "spiffe://cluster.local/ns/shop/sa/web#part",
        "spiffe://cluster.local:443/ns/shop/sa/web",
        "spiffe://user@cluster.local/ns/shop/sa/web",
        "spiffe://cluster.local/ns/shop/sa/%77eb",
        "spiffe://cluster.local/ns/../sa/web",
        "spiffe://cluster.local/ns/shop\n/sa/web",
        "spiffe://cluster.local/ns/sh\u043ep/sa/web",
    ],
)
def test_malformed_spiffe_ids_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a workload identity"):
        SpiffeId.parse(text)
