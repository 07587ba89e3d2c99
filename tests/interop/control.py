"""One control plane, both kinds of proxy, both variants of the protocol: edits, refusals, outages.

The heading names the kind that opens the tunnels (productpage's node) and the kind that ends them (reviews-v1's
node).
"""

import threading
from collections.abc import Callable
from typing import Any

from tests.generated import at_night
from tests.interop.apps import HTTP, dial, get
from tests.interop.case import Case
from tests.interop.checklist import gone
from tests.interop.files import get_on
from tests.interop.proxies import DRAIN_S, Kind, eventually
from tests.interop.site import TRUST_DOMAIN, VIP, VIP_NOBODY, VIP_V1, Pairing, Site

COLUMNS = (
    Pairing(worker1=Kind.NATIVE, worker2=Kind.ENVOY),
    Pairing(worker1=Kind.ENVOY, worker2=Kind.NATIVE),
    Pairing(worker1=Kind.NATIVE, worker2=Kind.ENVOY, source="delta"),
    Pairing(worker1=Kind.ENVOY, worker2=Kind.NATIVE, source="delta"),
)
HEADINGS = ("envoy to ours, SotW", "ours to envoy, SotW", "envoy to ours, delta", "ours to envoy, delta")
ABSENT_S = {"sotw": at_night(60.0, 8.0), "delta": 8.0}
"""How long the control plane is away, by source."""


def same(text: str) -> dict[Pairing, str]:
    """Expect the same text in every column."""
    return dict.fromkeys(COLUMNS, text)


def answered_by(site: Site, address: str, pod: str) -> Callable[[], bool]:
    """A condition: requests to an address are answered by that pod."""
    return lambda: get(site.pod("productpage"), address, timeout_s=1.0).pod == pod


def edit_moves_traffic(site: Site) -> str:
    def members(*pods: str) -> Callable[[dict[str, Any]], None]:
        return lambda mesh: mesh["services"]["reviews-v1"].update(pods=list(pods))

    with dial(site.pod("productpage"), VIP_V1, HTTP) as running:
        before = get_on(running)
        site.edit(members("reviews-v2"))
        moved = eventually(answered_by(site, VIP_V1, "reviews-v2"))
        still = get_on(running)
        site.edit(members("reviews-v1"))
        back = eventually(answered_by(site, VIP_V1, "reviews-v1"))
    words = ["moved" if moved else "stayed", "running one goes on" if still == before else "running one is lost"]
    return ", ".join([*words, "back" if back else "not back"])


def new_service(site: Site) -> str:
    """A service whose matcher entry, cluster and endpoints were not there before."""
    address = "10.96.0.99"
    site.edit(
        lambda mesh: mesh["services"].update(
            late={"addresses": [address], "ports": {"http": HTTP}, "pods": ["reviews-v1"]}
        )
    )
    appeared = eventually(answered_by(site, address, "reviews-v1"))
    site.edit(lambda mesh: mesh["services"].pop("late"))
    return "served" if appeared else "not served"


def policy_permits_and_cuts(site: Site) -> str:
    principal = f"{TRUST_DOMAIN}/ns/default/sa/sleep"

    def principals(mesh: dict[str, Any]) -> list[str]:
        found: list[str] = mesh["policies"]["reviews-viewer"]["rules"][0]["from"]["principals"]
        return found

    def ask() -> str:
        return gone(get(site.pod("sleep"), VIP_V1).status)

    words = [ask()]
    site.edit(lambda mesh: principals(mesh).append(principal))
    words.append("200" if eventually(lambda: ask() == "200") else "still refused")
    site.edit(lambda mesh: principals(mesh).remove(principal))
    # Envoy judges a connection once: tunnels on an old connection are permitted until its chain has drained.
    words.append("closed" if eventually(lambda: ask() == "closed", 3.0 * DRAIN_S) else "still permitted")
    return ", ".join(words)


def control_plane_away(site: Site) -> str:
    absent_s = ABSENT_S[site.pairing.source]
    over = threading.Event()
    failed: list[str] = []
    asked = 0

    def traffic() -> None:
        nonlocal asked
        while not over.wait(0.02):
            reply = get(site.pod("productpage"), VIP)
            asked += 1
            if reply.status != "200":
                failed.append(reply.status)

    client = threading.Thread(target=traffic, name="traffic")
    client.start()
    try:
        site.kill_control_plane()
        over.wait(absent_s)
        site.start_control_plane()
        site.edit(lambda mesh: mesh["services"]["nobody"].update(pods=["reviews-v1"]))
        back = eventually(answered_by(site, VIP_NOBODY, "reviews-v1"), 60.0)
    finally:
        over.set()
        client.join()
    site.edit(lambda mesh: mesh["services"]["nobody"].update(pods=[]))
    words = [f"{len(failed)} failed" if failed else "none failed"]
    words.append("the next edit arrives" if back else "the next edit is lost")
    return ", ".join(words) if asked > absent_s * 10 else f"only {asked} requests"


def refused_listener(site: Site) -> str:
    """Send a pattern that no proxy can compile. The inbound listener is refused and stays, and all other changes
    apply.
    """
    before = site.control_plane_log.count(" refused ")

    def broken(mesh: dict[str, Any]) -> None:
        mesh["policies"]["reviews-viewer"]["rules"].append({"from": {"namespaces": ["("]}})
        mesh["services"]["nobody"]["pods"] = ["reviews-v1"]

    def mended(mesh: dict[str, Any]) -> None:
        mesh["policies"]["reviews-viewer"]["rules"].pop()
        mesh["services"]["nobody"]["pods"] = []

    site.edit(broken)
    refused = eventually(lambda: site.control_plane_log.count(" refused ") >= before + 2)
    others = eventually(answered_by(site, VIP_NOBODY, "reviews-v1"))
    words = ["refused by both" if refused else "not refused", get(site.pod("productpage"), VIP_V1).status]
    words += [gone(get(site.pod("sleep"), VIP_V1).status), "the rest is taken up" if others else "the rest waits"]
    site.edit(mended)
    emptied = eventually(lambda: get(site.pod("productpage"), VIP_NOBODY).status in ("closed", "reset"))
    return ", ".join([*words, "mended" if emptied else "not mended"])


CASES = (
    Case(
        number="22",
        stimulus="edit moves a service to another pod",
        run=edit_moves_traffic,
        expected=same("moved, running one goes on, back"),
    ),
    Case(number="23", stimulus="edit adds a service", run=new_service, expected=same("served")),
    Case(
        number="50",
        stimulus="policy permits, then cuts",
        run=policy_permits_and_cuts,
        expected=same("closed, 200, closed"),
    ),
    Case(
        number="51",
        stimulus="control plane killed for a minute (delta: 8 s)",
        run=control_plane_away,
        expected=same("none failed, the next edit arrives"),
    ),
    Case(
        number="52",
        stimulus="a listener that cannot be compiled",
        run=refused_listener,
        expected=same("refused by both, 200, closed, the rest is taken up, mended"),
    ),
)
