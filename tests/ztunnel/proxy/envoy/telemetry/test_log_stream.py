"""Streams to access log services: batches, bounds, and services that come and go."""

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from tests.ports import free_port
from tests.ztunnel.proxy.envoy.telemetry.log_service import LogService
from tests.ztunnel.proxy.envoy.telemetry.test_format import info
from xds.aio.channel import Channel
from xds.model.access_log import Comparison, GrpcAccessLog, LogStream, StatusFilter
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.data.accesslog.v3.accesslog_pb2 import TCPAccessLogEntry
from ztunnel.proxy.envoy.stats.stats import Stats
from ztunnel.proxy.envoy.telemetry import log_stream
from ztunnel.proxy.envoy.telemetry.access_log import AccessLogs, write_all
from ztunnel.proxy.envoy.telemetry.log_stream import Batch, LogStreams

LIMIT_S = 30.0


def entry(number: int) -> TCPAccessLogEntry:
    made = TCPAccessLogEntry()
    made.connection_properties.received_bytes = 1000 + number
    return made


def test_a_batch_takes_entries_until_it_is_full() -> None:
    size = entry(0).ByteSize()
    batch = Batch(2 * size)
    assert not batch.full
    assert batch.add(entry(1))
    assert not batch.full
    assert batch.add(entry(2))
    assert batch.full
    assert not batch.add(entry(3))
    assert batch.take() == [entry(1), entry(2)]
    assert batch.add(entry(4))
    assert len(batch) == 1


def test_without_a_size_each_entry_is_a_batch() -> None:
    batch = Batch(0)
    assert not batch.full
    assert batch.add(entry(1))
    assert batch.full


class Logging:
    """A logger of a service at a port, and its counters."""

    def __init__(self, port: int, **more: object) -> None:
        self.stats = Stats()

        def connect_to(name: str) -> Callable[[], object]:
            assert name == "als"

            @asynccontextmanager
            async def connect() -> AsyncIterator[Channel]:
                async with Channel(f"127.0.0.1:{port}", connect_timeout_s=5.0) as channel:
                    yield channel

            return connect

        self.streams = LogStreams(connect_to, Node(id="n"), self.stats)  # type: ignore[arg-type]
        model = LogStream(**{"cluster": "als", "log_name": "l", "http": False, "flush_interval_s": 0.01, **more})
        self.sinks = AccessLogs(self.stats, streams=self.streams).sinks([GrpcAccessLog(stream=model)])

    def log(self, *numbers: int) -> None:
        for number in numbers:
            write_all(self.sinks, info(bytes_received=number))

    def count(self, name: str) -> int:
        full = f"access_logs.grpc_access_log.{name}"
        return next(int(metric.value) for metric in self.stats if metric.name == full)  # type: ignore[union-attr]


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main()

    asyncio.run(limited())


def received(service: LogService) -> list[int]:
    return [each.connection_properties.received_bytes for each in service.entries]


def test_entries_arrive_in_order_and_the_first_message_identifies_the_sender() -> None:
    async def main() -> None:
        with LogService() as service:
            logging = Logging(service.port)
            logging.log(1, 2)
            await until(lambda: len(service.messages) == 1)
            logging.log(3)
            await until(lambda: len(service.messages) == 2)
            assert received(service) == [1, 2, 3]
            (one, first), (two, second) = service.messages
            assert one == two
            assert (first.identifier.node.id, first.identifier.log_name) == ("n", "l")
            assert not second.HasField("identifier")
            await logging.streams.close()
            assert service.ended == 1  # in order, not by a broken call
            assert (logging.count("logs_written"), logging.count("logs_dropped")) == (3, 0)

    run(main)


def test_a_full_batch_does_not_wait_and_a_proxy_that_ends_sends_the_rest() -> None:
    async def main() -> None:
        with LogService() as service:
            logging = Logging(service.port, flush_interval_s=3600.0, buffer_bytes=1)
            logging.log(1)
            await until(lambda: received(service) == [1])
            rest = Logging(service.port, flush_interval_s=3600.0)
            rest.log(2)
            await rest.streams.close()
            assert received(service) == [1, 2]
            await logging.streams.close()

    run(main)


def test_loggers_with_equal_settings_share_a_stream() -> None:
    async def main() -> None:
        with LogService() as service:
            logging = Logging(service.port)
            stream = LogStream(cluster="als", log_name="l", http=False, flush_interval_s=0.01)
            only_errors = GrpcAccessLog(stream=stream, filter=StatusFilter(Comparison.AT_LEAST, 400))
            logs = AccessLogs(logging.stats, streams=logging.streams)
            logging.sinks = (*logging.sinks, *logs.sinks([only_errors]))
            logging.log(1)
            await until(lambda: received(service) == [1])  # the filter keeps the second logger's out
            await logging.streams.close()
            assert {number for number, _ in service.messages} == {1}

    run(main)


def test_unreachable_log_service_keeps_one_batch_and_counts_dropped_entries() -> None:
    async def main() -> None:
        port = free_port()
        logging = Logging(port, buffer_bytes=200)
        logging.log(*range(10))
        kept = logging.count("logs_written")
        assert 0 < kept < 10
        assert logging.count("logs_dropped") == 10 - kept
        with LogService(port) as service:
            await until(lambda: received(service) == list(range(kept)))
            logging.log(99)
            await until(lambda: received(service)[-1] == 99)
            await logging.streams.close()

    run(main)


def test_a_stream_that_the_service_ends_is_opened_again() -> None:
    async def main() -> None:
        logging = None
        with LogService() as service:
            logging = Logging(service.port)
            logging.log(1)
            await until(lambda: received(service) == [1])
        with LogService(service.port) as again:
            number = 1
            while not again.messages:  # what was on its way when the first one ended is lost
                number += 1
                logging.log(number)
                await asyncio.sleep(0.01)
            assert again.messages[0][1].identifier.log_name == "l"
            await logging.streams.close()

    run(main)


def test_log_service_that_does_not_read_buffers_a_batch_and_a_window() -> None:
    async def main() -> None:
        reads = threading.Event()
        with LogService(reads=reads.wait) as service:
            logging = Logging(service.port, buffer_bytes=4096)
            while not logging.count("logs_dropped"):
                logging.log(*range(100))
                await asyncio.sleep(0)
            reads.set()
            await until(lambda: len(service.entries) == logging.count("logs_written"))
            await logging.streams.close()

    run(main)


def test_a_stream_without_entries_ends_and_the_next_entry_opens_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_stream, "IDLE_S", 0.02)

    async def main() -> None:
        with LogService() as service:
            logging = Logging(service.port)
            logging.log(1)
            await until(lambda: service.ended == 1)
            logging.log(2)
            await until(lambda: received(service) == [1, 2])
            assert [number for number, _ in service.messages] == [1, 2]
            await logging.streams.close()

    run(main)
