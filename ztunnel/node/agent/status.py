"""Pages of ``ztunnel agent --kube``: health, readiness, metrics, and why each pod is or is not in the mesh."""

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Iterator
from typing import Any

from tproxy.errors import TproxyError
from xds.model.address import SocketAddress
from ztunnel.kube.informer import Informer
from ztunnel.node.agent.audit import counted
from ztunnel.node.agent.auditor import Auditor
from ztunnel.node.agent.cni.installer import Installation, facts
from ztunnel.node.agent.cni_server import CniServer
from ztunnel.node.agent.enroller import Enroller
from ztunnel.node.agent.namespaces import iptables_tables, try_rules
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.http.exposition import Family, family, page, process_families
from ztunnel.runtime.http.page import JSON, Page, PageRequest, not_found, text
from ztunnel.runtime.http.server import PageServer
from ztunnel.runtime.kernel_facts import kernel_facts
from ztunnel.runtime.settings import plain_reason

_PATHS = ("/healthz", "/readyz", "/metrics", "/pods", "/audit", "/check")


def status_server(
    address: SocketAddress,
    enroller: Enroller,
    informer: Informer,
    auditor: Auditor,
    cni: CniServer | None = None,
    installation: Installation | None = None,
) -> PageServer:
    """Return a server of the agent's HTTP pages, which serves while entered."""

    def pages(request: PageRequest) -> Page | Awaitable[Page]:
        match request.path:
            case "/audit":
                return audit(auditor, request)
            case "/healthz":
                return text("ok\n")
            case "/readyz":
                missing = unready(enroller, informer)
                return text(f"{missing}\n", 503) if missing else text("ready\n")
            case "/check":
                return check(request, enroller, auditor, installation)
            case "/metrics":
                return page(families(enroller, informer, auditor, cni), request)
            case "/pods":
                return text(json.dumps(pods(enroller, auditor), indent=1) + "\n", content_type=JSON)
            case _:
                return not_found(_PATHS)

    return PageServer("status", address, pages, SystemClock())


async def audit(auditor: Auditor, request: PageRequest) -> Page:
    """Compare every pod now, and return the result as a page. ``POST`` also repairs the parts that the agent
    writes.

    This is only for clients on this node: a comparison reads a whole dump of the proxy, and other hosts must not
    trigger repairs.
    """
    if not request.local:
        return text("only for this node: use a loopback address\n", 403)
    report = await auditor.report(repair=request.method == "POST")
    return text(json.dumps(report, indent=1) + "\n", content_type=JSON)


async def check(
    request: PageRequest, enroller: Enroller, auditor: Auditor, installation: Installation | None
) -> Page:
    """Return facts of the node for ``ztunnel check``. Kernel facts are the host's.

    ``rulesRefused`` is the reason why the kernel refused a pod's rules. Empty if it accepts them.
    """
    if not request.local:
        return text("only for this node: use a loopback address\n", 403)
    refused, tables = "", {}
    try:
        tables = await asyncio.to_thread(iptables_tables)
        await asyncio.to_thread(try_rules)
    except (TproxyError, OSError) as error:
        refused = plain_reason(error)
    found = {
        "kernel": kernel_facts(),
        "rulesRefused": refused,
        "iptables": tables,
        "probes": {"fault": enroller.agent.probes.fault, "ebpf": auditor.hint},
        "cni": None if installation is None else facts(installation),
    }
    return text(json.dumps(found, indent=1) + "\n", content_type=JSON)


def unready(enroller: Enroller, informer: Informer) -> str:
    """Return why a new pod cannot be enrolled now. Empty if it can."""
    if not enroller.synced:
        return "; ".join(informer.faults.values()) or "the API server has not answered yet"
    if not enroller.agent.proxies:
        return "no ztunnel is connected: pods of the mesh cannot start on this node"
    return ""


def pods(enroller: Enroller, auditor: Auditor) -> dict[str, dict[str, Any]]:
    """Return a page with each pod of the node: whether it belongs to the mesh and why, its annotation, and its
    state.
    """
    found = {}
    for uid, (pod, decision, fault) in sorted(enroller.pods().items()):
        held = enroller.agent.pod(uid)
        found[f"{pod.info.namespace}/{pod.info.name}"] = {
            "uid": uid,
            "wanted": decision.enrol,
            "because": decision.reason,
            "annotation": pod.annotation,
            "phase": None if held is None else held.phase.value,
            "netns": None if held is None else held.description.netns,
            "fault": fault or ("" if held is None else held.error),
            "findings": sorted(f"{each.reason}: {each.text}" for each in auditor.findings.get(uid, ())),
        }
    return found


def families(enroller: Enroller, informer: Informer, auditor: Auditor, cni: CniServer | None) -> Iterator[Family]:
    """Yield the agent's metric families for one scrape."""
    phases = Counter(held.phase.value for held in enroller.agent.pods().values())
    decided = Counter(decision.reason.value for _, decision, _ in enroller.pods().values())
    plain: tuple[tuple[str, str, str, float], ...] = (
        ("ztunnel_agent_synced", "gauge", "1 once every pod is known", enroller.synced),
        ("ztunnel_agent_faults", "gauge", "Kinds of objects that cannot be watched", len(informer.faults)),
        ("ztunnel_agent_proxies", "gauge", "Connected proxies", enroller.agent.proxies),
        ("ztunnel_agent_waiting", "gauge", "Pods with pending steps", enroller.waiting),
        ("ztunnel_agent_repaired", "counter", "Repaired changes of rules", enroller.agent.repaired),
    )
    for name, kind, description, value in plain:
        yield family(name, kind, description, [((), float(value))], ())
    yield family(
        "ztunnel_agent_pods", "gauge", "Pods with rules, by phase",
        [((phase,), float(count)) for phase, count in sorted(phases.items())], ("phase",),
    )  # fmt: skip
    wrong = counted(auditor.audited.values())
    yield family(
        "ztunnel_agent_findings", "gauge", "Pods that differ from their desired state, by kind of finding",
        [((reason,), float(count)) for reason, count in sorted(wrong.items())], ("reason",),
    )  # fmt: skip
    yield family(
        "ztunnel_agent_decisions", "gauge", "Pods of the node, by the row of the decision",
        [((reason,), float(count)) for reason, count in sorted(decided.items())], ("reason",),
    )  # fmt: skip
    yield family(
        "ztunnel_agent_steps", "counter", "Steps taken, by result",
        [(key, float(count)) for key, count in sorted(enroller.steps.items())], ("step", "result"),
    )  # fmt: skip
    if cni is not None:
        yield family(
            "ztunnel_agent_sandboxes", "counter", "Answers to the CNI plugin, by status",
            [((str(status),), float(count)) for status, count in sorted(cni.answers.items())], ("status",),
        )  # fmt: skip
    yield from process_families()
