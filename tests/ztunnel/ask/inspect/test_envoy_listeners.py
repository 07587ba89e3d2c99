"""Answers from a dump of Envoy's dialect equal the proxy's own, and report missing or unreadable parts."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.hbone.certificates import Authority, of_unknown_version
from tests.ztunnel.proxy.envoy.admin.harness import Running, serve
from tests.ztunnel.proxy.envoy.admin.reference import IDENTITY, write_reference
from xds.errors import ConfigError
from xds.model.address import SocketAddress
from ztunnel.ask.inspect.envoy_listeners import read_configuration
from ztunnel.proxy.envoy.path.explain import Answer, Question, client_address, explain
from ztunnel.runtime.clock import SystemClock

QUESTIONS: list[dict[str, str]] = [
    {"source": "10.244.2.3", "destination": "10.96.183.192:9080"},  # a service
    {"source": "10.244.2.99:5000", "destination": "1.2.3.4:80"},  # outside
    {"source": "10.244.2.3", "destination": "10.244.1.23:80"},  # a pod of the other node
    {"source": "10.244.2.3", "destination": "10.244.2.23:9080"},
    {"source": "10.244.2.3", "destination": "10.244.2.23:9080", "identity": f"{IDENTITY}productpage"},
    {"source": "10.244.2.3", "destination": "10.244.2.23:9080", "identity": f"{IDENTITY}ratings"},
    {"source": "10.244.2.3", "destination": "10.244.2.23:9080", "listener": "ztunnel_inbound_plaintext"},
]


def ask(dump: Any, given: dict[str, str]) -> tuple[Answer, list[str]]:
    configuration, lacks = read_configuration(dump, SystemClock())
    question = Question(
        source=client_address(given["source"]),
        destination=SocketAddress.parse(given["destination"]),
        identity=given.get("identity", ""),
        listener=given.get("listener", ""),
    )
    return json.loads(json.dumps(explain(question, configuration))), lacks


LACKS = ["the proxy's flags: --tunnel-source is taken for its default", "Calico's policies"]


@pytest.mark.parametrize("node", ["w1", "w2"])
def test_a_dump_gives_the_proxys_answer(tmp_path: Path, node: str) -> None:
    reference = write_reference(tmp_path, node)

    def check(running: Running) -> None:
        dump = running.admin.get("/config_dump", include_eds="").json
        for given in QUESTIONS:
            told, lacks = ask(dump, given)
            assert told == running.admin.get("/explain", **given).json
            assert lacks == LACKS
        dumps.append(dump)

    dumps: list[Any] = []
    serve(reference, check)
    (dump,) = dumps
    no_files_are_opened = list(tmp_path.rglob("*.log"))
    ask(dump, QUESTIONS[0])
    assert list(tmp_path.rglob("*.log")) == no_files_are_opened
    if node == "w2":  # which has the client of the first question
        _what_is_missing_is_said(dump)


def _what_is_missing_is_said(dump: Any) -> None:
    """Of the same dump, since a proxy's start is not free."""
    sections = {section["@type"].rpartition(".")[2]: section for section in dump["configs"]}
    told, lacks = ask({"configs": [sections["ListenersConfigDump"], sections["ClustersConfigDump"]]}, QUESTIONS[0])
    assert lacks == [*LACKS, "endpoints: save it from /config_dump?include_eds"]
    assert [each["endpoints"] for each in told["hop"]["clusters"]] == [[]]
    broken = copy.deepcopy(dump)
    for section in broken["configs"]:
        for cluster in section.get("dynamic_active_clusters") or []:
            cluster["cluster"]["connect_timeout"] = "soon"
        for listener in section.get("dynamic_listeners") or []:
            if listener["name"] == "ztunnel_inbound":
                listener["active_state"]["listener"]["new_field"] = 7
    told, lacks = ask(broken, QUESTIONS[0])
    assert lacks[-1].endswith("entries more that cannot be read")
    assert lacks[2].startswith("cluster BlackHoleCluster: connect_timeout: ")
    for section in broken["configs"]:
        section.pop("dynamic_active_clusters", None)
    assert ask(broken, QUESTIONS[0])[1][2] == "listener ztunnel_inbound: new_field: no such field; passed over"
    assert told["hop"]["clusters"][0]["verdict"] == "closed: there is no such cluster (NC)"


@pytest.mark.parametrize("dump", [{}, {"configs": 7}, {"configs": [7]}])
def test_what_is_no_dump_is_refused(dump: Any) -> None:
    with pytest.raises(ConfigError, match="configs: must be a list of mappings"):
        read_configuration(dump, SystemClock())


def test_identities_and_what_is_no_certificate() -> None:
    unknown = of_unknown_version(Authority().pem).decode()
    secrets = [
        {"secret": {"name": "odd", "tls_certificate": {"certificate_chain": {"inline_bytes": "bm8="}}}},
        {"secret": {"name": "root", "validation_context": {}}},
        {"secret": {"name": "seven", "tls_certificate": {"certificate_chain": {"inline_string": unknown}}}},
    ]
    section = {"@type": "type.googleapis.com/envoy.admin.v3.SecretsConfigDump", "static_secrets": secrets}
    configuration, lacks = read_configuration({"configs": [section]}, SystemClock())
    assert configuration.saved is not None
    assert configuration.saved.identities == {}
    assert lacks[3].startswith("secret odd: ")
    assert lacks[4].startswith("secret seven: ")
