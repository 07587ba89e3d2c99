"""Who is asked about: the selectors of every configuration over Istio's table of labels, and revisions."""

import io
from argparse import ArgumentParser
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml

from ztunnel.sidecar.inject.command import add_arguments
from ztunnel.sidecar.inject.selector import selector
from ztunnel.sidecar.inject.webhooks import SYSTEM_NAMESPACES, ambient, sidecars, tag

MANIFESTS = Path(__file__).parents[4] / "deploy" / "kustomize" / "injector"
WHERE = ("ztunnel-injector", "istio-system")
INJECT, REV = "sidecar.istio.io/inject", "istio.io/rev"

#: By the labels of namespace and pod, whether the injector of the default revision is called: measured against
#: kube-apiserver with Istio's four entries.
PODS: list[dict[str, str]] = [
    {},
    {INJECT: "true"},
    {INJECT: "false"},
    {REV: "default"},
    {REV: "canary"},
    {INJECT: "true", REV: "canary"},
]
NAMESPACES: list[tuple[dict[str, str], str]] = [
    ({}, ".I.I.."),
    ({"istio-injection": "enabled"}, "II.III"),
    ({"istio-injection": "disabled"}, "......"),
    ({REV: "default"}, "II.III"),
    ({REV: "canary"}, "......"),
    ({REV: "canary", "istio-injection": "enabled"}, "II.III"),
]


def called(
    configuration: dict[str, Any], namespace: dict[str, str], pod: dict[str, str], name: str = "shop"
) -> bool:
    """Return whether an API server would call any of the webhooks."""
    of_namespace = {**namespace, "kubernetes.io/metadata.name": name}
    return any(
        selector(entry["namespaceSelector"], "x").selects(of_namespace)
        and selector(entry["objectSelector"], "x").selects(pod)
        for entry in configuration["webhooks"]
    )


@pytest.mark.parametrize(("namespace", "expected"), NAMESPACES)
def test_the_default_revision_is_called_as_istios(namespace: dict[str, str], expected: str) -> None:
    made = sidecars("default", *WHERE)
    assert len(made["webhooks"]) == 4
    assert "".join("I" if called(made, namespace, pod) else "." for pod in PODS) == expected


@pytest.mark.parametrize("namespace", [each for each, _ in NAMESPACES])
@pytest.mark.parametrize("pod", PODS)
def test_two_revisions_are_never_called_for_one_pod(namespace: dict[str, str], pod: dict[str, str]) -> None:
    both = [sidecars("default", *WHERE, every_namespace=True), sidecars("canary", *WHERE)]
    assert sum(called(each, namespace, pod) for each in both) <= 1


def test_another_revision_is_called_for_its_name_alone() -> None:
    canary = sidecars("canary", *WHERE)
    assert canary["metadata"] == {"name": "ztunnel-sidecar-injector-canary", "labels": {REV: "canary"}}
    assert len(canary["webhooks"]) == 2
    assert called(canary, {REV: "canary"}, {})
    assert called(canary, {}, {REV: "canary"})
    assert not called(canary, {"istio-injection": "enabled"}, {REV: "canary"})
    assert not called(canary, {}, {INJECT: "true"})


def test_a_tag_is_another_name_of_a_revision() -> None:
    made = tag("prod", "canary", *WHERE, template="sidecar-classic")
    assert made["metadata"]["name"] == "ztunnel-revision-tag-prod"
    assert made["metadata"]["labels"] == {REV: "canary", "istio.io/tag": "prod"}
    assert called(made, {REV: "prod"}, {})
    assert not called(made, {REV: "canary"}, {})
    paths = {entry["clientConfig"]["service"]["path"] for entry in made["webhooks"]}
    assert paths == {"/inject/templates/sidecar-classic"}


def test_every_namespace_is_all_that_say_nothing() -> None:
    made = sidecars("default", *WHERE, every_namespace=True)
    assert called(made, {}, {})
    assert not called(made, {}, {INJECT: "false"})
    assert not called(made, {"istio-injection": "disabled"}, {})


@pytest.mark.parametrize("name", [*SYSTEM_NAMESPACES, "istio-system"])
def test_system_namespaces_are_never_asked_about(name: str) -> None:
    for made in (
        sidecars("default", *WHERE, every_namespace=True),
        sidecars("canary", *WHERE),
        tag("prod", "default", *WHERE),
        ambient(*WHERE),
    ):
        for namespace, _ in NAMESPACES:
            labels = {**namespace, "istio.io/dataplane-mode": "ambient"}
            assert not any(called(made, labels, pod, name) for pod in PODS)


def test_a_pod_that_two_configurations_are_for_gets_a_sidecar() -> None:
    made = [tag("a", "default", *WHERE), sidecars("default", *WHERE), sidecars("a", *WHERE)]
    gate = ambient(*WHERE)["metadata"]["name"]
    assert all(each["metadata"]["name"] > gate for each in made)


def test_no_entry_is_one_that_istiod_would_give_its_own_ca() -> None:
    for made in (sidecars("default", *WHERE), tag("prod", "default", *WHERE), ambient(*WHERE)):
        names = [entry["name"] for entry in made["webhooks"]]
        assert len(set(names)) == len(names)
        assert not any(name.endswith("sidecar-injector.istio.io") for name in names)


def printed(*words: str) -> list[dict[str, Any]]:
    parser = ArgumentParser()
    add_arguments(parser.add_subparsers())
    args = parser.parse_args(["inject", "webhooks", *words])
    out = io.StringIO()
    with redirect_stdout(out):
        assert args.run(args) == 0
    return list(yaml.safe_load_all(out.getvalue()))


def test_what_is_deployed_is_what_is_printed() -> None:
    [deployed] = yaml.safe_load_all((MANIFESTS / "webhook.yaml").read_text())
    assert printed("--ambient") == [deployed]
    component = MANIFESTS.parent / "injector-sidecars" / "webhook.yaml"
    assert printed() == list(yaml.safe_load_all(component.read_text()))
    assert [each["metadata"]["name"] for each in printed("--revision=canary", "--tag=prod", "--tag=next")] == [
        "ztunnel-sidecar-injector-canary",
        "ztunnel-revision-tag-prod",
        "ztunnel-revision-tag-next",
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--service=x"], "--service x: must be NAME.NAMESPACE"),
        (["--service=/tmp/x.yaml"], "--service /tmp/x.yaml: must be NAME.NAMESPACE, small letters"),
        (["--service=x.Mesh"], "--service x.Mesh: must be NAME.NAMESPACE"),
        (["--service=x.mesh.svc"], "--service x.mesh.svc: must be NAME.NAMESPACE"),
        (["--revision=A_B"], "--revision A_B: must be small letters"),
        (["--tag=-"], "--tag -: must be small letters"),
        (["--template=x"], "--template x: known are ambient, sidecar, sidecar-classic"),
    ],
)
def test_what_cannot_be_a_name_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    add_arguments(parser.add_subparsers())
    args = parser.parse_args(["inject", "webhooks", *words])
    assert args.run(args) == 2
    assert said in capsys.readouterr().err
