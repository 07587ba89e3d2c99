"""Whose turn it is to accept."""

import os

from ztunnel.ambient.workers.shares import Shares


def test_who_has_most_lets_others_go_first() -> None:
    shares, descriptor = Shares.make(3)
    there = Shares(descriptor, 3)  # as another process sees it
    os.close(descriptor)
    have = [0, 0]
    turns = [shares.turn(0, lambda: have[0]), there.turn(1, lambda: have[1])]
    # Whoever does not run is not waited for.
    assert [turn() for turn in turns] == [True, True]
    have[0] = 1
    assert [turn() for turn in turns] == [False, True]
    have[1] = 2
    assert turns[1]() is False
    assert turns[0]() is True
    # The third comes, with nothing; and goes again.
    assert shares.turn(2, lambda: 0)()
    assert [turn() for turn in turns] == [False, False]
    there.leave(2)
    assert turns[0]() is True
    # Who was alone at the start may be alone again.
    there.leave(1)
    have[0] = 100
    assert turns[0]() is True
    shares.close()
    there.close()
