"""YAML beside a real API server: any string is the same before and after ``inject -f``."""

import json
import ssl
import urllib.request
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.apiserver.server import ApiServer
from tests.generated import examples
from tests.golang.test_yaml import TEXTS
from ztunnel.runtime.formats.go_yaml import dump_json
from ztunnel.sidecar.inject.config import InjectConfig
from ztunnel.sidecar.inject.manual import inject_text

_PODS = "/api/v1/namespaces/default/pods?dryRun=All&fieldValidation=Strict"


def post(cluster: ApiServer, path: str, body: str) -> Any:
    """Return what the API server answers to a document in YAML."""
    config = yaml.safe_load(cluster.kubeconfig().read_text())
    server, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    trusted = ssl.create_default_context(cafile=server["certificate-authority"])
    headers = {"Authorization": f"Bearer {user['token']}", "Content-Type": "application/yaml"}
    headers["Accept"] = "application/json"
    request = urllib.request.Request(server["server"] + path, method="POST", data=body.encode(), headers=headers)
    with urllib.request.urlopen(request, context=trusted) as answer:
        return json.load(answer)


@pytest.fixture(scope="module")
def account(cluster: ApiServer) -> None:
    body = "apiVersion: v1\nkind: ServiceAccount\nmetadata: {name: default}\n"
    post(cluster, "/api/v1/namespaces/default/serviceaccounts", body)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(TEXTS.filter(lambda text: "\0" not in text))
@example("1e3")
@example("08")
@example("1234e56")
@example("=")
@example("y")
@example("0o17")
def test_any_string_is_the_same_before_and_after_inject(cluster: ApiServer, account: None, value: str) -> None:
    written = dump_json(value)
    text = (
        "apiVersion: v1\nkind: Pod\nmetadata:\n  name: web\n  annotations:\n"
        f"    example.com/a: {written}\n"
        "spec:\n  serviceAccountName: default\n  containers:\n  - name: app\n    image: app\n"
        f"    args: [{written}]\n"
    )
    made = inject_text(text, "default", InjectConfig(templates=("sidecar",)), [])
    for source in (text, made):
        found = post(cluster, _PODS, source)
        assert found["metadata"]["annotations"]["example.com/a"] == value
        assert found["spec"]["containers"][0]["args"] == [value]


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 0o777))
def test_octal_mode_stays_what_it_was(cluster: ApiServer, account: None, mode: int) -> None:
    volume = f"{{name: v, secret: {{secretName: s, defaultMode: 0{mode:o}}}}}"
    text = (
        "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec:\n  serviceAccountName: default\n"
        f"  containers: [{{name: app, image: app}}]\n  volumes: [{volume}]\n"
    )
    made = inject_text(text, "default", InjectConfig(templates=("sidecar",)), [])
    for source in (text, made):
        volumes = post(cluster, _PODS, source)["spec"]["volumes"]
        assert next(each for each in volumes if each["name"] == "v")["secret"]["defaultMode"] == mode
