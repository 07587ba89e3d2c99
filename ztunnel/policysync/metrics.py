"""The metrics of the PolicySync server: what its clients have reported of flows, and what it cannot serve."""

from collections.abc import Iterator
from operator import attrgetter

from ztunnel.http.exposition import Family, family, process_families
from ztunnel.policysync.server import PolicySyncServer


def families(server: PolicySyncServer, faulty: int) -> Iterator[Family]:
    """Yield the families of one scrape; ``faulty`` counts objects, or sets of files, not in force as written."""
    flows = server.flows
    for name, text, field in (
        ("flows", "Flows that policy servers reported, once an interval each", "flows"),
        ("flow_packets", "Packets of these flows, as far as they were told", "packets"),
        ("flow_bytes", "Bytes of these flows, as far as they were told", "octets"),
    ):
        read = attrgetter(field)
        found = [(key, float(read(counts))) for key, counts in flows.by_rule.items()]
        yield family(f"policysync_{name}", "counter", text, found, ("rule", "result"))
    yield family("policysync_report_faults", "counter", "Reports that could not be read", [((), flows.faults)], ())
    text = "Objects that are not in force as written; of files 1 while one has a fault"
    yield family("policysync_faulty_objects", "gauge", text, [((), float(faulty))], ())
    yield from process_families()
