"""Compiles the CEL conditions of RBAC policies. Every part of an expression is checked by name here. cel-cpp then
evaluates the expression.

Envoy's configuration contains expressions as trees (``google.api.expr.v1alpha1.Expr``). They are evaluated by the
library that Envoy uses, from the package ``cel-expr-python``. It is an optional dependency (the extra ``cel``),
imported with the first condition. The import takes 12 MiB and 50 ms, and an evaluation 8 microseconds.

An expression that fails during evaluation does not match, in Envoy and here. So a ``DENY`` policy with a misspelt
attribute would admit every peer. To prevent this, attributes, functions and literals are checked here.
"""

import json
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, Final

from xds.dialects.envoy.reading import at, only, regex_match
from xds.errors import ConfigError, Unsupported
from xds.model.policy import Attributes, Expression
from xds.proto.google.api.expr.v1alpha1 import syntax_pb2 as syntax
from xds.proto.well_known import Any as AnyMessage

#: Envoy's CEL attributes of a connection that are known before the upstream connection is opened.
ATTRIBUTES: Final = {
    "source": ("address", "port"),
    "destination": ("address", "port"),
    "connection": (
        "mtls",
        "requested_server_name",
        "uri_san_peer_certificate",
        "dns_san_peer_certificate",
        "subject_peer_certificate",
    ),
}
#: The supported functions, each with its printed syntax. The target of a method call is the first operand.
#: Comprehensions, concatenation and conversion to strings are not supported, like in Envoy. Neither is arithmetic,
#: because the only number is a port.
FUNCTIONS: Final = {
    **{f"_{operator}_": f"({{}} {operator} {{}})" for operator in ("&&", "||", "==", "!=", "<", "<=", ">", ">=")},
    **{name: f"{{}}.{name}({{}})" for name in ("startsWith", "endsWith", "contains", "matches")},
    "!_": "!{}",
    "_?_:_": "({} ? {} : {})",
    "@in": "({} in {})",
    "size": "size({})",
}
_PARSED = "type.googleapis.com/cel.expr.ParsedExpr"


def compile_expression(message: syntax.Expr) -> Expression:
    """Check an expression and prepare it for evaluation.

    Raises:
        ConfigError: the text is not an expression.
        Unsupported: the expression has parts that are not evaluated here, or the evaluator's package is not
            installed.
    """
    attributes: dict[str, None] = {}
    text = _read(message, attributes)
    return Expression(text, tuple(attributes), _program(message))


def _program(message: syntax.Expr) -> Callable[[Attributes], bool]:
    packed = AnyMessage(type_url=_PARSED, value=syntax.ParsedExpr(expr=message).SerializeToString())
    try:
        expression = _environment().deserialize(packed.SerializeToString())
    except RuntimeError as error:
        raise ConfigError(f"not an expression: {error}") from None

    def evaluate(attributes: Attributes) -> bool:
        # The library returns CEL errors as values. A Python exception is a bug: it is not caught here, so that it
        # ends the connection instead of skipping a policy.
        return expression.eval(data=attributes).value() is True

    return evaluate


@cache
def _environment() -> Any:
    try:
        from cel_expr_python import cel
    except ImportError:
        raise Unsupported("CEL conditions need the package cel-expr-python: install ztunnel-py[cel]") from None
    return cel.NewEnv(variables=dict.fromkeys(ATTRIBUTES, cel.Type.DYN))


def _read(message: syntax.Expr, attributes: dict[str, None]) -> str:
    """Return an expression in CEL's syntax. The attributes that it reads are added to ``attributes``.

    Raises:
        ConfigError: a part is missing; Unsupported: a part is not supported here.
    """
    kind = message.WhichOneof("expr_kind")
    if kind is None:
        raise ConfigError("an expression is missing", "expr_kind")
    text = ""
    with at(kind):
        match kind:
            case "const_expr":
                text = _literal(message.const_expr)
            case "select_expr":
                name = _selected(message.select_expr)
                attributes[name] = None
                text = f"has({name})" if message.select_expr.test_only else name
            case "call_expr":
                text = _read_call(message.call_expr, attributes)
            case "list_expr":
                only(message.list_expr, "elements")
                text = f"[{', '.join(_read_all('elements', message.list_expr.elements, attributes))}]"
            case _:
                raise Unsupported("this kind of expression is not supported")
    return text


def _read_all(field: str, messages: Iterable[syntax.Expr], attributes: dict[str, None]) -> list[str]:
    texts = []
    for index, message in enumerate(messages):
        with at(field, index):
            texts.append(_read(message, attributes))
    return texts


def _literal(message: syntax.Constant) -> str:
    kind = message.WhichOneof("constant_kind")
    match kind:
        case "null_value":
            return "null"
        case "string_value":
            return json.dumps(message.string_value, ensure_ascii=False)
        case "bytes_value":
            return repr(message.bytes_value)
        case "uint64_value":
            return f"{message.uint64_value}u"
        case "bool_value" | "int64_value" | "double_value":
            return json.dumps(getattr(message, kind))
        case _:
            raise Unsupported("this kind of literal is not supported", kind or "constant_kind")


def _selected(message: syntax.Expr.Select) -> str:
    root = message.operand.ident_expr.name
    if message.operand.WhichOneof("expr_kind") != "ident_expr" or message.field not in ATTRIBUTES.get(root, ()):
        known = ", ".join(f"{name}.{field}" for name, fields in ATTRIBUTES.items() for field in fields)
        raise Unsupported(f"no attribute {root or '(expression)'}.{message.field} here; there are {known}")
    return f"{root}.{message.field}"


def _read_call(message: syntax.Expr.Call, attributes: dict[str, None]) -> str:
    written = FUNCTIONS.get(message.function)
    if written is None:
        raise Unsupported(f"the function {message.function!r} is not supported", "function")
    wanted = written.count("{}")
    if message.HasField("target") + len(message.args) != wanted:
        raise ConfigError(f"{message.function!r} has {wanted} operands", "args")
    operands = []
    if message.HasField("target"):
        with at("target"):
            operands.append(_read(message.target, attributes))
    operands += _read_all("args", message.args, attributes)
    if message.function == "matches":
        with at("args", len(message.args) - 1):
            if message.args[-1].const_expr.WhichOneof("constant_kind") != "string_value":
                raise Unsupported("a regular expression must be a literal")
            regex_match(message.args[-1].const_expr.string_value)
    return written.format(*operands)
