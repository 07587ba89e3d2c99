"""The metrics of the PolicySync server: its clients' reports of flows, and objects that it cannot serve."""

from collections.abc import Iterable, Iterator
from operator import attrgetter

from ztunnel.policy.policysync.server import PolicySyncServer
from ztunnel.runtime.http.exposition import Family, family, process_families


def families(server: PolicySyncServer, faulty: int, not_followed: Iterable[str]) -> Iterator[Family]:
    """Yield the families of one scrape.

    Args:
        faulty: objects, or sets of files, that are not enforced as written.
        not_followed: plurals of the kinds that the API server currently does not provide.
    """
    flows = server.flows
    for name, text, field in (
        ("flows", "Flows that policy servers reported, once an interval each", "flows"),
        ("flow_packets", "Packets of these flows, where reports count them", "packets"),
        ("flow_bytes", "Bytes of these flows, where reports count them", "octets"),
    ):
        read = attrgetter(field)
        found = [(key, float(read(counts))) for key, counts in flows.by_rule.items()]
        yield family(f"policysync_{name}", "counter", text, found, ("rule", "result"))
    yield family("policysync_report_faults", "counter", "Reports that could not be read", [((), flows.faults)], ())
    text = "Objects that are not enforced as written, and files with parts that cannot be read"
    yield family("policysync_faulty_objects", "gauge", text, [((), float(faulty))], ())
    kinds = [((kind,), 1.0) for kind in not_followed]
    text = "Kinds that the API server does not report now: their last known state is served"
    yield family("policysync_not_followed", "gauge", text, kinds, ("what",))
    yield from process_families()
