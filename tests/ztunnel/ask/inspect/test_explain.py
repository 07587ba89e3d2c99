"""``ztunnel explain``: of two ends, of a log line and of a live connection, by a running proxy or by a dump."""

import asyncio
import io
import json
import socket
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.ztunnel.ask.inspect.harness import Output, pages
from tests.ztunnel.proxy.envoy.admin.harness import Running, serve
from tests.ztunnel.proxy.envoy.admin.reference import Reference
from tests.ztunnel.proxy.envoy.admin.test_server import proxy_to
from tests.ztunnel.proxy.istio.admin.test_server import Harness, served
from tests.ztunnel.proxy.istio.path.test_explain import policy
from tests.ztunnel.proxy.istio.path.test_route import BACK, CLIENT, cart
from xds.model.authorization import Action
from xds.model.policy import Always, PeerServiceAccount
from ztunnel.cli import main

LINE = (
    "2026-11-21T11:14:45.9Z\terror\taccess\tconnection complete\tsrc.addr=10.0.0.1:{port} "
    'src.identity="spiffe://cluster.local/ns/shop/sa/client" dst.addr=10.0.0.2:15008 '
    'dst.hbone_addr=10.0.0.2:8080 direction="inbound" error="http status: 401 Unauthorized"\n'
)


def test_lines_of_a_log_are_explained(capsys: Output, monkeypatch: pytest.MonkeyPatch) -> None:
    deny = policy("no-front", Action.DENY, PeerServiceAccount("shop", "client"))
    # A line without a connection, and two lines that differ only in the client's port: one question.
    text = "ztunnel is ready\n" + LINE.format(port=4000) + LINE.format(port=4001)

    def ask(address: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert main(["explain", "--log-line", "-", "--address", address]) == 1
        assert capsys.readouterr().out.splitlines() == [
            "seen:",
            "  direction: inbound",
            "  source: 10.0.0.1:4000",
            "  identity: spiffe://cluster.local/ns/shop/sa/client",
            "  target: 10.0.0.2:15008",
            "  authority: 10.0.0.2:8080",
            "  error: http status: 401 Unauthorized",
            "verdict: refused by the destination",
            "source:",
            "  address: 10.0.0.1",
            "  workload: client",
            "  node: none",
            "  identity: spiffe://cluster.local/ns/shop/sa/client",
            "destination: 10.0.0.2:8080",
            "inbound:",
            "  workload: back",
            "  application: 10.0.0.2:8080",
            "  handshake: a certificate of another node is not known before the handshake",
            "  policies:",
            "    - policy: shop/no-front",
            "      action: Deny",
            "      holds: yes",
            "      because: the peer's service account is shop/client",
            "  refused: explicitly denied by: shop/no-front",
        ]
        assert main(["explain", "--log-line", LINE.format(port=1), "--address", address, "--json"]) == 1
        (told,) = json.loads(capsys.readouterr().out)["items"]
        assert list(told) == ["seen", "verdict", "source", "destination", "inbound"]
        bad = 'src.addr=10.0.0.1:9 dst.addr=10.0.0.7 direction="inbound"\n'
        monkeypatch.setattr("sys.stdin", io.StringIO(bad + LINE.format(port=1)))
        assert main(["explain", "--log-line", "-", "--address", address, "--json"]) == 2
        first, second = json.loads(capsys.readouterr().out)["items"]
        assert first["no_answer"].startswith("dst.addr is no IP:PORT: '10.0.0.7': src.addr=10.0.0.1:9")
        assert second["verdict"] == "refused by the destination"
        unknown = (
            'src.addr=10.0.0.1:9 dst.addr=10.0.0.7:1 dst.service="x.example" direction="outbound" error="gone"'
        )
        assert main(["explain", "--log-line", unknown, "--address", address]) == 2
        said = capsys.readouterr().out
        assert "error: gone" in said
        assert "no answer: " in said
        assert "destination 'x.example': no service or workload of this name" in said

    async def check(harness: Harness) -> None:
        harness.proxy.mesh.apply([CLIENT, cart(), BACK, deny])
        await asyncio.to_thread(ask, str(harness.addresses["admin"][0]))

    served(check)


def test_a_live_connection_of_an_istio_proxy_is_explained(capsys: Output) -> None:
    live = {
        "src": "10.0.0.1:4000",
        "originalDst": "10.1.0.1:80",
        "actualDst": "10.0.0.2:15008",
        "protocol": "HBONE",
    }
    table = {"uid": {"connections": {"inbound": [], "outbound": [live]}}}
    answer = {"verdict": "allowed", "ways": [{"target": "10.0.0.2:15008"}, {"target": "10.0.0.3:15008"}]}
    bodies = {"/connections": json.dumps(table).encode(), "/explain": json.dumps(answer).encode()}
    with pages(bodies) as address:
        assert main(["explain", "--connection", "10.0.0.1:4000", "--address", address]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "seen:",
            "  direction: outbound",
            "  source: 10.0.0.1:4000",
            "  destination: 10.1.0.1:80",
            "  target: 10.0.0.2:15008",
            "verdict: allowed",
            "ways:",
            "  - target: 10.0.0.2:15008",
            "    taken: yes",
            "  - target: 10.0.0.3:15008",
        ]
        assert main(["explain", "--connection", "10.0.0.9:4000", "--address", address]) == 2
        assert capsys.readouterr().err == (
            "ztunnel explain: no live connection is 10.0.0.9:4000; `ztunnel connections` lists them\n"
        )


def test_a_live_connection_in_envoys_dialect_is_explained(reference: Reference, capsys: Output) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        proxy_to(reference, server.getsockname()[1])

        def check(running: Running) -> None:
            address = f"127.0.0.1:{reference.admin}"
            with socket.create_connection(("127.0.0.1", reference.ports[15006])) as client:
                client.sendall(b"hello")
                accepted, _ = server.accept()
                with accepted:
                    assert accepted.recv(5) == b"hello"
                    source = "{}:{}".format(*client.getsockname())
                    (entry,) = running.admin.get("/connections").json["connections"]
                    for wanted in (source, f"{source}-{entry['upstream_host']}", str(entry["id"])):
                        assert main(["explain", "--connection", wanted, "--address", address, "--json"]) == 0
                        (told,) = json.loads(capsys.readouterr().out)["items"]
                        assert told["seen"]["id"] == str(entry["id"])
                        assert told["listener_because"] == "the question names it"
                        assert told["hop"]["chain"] == entry["filter_chain"]
                        (cluster,) = told["hop"]["clusters"]
                        taken = [host["address"] for host in cluster["endpoints"] if host.get("taken")]
                        assert taken == [entry["upstream_host"]]

        serve(reference, check)


def test_explain_adds_the_inbound_decision_of_the_far_proxy_that_has_the_pod(capsys: Output) -> None:
    """Only the proxy with the pod is asked, because other proxies do not terminate TLS for it."""
    identity = "spiffe://cluster.local/ns/a/sa/a"
    tunnel = {"tunnel": {"authority": "10.0.0.2:80"}, "tls": {"identity": [identity]}}
    inner = {"hop": {"clusters": [{"cluster": "t", "endpoints": [tunnel]}]}}
    near = {
        "verdict": "allowed here",
        "source": "10.0.0.1:0",
        "hop": {"clusters": [{"cluster": "s", "endpoints": [inner]}]},
    }
    other = {"hop": {"clusters": [{"cluster": "blackhole", "verdict": "closed: there is no such cluster (NC)"}]}}
    refuses = {"hop": {"tls": {"identity": ["b"]}, "verdict": "closed: no policy allows it"}}
    asked: list[str] = []
    with (
        pages({"/explain": json.dumps(near).encode()}) as here,
        pages({"/explain": json.dumps(other).encode()}) as there,
        pages({"/explain": json.dumps(refuses).encode()}, asked=asked) as elsewhere,
    ):
        words = ["explain", "10.0.0.1", "10.9.9.9:80", "--address", here, "--json"]
        assert main(words) == 0
        assert json.loads(capsys.readouterr().out) == {"apiVersion": "ztunnel/v1", "kind": "Explanation", **near}
        assert main([*words, "--far", there, "--far", elsewhere]) == 1
        told = json.loads(capsys.readouterr().out)
        assert main([*words, "--far", "127.0.0.1:1"]) == 2
        assert "127.0.0.1:1: Connection refused" in capsys.readouterr().err
    assert told["verdict"] == "refused: closed: no policy allows it"
    end = told["hop"]["clusters"][0]["endpoints"][0]["hop"]["clusters"][0]["endpoints"][0]
    assert end["inbound"] == refuses["hop"]
    query = urllib.parse.parse_qs(urllib.parse.urlsplit(asked[0]).query)
    assert query == {"source": ["10.0.0.1:0"], "destination": ["10.0.0.2:80"], "identity": [identity]}


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["--from", "a/b", "--to", "c.d:80"], {"source": ["a/b"], "destination": ["c.d:80"]}),
        (["a/b", "--to", "c.d:80"], {"source": ["a/b"], "destination": ["c.d:80"]}),
        (["--from=a/b", "c.d:80"], {"source": ["a/b"], "destination": ["c.d:80"]}),
    ],
)
def test_explain_accepts_source_and_destination_as_flags(
    words: list[str], asked: dict[str, list[str]], capsys: Output
) -> None:
    queries: list[str] = []
    with pages({"/explain": b'{"verdict": "allowed"}'}, asked=queries) as address:
        assert main(["explain", *words, "--address", address]) == 0
    (query,) = queries
    assert urllib.parse.parse_qs(urllib.parse.urlsplit(query).query) == asked


@pytest.mark.parametrize(
    "words", [["a", "b:1", "--from", "c"], ["a", "b:1", "--to", "c:1"], ["--from", "a"], ["--to", "a:1"], ["a"]]
)
def test_explain_refuses_one_end_alone_and_an_end_given_twice(words: list[str], capsys: Output) -> None:
    assert main(["explain", *words]) == 2
    assert "give SOURCE and DESTINATION" in capsys.readouterr().err


@contextmanager
def asked(how: str, saved: str) -> Iterator[list[str]]:
    """The flags with which a command reads a dump of the Rust ztunnel: from a file, or from its address."""
    if how == "file":
        yield ["--file", saved]
        return
    with pages({"/config_dump": Path(saved).read_bytes()}) as address:
        yield ["--address", address]


@pytest.mark.parametrize("how", ["file", "address"])
def test_a_rust_ztunnels_dump_explains(how: str, saved: str, capsys: Output) -> None:
    with asked(how, saved) as source:
        assert main(["explain", "default/a", "default/c:8080", *source]) == 1
        said = capsys.readouterr().out.splitlines()
        place = said.index("certificate:")
        # Its expiry depends on the clock.
        state, until, days_left = said[place + 1 : place + 4]
        del said[place + 1 : place + 4]
        assert state in ("  state: available", "  state: expired")
        assert (until, days_left[:13]) == ("  valid until: 2026-11-22T11:25:15Z", "  days left: ")
        assert said == [
            "verdict: refused by the destination",
            "source:",
            "  address: 10.0.0.2",
            "  workload: c//Pod/default/a",
            "  node: n1",
            "  identity: spiffe://cluster.local/ns/default/sa/a",
            "destination: 10.0.0.3:8080",
            "dialled: workload c//Pod/default/c",
            "because: a tunnel: the workload takes them",
            "ways:",
            "  - target: 10.0.0.3:15008",
            "    workload: c//Pod/default/c",
            "    node: n2",
            "    weight: 1",
            "    authority: 10.0.0.3:8080",
            "    peer must be: spiffe://cluster.local/ns/default/sa/c",
            "    inbound:",
            "      workload: c//Pod/default/c",
            "      application: 10.0.0.3:8080",
            "      policies:",
            "        - policy: default/few",
            "          action: Allow",
            "          holds: no",
            "          because: the peer's service account is other/b: no, it is default/a",
            "      dry run:",
            "        - policy: default/no",
            "          action: Deny",
            "          holds: no",
            "          because: no alternatives",
            "      refused: allow policies exist, but none allowed",
            "certificate:",
            "not in the dump:",
            "  - what an inbound client has proven: it is taken for the workload at its address",
            "  - service default/web.default.svc.cluster.local: endpoint c//Pod/default/b is no workload of the "
            "dump",
        ]


@pytest.mark.parametrize("how", ["file", "address"])
def test_live_connections_of_a_rust_ztunnel_are_explained(how: str, saved: str, capsys: Output) -> None:
    with asked(how, saved) as source:
        assert main(["explain", "--connection", "10.0.0.2:49386", *source, "--json"]) == 1
        (told,) = json.loads(capsys.readouterr().out)["items"]
        assert told["seen"]["destination"] == "10.0.0.3:8080"
        assert told["ways"][0]["taken"] is True
        assert main(["explain", "--connection", "10.0.0.3:4000", *source, "--json"]) == 0
        (told,) = json.loads(capsys.readouterr().out)["items"]
        # The dump does not show proven identities. The address belongs to a workload that accepts tunnels.
        assert told["seen"]["identity"] == "spiffe://cluster.local/ns/default/sa/c"
        assert told["inbound"]["workload"] == "c//Pod/default/a"


def test_a_dump_of_envoys_dialect_explains(reference: Reference, tmp_path: Path, capsys: Output) -> None:
    """Saved, or of an Envoy, which has no /explain."""
    words = ["explain", "10.244.2.3", "10.96.183.192:9080"]
    lacks = ["not in the dump:", "  - the proxy's flags: --tunnel-source is taken for its default"]

    def check(running: Running) -> None:
        assert main([*words, "--address", f"127.0.0.1:{reference.admin}"]) == 0
        dump = running.admin.get("/config_dump", include_eds="").body
        (tmp_path / "dump.json").write_bytes(dump)

    serve(reference, check)
    said = capsys.readouterr().out.splitlines()
    saved = str(tmp_path / "dump.json")
    assert main([*words, "--file", saved]) == 0
    assert capsys.readouterr().out.splitlines() == [*said, *lacks, "  - Calico's policies"]
    with pages(
        {"/config_dump": Path(saved).read_bytes()}, missing=b"invalid path. admin commands are:\n"
    ) as envoy:
        assert main([*words, "--address", envoy]) == 0
        assert capsys.readouterr().out.splitlines()[: len(said)] == said
        assert main(["explain", "--connection", "10.0.0.1:1", "--address", envoy]) == 2
        assert "a dump of Envoy's dialect has no connections" in capsys.readouterr().err
    line = json.dumps(
        {"source": "10.244.2.3:9", "destination": "1.2.3.4:80", "upstream": None, "termination": None}
    )
    assert main(["explain", "--log-line", line, "--file", saved]) == 0
    assert "cluster: PassthroughCluster" in capsys.readouterr().out
    assert main(["explain", "default/a", "10.0.0.1:1", "--file", saved]) == 2
    assert "not an ip:port: 'default/a'" in capsys.readouterr().err
    assert main([*words, "--listener", "none", "--file", saved]) == 2
    assert capsys.readouterr().err == "ztunnel explain: no listener none\n"


def test_a_rust_ztunnels_log_is_explained_by_its_dump(saved: str, capsys: Output) -> None:
    line = (
        '{"level":"error","scope":"access","message":"connection complete","src.addr":"10.0.0.2:9",'
        '"src.identity":"spiffe://cluster.local/ns/default/sa/a","dst.addr":"10.0.0.3:15008",'
        '"dst.hbone_addr":"10.0.0.3:8080","direction":"outbound","error":"http status: 401 Unauthorized"}'
    )
    assert main(["explain", "--log-line", line, "--file", saved]) == 1
    said = capsys.readouterr().out
    assert "  error: http status: 401 Unauthorized" in said
    assert "refused: allow policies exist, but none allowed" in said
    assert "taken: yes" in said


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ([], "give SOURCE and DESTINATION, or --connection, --log-line or --flow"),
        (["10.0.0.1"], "give SOURCE and DESTINATION"),
        (["10.0.0.1", "10.0.0.2:1", "--connection", "1"], "give SOURCE and DESTINATION"),
        (["--log-line", "hello"], "not a line of an access log"),
        (["--log-line", "-", "--file", "-"], "standard input is either --file or --log-line"),
    ],
)
def test_explain_refuses_words_that_name_no_connection(words: list[str], error: str, capsys: Output) -> None:
    assert main(["explain", *words, "--address", "127.0.0.1:1"]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    "body",
    [
        b"[]",
        b"7",
        b'{"workloads": [], "certificates": [], "version": 7}',
        b'{"workloads": [], "certificates": [7]}',
        b'{"workloads": [], "certificates": [], "config": [7]}',
        b'{"workloads": [], "certificates": [], "workloadState": {"a": 7}}',
        b'{"configs": [7]}',
    ],
)
def test_explain_refuses_a_dump_of_another_shape(body: bytes, tmp_path: Path, capsys: Output) -> None:
    (tmp_path / "dump.json").write_bytes(body)
    saved = str(tmp_path / "dump.json")
    for words in (["10.0.0.1", "10.0.0.2:80"], ["--connection", "10.0.0.1:1"]):
        status = main(["explain", *words, "--file", saved])
        said = capsys.readouterr()
        # An empty mesh is valid, but knows neither end.
        assert status == 2 or "not known here" in said.out
        assert said.err.count("\n") == (status == 2)
    with pages({"/connections": body, "/explain": body}) as address:
        assert main(["explain", "--connection", "10.0.0.1:1", "--address", address]) == 2


def test_explain_prints_always_for_a_policy_without_conditions(capsys: Output) -> None:
    async def check(harness: Harness) -> None:
        harness.proxy.mesh.apply([CLIENT, BACK, policy("all", Action.DENY, Always())])
        address = str(harness.addresses["admin"][0])
        words = ["explain", "shop/client", "shop/back:8080", "--address", address]
        assert await asyncio.to_thread(main, words) == 1

    served(check)
    said = capsys.readouterr().out
    assert "refused: explicitly denied by: shop/all" in said
    assert "because: always" in said


def test_another_flow_than_the_only_one_of_the_recorder_is_not_explained(capsys: Output) -> None:
    line = {
        "flow": {
            "uuid": "one",
            "IP": {"source": "10.0.0.1", "destination": "10.0.0.2"},
            "l4": {"TCP": {"source_port": 1, "destination_port": 2}},
        }
    }
    with pages({"/flows": json.dumps(line).encode()}) as address:
        assert main(["explain", "--flow", "other", "--address", address]) == 2
    assert "no flow is other" in capsys.readouterr().err


def test_a_log_with_other_bytes_than_utf_8_is_explained(monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff src.addr=x\n"), "utf-8"))
    assert main(["explain", "--log-line", "-"]) == 2
    assert "src.addr is no IP:PORT: 'x': \\xff src.addr=x" in capsys.readouterr().out
