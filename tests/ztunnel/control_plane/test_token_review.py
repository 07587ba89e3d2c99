"""Tokens of service accounts: what a review proves, and who gets what by it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from tests.limits import WAIT_S
from tests.ztunnel.control_plane.meshes import mesh
from xds.aio.server import Caller, NotAdmitted
from xds.model.identity import SpiffeId
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.istio.ca.ca_pb2 import IstioCertificateRequest, IstioCertificateResponse
from ztunnel.control_plane import token_review
from ztunnel.control_plane.accounts import NODE_ACCOUNTS
from ztunnel.control_plane.command import run
from ztunnel.control_plane.istio import Registrar
from ztunnel.control_plane.token_review import KubeRegistrar
from ztunnel.control_plane.tokens import node_token
from ztunnel.kube.errors import ApiUnreachable, KubeError
from ztunnel.kube.kinds import TOKEN_REVIEW, Kind
from ztunnel.kube.objects import Object
from ztunnel.proxy.identity.authority import CertificateAuthority
from ztunnel.proxy.identity.csr import signing_request

NOW = datetime.now(UTC)
KEY = ec.generate_private_key(ec.SECP256R1())
SECRET = b"s" * 32
REVIEWS = SpiffeId("cluster.local", "default", "bookinfo-reviews")
PRODUCTPAGE = SpiffeId("cluster.local", "default", "bookinfo-productpage")  # on worker2 only
LEGACY = SpiffeId("cluster.local", "default", "default")  # in no mesh
POD, NODE = "authentication.kubernetes.io/pod-name", "authentication.kubernetes.io/node-name"


def owner(account: str, **extra: list[str]) -> dict[str, Any]:
    namespace, _, name = account.partition("/")
    user = {"username": f"system:serviceaccount:{namespace}:{name}", "extra": extra}
    return {"authenticated": True, "audiences": ["istio-ca"], "user": user}


STATUSES: dict[str, Any] = {
    "reviews": owner("default/bookinfo-reviews", **{POD: ["reviews-v1"], NODE: ["worker"]}),
    "unbound": owner("default/bookinfo-reviews"),
    "legacy": owner("default/default"),
    "ztunnel": owner("istio-system/ztunnel", **{POD: ["ztunnel-x"], NODE: ["worker"]}),
    "mars": owner("istio-system/ztunnel", **{NODE: ["mars"]}),
    "old": owner("istio-system/ztunnel"),
    "other-audience": {**owner("default/bookinfo-reviews"), "audiences": ["vault"]},
    "no-audience": {"authenticated": True, "user": owner("a/b")["user"]},
    "person": {"authenticated": True, "audiences": ["istio-ca"], "user": {"username": "alice"}},
    "half": {"authenticated": True, "audiences": ["istio-ca"], "user": {"username": "system:serviceaccount:a"}},
    "odd": {"authenticated": True, "audiences": ["istio-ca"], "user": 3},
    "nothing": {},
}


class Api:
    """Reviews tokens by a table."""

    def __init__(self, fault: KubeError | None = None) -> None:
        self.fault = fault
        self.asked: list[Object] = []

    async def create(self, kind: Kind, namespace: str, body: Object) -> Object:
        assert kind is TOKEN_REVIEW
        self.asked.append(body)
        if self.fault is not None:
            raise self.fault
        refused = {"authenticated": False, "error": "[invalid bearer token, token has expired]\nmore"}
        return {**body, "status": STATUSES.get(body["spec"]["token"], refused)}


def registrar(api: Api) -> KubeRegistrar:
    served = mesh()
    authority = CertificateAuthority.in_memory("cluster.local", NOW)
    inner = Registrar(lambda: served, authority, SECRET, timedelta(hours=24), lambda: NOW)
    domain = served.trust_domain
    return KubeRegistrar(inner, api, lambda: domain, audience="istio-ca", node_accounts=NODE_ACCOUNTS)


def caller(token: str | None, *, local: bool = False) -> Caller:
    return Caller(metadata={} if token is None else {"authorization": f"Bearer {token}"}, local=local)


def stream_node(node_id: str, name: str = "worker") -> Node:
    message = Node(id=node_id)
    message.metadata.update({"NODE_NAME": name})
    return message


def signed(
    token: str | None, identity: SpiffeId, *, local: bool = False, api: Api | None = None
) -> x509.Certificate:
    request = IstioCertificateRequest(csr=signing_request(identity, KEY).decode())

    async def main() -> bytes:
        return await registrar(api or Api()).create_certificate(
            request.SerializeToString(), caller(token, local=local)
        )

    chain = IstioCertificateResponse.FromString(asyncio.run(main())).cert_chain
    return x509.load_pem_x509_certificate(chain[0].encode())


def admitted(token: str | None, node: Node) -> None:
    async def main() -> None:
        await registrar(Api()).admit(node, caller(token))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("token", "identity"),
    [
        ("reviews", REVIEWS),
        ("unbound", REVIEWS),
        ("ztunnel", REVIEWS),
        (node_token(SECRET, "worker", 9e9), REVIEWS),
    ],
)
def test_accounts_that_get_a_certificate(token: str, identity: SpiffeId) -> None:
    names = signed(token, identity).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == [str(identity)]


@pytest.mark.parametrize(
    ("token", "identity", "said"),
    [
        (
            "reviews",
            PRODUCTPAGE,
            f"the token is of {REVIEWS}, which may not have the certificate of {PRODUCTPAGE}",
        ),
        ("reviews", SpiffeId("other.example", "default", "bookinfo-reviews"), "may not have the certificate"),
        ("legacy", LEGACY, f"no pod in the mesh is {LEGACY}"),
        ("ztunnel", PRODUCTPAGE, f"no pod on node worker is {PRODUCTPAGE}"),
        ("mars", REVIEWS, "the token is for node mars, which the mesh does not have"),
        (
            "old",
            REVIEWS,
            "the token of node proxy istio-system/ztunnel names no node: it must be a projected token",
        ),
        ("other-audience", REVIEWS, "the token is not for the audience istio-ca"),
        ("no-audience", REVIEWS, "the token is not for the audience istio-ca"),
        ("person", REVIEWS, "the token is of alice, which is no service account"),
        ("half", REVIEWS, "which is no service account"),
        ("odd", REVIEWS, "the token is of nobody"),
        ("nothing", REVIEWS, "the API server refuses the token: it is not authenticated"),
        ("forged", REVIEWS, "the API server refuses the token: [invalid bearer token, token has expired]"),
        (None, REVIEWS, "a bearer token is needed here"),
        ("ztunnel-node-v1.x.y", REVIEWS, "not one of this control plane"),
    ],
)
def test_accounts_that_are_refused_with_a_reason(token: str | None, identity: SpiffeId, said: str) -> None:
    with pytest.raises(NotAdmitted) as raised:
        signed(token, identity)
    assert said in str(raised.value)


def test_a_trusted_socket_needs_no_review_and_a_shown_token_counts_there_too() -> None:
    api = Api()
    signed(None, PRODUCTPAGE, local=True, api=api)
    assert api.asked == []
    with pytest.raises(NotAdmitted, match="may not have the certificate"):
        signed("reviews", PRODUCTPAGE, local=True, api=api)
    assert api.asked[0]["spec"] == {"token": "reviews", "audiences": ["istio-ca"]}


def test_callers_are_refused_while_the_api_server_does_not_answer() -> None:
    with pytest.raises(NotAdmitted, match="the token cannot be reviewed now: API server https://x: gone"):
        signed("reviews", REVIEWS, api=Api(ApiUnreachable("https://x", "gone")))


ZTUNNEL = "ztunnel~10.0.0.1~{}~svc.cluster.local"


@pytest.mark.parametrize(
    ("token", "node", "said"),
    [
        ("reviews", stream_node(ZTUNNEL.format("reviews-v1.default")), ""),
        ("unbound", stream_node(ZTUNNEL.format("any.default")), ""),
        ("ztunnel", stream_node(ZTUNNEL.format("ztunnel-x.istio-system")), ""),
        ("ztunnel", stream_node("sidecar~0.0.0.0~z.ns~ns"), ""),
        (
            "reviews",
            stream_node(ZTUNNEL.format("other.default")),
            "the token is for default/reviews-v1, the caller",
        ),
        ("unbound", stream_node(ZTUNNEL.format("any.shop")), "the token is for namespace default, the caller"),
        # In Envoy's dialect the private keys of a node come along.
        ("reviews", stream_node("sidecar~0.0.0.0~reviews-v1.default~x"), "is no node proxy's: it may only follow"),
        ("reviews", stream_node("worker"), "is no node proxy's"),
        ("reviews", stream_node("ztunnel~x"), "the caller says it is 'ztunnel~x'"),
        ("ztunnel", stream_node(ZTUNNEL.format("z.istio-system"), "worker2"), "the token is for node worker, the"),
        ("mars", stream_node(ZTUNNEL.format("z.istio-system"), "mars"), "which the mesh does not have"),
        ("forged", stream_node(ZTUNNEL.format("z.istio-system")), "the API server refuses the token"),
    ],
)
def test_streams(token: str, node: Node, said: str) -> None:
    if not said:
        admitted(token, node)
        return
    with pytest.raises(NotAdmitted) as raised:
        admitted(token, node)
    assert said in str(raised.value)


def test_reviews_are_bounded() -> None:
    class Slow(Api):
        running = most = 0

        async def create(self, kind: Kind, namespace: str, body: Object) -> Object:
            Slow.running += 1
            Slow.most = max(Slow.most, Slow.running)
            await asyncio.sleep(0)
            Slow.running -= 1
            return await super().create(kind, namespace, body)

    async def main() -> None:
        api = Slow()
        judge = registrar(api)
        node = stream_node(ZTUNNEL.format("reviews-v1.default"))
        asks: Callable[[], Awaitable[None]] = lambda: judge.admit(node, caller("reviews"))  # noqa: E731
        await asyncio.gather(*(asks() for _ in range(100)))
        assert len(api.asked) == 100

    asyncio.run(main())
    assert Slow.most == 16


def test_a_caller_is_refused_in_time_while_all_reviews_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_review, "_TIMEOUT_S", 0.05)
    released = asyncio.Event()

    class Hanging(Api):
        async def create(self, kind: Kind, namespace: str, body: Object) -> Object:
            self.asked.append(body)
            while not released.is_set():
                with suppress(asyncio.CancelledError):
                    await released.wait()
            return body

    async def main() -> None:
        api = Hanging()
        judge = registrar(api)
        node = stream_node(ZTUNNEL.format("reviews-v1.default"))
        taken = asyncio.gather(*(judge.admit(node, caller("reviews")) for _ in range(16)), return_exceptions=True)
        while len(api.asked) < 16:
            await asyncio.sleep(0)
        try:
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(NotAdmitted, match="the API server does not answer"):
                    await judge.admit(node, caller("reviews"))
        finally:
            released.set()
        assert all(isinstance(each, NotAdmitted) for each in await taken)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--kubeconfig", "x"], "--kubeconfig and --node-account need --kube"),
        (["--kube", "--node-account", "ztunnel"], "--node-account ztunnel: must be NAMESPACE/NAME"),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    from argparse import ArgumentParser

    from ztunnel.control_plane.command import add_arguments

    parser = ArgumentParser()
    add_arguments(parser.add_subparsers())
    assert run(parser.parse_args(["control-plane", "mesh.yaml", *arguments])) == 2
    assert said in capsys.readouterr().err
