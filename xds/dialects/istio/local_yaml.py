"""Parses the YAML of :mod:`xds.dialects.istio.local_file`, which has tags for string matches. Repeated keys are
refused.

Values are built from the parser's events, one list element at a time. PyYAML's own loader would first build a tree
of the whole document. For a mesh of 100,000 workloads, the tree takes 3 GB, and the finished model 120 MB.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, Final

import yaml

from xds.dialects.istio.rules import Comparison, Text
from xds.proto.core_yaml import MOST_TIMES, MOST_VALUES, resolvers

#: Equal texts share one object, for up to this many different texts. In a large mesh, repeated texts (keys, names
#: of nodes and services) occur early.
_MOST_KEPT: Final = 65_536

_TAG: Final = "tag:yaml.org,2002:"
#: YAML's standard tags of mappings and lists, which add no information.
_PLAIN_MAPPING: Final = (None, "!", _TAG + "map")
_PLAIN_LIST: Final = (None, "!", _TAG + "seq")
_MERGE: Final = object()


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # depends on libyaml
    """Supports the tags of string matches. Plain scalars follow YAML 1.2, like in the Rust ztunnel."""

    yaml_implicit_resolvers = resolvers()


def _constructor(comparison: Comparison) -> Callable[[Any, Any], Any]:
    def construct(loader: Any, node: Any) -> Any:
        return Text(comparison) if comparison is Comparison.PRESENCE else Text(comparison, str(node.value))

    return construct


for _comparison in Comparison:
    _Loader.add_constructor(f"!{_comparison}", _constructor(_comparison))
_TEXT_TAGS: Final = {f"!{comparison}": comparison for comparison in Comparison}


class Unreadable(Exception):
    """The whole document cannot be read. The error's text has the reason and the position. A bad single value does
    not raise this error.
    """


def sections(source: str | IO[str]) -> Iterator[tuple[object, object]]:
    """Iterate over the document: its keys with their values.

    A list is returned as an iterator that parses one element at a time. It is valid until the next key is
    requested. An empty document has no keys.

    Raises:
        Unreadable: raised also by the iterators. The document has a syntax error (with line and column), is not a
            mapping, or has aliases that are endless or expand to far more than is written.
        OSError, UnicodeDecodeError: raised by reading the source.
    """
    with _declared():
        document = _Document(source)
    while True:
        with _declared():
            item = document.next_section()
        if item is None:
            return
        yield item


@contextmanager
def _declared() -> Iterator[None]:
    """Convert errors of the parser and of value constructors to :class:`Unreadable`."""
    try:
        yield
    except yaml.YAMLError as error:
        raise Unreadable(f"not valid YAML: {' '.join(str(error).split())}") from None
    except UnicodeDecodeError:
        raise
    except ValueError as error:  # a scalar that looks like a date but is invalid
        raise Unreadable(f"not valid YAML: {error}") from None
    except (KeyError, AttributeError):  # how PyYAML refuses the text of a !!bool and of a !!timestamp
        raise Unreadable("not valid YAML: a text that is no value of its tag") from None
    except RecursionError:
        raise Unreadable("not valid YAML: nested too deeply") from None


class _Document:
    """Builds values from events.

    Each anchored value is stored with the number of values in it after expansion of its aliases. An alias inside
    its own anchored value would expand without end. Such an alias is refused as undefined, because an anchored
    value is stored only when it is complete.
    """

    def __init__(self, source: str | IO[str]) -> None:
        self._loader = _Loader(source)
        self._next = self._loader.get_event
        self._resolvers = self._loader.yaml_implicit_resolvers
        self._plain: dict[str, object] = {}
        self._quoted: dict[str, str] = {}
        self._anchors: dict[str, tuple[object, int]] = {}
        self._open_anchors: set[str] = set()
        self._written = 0
        self._values = 0
        self._keys: set[str] = set()
        self._elements: Iterator[object] | None = None
        self._begun = False

    def next_section(self) -> tuple[object, object] | None:
        """Return the next key of the document with its value, or None at the end."""
        if not self._begun:
            self._begun = True
            if not self._begin():
                return None
        if self._elements is not None:
            for _ in self._elements:
                pass
            self._elements = None
        event = self._next()
        if type(event) is yaml.MappingEndEvent:
            self._end()
            return None
        key = self._key(event, self._keys)
        event = self._next()
        if type(event) is yaml.SequenceStartEvent and event.anchor is None and event.tag in _PLAIN_LIST:
            self._elements = self._each()
            return key, self._guarded(self._elements)
        value = self._value(event)
        if key is _MERGE:
            raise _error("keys of the document cannot be merged", event)
        return key, value

    def _begin(self) -> bool:
        """Read events up to the first key of the document. Return False if the document is empty."""
        self._next()  # the start of the stream
        if type(self._next()) is yaml.StreamEndEvent:
            return False
        event = self._next()
        if type(event) is yaml.MappingStartEvent:
            if event.tag not in _PLAIN_MAPPING:
                self._tagged(event)
            return True
        if self._value(event) is None:
            self._end()
            return False
        raise Unreadable("the file must be a mapping with workloads, policies and services")

    def _end(self) -> None:
        self._next()  # the start of the document
        event = self._next()
        if type(event) is not yaml.StreamEndEvent:
            raise _error("there is another document", event)

    def _guarded(self, elements: Iterator[object]) -> Iterator[object]:
        while True:
            with _declared():
                try:
                    element = next(elements)
                except StopIteration:
                    return
            yield element

    def _each(self) -> Iterator[object]:
        """Iterate over the remaining elements of a list."""
        while True:
            event = self._next()
            if type(event) is yaml.SequenceEndEvent:
                return
            yield self._value(event)

    def _value(self, event: Any) -> Any:
        kind = type(event)
        if kind is yaml.AliasEvent:
            return self._alias(event)
        anchor = event.anchor
        before = self._values
        if anchor is not None:
            if anchor in self._anchors or anchor in self._open_anchors:
                raise _error(f"found duplicate anchor {anchor!r}", event)
            self._open_anchors.add(anchor)
        self._written += 1
        self._values += 1
        if kind is yaml.ScalarEvent:
            value = self._scalar(event)
        else:
            listed = kind is yaml.SequenceStartEvent
            value = self._list() if listed else self._mapping()
            if event.tag not in (_PLAIN_LIST if listed else _PLAIN_MAPPING):
                value = self._tagged(event)
        if anchor is not None:
            self._open_anchors.discard(anchor)
            self._anchors[anchor] = value, self._values - before
        return value

    def _alias(self, event: Any) -> object:
        if event.anchor in self._open_anchors:
            raise Unreadable("nested without end: a value contains itself by an alias")
        found = self._anchors.get(event.anchor)
        if found is None:
            raise _error(f"found undefined alias {event.anchor!r}", event)
        value, size = found
        self._values += size
        if self._values > MOST_VALUES and self._values > MOST_TIMES * self._written:
            raise Unreadable(f"not valid YAML: its aliases would make more than {self._values:,} values of it")
        return value

    def _list(self) -> list[object]:
        return list(self._each())

    def _mapping(self) -> dict[object, object]:
        result: dict[object, object] = {}
        seen: set[str] = set()
        merged: list[Any] = []
        while True:
            event = self._next()
            if type(event) is yaml.MappingEndEvent:
                break
            key = self._key(event, seen)
            value = self._value(self._next())
            if key is _MERGE:
                merged += value if isinstance(value, list) else [value]
            else:
                result[key] = value
        for each in merged:
            if not isinstance(each, dict):
                raise _error("expected a mapping or list of mappings for merging", event)
            for key, value in each.items():
                result.setdefault(key, value)
        return result

    def _key(self, event: Any, seen: set[str]) -> object:
        """Return the key from a scalar, or :data:`_MERGE` for a merge key. A repeated key is refused."""
        if type(event) is not yaml.ScalarEvent:
            value = self._value(event)
            if isinstance(value, list | dict):
                raise _error("found unhashable key", event)
            return value
        if event.value == "<<" and event.implicit[0] and event.tag is None:
            return _MERGE
        if event.value in seen:
            raise _error(f"{event.value!r} is repeated", event)
        seen.add(event.value)
        return self._value(event)

    def _scalar(self, event: Any) -> object:
        text: str = event.value
        tag = event.tag
        if tag is None or tag == "!":
            if not event.implicit[0]:
                kept = self._quoted
                if text in kept:
                    return kept[text]
                if len(kept) < _MOST_KEPT:
                    kept[text] = text
                return text
            if text in self._plain:
                return self._plain[text]
            # PyYAML's table has resolvers for a certain first character, and others for any first character.
            if text[:1] in self._resolvers or None in self._resolvers:
                tag = self._loader.resolve(yaml.ScalarNode, text, (True, False))
            else:
                tag = _TAG + "str"
            value = text if tag == _TAG + "str" else self._constructed(tag, event)
            if len(self._plain) < _MOST_KEPT:
                self._plain[text] = value
            return value
        return self._constructed(tag, event)

    def _constructed(self, tag: str, event: Any) -> object:
        """Return the value of a scalar, made by the constructor of its tag. The safe loader's constructors make
        plain values.
        """
        constructors = self._loader.yaml_constructors
        construct = constructors.get(tag) or constructors[None]
        return construct(self._loader, yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark))

    def _tagged(self, event: Any) -> object:
        comparison = _TEXT_TAGS.get(event.tag)
        if comparison is Comparison.PRESENCE:
            return Text(comparison)
        if comparison is not None:
            raise _error(f"{event.tag} needs a string", event)
        raise _error(f"could not determine a constructor for the tag {event.tag!r}", event)


def _error(problem: str, event: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, event.start_mark)
