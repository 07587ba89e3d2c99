"""Log lines byte for byte, the filter and its text, and who may log what."""

import asyncio
import json
import logging
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.ztunnel.proxy.istio.nodes import Lines
from ztunnel.proxy.istio.accounting.line_rendering import Recurring, timestamp
from ztunnel.proxy.istio.accounting.logs import Bare, InvalidLevel, LogFilter, json_line, plain_line, target_of

ALWAYS = "hickory_server::server=off"


def test_times_have_six_digits() -> None:
    assert timestamp(1795259685.5) == "2026-11-21T11:14:45.500000Z"
    assert timestamp(0) == "1970-01-01T00:00:00.000000Z"


def test_a_message_without_fields_ends_with_a_tab() -> None:
    assert plain_line("T", "info", "ztunnel::app", "hello", ()) == "T\tinfo\tapp\thello\t\n"


def test_texts_are_quoted_and_addresses_are_not() -> None:
    fields = (("a", 'x"\\y\n'), ("b", Bare("1.2.3.4:5")), ("c", 7))
    assert plain_line("T", "debug", "dns", "", fields) == 'T\tdebug\tdns\t\ta="x\\"\\\\y\\n" b=1.2.3.4:5 c=7\n'


def test_json_keeps_numbers_and_the_whole_target() -> None:
    line = json_line("T", "info", "ztunnel::app", "m", (("n", 5), ("a", Bare("1.2.3.4:5"))))
    assert line == '{"level":"info","time":"T","scope":"ztunnel::app","message":"m","n":5,"a":"1.2.3.4:5"}\n'


@pytest.mark.parametrize("line", [plain_line, json_line])
def test_recurring_fields_render_like_other_fields(line: Callable[..., str]) -> None:
    fields = [("a", 'x"'), ("b", Bare("1.2.3.4:5")), ("c", 7)]
    last = ("d", "y")
    alone = line("T", "info", "t", "m", (*fields, last))
    assert line("T", "info", "t", "m", (Recurring(fields), last)) == alone
    assert line("T", "info", "t", "m", (fields[0], Recurring(fields[1:]), last)) == alone


@given(st.text(), st.text())
def test_any_text_is_logged_on_one_line(message: str, value: str) -> None:
    lines = json_line("T", "info", "t", message, (("k", value),))
    assert lines.count("\n") == 1
    assert json.loads(lines)["k"] == value


@pytest.mark.parametrize(
    ("text", "target", "level"),
    [
        ("info", "access", logging.INFO),
        ("info", "hickory_server::server", logging.CRITICAL + 10),
        ("error,ztunnel::proxy=warn", "ztunnel::proxy::inbound", logging.WARNING),
        ("error,ztunnel::proxy=warn", "ztunnel::proxying", logging.ERROR),
        ("info,ztunnel=off,ztunnel::proxy=trace", "ztunnel::proxy", 5),
        ("info,ztunnel::proxy=trace,ztunnel=off", "ztunnel::proxy", 5),
        ("INFO,access=OFF", "access", logging.CRITICAL + 10),
        ("info,,debug", "x", logging.DEBUG),
        ("access=debug", "other", logging.ERROR),
    ],
)
def test_the_longest_prefix_wins(text: str, target: str, level: int) -> None:
    assert LogFilter(text).level(target) == level


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("info", f"{ALWAYS},info"),
        ("debug,access=off", f"{ALWAYS},access=off,debug"),
        ("info,a=warn,ztunnel::proxy::inbound=debug", f"ztunnel::proxy::inbound=debug,{ALWAYS},a=warn,info"),
        ("info,hickory_server::server=debug", "hickory_server::server=debug,info"),
    ],
)
def test_log_filter_prints_its_levels(text: str, shown: str) -> None:
    assert str(LogFilter(text)) == shown


@pytest.mark.parametrize("text", ["loud", "a:debug", "a=loud", "=info", "info,b="])
def test_invalid_log_filter_is_refused(text: str) -> None:
    changed = LogFilter("warn")
    with pytest.raises(InvalidLevel) as refused:
        changed.add(f"debug,{text}")
    assert str(refused.value) == f"Invalid level provided: {text.rpartition(',')[2]}"
    assert str(changed) == f"{ALWAYS},warn"


@pytest.mark.parametrize(
    ("logger", "target"),
    [
        ("ztunnel.proxy.istio.path.outbound", "ztunnel::proxy::outbound"),
        ("ztunnel.proxy.istio.path.inbound", "ztunnel::proxy::inbound"),
        ("ztunnel.proxy.istio.path.early_denials", "ztunnel::proxy::inbound"),
        ("ztunnel.proxy.istio.dns.pod_dns", "ztunnel::dns::pod_dns"),
        ("ztunnel.proxy.istio.app", "ztunnel::app"),
        ("ztunnel.proxy.istio.readiness", "ztunnel::readiness"),
        ("ztunnel.proxy.istio.zds.manager", "ztunnel::inpod::manager"),
        ("xds.aio.client", "ztunnel::xds::aio::client"),
        ("xdsl", "xdsl"),
        ("asyncio", "asyncio"),
    ],
)
def test_loggers_map_to_rust_targets(logger: str, target: str) -> None:
    assert target_of(logger) == target


def lines_of(folder: Path, *, json_lines: bool = False, text: str = "info") -> Lines:
    return Lines(folder, text, json_lines=json_lines)


def record(name: str, level: int, message: str, *args: object) -> logging.LogRecord:
    return logging.LogRecord(name, level, "", 0, message, args, None)


def test_lines_of_loggers_pass_the_filter(tmp_path: Path) -> None:
    async def main() -> None:
        lines = lines_of(tmp_path, text="warn,ztunnel::xds=debug")
        for name, level in (("ztunnel.proxy.istio.app", 20), ("xds.aio.client", 10), ("xds.aio.client", 5)):
            lines.stream.emit(record(name, level, "%s\nsecond", name))
        shown = [line.split("\t", 1)[1] for line in lines]
        assert shown == ["debug\txds::aio::client\txds.aio.client\\nsecond\t"]
        lines.stream.change("ztunnel::app=info")
        lines.stream.emit(record("ztunnel.proxy.istio.app", 20, "now"))
        assert [line.split("\t")[3] for line in lines][1:] == ["now"]
        lines.stream.change("", reset=True)
        lines.stream.emit(record("ztunnel.proxy.istio.app", 20, "no more"))
        assert len(list(lines)) == 2
        lines.close()

    asyncio.run(main())


@pytest.mark.parametrize("json_lines", [False, True])
def test_text_of_a_peer_cannot_forge_a_line_or_send_codes_to_a_terminal(tmp_path: Path, json_lines: bool) -> None:
    said = "x\n2026-11-26T12:00:00.250000Z\tinfo\troot\tforged\r\x1b[2J\u2028\x85\x9b2J"
    lines = Lines(tmp_path, "info", json_lines=json_lines)
    lines.stream.emit(logging.LogRecord("ztunnel.x", logging.WARNING, "f", 1, "refused: %s", (said,), None))
    lines.stream.emit(logging.LogRecord("ztunnel.x", logging.WARNING, "f", 1, "refused error=%s", (said,), None))
    lines.stream.write_access(1.0, "info", "m", [("src.workload", said), Recurring([("c", said)])], b"")
    written = list(lines)
    assert len(written) == 3
    assert all(line.replace("\t", "").isprintable() for line in written)


def test_reset_starts_from_the_first_filter(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, text="error,access=debug")
    lines.stream.change("trace,dns=debug")
    assert str(lines.stream.levels) == f"{ALWAYS},access=debug,dns=debug,trace"
    assert (lines.stream.access_level, lines.stream.dns_level) == (10, 10)
    lines.stream.change("warn", reset=True)
    assert str(lines.stream.levels) == f"{ALWAYS},access=debug,warn"
    assert lines.stream.dns_level == 30
    lines.close()


def test_a_traceback_is_one_line(tmp_path: Path) -> None:
    lines = lines_of(tmp_path, json_lines=True)
    try:
        raise RuntimeError("bug")
    except RuntimeError as error:
        bug = logging.LogRecord("ztunnel.x", 40, "", 0, "failed", (), (type(error), error, error.__traceback__))
    lines.stream.emit(bug)
    (line,) = lines
    entry = json.loads(line)
    assert (entry["level"], entry["scope"]) == ("error", "ztunnel::x")
    assert entry["message"].startswith("failed\\nTraceback")
    lines.close()


@pytest.mark.parametrize("line", [plain_line, json_line])
def test_access_line_values_are_not_cached(line: Callable[..., str]) -> None:
    """Its values (durations, ports) mostly occur once. A cache of them would keep nearby memory in use."""
    with_many = [[("src.addr", Bare(f"10.0.0.1:{port}")), ("duration", f"{port}ms")] for port in range(1000)]
    line(timestamp(0.0), "info", "access", "connection complete", with_many[0])
    tracemalloc.start()
    try:
        before = tracemalloc.take_snapshot()
        for second, fields in enumerate(with_many, 1):
            line(timestamp(second), "info", "access", "connection complete", fields)
        after = tracemalloc.take_snapshot()
    finally:
        tracemalloc.stop()
    ours = [tracemalloc.Filter(True, "*/ztunnel/*"), tracemalloc.Filter(True, "*/json/*")]
    left = after.filter_traces(ours).compare_to(before.filter_traces(ours), "lineno")
    assert not [str(each) for each in left if each.count_diff >= 100]


@pytest.mark.parametrize(
    ("text", "args", "message", "fields"),
    [
        ("fetched identity=%s expires=%d", ("a b", 5), "fetched", {"identity": "a b", "expires": 5}),
        ("pod %s started uid=%s", ("web", "u"), "pod web started", {"uid": "u"}),
        ("%d%% of a=%s b", (5, "x"), "5% of a=x b", {}),
        ("no fields", (), "no fields", {}),
        ("in the middle a=%s of it", ("x",), "in the middle a=x of it", {}),
        ("an error error=%s", (ValueError("bad"),), "an error", {"error": "bad"}),
    ],
)
def test_fields_of_operational_lines_are_keys_in_json(
    tmp_path: Path, text: str, args: tuple[object, ...], message: str, fields: dict[str, object]
) -> None:
    for json_lines in (True, False):
        lines = Lines(tmp_path, "info", json_lines=json_lines)
        record = logging.LogRecord("ztunnel.proxy.istio.app", logging.INFO, "", 0, text, args, None)
        lines.stream.emit(record)
        *_, line = lines
        lines.close()
        if json_lines:
            entry = json.loads(line)
            assert entry.pop("message") == message
            assert {key: value for key, value in entry.items() if key not in ("level", "time", "scope")} == fields
        else:
            assert text % args in line
