"""Reads YAML like Envoy, with the rules of yaml-cpp for plain scalars, and Envoy's own rules for tags and keys.

Envoy converts a document to JSON before protobuf reads it. A plain scalar is null, a boolean (also ``yes``,
``on``, ``n`` and similar words), or an integer (also octal and hexadecimal). Any other plain scalar, fractions
included, is a string, which protobuf converts to the field's type. Quoted scalars are strings. In a ``Struct``
these rules determine the type of a value.

Keys with the tag ``!ignore`` are omitted with their values; other tags have no effect. If a key occurs twice, the
last value is used; if there are several documents, the first. Merge keys (``<<``) are supported, although Envoy
refuses them.
"""

import re
from typing import Any, Final

import yaml

from xds.errors import ConfigError
from xds.proto.core_yaml import check_aliases, check_depth

_NULLS: Final = frozenset(("", "~", "null", "Null", "NULL"))
_WORDS: Final = {
    "y": True,
    "yes": True,
    "true": True,
    "on": True,
    "n": False,
    "no": False,
    "false": False,
    "off": False,
}
_BOOLEANS: Final = {
    form: value for word, value in _WORDS.items() for form in (word, word.upper(), word.capitalize())
}
_INTEGER: Final = re.compile(r"([-+]?)(?:0[xX]([0-9a-fA-F]+)|(0[0-7]*)|([1-9][0-9]*))", re.ASCII)
_BITS: Final = 63
_NUMBERS: Final = range(-(1 << 31), 1 << 31)


def load(text: str) -> object:
    """Return the first document as plain values.

    Raises:
        ConfigError: a syntax error, with line and column; or aliases that make the document far larger than its
            text.
    """
    try:
        check_depth(text)
        loader = _Composer(text)
        try:
            node = loader.get_node() if loader.check_node() else None
        finally:
            loader.dispose()
        value = None if node is None else _Values().of(node)
        check_aliases(value)
    except yaml.YAMLError as error:
        # The parser names its input "<unicode string>". The caller adds the file's name.
        words = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise ConfigError(f"not valid YAML: {words}") from None
    except RecursionError:
        raise ConfigError("nested too deeply") from None
    except ValueError as error:  # characters YAML does not allow
        raise ConfigError(f"not valid YAML: {error}") from None
    return value


class _Composer(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # depends on libyaml
    """Makes YAML nodes whose plain scalars have no types yet."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # the base class is not annotated as ClassVar


class _Values:
    """Converts YAML nodes to plain values. The value of an anchor is made once and shared by its aliases."""

    def __init__(self) -> None:
        self._made: dict[int, object] = {}

    def of(self, node: yaml.Node) -> object:
        if isinstance(node, yaml.ScalarNode):
            return node.value if node.style else plain(node.value)
        known = self._made.get(id(node))
        if known is not None:
            return known
        if isinstance(node, yaml.SequenceNode):
            items: list[object] = []
            self._made[id(node)] = items
            items.extend(map(self.of, node.value))
            return items
        found: dict[str, object] = {}
        self._made[id(node)] = found
        merged: dict[str, object] = {}
        for key, value in node.value:
            if key.tag == "!ignore":
                continue
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key.start_mark)
            if key.value == "<<" and not key.style:
                parts = value.value if isinstance(value, yaml.SequenceNode) else [value]
                for part in parts:
                    inherited = self.of(part)
                    if not isinstance(inherited, dict):
                        message = "a merge key needs a mapping"
                        raise yaml.constructor.ConstructorError(None, None, message, part.start_mark)
                    merged = {**inherited, **merged}
                continue
            found[key.value] = self.of(value)
        for name, value in merged.items():
            found.setdefault(name, value)
        return found


def plain(text: str) -> object:
    """Return the value of a plain scalar."""
    if text in _NULLS:
        return None
    boolean = _BOOLEANS.get(text)
    if boolean is not None:
        return boolean
    found = _INTEGER.fullmatch(text)
    if found is None:
        return text
    sign, hexadecimal, octal, decimal = found.groups()
    number = int(hexadecimal, 16) if hexadecimal else int(octal, 8) if octal else int(decimal)
    if number >> _BITS and not (sign == "-" and number == 1 << _BITS):
        return text
    number = -number if sign == "-" else number
    return number if number in _NUMBERS else str(number)
