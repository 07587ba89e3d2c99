"""Compares the tunnel engine with the ``h2`` library, without sockets.

``python -m bench.http2_micro`` prints what each achieves per core: received bytes in DATA frames of 16 KiB, and
decoded CONNECT requests of a few header fields. Each number is the median of interleaved rounds.
"""

import statistics
import time
from collections.abc import Callable

import h2.config
import h2.connection
import h2.events

from hbone.engine import Engine
from hbone.events import DataReceived, RequestReceived
from hbone.settings import Http2Settings, Role

CONNECT = [
    (b":method", b"CONNECT"),
    (b":authority", b"10.244.1.10:8080"),
    (b"baggage", b"k8s.cluster.name=Kubernetes,k8s.namespace.name=default,service.name=productpage"),
    (b"forwarded", b'for="10.244.2.10:41234"'),
]
FRAME_BYTES = 16_384
FRAMES = 2_000
CONNECTIONS, REQUESTS = 25, 80
ROUNDS = 5


def _client() -> h2.connection.H2Connection:
    client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True, header_encoding=None))
    client.initiate_connection()
    return client


def _requests() -> list[bytes]:
    """Return the preface, then one CONNECT request per piece, up to the limit of open streams."""
    client = _client()
    pieces = [client.data_to_send()]
    for stream in range(1, 2 * REQUESTS, 2):
        client.send_headers(stream, CONNECT)
        pieces.append(client.data_to_send())
    return pieces


def _bulk() -> list[bytes]:
    """Return the preface and one CONNECT request, then DATA frames."""
    client = _client()
    client.send_headers(1, CONNECT)
    frame = FRAME_BYTES.to_bytes(3, "big") + b"\0\0" + (1).to_bytes(4, "big") + bytes(FRAME_BYTES)
    return [client.data_to_send(), *([frame] * FRAMES)]


def _ours(pieces: list[bytes]) -> tuple[int, int]:
    engine = Engine(Role.SERVER, Http2Settings())
    requests = size = 0
    for piece in pieces:
        for event in engine.receive_data(piece):
            if isinstance(event, DataReceived):
                size += event.size
                engine.acknowledge(event.stream_id, event.size)
            elif isinstance(event, RequestReceived):
                requests += 1
    return requests, size


def _theirs(pieces: list[bytes]) -> tuple[int, int]:
    server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding=None))
    server.initiate_connection()
    requests = size = 0
    for piece in pieces:
        for event in server.receive_data(piece):
            if isinstance(event, h2.events.DataReceived):
                size += len(event.data)
                server.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.RequestReceived):
                requests += 1
    return requests, size


def _seconds(
    run: Callable[[list[bytes]], tuple[int, int]], pieces: list[bytes], expected: tuple[int, int]
) -> float:
    begun = time.process_time()
    found = run(pieces)
    took = time.process_time() - begun
    assert found == expected, f"{run.__name__}: {found} of {expected} requests and bytes"
    return took


def main() -> None:
    """Print the table."""
    bulk, requests = _bulk(), _requests()
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for name, run in (("hbone", _ours), ("h2", _theirs)):
            times.setdefault((name, "bulk"), []).append(_seconds(run, bulk, (1, FRAMES * FRAME_BYTES)))
            took = sum(_seconds(run, requests, (REQUESTS, 0)) for _ in range(CONNECTIONS))
            times.setdefault((name, "requests"), []).append(took)
    print("| receiving | hbone | h2 | ratio |\n|---|---:|---:|---:|")
    amounts = (
        ("bulk", FRAMES * FRAME_BYTES / 1e6, "MB/s"),
        ("requests", float(CONNECTIONS * REQUESTS), "/s"),
    )
    for case, amount, unit in amounts:
        ours, theirs = (amount / statistics.median(times[name, case]) for name in ("hbone", "h2"))
        print(f"| {case} | {ours:,.0f} {unit} | {theirs:,.0f} {unit} | {ours / theirs:.1f} |")


if __name__ == "__main__":
    main()
