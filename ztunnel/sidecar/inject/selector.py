"""Label selectors of the Kubernetes API (metav1.LabelSelector). Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

_OPERATORS: Final = ("In", "NotIn", "Exists", "DoesNotExist")


class BadSelector(ValueError):
    """A text is not a selector. The error names the place of the fault."""


@dataclass(frozen=True, slots=True)
class Requirement:
    """One requirement of a label selector."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def holds(self, labels: Mapping[str, Any]) -> bool:
        """Return whether labels meet the requirement. A missing label is not in any list of values."""
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case _:
                return self.key not in labels


@dataclass(frozen=True, slots=True)
class Selector:
    """A label selector. All of its requirements must match. Without requirements it selects no pod here, like in
    Istio's injector.
    """

    requirements: tuple[Requirement, ...]

    def selects(self, labels: Mapping[str, Any]) -> bool:
        """Return whether the selector selects an object with these labels."""
        return bool(self.requirements) and all(each.holds(labels) for each in self.requirements)


def selector(value: object, place: str) -> Selector:
    """Read a selector.

    Raises:
        BadSelector: the selector has a fault. The error names the place of the first one.
    """
    if not isinstance(value, Mapping):
        raise BadSelector(f"{place}: must be a mapping with matchLabels or matchExpressions")
    for key in value:
        if key not in ("matchLabels", "matchExpressions"):
            raise BadSelector(f"{place}.{key}: is not a known member")
    found = []
    labels = value.get("matchLabels") or {}
    if not isinstance(labels, Mapping):
        raise BadSelector(f"{place}.matchLabels: must be a mapping")
    for key, wanted in labels.items():
        if not isinstance(wanted, str):
            raise BadSelector(f"{place}.matchLabels.{key}: must be a string, not {wanted!r}")
        found.append(Requirement(str(key), "In", (wanted,)))
    expressions = value.get("matchExpressions") or []
    if not isinstance(expressions, list):
        raise BadSelector(f"{place}.matchExpressions: must be a list")
    for number, expression in enumerate(expressions):
        found.append(_requirement(expression, f"{place}.matchExpressions[{number}]"))
    return Selector(tuple(found))


def _requirement(value: object, place: str) -> Requirement:
    if not isinstance(value, Mapping) or not isinstance(value.get("key"), str):
        raise BadSelector(f"{place}.key: must be a string")
    operator, values = value.get("operator"), value.get("values") or []
    if operator not in _OPERATORS:
        raise BadSelector(f"{place}.operator: must be one of {', '.join(_OPERATORS)}, not {operator!r}")
    if not isinstance(values, list) or not all(isinstance(each, str) for each in values):
        raise BadSelector(f"{place}.values: must be a list of strings")
    if bool(values) != (operator in ("In", "NotIn")):
        raise BadSelector(f"{place}.values: {operator} {'takes none' if values else 'needs at least one'}")
    return Requirement(value["key"], operator, tuple(values))
