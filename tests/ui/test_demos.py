"""The live page of a proxy that works: a demo's mesh with traffic, in each dialect, clicked through in a browser.

``make ui`` runs this and leaves pictures under ``.run/ui``: each view light, dark and narrow. What the page shows
is compared with the other pages of the admin server.
"""

import contextlib
import http.client
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deploy.demo.folder import demo_folder
from deploy.demo.inpod import HOSTNAME, InPodDemo
from deploy.demo.node import NodeDemo
from deploy.demo.stage import OUTSIDE, PORT, VIP, Demo, connect
from deploy.lab import Lab
from tests.ui.browser import Browser, browser, chromium

PICTURES = Path(__file__).parents[2] / ".run" / "ui"
ADMIN = "http://127.0.0.1:15000"
WORKER = "worker2"
VIEWS = ("mesh", "flows", "connections", "policies", "certificates", "configuration", "explain")
#: Width, height and the colours that the user prefers.
LOOKS = {
    "light": (1280, 860, "light"),
    "dark": (1280, 860, "dark"),
    "narrow": (400, 860, "light"),
    "narrow-dark": (400, 860, "dark"),
}
#: Between two rounds of calls.
_PAUSE_S = 0.15

pytestmark = [
    pytest.mark.netns,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not os.environ.get("UI"), reason="NOT TESTED: half a minute each; make ui"),
]


class Traffic:
    """Calls between the demo's pods while entered: allowed, denied, plain text, and connections that stay open."""

    def __init__(self, demo: Demo) -> None:
        self._demo = demo
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
        self._held: list[http.client.HTTPConnection] = []

    def __enter__(self) -> "Traffic":
        demo = self._demo
        # A proxy is ready before its pods' rules are in place.
        demo.wait("the first call", lambda: bool(demo.call("productpage", VIP).text))
        for host in (VIP, self._address("reviews-v1"), VIP):
            connection = connect(demo.lab.pod("productpage"), host, PORT)
            self._held.append(connection)
            assert demo.call_on(connection, "productpage", host).text
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopped.set()
        self._thread.join()
        for connection in self._held:
            connection.close()

    def _address(self, pod: str) -> str:
        return str(self._demo.lab.pod(pod).ipv4)

    def _run(self) -> None:
        calls = (
            *(("productpage", VIP),) * 3,
            ("reviews-v2", self._address("ratings")),
            ("reviews-v3", self._address("ratings")),
            ("productpage", self._address(OUTSIDE)),
            ("intruder", self._address("reviews-v2")),
            (OUTSIDE, self._address("ratings")),
        )
        while not self._stopped.is_set():
            for pod, host in calls:
                with contextlib.suppress(OSError):  # those that policy denies
                    self._demo.call(pod, host)
            self._stopped.wait(_PAUSE_S)


@contextlib.contextmanager
def stage(mode: type[Demo]) -> Iterator[tuple[Demo, Browser]]:
    chromium()
    with demo_folder("ztunnel-ui-") as folder, Lab(mode.places) as lab:
        demo = mode(lab, folder, False)
        demo.start()
        with Traffic(demo), browser(lab.worker(WORKER).ztunnel.popen) as page:
            yield demo, page


def asked(demo: Demo, path: str) -> Any:
    status, text = demo.page(demo.lab.worker(WORKER).ztunnel, 15000, path)
    assert status == 200, text
    return json.loads(text)


def pictures(page: Browser, name: str) -> None:
    page.show("mesh")
    page.until("document.querySelector('#past dd').textContent.endsWith('/s')")
    for look, (width, height, scheme) in LOOKS.items():
        page.look(width=width, height=height, scheme=scheme)
        for view in VIEWS:
            page.show(view)
            page.screenshot(PICTURES / f"{name}-{view}-{look}.png")
            overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert overflow <= 0, f"{look}: {view} is {overflow} px wider than the window"
    page.look()


def column(page: Browser, table: str, number: int) -> set[str]:
    return {row[number] for row in page.rows(table)}


def walk(page: Browser, name: str) -> None:
    """Click through what both dialects have."""
    page.look()
    page.open(f"{ADMIN}/ui")
    page.until("document.getElementById('state').textContent === 'ready'")
    # The first stop of the keyboard leads past the header.
    page.press("Tab", 9)
    assert page.evaluate("document.activeElement.className") == "skip"

    # The graph has the traffic of all kinds.
    page.until("[...document.querySelectorAll('.edge text')].some(each => each.textContent.includes('/s'))")
    page.until("document.querySelectorAll('#graph .node').length >= 4")
    page.until("[...document.querySelectorAll('.edge .trouble')].some(each => each.textContent)")
    page.until("document.querySelectorAll('#graph .node.service').length >= 1")
    assert "default" in page.evaluate("document.querySelector('#graph .boxes').textContent")
    assert {"mTLS", "plain" if name == "istio" else "–"} <= column(page, "#traffic", 3)
    # The curves of the proxy's own samples.
    page.until("document.querySelector('#past .line').getAttribute('d')")
    assert page.text("#past dd").endswith("/s")

    # A workload is chosen by mouse, and let go by the keyboard.
    everything = len(page.rows("#traffic"))
    page.click("#graph .node")
    page.until("document.querySelector('#graph .node.chosen') && !document.getElementById('clear').hidden")
    assert 0 < len(page.rows("#traffic")) < everything
    assert page.evaluate("location.hash").startswith("#mesh?node=")
    page.evaluate("document.querySelector('#graph .node.chosen').focus()")
    page.press("Enter", 13)
    page.until("!document.querySelector('#graph .node.chosen')")

    # Colours, and the events' pause.
    for theme in ("light", "dark", "auto"):
        page.click("#theme")
        page.until(f"document.getElementById('theme').textContent === 'Theme: {theme}'")
        page.until(f"document.documentElement.dataset.theme === '{'light' if theme == 'auto' else theme}'")
    page.click("#pause")
    page.until("document.getElementById('age').textContent === 'paused'")
    page.click("#pause")
    page.until("document.getElementById('age').textContent === 'live'")

    # What ended, the newest first, by pod and verdict.
    page.show("flows")
    page.until("document.querySelectorAll('#flows-table tbody tr').length >= 3")
    times = [row[0] for row in page.rows("#flows-table")]
    assert times == sorted(times, reverse=True)
    page.evaluate("document.getElementById('flow-verdict').value = 'dropped'")
    page.evaluate("document.getElementById('flow-verdict').dispatchEvent(new Event('input'))")
    page.until("document.querySelectorAll('#flows-table tbody td.bad').length >= 1")
    assert column(page, "#flows-table", 1) == {"dropped"}
    assert page.evaluate("location.hash") == "#flows?verdict=dropped"
    newest = page.rows("#flows-table")[0][0]
    page.until(f"document.querySelector('#flows-table td').textContent !== '{newest}'")
    page.evaluate("location.hash = '#flows?verdict='")
    page.until("location.hash === '#flows' && document.querySelector('#flows-table .tag.mtls')")

    # Connections are filtered.
    page.show("connections")
    page.until("document.querySelectorAll('#connections-table tbody tr').length >= 3")
    page.click("#filter")
    page.type("10.96. productpage" if name == "istio" else "10.96.")
    page.until("/^[12] of/.test(document.getElementById('matches').textContent)")
    page.type(" nothing-has-this")
    page.until("document.querySelector('#connections-table td.empty')")
    page.evaluate("document.getElementById('filter').value = ''")
    page.evaluate("document.getElementById('filter').dispatchEvent(new Event('input'))")
    page.until("document.querySelectorAll('#connections-table tbody tr').length >= 3")
    assert page.unnamed() == []

    # A live connection explains itself.
    page.click("#connections-table tbody tr button")
    page.until("document.querySelector('#answer .verdict')")
    assert page.text("#answer .verdict").startswith("Verdict: ")
    assert page.evaluate("location.hash") == "#explain"


def lose_control_plane(page: Browser, demo: Demo) -> None:
    """The badge shows how long ago the control plane was lost."""
    assert page.text("#plane") == "control plane connected"
    demo.control_plane.terminate()
    page.until(
        "/^control plane gone since \\d\\d:\\d\\d:\\d\\d UTC/.test(document.getElementById('plane').textContent)"
    )
    assert page.evaluate("document.getElementById('plane').className") == "pill bad"


def ask(page: Browser, **fields: str) -> str:
    """Fill in the form of explain and return what it answers."""
    page.show("explain")
    page.evaluate("document.getElementById('question').reset()")
    page.evaluate("document.getElementById('answer').replaceChildren()")
    for name, value in fields.items():
        page.evaluate(f"document.forms.question[{json.dumps(name)}].focus()")
        page.type(value)
    page.press("Enter", 13)
    page.until("document.getElementById('answer').childElementCount > 1")
    return page.text("#answer")


def clean(page: Browser) -> None:
    """Nothing was reported but the wrong question, and nothing was requested elsewhere."""
    assert [each for each in page.problems if "/explain?source=nobody" not in each] == []
    assert [url for url in page.requests if not url.startswith(f"{ADMIN}/")] == []


def test_the_live_page_of_the_istio_demo() -> None:
    with stage(InPodDemo) as (demo, page):
        walk(page, "istio")
        assert "default/intruder" in ask(page, source="default/intruder", destination=f"{HOSTNAME}:{PORT}")
        assert page.evaluate("document.querySelector('#answer .verdict').className") == "verdict bad"
        assert "usage: /explain" in ask(page, source="nobody/here", destination="1.2.3.4:5")
        assert ask(page, source="default/productpage", destination=f"{HOSTNAME}:{PORT}").startswith(
            "Verdict: allowed"
        )

        dump = asked(demo, "/config_dump")
        page.show("policies")
        page.until("!document.querySelector('#denials td.empty')")
        assert column(page, "#policies-table", 0) >= {
            f"{each['namespace']}/{each['name']}" for each in dump["policies"]
        }
        assert {each["reason"] for each in asked(demo, "/denials")} <= column(page, "#denials", 5)
        page.show("certificates")
        titles = " ".join(column(page, "#certificates-table", 0))
        assert all(each["identity"] in titles for each in dump["certificates"])
        assert {"default/productpage", "default/intruder"} <= column(page, "#certificates-table", 6)
        page.show("connections")
        live = {
            connection["src"]
            for pod in asked(demo, "/connections").values()
            for connection in pod["connections"]["outbound"]
            if connection["originalDst"].startswith(VIP)
        }
        assert (
            len([row for row in page.rows("#connections-table") if any(row[1].startswith(each) for each in live)])
            >= 2
        )
        page.show("configuration")
        assert "connected" in column(page, "#sources", 2)
        assert f"Workloads {len(dump['workloads'])}" in page.text("#totals").replace("\n", " ")
        pictures(page, "istio")
        lose_control_plane(page, demo)
        clean(page)


def test_the_live_page_of_the_envoy_demo() -> None:
    with stage(NodeDemo) as (demo, page):
        walk(page, "envoy")
        lab = demo.lab
        productpage, intruder, reviews = (
            str(lab.pod(each).ipv4) for each in ("productpage", "intruder", "reviews-v2")
        )
        assert ask(page, source=productpage, destination=f"{VIP}:{PORT}")
        assert "usage: /explain" in ask(page, source="nobody", destination=f"{VIP}:{PORT}")
        far = str(lab.pod("reviews-v1").ipv4)
        assert ask(page, source=productpage, destination=f"{far}:{PORT}").startswith("Verdict: allowed here; ")
        refused = ask(page, source=intruder, destination=f"{reviews}:{PORT}")
        assert "Verdict: refused: closed: rbac_access_denied_matched_policy[none]" in refused, "this proxy's pod"
        assert "no, it is spiffe://cluster.local/ns/default/sa/intruder" in refused
        identity = "spiffe://cluster.local/ns/default/sa/intruder"
        refused = ask(page, source=intruder, destination=f"{reviews}:15008", identity=identity)
        assert "Verdict: refused: closed: rbac_access_denied_matched_policy[none]" in refused

        page.show("mesh")
        page.until("document.getElementById('graph').textContent.includes(' denied')")
        page.show("policies")
        page.until("!document.querySelector('#denials td.empty')")
        assert {each["policy"] for each in asked(demo, "/rbac")["policies"]} - {"none"} <= column(
            page, "#policies-table", 0
        )
        assert {each["reason"] for each in asked(demo, "/denials")} <= column(page, "#denials", 5)
        page.show("certificates")
        titles = " ".join(column(page, "#certificates-table", 0))
        for each in asked(demo, "/certs")["certificates"]:
            assert all(name["uri"] in titles for own in each["cert_chain"] for name in own["subject_alt_names"])
        page.show("connections")
        live = [
            each["source"]
            for each in asked(demo, "/connections")["connections"]
            if each["destination"].startswith(VIP)
        ]
        shown = " ".join(column(page, "#connections-table", 1))
        assert sum(source in shown for source in live) >= 2
        page.show("configuration")
        assert "connected" in column(page, "#sources", 2)
        pictures(page, "envoy")
        lose_control_plane(page, demo)
        clean(page)
