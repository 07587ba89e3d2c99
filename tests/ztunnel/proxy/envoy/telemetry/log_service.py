"""An access log service for tests: what it received, and a server of it that may be stopped."""

import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from types import TracebackType
from typing import Any, Self

import grpc

from xds.proto.envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage, StreamAccessLogsResponse

_NAME = "envoy.service.accesslog.v3.AccessLogService"


class LogService:
    """A server that stores every message, with the number of its stream.

    Args:
        port: the port to listen on, on loopback; 0 is a free one.
        reads: called before each message is read.
    """

    def __init__(self, port: int = 0, reads: Callable[[], object] = lambda: None) -> None:
        self.messages: list[tuple[int, StreamAccessLogsMessage]] = []
        self.ended = 0
        self._reads = reads
        self._streams = 0
        self._lock = threading.Lock()
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        handler = grpc.stream_unary_rpc_method_handler(
            self._stream, StreamAccessLogsMessage.FromString, StreamAccessLogsResponse.SerializeToString
        )
        generic = grpc.method_handlers_generic_handler(_NAME, {"StreamAccessLogs": handler})
        self._server.add_generic_rpc_handlers((generic,))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")

    def _stream(self, messages: Iterator[StreamAccessLogsMessage], _: object) -> StreamAccessLogsResponse:
        with self._lock:
            self._streams += 1
            number = self._streams
        while True:
            self._reads()
            message = next(messages, None)
            if message is None:
                self.ended += 1
                return StreamAccessLogsResponse()
            self.messages.append((number, message))

    @property
    def entries(self) -> list[Any]:
        """All entries so far, of either kind."""
        return [
            entry
            for _, message in list(self.messages)
            for entry in (*message.tcp_logs.log_entry, *message.http_logs.log_entry)
        ]

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(None).wait()
