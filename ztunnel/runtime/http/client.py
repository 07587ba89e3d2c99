"""A small HTTP/1.1 client on h11, over a connection that the caller has made, for one request and its answer.

``ztunnel tap`` uses h11 directly, because a capture has trailers and a blocking socket. Probes of applications
parse answers like Go (:mod:`ztunnel.proxy.istio.admin.probe_response`).
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

import h11

_READ_BYTES: Final = 64 * 1024


class BadAnswer(ValueError):
    """The response is not HTTP, or is incomplete or too long; the text says which."""


async def ask(
    send: Callable[[bytes], None],
    read: Callable[[int], Awaitable[bytes]],
    method: str,
    target: str,
    headers: Iterable[tuple[str, str]],
    *,
    most_bytes: int = 0,
) -> tuple[int, bytes]:
    """Send a request, and return the final response's status and body.

    Args:
        send: called with the request's bytes.
        read: returns at most the requested number of bytes, or no bytes at the end of the connection.
        headers: the request's headers. They must include ``Host``.
        most_bytes: the longest body. With 0 the body is not read.

    Raises:
        BadAnswer: the response cannot be used.
        OSError: the connection broke. Errors that ``send`` and ``read`` raise are passed on.
    """
    http = h11.Connection(h11.CLIENT)
    request = h11.Request(method=method, target=target, headers=list(headers))
    send((http.send(request) or b"") + (http.send(h11.EndOfMessage()) or b""))
    status, pieces, size = 0, list[bytes](), 0
    while True:
        try:
            event = http.next_event()
            if event is h11.NEED_DATA:
                data = await read(_READ_BYTES)
                if not data and not status:
                    raise BadAnswer("the connection ended without an answer")
                http.receive_data(data)
        except h11.RemoteProtocolError as error:
            raise BadAnswer(str(error)) from error
        if isinstance(event, h11.Response):
            status = event.status_code
            if not most_bytes:
                return status, b""
        elif isinstance(event, h11.Data):
            pieces.append(bytes(event.data))
            size += len(event.data)
            if size > most_bytes:
                raise BadAnswer(f"{target} is longer than {most_bytes} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return status, b"".join(pieces)
