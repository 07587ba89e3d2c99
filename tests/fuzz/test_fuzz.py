"""Runs the fuzz targets with a few thousand fixed inputs each; ``make fuzz`` runs them for longer."""

import gc
import logging
import sys
from collections.abc import Iterator

import pytest

from tests.fuzz.mutate import mutations
from tests.fuzz.targets import TARGETS

#: Inputs per target, and fewer of those that take a millisecond each; all of them together take some ten seconds.
_INPUTS = 2000
_DEAR = {"local-file": 200, "resources": 800}
#: Allocated blocks that a pass may add: caches of texts that recur. One object kept per input would be hundreds.
_MOST_GROWTH = 150


@pytest.fixture(autouse=True)
def no_log() -> Iterator[None]:
    """pyroute2 logs what it cannot decode, and pytest keeps every record."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", TARGETS)
def test_every_input_is_accepted_or_refused_as_declared(name: str) -> None:
    target = TARGETS[name]
    for data in mutations(target.corpus(), _DEAR.get(name, _INPUTS), target.most_bytes, seed=1):
        try:
            target.run(data)
        except Exception as error:
            raise AssertionError(f"make fuzz TARGET={name}: {data!r}") from error


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_kept_of_an_input(name: str) -> None:
    target = TARGETS[name]
    inputs = list(mutations(target.corpus(), 150, target.most_bytes, seed=2))
    blocks = []
    for _ in range(4):
        for data in inputs:
            target.run(data)
        gc.collect()
        blocks.append(sys.getallocatedblocks())
    # The first passes fill caches; afterwards the same inputs must leave nothing behind.
    assert min(blocks[-1] - blocks[-2], blocks[-2] - blocks[-3]) < _MOST_GROWTH, blocks


def test_the_same_seed_makes_the_same_inputs() -> None:
    corpus = TARGETS["zds"].corpus()
    first, second = (list(mutations(corpus, 50, 1024, seed=3)) for _ in range(2))
    assert first == second
    assert len(set(first)) > 40
