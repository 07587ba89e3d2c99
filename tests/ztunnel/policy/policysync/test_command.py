"""``ztunnel policy`` as a person uses it."""

import asyncio
import os
import signal
import stat
import subprocess
import sys
import urllib.request
from argparse import ArgumentParser
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from tests import commands
from tests.ports import free_port
from tests.ztunnel.kube.fake_api import FakeApi
from tests.ztunnel.policy.calico.cluster import PODS, SEED, flow
from tests.ztunnel.policy.calico.test_follower import following, run, until
from xds.grpc.serve_error import ServeError
from xds.model import calico as c
from ztunnel.policy.policysync import add_arguments
from ztunnel.policy.policysync.cluster import ClusterPolicies
from ztunnel.policy.policysync.command import _follow
from ztunnel.policy.policysync.problems import LoggedEvents
from ztunnel.policy.policysync.server import PolicySyncServer

LIMIT_S = 30.0
WEB = "spiffe://cluster.local/ns/shop/sa/frontend"


def ztunnel(*args: str) -> subprocess.CompletedProcess[str]:
    return commands.ztunnel("policy", *args)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "pods.yaml").write_text(PODS)
    (tmp_path / "policies.yaml").write_text(SEED)
    return tmp_path


def test_check_counts(files: Path) -> None:
    done = ztunnel("check", str(files))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "1 policies in 1 tiers, 4 pods, 2 namespaces, 1 service accounts: valid\n"


def test_check_lists_every_fault(files: Path) -> None:
    (files / "policies.yaml").write_text(SEED.replace("action: Allow", "action: allow"))
    done = ztunnel("check", str(files), str(files / "none"))
    assert (done.returncode, done.stdout) == (1, "")
    lines = done.stderr.splitlines()
    assert lines[0] == f"{files}/none: No such file or directory"
    assert [line.partition("spec.")[2] for line in lines[1:]] == [
        "ingress[0].action: must be Allow, Deny, Log or Pass, not 'allow'",
        "egress[0].action: must be Allow, Deny, Log or Pass, not 'allow'",
    ]


def test_check_names_rules_that_are_stricter_than_written(files: Path) -> None:
    rule = "{action: Accept, to: [{domainNames: [a.example]}]}"
    (files / "guard.yaml").write_text(
        "{apiVersion: policy.networking.k8s.io/v1alpha2, kind: ClusterNetworkPolicy, metadata: {name: guard}, "
        f"spec: {{tier: Admin, priority: 1, subject: {{namespaces: {{}}}}, egress: [{rule}]}}}}"
    )
    done = ztunnel("check", str(files))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "KubernetesClusterNetworkPolicy/guard: egress[0].to[0].domainNames: names are not followed here, "
        "so it allows nothing to that peer\n"
    )


def test_explain_prints_the_walk(files: Path) -> None:
    done = ztunnel(
        *("explain", str(files), "--from", "shop/front", "--to", "10.0.0.2"), *("--method", "PUT", "--path", "/x")
    )
    assert done.returncode == 1
    assert done.stdout == (
        "from shop/front to shop/back, port 80/tcp PUT /x\n"
        "egress of shop/front\n"
        "  profiles\n"
        "    Profile/kns.shop\n"
        "      rule 0: allows\n"
        "  => allowed by __PROFILE__|Profile/kns.shop|rule 0\n"
        "ingress of shop/back\n"
        "  tier default\n"
        "    GlobalNetworkPolicy/allow-frontend-to-backend\n"
        "      rule 0: no match: http\n"
        "    end of tier: denies\n"
        "  => denied by default|GlobalNetworkPolicy/allow-frontend-to-backend|end of tier\n"
    )


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (("--from", "shop/front", "--to", "shop/back", "--method", "GET", "--path", "/api/v2/x"), 0),
        (("--from", "192.0.2.1", "--to", "shop/front"), 0),
        (
            ("--from", WEB, "--to", "shop/back", "--method", "GET", "--path", "/api/v2"),
            1,
        ),  # no address: not the pod
        (("--from", "shop/none", "--to", "shop/back"), 2),
        (("--from", "nonsense", "--to", "shop/back"), 2),
        (("--from", "shop/front", "--to", "shop/back", "--protocol", "x"), 2),
    ],
)
def test_explain_answers_by_its_status(args: tuple[str, ...], status: int, files: Path) -> None:
    done = ztunnel("explain", str(files), *args)
    assert done.returncode == status, done
    assert "Traceback" not in done.stderr


def test_files_that_cannot_be_read_are_no_answer(tmp_path: Path) -> None:
    """Status 1 would be: denied."""
    (tmp_path / "a.yaml").write_text("kind: [\n")
    done = ztunnel("explain", str(tmp_path), "--from", "shop/front", "--to", "shop/back")
    assert done.returncode == 2, done
    assert "a.yaml" in done.stderr


def test_serve_follows_a_cluster(tmp_path: Path) -> None:
    """Kubernetes' and Calico's policies of one name, a faulty one, and an API server that becomes unreachable."""
    back = c.EndpointId("k8s", "shop/back", "eth0")
    api = FakeApi()
    api.versions |= {"v1alpha1", "v1alpha2", "v3"}
    process: subprocess.Popen[str] | None = None

    port = free_port()

    def scraped(path: str = "/metrics") -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=LIMIT_S) as answer:
            return str(answer.read().decode())

    async def pod(name: str, address: str, node: str = "n1") -> None:
        status = {"phase": "Running", "podIPs": [{"ip": address}]}
        await api.put("pods", "shop", name, labels={"app": name}, spec={"nodeName": node}, status=status)

    async def main() -> None:
        nonlocal process
        async with api.serve():
            await api.put("namespaces", "", "shop")
            await pod("front", "10.0.0.1")
            await pod("back", "10.0.0.2")
            await pod("far", "10.0.0.3", "n2")
            await api.put("networkpolicies", "shop", "one", spec={"podSelector": {}, "ingress": [{}]})
            only = {"selector": "app == 'back'", "order": 1, "ingress": [{"action": "Deny"}]}
            await api.put("networkpolicies.v3", "shop", "one", spec=only)
            command = ["serve", "--kube", "--kubeconfig", str(api.kubeconfig(tmp_path)), "--node", "n1"]
            more = [
                "--socket",
                f"{tmp_path}/node.sock",
                "--prefix",
                str(tmp_path),
                "--metrics",
                f"127.0.0.1:{port}",
            ]
            process = subprocess.Popen(
                [sys.executable, "-m", "ztunnel", "policy", *command, *more], stderr=subprocess.PIPE, text=True
            )
            await until((tmp_path / "node.sock").exists)
            async with following(f"unix:{tmp_path}/node.sock") as follower:
                await until(lambda: follower.in_sync)
                store = follower.evaluator.store
                assert {key.workload for key in store.endpoints} == {"shop/front", "shop/back"}
                assert {policy.kind for policy in store.policies} == {"KubernetesNetworkPolicy", "NetworkPolicy"}
                await until((tmp_path / "mount" / "uid-back" / "socket").is_socket)
                assert not follower.evaluator.check(back, flow()).allowed
                assert await asyncio.to_thread(scraped, "/readyz") == "ready\n"
                await api.remove("networkpolicies.v3", "shop", "one")
                await until(lambda: follower.evaluator.check(back, flow()).allowed)
                # Faulty from the start: closed. The Event says so where describe shows it.
                await api.put("networkpolicies.v3", "shop", "bad", spec={"selector": "app ==", "order": 1})
                await until(lambda: not follower.evaluator.check(back, flow()).allowed)
                await until(lambda: any(body.get("reason") == "PolicyNotApplied" for body in api.bodies))
        async with following(f"unix:{tmp_path}/node.sock") as follower:
            await until(lambda: follower.in_sync)  # the API server is away, and the last policies are served
            while 'policysync_not_followed{what="pods"} 1.0' not in (page := await asyncio.to_thread(scraped)):
                await asyncio.sleep(0.02)
            assert "policysync_faulty_objects 1.0" in page
            assert not follower.evaluator.check(back, flow()).allowed

    try:
        run(main)
    finally:
        if process is not None:
            process.send_signal(signal.SIGTERM)
            said = process.communicate(timeout=LIMIT_S)[1]
            print(said)
    assert process is not None
    assert process.returncode == 0
    [event] = [body for body in api.bodies if body.get("reason") == "PolicyNotApplied"]
    assert event["involvedObject"]["kind"] == "NetworkPolicy"
    assert event["involvedObject"]["apiVersion"] == "projectcalico.org/v3"
    assert "closed meanwhile" in event["message"]
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--kube",), "needs --socket or --prefix"),
        (("--socket", "x"), "needs either files or --kube"),
        (("--socket", "x", "--kube", "policies.yaml"), "needs either files or --kube"),
        (("--socket", "x", "policies.yaml", "--node-peers"), "--kubeconfig and --node-peers are for --kube"),
        (("--socket", "x", "--kube", "--kubeconfig", "/none/config"), "/none/config"),
    ],
)
def test_serve_says_what_it_needs(args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = ArgumentParser()
    add_arguments(parser.add_subparsers())
    parsed = parser.parse_args(["policy", "serve", *args])
    assert parsed.run(parsed) in (1, 2)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("ztunnel policy serve: ")
    assert said in line


def test_what_fails_while_policies_are_followed_ends_the_command_by_its_own_name() -> None:
    class Broken(ClusterPolicies):
        async def follow(self) -> None:
            raise ServeError("unix:/gone", "gone")

    async def main() -> None:
        source: Any = None
        with pytest.raises(ServeError, match="unix:/gone"):
            await _follow(Broken(source, PolicySyncServer(), None, LoggedEvents()), None, asyncio.Event())

    run(main)


def test_a_socket_that_is_none_is_one_line(tmp_path: Path) -> None:
    done = ztunnel("explain", "--server", str(tmp_path / "none.sock"), "--from", "a/b", "--to", "c/d")
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"ztunnel policy explain: {tmp_path}/none.sock: ")


def test_serve_follows_the_files(files: Path) -> None:
    back = c.EndpointId("k8s", "shop/back", "eth0")
    command = ["serve", str(files), "--socket", f"{files}/node.sock", "--prefix", str(files), "--node", "n1"]
    command += ["--socket-mode", "600"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ztunnel", "policy", *command], stderr=subprocess.PIPE, text=True
    )

    async def main() -> None:
        async with following(f"unix:{files}/node.sock") as follower:
            await until(lambda: follower.in_sync)
            assert {key.workload for key in follower.evaluator.store.endpoints} == {"shop/front", "shop/back"}
            assert follower.evaluator.check(back, flow()).allowed
            (files / "policies.yaml").write_text(SEED.replace("[GET, POST]", "[POST]"))
            await until(lambda: not follower.evaluator.check(back, flow()).allowed)
            # A running server can be asked through its socket, and gives the same answers.
            asked = ("--from", "shop/front", "--to", "shop/back", "--path", "/api/v2/x", "--method")
            for method, status in (("POST", 0), ("GET", 1)):
                done = await asyncio.to_thread(
                    ztunnel, "explain", "--server", f"unix:{files}/node.sock", *asked, method
                )
                assert (done.returncode, done.stderr) == (status, "")
                assert "GlobalNetworkPolicy/allow-frontend-to-backend" in done.stdout
            (files / "policies.yaml").write_text("broken: [")
            (files / "more.yaml").write_text(SEED)
            (files / "policies.yaml").unlink()
            await until(lambda: follower.evaluator.check(back, flow()).allowed)
        assert (files / "mount" / "u-2" / "socket").is_socket()
        modes = [stat.S_IMODE(os.stat(files / path).st_mode) for path in ("node.sock", "mount/u-2/socket")]
        assert modes == [0o600, 0o777]

    try:
        run(main)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
        assert not (files / "node.sock").exists()
    finally:
        process.kill()
        process.communicate()


def test_serve_needs_a_socket_and_files_without_faults(files: Path) -> None:
    assert ztunnel("serve", str(files)).returncode == 2
    (files / "policies.yaml").write_text("[")
    done = ztunnel("serve", str(files), "--socket", f"{files}/x.sock")
    assert done.returncode == 1
    assert "policies.yaml error=document 1 at line 1: not valid YAML" in done.stderr


def test_a_server_that_ends_with_streams_open_has_nothing_to_say(files: Path) -> None:
    path = f"unix:{files}/node.sock"
    command = [sys.executable, "-m", "ztunnel", "policy", "serve", str(files), "--socket", f"{files}/node.sock"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)

    async def main() -> None:
        await until((files / "node.sock").exists)
        async with AsyncExitStack() as stack:
            channels = [await stack.enter_async_context(grpc.aio.insecure_channel(path)) for _ in range(8)]
            calls = [channel.stream_stream("/felix.PolicySync/Sync")() for channel in channels]
            for call in calls:
                await call.write(b"")
                assert await call.read()
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.wait, LIMIT_S)

    try:
        run(main)
        _, errors = process.communicate(timeout=LIMIT_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0
    assert "Traceback" not in errors
    assert len(errors.splitlines()) == 1, errors
