"""The policy server: ``ext_authz`` checks and health over gRPC, answered from what PolicySync sends.

One process answers for one pod (its only endpoint) or for a node (the endpoint that has the destination's
address). Nothing waits on the path of a check: it is decoded, evaluated and answered in one step of the loop.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Self

from xds.dialects.calico.authorization import decode_request, encode_response
from xds.errors import ConfigError
from xds.model import calico as c
from xds.proto.dikastes.healthz_pb2 import HealthCheckResponse
from ztunnel.policy.authz.call_server import UnaryServer
from ztunnel.policy.authz.reporter import Reporter
from ztunnel.policy.calico.follower import Follower
from ztunnel.policy.calico.guard import note
from ztunnel.policy.calico.store import Store
from ztunnel.policy.calico.verdict import Code, Verdict
from ztunnel.policy.ledger import TierPolicy, Uses
from ztunnel.runtime.clock import Clock
from ztunnel.runtime.line_limit import LineLimit

log = logging.getLogger(__name__)

_VERSIONS: Final = ("v3", "v2", "v2alpha")
CHECK_METHODS: Final = tuple(f"/envoy.service.auth.{version}.Authorization/Check" for version in _VERSIONS)
_CURRENT: Final = CHECK_METHODS[0]
READINESS: Final = "/dikastes.Healthz/CheckReadiness"
LIVENESS: Final = "/dikastes.Healthz/CheckLiveness"
#: The answer of ``grpc.health.v1`` has one enum: SERVING (1) or NOT_SERVING (2).
HEALTH: Final = "/grpc.health.v1.Health/Check"
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"

# Any user may connect: a proxy in another container runs as another user, and only the pod can reach the socket's
# folder.
SOCKET_MODE: Final = 0o777
#: The time limit for checks in progress when the server stops.
_STOP_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthzSettings:
    """How the policy server answers.

    Attributes:
        per_host: whether to choose the endpoint by the destination's address, instead of the only one.
        explain: whether to name the denying rule to the client and the proxy (headers, body, dynamic metadata).
        max_stale_s: without a stream for longer than this, answer UNAVAILABLE. None always answers from the last
            policies.
    """

    per_host: bool = False
    explain: bool = False
    max_stale_s: float | None = None


class PolicyServer:
    """Answers ``ext_authz`` checks; ``async with`` serves.

    Args:
        addresses: ``unix:/path`` and ``host:port``.
        follower: provides the store of policies. The caller runs it.
        clock: limits the rate of log lines, and provides the times of answers.
        socket_mode: the mode of Unix sockets.
        reporter: gets every flow. The caller runs it.

    Attributes:
        answers: number of checks by answer.
        uses: number of checks by policy.

    Raises:
        ServeError: raised on entering.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        follower: Follower,
        clock: Clock,
        settings: AuthzSettings = AuthzSettings(),
        *,
        socket_mode: int = SOCKET_MODE,
        reporter: Reporter | None = None,
    ) -> None:
        self.answers: Counter[Code] = Counter()
        self.uses = Uses[TierPolicy]()
        self._reporter = reporter
        self._clock = clock
        self._follower = follower
        self._settings = settings
        self._lines = LineLimit(clock, lambda count: log.info("%d more denials not logged", count))
        unary: dict[str, Callable[[bytes], bytes]] = {
            method: partial(self._check, old=method != _CURRENT) for method in CHECK_METHODS
        }
        unary |= {READINESS: self._readiness, LIVENESS: self._liveness, HEALTH: self._health}
        self._server = UnaryServer(
            addresses, unary, socket_mode=socket_mode, replace_files=True, stop_grace_s=_STOP_S
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses on which this serves, with the ports that the kernel picked."""
        return self._server.addresses

    @property
    def ready(self) -> bool:
        """Whether the policy store is complete and the stream that updates it is open."""
        return self._follower.in_sync

    async def __aenter__(self) -> Self:
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._server.__aexit__(*exception)

    def answer(self, flow: c.Flow) -> Verdict:
        """Return the verdict about a flow to this pod, or with ``per_host`` to a pod of this node."""
        most = self._settings.max_stale_s
        if most is not None and self._follower.age_s > most:
            return Verdict(Code.UNAVAILABLE, f"policies have been out of date for {self._follower.age_s:.0f} s")
        evaluator = self._follower.evaluator
        if self._settings.per_host:
            endpoint = evaluator.store.endpoint_at(flow.destination_ip)
        else:
            endpoint = _only_endpoint(evaluator.store)
        return evaluator.check(endpoint, flow)

    def _check(self, message: bytes, *, old: bool = False) -> bytes:
        try:
            flow = decode_request(message)
        except ConfigError as error:
            self.answers[Code.INVALID_ARGUMENT] += 1
            return encode_response(Code.INVALID_ARGUMENT, str(error))
        verdict = self.answer(flow)
        if old and verdict.allowed and flow.method is None:
            # Calico's server treats a connection in these API versions as a request with an empty method and path,
            # which no HTTP rule allows. So here the flow must be allowed both as a connection and as such a
            # request.
            verdict = self.answer(replace(flow, method="", path=""))
        self.answers[verdict.code] += 1
        note(self.uses, verdict, self._clock.wall())
        if self._reporter is not None:
            self._reporter.note(flow, verdict)
        if not verdict.allowed and self._lines.admits():
            _log_denial(flow, verdict)
        return encode_response(
            verdict.code, verdict.message, explained=_explained(verdict) if self._settings.explain else None
        )

    def _readiness(self, message: bytes) -> bytes:
        return HealthCheckResponse(healthy=self.ready).SerializeToString()

    def _liveness(self, message: bytes) -> bytes:
        return HealthCheckResponse(healthy=True).SerializeToString()

    def _health(self, message: bytes) -> bytes:
        return _SERVING if self.ready else _NOT_SERVING


def _only_endpoint(store: Store) -> c.EndpointId | None:
    return next(iter(store.endpoints), None) if len(store.endpoints) == 1 else None


def _log_denial(flow: c.Flow, verdict: Verdict) -> None:
    """Write one line about a refused client, its request, and the reason. Headers, bodies and query strings are
    left out, because they contain secrets.
    """
    path = None if flow.path is None else flow.path.partition("?")[0]
    log.info(
        "denied code=%s source=%s principal=%r destination=%s port=%d method=%r path=%r reason=%s",
        verdict.code.name,
        flow.source_ip,
        flow.source_principal,
        flow.destination_ip,
        flow.destination_port,
        flow.method,
        path,
        verdict.message,
    )


def _explained(verdict: Verdict) -> tuple[tuple[str, str], ...]:
    rule = verdict.rule
    if rule is None:
        return (("code", verdict.code.name),)
    return (("tier", rule.tier), ("policy", str(rule.policy or "")), ("rule", str(rule.index)))
