"""Watched files: when they are read, which contents are refused, and the counters."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import uvloop
from google.protobuf import text_format

from xds.aio.file import FileSource
from xds.errors import ConfigError
from xds.proto import registry
from xds.proto.envoy.config.cluster.v3.cluster_pb2 import Cluster
from xds.proto.envoy.service.discovery.v3.discovery_pb2 import DiscoveryResponse
from xds.protocol.resource import Update, UpdateRejected
from xds.protocol.types import CDS, EDS, SDS

REFERENCE = Path(__file__).parents[2] / "data" / "reference"


def run(main: Callable[[], Coroutine[Any, Any, None]], loop: str = "asyncio") -> None:
    async def limited() -> None:
        async with asyncio.timeout(20):
            await main()

    (uvloop.run if loop == "uvloop" else asyncio.run)(limited())


class Receiver:
    def __init__(self) -> None:
        self.updates: asyncio.Queue[Update] = asyncio.Queue()
        self.refuse = ""

    async def __call__(self, update: Update) -> None:
        self.updates.put_nowait(update)
        if self.refuse:
            raise UpdateRejected(self.refuse)

    async def names(self) -> list[str]:
        return [resource.name for resource in (await self.updates.get()).resources]


def clusters(*names: str, version: str = "1") -> str:
    lines = [f'- {{"@type": {CDS}, name: {name}}}' for name in names]
    return "\n".join([f'version_info: "{version}"', "resources:", *lines])


def rename_onto(path: Path, text: str) -> None:
    new = path.with_name("new")
    new.write_text(text)
    new.rename(path)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.002)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_read_at_first_and_after_a_rename_onto_the_path(tmp_path: Path, loop: str) -> None:
    path = tmp_path / "cds.yaml"
    path.write_text(clusters("a"))

    async def main() -> None:
        receive = Receiver()
        async with FileSource() as files:
            subscription = files.at(str(path)).subscribe(CDS, None, receive)
            update = await receive.updates.get()
            assert update.complete
            assert update.version == "1"
            rename_onto(path, clusters("b", version="2"))
            assert await receive.names() == ["b"]
            assert (subscription.stats.update_attempt, subscription.stats.update_success) == (2, 2)
            assert subscription.stats.version_text == "2"

    run(main, loop)


def test_in_place_writes_and_other_files_change_nothing(tmp_path: Path) -> None:
    path = tmp_path / "cds.yaml"
    path.write_text(clusters("a"))

    async def main() -> None:
        receive = Receiver()
        async with FileSource() as files:
            subscription = files.at(str(path)).subscribe(CDS, None, receive)
            await receive.names()
            path.write_text(clusters("b"))
            rename_onto(tmp_path / "other.yaml", clusters("c"))
            # A rename that is seen proves that the events before it were seen and ignored.
            rename_onto(path, clusters("d"))
            assert await receive.names() == ["d"]
            assert subscription.stats.update_attempt == 2

    run(main)


def test_watched_directory_reloads_on_the_swap_of_a_volume(tmp_path: Path) -> None:
    for generation, name in (("..1", "a"), ("..2", "b")):
        (tmp_path / generation).mkdir()
        (tmp_path / generation / "cds.yaml").write_text(clusters(name))
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "cds.yaml").symlink_to("..data/cds.yaml")

    async def main() -> None:
        receive = Receiver()
        async with FileSource() as files:
            files.at(str(tmp_path / "cds.yaml"), str(tmp_path)).subscribe(CDS, None, receive)
            assert await receive.names() == ["a"]
            (tmp_path / "..data_tmp").symlink_to("..2")
            (tmp_path / "..data_tmp").rename(tmp_path / "..data")
            assert await receive.names() == ["b"]

    run(main)


def test_a_wrong_file_keeps_the_old_state_and_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "cds.yaml"
    path.write_text(clusters("a"))

    async def main() -> None:
        receive = Receiver()
        async with FileSource() as files:
            stats = files.at(str(path)).subscribe(CDS, None, receive).stats
            await receive.names()
            rename_onto(path, "resources: {")
            await until(lambda: stats.update_failure == 1)
            rename_onto(path, clusters("a", "a", version="3"))
            await until(lambda: stats.update_rejected == 1)
            receive.refuse = "no"
            rename_onto(path, clusters("b", version="4"))
            await until(lambda: stats.update_rejected == 2)
            assert (stats.version_text, stats.update_success, stats.update_attempt) == ("1", 1, 4)

    run(main)
    assert "duplicate name a" in caplog.text


def test_a_file_that_is_missing_ends_the_initial_wait_and_is_read_when_it_comes(tmp_path: Path) -> None:
    path = tmp_path / "cds.yaml"

    async def main() -> None:
        receive, told = Receiver(), asyncio.Event()
        async with FileSource() as files:
            source = files.at(str(path))
            source.subscribe(CDS, None, receive, initial_fetch_timeout_s=0, on_initial_timeout=told.set)
            await told.wait()
            rename_onto(path, clusters("a"))
            assert await receive.names() == ["a"]

    run(main)


def test_a_missing_directory_is_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        async with FileSource() as files:
            with pytest.raises(ConfigError, match="cannot watch"):
                files.at(str(tmp_path / "no" / "cds.yaml")).subscribe(CDS, None, Receiver())

    run(main)


def test_a_secret_file_holds_exactly_the_secret_asked_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "sds.yaml"

    def secrets(*names: str) -> str:
        return "\n".join(["resources:", *(f'- {{"@type": {SDS}, name: {name}}}' for name in names)])

    path.write_text(secrets("X", "B", "C"))

    async def main() -> None:
        receive = Receiver()
        async with FileSource() as files:
            stats = files.at(str(path)).subscribe(SDS, ["X"], receive).stats
            await until(lambda: stats.update_rejected == 1)
            rename_onto(path, secrets("B"))
            await until(lambda: stats.update_rejected == 2)
            rename_onto(path, secrets("X"))
            assert await receive.names() == ["X"]

    run(main)
    assert (
        "Unexpected SDS secrets length for X, number of added resources 3, number of removed resources 0. "
        "Expected sum is 1" in caplog.text
    )


def test_many_subscriptions_share_a_file_and_get_their_own(tmp_path: Path) -> None:
    path = tmp_path / "eds.yaml"
    path.write_text("\n".join(["resources:", *(f'- {{"@type": {EDS}, cluster_name: {name}}}' for name in "abc")]))

    async def main() -> None:
        one, two = Receiver(), Receiver()
        async with FileSource() as files:
            first = files.at(str(path)).subscribe(EDS, ["a"], one)
            second = files.at(f"{tmp_path}/./eds.yaml").subscribe(EDS, ["b"], two)
            assert (await one.names(), await two.names()) == (["a"], ["b"])
            first.set_names(["c"])
            assert await one.names() == ["c"]
            first.close()
            second.close()
            assert files._files == {}

    run(main)


@pytest.mark.parametrize("suffix", ["yaml", "json", "pb", "pb_text", "conf"])
def test_the_file_extension_selects_json_or_yaml(tmp_path: Path, suffix: str) -> None:
    response = DiscoveryResponse(version_info="1", resources=[registry.pack(Cluster(name="a"))])
    content = {
        "yaml": clusters("a").encode(),
        "conf": clusters("a").encode(),
        "json": f'{{"versionInfo": "1", "resources": [{{"@type": "{CDS}", "name": "a"}}]}}'.encode(),
        "pb": response.SerializeToString(),
        "pb_text": text_format.MessageToString(response).encode(),
    }
    path = tmp_path / f"cds.{suffix}"
    path.write_bytes(content[suffix])

    async def main() -> None:
        receive = Receiver()
        async with FileSource() as files:
            files.at(str(path)).subscribe(CDS, None, receive)
            assert await receive.names() == ["a"]

    run(main)


@pytest.mark.parametrize(
    ("name", "data"), [("x.pb", b"\xff"), ("x.pb_text", b"a: b"), ("x.yaml", b"\xff"), ("x.json", b"[")]
)
def test_content_that_is_not_what_the_name_promises(name: str, data: bytes) -> None:
    from xds.protocol.file import parse_file

    with pytest.raises(ConfigError):
        parse_file(name, data)


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ("colour: red", "resources[0].colour: no such field"),
        ("wait_for_warm_on_init: false", "resources[0].wait_for_warm_on_init: this proxy does not support"),
        ("waitForWarmOnInit: false", "resources[0].waitForWarmOnInit: this proxy does not support"),
    ],
)
def test_a_file_with_a_field_that_is_not_obeyed_is_refused(
    field: str, words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cds.yaml"
    path.write_text(clusters("a").replace("name: a", f"name: a, {field}"))
    counted: list[int] = []

    async def main() -> None:
        receive = Receiver()
        async with FileSource(on_unknown_fields=counted.append) as files:
            subscription = files.at(str(path)).subscribe(CDS, None, receive)
            async with asyncio.timeout(20):
                while not subscription.stats.update_failure:
                    await asyncio.sleep(0.01)
            assert subscription.stats.update_success == 0

    run(main)
    assert counted == [1]
    assert words in caplog.text


def test_the_reference_configuration_is_delivered() -> None:
    async def main() -> None:
        receive = Receiver()
        async with FileSource() as files:
            files.at(str(REFERENCE / "w2" / "cds.yaml")).subscribe(CDS, None, receive)
            names = await receive.names()
            assert len(names) == 9
            assert names[-1] == "BlackHoleCluster"

    run(main)


def test_a_bug_of_the_parser_leaves_the_last_good_file_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The group of the file's task would cancel the task that entered it, which is the whole proxy's."""

    async def main() -> None:
        path = tmp_path / "cds.yaml"
        path.write_text(clusters("first"))
        receiver = Receiver()
        async with FileSource() as files:
            files.at(str(path)).subscribe(CDS, None, receiver)
            assert await receiver.names() == ["first"]
            with monkeypatch.context() as patched:
                patched.setattr("xds.aio.file.parse_file", lambda path, data: 1 // 0)
                rename_onto(path, clusters("second"))
                await until(lambda: "configuration file not read" in caplog.text)
            rename_onto(path, clusters("third"))
            assert await receiver.names() == ["third"]

    run(main)
