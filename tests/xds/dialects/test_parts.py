"""A new version of a listener compiles what is new in it, and is what compiling it anew would give."""

from typing import Any

import pytest

from xds.dialects.envoy import Surroundings, compile_listener
from xds.dialects.envoy import listener as listeners
from xds.dialects.envoy import matcher as matchers
from xds.dialects.envoy.parts import Parts
from xds.errors import ConfigError
from xds.model.address import SocketAddress
from xds.model.facts import ConnectionFacts
from xds.proto.envoy.config.listener.v3.listener_pb2 import Listener
from xds.proto.json import parse_value

T = "type.googleapis.com/"
SURROUNDINGS = Surroundings(read_file=lambda _: b"%START_TIME%\n", environment={})
CLIENT = SocketAddress("10.0.0.1", 4000)


def chain(name: str, **access_log: Any) -> dict[str, Any]:
    proxy: dict[str, Any] = {
        "@type": T + "envoy.extensions.filters.network.tcp_proxy.v3.TcpProxy",
        "stat_prefix": name,
        "cluster": name,
    }
    if access_log:
        log = {
            "@type": T + "envoy.extensions.access_loggers.file.v3.FileAccessLog",
            "path": "/dev/null",
            **access_log,
        }
        proxy["access_log"] = [{"name": "l", "typed_config": log}]
    return {"name": name, "filters": [{"name": "tcp", "typed_config": proxy}]}


def action(name: str) -> dict[str, Any]:
    return {"action": {"name": name, "typed_config": {"@type": T + "google.protobuf.StringValue", "value": name}}}


def tree(kind: str, entries: dict[str, Any]) -> dict[str, Any]:
    package = "envoy.extensions.matching.common_inputs.network.v3"
    return {
        "matcher_tree": {
            "input": {"name": "i", "typed_config": {"@type": f"{T}{package}.{kind}"}},
            "exact_match_map": {"map": entries},
        }
    }


def outbound(services: int, pods: int = 0, *, extra: tuple[dict[str, Any], ...] = ()) -> Listener:
    entries: dict[str, Any] = {
        f"10.1.0.{index}": {"matcher": tree("DestinationPortInput", {"80": action(f"s{index}")})}
        for index in range(services)
    }
    entries |= {f"10.2.0.{index}": action("s0") for index in range(pods)}
    chains = [*(chain(f"s{index}") for index in range(services)), *extra]
    document = {
        "name": "outbound",
        "address": {"socket_address": {"address": "0.0.0.0", "port_value": 15001}},
        "filter_chains": chains,
        "filter_chain_matcher": tree("DestinationIPInput", entries),
    }
    return parse_value(document, Listener).message


class Calls:
    """Counts calls of a function of a module."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.count = 0
        original = getattr(module, name)

        def counting(*args: Any) -> Any:
            self.count += 1
            return original(*args)

        monkeypatch.setattr(module, name, counting)


@pytest.mark.parametrize("services", [5, 100])
def test_one_more_service_compiles_one_chain_and_one_entry(services: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts()
    before = compile_listener(outbound(services), SURROUNDINGS, parts)
    listeners._named.clear()
    matchers._named.clear()
    chains, actions = Calls(monkeypatch, listeners, "compile_filter"), Calls(monkeypatch, matchers, "unpack_as")
    message = outbound(services + 1)
    after = compile_listener(message, SURROUNDINGS, Parts(parts))
    assert (chains.count, actions.count) == (1, 1)
    assert all(new is old for new, old in zip(after.chains, before.chains, strict=False))
    assert after == compile_listener(message, SURROUNDINGS)


def test_pods_that_lead_to_one_chain_share_their_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    actions = Calls(monkeypatch, matchers, "unpack_as")
    made = compile_listener(outbound(1, pods=50), SURROUNDINGS)
    assert actions.count == 1
    facts = ConnectionFacts(source=CLIENT, direct_source=CLIENT, destination=SocketAddress("10.2.0.49", 9))
    found = made.chain_for(facts)
    assert found is not None
    assert found.name == "s0"


def test_parts_keep_one_version_only(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Parts(), None
    compile_listener(outbound(3), SURROUNDINGS, first)
    second = Parts(first)
    compile_listener(outbound(1), SURROUNDINGS, second)
    listeners._named.clear()
    chains = Calls(monkeypatch, listeners, "compile_filter")
    compile_listener(outbound(3), SURROUNDINGS, Parts(second))
    assert chains.count == 1, "the two that this version adds differ in their names only"


def test_two_chains_of_equal_content_stay_two() -> None:
    document = {
        "name": "l",
        "address": {"socket_address": {"address": "0.0.0.0", "port_value": 1}},
        "filter_chains": [chain("same")],
        "default_filter_chain": chain("same"),
    }
    message = parse_value(document, Listener).message
    parts = Parts()
    compile_listener(message, SURROUNDINGS, parts)
    again = compile_listener(message, SURROUNDINGS, Parts(parts))
    assert len({id(each) for each in again.all_chains}) == 2


def test_a_chain_that_reads_a_file_is_read_again() -> None:
    texts = [b"%START_TIME%\n", b"%DURATION%\n"]
    surroundings = Surroundings(read_file=lambda _: texts.pop(0), environment={})
    log = {"log_format": {"text_format_source": {"filename": "/format"}}}
    message = outbound(1, extra=(chain("logged", **log),))
    parts = Parts()
    before = compile_listener(message, surroundings, parts)
    after = compile_listener(message, surroundings, Parts(parts))
    assert before.chains[0] is after.chains[0]
    assert before.chains[1].terminal.access_log != after.chains[1].terminal.access_log
    assert texts == []


def test_a_fault_names_its_place_whichever_version_has_it() -> None:
    parts = Parts()
    compile_listener(outbound(2), SURROUNDINGS, parts)
    bad = outbound(2)
    bad.filter_chains[1].filters[0].name = "other"
    bad.filter_chains[1].filters[0].typed_config.type_url = T + "nobody.knows.This"
    with pytest.raises(ConfigError, match=r"filter_chains\[1\].filters\[0\]"):
        compile_listener(bad, SURROUNDINGS, Parts(parts))
