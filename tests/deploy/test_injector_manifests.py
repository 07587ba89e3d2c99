"""How the injector is deployed: the chart comes out as kustomize, its values are checked, arguments are read."""

import json
import re
import subprocess
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.labels import STANDARD, without
from tests.programs import needed
from ztunnel.sidecar.inject import config as injectors
from ztunnel.sidecar.inject.command import _faulty, add_arguments
from ztunnel.sidecar.inject.config import parse_config
from ztunnel.sidecar.inject.webhooks import ambient, sidecars, tag

DEPLOY = Path(__file__).parents[2] / "deploy"
FOLDER = DEPLOY / "kustomize" / "injector"
CHART = DEPLOY / "helm" / "injector"
WEBHOOKS = "MutatingWebhookConfiguration"

Objects = dict[tuple[str, str], dict[str, Any]]


def objects(text: str) -> Objects:
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text) if each}


def kustomized() -> Objects:
    listed = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())["resources"]
    return objects("\n---\n".join((FOLDER / name).read_text() for name in listed))


def rendered(*values: str, namespace: str = "istio-system") -> Objects:
    command = [needed("helm"), "template", "injector", str(CHART), "--namespace", namespace]
    for value in values:
        command += ["--set-json", value]
    return objects(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def arguments(found: Objects, name: str = "ztunnel-injector") -> list[str]:
    [container] = found["Deployment", name]["spec"]["template"]["spec"]["containers"]
    return list(container["args"])


def config_of(found: Objects, name: str = "ztunnel-injector") -> injectors.InjectConfig:
    return parse_config(found["ConfigMap", name]["data"]["config.yaml"])


def test_the_chart_renders_the_kustomization() -> None:
    chart, base = rendered(), kustomized()
    assert config_of(chart) == config_of(base)
    for found in (chart, base):
        del found["ConfigMap", "ztunnel-injector"]
    own = STANDARD | {"app.kubernetes.io/name"}
    assert without(chart, own) == base
    pod = chart["Deployment", "ztunnel-injector"]["spec"]["template"]
    assert pod["metadata"]["labels"].keys() >= own - {"istio.io/rev"}


def test_a_tag_that_is_a_large_number_has_no_exponent() -> None:
    [container] = rendered("tag=20261127")["Deployment", "ztunnel-injector"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["image"].endswith(":20261127")


def test_sidecars_are_asked_for_as_the_command_prints() -> None:
    found = rendered('sidecars={"enabled":true,"tags":["prod"],"everyNamespace":true}')
    where = ("ztunnel-injector", "istio-system")
    wanted = [
        ambient(*where),
        sidecars("default", *where, every_namespace=True),
        tag("prod", "default", *where),
    ]
    assert [found[WEBHOOKS, each["metadata"]["name"]] for each in wanted] == wanted
    names = [each["metadata"]["name"] for each in wanted]
    assert [word for word in arguments(found) if word.startswith("--webhook-config")] == [
        f"--webhook-config={name}" for name in names
    ]
    [rule] = found["ClusterRole", "ztunnel-injector"]["rules"]
    assert rule["resourceNames"] == names


def test_two_revisions_can_be_installed_side_by_side() -> None:
    sidecar = '{"enabled":true,"template":"sidecar-classic","tags":["next"]}'
    found = rendered('revision="canary"', f"sidecars={sidecar}", namespace="mesh")
    name = "ztunnel-injector-canary"
    assert config_of(found, name).revision == "canary"
    wanted = [
        sidecars("canary", name, "mesh", template="sidecar-classic"),
        tag("next", "canary", name, "mesh", template="sidecar-classic"),
    ]
    assert {key[1]: value for key, value in found.items() if key[0] == WEBHOOKS} == {
        each["metadata"]["name"]: each for each in wanted
    }
    assert f"--service={name}.mesh" in arguments(found, name)
    # No object of the other revision has the same name.
    assert not set(found) & set(rendered('sidecars={"enabled":true}'))


def test_values_go_where_they_belong() -> None:
    found = rendered(
        'hub="registry.example.com"',
        "tag=1.5",
        'variant="debug"',
        'imagePullPolicy="Always"',
        'imagePullSecrets=["mine"]',
        'config={"sidecar":{"xdsAddress":"https://plane:15012","env":{"A":"b"}},"defaultTemplates":["sidecar"]}',
        'certificateSecret="serving"',
        "replicas=3",
        'podLabels={"a":"b"}',
        'podAnnotations={"c":"d"}',
        'nodeSelector={"e":"f"}',
        'tolerations=[{"operator":"Exists"}]',
    )
    config = config_of(found)
    image = "registry.example.com/ztunnel-py:1.5-debug"
    assert (config.image, config.pull_policy, config.pull_secrets) == (image, "Always", ("mine",))
    assert (config.sidecar.xds_address, config.templates) == ("https://plane:15012", ("sidecar",))
    deployment = found["Deployment", "ztunnel-injector"]["spec"]
    pod = deployment["template"]
    [container] = pod["spec"]["containers"]
    assert (container["image"], container["imagePullPolicy"], deployment["replicas"]) == (image, "Always", 3)
    assert pod["metadata"]["labels"]["a"] == "b"
    assert pod["metadata"]["annotations"] == {"c": "d"}
    assert (pod["spec"]["nodeSelector"], pod["spec"]["tolerations"]) == ({"e": "f"}, [{"operator": "Exists"}])
    # A certificate of somebody else's: no CA of our own, and no right to make Secrets.
    assert ("Role", "ztunnel-injector") not in found
    folder = "/etc/ztunnel-injector-certificate"
    assert {f"--certificate={folder}/tls.crt", f"--key={folder}/tls.key", f"--ca={folder}/ca.crt"} <= set(
        container["args"]
    )
    assert not [word for word in container["args"] if word.startswith("--own-ca")]
    assert {"name": "certificates", "mountPath": folder, "readOnly": True} in container["volumeMounts"]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("replica=3", "replica"),
        ('revision="A b"', "revision"),
        ('sidecars={"tags":["_"]}', "tags"),
        ('sidecars={"template":"ambient"}', "template"),
        ('config={"sidecar":{"xdsAdress":"x"}}', "xdsAdress"),
        ('config={"image":"x"}', "image"),
        ('config={"gate":{"timeoutSeconds":0}}', "timeoutSeconds"),
        ('imagePullPolicy="Sometimes"', "imagePullPolicy"),
    ],
)
def test_a_bad_value_is_refused_by_name(value: str, said: str) -> None:
    command = [needed("helm"), "template", "injector", str(CHART), "--set-json", value]
    refused = subprocess.run(command, check=False, capture_output=True, text=True)
    assert refused.returncode != 0
    assert said in refused.stderr


def test_the_schema_has_every_key_of_the_configuration() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]
    config = schema["config"]["properties"]
    of_values = {"image", "imagePullPolicy", "imagePullSecrets", "revision"}
    assert set(config) | of_values == set(injectors._KEYS)
    assert set(config["sidecar"]["properties"]) == set(injectors._SIDECAR_KEYS)
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(values) | {"global"} == set(schema)


def test_every_argument_is_read() -> None:
    for found in (kustomized(), rendered('certificateSecret="x"'), rendered('sidecars={"enabled":true}')):
        parser = ArgumentParser()
        add_arguments(parser.add_subparsers())
        args = parser.parse_args(arguments(found))
        assert _faulty(args) is None


def test_what_templates_refer_to_is_defined() -> None:
    text = "".join(path.read_text() for path in sorted((CHART / "templates").iterdir()))
    assert set(re.findall(r'include "([^"]+)"', text)) == set(re.findall(r'define "([^"]+)"', text))


def test_kustomize_with_sidecars_has_the_role_and_the_arguments() -> None:
    command = [needed("kubectl"), "kustomize", str(DEPLOY / "kustomize" / "injector-sidecars")]
    found = objects(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    names = ["ztunnel-injector", "ztunnel-sidecar-injector"]
    assert {key[1] for key in found if key[0] == WEBHOOKS} == set(names)
    [rule] = found["ClusterRole", "ztunnel-injector"]["rules"]
    assert rule["resourceNames"] == names
    assert [word for word in arguments(found) if word.startswith("--webhook-config")] == [
        f"--webhook-config={name}" for name in names
    ]
