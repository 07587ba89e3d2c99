"""The configuration of the injector, a YAML document from a mounted ConfigMap.

::

    policy: enabled # enabled or disabled: for pods that no other row of the decision covers
    neverInjectSelector: []          # label selectors
    alwaysInjectSelector: []
    defaultTemplates: [ambient]      # for pods without the annotation inject.istio.io/templates
    aliases: {mesh: [ambient]}       # further names of lists of templates
    image: ztunnel-py                # for the containers that are added
    imagePullPolicy: IfNotPresent
    imagePullSecrets: []             # names
    revision: default                # written into injected pods
    gate:
      timeoutSeconds: 60             # how long an application waits for the proxy's listeners
      failOpen: false                # true: after this time it starts without them
    sidecar:                         # for the templates sidecar and sidecar-classic
      xdsAddress: https://istiod.istio-system.svc:15012
      caAddress: ""                  # empty: the same as xdsAddress
      trustDomain: cluster.local
      clusterDomain: cluster.local
      clusterId: Kubernetes
      network: ""
      dnsCapture: false
      logLevel: info
      rewriteAppHTTPProbes: true
      tokenAudience: istio-ca
      tokenSeconds: 43200
      rootConfigMap: istio-ca-root-cert
      drainSeconds: 20               # how long an ordinary sidecar keeps open connections
      resources: {requests: {cpu: 100m, memory: 128Mi}, limits: {memory: 1Gi}, claims: []}
      includeOutboundIPRanges: "*"   # these six are like the annotations of the same names
      excludeOutboundIPRanges: ""
      includeInboundPorts: "*"
      excludeInboundPorts: ""
      includeOutboundPorts: ""
      excludeOutboundPorts: ""
      env: {}                        # further environment variables of the proxy

All faults are reported together, each with its place.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ztunnel.runtime.formats.config_reader import ConfigReader, Faults
from ztunnel.runtime.formats.file_kinds import FileKind, explained
from ztunnel.sidecar.capture_lists import all_or_networks, all_or_ports, networks, ports
from ztunnel.sidecar.inject.decision import Rules
from ztunnel.sidecar.inject.selector import BadSelector, Selector, selector

#: The names of the templates that exist.
TEMPLATES = ("ambient", "sidecar", "sidecar-classic")
_KEYS = (
    "policy",
    "neverInjectSelector",
    "alwaysInjectSelector",
    "defaultTemplates",
    "aliases",
    "image",
    "imagePullPolicy",
    "imagePullSecrets",
    "revision",
    "gate",
    "sidecar",
)
#: The lists of captured traffic in a sidecar's configuration: the flag of ``ztunnel init`` for each, its reader
#: and its default.
_LISTS: Final[Mapping[str, tuple[str, Callable[[str], object], str]]] = {
    "includeOutboundIPRanges": ("-i", all_or_networks, "*"),
    "excludeOutboundIPRanges": ("-x", networks, ""),
    "includeInboundPorts": ("-b", all_or_ports, "*"),
    "excludeInboundPorts": ("-d", ports, ""),
    "includeOutboundPorts": ("-q", ports, ""),
    "excludeOutboundPorts": ("-o", ports, ""),
}
_TEXTS: Final = {
    "xdsAddress": "xds_address",
    "caAddress": "ca_address",
    "trustDomain": "trust_domain",
    "clusterDomain": "cluster_domain",
    "clusterId": "cluster_id",
    "network": "network",
    "logLevel": "log_level",
    "tokenAudience": "token_audience",
    "rootConfigMap": "root_config_map",
}
_FLAGS: Final = {"dnsCapture": "dns_capture", "rewriteAppHTTPProbes": "rewrite_probes"}
_NUMBERS: Final = {"tokenSeconds": ("token_s", 600), "drainSeconds": ("drain_s", 1)}
_MAY_BE_EMPTY: Final = ("caAddress", "network")
_SIDECAR_KEYS: Final = (*_TEXTS, *_FLAGS, *_NUMBERS, *_LISTS, "resources", "env")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_DNS_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", re.ASCII)


def is_dns_label(name: str) -> bool:
    """Return whether a text can be the name of a revision, a Service or a namespace (RFC 1123)."""
    return _DNS_LABEL.fullmatch(name) is not None


class ConfigFaults(Faults):
    """A configuration is unusable; this lists all its faults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarConfig:
    """The configuration of sidecars; see the module.

    Attributes:
        flags: the flags of ``ztunnel init``, with their values.
        env: further environment variables of the proxy, which override ours.
    """

    xds_address: str = "https://istiod.istio-system.svc:15012"
    ca_address: str = ""
    trust_domain: str = "cluster.local"
    cluster_domain: str = "cluster.local"
    cluster_id: str = "Kubernetes"
    network: str = ""
    dns_capture: bool = False
    log_level: str = "info"
    rewrite_probes: bool = True
    token_audience: str = "istio-ca"
    token_s: int = 43200
    root_config_map: str = "istio-ca-root-cert"
    drain_s: int = 20
    resources: Mapping[str, Any] = field(
        default_factory=lambda: {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}}
    )
    flags: Mapping[str, str] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectConfig:
    """The parts to add to pods, and the selection of pods.

    Attributes:
        templates: names of templates for pods that name none.
        aliases: further names for lists of templates. They are expanded once, as in Istio.
        image: the image of the added containers.
        gate_timeout_s: how long an application waits for the proxy's listeners.
        gate_fail_open: whether the application then starts without listeners. If not, the gate restarts.
        pull_secrets: names of secrets for pods with a sidecar.
        revision: the name of this configuration, in a pod's status.
        sidecar: the configuration of sidecars.
    """

    rules: Rules = field(default_factory=Rules)
    templates: tuple[str, ...] = ("ambient",)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    image: str = "ztunnel-py"
    pull_policy: str = "IfNotPresent"
    pull_secrets: tuple[str, ...] = ()
    revision: str = "default"
    sidecar: SidecarConfig = field(default_factory=SidecarConfig)
    gate_timeout_s: int = 60
    gate_fail_open: bool = False


def parse_config(text: str) -> InjectConfig:
    """Read a configuration. An empty one has the defaults.

    Raises:
        ConfigFaults: with every fault.
    """
    reader = _Reader()
    document = reader.document(text, _KEYS) if text.strip() else {}
    config = reader.config(document)
    if reader.faults:
        raise ConfigFaults(explained(reader.faults, text, FileKind.INJECTOR))
    return config


class _Reader(ConfigReader):
    def fault(self, place: str, reason: str) -> None:
        super().fault(place.lstrip("."), reason)

    def config(self, document: Mapping[str, Any]) -> InjectConfig:
        policy = self.text(document, "policy", "", "enabled")
        if policy not in ("enabled", "disabled"):
            self.fault("policy", f"must be enabled or disabled, not {policy!r}")
        pull = self.text(document, "imagePullPolicy", "", "IfNotPresent")
        if pull not in ("Always", "IfNotPresent", "Never"):
            self.fault("imagePullPolicy", f"must be Always, IfNotPresent or Never, not {pull!r}")
        image = self.text(document, "image", "", "ztunnel-py")
        if not image:
            self.fault("image", "must not be empty")
        aliases = {
            str(name): self.templates(names, f"aliases.{name}")
            for name, names in self.mapping(document.get("aliases"), "aliases", None).items()
        }
        gate = self.mapping(document.get("gate"), "gate", ("timeoutSeconds", "failOpen"))
        timeout_s = gate.get("timeoutSeconds", 60)
        if not isinstance(timeout_s, int) or isinstance(timeout_s, bool) or timeout_s < 1:
            self.fault("gate.timeoutSeconds", f"must be a whole number from 1, not {timeout_s!r}")
            timeout_s = 60
        named = document.get("defaultTemplates")
        default = ("ambient",) if named is None else self.templates(named, "defaultTemplates", aliases)
        rules = Rules(
            policy=policy,
            never=self.selectors(document, "neverInjectSelector"),
            always=self.selectors(document, "alwaysInjectSelector"),
        )
        return InjectConfig(
            rules=rules,
            templates=default,
            aliases=aliases,
            image=image,
            pull_policy=pull,
            pull_secrets=self.texts(document, "imagePullSecrets", ""),
            revision=self.revision(document),
            sidecar=self.sidecar(self.mapping(document.get("sidecar"), "sidecar", _SIDECAR_KEYS)),
            gate_timeout_s=timeout_s,
            gate_fail_open=self.flag(gate, "failOpen", "gate", default=False),
        )

    def revision(self, document: Mapping[str, Any]) -> str:
        revision = self.text(document, "revision", "", "default")
        if not is_dns_label(revision):
            self.fault("revision", f"must be small letters, digits and hyphens, not {revision!r}")
        return revision

    def sidecar(self, section: Mapping[str, Any]) -> SidecarConfig:
        default = SidecarConfig()
        values: dict[str, Any] = {}
        for key, name in _TEXTS.items():
            values[name] = self.text(section, key, "sidecar", getattr(default, name))
            if not values[name] and key not in _MAY_BE_EMPTY:
                self.fault(f"sidecar.{key}", "must not be empty")
        for key, name in _FLAGS.items():
            values[name] = self.flag(section, key, "sidecar", default=getattr(default, name))
        for key, (name, least) in _NUMBERS.items():
            number = section.get(key, getattr(default, name))
            if not isinstance(number, int) or isinstance(number, bool) or number < least:
                self.fault(f"sidecar.{key}", f"must be a whole number from {least}, not {number!r}")
            values[name] = number
        flags = {}
        for key, (flag, read, silent) in _LISTS.items():
            text = self.text(section, key, "sidecar", silent)
            try:
                read(text)
            except ValueError as error:
                self.fault(f"sidecar.{key}", str(error))
            if text != silent:
                flags[flag] = text
        resources = section.get("resources")
        if resources is not None:
            values["resources"] = self.mapping(resources, "sidecar.resources", ("requests", "limits", "claims"))
        env = self.mapping(section.get("env"), "sidecar.env", None)
        for variable, value in env.items():
            if not isinstance(variable, str) or _VARIABLE.fullmatch(variable) is None:
                self.fault(f"sidecar.env.{variable}", "is not a name of an environment variable")
            elif not isinstance(value, str):
                self.fault(f"sidecar.env.{variable}", f"must be text, not {value!r}")
        return SidecarConfig(flags=flags, env=dict(env), **values)

    def templates(
        self, names: object, place: str, aliases: Mapping[str, tuple[str, ...]] | None = None
    ) -> tuple[str, ...]:
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            self.fault(place, "must be a list of names of templates")
            return ()
        known = (*TEMPLATES, *(aliases or ()))
        for name in names:
            if name not in known:
                self.fault(place, f"there is no template {name!r}; known are {', '.join(known)}")
        return tuple(names)

    def selectors(self, document: Mapping[str, Any], name: str) -> tuple[Selector, ...]:
        found = []
        for number, value in enumerate(self.items(document, name, "")):
            try:
                found.append(selector(value, f"{name}[{number}]"))
            except BadSelector as error:
                place, _, reason = str(error).partition(": ")
                self.fault(place, reason)
        return tuple(found)
