"""``ztunnel audit``: transcripts of a node agent's answers."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.ports import free_port
from tests.ztunnel.node.agent.test_audit import audited
from ztunnel.cli import main
from ztunnel.node.agent.audit import ANNOTATION_WRONG, RULES_CHANGED, page
from ztunnel.node.agent.comparison import NO_CERTIFICATE, Finding

Output = pytest.CaptureFixture[str]


@contextmanager
def agent(body: object, status: int = 200) -> Iterator[tuple[str, list[str]]]:
    """Serve a node agent's pages. Yield the address, and the received requests."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(f"{self.command} {self.path}")
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET  # noqa: N815  the library's name

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def test_an_audit_without_differences_exits_with_0(capsys: Output) -> None:
    with agent(page("w1", 1, [audited()])) as (address, asked):
        assert main(["audit", "--address", address]) == 0
    assert asked == ["GET /audit"]
    assert capsys.readouterr().out == (
        "POD       IN THE MESH           LABEL  ANNOTATION  RULES  LISTENERS  WORKLOAD  CERTIFICATE\n"
        "shop/web  yes, namespace-label  ok     enabled     ok     ok         ok        ok\n"
        "\n"
        "1 pods of node w1, no differences\n"
    )


def test_differences_are_named(capsys: Output) -> None:
    found = page("w1", 0, [audited(RULES_CHANGED, NO_CERTIFICATE, ANNOTATION_WRONG, asked=False)])
    with agent(found) as (address, _):
        assert main(["audit", "--address", address]) == 1
        table = capsys.readouterr().out
        assert main(["audit", "--json", "--address", address]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["summary"] == {"repaired": []}
    (item,) = told["items"]
    assert item == {"node": None, **found["pods"][0]}
    assert table == (
        "POD       IN THE MESH           LABEL  ANNOTATION      RULES  LISTENERS  WORKLOAD  CERTIFICATE\n"
        "shop/web  yes, namespace-label  ok     enabled, wrong  wrong  ok         ?         wrong\n"
        "\n"
        "shop/web: annotation: because (MeshAnnotationWrong)\n"
        "shop/web: certificate: because (MeshCertificateMissing)\n"
        "shop/web: rules: because (MeshRulesChanged)\n"
        "no proxy of this node has answered: workloads and certificates are not known\n"
        "1 pods of node w1, 3 differences, 2 of them for --repair\n"
    )


def test_a_repair_is_asked_for_and_reported(capsys: Output) -> None:
    found = page("w1", 1, [audited()], [("shop/web", Finding(RULES_CHANGED, "3 differences"))])
    with agent(found) as (address, asked):
        assert main(["audit", "--repair", "--address", address]) == 0
    assert asked == ["POST /audit"]
    assert "\nrepaired: shop/web: MeshRulesChanged: 3 differences\n" in capsys.readouterr().out


def test_audit_names_an_agent_that_does_not_answer(capsys: Output) -> None:
    address = f"127.0.0.1:{free_port()}"
    assert main(["audit", "--address", address]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        f"ztunnel audit: {address}: Connection refused; is the node agent (ztunnel agent --kube"
    )


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"{}", 200, "the answer is no audit; is a node agent there?"),
        (b"hello", 200, "the answer is no audit; is a node agent there?"),
        ([1], 200, "the answer is no audit; is a node agent there?"),
        (b"only for this node: use a loopback address\n", 403, "/audit: 403 only for this node: use a loopback"),
    ],
)
def test_audit_names_an_answer_that_is_not_the_agents(
    body: object, status: int, reason: str, capsys: Output
) -> None:
    with agent(body, status) as (address, _):
        assert main(["audit", "--address", address]) == 2
    assert capsys.readouterr().err.startswith(f"ztunnel audit: {address}: {reason}")
