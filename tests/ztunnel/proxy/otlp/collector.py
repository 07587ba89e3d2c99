"""An OpenTelemetry collector as far as it receives: OTLP over HTTP, with the messages that the library ships."""

import contextlib
import gzip
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.limits import WAIT_S


class Collector:
    """A collector with its received requests and scripted answers.

    Attributes:
        status: the status of every answer; can be changed at any time.
        hold: answers wait while it is not set.
    """

    def __init__(self) -> None:
        self.status = 200
        self.hold = threading.Event()
        self.hold.set()
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.logs: list[ExportLogsServiceRequest] = []
        self.metrics: list[ExportMetricsServiceRequest] = []
        self.traces: list[ExportTraceServiceRequest] = []
        self.port = 0
        self._came = threading.Condition()

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        coding = headers.get("content-encoding", "")
        data = {"gzip": gzip.decompress, "deflate": zlib.decompress}.get(coding, bytes)(body)
        with self._came:
            self.paths.append(path)
            self.headers.append(headers)
            if self.status == 200 and path.endswith("logs"):
                self.logs.append(ExportLogsServiceRequest.FromString(data))
            elif self.status == 200 and path.endswith("traces"):
                self.traces.append(ExportTraceServiceRequest.FromString(data))
            elif self.status == 200:
                self.metrics.append(ExportMetricsServiceRequest.FromString(data))
            self._came.notify_all()

    def wait(self, condition: Callable[[], Any]) -> None:
        """Wait until the received requests meet a condition."""
        with self._came:
            assert self._came.wait_for(condition, WAIT_S)

    def records(self) -> list[LogRecord]:
        """Every log record."""
        return [
            record
            for request in self.logs
            for resource in request.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]

    def spans(self) -> list[Span]:
        """Every span."""
        return [
            span
            for request in self.traces
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def families(self) -> list[Metric]:
        """Every metric of every request."""
        return [
            metric
            for request in self.metrics
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        ]


def attributes(message: Any) -> dict[str, Any]:
    """The attributes of a record, a point or a resource."""
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in message.attributes}


@contextlib.contextmanager
def collecting(listener: socket.socket | None = None) -> Iterator[Collector]:
    """A collector on a socket that listens, by default one on loopback."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            collector.take(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
            collector.hold.wait(WAIT_S)
            self.send_response(collector.status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True  # exporters keep their connections

        def server_bind(self) -> None:
            pass

        def server_activate(self) -> None:
            pass

    given = listener or socket.create_server(("127.0.0.1", 0))
    server = Server(("", 0), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = given
    collector.port = given.getsockname()[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield collector
    finally:
        collector.hold.set()
        server.shutdown()
        thread.join()
        server.server_close()
