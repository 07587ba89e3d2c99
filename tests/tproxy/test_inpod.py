"""A pod's rules: reviewed golden files, and what each switch changes and leaves alone."""

from ipaddress import ip_address
from pathlib import Path

import pytest

from tproxy.diff import diff
from tproxy.inpod import HOST, POD, Capture, Probed, pod, probes
from tproxy.operations import FlushChain, NftTransaction
from tproxy.render.text import rule_text, state_text
from tproxy.resources import Chain, State, nothing

HERE = Path(__file__).parent / "render"
EVERYTHING = Capture(virtual_interfaces=("tap0", "docker0"), new_connections_only=True)


def chains(wanted: Capture) -> dict[str, Chain]:
    [table] = pod(wanted).namespaces[POD].tables
    return {chain.name: chain for chain in table.chains}


def rules(wanted: Capture, chain: str) -> list[str]:
    return [rule_text(rule.phrase) for rule in chains(wanted)[chain].rules]


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("pod", Capture()),
        ("pod_ipv4", Capture(versions=(4,))),
        ("pod_everything", EVERYTHING),
        ("pod_draining", Capture(draining=True)),
    ],
)
def test_a_pod_reads_as_reviewed(name: str, wanted: Capture) -> None:
    assert state_text(pod(wanted)) + "\n" == (HERE / f"{name}.golden").read_text()


def test_a_nodes_probes_read_as_reviewed() -> None:
    pods = [Probed(uid="0b2c", addresses=(ip_address("10.244.1.10"), ip_address("fd00:10:244:1::10")))]
    assert state_text(probes(pods, 0)) + "\n" == (HERE / "probes.golden").read_text()


def test_any_uid_fits_into_a_comment() -> None:
    [table] = probes([Probed(uid="ü" * 500, addresses=(ip_address("10.0.0.1"),))], 0).namespaces[HOST].tables
    [element] = table.sets[0].elements
    assert len(element.comment.encode()) == 120


def test_an_address_that_is_used_again_is_the_later_pods() -> None:
    pods = [Probed(uid=uid, addresses=(ip_address("10.0.0.1"),)) for uid in ("old", "new")]
    [table] = probes(pods, 0).namespaces[HOST].tables
    assert {element.comment for element in table.sets[0].elements} == {"uid new"}


def test_without_ipv6_there_are_no_ipv6_rules() -> None:
    text = state_text(pod(Capture(versions=(4,))))
    assert "ip6" not in text
    assert "-6" not in text


def test_without_dns_port_53_is_nothing_special() -> None:
    text = state_text(pod(Capture(dns=False)))
    assert "53 " not in text.replace("0x539 ", "")
    assert not {"raw_prerouting", "raw_output"} & set(chains(Capture(dns=False)))


def test_without_inbound_only_what_is_sent_is_redirected() -> None:
    assert rules(Capture(inbound=False), "nat_prerouting") == []
    assert rules(Capture(inbound=False), "nat_output") == rules(Capture(), "nat_output")


def test_what_comes_from_a_virtual_interface_is_decided_first() -> None:
    behind = rules(Capture(virtual_interfaces=("tap0",)), "nat_prerouting")
    assert behind[:2] == ['iifname "tap0" meta l4proto tcp redirect to :15001', 'iifname "tap0" return']
    assert behind[2:] == rules(Capture(), "nat_prerouting")


def test_only_redirects_of_tcp_look_at_flags() -> None:
    new = "tcp flags & (fin | syn | rst | ack) == syn"
    for chain in ("nat_prerouting", "nat_output"):
        for rule in rules(EVERYTHING, chain):
            assert (new in rule) == ("redirect" in rule and "udp" not in rule)


def test_draining_takes_redirects_and_leaves_what_open_connections_need() -> None:
    full, draining = chains(Capture()), chains(Capture(draining=True))
    for name in ("nat_prerouting", "nat_output"):
        assert draining[name] == Chain(name, (), full[name].hook)
    for name in ("mangle_prerouting", "mangle_output"):
        assert draining[name] == full[name]
    whole, half = (pod(Capture(draining=flag)).namespaces[POD] for flag in (False, True))
    assert (half.rules, half.routes) == (whole.rules, whole.routes)


def test_draining_changes_rules_in_place() -> None:
    """A base chain that is deleted and made again would drop the translations between the two."""
    [operation] = diff(pod(Capture()), pod(Capture(draining=True)))
    assert isinstance(operation, NftTransaction)
    flushed = {step.chain for step in operation.steps if isinstance(step, FlushChain)}
    assert {"nat_prerouting", "nat_output"} <= flushed
    assert "nat" not in str([step for step in operation.steps if type(step).__name__ == "DeleteChain"])


@pytest.mark.parametrize("wanted", [Capture(), EVERYTHING, Capture(versions=(4,), dns=False)])
def test_applying_the_same_state_twice_has_no_operations(wanted: Capture) -> None:
    assert diff(pod(wanted), pod(wanted)) == ()
    assert diff(nothing(pod(wanted)), pod(wanted))
    assert diff(State({}), nothing(pod(wanted))) == ()
