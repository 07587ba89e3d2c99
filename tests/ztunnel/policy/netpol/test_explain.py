"""``ztunnel netpol explain``: every form of its question."""

import pytest

from tests.ztunnel.policy.calico.cluster import PODS, global_policy
from ztunnel.policy.calico.compile import compile_resources
from ztunnel.policy.calico.explain import BadQuestion
from ztunnel.policy.calico.read import read_resources
from ztunnel.policy.netpol.explain import explained

PING = "{action: Allow, protocol: ICMP, icmp: {type: 3, code: 4}}"
FROM_LOW = "{action: Deny, protocol: TCP, source: {ports: ['1:1023']}}, {action: Allow, protocol: TCP}"


def asked(rules: str, port: str, protocol: str = "tcp", source_port: str = "") -> tuple[bool, str]:
    policy = global_policy("one", f"{{selector: app == 'backend', ingress: [{rules}]}}")
    found = read_resources({"a.yaml": PODS + policy})
    compiled = compile_resources(found)
    allowed, lines = explained(found, compiled, "shop/front", "shop/back", port, protocol, source_port=source_port)
    return allowed, "\n".join(lines)


@pytest.mark.parametrize(
    ("port", "protocol", "allowed"),
    [
        ("3/4", "icmp", True),
        ("3", "icmp", False),
        ("8", "ICMP", False),
        ("3/4", "1", True),
        ("8080", "tcp", False),
    ],
)
def test_icmp_is_asked_about_by_type_and_code(port: str, protocol: str, allowed: bool) -> None:
    assert asked(PING, port, protocol)[0] is allowed


def test_a_source_port_is_assumed_and_named_where_a_rule_reads_it() -> None:
    allowed, text = asked(FROM_LOW, "80")
    assert allowed
    assert "judged with source port 49152" in text
    allowed, text = asked(FROM_LOW, "80", source_port="1000")
    assert not allowed
    assert "note:" not in text
    assert "source port" not in asked("{action: Allow}", "80")[1]


@pytest.mark.parametrize(("then", "allowed"), [("{action: Allow}", True), ("{action: Deny}", False)])
def test_a_rule_that_the_kernel_leaves_out_does_not_decide(then: str, allowed: bool) -> None:
    answer, text = asked(f"{{action: Allow, protocol: TCP, http: {{methods: [GET]}}}}, {then}", "80")
    assert answer is allowed
    assert "GlobalNetworkPolicy/one|rule 1" in text
    assert "allowed by default|GlobalNetworkPolicy/one|rule 0" not in text
    assert "note: GlobalNetworkPolicy/one ingress rule 0: the kernel sees no HTTP" in text


def test_a_rule_of_a_profile_that_the_kernel_leaves_out_does_not_decide() -> None:
    profile = """---
apiVersion: projectcalico.org/v3
kind: Profile
metadata: {name: kns.shop}
spec:
  ingress: [{action: Allow, protocol: TCP, http: {methods: [GET]}}, {action: Allow}]
  egress: [{action: Allow}]
"""
    found = read_resources({"a.yaml": PODS + profile})
    allowed, lines = explained(found, compile_resources(found), "shop/front", "shop/back", "80", "tcp")
    assert allowed
    assert "  => allowed by __PROFILE__|Profile/kns.shop|rule 1" in lines


@pytest.mark.parametrize(
    ("port", "protocol", "source_port"),
    [
        *((port, "tcp", "") for port in ("x", "70000", "80/1")),
        *(("80", protocol, "") for protocol in ("300", "²", "0")),
        *((kind, "icmp", "") for kind in ("256", "3/256", "3/x", "")),
        ("80", "tcp", "0"),
    ],
)
def test_questions_that_make_no_sense_are_refused(port: str, protocol: str, source_port: str) -> None:
    with pytest.raises(BadQuestion):
        asked(PING, port, protocol, source_port)
