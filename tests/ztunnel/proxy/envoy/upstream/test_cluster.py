"""Clusters that find their endpoints by name: what happens while a name does not resolve."""

import asyncio
import random
from typing import Any

import pytest

from xds.dialects.envoy import Surroundings
from xds.model.address import NamedAddress, SocketAddress
from xds.model.cluster import (
    Cluster,
    Discovery,
    Endpoint,
    LoadAssignment,
    Locality,
    LocalityGroup,
    OutlierDetection,
)
from xds.proto.well_known import Any as AnyMessage
from ztunnel.proxy.dataplane.resolver import Answer, ResolveFailed, Resolver
from ztunnel.proxy.envoy.config.sources import Sources
from ztunnel.proxy.envoy.path.dial import count_failure
from ztunnel.proxy.envoy.secrets.store import SecretStore
from ztunnel.proxy.envoy.stats.stats import Counter, Stats
from ztunnel.proxy.envoy.stream.outcome import UpstreamFailed
from ztunnel.proxy.envoy.upstream.cluster import LiveCluster, Surround
from ztunnel.proxy.envoy.upstream.outlier import Result
from ztunnel.runtime.clock import SystemClock


class Names(Resolver):
    """Returns scripted answers, each once, and then repeats the last one."""

    def __init__(self, *answers: str) -> None:
        super().__init__()
        self.answers = list(answers)
        self.asked = 0

    async def resolve(self, name: str, family: str) -> Answer:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if not answer:
            raise ResolveFailed(name)
        return Answer((answer,), 3600.0)


class Waits(list[float]):
    """In the place of ``asyncio.sleep``: notes how long, and waits no time."""

    async def __call__(self, delay: float) -> None:
        self.append(delay)
        if len(self) == 8:
            await asyncio.Event().wait()


#: The counts of eight resolutions. The last answer repeats the previous one.
COUNTED = {"attempt": 8, "failure": 5, "success": 3, "empty": 0, "no_rebuild": 1}


def surround_of(rng: random.Random, resolver: Resolver) -> Surround:
    """Return the surroundings of a cluster without subscriptions and health checks."""
    stats, sources = Stats(), Sources(None, None, None)  # type: ignore[arg-type]  # nothing is subscribed to
    return Surround(
        sources=sources,
        secrets=SecretStore(sources, Surroundings(read_file=lambda _: b"", environment={}), stats, SystemClock()),
        stats=stats,
        clock=SystemClock(),
        rng=rng,
        resolver=resolver,
        prober=None,  # type: ignore[arg-type]  # no cluster has checks
        strict_tls=True,
    )


def found(cluster: LiveCluster) -> list[str]:
    return [str(host) for host in cluster.hosts.hosts]


@pytest.mark.parametrize(
    ("backoff", "jitter", "waits"),
    [
        (None, 0.0, [5.0] * 8),
        # Half of it after each answer, and none after a failure.
        (None, 2.0, [5.0, 5.0, 5.0, 5.0, 6.0, 5.0, 6.0, 6.0]),
        # Half of a ceiling that doubles from the base up to the maximum; an answer ends it.
        ((1.0, 4.0), 0.0, [0.5, 1.0, 2.0, 2.0, 5.0, 0.5, 5.0, 5.0]),
    ],
)
def test_a_name_that_does_not_resolve(
    monkeypatch: pytest.MonkeyPatch, backoff: tuple[float, float] | None, jitter: float, waits: list[float]
) -> None:
    async def main() -> None:
        endpoint = Endpoint(address=NamedAddress("db", 5432))
        assignment = LoadAssignment(
            cluster_name="db",
            groups=(LocalityGroup(locality=Locality("", "", ""), priority=0, weight=0, endpoints=(endpoint,)),),
        )
        model = Cluster(
            name="db",
            discovery=Discovery.STRICT_DNS,
            assignment=assignment,
            dns_failure_backoff=backoff,
            dns_jitter_s=jitter,
        )
        names = Names("", "", "", "", "10.0.0.1", "", "10.0.0.2")
        slept = Waits()
        rng = random.Random(1)
        monkeypatch.setattr(rng, "random", lambda: 0.5)
        monkeypatch.setattr("ztunnel.proxy.envoy.upstream.cluster.asyncio.sleep", slept)
        surround = surround_of(rng, names)
        cluster = LiveCluster(model, AnyMessage(), surround)
        cluster.show_state()
        cluster.start()
        turn = asyncio.Event()
        while len(slept) < 8:
            asyncio.get_running_loop().call_soon(turn.set)
            await turn.wait()
            turn.clear()
        assert slept == waits
        assert found(cluster) == ["10.0.0.2:5432"]
        names_and_values = {metric.name: metric.value for metric in surround.stats if isinstance(metric, Counter)}
        assert {name: names_and_values[f"cluster.db.update_{name}"] for name in COUNTED} == COUNTED
        await cluster.close()

    asyncio.run(main())


class Rotating(Resolver):
    """Returns two addresses, in turn in either order."""

    def __init__(self, ttl_s: float) -> None:
        super().__init__()
        self._addresses = ("10.0.0.1", "10.0.0.2")
        self._ttl_s = ttl_s

    async def resolve(self, name: str, family: str) -> Answer:
        self._addresses = self._addresses[::-1]
        return Answer(self._addresses, self._ttl_s)


def _resolved(monkeypatch: pytest.MonkeyPatch, ttl_s: float, **fields: Any) -> tuple[list[list[str]], list[float]]:
    """Return the hosts of a cluster with a rotating name before each of its waits, and the waits."""
    endpoint = Endpoint(address=NamedAddress("db", 5432))
    group = LocalityGroup(locality=Locality("", "", ""), priority=0, weight=0, endpoints=(endpoint,))
    model = Cluster(name="db", assignment=LoadAssignment(cluster_name="db", groups=(group,)), **fields)
    hosts: list[list[str]] = []
    waits: list[float] = []

    async def main() -> None:
        enough = asyncio.Event()

        async def sleep(delay: float) -> None:
            hosts.append(found(cluster))
            waits.append(delay)
            if len(waits) == 4:
                enough.set()
                await asyncio.Event().wait()

        monkeypatch.setattr("ztunnel.proxy.envoy.upstream.cluster.asyncio.sleep", sleep)
        cluster = LiveCluster(model, AnyMessage(), surround_of(random.Random(1), Rotating(ttl_s)))
        cluster.start()
        await enough.wait()
        await cluster.close()

    asyncio.run(main())
    return hosts, waits


def test_a_logical_dns_cluster_uses_the_first_address_of_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts, _ = _resolved(monkeypatch, 60.0, discovery=Discovery.LOGICAL_DNS)
    assert hosts == [["10.0.0.2:5432"], ["10.0.0.1:5432"]] * 2


@pytest.mark.parametrize(("ttl_s", "wait_s"), [(9.0, 9.0), (0.0, 5.0)])
def test_a_time_to_live_of_zero_does_not_replace_the_refresh_rate(
    monkeypatch: pytest.MonkeyPatch, ttl_s: float, wait_s: float
) -> None:
    _, waits = _resolved(
        monkeypatch, ttl_s, discovery=Discovery.STRICT_DNS, respect_dns_ttl=True, dns_refresh_s=5.0
    )
    assert waits == [wait_s] * 4


def test_failures_of_a_removed_host_do_not_count_towards_the_ejection_limit() -> None:
    def assigned(*hosts: str) -> LoadAssignment:
        endpoints = tuple(Endpoint(address=SocketAddress(host, 80)) for host in hosts)
        group = LocalityGroup(locality=Locality("", "", ""), priority=0, weight=0, endpoints=endpoints)
        return LoadAssignment(cluster_name="web", groups=(group,))

    model = Cluster(
        name="web",
        discovery=Discovery.EDS,
        eds_name="web",
        outlier=OutlierDetection(consecutive_5xx=1, consecutive_gateway_failure=1, max_ejection_percent=50),
    )
    cluster = LiveCluster(model, AnyMessage(), surround_of(random.Random(1), Resolver()))
    cluster.preset(assigned("10.0.0.1", "10.0.0.2", "10.0.0.3"))
    (gone, failing, _) = cluster.hosts.hosts
    cluster._assign(assigned("10.0.0.2", "10.0.0.3"))
    cluster.report(gone, Result.FAILURE)  # its dial began before the removal
    cluster.report(failing, Result.FAILURE)
    assert (gone.ejected, failing.ejected) == (False, True)
    assert cluster.outlier is not None
    assert list(cluster.outlier._monitors) == [failing]


@pytest.mark.parametrize("status", [403, 500, 503])
@pytest.mark.parametrize("split", [False, True])
def test_refused_tunnel_has_a_local_origin(status: int, split: bool) -> None:
    """Envoy 1.40's TCP proxy counts each refusal of a CONNECT as ``LocalOriginConnectFailed``, by any status."""
    enforced = {"enforcing_consecutive_5xx": 0, "enforcing_consecutive_gateway_failure": 0 if split else 100}
    outlier = OutlierDetection(
        consecutive_gateway_failure=2,
        consecutive_local_origin_failure=2,
        split_external_local_origin_errors=split,
        max_ejection_percent=100,
        **enforced,
    )
    model = Cluster(name="web", discovery=Discovery.EDS, eds_name="web", outlier=outlier)
    cluster = LiveCluster(model, AnyMessage(), surround_of(random.Random(1), Resolver()))
    endpoint = Endpoint(address=SocketAddress("10.0.0.1", 80))
    group = LocalityGroup(locality=Locality("", "", ""), priority=0, weight=0, endpoints=(endpoint,))
    cluster.preset(LoadAssignment(cluster_name="web", groups=(group,)))
    (host,) = cluster.hosts.hosts
    for _ in range(2):
        assert not host.ejected
        count_failure(cluster, host, UpstreamFailed("refused", status=status))
    assert host.ejected
