"""Commands through kubectl: a script in its place answers as kubectl does, and leads to a page of this test."""

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.limits import WAIT_S
from tests.ztunnel.ask.inspect.harness import RUST, pages
from tests.ztunnel.node.agent.test_audit import audited
from ztunnel.ask.inspect.kubectl import PROXY, Kubectl, Unreachable
from ztunnel.cli import main
from ztunnel.node.agent.audit import page

Output = pytest.CaptureFixture[str]

#: Answers `get` from files named by its words, and forwards until it is killed.
SCRIPT = """#!/bin/sh
echo "$*" >> {folder}/calls
case "$*" in
*port-forward*)
    if [ -e {folder}/refuse ]; then cat {folder}/refuse >&2; exit 1; fi
    echo $$ > {folder}/pid
    echo "Forwarding from 127.0.0.1:{port} -> 15000"
    exec sleep 600 ;;
*) file="{folder}/$(echo "$*" | tr ' /' '__')"
    if [ -e "$file" ]; then cat "$file"
    else echo 'Error from server (NotFound): pods "x" not found' >&2; exit 1; fi ;;
esac
"""


def pod(name: str, namespace: str, node: str | None = "n1", **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "labels": more.get("labels", {})}
    metadata["creationTimestamp"] = more.get("created", "2026-11-23T00:00:00Z")
    containers = [{"name": each} for each in more.get("containers", ["app"])]
    return {
        "metadata": metadata,
        "spec": {"containers": containers, "initContainers": more.get("init")}
        | ({"nodeName": node} if node else {}),
        "status": {"phase": more.get("phase", "Running")},
    }


class Cluster:
    """The answers of the script.

    Attributes:
        calls: its command lines.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def put(self, words: str, answer: object) -> None:
        text = answer if isinstance(answer, str) else json.dumps(answer)
        (self.folder / f"{words} -o json".replace(" ", "_").replace("/", "_")).write_text(text)

    def pods_of_node(self, node: str, *pods: Mapping[str, Any], app: str = "ztunnel") -> None:
        self.put(
            f"get pods --all-namespaces --selector app={app} --field-selector spec.nodeName={node}", items(*pods)
        )

    @property
    def calls(self) -> list[str]:
        return (self.folder / "calls").read_text().splitlines()

    def forwarder_is_gone(self) -> bool:
        """Return whether the process that forwarded has ended."""
        try:
            os.kill(int((self.folder / "pid").read_text()), 0)
        except ProcessLookupError:
            return True
        return False


def items(*pods: Mapping[str, Any]) -> dict[str, Any]:
    return {"items": list(pods)}


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    audit = page("n1", 1, [audited()])
    with pages({"/config_dump": json.dumps(RUST).encode(), "/audit": json.dumps(audit).encode()}) as address:
        script = tmp_path / "bin" / "kubectl"
        script.parent.mkdir()
        script.write_text(SCRIPT.format(folder=tmp_path, port=address.rpartition(":")[2]))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", f"{script.parent}:/usr/bin:/bin")
        cluster = Cluster(tmp_path)
        ztunnel = pod("ztunnel-1", "istio-system", labels={"app": "ztunnel"})
        cluster.pods_of_node("n1", ztunnel)
        cluster.pods_of_node("n1", pod("agent-1", "istio-system"), app="ztunnel-agent")
        cluster.put("get pod web --namespace shop", pod("web", "shop"))
        cluster.put("get pod ztunnel-1 --namespace istio-system", ztunnel)
        yield cluster


FORWARD = "port-forward --namespace {} pod/{} :15000 --address 127.0.0.1"


@pytest.mark.parametrize(
    ("words", "forwarded"),
    [
        (["--node", "n1"], ("istio-system", "ztunnel-1")),
        (["--pod", "web.shop"], ("istio-system", "ztunnel-1")),
        (["--pod", "shop/web"], ("istio-system", "ztunnel-1")),
        (["--pod", "istio-system/ztunnel-1"], ("istio-system", "ztunnel-1")),  # itself
    ],
)
def test_a_proxy_is_reached(words: list[str], forwarded: tuple[str, str], made: Cluster, capsys: Output) -> None:
    assert main(["workloads", *words]) == 0
    assert "default    a         10.0.0.2" in capsys.readouterr().out
    assert made.calls[-1] == FORWARD.format(*forwarded)
    assert made.forwarder_is_gone()


@pytest.mark.parametrize(
    "words", [["--node", "n1"], ["--pod", "web.shop"], ["--pod", "side.shop"], ["--pod", "istio-system/agent-1"]]
)
def test_an_audit_asks_the_agent_of_the_node(words: list[str], made: Cluster, capsys: Output) -> None:
    """The agent is also asked about a pod with a proxy of its own, and about itself."""
    made.put("get pod side --namespace shop", pod("side", "shop", containers=["app", "istio-proxy"]))
    made.put(
        "get pod agent-1 --namespace istio-system", pod("agent-1", "istio-system", labels={"app": "ztunnel-agent"})
    )
    assert main(["audit", *words]) == 0
    assert "1 pods of node n1, no differences" in capsys.readouterr().out
    forward = FORWARD.format("istio-system", "agent-1").replace(":15000", ":15014")
    assert made.calls[-1] == forward
    assert made.forwarder_is_gone()
    assert main(["audit", "--node", "n9"]) == 2
    made.pods_of_node("n9", app="ztunnel-agent")
    capsys.readouterr()
    assert main(["audit", "--node", "n9"]) == 2
    assert (
        "no node agent runs on node 'n9': no pod there has the label app=ztunnel-agent" in capsys.readouterr().err
    )


@pytest.mark.parametrize("more", [{"containers": ["app", "istio-proxy"]}, {"init": [{"name": "istio-proxy"}]}])
def test_a_sidecar_answers_for_its_pod(more: dict[str, Any], made: Cluster, capsys: Output) -> None:
    made.put("get pod side.car --namespace default", pod("side.car", "default", **more))
    assert main(["explain", "default/a", "default/c:8080", "--pod", "side.car.default", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "refused by the destination"
    assert made.calls[-1] == FORWARD.format("default", "side.car")


def test_of_two_generations_the_newer_is_asked(made: Cluster) -> None:
    old = pod("old", "istio-system", created="2026-11-22T00:00:00Z")
    new = pod("new", "istio-system", created="2026-11-23T00:00:00Z")
    late = pod("late", "istio-system", created="2026-11-24T00:00:00Z", phase="Pending")
    made.pods_of_node("n2", old, new, late)
    assert Kubectl().of_node("n2", PROXY) == ("istio-system", "new")


def test_the_context_is_handed_on(made: Cluster, capsys: Output) -> None:
    assert main(["status", "--node", "n1", "--context", "west"]) == 2
    assert all(call.startswith("--context west get pods ") for call in made.calls)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--node", "n9"], "no ztunnel runs on node 'n9': no pod there has the label app=ztunnel"),
        (["--pod", "x.shop"], 'Error from server (NotFound): pods "x" not found'),
        (["--pod", "late.shop"], "pod shop/late is on no node yet"),
        (["--pod", "odd.shop"], "answered no JSON"),
    ],
)
def test_what_is_not_there_is_named(words: list[str], error: str, made: Cluster, capsys: Output) -> None:
    made.pods_of_node("n9")
    made.put("get pod late --namespace shop", pod("late", "shop", node=None))
    made.put("get pod odd --namespace shop", "<html>")
    assert main(["status", *words]) == 2
    assert error in capsys.readouterr().err


def test_what_kubectl_logs_is_left_out(made: Cluster, capsys: Output) -> None:
    """Without an API server it logs each attempt before the sentence for people."""
    said = "The connection to the server localhost:8080 was refused - did you specify the right host or port?"
    (made.folder / "refuse").write_text(
        f'E1125 08:16:14.901096    1761 memcache.go:265] "Unhandled Error"\n{said}\n'
    )
    assert main(["status", "--node", "n1"]) == 2
    assert capsys.readouterr().err.endswith(f": {said}\n")


@pytest.mark.parametrize("command", ["stat", "edges", "nodes", "bug-report"])
def test_commands_that_query_all_nodes_by_default_say_how_to_query_one(
    command: str, made: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    monkeypatch.chdir(made.folder)
    error = 'Error from server (NotFound): pods "x" not found'
    assert main([command]) == 2
    assert capsys.readouterr().err.endswith(f": {error} (--address HOST:PORT queries one proxy)\n")
    if command != "bug-report":
        assert main([command, "--all-nodes"]) == 2
        assert capsys.readouterr().err.endswith(f": {error}\n")
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "default 127.0.0.1:15000" not in " ".join(capsys.readouterr().out.split())


def test_a_port_that_is_not_opened(made: Cluster, capsys: Output) -> None:
    (made.folder / "refuse").write_text("error: unable to forward port: the pod does not run\nmore\n")
    assert main(["status", "--node", "n1"]) == 2
    assert capsys.readouterr().err == (
        "ztunnel status: kubectl port-forward to istio-system/ztunnel-1: error: unable to forward port: the pod "
        "does not run\n"
    )


def test_without_kubectl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Output) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["status", "--node", "n1"]) == 2
    assert "kubectl is not on the PATH" in capsys.readouterr().err
    assert main(["completion", "--words", "status", "--node", ""]) == 0
    assert capsys.readouterr() == ("", "")
    with pytest.raises(Unreachable, match="kubectl is not on the PATH"), Kubectl().forwarded("a", "b", 1):
        pass


def test_a_kubectl_that_cannot_be_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Output) -> None:
    script = tmp_path / "kubectl"
    script.write_text("no program")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    for words in (["status", "-A"], ["status", "--node", "n1"], ["nodes"]):
        assert main(words) == 2
        assert "kubectl cannot be run: exec format error" in capsys.readouterr().err.lower()


def test_kubectls_answer_is_utf_8_in_any_locale(made: Cluster, tmp_path: Path) -> None:
    made.put("get pods --all-namespaces --selector app=ztunnel", '{"items": [], "note": "\u00e9"}')
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words = [sys.executable, "-m", "ztunnel", "status", "-A"]
    done = subprocess.run(
        words, env=os.environ | locale, capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (
        2,
        "ztunnel status: no ztunnel runs: no pod has the label app=ztunnel\n",
    )


def test_one_proxy_is_asked(made: Cluster, capsys: Output) -> None:
    (made.folder / "dump").write_text(json.dumps(RUST))
    assert main(["status", "--node", "n1", "--file", str(made.folder / "dump")]) == 2
    assert "not with --node, -A or -l" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["status", "--node", "n1", "--pod", "web.shop"])
    assert "not allowed with" in capsys.readouterr().err


def test_what_kubectl_says_of_each_connection_does_not_stop_it(
    made: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More than a pipe holds, which nobody would read."""
    script = made.folder / "bin" / "kubectl"
    script.write_text(
        "#!/bin/sh\necho 'Forwarding from 127.0.0.1:9 -> 15000'\n"
        f"yes 'Handling connection for 9' | head -c 300000\ntouch {made.folder}/through\nexec sleep 600\n"
    )
    with Kubectl().forwarded("a", "b", 1) as address:
        assert address == "127.0.0.1:9"
        until_s = time.monotonic() + 30
        while not (made.folder / "through").exists():
            assert time.monotonic() < until_s, "kubectl waits for a reader"
            time.sleep(0.01)


def test_names_for_completion(made: Cluster, capsys: Output) -> None:
    made.put("get pods --all-namespaces", items(pod("web", "shop"), pod("b", "default")))
    made.put("get nodes --all-namespaces", {"items": [{"metadata": {"name": "n1"}}]})
    assert main(["completion", "--words", "status", "--pod", "s"]) == 0
    assert main(["completion", "--words", "status", "--node", ""]) == 0
    assert capsys.readouterr().out.split() == ["shop/web", "n1"]
    kubectl = Kubectl()
    assert list(kubectl.names("pods", 10.0)) == ["shop/web", "default/b"]
    assert list(kubectl.names("nodes", 10.0)) == ["n1"]
