"""What holds for every test."""

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

import hbone
from tests.forking import Pool, compiled_ahead
from tests.generated import examples
from tests.selection import is_core

# No deadline for an example, because its duration depends on other work of the machine.
hypothesis.settings.register_profile(
    "here",
    max_examples=examples(100),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("here")


@pytest.fixture(autouse=True)
def _loggers_stay_as_they_were() -> Iterator[None]:
    """Restore log levels, which commands and administrators change, and the handlers of the root."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    known = [each for each in logging.Logger.manager.loggerDict.values() if isinstance(each, logging.Logger)]
    levels = [each.level for each in known]
    yield
    root.setLevel(level)
    for logger, before in zip(known, levels, strict=True):
        if logger.level != before:
            logger.setLevel(before)
    for handler in list(root.handlers):
        if handler not in handlers:
            root.removeHandler(handler)


@pytest.fixture(autouse=True)
def _collector_stays_as_it_was() -> Iterator[None]:
    """Restore the garbage collector's thresholds, which a process that expects many objects changes."""
    thresholds = gc.get_threshold()
    yield
    gc.set_threshold(*thresholds)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--core", action="store_true", help="only tests of values and bytes: the pure core")
    parser.addoption("--forks", type=int, default=0, help="workers that are forked once all tests are collected")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    config = session.config
    everything = config.getoption("forks") and config.args_source is config.ArgsSource.TESTPATHS
    files = sorted(Path(__file__).parent.rglob("test_*.py")) if everything else []
    with compiled_ahead([file for file in files if is_core(file) or not config.getoption("core")]):
        return (yield)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("core") and collection_path.name.startswith("test_") and collection_path.suffix == ".py":
        return None if is_core(collection_path) else True
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if hbone.build() == "pure":
        return
    skip = pytest.mark.skip(reason="replaces a method, which a compiled class does not allow")
    for item in items:
        if item.get_closest_marker("pure") is not None:
            item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Run the tests in forked workers, if that was asked for. Errors of collection are pytest's to report."""
    if not session.config.getoption("forks") or session.testsfailed or session.config.option.collectonly:
        return None
    Pool(session).run(session.config.getoption("forks"))
    return True


def pytest_collection_finish() -> None:
    """Keep the collector from walking modules and test items over and over: some hundred thousand objects."""
    gc.collect()
    gc.freeze()
