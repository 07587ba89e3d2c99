"""All checks, in the order of printing. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ztunnel.ask.check.rules import (
    access,
    configuration,
    identity,
    kernel,
    network,
    operations,
    policies,
    workloads,
)
from ztunnel.ask.check.rules.model import Check

CATALOGUE: Final[tuple[Check, ...]] = (
    *access.CHECKS,
    *kernel.CHECKS,
    *network.CHECKS,
    *identity.CHECKS,
    *configuration.CHECKS,
    *policies.CHECKS,
    *workloads.CHECKS,
    *operations.CHECKS,
)


class UnknownCheck(ValueError):
    """No check or category has this name; the text contains the name."""


def chosen(only: Iterable[str], skip: Iterable[str], *, before: bool) -> list[Check]:
    """Return the selected checks.

    Args:
        only: ids or categories. Empty means all.
        skip: ids or categories.
        before: select only checks that make sense before installation.

    Raises:
        UnknownCheck: a name is neither an id nor a category.
    """
    names = {name for check in CATALOGUE for name in (check.id, check.category)}
    wanted, unwanted = ([each.upper() for each in given] for given in (only, skip))
    for each in (*wanted, *unwanted):
        if each not in names:
            raise UnknownCheck(f"there is no check or category {each}")
    return [
        check
        for check in CATALOGUE
        if (not wanted or check.id in wanted or check.category in wanted)
        and check.id not in unwanted
        and check.category not in unwanted
        and (check.before or not before)
    ]
