"""Reads what to capture from the command line and environment of ``ztunnel init``. Pure.

Flags have the letters, names and meanings of ``istio-iptables`` and are parsed like Go's flags, so that an
injected pod's arguments can be kept. Two defaults are safer: without ``-i`` and ``-b`` all traffic is captured,
whereas upstream captures none. Flags that choose between upstream's ways of writing rules are accepted without
effect, and a note names each.
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network, ip_address
from typing import Any, Final, TypeVar

from tproxy.resources import IpAddress, Version
from tproxy.sidecar import USER, Sidecar
from xds.digits import whole_number
from ztunnel.runtime.formats.go_flags import read_as_go
from ztunnel.runtime.formats.go_values import parse_bool, parse_cidr, parse_duration_s
from ztunnel.sidecar.capture_lists import all_or_networks, all_or_ports, interfaces, networks, ports

T = TypeVar("T")
ONLY_GROUPS: Final = "ISTIO_OUTBOUND_OWNER_GROUPS"
EXCEPT_GROUPS: Final = "ISTIO_OUTBOUND_OWNER_GROUPS_EXCLUDE"
LOOPBACK: Final = "ISTIO_OUTBOUND_IPV4_LOOPBACK_CIDR"
#: Upstream's flags that are accepted without effect: rules are always in nftables and for both IP versions, and
#: are always compared with the existing rules.
_WITHOUT_EFFECT: Final = (
    "reconcile",
    "force_apply",
    "native_nftables",
    "dual_stack",
    "cni_mode",
    "host_nsenter_exec",
    "iptables_trace_logging",
)
#: Upstream's flags for its log, which this command does not have. It prints its actions and faults instead.
_OF_LOGS: Final = (
    *("log_output_level", "log_stacktrace_level", "log_caller", "log_target", "log_rotate", "log_rotate_max_age"),
    *("log_rotate_max_size", "log_rotate_max_backups", "vklog", "stderrthreshold"),
)
_SWITCHES_OF_LOGS: Final = ("log_as_json", "alsologtostderr", "logtostderr")
#: The environment variables that set the defaults of switches.
_DEFAULTS: Final = {"redirect_dns": "ISTIO_META_DNS_CAPTURE", "drop_invalid": "INVALID_DROP"}


class BadFlags(Exception):
    """All unusable flags and variables, with one text for each."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__("; ".join(faults))
        self.faults = faults


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The work that a command line of ``ztunnel init`` requests.

    Attributes:
        sidecar: the rules.
        apply, validate, remove: the requested steps; ``validate`` comes last.
        show: ``nft`` or ``iptables``: print the rules in this form instead of applying them.
        namespace: the network namespace, a path or a name. Empty means the current one.
        probe_port, probe_timeout_s: the port and time limit of the connection made by validation.
        notes: lines for the log.
    """

    sidecar: Sidecar
    apply: bool
    validate: bool
    remove: bool
    show: str
    namespace: str
    probe_port: int
    probe_timeout_s: float
    notes: tuple[str, ...]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag. :func:`wanted` checks the values' texts, so that all faults are reported together."""

    def value(*names: str, default: str = "", about: str) -> None:
        parser.add_argument(*names, default=default, metavar="X", help=f"{about} (default {default or 'none'})")

    value("-p", "--envoy-port", "--proxy-port", default="15001", about="the proxy's port for outgoing connections")
    value("-z", "--inbound-capture-port", default="15006", about="the proxy's port for incoming connections")
    value("-e", "--inbound-tunnel-port", default="15008", about="the port for tunnels; never redirected")
    value("-u", "--proxy-uid", default=str(USER), about="user ids of the proxy")
    parser.add_argument("-g", "--proxy-gid", metavar="X", help="group ids of the proxy (default: as -u)")
    value("-m", "--istio-inbound-interception-mode", default="REDIRECT", about="only REDIRECT is supported")
    value("-i", "--istio-service-cidr", default="*", about="IP ranges whose connections are captured")
    value("-x", "--istio-service-exclude-cidr", about="IP ranges whose connections are not captured")
    value("-b", "--istio-inbound-ports", default="*", about="ports of the pod that are captured")
    value("-d", "--istio-local-exclude-ports", about="ports of the pod that are not captured")
    value("-q", "--istio-outbound-ports", about="destination ports that are captured regardless of -i")
    value("-o", "--istio-local-outbound-ports-exclude", about="destination ports that are not captured")
    value("-k", "--kube-virt-interfaces", about="devices of virtual machines, whose traffic counts as outbound")
    value("-c", "--istio-exclude-interfaces", about="devices whose traffic is not captured")
    value("-t", "--istio-inbound-tproxy-mark", default="1337", about="ignored; only for TPROXY")
    value("-r", "--istio-inbound-tproxy-route-table", default="133", about="ignored; only for TPROXY")
    value("--network-namespace", about="network namespace: a name, path or process id; none means the current one")
    value("--iptables-probe-port", default="15002", about="port of the connection that --run-validation makes")
    value("--probe-timeout", default="5s", about="time limit of the connection that --run-validation makes")
    value("--force-iptables-binary", about="refused, because rules are written to nftables")

    def switch(*names: str, about: str) -> None:
        parser.add_argument(*names, nargs="?", const="true", metavar="BOOL", help=about)

    switch("-n", "--dry-run", about="print the rules in nft's language and change nothing")
    switch("--print", about="print the rules as iptables-restore text, for review")
    switch("--redirect-dns", about="capture DNS queries to the servers of /etc/resolv.conf")
    switch("--capture-all-dns", about="capture DNS queries to any server")
    switch("--drop-invalid", about="drop packets that belong to no connection")
    switch("--skip-rule-apply", about="do not apply rules; used with --run-validation")
    switch("--run-validation", "--validate", about="check that a connection is captured; status 126 if not")
    switch("--cleanup-only", about="remove the rules")
    switch("-f", "--restore-format", about="accepted, without effect")
    for name in _WITHOUT_EFFECT:
        switch(f"--{name.replace('_', '-')}", about="accepted, without effect")
    value("-v", "--v", about="a log flag of istio-iptables; accepted, without effect")
    for name in _OF_LOGS:
        value(f"--{name}", about="a log flag of istio-iptables; accepted, without effect")
    for name in _SWITCHES_OF_LOGS:
        switch(f"--{name}", about="a log flag of istio-iptables; accepted, without effect")
    read_as_go(parser)


def wanted(
    args: argparse.Namespace,
    env: Mapping[str, str],
    *,
    versions: tuple[Version, ...] = (4, 6),
    resolvers: tuple[IpAddress, ...] = (),
) -> Wanted:
    """Return the work that a command line requests.

    Args:
        args: from a parser with :func:`add_flags`.
        env: the environment, for settings that upstream takes from variables only.
        versions: the IP versions that the namespace has.
        resolvers: the resolvers in ``/etc/resolv.conf``.

    Raises:
        BadFlags: with every fault.
    """
    reader = _Reader(args, env)
    show = "iptables" if reader.flag("print") else "nft" if reader.flag("dry_run") else ""
    remove, skip = reader.flag("cleanup_only"), reader.flag("skip_rule_apply")
    notes = tuple(
        f"--{name.replace('_', '-')} has no effect here" for name in _WITHOUT_EFFECT if reader.flag(name)
    )
    if remove and not show and not reader.faults:
        # Removal ignores the flags that choose what to capture.
        return Wanted(
            sidecar=Sidecar(versions=versions),
            apply=False,
            validate=False,
            remove=True,
            show="",
            namespace=args.network_namespace,
            probe_port=0,
            probe_timeout_s=0.0,
            notes=notes,
        )
    if args.istio_inbound_interception_mode not in ("REDIRECT", ""):
        said = args.istio_inbound_interception_mode
        why = "needs a proxy with CAP_NET_ADMIN: enrol such a pod by the node agent" if said == "TPROXY" else ""
        reader.faults.append(f"-m {said}: {why or 'must be REDIRECT'}")
    if args.force_iptables_binary:
        reader.faults.append("--force-iptables-binary: rules are nftables here; no such program is used")
    for name in ("restore_format", *_SWITCHES_OF_LOGS):
        reader.flag(name)
    users = reader.value("proxy_uid", _users)
    every_server = reader.flag("capture_all_dns")
    dns = reader.flag("redirect_dns") or every_server
    only = env.get(ONLY_GROUPS, "")
    sidecar = Sidecar(
        versions=versions,
        outbound_port=reader.value("envoy_port", _port),
        inbound_port=reader.value("inbound_capture_port", _port),
        tunnel_port=reader.value("inbound_tunnel_port", _port),
        users=users,
        groups=users if not args.proxy_gid else reader.value("proxy_gid", _numbers),
        include_networks=reader.value("istio_service_cidr", all_or_networks),
        exclude_networks=reader.value("istio_service_exclude_cidr", networks),
        include_inbound=reader.value("istio_inbound_ports", all_or_ports),
        exclude_inbound=reader.value("istio_local_exclude_ports", ports),
        include_outbound=reader.value("istio_outbound_ports", ports),
        exclude_outbound=reader.value("istio_local_outbound_ports_exclude", ports),
        virtual_interfaces=reader.value("kube_virt_interfaces", interfaces),
        exclude_interfaces=reader.value("istio_exclude_interfaces", interfaces),
        only_groups=() if only.strip() in ("", "*") else reader.text(ONLY_GROUPS, only, _numbers),
        except_groups=reader.text(EXCEPT_GROUPS, env.get(EXCEPT_GROUPS, ""), _listed_numbers),
        loopback4=reader.text(LOOPBACK, env.get(LOOPBACK, "127.0.0.1/32"), _loopback),
        dns=dns,
        dns_servers=None if every_server or not dns else resolvers,
        drop_invalid=reader.flag("drop_invalid"),
    )
    validate = reader.flag("run_validation")
    probe_port, probe_timeout_s = (
        reader.value("iptables_probe_port", _port),
        reader.value("probe_timeout", _timeout_s),
    )
    if dns and not every_server and not resolvers:
        reader.faults.append("--redirect-dns: /etc/resolv.conf has no server; --capture-all-dns needs none")
    if reader.faults:
        raise BadFlags(reader.faults)
    return Wanted(
        sidecar=sidecar,
        apply=not (show or remove or skip),
        validate=validate and not (show or remove),
        remove=False,
        show=show,
        namespace=args.network_namespace,
        probe_port=probe_port,
        probe_timeout_s=probe_timeout_s,
        notes=notes,
    )


def resolvers_of(resolv_conf: str) -> tuple[IpAddress, ...]:
    """Return the name servers in a ``resolv.conf`` (resolv.conf(5)). Other lines are ignored."""
    found: list[IpAddress] = []
    for line in resolv_conf.splitlines():
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver":
            try:
                found.append(ip_address(words[1].partition("%")[0]))
            except ValueError:
                continue
    return tuple(dict.fromkeys(found))


class _Reader:
    """Reads the values of flags and collects faults, each with the name of its flag."""

    def __init__(self, args: argparse.Namespace, env: Mapping[str, str]) -> None:
        self._args = vars(args)
        self._env = env
        self.faults: list[str] = []

    def value(self, name: str, read: Callable[[str], T]) -> T:
        return self.text(f"--{name.replace('_', '-')}", self._args[name], read)

    def text(self, shown: str, text: str, read: Callable[[str], T]) -> T:
        try:
            return read(text)
        except ValueError as error:
            self.faults.append(f"{shown}: {error}")
            fallback: Any = None
            return fallback  # type: ignore[no-any-return]  # nothing is made of it: there is a fault

    def flag(self, name: str) -> bool:
        text, shown = self._args[name], f"--{name.replace('_', '-')}"
        if text is None:
            shown = _DEFAULTS.get(name, "")
            text = self._env.get(shown) or "false"
        try:
            return parse_bool(text)
        except ValueError as error:
            if (fault := f"{shown}: {error}") not in self.faults:
                self.faults.append(fault)
            return False


def _port(text: str) -> int:
    found = ports(text)
    if len(found) != 1:
        raise ValueError(f"{text!r} is not one port")
    return found[0]


def _numbers(text: str) -> tuple[int, ...]:
    found = _listed_numbers(text)
    if not found:
        raise ValueError("must be numbers of users or groups, separated by commas, not empty")
    return found


def _users(text: str) -> tuple[int, ...]:
    return _numbers(text or str(USER))


def _loopback(text: str) -> IPv4Network:
    found = parse_cidr(text)
    if not isinstance(found, IPv4Network):
        raise ValueError(f"{text!r} is no range of IPv4")
    return found


def _listed_numbers(text: str) -> tuple[int, ...]:
    found = []
    for part in text.split(","):
        word = part.strip()
        if not word:
            continue
        number = whole_number(word, 2**32 - 2)
        if number is None:
            # User and group names are refused, because resolving them needs the pod's user database, perhaps over
            # the network.
            raise ValueError(f"{word!r} is no number of a user or group")
        found.append(number)
    return tuple(dict.fromkeys(found))


def _timeout_s(text: str) -> float:
    found = parse_duration_s(text)
    if found <= 0:
        raise ValueError(f"{text!r} must be more than nothing")
    return found
