"""kubectl's JSONPath templates: what its documentation shows, and what is refused."""

import pytest

from ztunnel.runtime.console.jsonpath import BadTemplate, Template

VALUE = {
    "kind": "List",
    "items": [
        {"name": "a", "n": 1, "labels": {"app": "x", "a/b": "y"}, "ok": True},
        {"name": "b", "n": 2.5, "labels": {}, "ok": None},
    ],
}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{.kind}", "List"),
        ("kind: {.kind}!", "kind: List!"),
        ("{.items[*].name}", "a b"),
        ("{.items[0].n} {.items[-1].n}", "1 2.5"),
        ("{.items[0:1].name}", "a"),
        ("{.items[*]['name']}", "a b"),
        ("{.items[0].labels['a/b']}", "y"),
        ("{.items[0].labels.*}", "x y"),
        ("{..name}", "a b"),
        ("{.missing}", ""),
        ("{.items[7].name}", ""),
        ("{$.kind}", "List"),
        ('{.items[?(@.name=="b")].n}', "2.5"),
        ("{.items[?(@.n>=1)].name}", "a b"),
        ("{.items[?(@.n!=1)].name}", "b"),
        ("{.items[?(@.name>1)].name}", ""),
        ("{.items[?(@.labels.app)].name}", "a"),
        ("{.items[*].ok}", "true null"),
        ("{.items[0].labels}", '{"app": "x", "a/b": "y"}'),
        ('{range .items[*]}{.name}={.n}{"\\n"}{end}', "a=1\nb=2.5\n"),
    ],
)
def test_what_is_selected(template: str, text: str) -> None:
    assert Template(template).render(VALUE) == text


@pytest.mark.parametrize(
    "template",
    ["{", "}", "{.a", "{end}", "{range .items[*]}", "{.items[}", '{"a}', "{.items[?(@.n==x)].name}", "{.a b}"],
)
def test_malformed_templates_are_refused(template: str) -> None:
    with pytest.raises(BadTemplate):
        Template(template).render(VALUE)
