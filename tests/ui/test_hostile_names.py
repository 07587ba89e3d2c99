"""The live page in a browser, where every text of the mesh is an attack."""

import json

import pytest

from tests.ui.browser import Browser
from tests.ui.serving import served
from ztunnel.proxy.ui.seen import (
    Certificate,
    Connection,
    Denied,
    Facts,
    Flow,
    Policy,
    Refusal,
    Security,
    Seen,
    Source,
    Workload,
)
from ztunnel.runtime.http.page import JSON, Page, PageRequest, text

#: Each would set window.hacked, or leave the page, if it were anything but text.
ATTACK = (
    "<img src=x onerror=\"window.hacked=1\"><script>window.hacked=2</script><svg onload='window.hacked=3'>"
    '"\' onmouseover="window.hacked=4" </td></table> javascript:window.hacked=5 \u202e\u2028 &lt;b&gt; ${hacked}'
)
_NOW_S = 1_700_000_000.0


def attacked() -> Seen:
    keys = [f"{name}/{ATTACK}" for name in ("a", "b", "__proto__", "constructor")]
    return Seen(
        facts=Facts(
            dialect="istio",
            version=ATTACK,
            node=ATTACK,
            ready=False,
            state=ATTACK,
            uptime_s=1.0,
            totals={ATTACK: 1},
            question={"source": ATTACK, "destination": ATTACK},
        ),
        workloads=[
            *(
                Workload(key=key, name=ATTACK, namespace=ATTACK, identity=ATTACK, address=ATTACK, state=ATTACK)
                for key in (*keys, "idle")
            ),
        ],
        flows=[
            Flow(
                source=keys[0],
                destination=key,
                service=ATTACK,
                reporter=reporter,
                security=Security.PLAIN,
                open=1,
                opened=9,
                failed=1,
                denied=1,
                bytes_sent=1,
                bytes_received=1,
            )
            for key in keys
            for reporter in ("source", "destination")
        ],
        connections=[
            Connection(
                id=ATTACK,
                direction=ATTACK,
                source=ATTACK,
                source_name=ATTACK,
                destination=ATTACK,
                destination_name=ATTACK,
                next_hop=ATTACK,
                protocol=ATTACK,
                security=Security.MUTUAL_TLS,
                identity=ATTACK,
            )
        ],
        connections_open=1,
        policies=[Policy(name=ATTACK, action=ATTACK, scope=ATTACK, mode=ATTACK, faults=(ATTACK,))],
        denials=[
            Denied(
                place=ATTACK,
                source=ATTACK,
                identity=ATTACK,
                destination=ATTACK,
                reason=ATTACK,
                count=1,
                last_s=_NOW_S,
                address=ATTACK,
            )
        ],
        certificates=[Certificate(identity=ATTACK, state=ATTACK, serial=ATTACK, used_by=ATTACK)],
        sources=[Source(name=ATTACK, address=ATTACK, connected=False)],
        refusals=[Refusal(kind=ATTACK, name=ATTACK, reason=ATTACK)],
    )


def others(request: PageRequest) -> Page:
    if request.path == "/explain":
        answer = {"verdict": f"allowed {ATTACK}", ATTACK: [{ATTACK: ATTACK, "__proto__": ATTACK}, True, None]}
        return text(json.dumps(answer), content_type=JSON)
    if request.path != "/flows":
        return text("", 404)
    side = {"namespace": ATTACK, "pod_name": ATTACK}
    more = {"reason": ATTACK, "failure": ATTACK, "policy": ATTACK, "addon": ATTACK, "source_identity": ATTACK}
    flow = {"uuid": ATTACK, "time": "2026-01-01T00:00:00.000000001Z", "verdict": ATTACK, "source": side}
    flow |= {"destination": side, "destination_service": side | {"name": ATTACK}, "extensions": {"value": more}}
    return text(json.dumps({"flow": flow}) + "\n")


@pytest.mark.timeout(180)
def test_hostile_names_are_shown_as_text_and_nothing_runs() -> None:
    def use(page: Browser, origin: str) -> None:
        page.open(f"{origin}/ui")
        page.until("document.querySelectorAll('.edge').length > 0")
        page.until("document.querySelector('#traffic tbody').rows.length === 8")
        # The whole page twice, because rows kept from the previous event are updated by other code than new rows.
        for view in (
            *("mesh", "flows", "connections", "policies", "certificates", "configuration", "explain"),
            "mesh",
        ):
            page.show(view)
            assert page.unnamed() == []
        page.show("flows")
        page.until("document.querySelector('#flows-table tbody button')")
        shown = ATTACK.replace("\u2028", " ")
        for table in (
            "denials",
            "policies-table",
            "certificates-table",
            "sources",
            "refusals",
            "connections-table",
            "flows-table",
        ):
            found = page.evaluate(f"document.querySelector('#{table} tbody').textContent").replace("\u2028", " ")
            assert shown in found, table
        page.show("mesh")
        page.click("#graph .node")
        page.until("document.querySelector('#graph .node.chosen')")
        page.show("explain")
        page.evaluate("for (const name of ['source', 'destination']) document.forms.question[name].value = 'x'")
        page.click("#question button[type=submit]")
        page.until("document.querySelector('#answer .verdict')")
        assert "<script>" in page.text("#answer")
        assert page.evaluate("typeof window.hacked") == "undefined"
        assert page.evaluate("document.querySelectorAll('img').length") == 1  # the page's own
        assert page.evaluate("[...document.querySelectorAll('script')].every(each => each.src)")
        assert page.problems == []
        assert [url for url in page.requests if not url.startswith(f"{origin}/")] == []

    served(attacked, use, others)
