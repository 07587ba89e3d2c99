"""Also authenticates callers by service account tokens, which the API server reviews.

Node tokens (:mod:`ztunnel.control_plane.tokens`) are verified here, without the API server. The results of reviews
are not cached: a token is sent once for a stream and once for a certificate, and a deleted account is refused at
the next request.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Final, Protocol

from xds.aio.server import Caller, NotAdmitted
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from ztunnel.control_plane.accounts import Account, account_of, check_certificate, check_stream, node_of
from ztunnel.control_plane.istio import Registrar, bearer_token, node_name
from ztunnel.control_plane.tokens import is_node_token
from ztunnel.kube.errors import KubeError
from ztunnel.kube.kinds import TOKEN_REVIEW, Kind
from ztunnel.kube.objects import Object

log = logging.getLogger(__name__)

#: The most concurrent reviews, so that a flood of tokens does not reach the API server.
_AT_ONCE: Final = 16
_TIMEOUT_S: Final = 10.0


class Api(Protocol):
    """The only method of :class:`ztunnel.kube.client.Client` that token reviews use."""

    async def create(self, kind: Kind, namespace: str, body: Object) -> Object:
        """Create an object and return it."""


class KubeRegistrar:
    """A :class:`Registrar` that also accepts tokens of service accounts.

    Args:
        registrar: authenticates all other callers, and signs certificates.
        api: its role needs ``create`` of tokenreviews (``system:auth-delegator``).
        trust_domain: returns the mesh's current trust domain.
        audience: the required audience of tokens.
        node_accounts: ``namespace/name`` of node proxies.
    """

    def __init__(
        self,
        registrar: Registrar,
        api: Api,
        trust_domain: Callable[[], str],
        *,
        audience: str,
        node_accounts: Collection[str],
    ) -> None:
        self._registrar = registrar
        self._api = api
        self._trust_domain = trust_domain
        self._audience = audience
        self._node_accounts = frozenset(node_accounts)
        self._reviewing = asyncio.Semaphore(_AT_ONCE)

    async def admit(self, node: Node, caller: Caller) -> None:
        account = await self._account(caller)
        if account is None:
            self._registrar.admit(node, caller)
            return
        proven = node_of(account, self._node_accounts)
        if proven is None:
            check_stream(account, node)
        else:
            self._registrar.check_node(proven, node_name(node))

    async def create_certificate(self, data: bytes, caller: Caller) -> bytes:
        """Answer a ``CreateCertificate`` call; see :data:`xds.aio.server.Answer`."""
        account = await self._account(caller)
        if account is None:
            return self._registrar.create_certificate(data, caller)
        proven = node_of(account, self._node_accounts)
        if proven is not None:
            return self._registrar.certificate_for_node(data, proven)
        domain = self._trust_domain()
        return self._registrar.certificate_for_account(
            data, lambda identity: check_certificate(account, identity, domain), account.key
        )

    async def _account(self, caller: Caller) -> Account | None:
        """Return the service account of a caller's token. None if there is no token, or the token is a node's.

        Raises:
            NotAdmitted: the token is refused, or the API server does not answer.
        """
        token = bearer_token(caller)
        if not token or is_node_token(token):
            return None
        review = {
            "apiVersion": TOKEN_REVIEW.api_version,
            "kind": TOKEN_REVIEW.name,
            "spec": {"token": token, "audiences": [self._audience]},
        }
        try:
            # The limit includes the wait for earlier reviews. Otherwise, while the API server hangs, later callers
            # would wait for the sum of all earlier callers' time limits.
            async with asyncio.timeout(_TIMEOUT_S), self._reviewing:
                reviewed = await self._api.create(TOKEN_REVIEW, "", review)
        except KubeError as error:
            log.error("tokens cannot be reviewed: %s", error)
            raise NotAdmitted(f"the token cannot be reviewed now: {error}") from error
        except TimeoutError as error:
            log.error("tokens cannot be reviewed: no answer within %g s", _TIMEOUT_S)
            raise NotAdmitted("the token cannot be reviewed now: the API server does not answer") from error
        status = reviewed.get("status")
        return account_of(status if isinstance(status, dict) else {}, self._audience)
