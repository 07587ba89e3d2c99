"""Which filter chain Envoy and this proxy choose for one connection, by the same bootstrap."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.interop.loopback import serving, until
from tests.interop.proxies import ENVOY, WAIT_S
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.config.test_bootstrap_fields import FILE_LOG
from tests.ztunnel.proxy.envoy.harness import Json, T, tcp

pytestmark = pytest.mark.interop

NETWORK = T + "envoy.extensions.matching.common_inputs.network.v3."


def to(name: str) -> Json:
    action = {"name": name, "typed_config": {"@type": T + "google.protobuf.StringValue", "value": name}}
    return {"action": action}


def reading(name: str) -> Json:
    return {"name": name, "typed_config": {"@type": NETWORK + name}}


def ranges(**exclusive: bool) -> Json:
    """Return chains by range. The longest range has no chain, and the chains of the two around it are named after
    them.
    """
    nowhere = {
        "matcher_tree": {"input": reading("DestinationPortInput"), "exact_match_map": {"map": {"1": to("x")}}}
    }
    tree = {
        "@type": T + "xds.type.matcher.v3.IPMatcher",
        "range_matchers": [
            {"ranges": [_range("0.0.0.0", 0)], "on_match": to("wider"), "exclusive": exclusive["wider"]},
            {"ranges": [_range("127.0.0.0", 8)], "on_match": to("wide"), "exclusive": exclusive["wide"]},
            {"ranges": [_range("127.0.0.1", 32)], "on_match": {"matcher": nowhere}, "exclusive": True},
        ],
    }
    custom = {"name": "ip", "typed_config": tree}
    matcher = {"matcher_tree": {"input": reading("DestinationIPInput"), "custom_match": custom}}
    return {"filter_chain_matcher": {**matcher, "on_no_match": to("none")}}


def _range(address: str, length: int) -> Json:
    return {"address_prefix": address, "prefix_len": length}


#: The listener's fields besides its chains, the match of each chain, and the chain that both proxies choose.
CASES: dict[str, tuple[Json, dict[str, Json], str]] = {
    "raw without inspector": (
        {},
        {"raw": {"transport_protocol": "raw_buffer"}, "tls": {"transport_protocol": "tls"}, "any": {}},
        "raw",
    ),
    "ranges": (ranges(wide=False, wider=False), {}, "wide"),
    "exclusive range": (ranges(wide=True, wider=False), {}, "wider"),
    "exclusive ranges": (ranges(wide=True, wider=True), {}, "none"),
}


def bootstrap(case: str, port: int, folder: Path) -> Json:
    more, matches, _ = CASES[case]
    names = matches or {name: {} for name in ("wide", "wider", "none", "x")}

    def logged(name: str) -> list[Json]:
        config = {"@type": FILE_LOG, "path": str(folder / "log"), "log_format": _text(f"{name}\n")}
        return [{"name": "file", "typed_config": config}]

    chains = [
        {"name": name, "filter_chain_match": match, "filters": [tcp("nowhere", access_log=logged(name))]}
        for name, match in names.items()
    ]
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    listener = {"name": "l", "address": address, "filter_chains": chains, **more}
    return {"static_resources": {"listeners": [listener], "clusters": [{"name": "nowhere"}]}}


def _text(text: str) -> dict[str, Any]:
    return {"text_format_source": {"inline_string": text}}


def connects(port: int) -> bool:
    with socket.socket() as client:
        client.settimeout(WAIT_S)
        try:
            client.connect(("127.0.0.1", port))
            client.recv(1)  # to the end: the cluster has no endpoint
        except ConnectionResetError:
            return True
        except OSError:
            return False
    return True


@pytest.mark.skipif(not ENVOY.exists(), reason="NOT TESTED: no Envoy here")
@pytest.mark.parametrize("kind", ["envoy", "native"])
@pytest.mark.parametrize("case", CASES)
def test_both_proxies_choose_the_same_filter_chain(case: str, kind: str, tmp_path: Path) -> None:
    port = free_port()
    path = tmp_path / "bootstrap.json"
    path.write_text(json.dumps(bootstrap(case, port, tmp_path)))
    log = tmp_path / "log"
    with serving(kind, path):
        until(lambda: connects(port))
        until(lambda: log.exists() and log.read_text())
    assert set(log.read_text().splitlines()) == {CASES[case][2]}
