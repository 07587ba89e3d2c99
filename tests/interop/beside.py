"""Runs scenarios with Envoy and with this proxy from the same bootstrap, and compares the results for clients and
the logs.

A scenario is a listener with a log of its own, and its clients. A suite is the scenarios of one bootstrap.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.interop.authorization import Certificates
from tests.interop.loopback import Running, until
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import Json, T, chain, tcp

WAIT_S = 5.0
LOG = "%RESPONSE_FLAGS% %RESPONSE_FLAGS_LONG% %UPSTREAM_CLUSTER% %UPSTREAM_CLUSTER_RAW% %FILTER_CHAIN_NAME% "
LOG += "%RESPONSE_CODE_DETAILS% %UPSTREAM_REQUEST_ATTEMPT_COUNT% "
LOG += "%CONNECTION_TERMINATION_DETAILS% %REQUESTED_SERVER_NAME%"
Client = Callable[[int, Path], str]


def said(sock: socket.socket, data: bytes = b"?" * 64) -> str:
    """Send a request; return the name of the application that answers."""
    sock.sendall(data)
    return sock.recv(64).decode() or "closed"


def plain(data: bytes = b"?" * 64, host: str = "127.0.0.1") -> Client:
    """A client that sends some bytes."""

    def ask(port: int, _: Path) -> str:
        try:
            with socket.create_connection((host, port), WAIT_S) as sock:
                return said(sock, data)
        except ConnectionRefusedError:
            return "refused"
        except OSError:
            return "closed"  # by FIN or by RST, as our bytes were read before or not

    return ask


def header(host: str = "127.0.0.1") -> Client:
    """A client of an application that echoes: the PROXY header in front of its bytes, with names for the ports."""

    def ask(port: int, _: Path) -> str:
        try:
            with socket.create_connection((host, port), WAIT_S) as sock:
                own = sock.getsockname()[1]
                sock.sendall(b"?")
                seen = b""
                while not seen.endswith(b"?") and (more := sock.recv(512)):
                    seen += more
        except OSError:
            return "closed"
        for number, name in ((own, b"<client>"), (port, b"<listener>")):
            seen = seen.replace(str(number).encode(), name).replace(number.to_bytes(2, "big"), name)
        return repr(seen)

    return ask


def secured(*protocols: str, name: str | None = None) -> Client:
    """A client over TLS, which sends its protocols in this order."""

    def ask(port: int, _: Path) -> str:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if protocols:
            context.set_alpn_protocols(list(protocols))
        try:
            with (
                socket.create_connection(("127.0.0.1", port), WAIT_S) as raw,
                context.wrap_socket(raw, server_hostname=name) as sock,
            ):
                return f"{said(sock)} {sock.selected_alpn_protocol()}"
        except ConnectionRefusedError:
            return "refused"
        except OSError:
            return "closed"  # by FIN or by RST, as our bytes were read before or not

    return ask


def inspector(kind: str) -> Json:
    """A listener filter."""
    full = {"tls": "tls_inspector.v3.TlsInspector", "http": "http_inspector.v3.HttpInspector"}[kind]
    return {"name": kind, "typed_config": {"@type": f"{T}envoy.extensions.filters.listener.{full}"}}


def tls(folder: Path, *protocols: str) -> Json:
    """A server's transport socket."""
    server = {"filename": str(folder / "server.pem")}
    common = {"tls_certificates": [{"certificate_chain": server, "private_key": server}]}
    if protocols:
        common["alpn_protocols"] = list(protocols)  # type: ignore[assignment]  # of strings
    kind = f"{T}envoy.extensions.transport_sockets.tls.v3.DownstreamTlsContext"
    return {"name": "tls", "typed_config": {"@type": kind, "common_tls_context": common}}


@dataclass(frozen=True)
class Scenario:
    """A listener, and clients whose observations are compared.

    Attributes:
        listener: fields beside its name, address and log.
        clients: in order.
        address: the host to listen on.
        form: the log's format, as the file logger's fields.
        bound: whether anything listens there.
    """

    listener: Callable[[Path], Json]
    clients: tuple[Client, ...] = (plain(),)
    address: Json = field(default_factory=lambda: {"address": "127.0.0.1"})
    form: Json = field(
        default_factory=lambda: {"log_format": {"text_format_source": {"inline_string": LOG + "\n"}}}
    )
    bound: bool = True


NO_PANIC: Json = {"healthy_panic_threshold": {"value": 0}}


def to(*chains: Json, **more: Any) -> Callable[[Path], Json]:
    """A listener without files."""
    return lambda _: {"filter_chains": list(chains), **more}


def matching(match: Json, target: str = "one", **more: Any) -> Json:
    """A chain with a match, named like its cluster."""
    return {**chain(tcp(target)), "name": target, "filter_chain_match": match, **more}


def rest(target: str = "two", **more: Any) -> Json:
    """A chain for everything else."""
    return {**chain(tcp(target)), "name": target, **more}


NETWORK = f"{T}envoy.extensions.matching.common_inputs.network.v3."


def network_input(name: str, **more: Any) -> Json:
    return {"name": name, "typed_config": {"@type": NETWORK + name, **more}}


def go(name: str) -> Json:
    kind = {"@type": f"{T}google.protobuf.StringValue", "value": name}
    return {"action": {"name": name, "typed_config": kind}}


def matches(matcher: Json, *filters: Json) -> Callable[[Path], Json]:
    """A listener whose chains ``one``, ``two`` and ``three`` are chosen by a matcher."""
    chains = [{**chain(tcp(name)), "name": name} for name in ("one", "two", "three")]
    return to(*chains, filter_chain_matcher=matcher, listener_filters=list(filters))


def listed(*rows: tuple[Json, str]) -> Callable[[Path], Json]:
    matchers = [{"predicate": predicate, "on_match": go(name)} for predicate, name in rows]
    return matches({"matcher_list": {"matchers": matchers}, "on_no_match": go("three")})


def differences(
    envoy: dict[str, str],
    ours: dict[str, str],
    logs: Mapping[str, str],
    clients: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, tuple[str, str]]:
    """Return the results of both proxies for the scenarios that end differently.

    A scenario whose expected difference did not occur is included, too.

    Args:
        logs: the scenarios in which only the logs differ on purpose.
        clients: those in which clients get different results on purpose.
    """
    found = {}
    for name, theirs in envoy.items():
        same = theirs == ours[name]
        if name in logs or name in clients:
            alike = json.loads(theirs)["clients"] == json.loads(ours[name])["clients"]
            same = not same and alike is (name in logs)
        if not same:
            found[name] = (theirs, ours[name])
    return found


def listeners(scenarios: Mapping[str, Scenario], ports: dict[str, int], folder: Path) -> list[Json]:
    """The listeners of scenarios, each with a log of its own."""
    kind = f"{T}envoy.extensions.access_loggers.file.v3.FileAccessLog"
    found = []
    for number, (name, scenario) in enumerate(scenarios.items()):
        sink = {"@type": kind, "path": str(folder / f"{number}.log"), **scenario.form}
        address = {"socket_address": {"port_value": ports[name], **scenario.address}}
        log = [{"name": "f", "typed_config": sink}]
        found.append({"name": f"l{number}", "address": address, "access_log": log, **scenario.listener(folder)})
    return found


@dataclass(frozen=True)
class Suite:
    """Scenarios in one bootstrap.

    Attributes:
        bootstrap: the parts beside the scenarios' listeners.
        applications: starts the applications, and returns their ports.
        different_logs: scenarios in which clients get the same and the logs differ on purpose, and the reason.
        different: scenarios in which clients get different results on purpose, and the reason.
    """

    scenarios: Mapping[str, Scenario]
    bootstrap: Callable[[dict[str, int], Path], Json]
    applications: Callable[[contextlib.ExitStack, Path], dict[str, int]]
    different_logs: Mapping[str, str] = field(default_factory=dict)
    different: Mapping[str, str] = field(default_factory=dict)


def compared(suite: Suite) -> dict[str, tuple[str, str]]:
    """Run a suite with both proxies at once. Return both results of the scenarios that end differently."""
    with ThreadPoolExecutor(2) as pool:
        envoy, ours = pool.map(lambda kind: observed(kind, suite), ("envoy", "ours"))
    return differences(envoy, ours, suite.different_logs, suite.different)


def observed(kind: str, suite: Suite) -> dict[str, str]:
    """Run all scenarios with one kind of proxy. Return the result of each."""
    with contextlib.ExitStack() as stack, Running(kind) as running:
        Certificates(running.folder)
        apps = suite.applications(stack, running.folder)
        ports = {name: free_port() for name in suite.scenarios}
        document = suite.bootstrap(apps, running.folder)
        others = document["static_resources"].get("listeners", [])
        document["static_resources"]["listeners"] = listeners(suite.scenarios, ports, running.folder) + others
        v4 = [
            ports[name]
            for name, scenario in suite.scenarios.items()
            if scenario.address["address"] == "127.0.0.1" and scenario.bound
        ]
        running.start(document, v4)
        found = {}
        for number, (name, scenario) in enumerate(suite.scenarios.items()):
            seen = [client(ports[name], running.folder) for client in scenario.clients]
            reached = sum(each != "refused" for each in seen)
            path = running.folder / f"{number}.log"
            until(lambda path=path, reached=reached: _lines(path) >= reached)  # type: ignore[misc]
            # Connections that end at nearly the same time are logged in either order.
            log = sorted(path.read_text().splitlines()) if path.exists() else []
            found[name] = json.dumps({"clients": seen, "log": log})
        return found


def _lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0
