"""A node proxy's insides without its sockets: real objects, a clock that stands still, logs in memory."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from hbone.aio.poller import Poller
from xds.model.mesh import Mesh
from xds.model.workload import Locality, Protocol, Workload, WorkloadUid
from ztunnel.proxy.dataplane.resolver import Resolver
from ztunnel.proxy.istio.accounting.logs import LogStream
from ztunnel.proxy.istio.accounting.metrics import Metrics
from ztunnel.proxy.istio.certificates.fake_ca import FakeCertificateAuthority
from ztunnel.proxy.istio.certificates.manager import CertificateManager
from ztunnel.proxy.istio.environment import config_from
from ztunnel.proxy.istio.path.names import Names
from ztunnel.proxy.istio.path.node import Node
from ztunnel.runtime.log_writer import LogWriter

#: 2026-11-21T11:14:45.997947Z, as in the samples of logs.
WALL_S = 1795259685.997947


class StoppedClock:
    """Goes on when told."""

    def __init__(self) -> None:
        self.passed_s = 0.0

    def monotonic(self) -> float:
        return 1000.0 + self.passed_s

    def wall(self) -> float:
        return WALL_S + self.passed_s


class Lines:
    """A log stream whose lines can be read back."""

    def __init__(self, folder: Path, filter_text: str, *, json_lines: bool) -> None:
        self._path = folder / "stdout"
        self._writer = LogWriter()
        file = self._writer.file(str(self._path))
        self.stream = LogStream(self._writer, file, filter_text, json_lines=json_lines)

    def __iter__(self) -> Iterator[str]:
        self.stream.flush()
        self._writer.drain()
        yield from self._path.read_text().splitlines()

    def close(self) -> None:
        self._writer.close()


@contextmanager
def a_node(folder: Path, env: Mapping[str, str] | None = None) -> Iterator[tuple[Node, StoppedClock, Lines]]:
    """A node with a fake authority, its clock and its log; inside a running loop."""
    config = config_from(env or {}, cpus=2, read_file=lambda path: None)
    clock = StoppedClock()
    lines = Lines(folder, config.log_filter, json_lines=config.log_json)

    def now() -> datetime:
        return datetime.now(UTC)

    poller = Poller()
    try:
        node = Node(
            config=config,
            mesh=Mesh(node=config.node),
            certificates=CertificateManager(FakeCertificateAuthority(now=now), now=now, jitter=random.random),
            poller=poller,
            clock=clock,
            metrics=Metrics(config.version_tag, config.metric_series),
            logs=lines.stream,
            names=Names(Resolver(), clock),
        )
        yield node, clock, lines
    finally:
        poller.close()
        lines.close()


LOCAL = Workload(
    uid=WorkloadUid("Kubernetes//Pod/default/local"),
    name="local",
    namespace="default",
    addresses=("127.0.0.1",),
    protocol=Protocol.HBONE,
    canonical_name="local-app",
    canonical_revision="v1",
    workload_name="local-deployment",
    cluster_id="",
    locality=Locality("eu", "eu-1"),
)
