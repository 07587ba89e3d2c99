"""A sidecar's rules: reviewed golden files in both languages, and what each switch changes."""

import subprocess
from dataclasses import replace
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from tests.programs import needed
from tproxy.expressions import TCP
from tproxy.render.iptables import restore_text
from tproxy.render.text import rule_text, table_text
from tproxy.resources import Version
from tproxy.sidecar import Networks, Owner, Pass, Sidecar, Transport, sidecar, steps

HERE = Path(__file__).parent / "render"
#: As Istio's injector asks for it.
DEFAULT = Sidecar(exclude_inbound=(15090, 15021, 15020))
EVERYTHING = Sidecar(
    users=(1337, 2000),
    include_networks=(ip_network("10.0.0.0/8"), ip_network("fd00::/8")),
    exclude_networks=(ip_network("10.1.0.0/16"), ip_network("10.2.3.4/32")),
    include_inbound=(80, 443),
    include_outbound=(9000,),
    exclude_outbound=(25,),
    virtual_interfaces=("tap0",),
    exclude_interfaces=("eth1",),
    only_groups=(5, 6),
    except_groups=(7,),
    dns=True,
    dns_servers=(ip_address("10.96.0.10"),),
    drop_invalid=True,
)
CASES = [("sidecar", DEFAULT), ("sidecar_everything", EVERYTHING)]


def rules(wanted: Sidecar, chain: str) -> list[str]:
    [found] = [each for each in sidecar(wanted).chains if each.name == chain]
    return [rule_text(rule.phrase) for rule in found.rules]


@pytest.mark.parametrize(("name", "wanted"), CASES)
def test_a_sidecar_reads_as_reviewed(name: str, wanted: Sidecar) -> None:
    assert table_text(sidecar(wanted)) + "\n" == (HERE / f"{name}.golden").read_text()
    both = "".join(f"# IPv{version}\n{restore_text(wanted, version)}" for version in wanted.versions)
    assert both == (HERE / f"{name}_iptables.golden").read_text()


@pytest.mark.parametrize(("name", "wanted"), CASES)
@pytest.mark.parametrize("version", [4, 6])
def test_iptables_reads_what_we_print(name: str, wanted: Sidecar, version: Version) -> None:
    # In an empty namespace of its own, where it may look at rules.
    program = needed("iptables-restore" if version == 4 else "ip6tables-restore")
    command = ["unshare", "--net", program, "--test", "--noflush"]
    checked = subprocess.run(
        command, input=restore_text(wanted, version), capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, f"{name}: {checked.stderr}"


def test_the_ipv4_table_has_no_ipv6_rules() -> None:
    assert "ip6" not in table_text(sidecar(replace(EVERYTHING, versions=(4,))))


def test_no_port_captures_nothing_that_comes_in() -> None:
    assert [chain.incoming for chain in steps(Sidecar(include_inbound=()))] == [False]
    assert rules(Sidecar(include_inbound=()), "nat_sent") == rules(Sidecar(), "nat_sent")


def test_no_range_captures_only_the_ports_asked_for() -> None:
    nowhere = Sidecar(include_networks=(), include_outbound=(9000,))
    captured = [rule for rule in rules(nowhere, "nat_sent") if "15001" in rule]
    assert captured == ["tcp dport 9000 redirect to :15001"]


def test_loopback_is_captured_where_it_is_asked_for() -> None:
    def application_to_itself(wanted: Sidecar) -> bool:
        [sent] = [chain for chain in steps(wanted) if not chain.incoming]
        return any(step.why == "the application to itself" for step in sent.steps)

    assert application_to_itself(Sidecar(include_networks=(ip_network("10.0.0.0/8"),)))
    assert not application_to_itself(Sidecar(include_networks=(ip_network("127.0.0.1/32"),)))


def test_with_several_users_only_strangers_pass_on_loopback() -> None:
    [sent] = [chain for chain in steps(EVERYTHING) if chain.table == "nat" and not chain.incoming]
    [step] = [step for step in sent.steps if step.why == "the application to itself"]
    owners = [test for test in step.tests if isinstance(test, Owner)]
    assert owners == [Owner(1337, negate=True), Owner(2000, negate=True)]
    assert step.deed == Pass()


def test_networks_of_one_version_do_not_make_a_rule_for_the_other() -> None:
    only6 = Sidecar(include_networks=(ip_network("fd00::/8"),))
    captured = [rule for rule in rules(only6, "nat_sent") if "15001" in rule]
    assert captured == ["ip6 daddr @included6 meta l4proto tcp redirect to :15001"]
    assert "127.0.0.1/32" in restore_text(only6, 4)
    assert "--to-ports 15001" not in restore_text(only6, 4)


def test_several_networks_cannot_be_negated_in_one_line_of_iptables() -> None:
    from tproxy.render.iptables import _words

    several = Networks("x", (ip_network("10.0.0.0/8"), ip_network("192.168.0.0/16")), negate=True)
    with pytest.raises(ValueError, match="x: several networks"):
        list(_words(several, 4))
    assert list(_words(Transport(TCP, (1, 2), negate=True), 4)) == ["-p tcp -m multiport ! --dports 1,2"]
