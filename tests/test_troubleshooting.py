"""``docs/troubleshooting.md`` explains every reason that the code gives for a connection's end."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ztunnel.addons import Cut
from ztunnel.proxy.addons.decide import cut_reason, refusal
from ztunnel.proxy.envoy.stream.stream_info import Flag
from ztunnel.proxy.istio.accounting import outcome

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
#: Exceptions whose text becomes the ``error`` of an access line.
_ENDS = {"EarlyDeny", "Failed", "RouteRefused", "RequestRefused", "IdentityError", "Refusal"}


def reasons() -> Iterator[str]:
    """Yield the fixed beginning of each text, up to its first value."""
    for path in (ROOT / "ztunnel/proxy/istio").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ENDS:
                for value in (*node.args, *(keyword.value for keyword in node.keywords)):
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield value.value
                    elif isinstance(value, ast.JoinedStr) and isinstance(value.values[0], ast.Constant):
                        yield str(value.values[0].value).strip(" (")


@pytest.mark.parametrize("reason", sorted(set(reasons()) - {""}))
def test_each_reason_is_explained(reason: str) -> None:
    assert reason in PAGE


@pytest.mark.parametrize(
    "reason", [outcome.POLICY_CHANGE, outcome.REVOKED, outcome.DRAINED, outcome.REJECTED, outcome.RECURSIVE_CALL]
)
def test_each_end_on_purpose_is_explained(reason: str) -> None:
    assert f"`{reason}" in PAGE


def test_each_flag_is_explained() -> None:
    told = set(re.findall(r"`([A-Z0-9_]+)`", PAGE))
    assert {str(flag) for flag in outcome.Flags} - {"-"} <= told
    assert {str(flag) for flag in Flag} <= told


def test_what_addons_do_is_explained() -> None:
    assert f"`{refusal('NAME', '...')}`" in PAGE
    assert f"`{cut_reason(['NAME'], Cut('...'))}`" in PAGE
