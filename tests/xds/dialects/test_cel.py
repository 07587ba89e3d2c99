"""CEL conditions: what an expression becomes, and the named error of what is not evaluated.

What Envoy decides by the same expressions: :mod:`tests.interop.conditions`.
"""

import subprocess
import sys
from typing import Any

import pytest

from tests.interop.conditions import tree
from tests.ztunnel.policy.test_engine import MESH, PLAIN, STRANGER, facts
from xds.dialects.envoy import cel
from xds.errors import ConfigError, Unsupported
from xds.model.facts import ConnectionFacts
from xds.model.policy import Condition, Not, Policy, PolicyList, Tier, Verdict
from xds.proto.google.api.expr.v1alpha1.syntax_pb2 import Expr
from xds.proto.json import parse_value
from ztunnel.policy.engine import compiled, holds, judge, reads_port
from ztunnel.policy.reasons import reason

pytest.importorskip("cel_expr_python")


def compile_text(text: str) -> Condition:
    return cel.compile_expression(parse_value(tree(text), Expr).message)


@pytest.mark.parametrize(
    ("text", "connection", "verdict"),
    [
        ("connection.mtls", MESH, True),
        ("connection.mtls", PLAIN, False),
        ("connection.uri_san_peer_certificate.startsWith('spiffe://cluster.local/')", MESH, True),
        ("connection.uri_san_peer_certificate.startsWith('spiffe://cluster.local/')", STRANGER, False),
        ("connection.dns_san_peer_certificate == 'front'", MESH, True),
        ("connection.dns_san_peer_certificate != 'front'", STRANGER, False),  # it has none: an error
        ("connection.subject_peer_certificate == 'CN=front'", MESH, True),
        ("connection.requested_server_name == 'a'", facts(server_name="a"), True),
        ("source.address == '10.0.0.1:40000' && source.port == 40000", PLAIN, True),
        ("destination.address == '10.0.0.2:15008' && destination.port in [80, 15008]", PLAIN, True),
        ("source.port", PLAIN, False),  # no truth value
    ],
)
def test_an_expression_is_true_of_a_connection(text: str, connection: ConnectionFacts, verdict: bool) -> None:
    condition = compile_text(text)
    assert holds(condition, connection) is verdict
    assert compiled(condition)(connection) is verdict
    rules = PolicyList((Tier((Policy("p", Verdict.ALLOW, condition),)),), Verdict.DENY)
    assert judge(rules, connection).allowed is verdict


def test_an_error_of_python_skips_no_policy() -> None:
    """The evaluator does not accept a lone surrogate. ``DENY`` must not admit its connection."""
    denies = compile_text("connection.requested_server_name == 'a'")
    with pytest.raises((RuntimeError, UnicodeError)):
        holds(denies, facts(server_name="\udc80"))


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("!connection.mtls || source.port in [1, 2u, 3.5]", "(!connection.mtls || (source.port in [1, 2u, 3.5]))"),
        ("has(connection.mtls) ? true : size('a\"') < 2", '(has(connection.mtls) ? true : (size("a\\"") < 2))'),
        ("source.address.matches('^10[.]')", 'source.address.matches("^10[.]")'),
    ],
)
def test_a_condition_is_printed_in_cels_syntax(text: str, written: str) -> None:
    condition = compile_text(text)
    assert condition.text == written  # type: ignore[union-attr]
    assert condition == compile_text(text) != compile_text("true")


def test_a_reason_has_the_values() -> None:
    condition = compile_text("connection.uri_san_peer_certificate == 'x' && source.port > 1")
    assert reason(condition, PLAIN) == (
        'the expression ((connection.uri_san_peer_certificate == "x") && (source.port > 1)) is true: no, it is '
        "connection.uri_san_peer_certificate missing, source.port 40000"
    )
    assert reason(compile_text("connection.mtls"), MESH) == "the expression connection.mtls is true"
    assert reason(compile_text("false"), MESH) == "the expression false is true: no"


@pytest.mark.parametrize(("text", "reads"), [("destination.port == 1", True), ("source.port == 1", False)])
def test_an_expression_may_read_the_port(text: str, reads: bool) -> None:
    policy = Policy("p", Verdict.ALLOW, Not(compile_text(text)))
    assert reads_port(PolicyList((Tier((policy,)),), Verdict.DENY)) is reads


def call(function: str, *args: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"call_expr": {"function": function, "args": list(args), **more}}


ONE = {"const_expr": {"int64_value": 1}}
PORT = {"select_expr": {"operand": {"ident_expr": {"name": "source"}}, "field": "port"}}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ({}, "expr_kind: an expression is missing"),
        ({"const_expr": {}}, "const_expr.constant_kind: this kind of literal is not supported"),
        ({"const_expr": {"duration_value": "1s"}}, "const_expr.duration_value: this kind of literal"),
        ({"ident_expr": {"name": "source"}}, "ident_expr: this kind of expression is not supported"),
        ({"struct_expr": {}}, "struct_expr: this kind"),
        ({"comprehension_expr": {}}, "comprehension_expr: this kind"),
        (tree("connection.colour == 'x'"), "call_expr.args[0].select_expr: no attribute connection.colour here"),
        (tree("request.path == 'x'"), "no attribute request.path here; there are source.address, source.port"),
        (tree("source.port.port"), "select_expr: no attribute (expression).port here"),
        (call("_+_", ONE, ONE), "call_expr.function: the function '_+_' is not supported"),
        (call("_&&_", ONE), "call_expr.args: '_&&_' has 2 operands"),
        (call("_==_", ONE, {}), "call_expr.args[1].expr_kind: an expression is missing"),
        (call("size", target={}), "call_expr.target.expr_kind: an expression is missing"),
        ({"list_expr": {"elements": [ONE, {}]}}, "list_expr.elements[1].expr_kind: an expression is missing"),
        ({"list_expr": {"optional_indices": [0]}}, "list_expr.optional_indices: this proxy does not support"),
        (tree("source.address.matches(source.address)"), "args[0]: a regular expression must be a literal"),
        (tree("source.address.matches('(?=x)')"), "invalid regex"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_evaluated_is_refused_by_name_and_place(document: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        cel.compile_expression(parse_value(document, Expr).message)
    assert words in str(refused.value)


def test_a_missing_evaluator_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cel_expr_python", None)
    cel._environment.cache_clear()
    with pytest.raises(Unsupported, match=r"install ztunnel-py\[cel\]"):
        compile_text("true")


def test_nothing_imports_the_evaluator_before_a_condition() -> None:
    program = "import sys, ztunnel.proxy.envoy.app; sys.exit('cel_expr_python' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
