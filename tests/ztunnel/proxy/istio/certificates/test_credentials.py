"""What is shown to the control plane: addresses, tokens and roots, and every way they can be wrong."""

from pathlib import Path

import pytest

from tests.hbone.certificates import Authority
from ztunnel.proxy.istio.certificates.credentials import Credentials, CredentialsError, Endpoint, Roots, Token

ROOT = Authority()
NOWHERE = Path("/nonexistent/token")


@pytest.mark.parametrize(
    ("address", "target", "tls"),
    [
        ("https://istiod.istio-system.svc:15012", "istiod.istio-system.svc:15012", True),
        ("istiod.istio-system.svc:15012", "istiod.istio-system.svc:15012", True),
        ("https://istiod", "istiod:443", True),
        ("https://[::1]:15012/", "[::1]:15012", True),
        ("unix:/run/xds.sock", "unix:/run/xds.sock", False),
        ("http://127.0.0.1:15010", "127.0.0.1:15010", False),
        ("http://[::1]:15010", "[::1]:15010", False),
        ("http://localhost:15010", "localhost:15010", False),
    ],
)
def test_control_plane_addresses_are_parsed(address: str, target: str, tls: bool) -> None:
    assert Endpoint.parse(address) == Endpoint(target, tls)


@pytest.mark.parametrize(
    "address",
    [
        "http://istiod:15010",
        "http://10.0.0.1:15010",
        "http://127.0.0.1.evil.example:15010",
        "ftp://istiod",
        "https://",
        "",
        "unix:",
        "https://user@istiod:1",
        "https://istiod:99999",
        "https://istiod:1/path",
        "https://istiod:1?query",
    ],
)
def test_addresses_that_are_refused(address: str) -> None:
    with pytest.raises(ValueError):
        Endpoint.parse(address)


def test_token_file_is_read_for_each_request(tmp_path: Path) -> None:
    path = tmp_path / "token"
    credentials = Credentials(token=Token(str(path)), cluster_id="c1", headers=(("x-a", "b"),))
    for token in ("first", "second"):
        path.write_text(f"{token}\n")
        assert credentials.metadata() == (("authorization", f"Bearer {token}"), ("clusterid", "c1"), ("x-a", "b"))
    path.unlink()
    with pytest.raises(CredentialsError, match=f"cannot read token file {path}: No such file"):
        credentials.metadata()


def test_literal_token_is_used_and_not_printed() -> None:
    assert Token("abc.def", NOWHERE).read() == "abc.def"
    assert "abc" not in repr(Token("abc.def"))


@pytest.mark.parametrize("length", [255, 256, 900, 4096, 5000])
def test_literal_token_can_be_longer_than_a_file_name(length: int) -> None:
    token = Token("e" * length)
    assert token.read() == "e" * length
    assert repr(token) == "Token(literal)"


def test_text_that_no_path_can_have_is_a_bad_literal_token() -> None:
    with pytest.raises(CredentialsError, match="AUTH_TOKEN holds no bearer token"):
        Token("a\0b").read()


def test_default_token_file_is_optional(tmp_path: Path) -> None:
    credentials = Credentials(token=Token(None, tmp_path / "token"), headers=(("x-a", "b"),))
    assert credentials.metadata() == (("x-a", "b"),)
    (tmp_path / "token").write_text("t")
    assert credentials.metadata()[0] == ("authorization", "Bearer t")
    (tmp_path / "token").write_text("")
    with pytest.raises(CredentialsError, match="is empty"):
        credentials.metadata()


@pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"2nd\nrow", b"caf\xc3\xa9", b"a\x00b"])
def test_invalid_token_is_refused_without_quoting_it(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "secret"
    path.write_bytes(content)
    with pytest.raises(CredentialsError) as caught:
        Token(str(path)).read()
    shown = str(caught.value)
    assert str(path) in shown
    assert all(word.decode() not in shown for word in content.split())


def test_missing_token_file_is_an_error() -> None:
    with pytest.raises(CredentialsError, match="cannot read token file"):
        Token("/var/run/secrets/nowhere").read()


def test_roots_from_a_file_inline_or_the_host(tmp_path: Path) -> None:
    path = tmp_path / "root.pem"
    path.write_bytes(ROOT.pem)
    assert Roots(str(path)).read() == ROOT.pem
    assert Roots(ROOT.pem.decode()).read() == ROOT.pem
    assert [Roots(value).kind for value in (str(path), ROOT.pem.decode(), "SYSTEM")] == [
        "File",
        "Static",
        "Default",
    ]
    path.write_bytes(b"")
    with pytest.raises(CredentialsError, match="no certificate in root certificate file"):
        Roots(str(path)).read()
    with pytest.raises(CredentialsError, match=r"cannot read root certificate file .*/nowhere"):
        Roots(str(tmp_path / "nowhere")).read()
    path.write_bytes(b"x" * 2_000_000)
    with pytest.raises(CredentialsError, match="the wrong file"):
        Roots(str(path)).read()
