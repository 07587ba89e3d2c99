"""Reads YAML by the core schema of version 1.2, with the types of JSON, for :mod:`xds.proto.json`."""

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import yaml

from xds.errors import ConfigError

_T = TypeVar("_T")

#: A document is refused if its aliases expand to more values than ``MOST_VALUES``, and to more than ``MOST_TIMES``
#: times its own number. Anchors that are repeated for each chain of a mesh expand it to tens of times.
MOST_VALUES: Final = 200_000
MOST_TIMES: Final = 100
#: The deepest nesting of a document. libyaml's composer recurses in C, and some 20,000 levels overflow the stack.
_MOST_DEPTH: Final = 1000
#: The start of a document. No collection spans two documents.
_MARKER: Final = re.compile(r"^---(?=[ \t\r\n]|\Z)", re.MULTILINE)


def load(text: str) -> object:
    """Return the document as plain values.

    Raises:
        ConfigError: a syntax error, with line and column; or aliases that :func:`check_aliases` refuses.
    """
    return _guarded(text, lambda: yaml.load(text, Loader=_Loader))  # derived from SafeLoader


def load_all(text: str) -> list[object]:
    """Return the documents of a file, separated by ``---``, as plain values. An empty document is None.

    Raises:
        ConfigError: see :func:`load`.
    """
    return _guarded(text, lambda: list(yaml.load_all(text, Loader=_Loader)))


def _guarded(text: str, read: Callable[[], _T]) -> _T:
    try:
        check_depth(text)
        value = read()
        check_aliases(value)
        return value
    except yaml.YAMLError as error:
        # The parser names its input "<unicode string>". The caller adds the file's name.
        words = " ".join(str(error).split()).replace('in "<unicode string>", ', "at ")
        raise ConfigError(f"not valid YAML: {words}") from None
    except RecursionError:
        raise ConfigError("nested too deeply") from None
    except ValueError as error:  # a character that YAML does not allow, or an integer of 5,000 digits
        raise ConfigError(f"not valid YAML: {error}") from None
    except (KeyError, AttributeError):  # how PyYAML refuses the text of a !!bool and of a !!timestamp
        raise ConfigError("not valid YAML: a text that is no value of its tag") from None


def resolvers() -> dict[str, Any]:
    """Return the patterns of plain scalars by their first character, in the form of PyYAML's loaders."""
    found: dict[str, Any] = _Loader.yaml_implicit_resolvers
    return found


def resolves_to_text(scalar: str) -> bool:
    """Return whether a plain scalar without a tag is a string in the core schema."""
    patterns = resolvers().get(scalar[:1], [])
    return not any(pattern.match(scalar) for _, pattern in patterns)


def check_depth(text: str) -> None:
    """Refuse a document that is nested too deeply for the parser. Call this before composing it.

    Raises:
        ConfigError: nested too deeply.
        yaml.YAMLError: a syntax error.
        ValueError: a character that YAML does not allow.
    """
    # Each level takes a bracket of its document, an indentation, or a place in its line, so nearly no file needs the
    # second parse, which takes a third of the time of loading.
    brackets = max(part.count("[") + part.count("{") for part in _MARKER.split(text))
    if brackets < _MOST_DEPTH and max(map(len, text.splitlines()), default=0) < _MOST_DEPTH:
        return
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _MOST_DEPTH:
                raise ConfigError("nested too deeply")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def check_aliases(value: object) -> None:
    """Refuse a loaded document whose aliases make it infinite, or far larger than its text.

    The loader shares the value of an alias, but readers of the document process it once for each alias. Nested
    aliases multiply this work ("billion laughs").

    Raises:
        ConfigError: a value contains itself, or there would be too many values.
        RecursionError: nested too deeply.
    """
    sizes: dict[int, int] = {}
    within: set[int] = set()

    def size(item: object) -> int:
        if not isinstance(item, dict | list):
            return 1
        known = sizes.get(id(item))
        if known is not None:
            return known
        if id(item) in within:
            raise ConfigError("nested without end: a value contains itself by an alias")
        within.add(id(item))
        total = 1 + sum(map(size, item.values() if isinstance(item, dict) else item))
        within.discard(id(item))
        sizes[id(item)] = total
        return total

    total = size(value)
    if total > MOST_VALUES and total > MOST_TIMES * len(sizes):
        raise ConfigError(f"not valid YAML: its aliases would make {total:,} values of it")


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # depends on libyaml
    """The safe loader with the types of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  # the base class is not annotated as ClassVar

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[str, object]:
        own = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        twice = (
            next((key for key in own if own.count(key) > 1), None) if len(own) != len(set(map(str, own))) else None
        )
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {twice!r}", node.start_mark)
        self.flatten_mapping(node)
        result: dict[str, object] = {}
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key.start_mark)
            result[str(key.value)] = self.construct_object(value, deep=deep)
        return result


def _add_core_schema() -> None:
    for tag, pattern, first in (
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("null", r"~|null|Null|NULL|", "~nN"),
        ("int", r"[-+]?(?:0|[1-9][0-9]*)|0x[0-9a-fA-F]+", "-+0123456789"),
        (
            "float",
            r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
            "-+0123456789.",
        ),
        ("merge", r"<<", "<"),
    ):
        _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), [*first])
    # The empty scalar (`key:`) is looked up under the empty character.
    _Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("^$"), [""])


_add_core_schema()
