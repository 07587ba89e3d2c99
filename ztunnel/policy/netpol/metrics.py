"""Metrics of a node's network policy in the kernel."""

from collections import Counter
from collections.abc import Iterable, Iterator

from tproxy.expressions import Verdict, VerdictCode
from tproxy.packets import counters
from tproxy.resources import Rule, Table
from ztunnel.policy.netpol.controller import Controller
from ztunnel.policy.netpol.table_builder import Built
from ztunnel.runtime.http.exposition import Family, family, process_families


def families(controller: Controller, table: Table | None, not_followed: Iterable[str]) -> Iterator[Family]:
    """Yield the metric families of one scrape.

    Args:
        table: the table as just read, with its counters.
        not_followed: the plurals of kinds, or paths of files, that cannot be followed now.
    """
    counts, built = controller.counts, controller.built
    plain: tuple[tuple[str, str, str, float], ...] = (
        ("netpol_synced", "gauge", "1 once every object has been received", controller.synced),
        ("netpol_in_force", "gauge", "1 while the table is what the objects want", controller.in_force),
        ("netpol_applied", "counter", "Transactions that changed the table", counts.applied),
        ("netpol_failed", "counter", "Attempts to change it that failed", counts.failed),
        ("netpol_repaired", "counter", "Changes by others that were repaired", counts.repaired),
        ("netpol_connections_ended", "counter", "Connections ended by a change of policy", counts.ended),
        ("netpol_last_apply_seconds", "gauge", "What the last change took", counts.last_apply_s),
        ("netpol_faulty_objects", "gauge", "Objects that are not enforced as written", controller.problems),
        (
            "netpol_unseen_rules",
            "gauge",
            "Rules that the kernel sees in part",
            len(built.unseen) if built else 0,
        ),
    )
    for name, kind, text, value in plain:
        yield family(name, kind, text, [((), float(value))], ())
    kinds = [((kind,), 1.0) for kind in not_followed]
    text = "Kinds or files that cannot be followed now: their last known state stays active"
    yield family("netpol_not_followed", "gauge", text, kinds, ("what",))
    if built is not None:
        pods = [((str(direction),), float(len(found))) for direction, found in built.policed.items()]
        yield family("netpol_policed_pods", "gauge", "Pods that policies isolate", pods, ("direction",))
    if built is not None and table is not None:
        labels = ("policy", "direction", "verdict")
        samples = [(key, float(value)) for key, value in sorted(counted(built, table).items())]
        yield family("netpol_packets", "counter", "First packets of connections, by what decided", samples, labels)
    yield from process_families()


def counted(built: Built, table: Table) -> Counter[tuple[str, str, str]]:
    """Return the number of packets by policy, direction and verdict. Where no rule decided, the policy is the end
    of a tier.
    """
    found: Counter[tuple[str, str, str]] = Counter()
    for chain, rule, counter in counters(table):
        verdict = outcome(rule)
        owner = built.owners.get(chain) or built.passing.get(rule.comment)
        if owner is not None:
            found[str(owner[0]), str(owner[1]), verdict] += counter.packets
        else:
            direction = "egress" if chain.startswith(("pod-out", "tier-out", "egress")) else "ingress"
            found[rule.comment, direction, verdict] += counter.packets
    return found


def outcome(rule: Rule) -> str:
    """Return what a rule does with a packet: ``allowed``, ``dropped``, or ``passed`` to other rules."""
    end = rule.phrase[-1]
    code = end.code if isinstance(end, Verdict) else None
    return {VerdictCode.DROP: "dropped", VerdictCode.ACCEPT: "allowed"}.get(
        VerdictCode(VerdictCode.RETURN if code is None else code), "passed"
    )
