from xds.protocol.backoff import JitteredBackoff


def test_backoff_doubles_below_the_maximum_and_is_jittered() -> None:
    backoff = JitteredBackoff(base_s=0.5, max_s=30.0)
    assert [backoff.next(1.0) for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert backoff.next(0.25) == 7.5
    backoff.reset()
    assert backoff.next(1.0) == 0.5
