"""Reads and writes YAML like Kubernetes (``sigs.k8s.io/yaml``, which ``kubectl`` and the API server use). Pure.

Values become JSON values: mapping keys are text, ``yes`` and ``y`` are booleans, ``0644``, ``0o17``, ``0x1F``
and ``1_000`` are integers, ``08`` and ``1e3`` are numbers, and ``=``, ``10:00`` and dates are text. The writer
quotes each string that this reader, or a reader of YAML 1.1 or 1.2, would read as another value.

Three deviations, all refusals: a repeated key, values that JSON cannot express (``.inf``), and aliases
that contain themselves or multiply a document (:data:`~xds.proto.core_yaml.MOST_VALUES`).
"""

import base64
import binascii
import itertools
import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import yaml

from xds.errors import ConfigError
from xds.proto.core_yaml import MOST_TIMES, MOST_VALUES, resolves_to_text

_TAG: Final = "tag:yaml.org,2002:"
_WORDS: Final[Mapping[str, bool | float | None]] = {
    **dict.fromkeys(("y", "Y", "yes", "Yes", "YES", "true", "True", "TRUE", "on", "On", "ON"), True),
    **dict.fromkeys(("n", "N", "no", "No", "NO", "false", "False", "FALSE", "off", "Off", "OFF"), False),
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys((".nan", ".NaN", ".NAN"), math.nan),
    **dict.fromkeys((".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF"), math.inf),
    **dict.fromkeys(("-.inf", "-.Inf", "-.INF"), -math.inf),
}
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?", re.ASCII)
#: A number without a digit before the point. Underscores count only between its digits.
_FRACTION: Final = re.compile(r"\.[0-9](?:_?[0-9])*(?:[eE][-+]?[0-9](?:_?[0-9])*)?", re.ASCII)
_INTEGER: Final = re.compile(
    r"(?P<sign>[-+]?)(?:0[xX](?P<hex>[0-9a-fA-F]+)|0[bB](?P<binary>[01]+)|0[oO]?(?P<octal>[0-7]+)"
    r"|(?P<decimal>0|[1-9][0-9]*))",
    re.ASCII,
)
#: The old form of binary numbers: a sign can follow the prefix.
_BINARY: Final = re.compile(r"0b(?P<sign>[-+]?)(?P<binary>[01]+)", re.ASCII)
_BASES: Final = (("hex", 16), ("binary", 2), ("octal", 8), ("decimal", 10))
#: Matches the beginning of a document, with its directives.
_SEPARATOR: Final = re.compile(r"^(?:%[^\n]*\n)*---(?=[ \t\r\n]|\Z)", re.MULTILINE)
_LEAST: Final = -(2**63)
_MOST: Final = 2**64 - 1
#: The most digits of a number. A longer one is out of range in any base, and Python refuses to convert thousands
#: of digits.
_MOST_DIGITS: Final = 400
#: Go writes integral numbers below this without an exponent in JSON, so that integer fields accept them.
_EXPONENT_FROM: Final = 1e21
#: The digits that distinguish any two single-precision numbers. Go formats keys that are numbers in single
#: precision.
_SINGLE_DIGITS: Final = 9


@dataclass(frozen=True, slots=True)
class Span:
    """The position of a mapping or list in the text.

    Attributes:
        start: the index of its first character.
        end: index after its last line. Following comments and blank lines are not included.
        flow: whether it is written in brackets.
    """

    start: int
    end: int
    flow: bool


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file.

    Attributes:
        value: JSON values. None for an empty document.
        start: index of its ``---`` or directive; 0 for the first document.
        root: span of its value. None for an empty document or a scalar.
        spans: spans of its mappings and lists by the ``id`` of their value.
        aliased: whether it has anchors, so that its parts cannot be replaced one by one.
    """

    value: object
    start: int
    root: Span | None
    spans: Mapping[int, Span]
    aliased: bool


@dataclass(frozen=True, slots=True)
class Part:
    """One document of a file, parsed separately.

    Attributes:
        line: the line on which it begins, from 1; its ``---`` if it has one.
        value: JSON values. None for an empty document, or one with a fault.
        fault: why it cannot be read. Empty if it can be read.
    """

    line: int
    value: object
    fault: str = ""


def load(text: str) -> object:
    """Return the only document of a text as JSON values.

    Raises:
        ConfigError: see :func:`load_all`; also if there is a second document.
    """
    documents = load_all(text)
    if len(documents) > 1:
        raise ConfigError("not valid YAML: there is more than one document")
    return documents[0] if documents else None


def load_all(text: str) -> list[object]:
    """Return the documents of a file as JSON values. An empty document is None.

    A text that begins with ``{`` is read as a sequence of JSON values, if it is valid as such.

    Raises:
        ConfigError: the file has a syntax error, a key that is given twice, or a value without an equivalent in
            JSON. The error has the place.
    """
    found = load_json(text)
    if found is not None:
        return [value for value, _, _ in found]
    return [each.value for each in load_documents(text, finite=True)]


def load_each(text: str) -> list[Part]:
    """Return the documents of a file. Each is parsed separately, so that a faulty one affects no other. Never
    raises.

    A ``---`` at the beginning of a line always separates documents (YAML 1.2, 9.1.2), so a file is split there if
    it cannot be parsed as a whole. A text that begins with ``{`` and is JSON is split between its values.
    """
    try:
        found = load_json(text)
        values = (
            [(value, at) for value, at, _ in found]
            if found is not None
            else [(each.value, each.start) for each in load_documents(text, finite=True)]
        )
    except ConfigError:
        return [part for lines_before, chunk in _chunks(text) for part in _parts(chunk, lines_before)]
    parts, line, counted = [], 1, 0
    for value, at in values:
        line, counted = line + text.count("\n", counted, at), at
        parts.append(Part(line, value))
    return parts


def _chunks(text: str) -> Iterator[tuple[int, str]]:
    """Yield the text of each document, with the number of its first line, counted from 0."""
    starts = [0, *(match.start() for match in _SEPARATOR.finditer(text) if match.start())]
    lines = 0
    for start, end in itertools.pairwise((*starts, len(text))):
        chunk = text[start:end]
        yield lines, chunk
        lines += chunk.count("\n")


def _parts(chunk: str, lines_before: int) -> list[Part]:
    line = lines_before + 1
    try:
        found = load_json(chunk)
        if found is None:
            documents = load_documents(chunk, finite=True, lines_before=lines_before)
            return [Part(line, each.value) for each in documents]
    except ConfigError as error:
        return [Part(line, None, str(error))]
    return [Part(line, value) for value, _, _ in found]


def load_documents(text: str, *, finite: bool = False, lines_before: int = 0) -> list[Document]:
    """Return the documents of a YAML file with the places of their parts.

    Args:
        text: YAML, which can be JSON.
        finite: whether to refuse ``.inf`` and ``.nan``. If not, they are passed on, for a text that is written
            back.
        lines_before: the number of lines before the text in the file, for the places of faults.

    Raises:
        ConfigError: see :func:`load_all`.
    """
    try:
        return list(_Composer(text, finite=finite).documents())
    except yaml.YAMLError as error:
        # The parser calls its input "<unicode string>", and the caller knows the file's name, so the line number
        # is enough.
        words = re.sub(
            r'in "<(?:unicode|byte) string>", line ([0-9]+)',
            lambda match: f"at line {int(match[1]) + lines_before}",
            " ".join(str(error).split()),
        )
        raise ConfigError(f"not valid YAML: {words}") from None
    except RecursionError:
        raise ConfigError("not valid YAML: nested too deeply") from None
    except UnicodeEncodeError:
        raise ConfigError("not valid YAML: it contains half of a surrogate pair") from None
    except ValueError as error:  # characters that YAML does not allow, integers of 5,000 digits
        raise ConfigError(f"not valid YAML: {error}") from None


def load_json(text: str) -> list[tuple[object, int, int]] | None:
    """Return the JSON values of a text with their start and end indexes, or None if it is not JSON.

    Raises:
        ConfigError: it is JSON, but a key is given twice, or a number is beyond a double's range.
    """
    decoder = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refused, parse_float=_finite)
    found: list[tuple[object, int, int]] = []
    at = _behind_space(text, 0)
    if not text.startswith(("{", "["), at):
        return None
    try:
        while at < len(text):
            value, end = decoder.raw_decode(text, at)
            found.append((value, at, end))
            at = _behind_space(text, end)
    except (ValueError, RecursionError):
        return None
    return found


def json_items(text: str, start: int, key: str) -> list[tuple[int, int]]:
    """Return the positions of a list's elements in a JSON object.

    Args:
        text: JSON.
        start: index of the object, which :func:`load_json` has read.
        key: the key of the object's list.
    """
    decoder = json.JSONDecoder()
    at = _behind_space(text, start + 1)
    while text[at] != "}":
        name, at = decoder.raw_decode(text, at)
        at = _behind_space(text, _behind_space(text, at) + 1)  # the colon
        if name == key:
            found = []
            at = _behind_space(text, at + 1)
            while text[at] != "]":
                _, end = decoder.raw_decode(text, at)
                found.append((at, end))
                at = _behind_space(text, end)
                at = _behind_space(text, at + 1) if text[at] == "," else at
            return found
        _, at = decoder.raw_decode(text, at)
        at = _behind_space(text, at)
        at = _behind_space(text, at + 1) if text[at] == "," else at
    return []


def dump(value: object) -> str:
    """Return JSON values as one YAML document in block style, with keys in their order."""
    written: str = yaml.dump(value, Dumper=_Dumper, **_STYLE)
    return written


def dump_all(values: Iterable[object]) -> str:
    """Return several documents, separated by ``---``."""
    return "---\n".join(dump(value) for value in values)


def dump_json(value: object, indent: int | None = None) -> str:
    """Return a value as JSON that is also valid YAML: characters forbidden in YAML are escaped.

    Raises:
        ConfigError: it has a number that JSON cannot express.
    """
    try:
        text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    except ValueError:
        raise ConfigError("it has a number without an equivalent in JSON") from None
    return _NOT_PRINTABLE.sub(_escape, text)


def resolve(text: str) -> bool | int | float | str | None:
    """Return the value of a plain scalar without a tag."""
    if text in _WORDS:
        return _WORDS[text]
    first = text[0]
    if first in "+-0123456789":
        return _number(text.replace("_", ""), text)
    if first == "." and _FRACTION.fullmatch(text):
        return _float(text.replace("_", ""), text)
    return text


def _number(plain: str, text: str) -> int | float | str:
    match = _INTEGER.fullmatch(plain)
    if match is not None and len(plain) < _MOST_DIGITS:
        number = _integer(match)
        # Go parses a number with a sign only as int64, and a number without a sign also as uint64.
        if _LEAST <= number <= (_MOST if not match["sign"] else -_LEAST - 1):
            return number
    if _FLOAT.fullmatch(plain):
        return _float(plain, text)
    match = _BINARY.fullmatch(plain)
    if match is not None and _LEAST <= (number := _integer(match)) < -_LEAST:
        return number
    return text


def _integer(match: re.Match[str]) -> int:
    groups = match.groupdict()
    number = next(int(groups[name], base) for name, base in _BASES if groups.get(name))
    return -number if groups["sign"] == "-" else number


def _float(plain: str, text: str) -> int | float | str:
    number = float(plain)
    if math.isinf(number):
        return text  # Go does not accept a number out of range
    return int(number) if number.is_integer() and abs(number) < _EXPONENT_FROM else number


# ---------------------------------------------------------------------- JSON


def _behind_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in " \t\r\n":
        at += 1
    return at


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"not valid JSON: duplicate key {twice!r} in an object with the keys {_few(names)}")
    return found


def _few(names: list[str]) -> str:
    shown = list(dict.fromkeys(names))
    return ", ".join(shown[:5]) + (", ..." if len(shown) > 5 else "")


def _refused(word: str) -> object:
    raise ValueError(word)


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ConfigError(f"not valid JSON: {text} is beyond the range of numbers")
    return number


# ---------------------------------------------------------------------- reading


class _Composer:
    """Builds JSON values from the events of the YAML parser."""

    def __init__(self, text: str, *, finite: bool) -> None:
        self._finite = finite
        # The parser's index marks do not count a byte order mark.
        self._shift = 1 if text.startswith("\ufeff") else 0
        self._loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text[self._shift :])
        self._next = self._loader.get_event

    def documents(self) -> Iterator[Document]:
        try:
            self._next()  # the start of the stream
            first = True
            while type(event := self._next()) is not yaml.StreamEndEvent:
                yield self._document(0 if first else event.start_mark.index + self._shift)
                first = False
        finally:
            self._loader.dispose()

    def _document(self, start: int) -> Document:
        self._anchors: dict[str, tuple[object, int]] = {}
        self._open: set[str] = set()
        self._spans: dict[int, Span] = {}
        self._written = self._values = 0
        self._end = 0
        value = self._value(self._next())
        self._next()  # the end of the document
        return Document(value, start, self._spans.get(id(value)), self._spans, bool(self._anchors))

    def _value(self, event: Any) -> object:
        if type(event) is yaml.AliasEvent:
            return self._alias(event)
        before = self._values
        self._written += 1
        self._values += 1
        if event.anchor is not None:
            self._open.add(event.anchor)
        value: object
        if type(event) is yaml.ScalarEvent:
            value = self._scalar(event)
        else:
            value = self._list() if type(event) is yaml.SequenceStartEvent else self._mapping()
            span = Span(event.start_mark.index + self._shift, self._end, bool(event.flow_style))
            self._spans[id(value)] = span
        if event.anchor is not None:
            self._open.discard(event.anchor)
            self._anchors[event.anchor] = value, self._values - before
        return value

    def _alias(self, event: Any) -> object:
        self._ends(event)
        if event.anchor in self._open:
            raise _error("nested without end: a value contains itself by an alias", event)
        if event.anchor not in self._anchors:
            raise _error(f"unknown anchor {event.anchor!r}", event)
        value, size = self._anchors[event.anchor]
        self._values += size
        if self._values > MOST_VALUES and self._values > MOST_TIMES * self._written:
            raise _error(f"its aliases would make more than {self._values:,} values of it", event)
        return value

    def _ends(self, event: Any) -> None:
        self._end = event.end_mark.index + self._shift

    def _list(self) -> list[object]:
        found = []
        while type(event := self._next()) is not yaml.SequenceEndEvent:
            found.append(self._value(event))
        self._close(event)
        return found

    def _close(self, event: Any) -> None:
        # The end of a block has no characters of its own. Its mark is that of the next token, so it is ignored.
        if event.start_mark.index != event.end_mark.index:
            self._ends(event)

    def _mapping(self) -> dict[str, object]:
        found: dict[str, object] = {}
        own: set[str] = set()
        while type(event := self._next()) is not yaml.MappingEndEvent:
            if _is_merge(event):
                self._ends(event)
                # Go merges at the position of the merge key: merged values replace earlier keys, and later keys
                # replace merged values.
                self._merge(found, self._value(value := self._next()), value)
                continue
            key = self._key(event)
            if key in own:
                raise _error(f"duplicate key {key!r}", event)
            own.add(key)
            found[key] = self._value(self._next())
        self._close(event)
        return found

    def _merge(self, into: dict[str, object], value: object, event: Any) -> None:
        listed = value if isinstance(value, list) else [value]
        for each in reversed(listed):
            if not isinstance(each, dict):
                raise _error("a merge needs a mapping or a list of mappings", event)
            into.update(each)

    def _key(self, event: Any) -> str:
        value = self._value(event)
        match value:
            case str():
                return value
            case bool():
                return "true" if value else "false"
            case int():
                return str(value)
            case float():
                return _single(value)
        raise _error("a key must be text, a number or a boolean", event)

    def _scalar(self, event: Any) -> object:
        self._ends(event)
        text: str = event.value
        if event.tag is None and event.implicit[0]:
            value: object = resolve(text)
        elif event.tag is None or not event.tag.startswith(_TAG):
            return text
        else:
            value = _tagged(event.tag.removeprefix(_TAG), text, event)
        if self._finite and isinstance(value, float) and not math.isfinite(value):
            raise _error(f"{text} has no equivalent in JSON", event)
        return value


def _is_merge(event: Any) -> bool:
    return (
        type(event) is yaml.ScalarEvent
        and event.value == "<<"
        and (event.tag == f"{_TAG}merge" or (event.tag is None and event.implicit[0]))
    )


def _tagged(tag: str, text: str, event: Any) -> object:
    """Return the value of a scalar with a standard tag. A tag unknown to Go's parser leaves the text as it is."""
    if tag == "binary":
        try:
            return base64.b64decode(text.replace("\n", ""), validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            raise _error("!!binary must be base64 of UTF-8 text", event) from None
    kinds: Mapping[str, tuple[type, ...]] = {
        "bool": (bool,),
        "int": (int,),
        "float": (int, float),
        "null": (type(None),),
    }
    if tag not in kinds:
        return text
    value = resolve(text) if text else None
    if not isinstance(value, kinds[tag]) or (tag != "bool" and isinstance(value, bool)):
        raise _error(f"cannot read {text!r} as !!{tag}", event)
    return value


def _single(number: float) -> str:
    """Return a number as Go formats it in single precision (``strconv.FormatFloat(x, 'g', -1, 32)``)."""
    try:
        rounded = struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return "-Inf" if number < 0 else "+Inf"
    for digits in range(1, _SINGLE_DIGITS + 1):
        written = f"{rounded:.{digits - 1}e}"
        if struct.unpack("f", struct.pack("f", float(written)))[0] == rounded:
            break
    mantissa, _, exponent = written.partition("e")
    if -4 <= int(exponent) < max(len(mantissa.replace(".", "").lstrip("-")), 21):
        return f"{float(written):.{max(len(mantissa.lstrip('-')) - 2 - int(exponent), 0)}f}"
    return written


def _error(problem: str, event: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, event.start_mark)


# ---------------------------------------------------------------------- writing

#: Lines are not folded, because readers could interpret a fold inside quotes differently.
_STYLE: Final[Mapping[str, Any]] = {
    "sort_keys": False,
    "default_flow_style": False,
    "allow_unicode": True,
    "width": 2**31,
}
#: Characters that some YAML readers refuse, or interpret as a line break.
_NOT_PRINTABLE: Final = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


_NOT_FINITE: Final = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        """Return the tag of a plain scalar. It is not a text's tag if any known reader would read another type."""
        tag = super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]  # of the stubs
        if kind is not yaml.ScalarNode or not implicit[0]:
            return tag
        found = resolve(value)
        if not isinstance(found, str):
            return _TAG + {bool: "bool", int: "int", float: "float"}.get(type(found), "null")
        return tag if tag != f"{_TAG}str" or resolves_to_text(value) else f"{_TAG}null"


def _text(dumper: Any, value: str) -> Any:
    style = None
    if _NOT_PRINTABLE.search(value):
        style = '"'
    elif "\n" in value and _fits_block(value):
        style = "|"
    return dumper.represent_scalar(f"{_TAG}str", value, style=style)


def _fits_block(value: str) -> bool:
    """Return whether a text can be written as a literal block in any context: no line looks like indentation, and
    readers need not count the line breaks at the end.
    """
    lines = value.removesuffix("\n").split("\n")
    return (
        lines[-1] != ""
        and not lines[0].startswith(" ")
        and lines[0] != ""
        and all(line.isprintable() and not line.endswith(" ") for line in lines)
    )


def _number_text(dumper: Any, value: float) -> Any:
    return _plain_number(dumper, _NOT_FINITE.get(repr(value), repr(value)))


def _whole(dumper: Any, value: int) -> Any:
    return _plain_number(dumper, str(value) if _LEAST <= value <= _MOST else repr(float(value)))


def _plain_number(dumper: Any, text: str) -> Any:
    # Use the tag that a reader would infer from this text. The dumper then does not write the tag.
    return dumper.represent_scalar(_TAG + ("int" if isinstance(resolve(text), int) else "float"), text)


_Dumper.add_representer(str, _text)
_Dumper.add_representer(float, _number_text)
_Dumper.add_representer(int, _whole)


def _escape(match: re.Match[str]) -> str:
    return f"\\u{ord(match[0]):04x}"
