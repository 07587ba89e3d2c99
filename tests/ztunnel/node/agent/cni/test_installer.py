"""The plugin in a host's folders: put there, kept there, taken out."""

import asyncio
import json
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.limits import WAIT_S
from ztunnel.node.agent.cni import installer as installer_module
from ztunnel.node.agent.cni.conflist import OWNED, TYPE, BadConfiguration, read, with_plugin, without_plugin
from ztunnel.node.agent.cni.installer import (
    Installation,
    Installer,
    NoNetwork,
    facts,
    install,
    taken_by_runtime,
    uninstall,
)

LIST = {"name": "net", "cniVersion": "1.0.0", "plugins": [{"type": "bridge"}, {"type": "portmap"}], "x": 1}
ENTRY = {"type": TYPE, "name": TYPE}


@pytest.fixture
def wanted(tmp_path: Path) -> Installation:
    for name in ("bin", "net.d"):
        (tmp_path / name).mkdir()
    return Installation(
        binaries=tmp_path / "bin", configurations=tmp_path / "net.d", options={"socket": "/run/x.sock"}
    )


def put(wanted: Installation, name: str, value: Any, mode: int = 0o644) -> Path:
    path = wanted.configurations / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    path.chmod(mode)
    return path


def types(path: Path) -> list[str]:
    return [each["type"] for each in json.loads(path.read_text())["plugins"]]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_list_gets_the_plugin_as_its_last_one_and_keeps_the_rest(wanted: Installation) -> None:
    path = put(wanted, "10-net.conflist", LIST, 0o640)
    assert install(wanted) == [str(wanted.binaries / TYPE), str(path)]
    assert types(path) == ["bridge", "portmap", TYPE]
    assert json.loads(path.read_text())["x"] == 1
    assert (mode(path), mode(wanted.binaries / TYPE)) == (0o640, 0o755)
    assert install(wanted) == []
    assert (wanted.binaries / TYPE).read_text().startswith("#!/usr/bin/python3 -IS\n")
    assert sorted(uninstall(wanted)) == sorted([str(wanted.binaries / TYPE), str(path)])
    assert json.loads(path.read_text()) == LIST
    assert uninstall(wanted) == []
    assert {each.name for each in wanted.configurations.iterdir()} == {"10-net.conflist"}


def test_a_plain_configuration_becomes_a_list(wanted: Installation) -> None:
    put(wanted, "10-net.conf", {"type": "bridge", "bridge": "cni0"})
    install(wanted)
    path = wanted.configurations / "10-net.conflist"
    assert types(path) == ["bridge", TYPE]
    assert json.loads(path.read_text())["name"] == "k8s-pod-network"
    assert mode(path) == 0o600
    assert [each.name for each in wanted.configurations.iterdir()] == ["10-net.conflist"]


def test_the_first_valid_file_counts(wanted: Installation) -> None:
    put(wanted, "00-broken.conflist", "{")
    put(wanted, "01-note.txt", LIST)
    put(wanted, "05-empty.conflist", {"plugins": []})
    second = put(wanted, "20-other.conflist", LIST)
    first = put(wanted, "10-net.conflist", LIST)
    install(wanted)
    assert types(first)[-1] == TYPE
    assert TYPE not in types(second)


def test_an_older_entry_of_ours_is_replaced(wanted: Installation) -> None:
    path = put(
        wanted, "10-net.conflist", {**LIST, "plugins": [{"type": TYPE, "socket": "/old"}, {"type": "bridge"}]}
    )
    install(wanted)
    plugins = json.loads(path.read_text())["plugins"]
    assert [each["type"] for each in plugins] == ["bridge", TYPE]
    assert plugins[-1]["socket"] == "/run/x.sock"


def test_the_owned_file_is_a_copy_that_sorts_first(tmp_path: Path, wanted: Installation) -> None:
    owned = Installation(binaries=wanted.binaries, configurations=wanted.configurations, owned=True)
    path = put(wanted, "10-net.conflist", LIST)
    install(owned)
    assert json.loads(path.read_text()) == LIST
    assert types(wanted.configurations / OWNED) == ["bridge", "portmap", TYPE]
    assert mode(wanted.configurations / OWNED) == 0o600
    # The network's own configuration changes: so does the copy.
    put(wanted, "10-net.conflist", {**LIST, "plugins": [{"type": "calico"}]})
    assert install(owned) == [str(wanted.configurations / OWNED)]
    assert types(wanted.configurations / OWNED) == ["calico", TYPE]
    uninstall(owned)
    assert [each.name for each in wanted.configurations.iterdir()] == ["10-net.conflist"]


def test_without_a_network_the_program_waits_for_one(wanted: Installation) -> None:
    put(wanted, "00-broken.conflist", "[]")
    with pytest.raises(NoNetwork, match=r"00-broken\.conflist: no object"):
        install(wanted)
    assert (wanted.binaries / TYPE).exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON"),
        ("7", "no object"),
        ("{}", "name is missing"),
        ('{"name": "n", "plugins": 7}', "not a list"),
        ('{"name": "n", "plugins": []}', "not a list"),
        ('{"name": "n", "plugins": ["x"]}', r"plugins\[0\]: no object"),
        ('{"name": "n", "plugins": [{"type": ""}]}', r"plugins\[0\]: type is missing"),
        ('{"name": "n", "cniVersion": 1, "plugins": [{"type": "x"}]}', "cniVersion is not a string"),
        ('{"name": "n", "plugins": [{"type": "x", "ipam": []}]}', "ipam is not an object"),
        ('{"name": "n", "x": NaN, "plugins": [{"type": "x"}]}', "not JSON: NaN"),
        ('{"name": "n", "plugins": [{"type": "ztunnel-cni"}]}', "no plugin except ours"),
    ],
)
def test_what_is_no_configuration_is_refused(text: str, reason: str) -> None:
    with pytest.raises(BadConfiguration, match=reason):
        read(text, listed=True)


def test_a_list_in_a_plain_file_is_no_configuration() -> None:
    with pytest.raises(BadConfiguration, match="type is missing"):
        read(json.dumps(LIST), listed=False)


def test_in_and_out_again_is_what_it_was() -> None:
    assert without_plugin(with_plugin(read(json.dumps(LIST), listed=True), ENTRY)) == LIST


@pytest.mark.parametrize("ending", ["conf", "json"])
def test_plain_file_that_the_network_writes_again_is_followed(wanted: Installation, ending: str) -> None:
    for bridge in ("cni0", "cni0", "cni1"):
        put(wanted, f"10-net.{ending}", {"type": "bridge", "bridge": bridge})
        install(wanted)
        path = taken_by_runtime(wanted.configurations)
        assert path == wanted.configurations / "10-net.conflist"
        assert types(path) == ["bridge", TYPE]
        assert json.loads(path.read_text())["plugins"][0]["bridge"] == bridge
        assert install(wanted) == []


@pytest.mark.parametrize("owned", [False, True])
@pytest.mark.parametrize("name", ["00-multus.conf", ".hidden.conf", "00-multus.json", "00-multus.conflist"])
def test_ours_is_in_the_file_that_the_runtime_takes(wanted: Installation, owned: bool, name: str) -> None:
    wanted = replace(wanted, owned=owned)
    put(wanted, name, LIST if name.endswith("list") else {"type": "multus"})
    put(wanted, "10-net.conflist", LIST)
    install(wanted)
    path = taken_by_runtime(wanted.configurations)
    assert path is not None
    assert types(path)[-1] == TYPE
    assert install(wanted) == []


def test_list_of_the_network_beside_its_plain_file_is_not_replaced(wanted: Installation) -> None:
    plain = put(wanted, "10-net.conf", {"type": "flannel"})
    listed = put(wanted, "10-net.conflist", LIST)
    install(wanted)
    path = taken_by_runtime(wanted.configurations)
    assert path is not None
    assert types(path) == ["flannel", TYPE]
    assert json.loads(listed.read_text()) == LIST
    uninstall(wanted)
    assert taken_by_runtime(wanted.configurations) == plain


def test_change_of_the_mode_leaves_no_copy_behind(wanted: Installation) -> None:
    put(wanted, "10-net.conflist", LIST)
    install(replace(wanted, owned=True))
    install(wanted)
    assert [each.name for each in wanted.configurations.iterdir()] == ["10-net.conflist"]


def test_rest_of_a_list_of_ours_is_removed(wanted: Installation) -> None:
    put(wanted, "05-old.conflist", {"name": "old", "plugins": [ENTRY]})
    put(wanted, "10-net.conflist", LIST)
    install(wanted)
    assert [each.name for each in wanted.configurations.iterdir()] == ["10-net.conflist"]


def test_it_is_put_back_whoever_takes_it_out(wanted: Installation, caplog: pytest.LogCaptureFixture) -> None:
    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.01)

    async def main() -> None:
        installer = Installer(wanted)
        running = asyncio.get_running_loop().create_task(installer.run())
        try:
            # The network comes later, as a file that its installer renames.
            await until(lambda: "no network configuration" in caplog.text)
            assert not installer.installed
            put(wanted, ".making", LIST).rename(wanted.configurations / "10-net.conflist")
            path = wanted.configurations / "10-net.conflist"
            await until(lambda: installer.installed and types(path)[-1] == TYPE)
            (wanted.binaries / TYPE).unlink()
            await until((wanted.binaries / TYPE).exists)
            for number in range(5):
                # In place, as an editor writes.
                put(wanted, "10-net.conflist", {**LIST, "number": number})
                await until(lambda number=number: installer.rewrites >= number + 2 and types(path)[-1] == TYPE)
            assert "another program rewrites" in caplog.text
        finally:
            running.cancel()
            await asyncio.wait([running])

    caplog.set_level("INFO")
    asyncio.run(main())


def test_facts_say_what_the_runtime_takes_and_what_cilium_set_aside(wanted: Installation) -> None:
    assert facts(wanted) == {"taken": None, "plugins": [], "program": False, "setAside": []}
    put(wanted, "10-net.conflist", LIST)
    put(wanted, "20-other.conflist.cilium_bak", LIST)
    install(wanted)
    found = facts(wanted)
    assert found["plugins"] == ["bridge", "portmap", TYPE]
    assert (found["taken"], found["program"]) == ("10-net.conflist", True)
    assert found["setAside"] == ["20-other.conflist.cilium_bak"]
    put(wanted, "10-net.conflist", {"name": "n", "plugins": [{"type": TYPE}]})
    assert facts(wanted)["plugins"] == [TYPE]
    assert "error" in facts(replace(wanted, configurations=wanted.binaries / "none"))


@pytest.mark.parametrize("renamed", [f"{OWNED}.cilium_bak", "../away"])
def test_file_that_is_renamed_away_is_written_again(
    wanted: Installation, renamed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = replace(wanted, owned=True)
    put(wanted, "10-net.conflist", LIST)
    checks = 0

    def counted(of: Installation) -> list[str]:
        nonlocal checks
        checks += 1
        return install(of)

    monkeypatch.setattr(installer_module, "install", counted)

    async def main() -> None:
        installer = Installer(wanted)
        running = asyncio.get_running_loop().create_task(installer.run())
        try:
            async with asyncio.timeout(WAIT_S):
                # The second check was caused by the files of the first one. Nothing else would cause a third.
                while checks < 2:
                    await asyncio.sleep(0.01)
                (wanted.configurations / OWNED).rename(wanted.configurations / renamed)
                while not installer.rewrites:
                    await asyncio.sleep(0.01)
            assert taken_by_runtime(wanted.configurations) == wanted.configurations / OWNED
        finally:
            running.cancel()
            await asyncio.wait([running])

    asyncio.run(main())
