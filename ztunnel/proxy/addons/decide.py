"""Checks the values that hooks return, and combines all addons' verdicts on one connection. Pure.

Verdicts can only restrict: :func:`combined` adds denials, delays, limits and preferences, and never removes one.
Policy is evaluated elsewhere, before or after the hooks, and never reads these verdicts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from ztunnel.addons import Cut, Delay, Deny, Metric, Prefer, Verdict
from ztunnel.proxy.dataplane.reasons import CUT_BY_ADDON

#: The longest allowed delay of a verdict, in seconds. A longer delay is rejected, because it is probably in the
#: wrong unit.
LONGEST_DELAY_S: Final = 300.0
#: The longest reason of a verdict in the access line, in characters. Longer reasons are truncated.
_LONGEST_REASON: Final = 200
#: The largest number of samples in one metric family of an addon.
MOST_SAMPLES: Final = 10_000
_METRIC_NAME: Final = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_LABEL: Final = re.compile(r"(?!__|addon$)[a-zA-Z_][a-zA-Z0-9_]*")

#: The verdict types that each deciding hook may return.
ALLOWED_VERDICTS: Final[Mapping[str, tuple[type[Verdict], ...]]] = {
    "connecting": (Deny, Delay, Prefer, Cut),
    "accepting": (Deny,),
}

#: A set of labels, which an endpoint must have completely. Hashable, because it is a key in the cache of
#: load-balancing choices.
Labels = frozenset[tuple[str, str]]


class Outcome(NamedTuple):
    """The verdicts of all addons so far.

    Attributes:
        denied: the text for the access line if an addon denies the connection, otherwise empty.
        addons: the names of addons that returned a verdict, in order.
        prefer: the preferred endpoint labels, in the addons' order.
        delay_s: the sum of delays.
        cut: the limits of the open connection.
    """

    denied: str = ""
    addons: tuple[str, ...] = ()
    prefer: tuple[Labels, ...] = ()
    delay_s: float = 0.0
    cut: Cut | None = None


NOTHING: Final = Outcome()


def fault_of(hook: str, answer: object) -> str:
    """Check a hook's return value. Return its fault, or an empty text. ``None`` is always valid."""
    if answer is None:
        return ""
    allowed = ALLOWED_VERDICTS.get(hook, ())
    # isinstance would accept subclasses, whose properties could run addon code later.
    if type(answer) not in allowed:
        names = " or ".join((*(each.__name__ for each in allowed), "None"))
        return f"returned {_shown(answer)} instead of {names}"
    match answer:
        case Deny(reason):
            return "" if _is_text(reason) else "returned a Deny without a reason"
        case Delay(seconds):
            good = _is_number(seconds) and 0 < seconds <= LONGEST_DELAY_S
            return "" if good else f"returned a Delay that is not above 0 and at most {LONGEST_DELAY_S:g} s"
        case Prefer(labels):
            good = isinstance(labels, Mapping) and bool(labels) and all(map(_is_label, labels.items()))
            return "" if good else "returned a Prefer whose labels are no mapping of text to text with an entry"
        case Cut():
            return _fault_of_cut(answer)
        case _:
            raise AssertionError(answer)


def _fault_of_cut(cut: Cut) -> str:
    if not _is_text(cut.reason):
        return "returned a Cut without a reason"
    if cut.after_s is None and cut.after_bytes is None:
        return "returned a Cut without a limit"
    if cut.after_s is not None and not (_is_number(cut.after_s) and 0 <= cut.after_s < math.inf):
        return "returned a Cut whose after_s is no number of seconds"
    number = cut.after_bytes
    if number is not None and (not isinstance(number, int) or isinstance(number, bool) or number < 0):
        return "returned a Cut whose after_bytes is no number of bytes"
    return ""


def fault_of_metric(family: object) -> str:
    """Check a metric family that a hook ``metrics`` has returned. Return what is wrong, or an empty text."""
    if type(family) is not Metric:
        return f"returned {_shown(family)} instead of Metric"
    labels = family.labels
    if not (isinstance(family.name, str) and _METRIC_NAME.fullmatch(family.name)):
        return "returned a Metric whose name has other characters than letters, digits and underscores"
    if not _is_text(family.help) or not _is_unicode(family.help) or family.kind not in ("counter", "gauge"):
        return f"returned Metric {family.name} without a help text or with another kind than counter and gauge"
    if not isinstance(labels, tuple) or not all(
        isinstance(each, str) and _LABEL.fullmatch(each) for each in labels
    ):
        return f"returned Metric {family.name} whose labels are no tuple of names"
    if not isinstance(family.values, Mapping):
        return f"returned Metric {family.name} whose values are no mapping"
    if len(family.values) > MOST_SAMPLES:
        return f"returned Metric {family.name} with more than {MOST_SAMPLES} values"
    for key, value in family.values.items():
        right = isinstance(key, tuple) and len(key) == len(labels) and all(isinstance(each, str) for each in key)
        if not right or not _is_number(value):
            return f"returned Metric {family.name} with a value that has no number or not {len(labels)} labels"
        if not all(map(_is_unicode, key)):
            return f"returned Metric {family.name} with a label that UTF-8 cannot encode"
    return ""


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_unicode(text: str) -> bool:
    """Return whether a text can be encoded in UTF-8. A lone surrogate cannot, and would break the whole metrics
    page.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the largest float
        return False


def _is_label(pair: object) -> bool:
    return isinstance(pair, tuple) and all(isinstance(each, str) for each in pair)


def _shown(answer: object) -> str:
    """Describe a value by its type, without calling addon code."""
    return f"a value of type {type(answer).__name__}"


def combined(so_far: Outcome, addon: str, verdict: Verdict) -> Outcome:
    """Return an outcome with the verdict of one more addon, which :func:`fault_of` has already checked."""
    addons = (*so_far.addons, addon)
    match verdict:
        case Deny(reason):
            return so_far._replace(denied=refusal(addon, reason), addons=addons)
        case Delay(seconds):
            return so_far._replace(delay_s=so_far.delay_s + seconds, addons=addons)
        case Prefer(labels):
            return so_far._replace(prefer=(*so_far.prefer, frozenset(labels.items())), addons=addons)
        case Cut():
            return so_far._replace(cut=_lower(so_far.cut, verdict), addons=addons)


def _lower(one: Cut | None, other: Cut) -> Cut:
    """Combine two sets of limits by taking the lower value of each. If the later addon lowers any limit, its
    reason is used.
    """
    if one is None:
        return other
    seconds = _least(one.after_s, other.after_s)
    number = _least(one.after_bytes, other.after_bytes)
    lowers = (seconds, number) != (one.after_s, one.after_bytes)
    return Cut(other.reason if lowers else one.reason, seconds, None if number is None else int(number))


def _least(one: float | None, other: float | None) -> float | None:
    given = [each for each in (one, other) if each is not None]
    return min(given) if given else None


def in_words(verdict: Verdict | None) -> str:
    """Return a verdict in words, as ``ztunnel explain`` shows it."""
    match verdict:
        case None:
            return "nothing"
        case Deny(reason):
            return f"deny: {' '.join(reason.split())[:_LONGEST_REASON]}"
        case Delay(seconds):
            return f"wait {seconds:g} s"
        case Prefer(labels):
            return f"prefer endpoints with {', '.join(f'{key}={value}' for key, value in labels.items())}"
        case Cut(reason, after_s, after_bytes):
            limits = [f"{after_s:g} s"] if after_s is not None else []
            limits += [f"{after_bytes} bytes"] if after_bytes is not None else []
            return f"cut after {' or '.join(limits)}: {reason}"


def refusal(addon: str, reason: str) -> str:
    """Return the access line's error text for a connection that an addon denied."""
    return f"connection refused by addon {addon}: {_one_line(reason)}"


def cut_reason(addons: Sequence[str], cut: Cut) -> str:
    """Return the access line's error text for a connection that addons have cut."""
    return f"{CUT_BY_ADDON} {','.join(addons)}: {_one_line(cut.reason)}"


def _one_line(reason: str) -> str:
    """Return a reason as a short line that can be encoded in UTF-8, as log services and collectors require."""
    return " ".join(reason.split())[:_LONGEST_REASON].encode(errors="backslashreplace").decode()
