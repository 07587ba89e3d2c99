"""The pages below ``/ui``: their headers, which requests they refuse, and the stream of events."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files

import pytest

from tests.ztunnel.proxy.ui.values import FACTS, seen
from xds.model.address import SocketAddress
from ztunnel.proxy.ui.pages import MOST_FOLLOWERS, LivePages, is_below
from ztunnel.proxy.ui.seen import Seen
from ztunnel.proxy.ui.setting import is_on, page_setting
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.http.page import Page, PageRequest, Repeated
from ztunnel.runtime.http.server import PageServer

LIMIT_S = 20.0
SCRIPTS = sorted(
    each.name for each in (files("ztunnel.proxy.ui") / "assets").iterdir() if each.name.endswith(".js")
)
#: Of all files of the page together.
MOST_BYTES = 200_000


async def see() -> Seen:
    return seen()


def asked(path: str, *, method: str = "GET", host: str = "127.0.0.1:15000", fetch_site: str = "") -> Page:
    async def main() -> Page:
        page = LivePages(see, SystemClock()).answer(
            PageRequest(method=method, path=path, host=host, fetch_site=fetch_site)
        )
        return page if isinstance(page, Page) else await page

    return asyncio.run(main())


def body(page: Page) -> str:
    return b"".join(piece if isinstance(piece, bytes) else str(piece).encode() for piece in page.body).decode()


# What is served


@pytest.mark.parametrize(
    ("path", "content_type"),
    [
        ("/ui", "text/html; charset=UTF-8"),
        ("/ui/", "text/html; charset=UTF-8"),
        *((f"/ui/{name}", "text/javascript; charset=UTF-8") for name in SCRIPTS),
        ("/ui/style.css", "text/css; charset=UTF-8"),
        ("/ui/icon.svg", "image/svg+xml"),
        ("/ui/data", "application/json"),
        ("/ui/events", "text/event-stream"),
    ],
)
def test_every_path_has_its_type_and_a_strict_policy(path: str, content_type: str) -> None:
    page = asked(path)
    assert (page.status, page.content_type) == (200, content_type)
    headers = dict(page.headers)
    policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == "same-origin"


def test_the_page_is_small_and_needs_nothing_from_elsewhere() -> None:
    assets = list((files("ztunnel.proxy.ui") / "assets").iterdir())
    assert sum(len(each.read_bytes()) for each in assets) < MOST_BYTES
    texts = {each.name: each.read_text() for each in assets}
    for name, text in texts.items():
        addresses = set(re.findall(r"https?://[^\s\"']+", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, name
    linked = set(re.findall(r"(?:src|href)=\"(/[^\"]*)\"", texts["index.html"]))
    assert linked == {"/ui/app.js", "/ui/style.css", "/ui/icon.svg"}
    imported = {name for each in SCRIPTS for name in re.findall(r" from \"\./(\S+)\";", texts[each])}
    assert {"app.js", *imported} == set(SCRIPTS)
    # The policy forbids both, so that a browser would not run them: no inline script, style or handler.
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon[a-z]+=", texts["index.html"])


def test_no_script_parses_what_the_mesh_says() -> None:
    for name in SCRIPTS:
        text = (files("ztunnel.proxy.ui") / "assets" / name).read_text()
        found = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", text)
        assert not found, name


def test_data_is_one_event() -> None:
    shown = json.loads(body(asked("/ui/data")))
    assert shown["facts"]["node"] == FACTS.node
    assert shown["connections"] == {"shown": [], "left_out": 0}


# What is refused


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:15000", "127.0.0.1.evil.example", "", "[::1", "a b"]
)
@pytest.mark.parametrize("path", ["/ui", "/ui/events", "/ui/data"])
def test_a_host_that_another_site_could_have_is_refused(host: str, path: str) -> None:
    page = asked(path, host=host)
    assert page.status == 403
    assert page.rest is None


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.0.0.1:15000", "[::1]:15000", "localhost:1", "LOCALHOST", "10.1.2.3"]
)
def test_addresses_and_localhost_are_answered(host: str) -> None:
    assert asked("/ui", host=host).status == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/ui", "/ui/data", "/ui/events", "/ui/app.js"])
def test_nothing_takes_another_method(method: str, path: str) -> None:
    assert asked(path, method=method).status == 405


@pytest.mark.parametrize("path", ["/ui", "/ui/data", "/ui/events", "/ui/app.js"])
def test_head_is_answered_and_follows_nothing(path: str) -> None:
    page = asked(path, method="HEAD")
    assert page.status == 200
    assert page.rest is None


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_sites_get_no_data(site: str) -> None:
    for path in ("/ui/data", "/ui/events"):
        assert asked(path, fetch_site=site).status == 403
    assert asked("/ui/data", fetch_site="same-origin").status == 200


def test_unknown_paths_are_not_found() -> None:
    assert asked("/ui/../config_dump").status == 404
    assert [is_below(path) for path in ("/ui", "/ui/x", "/uix", "/")] == [True, True, False, False]


@pytest.mark.parametrize(
    ("text", "loopback", "elsewhere"), [("auto", True, False), ("true", True, True), ("false", False, False)]
)
def test_beyond_loopback_a_setting_asks_for_it(text: str, loopback: bool, elsewhere: bool) -> None:
    setting = page_setting(text)
    assert [is_on(setting, host) for host in ("127.0.0.1", "::1", "::ffff:127.0.0.1")] == [loopback] * 3
    assert [is_on(setting, host) for host in ("0.0.0.0", "10.0.0.1", "::")] == [elsewhere] * 3


@pytest.mark.parametrize("text", ["", "yes", "True", "loopback"])
def test_other_settings_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be true, false or auto"):
        page_setting(text)


# The stream


class Follower:
    """Reads events of a server, over a real socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def open(cls, port: int, path: str = "/ui/events") -> "Follower":
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n".encode())
        return cls(reader, writer)

    async def status(self) -> int:
        return int((await self.reader.readuntil(b"\r\n\r\n")).split(b" ")[1])

    async def event(self) -> dict[str, object]:
        while True:
            line = await self.reader.readline()
            assert line, "the stream has ended"
            if line.startswith(b"data: "):
                found = json.loads(line.removeprefix(b"data: "))
                assert isinstance(found, dict)
                return found

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


def streaming(use: Callable[[LivePages, int], Awaitable[None]], pages: Callable[[], LivePages]) -> None:
    async def main() -> None:
        live = pages()
        async with asyncio.timeout(LIMIT_S):
            async with PageServer("test", SocketAddress("127.0.0.1", 0), live.answer, SystemClock()) as server:
                await use(live, server.address.port)
        assert live.followers == 0

    asyncio.run(main())


def test_events_follow_each_other_and_stop_when_the_last_follower_leaves() -> None:
    calls: list[str] = []

    async def counting() -> Seen:
        calls.append("seen")
        return seen()

    async def use(live: LivePages, port: int) -> None:
        one = await Follower.open(port)
        assert await one.status() == 200
        first, second = await one.event(), await one.event()
        assert first["time_s"] < second["time_s"]  # type: ignore[operator]
        assert calls[0] == "began"
        await one.close()
        while live.followers:
            await asyncio.sleep(0.01)
        assert calls[-1] == "ended"
        number = calls.count("seen")
        two = await Follower.open(port)
        await two.event()
        await two.close()
        while live.followers:
            await asyncio.sleep(0.01)
        assert calls.count("seen") > number
        assert (calls.count("began"), calls.count("ended")) == (2, 2)

    streaming(
        use,
        lambda: LivePages(
            counting,
            SystemClock(),
            began=lambda: calls.append("began"),
            ended=lambda: calls.append("ended"),
            interval_s=0.02,
        ),
    )


def test_followers_are_limited_and_share_an_event() -> None:
    made = 0

    async def counting() -> Seen:
        nonlocal made
        made += 1
        return seen()

    async def use(live: LivePages, port: int) -> None:
        followers = [await Follower.open(port) for _ in range(MOST_FOLLOWERS)]
        for follower in followers:
            assert await follower.status() == 200
            await follower.event()
        assert made == 1
        one_more = await Follower.open(port)
        assert await one_more.status() == 503
        await followers[0].close()
        while live.followers == MOST_FOLLOWERS:
            await asyncio.sleep(0.01)
        another = await Follower.open(port)
        assert await another.status() == 200
        for follower in (*followers[1:], one_more, another):
            await follower.close()

    streaming(use, lambda: LivePages(counting, SystemClock(), interval_s=60.0))


def test_a_server_that_ends_does_not_wait_for_followers() -> None:
    async def main() -> None:
        live = LivePages(see, SystemClock(), interval_s=3600.0)
        async with asyncio.timeout(LIMIT_S):
            async with PageServer("test", SocketAddress("127.0.0.1", 0), live.answer, SystemClock()) as server:
                follower = await Follower.open(server.address.port)
                await follower.event()
            assert b"data: " not in await follower.reader.read()  # to its end
            await follower.close()
        assert live.followers == 0

    asyncio.run(main())


def test_a_failure_ends_the_stream_and_not_the_server(caplog: pytest.LogCaptureFixture) -> None:
    async def broken() -> Seen:
        raise RuntimeError("boom")

    async def use(live: LivePages, port: int) -> None:
        follower = await Follower.open(port)
        assert await follower.status() == 200
        await follower.reader.read()  # to its end
        await follower.close()
        again = await Follower.open(port, "/ui")
        assert await again.status() == 200
        await again.close()
        assert "boom" in caplog.text

    streaming(use, lambda: LivePages(broken, SystemClock()))


def test_events_that_take_long_come_more_rarely() -> None:
    now_s = 100.0

    class Slow:
        def monotonic(self) -> float:
            return now_s

        def wall(self) -> float:
            return now_s

    async def slowly() -> Seen:
        nonlocal now_s
        now_s += 0.1
        return seen()

    async def main() -> list[float]:
        live = LivePages(slowly, Slow(), interval_s=2.0)
        page = live.answer(PageRequest(method="GET", path="/ui/events", host="localhost"))
        assert isinstance(page, Page)
        assert isinstance(page.rest, Repeated)
        before = page.rest.every_s()
        assert (await page.rest.make()).startswith("id: 1\n")
        return [before, round(page.rest.every_s(), 6)]

    assert asyncio.run(main()) == [2.0, 5.0]


def test_only_one_event_is_made_at_a_time() -> None:
    now_s = 100.0
    making = most = 0

    class Steps:
        def monotonic(self) -> float:
            return now_s

        def wall(self) -> float:
            return now_s

    async def main() -> list[str]:
        nonlocal now_s
        go = asyncio.Event()

        async def slowly() -> Seen:
            nonlocal making, most
            making += 1
            most = max(most, making)
            await go.wait()
            making -= 1
            return seen()

        live = LivePages(slowly, Steps(), interval_s=2.0)
        pages = [live.answer(PageRequest(method="GET", path="/ui/events", host="localhost")) for _ in range(2)]
        rests = [page.rest for page in pages if isinstance(page, Page) and isinstance(page.rest, Repeated)]
        first = asyncio.get_running_loop().create_task(_text(rests[0].make()))
        await asyncio.sleep(0)
        now_s += 10.0  # longer than the interval: a big mesh, or a busy node
        second = asyncio.get_running_loop().create_task(_text(rests[1].make()))
        await asyncio.sleep(0)
        go.set()
        return [(await each)[:5] for each in (first, second)]

    assert asyncio.run(main()) == ["id: 1", ": soo"]
    assert most == 1


async def _text(made: Awaitable[str]) -> str:
    return await made
