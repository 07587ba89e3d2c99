"""Traffic series against a model: connections, workloads and time in any order, within a budget."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hbone.aio.relay import ByteCounts
from tests.generated import examples
from tests.ztunnel.proxy.istio.nodes import LOCAL
from tests.ztunnel.proxy.istio.pages import samples
from xds.model.mesh import Changes
from xds.model.workload import WorkloadUid
from ztunnel.proxy.istio.accounting.metrics import EXPIRY_S, Metrics, PeerLabels, traffic_labels
from ztunnel.proxy.istio.accounting.traffic_series import TrafficSeries

BUDGET = 4
UIDS = [f"uid-{number}" for number in range(8)]
OPENED, CLOSED = "istio_tcp_connections_opened_total", "istio_tcp_connections_closed_total"


def labels_of(uid: str) -> tuple[str, ...]:
    side = PeerLabels.of(LOCAL)._replace(workload=uid)
    return traffic_labels("source", side, PeerLabels(), None, secured=False)


class Traffic(RuleBasedStateMachine):
    """The model: the workloads, the open connections, and the last use of each label set."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = Metrics("v", BUDGET)
        self.now_s = 0.0
        self.there: set[str] = set(UIDS)
        self.live: list[tuple[str, TrafficSeries, ByteCounts]] = []
        self.opened = self.closed = 0
        self.seen: dict[str, float] = {}

    @rule(uid=st.sampled_from(UIDS))
    def open(self, uid: str) -> None:
        counts = ByteCounts()
        self.there.add(uid)
        self.live.append((uid, self.metrics.opened(labels_of(uid), [uid], counts, self.now_s), counts))
        self.opened += 1

    @precondition(lambda self: self.live)
    @rule(data=st.data(), sent=st.integers(0, 100), flags=st.sampled_from(["-", "DENY"]))
    def close(self, data: st.DataObject, sent: int, flags: str) -> None:
        _, series, counts = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        counts._sent += sent
        series.used_s = self.now_s
        series.finished(flags, counts)
        self.closed += 1

    @rule(uids=st.sets(st.sampled_from(UIDS), min_size=1), stay=st.booleans())
    def workloads_change(self, uids: set[str], stay: bool) -> None:
        changes = Changes(workloads={WorkloadUid(uid) for uid in uids})
        self.metrics.changed(changes, uids if stay else [])
        if not stay:
            self.there -= uids

    @rule(passed_s=st.sampled_from([1.0, EXPIRY_S / 2, EXPIRY_S + 1]))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s
        before = samples(self.metrics, OPENED)
        dropped = self.metrics.expire(self.now_s)
        after = samples(self.metrics, OPENED)
        assert before.items() >= after.items()
        assert len(before) - len(after) == dropped
        for key in before.keys() - after.keys():
            self.opened -= int(before[key])
            self.closed -= int(before[key])  # only idle series are dropped
            del self.seen[key]
            assert not any(f'source_workload="{uid}"' in key for uid in self.there)

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        assert sum(samples(self.metrics, OPENED).values()) == self.opened
        assert sum(samples(self.metrics, CLOSED).values()) == self.closed
        assert self.opened - self.closed == len(self.live)

    @invariant()
    def counters_only_rise(self) -> None:
        for key, value in samples(self.metrics, OPENED).items():
            assert value >= self.seen.get(key, 0)
            self.seen[key] = value

    @invariant()
    def what_lives_is_shown(self) -> None:
        shown = samples(self.metrics, OPENED)
        for _, series, _ in self.live:
            assert any(f'source_workload="{series.labels[1]}"' in key for key in shown)

    @invariant()
    def the_budget_holds(self) -> None:
        assert len(self.metrics.series) <= BUDGET + 1  # and one for all the others


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
