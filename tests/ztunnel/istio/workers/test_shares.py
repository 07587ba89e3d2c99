"""Whose turn it is to accept."""

import os

from ztunnel.istio.workers.shares import Shares


def test_who_has_most_lets_others_go_first() -> None:
    shares, descriptor = Shares.make(3)
    there = Shares(descriptor, 3)  # as another process sees it
    os.close(descriptor)
    shares.tell(0, 0)
    there.tell(1, 0)
    # Whoever does not run is not waited for.
    assert (shares.is_turn_of(0), there.is_turn_of(1)) == (True, True)
    shares.tell(0, 1)
    assert (shares.is_turn_of(0), there.is_turn_of(1)) == (False, True)
    there.tell(1, 2)
    assert (shares.is_turn_of(0), there.is_turn_of(1)) == (True, False)
    # The third comes, with nothing; and goes again.
    shares.tell(2, 0)
    assert (shares.is_turn_of(0), there.is_turn_of(1)) == (False, False)
    there.leave(2)
    assert shares.is_turn_of(0)
    # Who was alone at the start may be alone again.
    there.leave(1)
    shares.tell(0, 100)
    assert shares.is_turn_of(0)
    shares.close()
    there.close()
