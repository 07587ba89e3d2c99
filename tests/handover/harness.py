"""Starts the programs of ``tests.handover.programs`` in pods, and a PostgreSQL server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pwd
import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from deploy.lab import Place
from tests.handover.programs import GRPC_PORT, POSTGRES_PORT, WEBSOCKET_PORT
from tests.handover.traffic import Outcome
from tests.netns.istio import ROOT, eventually
from tproxy.aio.sockets import connect
from tproxy.errors import TproxyError

_PROGRAM = (sys.executable, "-m", "tests.handover.programs")


def missing_of_postgres() -> str:
    """Return the programs that a PostgreSQL server and client need and this machine lacks. Empty if there are
    none.
    """
    wanted = [name for name in ("initdb", "postgres", "psql", "setpriv") if shutil.which(name) is None]
    users = [] if any(user.pw_name == "postgres" for user in pwd.getpwall()) else ["the user postgres"]
    return ", ".join(wanted + users)


async def _listening(place: Place, port: int, process: subprocess.Popen[bytes]) -> None:
    async def reached() -> bool:
        try:
            (await connect(("127.0.0.1", port), netns=place.netns)).close()
        except TproxyError:
            return False
        return True

    async with asyncio.timeout(60.0):
        while not await reached():
            assert process.poll() is None, f"{process.args} ended with {process.returncode}"
            await asyncio.sleep(0.05)


#: By a program: Popen's ``user`` makes it fork, and grpcio's handlers of fork(2) can crash the child.
_AS_POSTGRES = ("setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups")


@contextlib.contextmanager
def _database() -> Iterator[Path]:
    """A new database's folder, which belongs to the user postgres."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        shutil.chown(folder, "postgres", "postgres")
        initdb = ("initdb", "--no-sync", "-A", "trust", "-D", f"{folder}/data")
        subprocess.run([*_AS_POSTGRES, *initdb], check=True, stdout=subprocess.DEVNULL, cwd="/")
        with (folder / "data/pg_hba.conf").open("a") as file:
            file.write("host all all all trust\n")
        yield folder


@contextlib.asynccontextmanager
async def postgres(place: Place) -> AsyncIterator[None]:
    """A PostgreSQL server in a pod."""
    with _database() as folder, (folder / "log").open("wb") as log:
        options = ("-p", str(POSTGRES_PORT), "-c", "listen_addresses=*", "-c", "fsync=off", "-k", str(folder))
        process = place.popen(
            [*_AS_POSTGRES, "postgres", "-D", f"{folder}/data", *options],
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
        try:
            try:
                await _listening(place, POSTGRES_PORT, process)
            except (AssertionError, TimeoutError) as error:
                raise AssertionError(f"PostgreSQL: {(folder / 'log').read_text()}") from error
            yield
        finally:
            process.terminate()
            await asyncio.to_thread(process.wait)


async def serve(place: Place) -> None:
    """Answer gRPC and websockets in a pod, until the lab ends."""
    process = place.popen([*_PROGRAM, "serve"], cwd=ROOT)
    for port in (GRPC_PORT, WEBSOCKET_PORT):
        await _listening(place, port, process)


@contextlib.asynccontextmanager
async def using(place: Place, host: object, count: int, sessions: int, outcome: Outcome) -> AsyncIterator[None]:
    """Hold connections of each kind within the block. Afterwards the outcome has their results."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = place.popen(
        [*_PROGRAM, "use", str(host), str(count), str(sessions)],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    first = asyncio.get_running_loop().run_in_executor(None, process.stdout.readline)
    await eventually(first.done, "connections of grpcio, wsproto and psql open", 60.0)
    assert first.result() == "open\n", first.result()
    yield
    text, _ = await asyncio.to_thread(process.communicate)
    seen = json.loads(text or "{}")
    for kind, number in seen.get("done", {}).items():
        outcome.done[kind] = outcome.done.get(kind, 0) + number
    outcome.failures += seen.get("failures", [f"the programs in {place.name} ended with {process.returncode}"])
