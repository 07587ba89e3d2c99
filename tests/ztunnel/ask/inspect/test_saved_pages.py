"""Tables from a saved dump of Envoy's dialect equal the running proxy's, except for facts missing from a dump."""

import json
from base64 import b64encode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.hbone.certificates import Authority, of_unknown_version
from tests.ztunnel.ask.inspect.harness import Output, pages
from tests.ztunnel.proxy.envoy.admin.harness import Running, serve
from tests.ztunnel.proxy.envoy.admin.reference import write_reference
from ztunnel.cli import main

_DUMP = "type.googleapis.com/envoy.admin.v3."


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Mapping[str, str]]:
    """Yield a proxy's dump, and the proxy's own answers."""
    folder = tmp_path_factory.mktemp("reference")
    reference = write_reference(folder, "w2")
    said: dict[str, str] = {}
    file = folder / "dump.json"

    def check(found: Running) -> None:
        file.write_bytes(found.admin.get("/config_dump", include_eds="").body)
        for page in ("/rbac", "/certs"):
            said[page] = found.admin.get(page).body.decode()

    serve(reference, check)
    return file, said


def table(command: str, *source: str, capsys: Output) -> tuple[list[dict[str, Any]], list[str]]:
    assert main([command, *source, "--json"]) == 0
    said = capsys.readouterr()
    return json.loads(said.out)["items"], said.err.splitlines()


def test_policies_and_certificates_are_those_of_the_running_proxy(
    running: tuple[Path, Mapping[str, str]], capsys: Output
) -> None:
    file, said = running
    policies, lacks = table("policies", "-f", str(file), capsys=capsys)
    assert lacks == ["ztunnel policies: not in the dump: what each policy decided"]
    wanted = json.loads(said["/rbac"])["policies"]
    assert wanted
    assert [(each["name"], each["action"], each["chains"]) for each in policies] == [
        (each["policy"], each["action"], each["chains"]) for each in wanted
    ]
    assert {each["denied"] for each in policies} == {None}
    held, lacks = table("certificates", "-f", str(file), capsys=capsys)
    assert lacks == []
    shown = json.loads(said["/certs"])["certificates"]
    serials = {
        (kind, each["serial_number"])
        for context in shown
        for kind, key in (("Leaf", "cert_chain"), ("Root", "ca_cert"))
        for each in context[key]
    }
    # The dump has the secrets that no context of this moment uses, too.
    assert serials <= {(each["type"], each["serialNumber"]) for each in held}


def test_the_status_of_a_dump_says_what_a_dump_can(
    running: tuple[Path, Mapping[str, str]], capsys: Output
) -> None:
    file, _ = running
    rows, lacks = table("status", "-f", str(file), capsys=capsys)
    status = {each["name"]: each["state"] for each in rows}
    assert status["listeners"] == "4 active"
    assert status["node"].startswith("sidecar~10.244.2.5~")
    assert int(status["clusters"]) > 0
    assert status["certificates"].startswith("2, the first ends ")
    assert "connections" not in status
    assert [line.partition(": not in the dump: ")[2].partition(",")[0] for line in lacks] == ["state"]


def test_an_envoy_has_no_page_of_policies_but_a_dump(
    running: tuple[Path, Mapping[str, str]], capsys: Output
) -> None:
    file, said = running
    with pages({"/config_dump": file.read_bytes()}, missing=b"invalid path. admin commands are:\n") as envoy:
        rows, lacks = table("policies", "--address", envoy, capsys=capsys)
    assert [each["name"] for each in rows] == [each["policy"] for each in json.loads(said["/rbac"])["policies"]]
    assert len(lacks) == 1


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("connections", "a dump of Envoy's dialect has no connections: ask the running proxy"),
        ("workloads", "a proxy in Envoy's dialect has listeners and clusters instead: ztunnel config listeners"),
        ("services", "a proxy in Envoy's dialect has listeners and clusters instead: ztunnel config listeners"),
    ],
)
def test_commands_without_data_in_an_envoy_dump_are_refused(
    running: tuple[Path, Mapping[str, str]], capsys: Output, command: str, reason: str
) -> None:
    file, _ = running
    assert main([command, "-f", str(file)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"ztunnel {command}: {file}: {reason}")
    assert main(["policies", "-f", str(file), "-n", "default"]) == 2
    assert "namespaces are of an Istio mesh" in capsys.readouterr().err


def secrets(*entries: Mapping[str, Any]) -> dict[str, Any]:
    listed = [{"name": str(number), "secret": entry} for number, entry in enumerate(entries)]
    return {"configs": [{"@type": f"{_DUMP}SecretsConfigDump", "dynamic_active_secrets": listed}]}


def test_certificates_in_any_form_and_those_that_are_elsewhere(tmp_path: Path, capsys: Output) -> None:
    authority = Authority()
    leaf = authority.issue("spiffe://td/ns/a/sa/b")
    dump = secrets(
        {"tls_certificate": {"certificate_chain": {"inline_string": leaf.chain_pem.decode()}}},
        {"validation_context": {"trusted_ca": {"inline_bytes": b64encode(authority.pem).decode()}}},
        {"validation_context": {"trusted_ca": {"filename": "/etc/root.pem"}}},
        {"tls_certificate": {"certificate_chain": {"inline_string": "garbage"}}},
        {"tls_certificate": {"certificate_chain": {"inline_string": of_unknown_version(authority.pem).decode()}}},
        {"tls_certificate": {"certificate_chain": {}}},
        {"tls_certificate": {"certificate_chain": None}},
    )
    file = tmp_path / "dump.json"
    file.write_text(json.dumps(dump))
    held, lacks = table("certificates", "-f", str(file), capsys=capsys)
    assert [(each["identity"], each["type"]) for each in held] == [
        ("spiffe://td/ns/a/sa/b", "Leaf"),
        (None, "Root"),
    ]
    assert len(lacks) == 4
    assert lacks[0] == "ztunnel certificates: not in the dump: the certificates of /etc/root.pem"
    assert lacks[1].startswith("ztunnel certificates: not in the dump: certificates that can be read: ")
    assert lacks[2].startswith("ztunnel certificates: not in the dump: certificates that can be read: ")
    assert lacks[3].endswith("the certificates of a source without a name")
    file.write_text(json.dumps({"configs": ["no section"]}))
    for command in ("policies", "certificates", "status"):
        assert main([command, "-f", str(file)]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert str(file) in said.err
