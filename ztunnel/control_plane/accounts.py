"""Reads the claims of a reviewed service account token, and decides what its owner is authorised for. Pure.

The API server identifies the owner of a token (TokenReview). A sidecar proxy presents the token of its pod's own
account. It gets only that account's certificate, and the description of the mesh. The accounts of node proxies get
certificates for the pods of the node that their token is bound to; such tokens name the node since Kubernetes 1.30
(``authentication.kubernetes.io/node-name``).
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from xds.aio.server import NotAdmitted
from xds.model.identity import SpiffeId
from xds.proto.envoy.config.core.v3.core_pb2 import Node

_USER_PREFIX: Final = "system:serviceaccount:"
_NODE_NAME: Final = "authentication.kubernetes.io/node-name"
_POD_NAME: Final = "authentication.kubernetes.io/pod-name"
#: The default service accounts of node proxies: that of Istio's chart, and ours.
NODE_ACCOUNTS: Final = ("istio-system/ztunnel",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """The owner of a token.

    Attributes:
        namespace, name: the service account's namespace and name.
        pod: the pod that the token is bound to. Empty means none.
        node: that pod's node. Empty if the API server did not name it.
    """

    namespace: str
    name: str
    pod: str = ""
    node: str = ""

    @property
    def key(self) -> str:
        """``namespace/name``."""
        return f"{self.namespace}/{self.name}"


def account_of(status: Mapping[str, Any], audience: str) -> Account:
    """Return the owner of a token, from the status of its TokenReview.

    Raises:
        NotAdmitted: the API server does not know the token, or its audience is another service.
    """
    if status.get("authenticated") is not True:
        said = str(status.get("error") or "it is not authenticated").partition("\n")[0]
        raise NotAdmitted(f"the API server refuses the token: {said}")
    audiences = status.get("audiences")
    # An API server without support for audiences returns none. Then the token's audience is the API server itself.
    if not isinstance(audiences, list) or audience not in audiences:
        raise NotAdmitted(f"the token is not for the audience {audience}")
    user = status.get("user")
    username = str(user.get("username", "")) if isinstance(user, Mapping) else ""
    namespace, _, name = username.removeprefix(_USER_PREFIX).partition(":")
    if not username.startswith(_USER_PREFIX) or not namespace or not name:
        raise NotAdmitted(f"the token is of {username or 'nobody'}, which is no service account")
    assert isinstance(user, Mapping)
    extra = user.get("extra")
    return Account(namespace=namespace, name=name, pod=_first(extra, _POD_NAME), node=_first(extra, _NODE_NAME))


def _first(extra: object, name: str) -> str:
    values = extra.get(name) if isinstance(extra, Mapping) else None
    return str(values[0]) if isinstance(values, list) and values else ""


def node_of(account: Account, node_accounts: Collection[str]) -> str | None:
    """Return the node whose proxy presents a token; ``None`` if a sidecar proxy presents it.

    Raises:
        NotAdmitted: the token is a node proxy's, and names no node.
    """
    if account.key not in node_accounts:
        return None
    if not account.node:
        raise NotAdmitted(
            f"the token of node proxy {account.key} names no node: it must be a projected token of its pod, of"
            " Kubernetes 1.30 or later"
        )
    return account.node


def check_certificate(account: Account, wanted: SpiffeId, trust_domain: str) -> None:
    """Check that a sidecar proxy requests a certificate for its own identity.

    Raises:
        NotAdmitted: the proxy requests another identity than its own.
    """
    own = SpiffeId(trust_domain, account.namespace, account.name)
    if wanted != own:
        raise NotAdmitted(f"the token is of {own}, which may not have the certificate of {wanted}")


def check_stream(account: Account, node: Node) -> None:
    """Check the node id that a sidecar proxy claims.

    Raises:
        NotAdmitted: the id is not of Istio's dialect (other dialects receive the node's private keys), or is
            another pod's.
    """
    kind, _, rest = node.id.partition("~")
    if kind != "ztunnel":
        raise NotAdmitted(
            f"account {account.key} is no node proxy's: it may only follow the mesh as Istio's ztunnel"
        )
    name = rest.split("~")[1] if rest.count("~") == 2 else ""
    pod, _, namespace = name.rpartition(".")
    if namespace != account.namespace or (account.pod and pod != account.pod):
        bound = f"{account.namespace}/{account.pod}" if account.pod else f"namespace {account.namespace}"
        raise NotAdmitted(f"the token is for {bound}, the caller says it is {name or node.id!r}")
