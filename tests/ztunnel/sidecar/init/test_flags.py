"""The command line of ``ztunnel init``: upstream's letters, every fault with its flag."""

import argparse
from collections.abc import Mapping
from ipaddress import IPv4Network, ip_address, ip_network

import pytest

from tproxy.sidecar import Sidecar
from ztunnel.sidecar.init.flags import (
    EXCEPT_GROUPS,
    LOOPBACK,
    ONLY_GROUPS,
    BadFlags,
    Wanted,
    add_flags,
    resolvers_of,
    wanted,
)


def read(line: str, env: Mapping[str, str] | None = None, resolvers: str = "") -> Wanted:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    words = [word.strip("'") for word in line.split()]
    return wanted(parser.parse_args(words), env or {}, resolvers=resolvers_of(resolvers))


def test_the_arguments_of_an_injected_pod() -> None:
    found = read("-p 15001 -z 15006 -u 1337 -m REDIRECT -i '*' -x '' -b '*' -d 15090,15021,15020")
    assert found.sidecar == Sidecar(exclude_inbound=(15090, 15021, 15020))
    assert (found.apply, found.validate, found.remove, found.show) == (True, False, False, "")
    assert read("").sidecar == Sidecar()


def test_every_flag_is_read() -> None:
    line = (
        "-p 1 -z 2 -e 3 -u 4,5 -g 6 -i 10.0.0.0/8,fd00::/8 -x 10.1.0.0/16 -b 80,443 -d 81 -q 9000 -o 25,26 -k tap0"
        " -c eth1,eth2 --capture-all-dns --drop-invalid --iptables-probe-port 7 --probe-timeout 1.5s"
    )
    env = {ONLY_GROUPS: "8", EXCEPT_GROUPS: "9,10", LOOPBACK: "127.0.0.0/8"}
    found = read(line, env)
    assert found.sidecar == Sidecar(
        outbound_port=1,
        inbound_port=2,
        tunnel_port=3,
        users=(4, 5),
        groups=(6,),
        include_networks=(ip_network("10.0.0.0/8"), ip_network("fd00::/8")),
        exclude_networks=(ip_network("10.1.0.0/16"),),
        include_inbound=(80, 443),
        exclude_inbound=(81,),
        include_outbound=(9000,),
        exclude_outbound=(25, 26),
        virtual_interfaces=("tap0",),
        exclude_interfaces=("eth1", "eth2"),
        only_groups=(8,),
        except_groups=(9, 10),
        loopback4=IPv4Network("127.0.0.0/8"),
        dns=True,
        dns_servers=None,
        drop_invalid=True,
    )
    assert (found.probe_port, found.probe_timeout_s) == (7, 1.5)


def test_empty_lists_and_stars() -> None:
    found = read("-b '' -i ''").sidecar
    assert (found.include_inbound, found.include_networks) == ((), ())
    assert read("", {ONLY_GROUPS: "*"}).sidecar.only_groups == ()


def test_groups_are_as_users_if_they_are_not_given() -> None:
    assert read("-u 5,6").sidecar.groups == (5, 6)


def test_dns_is_captured_for_the_servers_of_the_pod() -> None:
    conf = "search a b\nnameserver 10.96.0.10\nnameserver fe80::1%eth0\nnameserver nonsense\nnameserver\n"
    found = read("--redirect-dns", resolvers=conf).sidecar
    assert found.dns
    assert found.dns_servers == (ip_address("10.96.0.10"), ip_address("fe80::1"))
    with pytest.raises(BadFlags, match="has no server"):
        read("--redirect-dns=true")
    assert read("--redirect-dns=false").sidecar.dns is False


@pytest.mark.parametrize(
    ("line", "steps"),
    [
        ("--print --run-validation", (False, False, False, "iptables")),
        ("-n", (False, False, False, "nft")),
        ("--dry-run=true", (False, False, False, "nft")),
        ("--run-validation --skip-rule-apply", (False, True, False, "")),
        ("--validate", (True, True, False, "")),
        ("--cleanup-only", (False, False, True, "")),
    ],
)
def test_flags_select_apply_validate_remove_and_print(line: str, steps: tuple[bool, bool, bool, str]) -> None:
    found = read(line)
    assert (found.apply, found.validate, found.remove, found.show) == steps


def test_rules_are_removed_without_knowing_what_they_captured() -> None:
    """The init container's environment and command line are the same for both, and resolv.conf can change."""
    line = "--redirect-dns -m TPROXY -b 80,* -x here --cleanup-only"
    assert read(line, {ONLY_GROUPS: "staff"}).remove
    with pytest.raises(BadFlags):
        read(line.removesuffix(" --cleanup-only"))
    with pytest.raises(BadFlags, match="cleanup-only"):
        read("--cleanup-only=perhaps")


def test_flags_without_effect_are_told() -> None:
    found = read("--reconcile --native-nftables=true --dual-stack=false")
    assert found.notes == ("--reconcile has no effect here", "--native-nftables has no effect here")


def test_every_fault_is_told_with_its_flag() -> None:
    line = (
        "-p 0 -z a,b -u root -m TPROXY -i 10.0.0.1/33 -x '*' -b '*,80' -d 70000 -q ²"
        " -c a-very-long-device-name -k a/b --drop-invalid=perhaps --probe-timeout soon"
        " --force-iptables-binary legacy"
    )
    with pytest.raises(BadFlags) as raised:
        read(line, {ONLY_GROUPS: "java", LOOPBACK: "::1"})
    assert [fault.partition(":")[0] for fault in raised.value.faults] == [
        "-m TPROXY",
        "--force-iptables-binary",
        "--proxy-uid",
        "--envoy-port",
        "--inbound-capture-port",
        "--istio-service-cidr",
        "--istio-service-exclude-cidr",
        "--istio-inbound-ports",
        "--istio-local-exclude-ports",
        "--istio-outbound-ports",
        "--kube-virt-interfaces",
        "--istio-exclude-interfaces",
        ONLY_GROUPS,
        LOOPBACK,
        "--drop-invalid",
        "--probe-timeout",
    ]
    assert "10.0.0.0/33" not in str(raised.value)
    assert "'10.0.0.1/33' is no IP range" in str(raised.value)
    assert "-m TPROXY: needs a proxy with CAP_NET_ADMIN" in str(raised.value)


ISTIO_INIT = "-p 15001 -z 15006 -u 1337 -m REDIRECT -i '*' -x '' -b '*' -d 15090,15021,15020"


@pytest.mark.parametrize(
    "line",
    [
        f"{ISTIO_INIT} --log_output_level=default:info --log_as_json --log_rotate /x --log_rotate_max_age 3",
        f"{ISTIO_INIT} --log_stacktrace_level default:none --log_target stdout --log_caller x --vklog 9 -v 2",
        f"{ISTIO_INIT} -f --iptables-trace-logging --host-nsenter-exec=false",
        f"{ISTIO_INIT} -fn=false --restore-format=false",
        "--envoy-port 15001 --inbound-capture-port=15006 --proxy-uid 1337 -d15090,15021,15020",
        f"{ISTIO_INIT} ignored words",
        f"-p 1 -p=2 --envoy-port=3 {ISTIO_INIT}",
        f"{ISTIO_INIT} -u '' -g '' -m ''",
    ],
)
def test_every_argument_that_istio_init_can_have_is_taken(line: str) -> None:
    found = read(line)
    assert found.sidecar == Sidecar(exclude_inbound=(15090, 15021, 15020))
    assert found.apply


@pytest.mark.parametrize("word", ["--envoy-prt=1", "-y", "--=1", "--log-as-json", "--istio"])
def test_unknown_flag_is_refused_by_name(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read(word)
    assert f"{word.partition('=')[0]}" in capsys.readouterr().err


def test_defaults_of_the_environment_are_those_of_istio() -> None:
    env = {"ISTIO_META_DNS_CAPTURE": "true", "INVALID_DROP": "1"}
    found = read("", env, resolvers="nameserver 10.96.0.10").sidecar
    assert (found.dns, found.drop_invalid) == (True, True)
    found = read("--redirect-dns=false --drop-invalid=F", env).sidecar
    assert (found.dns, found.drop_invalid) == (False, False)
    with pytest.raises(BadFlags, match="INVALID_DROP: must be true or false, not 'perhaps'"):
        read("", {"INVALID_DROP": "perhaps"})


def test_bits_behind_a_prefix_are_cleared() -> None:
    found = read("-i 10.0.0.1/24,10.0.0.9/24 -x 10.96.0.2/24,1.2.3.4", {LOOPBACK: "127.0.0.1/8"}).sidecar
    assert found.include_networks == (ip_network("10.0.0.0/24"),)
    assert found.exclude_networks == (ip_network("10.96.0.0/24"), ip_network("1.2.3.4"))
    assert found.loopback4 == IPv4Network("127.0.0.0/8")


@pytest.mark.parametrize(
    ("text", "seconds"), [("5s", 5), ("1m30s", 90), ("500ms", 0.5), (".5s", 0.5), ("1h", 3600)]
)
def test_duration_is_one_of_go(text: str, seconds: float) -> None:
    assert read(f"--probe-timeout {text}").probe_timeout_s == seconds
