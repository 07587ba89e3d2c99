"""The lab itself: quick to start, both IP versions, and nothing left behind on every way to end."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.lab import Lab, sweep
from tests.netns.toys import WAIT_S, app, ask
from tests.programs import needed
from tproxy.aio import netns
from tproxy.aio.netns import Netns
from tproxy.aio.sockets import connect
from tproxy.aio.sysctl_memory import SysctlMemory, cookie_of
from tproxy.errors import ConnectTimedOut, KernelRefused, UnknownNamespace
from tproxy.resources import SysctlKey

pytestmark = [pytest.mark.netns, pytest.mark.timeout(60)]
PLAN = {"w1": ["productpage", "ratings", "details"], "w2": ["reviews-v1", "reviews-v2", "a-rather-long-name"]}
ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys, time
from deploy.lab import Lab, become_root_of_own_namespaces
become_root_of_own_namespaces()
with Lab({"w1": ["a"]}) as lab:
    child = lab.pod("a").popen(["sleep", "600"])
    print(lab.prefix, child.pid, flush=True)
    time.sleep(600)
"""


def ours(prefix: str) -> list[str]:
    return [name for name in netns.names() if name.startswith(prefix)]


def test_two_nodes_and_six_pods_stand_and_leave_nothing() -> None:
    with Lab(PLAN) as lab:
        assert len(ours(lab.prefix)) == 1 + 2 + 2 + 6
        prefix = lab.prefix
    assert ours(prefix) == []


@pytest.mark.parametrize("version", [4, 6])
def test_every_place_reaches_every_pod(version: int) -> None:
    async def main() -> None:
        with Lab({"w1": ["a"], "w2": ["b"], "w3": ["c"]}) as lab:
            places = [lab.pod(name) for name in "abc"]
            others = [worker.ztunnel for worker in lab.workers.values()]
            for target in places:
                async with app(target):
                    for source in places + others:
                        line = await ask(source, target.address(version))
                        assert line == f"app {target.name} peer {source.address(version)}"

    asyncio.run(main())


def test_unplugged_nodes_meet_by_whoever_passes_their_frames() -> None:
    async def main() -> None:
        with Lab({"w1": ["a"], "w2": ["b", "c"]}) as lab:
            target = lab.pod("b")
            async with app(target):
                with lab.unplugged() as (fabric, ports):
                    assert ports == ["port1", "port2"]
                    with fabric.entered():
                        assert {name for _, name in socket.if_nameindex()} >= set(ports)
                    with pytest.raises(ConnectTimedOut):
                        await connect((target.ipv4, 8080), netns=lab.pod("a").netns, timeout_s=0.2)
                    assert await ask(lab.pod("c"), target.ipv4)  # of the same node
                assert await ask(lab.pod("a"), target.ipv4)

    asyncio.run(main())


def test_nothing_remains_after_an_exception() -> None:
    lab = Lab({"w1": ["a"]})
    with contextlib.suppress(ZeroDivisionError), lab:
        child = lab.pod("a").popen(["sleep", "600"])
        raise ZeroDivisionError
    assert ours(lab.prefix) == []
    assert child.returncode == -signal.SIGTERM


def test_two_labs_in_one_process_do_not_meet() -> None:
    with Lab({"w1": ["a"]}) as one, Lab({"w1": ["a"]}) as two:
        assert one.prefix != two.prefix
        assert one.pod("a").netns.inode != two.pod("a").netns.inode


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_nothing_remains_after_a_signal(number: signal.Signals) -> None:
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    with program:
        assert program.stdout is not None
        prefix, child = program.stdout.readline().split()
        assert ours(prefix)
        program.send_signal(number)
        program.communicate(timeout=WAIT_S)
    assert ours(prefix) == []
    assert not Path(f"/proc/{child}").exists()


def test_what_a_killed_process_left_is_swept_up() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, cwd=ROOT) as program:
        assert program.stdout is not None
        prefix, child = program.stdout.readline().split()
        program.kill()
        program.wait(WAIT_S)
        os.kill(int(child), signal.SIGKILL)
    assert ours(prefix)
    sweep()
    assert ours(prefix) == []


def test_names_do_not_pile_up_mounts() -> None:
    """/run/netns is bound to itself once; each further time would double every mount below it."""

    def mounts_of_own() -> int:
        with Lab({"w1": ["a"]}) as lab:  # only this lab's own, because other labs can come and go meanwhile
            return Path("/proc/self/mountinfo").read_text().count(lab.prefix)

    first = mounts_of_own()
    assert first
    assert mounts_of_own() == first


def test_an_unprivileged_user_gets_a_lab_of_their_own() -> None:
    limit = Path("/proc/sys/user/max_user_namespaces")
    if int(limit.read_text()) == 0:
        pytest.skip("NOT TESTED: needs user namespaces")
    program = PROGRAM.replace("time.sleep(600)", "print(lab.pod('a').run(__import__('os').getuid), flush=True)")
    # CAP_SETFCAP stays because only its holders may map user 0, which is who runs this.
    setpriv = [needed("setpriv"), "--bounding-set=-all,+setfcap", "--inh-caps=-all"]
    done = subprocess.run(
        [*setpriv, sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "0"
    assert ours(done.stdout.split()[0]) == []


def where_am_i(path: str) -> None:
    Path(path).write_text(os.readlink("/proc/self/ns/net"))


def test_programs_functions_and_sockets_run_in_the_pod(tmp_path: Path) -> None:
    with Lab({"w1": ["a"]}) as lab:
        pod = lab.pod("a")
        expected = f"net:[{pod.netns.inode}]"
        program = pod.popen(["readlink", "/proc/self/ns/net"], stdout=subprocess.PIPE, text=True)
        assert program.communicate(timeout=WAIT_S)[0].strip() == expected
        process = pod.process(where_am_i, str(tmp_path / "where"))
        process.join(20)
        assert (tmp_path / "where").read_text() == expected
        assert pod.run(os.readlink, "/proc/thread-self/ns/net") == expected
        with pod.socket() as sock:
            sock.bind((str(pod.ipv4), 0))
        assert os.readlink("/proc/thread-self/ns/net") != expected


def test_a_namespace_is_found_by_name_path_and_process() -> None:
    with Lab({"w1": ["a"]}) as lab:
        pod = lab.pod("a")
        sleeper = pod.popen(["sleep", "600"])
        for where in (
            f"{lab.prefix}a",
            f"/run/netns/{lab.prefix}a",
            Path(f"/proc/{sleeper.pid}/ns/net"),
            str(sleeper.pid),
            sleeper.pid,
        ):
            with Netns.open(where) as found:
                assert found.inode == pod.netns.inode
    with pytest.raises(UnknownNamespace, match="no-such-namespace"):
        Netns.open("no-such-namespace")


def test_a_name_that_is_taken_is_refused() -> None:
    name = f"tp-{os.getpid()}"
    with Netns.create(name) as first:
        try:
            with pytest.raises(KernelRefused, match=name):
                Netns.create(name)
            with Netns.open(name) as again:
                assert again.inode == first.inode
        finally:
            first.remove_name()
    assert name not in netns.names()


def test_entered_comes_back_after_an_exception() -> None:
    home = os.readlink("/proc/thread-self/ns/net")
    with Netns.create() as space:
        with contextlib.suppress(ZeroDivisionError), space.entered():
            assert os.readlink("/proc/thread-self/ns/net") != home
            raise ZeroDivisionError
        assert os.readlink("/proc/thread-self/ns/net") == home
        with space.entered():
            sock = socket.socket()
        with sock, pytest.raises(OSError, match="unreachable"):
            sock.connect(("127.0.0.1", 1))


def test_what_is_remembered_of_its_namespaces_goes_with_them() -> None:
    with Lab({"w1": ["a"]}) as lab:
        place = lab.pod("a").netns
        memory = SysctlMemory(cookie_of(place))
        memory.save({SysctlKey("ipv4", "all", "rp_filter"): "1"})
        path = memory._path
        assert path is not None
        assert path.exists()
    assert not path.exists()
