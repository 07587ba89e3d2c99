"""Answers to probes beside Go's net/http, which kubelet probes with: ours passes where kubelet's passes."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generated import examples
from tests.golang.oracle import Oracle, Refused
from ztunnel.proxy.istio.admin.prober import answer
from ztunnel.proxy.istio.settings.app_probes import AppProbe

OK = b"HTTP/1.1 200 OK\r\n"
LENGTH = b"Content-Length: 2\r\n\r\nok"
ANSWERS = {
    "plain": OK + LENGTH,
    "version 1.0 without fields": b"HTTP/1.0 200 OK\r\n\r\nok",
    "no reason": b"HTTP/1.1 200\r\n" + LENGTH,
    "no reason, space": b"HTTP/1.1 200 \r\n" + LENGTH,
    "two spaces": b"HTTP/1.1  200 OK\r\n" + LENGTH,
    "lines of LF": b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
    "103 first": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK + LENGTH,
    "100 first": b"HTTP/1.1 100 Continue\r\n\r\n" + OK + LENGTH,
    "five first": b"HTTP/1.1 103 E\r\n\r\n" * 5 + OK + LENGTH,
    "101": b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "equal lengths": OK + b"Content-Length: 2\r\n" + LENGTH,
    "other lengths": OK + b"Content-Length: 3\r\n" + LENGTH,
    "negative length": OK + b"Content-Length: -2\r\n\r\nok",
    "signed length": OK + b"Content-Length: +2\r\n\r\nok",
    "no length": OK + b"Content-Length: \r\n\r\nok",
    "listed length": OK + b"Content-Length: 2, 2\r\n\r\nok",
    "chunks": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "chunks in capitals": OK + b"Transfer-Encoding: CHUNKED\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "chunks and length": OK + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "chunks and odd length": OK + b"Transfer-Encoding: chunked\r\nContent-Length: x\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "chunks with extension": OK + b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\nok\r\n0\r\n\r\n",
    "chunks with trailer": OK + b"Transfer-Encoding: chunked\r\nTrailer: X\r\n\r\n2\r\nok\r\n0\r\nX: 1\r\n\r\n",
    "chunks of LF": OK + b"Transfer-Encoding: chunked\r\n\r\n2\nok\n0\n\n",
    "chunks without end": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n",
    "chunks without last line": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n",
    "chunk too long": OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nokay\r\n0\r\n\r\n",
    "chunk without size": OK + b"Transfer-Encoding: chunked\r\n\r\nx\r\nok\r\n0\r\n\r\n",
    "chunks in 1.0": b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nanything",
    "gzip, chunked": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "identity": OK + b"Transfer-Encoding: identity\r\n" + LENGTH,
    "two codings": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "space in a name": OK + b"X Bad: 1\r\n" + LENGTH,
    "space behind a name": OK + b"X-Bad : 1\r\n" + LENGTH,
    "no colon": OK + b"Bad\r\n" + LENGTH,
    "empty name": OK + b": x\r\n" + LENGTH,
    "odd name": OK + b"X(: 1\r\n" + LENGTH,
    "name in utf-8": OK + "Größe: 1\r\n".encode() + LENGTH,
    "value in latin-1": OK + b"X-A: gr\xfc\xdfe\r\n" + LENGTH,
    "control in a value": OK + b"X-A: \x01\r\n" + LENGTH,
    "NUL in a value": OK + b"X-A: a\x00b\r\n" + LENGTH,
    "CR in a value": OK + b"X-A: a\rb\r\n" + LENGTH,
    "tab in a value": OK + b"X-A: a\tb\r\n" + LENGTH,
    "empty value": OK + b"X-Empty:\r\n" + LENGTH,
    "folded": OK + b"X-A: 1\r\n 2\r\n" + LENGTH,
    "coding with an empty continuation": OK + b"Transfer-Encoding: chunked\r\n\t\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    "folded first": OK + b" X: 1\r\n" + LENGTH,
    "reason in utf-8": "HTTP/1.1 200 Größe\r\n".encode() + LENGTH,
    "head of 70 KiB": OK + b"X: " + b"a" * 70000 + b"\r\n" + LENGTH,
    "head of 1 MiB": OK + b"X: a\r\n" * 180_000 + LENGTH,
    "399": b"HTTP/1.1 399 X\r\n" + LENGTH,
    "204 with body": b"HTTP/1.1 204 No Content\r\n\r\nxx",
    "304 with length": b"HTTP/1.1 304 X\r\nContent-Length: 9\r\n\r\n",
    "404": b"HTTP/1.1 404 X\r\n" + LENGTH,
    "500": b"HTTP/1.1 500 X\r\n" + LENGTH,
    "099": b"HTTP/1.1 099 X\r\n" + LENGTH,
    "+20": b"HTTP/1.1 +20 X\r\n" + LENGTH,
    "-20": b"HTTP/1.1 -20 X\r\n" + LENGTH,
    "20": b"HTTP/1.1 20 X\r\n" + LENGTH,
    "2000": b"HTTP/1.1 2000 X\r\n" + LENGTH,
    "2x0": b"HTTP/1.1 2x0 X\r\n" + LENGTH,
    "version 1.2": b"HTTP/1.2 200 X\r\n" + LENGTH,
    "version 3.0": b"HTTP/3.0 200 X\r\n" + LENGTH,
    "version 1.10": b"HTTP/1.10 200 X\r\n" + LENGTH,
    "http in small letters": b"http/1.1 200 X\r\n" + LENGTH,
    "icy": b"ICY 200 OK\r\n\r\nok",
    "version 0.9": b"ok",
    "nothing": b"",
    "cut in the head": OK + b"Content-Le",
    "short body": OK + b"Content-Length: 200\r\n\r\nok",
    "long short body": OK + b"Content-Length: 20000\r\n\r\n" + b"x" * 15_000,
    "body without length": OK + b"\r\nok",
    "redirect without location": b"HTTP/1.1 302 X\r\n" + LENGTH,
    "redirect to nothing": b"HTTP/1.1 302 X\r\nLocation:\r\n" + LENGTH,
    "redirect elsewhere": b"HTTP/1.1 302 X\r\nLocation: http://192.0.2.1/\r\n" + LENGTH,
    "redirect with a short body": b"HTTP/1.1 302 X\r\nLocation: http://192.0.2.1/\r\nContent-Length: 9\r\n\r\nok",
    "redirect to itself": b"HTTP/1.1 302 X\r\nLocation: /\r\n" + LENGTH,
    "redirect to another scheme": b"HTTP/1.1 302 X\r\nLocation: ftp://127.0.0.1/\r\n" + LENGTH,
    "redirect to no URL": b"HTTP/1.1 302 X\r\nLocation: http://127.0.0.1:x/\r\n" + LENGTH,
    "300 with location": b"HTTP/1.1 300 X\r\nLocation: http://192.0.2.1/\r\n" + LENGTH,
}


@contextlib.contextmanager
def application(reply: bytes) -> Iterator[int]:
    """A server that answers every connection so, and closes it."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=32)

    def serve() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            with client, contextlib.suppress(OSError):
                client.settimeout(2)
                client.recv(4096)
                client.sendall(reply)
                client.shutdown(socket.SHUT_WR)
                while client.recv(4096):
                    pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)


def passes(go: Oracle, reply: bytes) -> tuple[bool, bool]:
    """Return whether an answer passes with Go's client, and with ours as kubelet sees it."""
    with application(reply) as port:
        try:
            theirs = 200 <= go.ask("probe", f"http://127.0.0.1:{port}/") < 400
        except Refused:
            theirs = False
        page = asyncio.run(answer(AppProbe(kind="http", port=port, timeout_s=3), "127.0.0.1", None))
    return theirs, 200 <= page.status < 400


@pytest.mark.parametrize("name", ANSWERS)
def test_answer_passes_where_it_passes_kubelets_client(go: Oracle, name: str) -> None:
    theirs, ours = passes(go, ANSWERS[name])
    assert ours == theirs


_LINES = ["X: 1", "X Y: 1", "X", ": 1", " 1", "\t", "X:\x7f", "Content-Length: 2", "content-length:2"]
_LINES += ["Content-Length: 3", "Transfer-Encoding: chunked", "transfer-encoding: gzip"]
PIECES = st.builds("{}{}".format, st.sampled_from(_LINES), st.sampled_from(["\r\n", "\n"])).map(str.encode)
FIRST = st.sampled_from(
    [OK, b"HTTP/1.0 200 OK\n", b"HTTP/1.1 204\r\n", b"HTTP/1.1 103 E\r\n\r\n" + OK, b"HTTP/1.1 503 X\r\n"]
)
BODIES = st.sampled_from(
    [
        b"",
        b"ok",
        b"2\r\nok\r\n0\r\n\r\n",
        b"0\r\n\r\n",
        b"2\r\nok",
        b"0\r\nX: 1\r\n\r\n",
        b"02 \r\nok\r\n0\r\n\r\n",
    ]
)


@settings(max_examples=examples(300), deadline=None)
@given(FIRST, st.lists(PIECES, max_size=4), BODIES)
def test_any_answer_passes_where_it_passes_kubelets_client(
    go: Oracle, first: bytes, fields: list[bytes], body: bytes
) -> None:
    theirs, ours = passes(go, first + b"".join(fields) + b"\r\n" + body)
    assert ours == theirs
