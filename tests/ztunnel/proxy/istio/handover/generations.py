"""Two generations of one node's proxy in this process, which meet in a folder."""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path

import uvloop

from tests.hbone import virtual_time
from tests.ztunnel.proxy.istio.inbound_case import NEAR, POD
from tests.ztunnel.proxy.istio.pods import ELSEWHERE, SERVER, Cluster, End, cluster, workload
from ztunnel.proxy.dataplane.handover.service import Handover
from ztunnel.proxy.istio.handover.kinds import kinds_of
from ztunnel.proxy.istio.path.pod import PodProxy

OUTSIDE = "127.0.7.7"
REMOTE_HOST = "127.0.6.1"
FAR = workload("far", REMOTE_HOST, node=ELSEWHERE)


class Generations:
    """The proxy that is replaced, and its successor, with the applications of both.

    Attributes:
        old, new: each with its own tables, metrics and log.
        before, after: their sides of the hand-over.
    """

    def __init__(self, folder: Path, old: Cluster, new: Cluster) -> None:
        self.old = old
        self.new = new
        self.folder = folder
        self.taken_now: list[str] = []
        new.wire = old.wire
        self.before = self.service(old, "before")
        self.after = self.service(new, "after")

    def service(self, of: Cluster, version: str, *, replace: bool = False) -> Handover:
        def pods() -> list[PodProxy]:
            return list(of.pods.values())

        kinds, clock = kinds_of(pods), of.node.clock

        def take_now() -> None:
            self.taken_now.append(version)

        return Handover(
            self.folder, kinds, of.node.poller, clock, version=version, replace=replace, on_take_now=take_now
        )

    async def meet(self) -> None:
        """Have the old one listen, and the new one wait for its connections."""
        self.before.begin()
        await self.old.until(lambda: self.before.status()["listening"])
        self.after.begin()
        await self.old.until(lambda: self.after.status()["predecessor"])

    async def close(self) -> None:
        await self.after.close()
        await self.before.close()


@contextlib.asynccontextmanager
async def generations(folder: Path, env: Mapping[str, str] | None = None) -> AsyncIterator[Generations]:
    """Both, with the pods ``client`` and ``server`` on their node, and an application behind the server."""
    for name in ("old", "new"):
        (folder / name).mkdir()
    async with cluster(folder / "old", env) as old, cluster(folder / "new", env) as new:
        made = Generations(folder, old, new)
        for each in (old, new):
            each.mesh.apply([FAR])
            await each.start(POD, NEAR)
        old.application(SERVER)
        old.application(OUTSIDE)
        try:
            yield made
        finally:
            await made.close()


def play(
    folder: Path,
    body: Callable[[Generations], Awaitable[None]],
    env: Mapping[str, str] | None = None,
    loop: str = "virtual",
) -> None:
    """Run ``body`` with two generations."""

    async def main() -> None:
        async with generations(folder, env) as made:
            await body(made)

    if loop == "uvloop":
        uvloop.run(main())
    else:
        virtual_time.run(main)


async def echoed(end: End, text: bytes = b"hello") -> None:
    await end.send(text)
    assert await end.read(len(text)) == text
