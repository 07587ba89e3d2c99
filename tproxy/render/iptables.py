"""A sidecar's rules in iptables' language, for reviewers and for comparison. It is never loaded.

There is one document for each IP version, in the format of ``iptables-restore --noflush`` and ``ip6tables-restore
--noflush``. It has the rules in separate chains, and one jump to each of these chains.
"""

from collections.abc import Iterator
from ipaddress import collapse_addresses
from itertools import product

from tproxy.expressions import TCP, UDP
from tproxy.resources import Version
from tproxy.sidecar import (
    Deed,
    Device,
    Drop,
    Invalid,
    Networks,
    Owner,
    Pass,
    Redirect,
    Sidecar,
    Step,
    StepChain,
    Test,
    Transport,
    Zone,
    steps,
)

_NAMES = {True: "ISTIO_INBOUND", False: "ISTIO_OUTPUT"}
_HOOKS = {True: "PREROUTING", False: "OUTPUT"}
_PROTOCOLS = {TCP: "tcp", UDP: "udp"}


def restore_text(wanted: Sidecar, version: Version) -> str:
    """Return the document of rules for one IP version. It ends with a line break."""
    chains = steps(wanted)
    lines = []
    for table in ("raw", "mangle", "nat"):
        mine = [chain for chain in chains if chain.table == table]
        if mine:
            lines += [f"*{table}", *_table(mine, version), "COMMIT"]
    return "".join(f"{line}\n" for line in lines)


def _table(chains: list[StepChain], version: Version) -> Iterator[str]:
    yield from (f":{_NAMES[chain.incoming]} - [0:0]" for chain in chains)
    for chain in chains:
        yield f"-A {_HOOKS[chain.incoming]} -j {_NAMES[chain.incoming]}"
        for step in chain.steps:
            for tests in _lines(step, version):
                words = " ".join(word for word in (*tests, _deed(step.deed)) if word)
                yield f'-A {_NAMES[chain.incoming]} {words} -m comment --comment "{step.why}"'


def _lines(step: Step, version: Version) -> Iterator[tuple[str, ...]]:
    """Yield the tests for each line that a step needs. There can be several lines, because an iptables rule
    compares one network.
    """
    # Protocol and ports come first, as in the output of iptables-save.
    ordered = sorted(step.tests, key=lambda test: not isinstance(test, Device | Networks | Transport))
    yield from product(*(list(_words(test, version)) for test in ordered))


def _words(test: Test, version: Version) -> Iterator[str]:
    match test:
        case Device(name, incoming):
            yield f"{'-i' if incoming else '-o'} {name}"
        case Transport(protocol, (), _, _):
            yield f"-p {_PROTOCOLS[protocol]}"
        case Transport(protocol, ports, negate, source):
            sign, side = "! " if negate else "", "s" if source else "d"
            if len(ports) == 1:
                yield f"-p {_PROTOCOLS[protocol]} -m {_PROTOCOLS[protocol]} {sign}--{side}port {ports[0]}"
            else:
                listed = ",".join(map(str, ports))
                yield f"-p {_PROTOCOLS[protocol]} -m multiport {sign}--{side}ports {listed}"
        case Networks(name, networks, source, negate):
            mine = list(collapse_addresses(each for each in networks if each.version == version))  # type: ignore[type-var]
            if negate and len(mine) > 1:
                raise ValueError(f"{name}: several networks cannot be negated in one line")
            yield from (f"{'! ' if negate else ''}{'-s' if source else '-d'} {each}" for each in mine)
        case Owner(number, group, negate):
            yield f"-m owner {'! ' if negate else ''}{'--gid-owner' if group else '--uid-owner'} {number}"
        case Invalid():
            yield "-m conntrack --ctstate INVALID"


def _deed(deed: Deed) -> str:
    match deed:
        case Pass():
            return "-j RETURN"
        case Redirect(port):
            return f"-j REDIRECT --to-ports {port}"
        case Zone(number):
            return f"-j CT --zone {number}"
        case Drop():
            return "-j DROP"
