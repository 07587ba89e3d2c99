"""``ztunnel netpol`` as a process beside other programs' tables: it is killed, repairs, and leaves no trace."""

import asyncio
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.commands import Ztunnel
from tests.generated import at_night
from tests.limits import WAIT_S
from tests.netns import netpol_scenarios as s
from tests.netns.dumps import everything, without_generation
from tests.netns.foreign import foreign_tables
from tests.netns.netpol_harness import Cluster, probes
from tests.programs import needed
from tproxy.aio.netlink import NETLINK_NETFILTER, NetlinkSocket
from tproxy.aio.table import BlockingTable
from tproxy.expressions import Family
from tproxy.operations import DeleteElements, FlushChain
from tproxy.render import nftables
from xds.model import calico as c
from xds.model.address import SocketAddress
from ztunnel.policy.calico.follower import Follower
from ztunnel.policy.calico.guard import Guard, connection
from ztunnel.policy.netpol import add_arguments
from ztunnel.policy.netpol.command import DENIED, DONE, FAILED
from ztunnel.policy.netpol.table_builder import TABLE
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.formats.go_yaml import dump, dump_all

pytestmark = [pytest.mark.netns, pytest.mark.timeout(120)]
RUNNING: list["subprocess.Popen[Any]"] = []
ROOT = Path(__file__).parents[2]
CALICO = "projectcalico.org/v3"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def clean(cluster: Cluster) -> Iterator[Cluster]:
    yield cluster
    for process in RUNNING:
        process.kill()
        process.wait()
        for output in (process.stdout, process.stderr):
            if output is not None:
                output.close()
    RUNNING.clear()
    for node in cluster.nodes:
        node.table.forget()
        node.table.apply(None)


def write(cluster: Cluster, folder: Path, step: s.Step, name: str = "all.yaml") -> None:
    text = dump_all(cluster.step(step).values())
    (folder / (name + ".new")).write_text(text)
    (folder / (name + ".new")).rename(folder / name)


def start(cluster: Cluster, folder: Path, *more: str, node: str = "w1") -> "subprocess.Popen[bytes]":
    command = ["netpol", "run", "--objects", str(folder), "--node", node, *more]
    readable, writable = os.pipe()
    try:
        process = cluster.lab.worker(node).place.popen(command, start=Ztunnel, stderr=writable)
    finally:
        os.close(writable)
    process.stderr = os.fdopen(readable, "rb")
    RUNNING.append(process)
    return process


def errors_of(process: "subprocess.Popen[bytes]") -> bytes:
    """Return what a process has written to its standard error output, once it has ended."""
    assert process.stderr is not None
    errors = process.stderr.read()
    process.wait(WAIT_S)
    return errors


def until(check: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def table(cluster: Cluster, node: str = "w1") -> Any:
    with contextlib.closing(BlockingTable(TABLE, cluster.lab.worker(node).place.netns)) as found:
        return found.read()


async def _ask(*words: str) -> tuple[int, str]:
    parser = ArgumentParser()
    add_arguments(parser.add_subparsers())
    args = parser.parse_args(["netpol", *words])
    out = io.StringIO()
    return await args.run(args, out, out), out.getvalue()


def ask(*words: str) -> tuple[int, str]:
    return asyncio.run(_ask(*words))


ONLY_B = s.Step({"x/p": s.ingress(s.A, s.sources(s.of_pods("b")))}, "+x/b>x/a:80 -y/a>x/a:80 -x/c>x/a:80")


def test_the_table_is_added_and_removed_beside_foreign_tables(clean: Cluster, tmp_path: Path) -> None:
    place = clean.lab.worker("w1").place
    foreign_tables(place.netns)
    before = without_generation(everything(place.netns))
    write(clean, tmp_path, ONLY_B)
    process = start(clean, tmp_path, "--once")
    assert process.wait(WAIT_S) == 0
    assert clean.wrong(probes(ONLY_B.probes)) == []
    assert ask("cleanup", "--netns", place.netns.name) == (DONE, "table removed\n")
    assert ask("cleanup", "--netns", place.netns.name) == (DONE, "nothing to remove\n")
    assert without_generation(everything(place.netns)) == before
    assert clean.wrong(probes("+y/a>x/a:80 +x/c>x/a:80")) == []


def test_edits_apply_and_a_restart_changes_nothing(clean: Cluster, tmp_path: Path) -> None:
    write(clean, tmp_path, s.Step({}, ""))
    process = start(clean, tmp_path)
    until(lambda: table(clean) is not None, "the first table")
    write(clean, tmp_path, ONLY_B)
    until(lambda: not clean.wrong(probes(ONLY_B.probes)[:1]) and "in-" in str(table(clean)), "the policy")
    assert clean.wrong(probes(ONLY_B.probes)) == []
    process.kill()
    process.wait(WAIT_S)
    # Killed, it leaves its last table in force.
    assert clean.wrong(probes(ONLY_B.probes)) == []
    before = everything(clean.lab.worker("w1").place.netns)
    assert start(clean, tmp_path, "--once").wait(WAIT_S) == 0
    after = everything(clean.lab.worker("w1").place.netns)
    assert after == before  # the generation of the ruleset included: it sent nothing


def judged(node: Follower, source: str, destination: str, namespace: str) -> bool:
    """Whether a proxy that follows lets a tunnel to port 80 begin, whose client is of a namespace."""
    ends = (SocketAddress(source, 40000), SocketAddress(destination, 80))
    flow = connection(*ends, f"spiffe://cluster.local/ns/{namespace}/sa/default", "")
    return Guard(lambda: node.evaluator, lambda: 0.0).check(c.Direction.INGRESS, flow).allowed


def test_proxies_are_told_the_same_policies(clean: Cluster, tmp_path: Path) -> None:
    path = f"{tmp_path}/policy.sock"
    objects = tmp_path / "objects"
    objects.mkdir()
    gateway = str(clean.lab.worker("w1").gateway(4))
    xa, xb, ya, zc = (clean.address(pod, 4) for pod in ("x/a", "x/b", "y/a", "z/c"))

    async def main() -> None:
        follower = Follower(f"unix:{path}", SystemClock(), connections_only=True)

        async def eventually(check: Callable[[], bool]) -> None:
            async with asyncio.timeout(WAIT_S):
                while not check():
                    await asyncio.sleep(0.01)

        async with asyncio.TaskGroup() as group:
            running = group.create_task(follower.run(), name="follower")
            # Before all objects have been read there is nothing that a proxy could take for the policies.
            (objects / "all.yaml").write_text("{")
            process = start(clean, objects, "--policy-sync", path, "--socket-mode", "600")
            await eventually(Path(path).exists)
            assert Path(path).stat().st_mode & 0o777 == 0o600
            assert not follower.evaluator.store.in_sync
            write(clean, objects, ONLY_B)
            await eventually(lambda: follower.in_sync)
            store = follower.evaluator.store
            assert {key.workload for key in store.endpoints} == {"x/a", "x/b", "x/c", "y/a"}
            assert store.ip_sets.holds(c.NODE_ADDRESSES, gateway)
            assert judged(follower, xb, xa, "x")
            assert not judged(follower, ya, xa, "y")
            assert not judged(
                follower, gateway, xa, "x"
            )  # of a tunnel the node's address is nobody's in particular
            assert not judged(follower, zc, xa, "z")
            write(clean, objects, s.Step({"x/p": s.ingress(s.A, s.sources(s.of_spaces("y")))}, ""))
            await eventually(lambda: judged(follower, ya, xa, "y"))
            assert not judged(follower, xb, xa, "x")
            process.kill()
            process.wait(WAIT_S)
            await eventually(lambda: not follower.in_sync)
            assert judged(follower, ya, xa, "y")
            assert not judged(follower, xb, xa, "x")
            # Changes made meanwhile are applied, and the socket left behind accepts nothing.
            write(clean, objects, ONLY_B)
            start(clean, objects, "--policy-sync", path)
            await eventually(lambda: judged(follower, xb, xa, "x"))
            assert not judged(follower, ya, xa, "y")
            running.cancel()

    asyncio.run(main())


def test_what_others_break_is_repaired(clean: Cluster, tmp_path: Path) -> None:
    write(clean, tmp_path, ONLY_B)
    start(clean, tmp_path)
    until(lambda: table(clean) is not None, "the first table")
    [element] = next(item for item in table(clean).sets if item.name == "ingress4").elements
    with NetlinkSocket(NETLINK_NETFILTER, clean.lab.worker("w1").place.netns) as nft:
        nft.batch(nftables.nft_batch([DeleteElements(Family.INET, TABLE, "ingress4", (element,))]))
        nft.batch(nftables.nft_batch([FlushChain(Family.INET, TABLE, "egress")]))

    def repaired() -> bool:
        found = table(clean)
        rules = {chain.name: chain.rules for chain in found.chains}
        sets = {item.name: item.elements for item in found.sets}
        return bool(rules["egress"]) and element in sets["ingress4"]

    until(repaired, "the repair")
    assert clean.wrong(probes(ONLY_B.probes)) == []


def test_two_controllers_on_a_node_agree(clean: Cluster, tmp_path: Path) -> None:
    write(clean, tmp_path, s.Step(s.ALL, ""))
    both = [start(clean, tmp_path), start(clean, tmp_path)]
    until(lambda: table(clean) is not None, "the first table")
    write(clean, tmp_path, ONLY_B)
    until(lambda: not clean.wrong(probes("+x/b>x/a:80")), "the second policy")
    assert clean.wrong(probes(ONLY_B.probes)) == []
    assert all(process.poll() is None for process in both)


def test_a_second_controller_that_is_behind_undoes_nothing_and_takes_over(clean: Cluster, tmp_path: Path) -> None:
    ahead, behind = tmp_path / "ahead", tmp_path / "behind"
    for folder, step in ((ahead, ONLY_B), (behind, s.Step({}, ""))):
        folder.mkdir()
        write(clean, folder, step)
    first = start(clean, ahead)
    until(lambda: table(clean) is not None, "the first table")
    second = start(clean, behind)
    assert second.stderr is not None
    while b"keeps table" not in (line := second.stderr.readline()):
        assert line
        assert b"table applied" not in line
    assert f"(pid {first.pid})".encode() in line
    assert clean.wrong(probes(ONLY_B.probes)) == []
    refused = start(clean, behind, "--once")
    errors = errors_of(refused)
    assert (refused.returncode, errors.count(b"keeps table")) == (FAILED, 1)
    first.kill()
    until(lambda: not clean.wrong(probes("+x/b>x/a:80 +y/a>x/a:80")), "the second one's table")


def test_a_pod_is_closed_from_its_first_packet_until_its_policies_are_there(
    clean: Cluster, tmp_path: Path
) -> None:
    worker = clean.lab.worker("w1")
    ranges = [f"--pod-cidr={worker.gateway(4)}/24", f"--pod-cidr={worker.gateway(6)}/64"]
    objects = clean.step(s.Step({"x/p": s.ingress(s.pods("b"), s.sources(s.of_spaces("y")))}, ""))
    new = objects.pop(next(key for key in objects if (key.kind, key.namespace, key.name) == ("Pod", "x", "b")))
    (tmp_path / "all.yaml").write_text(dump_all(objects.values()))
    start(clean, tmp_path, *ranges)
    until(lambda: table(clean) is not None, "the first table")
    # It has its address, and the API server has not told of it.
    closed = "-y/b>x/b:80 -x/b>y/b:80 -x/a>x/b:80 -x/b>x/a:81/udp +w1>x/b:80"
    assert clean.wrong(probes(f"{closed} +y/b>x/a:80 +x/a>y/b:80 +x/c>x/a:80/udp")) == []
    (tmp_path / "new.yaml").write_text(dump(new))
    until(lambda: "x/b" in str(table(clean)), "the pod's address in a map")
    assert clean.wrong(probes("+y/b>x/b:80 +x/b>y/b:80 -z/a>x/b:80 -x/a>x/b:80 +x/b>x/a:81/udp")) == []


def test_killed_in_the_middle_of_applies_the_table_is_whole(clean: Cluster, tmp_path: Path) -> None:
    """A transaction is all or nothing: whenever the process dies, one of both policies is in force."""
    other = s.Step({"x/q": s.ingress(s.A, s.sources(s.of_pods("b", "c")))}, "")
    write(clean, tmp_path, other)
    assert start(clean, tmp_path, "--once").wait(WAIT_S) == 0
    for number in range(4):
        process = start(clean, tmp_path)
        write(clean, tmp_path, ONLY_B if number % 2 else other)
        time.sleep(0.1 * number)  # any moment is a good one to die
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_S)
        assert clean.wrong(probes("+x/b>x/a:80 -y/a>x/a:80 -z/a>x/a:80")) == []


def test_a_folder_that_goes_away_leaves_the_table(clean: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    write(clean, folder, ONLY_B)
    process = start(clean, folder)
    until(lambda: table(clean) is not None, "the first table")
    folder.rename(tmp_path / "gone")
    assert process.stderr is not None
    until(lambda: b"objects not read" in process.stderr.readline(), "the error")
    assert clean.wrong(probes(ONLY_B.probes)) == []


def test_a_faulty_policy_closes_its_pods_and_is_named(clean: Cluster, tmp_path: Path) -> None:
    bad = s.ingress(s.A, s.sources(ports=[{"port": 70000}]))
    write(clean, tmp_path, s.Step({"x/bad": bad}, ""))
    process = start(clean, tmp_path, "--once")
    errors = errors_of(process)
    assert b"PolicyNotApplied object=NetworkPolicy/x/bad" in errors
    assert b"70000" in errors
    # The policy is about ingress only, and its one rule allows nothing.
    assert clean.wrong(probes("-y/a>x/a:80 +x/a>y/a:80 +y/a>x/b:80")) == []
    status, text = ask("status", "--netns", clean.lab.worker("w1").place.netns.name)
    assert status == DONE
    [line] = [line for line in text.splitlines() if line.startswith("not as written: NetworkPolicy/x/bad: ")]
    assert "must be a port or a name" in line
    assert "so the rule allows nothing" in line


def test_a_set_of_many_networks_is_in_the_kernel(clean: Cluster, tmp_path: Path) -> None:
    far = [clean.address("y/c", version) for version in (4, 6)]
    nets = [f"198.{18 + (at >> 15)}.{at >> 7 & 255}.{2 * at & 255}/32" for at in range(at_night(100_000, 20_000))]
    write(clean, tmp_path, s.Step({}, ""))
    metadata = {"name": "feed", "labels": {"threat": "feed"}}
    spec = {"nets": [*nets, "10.0.0.0/33", *far]}
    deny = {"action": "Deny", "destination": {"selector": "threat == 'feed'"}}
    objects = [
        {"apiVersion": CALICO, "kind": "GlobalNetworkSet", "metadata": metadata, "spec": spec},
        {
            "apiVersion": CALICO,
            "kind": "GlobalNetworkPolicy",
            "metadata": {"name": "block"},
            "spec": {"selector": "all()", "types": ["Egress"], "egress": [deny, {"action": "Allow"}]},
        },
    ]
    (tmp_path / "feed.json").write_text(json.dumps({"kind": "List", "items": objects}))
    process = start(clean, tmp_path, "--once")
    errors = errors_of(process)
    assert process.returncode == 0, errors
    assert b"'10.0.0.0/33', so it is not in the set" in errors
    assert clean.wrong(probes("+x/a>y/b:80 -x/a>y/c:80")) == []
    sizes = {len(item.elements) for item in table(clean).sets}
    assert len(set(nets)) + 1 in sizes


def test_status_and_explain_say_what_the_kernel_does(clean: Cluster, tmp_path: Path) -> None:
    netns = clean.lab.worker("w1").place.netns.name
    assert ask("status", "--netns", netns) == (DENIED, "no table: nothing is policed\n")
    write(clean, tmp_path, ONLY_B)
    assert start(clean, tmp_path, "--once").wait(WAIT_S) == 0
    assert clean.wrong(probes(ONLY_B.probes)) == []
    status, text = ask("status", "--netns", netns)
    assert status == DONE
    assert "ingress: 2 addresses of pods are policed" in text
    assert "allowed 2: KubernetesNetworkPolicy/x/p ingress 0" in text
    assert "end of tier default" in text
    for words, wanted, part in (
        (("x/b", "x/a", "80"), DONE, "rule 0: allows"),
        (("y/a", "x/a", "80"), DENIED, "end of tier: denies"),
        (("x/a", "y/a", "80", "udp"), DONE, "no policy isolates it"),
        (("192.0.2.1", "x/a", "80"), DENIED, "denied"),
        (("x/a", "x/a", "80"), DONE, "itself"),
        (("x/none", "x/a", "80"), FAILED, "there is no pod x/none"),
    ):
        status, text = ask("explain", "--objects", str(tmp_path), *words)
        assert status == wanted, text
        assert part in text


def test_metrics_count_by_policy_and_direction(clean: Cluster, tmp_path: Path) -> None:
    write(clean, tmp_path, ONLY_B)
    start(clean, tmp_path, "--metrics", "127.0.0.1:15999")
    until(lambda: table(clean) is not None, "the first table")
    assert clean.wrong(probes(ONLY_B.probes)) == []

    def scraped(path: str = "/metrics") -> str:
        with clean.lab.worker("w1").place.socket() as sock:
            sock.settimeout(WAIT_S)
            sock.connect(("127.0.0.1", 15999))
            sock.sendall(f"GET {path} HTTP/1.0\r\nhost: x\r\n\r\n".encode())
            return b"".join(iter(lambda: sock.recv(65536), b"")).decode()

    page = scraped()
    policy = "KubernetesNetworkPolicy/x/p"
    assert f'netpol_packets_total{{direction="ingress",policy="{policy}",verdict="allowed"}} 2.0' in page
    assert 'policy="end of tier default",verdict="dropped"' in page
    assert 'netpol_policed_pods{direction="ingress"} 1.0' in page
    assert "netpol_in_force 1.0" in page
    assert scraped("/readyz").endswith("\r\n\r\nready\n")
    assert "netpol_not_followed{" not in page
    (tmp_path / "broken.yaml").write_text("broken: [")
    until(lambda: f'netpol_not_followed{{what="{tmp_path}/broken.yaml"}} 1.0' in scraped(), "the broken file")
    (tmp_path / "broken.yaml").unlink()
    until(lambda: "netpol_not_followed{" not in scraped(), "the end of the broken file")


def test_print_shows_the_table_and_changes_nothing(clean: Cluster, tmp_path: Path) -> None:
    write(clean, tmp_path, ONLY_B)
    status, text = ask("run", "--objects", str(tmp_path), "--node", "w1", "--print")
    assert status == DONE
    assert text.startswith(f"table inet {TABLE} {{")
    assert "type filter hook forward priority -1; policy accept;" in text
    assert table(clean) is None


def test_trace_names_the_policies_that_packets_meet(clean: Cluster, tmp_path: Path) -> None:
    write(clean, tmp_path, ONLY_B)
    assert start(clean, tmp_path, "--once").wait(WAIT_S) == 0
    node = clean.lab.worker("w1").place
    before = without_generation(everything(node.netns))
    command = [sys.executable, "-m", "ztunnel", "netpol", "trace"]
    for source, wanted in (
        ("x/b", "KubernetesNetworkPolicy/x/p ingress 0: accept"),
        ("x/c", "end of tier default: drop"),
    ):
        ends = [clean.address(source, 4), clean.address("x/a", 4)]
        process = node.popen([*command, *ends], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        RUNNING.append(process)
        assert process.stdout is not None
        assert "tracing" in process.stdout.readline()
        clean.wrong(probes(f"{'+' if source == 'x/b' else '-'}{source}>x/a:80"))
        lines = [process.stdout.readline()]
        while wanted not in lines[-1]:
            assert lines[-1], lines
            lines.append(process.stdout.readline())
        # Packets of connections that are ending may come first.
        assert any(line.startswith(f"{ends[0]}:") and f"> {ends[1]}:80 tcp" in line for line in lines)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    assert _counts(without_generation(everything(node.netns))) == _counts(before)


def _counts(state: dict[str, Any]) -> dict[str, int]:
    """Rules have counters, so what is compared is how many of everything there are."""
    return {part: len(value) for part, value in state.items()}


def test_without_the_capability_there_is_one_line(clean: Cluster, tmp_path: Path) -> None:
    write(clean, tmp_path, ONLY_B)
    before = everything(clean.lab.worker("w1").place.netns)
    setpriv = needed("setpriv")
    drop = [setpriv, "--bounding-set=-net_admin,-sys_admin", "--inh-caps=-all"]
    command = [
        sys.executable,
        "-m",
        "ztunnel",
        "netpol",
        "run",
        "--objects",
        str(tmp_path),
        "--node",
        "w1",
        "--once",
    ]
    process = clean.lab.worker("w1").place.popen([*drop, *command], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == FAILED
    assert "CAP_NET_ADMIN" in errors
    assert "Traceback" not in errors
    assert everything(clean.lab.worker("w1").place.netns) == before


def test_a_folder_that_is_none_is_one_line() -> None:
    assert ask("run", "--objects", "/nowhere") == (FAILED, "ztunnel netpol: /nowhere is no folder\n")
