"""Serves ``/check``, the page that ``ztunnel check`` reads. With ``?reach=ADDRESS`` it tests a connection to port
15008.

The test ends after the TLS handshake, without sending data. It connects only to the mesh's workloads with tunnel
support and to network gateways, so that the page cannot be used as a port scanner.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import socket
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import xxhash

from hbone.errors import TlsError, TlsReason
from hbone.settings import Role
from hbone.tls import TlsSession
from hbone.tls_context import TlsContext, TlsSettings, TlsVersion
from xds.model.workload import NetworkAddress, Protocol
from ztunnel.proxy.istio.admin import config_dump
from ztunnel.proxy.istio.admin.inspected import InspectedProxy
from ztunnel.proxy.istio.certificates.credentials import CredentialsError, Token
from ztunnel.proxy.istio.xds import mesh_dump
from ztunnel.runtime.http.page import JSON, PLAIN, Page, PageRequest, text
from ztunnel.runtime.kernel_facts import kernel_facts

HBONE_PORT: Final = 15008
#: The time limit of each test handshake, in seconds. It is long enough for a SYN and two retransmissions.
_REACH_S: Final = 8.0
_NO_ANSWER: Final = f"no answer in {_REACH_S:g} s"
#: Made-up ALPN names that enlarge a ClientHello to 12 KiB. Servers accept up to 16 KiB, and 12 KiB need full-size
#: packets even at an MTU of 9,000 bytes.
_FILLERS: Final = [b"%0255d" % number for number in range(48)]
_MOST_BYTES: Final = 65_536
#: The number of mesh entries hashed per event loop iteration.
_SLICE: Final = 64
#: At most this many refused xDS resources are listed.
_MOST_REFUSED: Final = 100


async def check_page(proxy: InspectedProxy, request: PageRequest) -> Page:
    """Return the page: facts about the proxy, or with the parameter ``reach`` the result of a test connection."""
    wanted = request.query.get("reach")
    if wanted is None:
        return text(json.dumps(await facts(proxy), indent=1) + "\n", content_type=JSON)
    try:
        address = str(ipaddress.ip_address(wanted))
    except ValueError:
        return text(f"reach: no address: {wanted!r}\n", 400, PLAIN)
    port = _tunnel_port(proxy, address)
    if port is None:
        return text(f"reach: no workload or gateway of the mesh takes tunnels at {address}\n", 400, PLAIN)
    return text(json.dumps(await reach(address, port)) + "\n", content_type=JSON)


async def facts(proxy: InspectedProxy) -> dict[str, Any]:
    """Return facts about the proxy and its node, as JSON values."""
    control, config, mesh = proxy.control, proxy.config, proxy.mesh
    refused = [dict(zip(("type", "name", "reason"), each, strict=True)) for each in control.refused()]
    ago_s = control.updated_ago_s
    return {
        "time": datetime.fromtimestamp(proxy.clock.wall(), UTC).isoformat(timespec="milliseconds"),
        "upSeconds": round(proxy.clock.monotonic() - proxy.started_s, 1),
        "node": config.node,
        "version": config_dump.version_entry(config.version_tag),
        "drainSeconds": config.drain_s,
        "ipv6": config.ipv6,
        "ready": not proxy.readiness.pending,
        "pending": sorted(proxy.readiness.pending),
        "controlPlane": {
            **config_dump.control_plane_entry(proxy),
            "updatedSecondsAgo": None if ago_s is None else round(ago_s, 1),
            "refused": refused[:_MOST_REFUSED],
            "refusedTotal": len(refused),
        },
        "mesh": {
            "workloads": await fingerprint(mesh_dump.workloads(mesh)),
            "services": await fingerprint(mesh_dump.services(mesh)),
            "policies": await fingerprint(mesh_dump.policies(mesh, {})),
        },
        "token": token_facts(config.auth_token),
        "kernel": kernel_facts(),
    }


def token_facts(setting: str | None) -> dict[str, Any]:
    """Return the audiences and the expiry (Unix time) stated in a token, never the token itself.

    Args:
        setting: ``AUTH_TOKEN``.
    """
    try:
        token = Token(setting).read()
    except CredentialsError as error:
        return {"error": str(error)}
    if token is None:
        return {"present": False}
    payload = token.split(".")[1] if token.count(".") == 2 else ""
    try:
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        audiences, expires = claims.get("aud") or [], claims.get("exp")
    except (ValueError, AttributeError):
        return {"present": True}  # the token is not a JWT
    named = [audiences] if isinstance(audiences, str) else audiences if isinstance(audiences, list) else []
    when = expires if isinstance(expires, int | float) else None
    return {"present": True, "audiences": [str(each)[:200] for each in named[:20]], "expires": when}


async def fingerprint(entries: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of entries in a part of the config dump, and a hash that does not depend on their order.

    Yields to the event loop after each :data:`_SLICE` entries.
    """
    total, number = 0, 0
    for entry in entries:
        total ^= xxhash.xxh64_intdigest(json.dumps(entry, sort_keys=True).encode())
        number += 1
        if not number % _SLICE:
            await asyncio.sleep(0)
    return {"number": number, "hash": f"{total:016x}"}


def _tunnel_port(proxy: InspectedProxy, address: str) -> int | None:
    """Return the tunnel port of a workload or network gateway, or None."""
    workload = proxy.mesh.workload_at(proxy.config.network, address)
    if workload is not None and workload.protocol is Protocol.HBONE:
        return HBONE_PORT
    for each in proxy.mesh.workloads():
        gateway = each.network_gateway
        place = gateway.destination if gateway is not None else None
        if gateway is not None and isinstance(place, NetworkAddress) and place.host == address:
            return gateway.hbone_mtls_port or HBONE_PORT
    return None


async def reach(address: str, port: int = HBONE_PORT) -> dict[str, Any]:
    """Try a TLS 1.3 handshake with an address (ALPN h2, without a client certificate), and return the result.

    The server refuses the client only after its own part of the handshake, so a finished handshake shows that the
    port is open. If it succeeds, a second handshake begins with a ClientHello of 12 KiB. Any answer to this
    ClientHello proves that full-size packets arrive.
    """
    seconds, error = await _handshake(address, port, [])
    found = {"address": address, "port": port, "seconds": seconds, "error": error}
    if not error:
        _, failed = await _handshake(address, port, _FILLERS)
        found["largeArrives"] = failed != _NO_ANSWER
    return found


async def _handshake(address: str, port: int, more_protocols: Sequence[bytes]) -> tuple[float, str]:
    """Run one TLS handshake. Return its duration in seconds, and the error text (empty if it succeeded)."""
    protocols = (b"h2", *more_protocols)
    settings = TlsSettings(min_version=TlsVersion.TLS_1_2, alpn=protocols)
    session = TlsSession(TlsContext(Role.CLIENT, settings))
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    error = ""
    try:
        async with asyncio.timeout(_REACH_S):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            with socket.socket(family) as sock:
                sock.setblocking(False)
                await loop.sock_connect(sock, (address, port))
                await _shake_hands(session, sock)
    except TimeoutError:
        error = _NO_ANSWER
    except TlsError as failed:
        error = f"TLS: {failed.detail}"
    except OSError as failed:
        error = failed.strerror or str(failed)
    return round(loop.time() - began_s, 4), error


async def _shake_hands(session: TlsSession, sock: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    output = memoryview(bytearray(_MOST_BYTES))
    while not session.handshake():
        await loop.sock_sendall(sock, output[: session.seal(b"", output)])
        data = await loop.sock_recv(sock, _MOST_BYTES)
        if not data:
            raise TlsError(TlsReason.OTHER, "the server closed the connection")
        session.receive(memoryview(data))
    await loop.sock_sendall(sock, output[: session.seal(b"", output)])
