"""Values and command lines beside Go's own readers."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.generated import examples
from tests.golang.oracle import Oracle, Refused
from ztunnel.runtime.formats.go_flags import BadArguments, parse
from ztunnel.runtime.formats.go_values import parse_bool, parse_cidr, parse_duration_s

Reader = Callable[[str], Any]


def refused(read: Reader, text: str) -> Any:
    try:
        return read(text)
    except ValueError:
        return Refused


def theirs(go: Oracle, kind: str, text: str) -> Any:
    try:
        return go.ask(kind, text)
    except Refused:
        return Refused


ADDRESSES = st.from_regex(r"([0-9]{1,3}\.){2,4}[0-9]{1,3}|[0-9a-f:]{2,12}|::ffff:10\.0\.0\.1", fullmatch=True)
CIDRS = st.builds(
    "{}{}".format, ADDRESSES, st.from_regex(r"(/[0-9]{0,3}|/[+-]8|/255\.0\.0\.0|/8 |/0x8|/08|)", fullmatch=True)
)


@settings(max_examples=examples(1000), deadline=None)
@given(CIDRS)
@example("10.0.0.1/24")
@example("10.96.0.2/024")
@example("10.0.0.0/255.255.255.0")
@example("10.0.0.0")
@example("010.0.0.0/8")
@example("fd00::1/64")
@example("fe80::1%eth0/64")
@example("10.0.0.0/\u0668")
def test_cidr_is_read_as_go_reads_it(go: Oracle, text: str) -> None:
    found = refused(parse_cidr, text)
    expected = theirs(go, "cidr", text)
    if "ffff:" in text and expected is not Refused:
        assert found is not Refused  # the same network, which Go prints as one of IPv4
    else:
        assert (found if found is Refused else str(found)) == expected


@settings(max_examples=examples(1000), deadline=None)
@given(st.from_regex(r"[-+]?([0-9]{0,3}(\.[0-9]{0,4})?(ns|us|µs|ms|s|m|h|d|)){0,4}", fullmatch=True))
@example("0")
@example("-0")
@example("1m30s")
@example("1.5h")
@example(".5s")
@example("5.s")
@example(".s")
@example("1 s")
@example("9999999h")
@example("2562047h47m16.854775807s")
def test_duration_is_read_as_go_reads_it(go: Oracle, text: str) -> None:
    found = refused(parse_duration_s, text)
    expected = theirs(go, "duration", text)
    if Refused in (found, expected):
        assert found is expected
    else:
        assert found == pytest.approx(expected / 1e9, abs=1e-9)


BOOLEANS = "1 t T TRUE true True tRUE 0 f F FALSE false False yes no on off y n 2 -1"


@pytest.mark.parametrize("text", BOOLEANS.split())
def test_boolean_is_read_as_go_reads_it(go: Oracle, text: str) -> None:
    assert refused(parse_bool, text) == theirs(go, "bool", text)


FLAGS = {"envoy-port": False, "proxy-uid": False, "dry-run": True, "restore-format": True, "log_as_json": True}
LETTERS = {"p": "envoy-port", "u": "proxy-uid", "n": "dry-run", "f": "restore-format"}
GIVEN = (
    "-p -u -n -f -nf -fn -np -p1 -p=1 -n=false -n=0 -n=maybe -x -- - --envoy-port --envoy-port=1 --envoy-port="
    " --dry-run --dry-run=false --log_as_json --log-as-json --nothing --=1 --- -= -n= -p= -envoy-port true false"
    " 15001 a=b -1"
)
WORDS = st.sampled_from(GIVEN.split()) | st.just("")


@settings(max_examples=examples(2000), deadline=None)
@given(st.lists(WORDS, max_size=5))
def test_command_line_is_read_as_pflag_reads_it(go: Oracle, words: list[str]) -> None:
    letters = {name: letter for letter, name in LETTERS.items()}
    named = {
        name + (f",{letters[name]}" if name in letters else ""): "bool" if switch else "string"
        for name, switch in FLAGS.items()
    }
    found: Any
    try:
        values, rest = parse(words, FLAGS, LETTERS)
        last = dict(values)
        found = {
            "given": {k: str(parse_bool(v)).lower() if FLAGS[k] else v for k, v in last.items()},
            "rest": rest,
        }
        for name, value in values:
            if FLAGS[name]:
                parse_bool(value)
    except (BadArguments, ValueError):
        found = Refused
    try:
        expected = go.ask("flags", arguments=words, flags=named)
    except Refused:
        expected = Refused
    assert found == expected
