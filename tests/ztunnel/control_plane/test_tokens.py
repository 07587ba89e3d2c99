"""Tokens of nodes: what is in them cannot be changed."""

import pytest

from ztunnel.control_plane.tokens import TokenError, node_of_token, node_token

SECRET = b"s" * 32
TOKEN = node_token(SECRET, "worker", 1000)


def test_a_token_names_its_node_until_it_ends() -> None:
    assert node_of_token(SECRET, TOKEN, 999) == "worker"
    with pytest.raises(TokenError, match="of node worker has expired"):
        node_of_token(SECRET, TOKEN, 1000)


@pytest.mark.parametrize("position", range(len(TOKEN)))
def test_no_character_can_be_changed_or_left_out(position: int) -> None:
    other = "A" if TOKEN[position] != "A" else "B"
    for forged in (TOKEN[:position] + other + TOKEN[position + 1 :], TOKEN[:position] + TOKEN[position + 1 :]):
        with pytest.raises(TokenError, match="not one of this control plane"):
            node_of_token(SECRET, forged, 0)


@pytest.mark.parametrize("token", ["", ".", "..", "ztunnel-node-v1", "ztunnel-node-v1..", "caf\xe9.\xe9.\xe9"])
def test_malformed_tokens_are_refused(token: str) -> None:
    with pytest.raises(TokenError):
        node_of_token(SECRET, token, 0)


def test_another_secret_is_another_control_plane() -> None:
    with pytest.raises(TokenError):
        node_of_token(b"t" * 32, TOKEN, 0)
