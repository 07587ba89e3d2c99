"""No keys and no tokens in an archive, and on request no names and addresses."""

import json
from typing import Any

import pytest

from tests.hbone.certificates import Authority
from ztunnel.ask.report.scrub import REMOVED, Redaction, names_in, names_in_text, names_of, reduced, scrub

KEY = Authority().issue("spiffe://td/ns/a/sa/b").key_pem.decode()
TOKEN = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJzeXN0ZW0ifQ.c2lnbmF0dXJlLW9mLWl0"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        (f"a\n{KEY}b", f"a\n{REMOVED}\nb"),
        (KEY[:80], REMOVED),  # cut by a limit
        (f"{KEY[60:]}end of ... {KEY}", f"{REMOVED}\nend of ... {REMOVED}\n"),  # cut at its start
        (f"token={TOKEN} x", f"token={REMOVED} x"),
        ("Authorization: Bearer abcdefghijklmnopqrstuvwx", f"Authorization: Bearer {REMOVED}"),
        (json.dumps({"key": KEY}), json.dumps({"key": KEY}).replace(json.dumps(KEY)[1:-1], REMOVED + "\\n")),
        ("a bearer of news", "a bearer of news"),
    ],
    ids=["key", "cut", "cut start", "token", "header", "json", "words"],
)
def test_keys_and_tokens_go_by_their_form(text: str, kept: str) -> None:
    assert scrub(text) == kept


@pytest.mark.parametrize("key", ["xdsHeaders", "caHeaders"])
@pytest.mark.parametrize("indent", [None, 1, 2])
def test_values_of_headers_are_removed_from_a_configuration(key: str, indent: int | None) -> None:
    """The values are set by CA_HEADER_* and XDS_HEADER_*, and can be credentials of any form."""
    headers = [["x-key", 'hun"ter2'], ["b", "]]hunter2"]]
    cleaned = [["x-key", REMOVED], ["b", REMOVED]]
    found = scrub(json.dumps({"config": {"a": [["c", "d"]], key: headers, "z": [["e", "f"]]}}, indent=indent))
    assert json.loads(found) == {"config": {"a": [["c", "d"]], key: cleaned, "z": [["e", "f"]]}}
    line = json.dumps({"message": f"running with config: {json.dumps({key: headers})}"})
    assert "hunter2" not in json.loads(scrub(line))["message"]
    assert json.loads(json.loads(scrub(line))["message"].partition(": ")[2]) == {key: cleaned}
    for names in ({key: ["x-key"]}, {key: []}):
        assert json.loads(scrub(json.dumps(names))) == names
    listed = f"info config: a: x\n{key}:\n- - x-key\n  - hunter2\n- - b\n  - hunter2\nz:\n- - e\n  - f\n"
    assert scrub(listed) == listed.replace("hunter2", REMOVED)


def test_objects_lose_what_can_hold_secrets() -> None:
    pod = {
        "metadata": {
            "name": "p",
            "managedFields": [1],
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "{password}", "a": TOKEN},
        },
        "spec": {
            "containers": [
                {"name": "c", "env": [{"name": "PASSWORD", "value": "hunter2"}], "args": ["--token=hunter2"],
                 "command": ["sh", "-c", "hunter2"], "ports": [{"containerPort": 80}]}
            ]
        },
    }  # fmt: skip
    assert reduced([pod]) == [
        {
            "metadata": {"name": "p", "annotations": {"a": REMOVED}},
            "spec": {"containers": [{"name": "c", "ports": [{"containerPort": 80}]}]},
        }
    ]


def dump() -> dict[str, Any]:
    return {
        "workloads": [
            {"name": "bank", "namespace": "gold", "workloadIps": ["192.0.2.7", "2001:db8::7"], "node": "vault"}
        ],
        "services": [{"hostname": "bank.gold.svc.cluster.local", "name": "bank", "namespace": "gold"}],
        "workloadState": {"u": {"info": {"name": "bank-1", "namespace": "gold"}}},
        "certificates": [{"identity": "spiffe://cluster.local/ns/gold/sa/teller", "certChain": [{"pem": "QUJD"}]}],
    }


def test_names_and_addresses_are_others_but_the_same_everywhere() -> None:
    found = dump()
    redaction = Redaction(b"k" * 32, names_in(found) | {"teller"})
    page = redaction.page(json.dumps(found))
    for name in ("bank", "gold", "vault", "192.0.2.7", "2001:db8", "teller", "QUJD"):
        assert name not in page
    value = json.loads(page)
    workload, service = value["workloads"][0], value["services"][0]
    assert workload["name"] == service["name"] == service["hostname"].partition(".")[0]
    assert workload["workloadIps"][0].startswith("10.")
    line = redaction.page("error from 192.0.2.7:80 (bank.gold), 127.0.0.1")
    assert (
        line
        == f"error from {workload['workloadIps'][0]}:80 ({workload['name']}.{workload['namespace']}), 127.0.0.1"
    )
    assert Redaction(b"x" * 32, names_in(found)).name("bank") != workload["name"]


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("spiffe://td/ns/shop/sa/web-1_to_http_cart.bank.svc.td_out", {"shop", "web-1", "cart", "bank"}),
        ('{"flow": {"source": {"namespace": "shop", "pod_name": "web-1-x"}}, "node_name": "c/n1"}',
         {"shop", "web-1-x", "n1"}),
        ('{"flow":{"destination":{"namespace":"a1","workloads":[{"name":"v1","kind":"Pod"}]}}}', {"a1", "v1"}),
        ('info access src.workload="web-1" src.namespace="shop" dst.workload=cart direction="inbound"',
         {"web-1", "shop", "cart"}),
        ('{"src.workload":"web-1","dst.namespace": "bank"}', {"web-1", "bank"}),
        ('"id": "sidecar~0.0.0.0~ztunnel-w2.mesh~mesh.svc.cluster.local"', {"ztunnel-w2", "mesh"}),
        ("a text of a.b.c and 10.0.0.1 in svc", set()),
    ],
)  # fmt: skip
def test_names_are_found_in_pages_and_logs(text: str, names: set[str]) -> None:
    """Dumps of Envoy's dialect have no workloads, and pods in flows and logs can have ended."""
    assert names_in_text(text) == names


def test_numbers_are_no_names() -> None:
    """A flow names an unknown workload by its address. Times and counts must stay readable."""
    redaction = Redaction(b"k" * 32, ["10.244.2.11", "web.11"])
    redaction.learn(["10.0.0.29"])
    assert redaction.text("2026-11-29T10:11:29Z web 11") == f"2026-11-29T10:11:29Z {redaction.name('web')} 11"


def test_common_names_stay_readable() -> None:
    redaction = Redaction(b"k" * 32, ["default", "ztunnel", "istio-system", "shop"])
    assert redaction.text("istio-system/ztunnel default") == "istio-system/ztunnel default"
    assert redaction.text("default/shop") != "default/shop"


def test_names_of_objects() -> None:
    pod = {"metadata": {"name": "p", "namespace": "n"}, "spec": {"nodeName": "w", "serviceAccountName": "s"}}
    assert names_of([pod]) == {"p", "n", "w", "s"}


def test_keys_of_the_format_stay_if_a_service_has_such_a_name() -> None:
    redaction = Redaction(b"k" * 32, ["config", "flow", "worker-1", "bank"])
    changed = redaction.name("bank")
    page = {"config": {"localNode": "worker-1"}, "x": [{"Kubernetes//Pod/shop/bank": 1, "worker-1": "bank"}]}
    found = json.loads(redaction.page(json.dumps(page)))
    assert found == {
        "config": {"localNode": redaction.name("worker-1")},
        "x": [{f"Kubernetes//Pod/shop/{changed}": 1, redaction.name("worker-1"): changed}],
    }
    # Flows and JSON log lines are an object per line.
    lines = redaction.page('{"flow": {"pod_name": "bank"}}\n{"flow": {}}\nflow of bank\n').split("\n")
    assert [json.loads(line) for line in lines[:2]] == [{"flow": {"pod_name": changed}}, {"flow": {}}]
    assert lines[2:] == [f"{redaction.name('flow')} of {changed}", ""]
