"""Runs the server side of a client's TLS handshake: waits until the limiter allows it, stores the peer's identity,
and counts failures.
"""

from __future__ import annotations

import logging
import socket
from typing import Final

from hbone.aio.poller import Poller
from hbone.aio.socket import PlainSocket
from hbone.aio.tls_socket import TlsSocket
from hbone.errors import HboneError, TlsError, TlsReason
from hbone.tls import PeerFacts
from hbone.tls_context import TlsContext
from xds.model.facts import PeerCertificate
from ztunnel.proxy.dataplane.handshake_limiter import PendingHandshake
from ztunnel.proxy.dataplane.life_table import State
from ztunnel.proxy.dataplane.reasons import Reason
from ztunnel.proxy.envoy.listeners.chains import LiveChain
from ztunnel.proxy.envoy.listeners.connections import LiveConnection
from ztunnel.proxy.envoy.listeners.handshakes import Handshakes, Rejected
from ztunnel.proxy.envoy.listeners.listener import LiveListener
from ztunnel.proxy.envoy.secrets.names import peer_names
from ztunnel.proxy.envoy.stream.outcome import Refused
from ztunnel.proxy.envoy.stream.stream_info import StreamInfo, TlsFacts

log = logging.getLogger(__name__)

#: The timeout of a chain without ``transport_socket_connect_timeout``.
_HANDSHAKE_S: Final = 10.0


def context_of(listener: LiveListener, chain: LiveChain) -> TlsContext | None:
    """Return a filter chain's TLS context for a new handshake, or ``None`` if the chain does not use TLS.

    Raises:
        Refused: a secret has not arrived.
    """
    if chain.tls is None:
        return None
    if chain.tls.current is None:
        listener.ssl.not_ready.value += 1
        raise Refused("downstream_context_secrets_not_ready", Reason.CERTIFICATE)
    return chain.tls.current


async def handshake_turn(
    handshakes: Handshakes, connection: LiveConnection, chain: LiveChain, sock: socket.SocketType
) -> PendingHandshake:
    """Wait until a connection's handshake is allowed to begin. If the handshake is refused, close the socket.

    Raises:
        Rejected: a limit of half-open connections is reached.
    """
    facts = connection.info.facts
    pending = await handshakes.turn(
        sock,
        connection,
        facts.direct_source.host,
        facts.destination.host,
        chain.model.transport_connect_timeout_s or _HANDSHAKE_S,
    )
    connection.state = State.HANDSHAKE
    return pending


async def accept_tls(
    handshakes: Handshakes,
    connection: LiveConnection,
    listener: LiveListener,
    chain: LiveChain,
    end: PlainSocket,
    poller: Poller,
) -> TlsSocket:
    """Run the server side of a TLS handshake, for filter chains without tunnels. The connection owns the returned
    socket.

    Raises:
        Refused: the handshake failed, or a secret of the chain has not arrived.
    """
    context = context_of(listener, chain)
    assert context is not None
    info = connection.info
    sock = end.detach()
    try:
        pending = await handshake_turn(handshakes, connection, chain, sock)
    except Rejected as error:
        raise handshake_failed(info, listener, error) from error
    secured = TlsSocket(sock, context, poller)
    connection.own(secured.close)
    try:
        facts = await secured.establish(chain.model.transport_connect_timeout_s or _HANDSHAKE_S)
    except HboneError as error:
        pending.ended()
        raise handshake_failed(info, listener, error) from error
    except BaseException:
        pending.ended()
        raise
    pending.proved()
    note_peer(connection, facts, chain)
    listener.ssl.negotiated(facts)
    return secured


def note_peer(connection: LiveConnection, facts: PeerFacts, chain: LiveChain) -> None:
    """Store the peer's identity after a handshake in the facts about the connection, which are then complete."""
    info = connection.info
    names = PeerCertificate()
    if facts.certificate is not None:
        names = peer_names(facts.certificate, facts.uri_sans)
        if facts.chain:
            info.facts.peer = names
    info.facts.secured = True
    own = chain.tls.presented_in(facts) if chain.tls is not None else None
    info.tls = TlsFacts(
        version=facts.version,
        cipher=facts.cipher,
        peer_subject=names.subject,
        peer_chain=facts.chain or ((facts.certificate,) if facts.certificate is not None else ()),
        local=own.certificate if own is not None else None,
        peer_uri_sans=facts.uri_sans,
        peer_dns_sans=names.dns_sans,
        local_uri_sans=own.uri_sans if own is not None else (),
    )
    info.facts.transport_protocol = "tls"


def handshake_failed(info: StreamInfo, listener: LiveListener, error: HboneError) -> Refused:
    """Count a failed handshake by its reason."""
    ssl = listener.ssl
    info.downstream_failure = f"TLS_error: {error}"
    if isinstance(error, TlsError) and not error.by_peer:
        if error.reason is TlsReason.NO_CERT:
            ssl.fail_verify_no_cert.value += 1
        elif error.reason is TlsReason.SAN:
            ssl.fail_verify_san.value += 1
            log.info("verify cert failed: %s", error.detail)
        elif error.reason in (TlsReason.CHAIN, TlsReason.EXPIRED, TlsReason.REVOKED):
            ssl.fail_verify_error.value += 1
        else:
            ssl.connection_error.value += 1
    elif info.tls is None:
        ssl.connection_error.value += 1
    return Refused(failure=Reason.TLS)
