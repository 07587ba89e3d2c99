"""For how long answers about on-demand names are valid."""

from ztunnel.proxy.istio.path.answered_keys import VALID_S, AnsweredKeys


def test_answers_expire_and_leave_nothing_behind() -> None:
    now_s = 100.0
    keys = AnsweredKeys(lambda: now_s)
    keys.add("/10.0.0.1")
    now_s += VALID_S / 2
    keys.add("/10.0.0.2")
    assert "/10.0.0.1" in keys
    now_s += VALID_S / 2
    assert "/10.0.0.1" not in keys
    assert "/10.0.0.2" in keys
    keys.add("/10.0.0.2")
    assert len(keys) == 1, (
        "expired keys are forgotten, so that the table has no more keys than were answered lately"
    )
    now_s += VALID_S / 2
    assert "/10.0.0.2" in keys, "the newest answer counts"
