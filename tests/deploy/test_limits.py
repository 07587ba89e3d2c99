"""The table of limits of ``docs/reliability.md``: complete, and with the values of the code."""

import re
from dataclasses import fields

from deploy.limits import PAGE, limits, table
from hbone.limits import Limits
from ztunnel.proxy.dataplane.handshake_limiter import HalfOpenLimits


def test_the_page_has_the_table() -> None:
    assert f"\n\n{table()}\n" in PAGE.read_text(), "python -m deploy.limits"


def test_every_limit_of_the_engine_and_of_handshakes_is_in_the_table() -> None:
    found = list(limits())
    named = {name for limit in found for name in re.findall(r"`(\w+)`", limit.name)}
    assert named == {field.name for field in fields(Limits)}
    values = [limit.values for limit in found]
    for field in fields(HalfOpenLimits):
        value = getattr(HalfOpenLimits(), field.name)
        assert (value if isinstance(value, tuple) else (value,)) in values, field.name
