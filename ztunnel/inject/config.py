"""The injector's configuration: a YAML document, from a config map that is mounted. Pure.

::

    policy: enabled                  # or disabled: what pods get that no row of the decision speaks of
    neverInjectSelector: []          # label selectors
    alwaysInjectSelector: []
    defaultTemplates: [ambient]      # for pods without the annotation inject.istio.io/templates
    aliases: {mesh: [ambient]}       # further names of lists of templates
    image: ztunnel-py                # of the containers that are added
    imagePullPolicy: IfNotPresent
    gate:
      timeoutSeconds: 60             # how long an application waits for its listeners
      failOpen: false                # true: then it starts without them

All faults are reported together, each with its place.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ztunnel.inject.decision import Rules
from ztunnel.inject.selector import BadSelector, Selector, selector
from ztunnel.runtime.config_reader import ConfigReader, Faults

#: The templates there are.
TEMPLATES = ("ambient",)
_KEYS = (
    "policy",
    "neverInjectSelector",
    "alwaysInjectSelector",
    "defaultTemplates",
    "aliases",
    "image",
    "imagePullPolicy",
    "gate",
)


class ConfigFaults(Faults):
    """The faults of a configuration, all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectConfig:
    """What is added to pods, and to which.

    Attributes:
        templates: names of templates for pods that name none.
        aliases: further names; expanded once, as in Istio.
        image: of the containers that are added.
        gate_timeout_s: how long an application waits for its listeners.
        gate_fail_open: start it without them then, instead of starting the pod's containers over.
    """

    rules: Rules = field(default_factory=Rules)
    templates: tuple[str, ...] = ("ambient",)
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    image: str = "ztunnel-py"
    pull_policy: str = "IfNotPresent"
    gate_timeout_s: int = 60
    gate_fail_open: bool = False


def parse_config(text: str) -> InjectConfig:
    """Read a configuration; an empty one is the defaults.

    Raises:
        ConfigFaults: with every fault.
    """
    reader = _Reader()
    document = reader.document(text, _KEYS) if text.strip() else {}
    config = reader.config(document)
    if reader.faults:
        raise ConfigFaults(reader.faults)
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
            gate_timeout_s=timeout_s,
            gate_fail_open=self.flag(gate, "failOpen", "gate", default=False),
        )

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
