import logging
from collections.abc import Iterator

import pytest

from ztunnel.proxy.envoy.admin.loggers import LEVELS, PACKAGES, active, level_name, page
from ztunnel.runtime.http.page import Query


@pytest.fixture(autouse=True)
def _levels() -> Iterator[None]:
    for name in ("ztunnel.test_loggers", "ztunnel.test_loggers.below", "unrelated"):
        logging.getLogger(name)
    names = [
        name for name in logging.root.manager.loggerDict if name.partition(".")[0] in (*PACKAGES, "unrelated")
    ]
    before = {name: logging.getLogger(name).level for name in names}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


def ask(query: str) -> tuple[int, str]:
    answer = page(Query.parse(query))
    return answer.status, "".join(str(piece) for piece in answer.body)


def test_levels_have_one_name_each() -> None:
    assert [level_name(number) for number in LEVELS.values()] == list(LEVELS)
    assert level_name(1) == "trace"
    assert level_name(25) == "warning"
    assert level_name(1000) == "off"


def test_logger_level_applies_to_child_loggers() -> None:
    assert ask("ztunnel.test_loggers.below=error")[0] == 200
    status, text = ask("ztunnel.test_loggers=debug")
    assert status == 200
    assert "  ztunnel.test_loggers: debug\n  ztunnel.test_loggers.below: debug\n" in text


def test_invalid_path_changes_no_logger() -> None:
    assert ask("paths=ztunnel:error,xds:off")[0] == 200
    before = active()
    assert "  xds: off\n" in before
    for query in ("paths=ztunnel:debug,xds:loud", "paths=ztunnel:debug,none:info", "paths=ztunnel", "paths="):
        assert ask(query)[0] == 400
    assert active() == before


def test_loggers_of_other_libraries_are_unknown() -> None:
    logging.getLogger("unrelated").setLevel(logging.WARNING)
    assert ask("unrelated=debug") == (
        400,
        f"error: unknown logger name\n\nusage: /logging?<name>=<level> (change single level)\n"
        "usage: /logging?paths=name1:level1,name2:level2,... (change multiple levels)\n"
        "usage: /logging?level=<level> (change all levels)\n"
        f"levels: trace debug info warning error critical off \n{active()}",
    )
    ask("level=trace")
    assert logging.getLogger("unrelated").level == logging.WARNING
    assert logging.getLogger("hbone").getEffectiveLevel() == 5
