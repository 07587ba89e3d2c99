"""Two proxies of Envoy's dialect on loopback, replaced in turn under long connections; or one and an Envoy.

Each node ``n`` has these listeners at addresses of its own, and both have the same applications:

=========  ==================================================================================
last byte  where connections to it go
=========  ==================================================================================
1          in a tunnel to the other node
2          in a tunnel within the node (an Envoy has them on the wire)
3          plain
4          through an internal listener, and then in a tunnel to the other node
10         here tunnels end, at port 15008
=========  ==================================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from tests.handover.generations import Replacement, Report, cpu_s, descriptors, drained, reasons, rss_kib
from tests.handover.traffic import KINDS, PORT, client, paced, serving, short_connections
from tests.hbone.certificates import Authority
from tests.ports import free_port
from tests.ztunnel.proxy.envoy.harness import (
    Json,
    T,
    chain,
    connect_route,
    connection_manager,
    http2,
    listener,
    rbac,
    tcp,
)
from tests.ztunnel.proxy.envoy.test_proxy import internal_cluster

#: Ways to an application, by the last byte of a listener's address.
WAYS = {"tunnel": 1, "joined": 2, "plain": 3, "behind": 4}
_ENDS, _TUNNEL_PORT = 10, 15008
_TLS = "envoy.extensions.transport_sockets.tls.v3"
_START_S = 60.0
#: New tunnels after each replacement of an Envoy's peer. They use the tunnel connections that have moved.
_NEW = 5
#: Counters of an Envoy that do not change if it has seen no new tunnel connection, no end of one, no GOAWAY and
#: no reset.
_SEEN = re.compile(
    r"^(cluster\.to-\w+\.upstream_(?:cx_total|cx_destroy|cx_destroy_remote|cx_close_notify|cx_protocol_error|rq_rx_reset)"
    r"|http\.inbound\.downstream_(?:cx_total|cx_destroy|cx_destroy_remote|cx_protocol_error|rq_rx_reset)"
    r"|(?:cluster\.to-\w+\.)?http2\.(?:rx_reset|tx_reset)): (\d+)$",
    re.MULTILINE,
)
#: Of each kind of counter; an Envoy without it would not be checked.
_NEEDED = (
    "upstream_cx_total",
    "downstream_cx_total",
    "upstream_cx_destroy",
    "downstream_cx_destroy",
    "cx_close_notify",
    "rq_rx_reset",
    "http2.rx_reset",
)


@dataclass(slots=True)
class Local:
    """A place on this machine, with the interface that :mod:`tests.handover.traffic` needs."""

    name: str
    netns: None = None


@dataclass(slots=True)
class Node:
    """A node's proxy, of the generation that runs.

    Attributes:
        name, number: of the node; the number is a byte of its addresses.
        envoy: the proxy is an Envoy.
    """

    folder: Path
    name: str
    number: int
    envoy: bool
    admin: int = field(default_factory=free_port)
    generation: int = 0
    process: asyncio.subprocess.Process | None = None

    def address(self, last: int) -> str:
        """Return one of its addresses, which differ between concurrent test runs."""
        return f"127.{100 + os.getpid() % 100}.{self.number}.{last}"

    @property
    def log(self) -> Path:
        """Return the log of the running generation."""
        return self.folder / f"{self.name}-{self.generation}.log"

    async def start(self, *more: str) -> None:
        """Start the next generation."""
        from tests.interop.proxies import ENVOY  # once: the package looks for its binary

        self.generation += 1
        path = str(self.folder / f"{self.name}.json")
        words = [str(ENVOY), "-c", path, "--disable-hot-restart", "--concurrency", "1"]
        if not self.envoy:
            words = [sys.executable, "-m", "ztunnel", "proxy", "--bootstrap", path, "--shutdown", "60s"]
            words += [
                "--handover-dir",
                str(self.folder / self.name),
                "--readiness",
                "off",
                "--metrics",
                "off",
                *more,
            ]
        with self.log.open("wb") as output:
            self.process = await asyncio.create_subprocess_exec(*words, stdout=output, stderr=output)

    def get(self, page: str) -> str:
        """Return a page of the admin server; empty while nothing answers."""
        with contextlib.suppress(OSError), urlopen(f"http://127.0.0.1:{self.admin}{page}", timeout=5) as answer:
            return str(answer.read(), "ascii")
        return ""

    async def live(self) -> None:
        """Wait until it serves."""

        async def ready() -> bool:
            return (await asyncio.to_thread(self.get, "/ready")).startswith("LIVE")

        async with asyncio.timeout(_START_S):
            while not await ready():
                assert self.process is not None
                assert self.process.returncode is None, self.log.read_text()[-2000:]
                await asyncio.sleep(0.05)

    def lines(self) -> int:
        """Return how many lines its listeners of applications have written, in all generations."""
        path = self.folder / f"{self.name}.access"
        return path.read_text().count("\n") if path.exists() else 0

    def end(self) -> None:
        """Kill it."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()


def _secured(certificate: Json, *, server: bool) -> Json:
    common = {
        "alpn_protocols": ["h2"],
        "tls_params": {"tls_minimum_protocol_version": "TLSv1_3", "tls_maximum_protocol_version": "TLSv1_3"},
        **certificate,
    }
    config: Json = {
        "@type": f"{T}{_TLS}.{'Down' if server else 'Up'}streamTlsContext",
        "common_tls_context": common,
    }
    if server:
        config["require_client_certificate"] = True
    return {"name": "tls", "typed_config": config}


def _cluster(name: str, address: str, port: int, **more: Any) -> Json:
    there = {"endpoint": {"address": {"socket_address": {"address": address, "port_value": port}}}}
    assignment = {"cluster_name": name, "endpoints": [{"lb_endpoints": [there]}]}
    return {"name": name, "type": "STATIC", "load_assignment": assignment, **more}


def _at(node: Node, last: int, port: int, *chains: Json, name: str, **more: Any) -> Json:
    _, made = listener(*chains, name=name, **more)
    made["address"]["socket_address"] |= {"address": node.address(last), "port_value": port}
    return made


def bootstrap(node: Node, other: Node, application: str, authority: Authority) -> Json:
    """Return the configuration of a node; an Envoy reads it as well."""
    leaf = authority.issue(f"spiffe://td/ns/a/sa/{node.name}")
    certificate = {
        "tls_certificates": [
            {
                "certificate_chain": {"inline_string": leaf.chain_pem.decode()},
                "private_key": {"inline_string": leaf.key_pem.decode()},
            }
        ],
        "validation_context": {"trusted_ca": {"inline_string": authority.pem.decode()}},
    }
    kind = "envoy.extensions.access_loggers.file.v3.FileAccessLog"
    fields = {"received": "%BYTES_RECEIVED%", "sent": "%BYTES_SENT%", "flags": "%RESPONSE_FLAGS%"}
    log = [
        {
            "name": "file",
            "typed_config": {
                "@type": T + kind,
                "path": str(node.folder / f"{node.name}.access"),
                "log_format": {"json_format": fields},
            },
        }
    ]
    forever = {"idle_timeout": "0s"}
    tunnelling = {"tunneling_config": {"hostname": f"{application}:{PORT}"}, **forever}
    inner = listener(chain(tcp("to-other", **tunnelling)), name="inner", internal_listener={})[1]
    del inner["address"]
    manager = connection_manager({"route_config": connect_route("app", timeout="0s", idle_timeout="0s")})
    ends = chain(rbac(None), manager, transport_socket=_secured(certificate, server=True))
    client_tls = {
        "transport_socket": _secured(certificate, server=False),
        "typed_extension_protocol_options": http2(),
    }
    return {
        "node": {"id": node.name, "cluster": "c"},
        "admin": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": node.admin}}},
        "bootstrap_extensions": [
            {
                "name": "envoy.bootstrap.internal_listener",
                "typed_config": {
                    "@type": f"{T}envoy.extensions.bootstrap.internal_listener.v3.InternalListener",
                },
            }
        ],
        "static_resources": {
            "listeners": [
                _at(
                    node, WAYS["tunnel"], PORT, chain(tcp("to-other", access_log=log, **tunnelling)), name="tunnel"
                ),
                _at(node, WAYS["joined"], PORT, chain(tcp("to-own", access_log=log, **tunnelling)), name="joined"),
                _at(node, WAYS["plain"], PORT, chain(tcp(access_log=log, **forever)), name="plain"),
                _at(node, WAYS["behind"], PORT, chain(tcp("within", access_log=log, **forever)), name="behind"),
                _at(node, _ENDS, _TUNNEL_PORT, ends, name="inbound"),
                inner,
            ],
            "clusters": [
                _cluster("app", application, PORT),
                _cluster("to-other", other.address(_ENDS), _TUNNEL_PORT, **client_tls),
                _cluster("to-own", node.address(_ENDS), _TUNNEL_PORT, **client_tls),
                internal_cluster("within", "inner")[1],
            ],
        },
    }


@contextlib.asynccontextmanager
async def running(folder: Path, *, far_envoy: bool) -> AsyncIterator[tuple[Node, Node, str]]:
    """Both nodes, and the address of the applications."""
    authority = Authority()
    near, far = Node(folder, "near", 1, False), Node(folder, "far", 2, far_envoy)
    application = near.address(200)
    for node, other in ((near, far), (far, near)):
        (folder / node.name).mkdir()
        path = folder / f"{node.name}.json"
        path.touch(0o600)
        path.write_text(json.dumps(bootstrap(node, other, application, authority)))
    try:
        for node in (near, far):
            await node.start()
        for node in (near, far):
            await node.live()
        yield near, far, application
    finally:
        for node in (near, far):
            node.end()


async def measured(node: Node) -> Replacement:
    """Replace a node's proxy, and wait until the old process has ended."""
    old, log = node.process, node.log
    assert old is not None
    before = rss_kib(old.pid), descriptors(old.pid)
    await node.start("--replace")
    began_s = asyncio.get_running_loop().time()
    await asyncio.wait_for(old.wait(), _START_S)
    took_s = asyncio.get_running_loop().time() - began_s
    new = node.process
    assert new is not None
    text = log.read_text()
    given = re.search(r"connections handed over.* given=(\d+) .*stayed=(\d+).*", text)
    pauses = re.findall(r"pause(?:_p\d\d)?=([\d.]+)ms", given[0]) if given is not None else []
    assert given is not None, text[-2000:]
    return Replacement(
        node=node.name,
        took_s=took_s,
        given=int(given[1]),
        stayed=int(given[2]),
        pauses_ms=(float(pauses[0]), float(pauses[1]), float(pauses[2])),
        rss_kib=(before[0], rss_kib(new.pid)),
        descriptors=(before[1], descriptors(new.pid)),
        cpu_s=cpu_s(new.pid),
        builds=("one", "one"),
        why=reasons(given[0]),
    )


async def run(
    folder: Path, *, connections: int, replacements: int, pause_s: float, far_envoy: bool = False
) -> Report:
    """Hold connections of every kind over every path, and replace proxies in turn meanwhile; see
    :func:`tests.handover.generations.run`. An Envoy is not replaced, and must see only orderly ends.
    """
    report = Report()
    outcome = report.outcome
    pace_s = paced(connections)
    async with running(folder, far_envoy=far_envoy) as (near, far, application):
        ways = [(node, way) for node in (near, far) for way in WAYS.values()]
        async with contextlib.AsyncExitStack() as stack:
            place = Local("machine")
            await stack.enter_async_context(serving(place, outcome, application))
            async with asyncio.TaskGroup() as group:
                for number in range(connections):
                    node, way = ways[number % len(ways)]
                    kind = KINDS[number // len(ways) % len(KINDS)]
                    group.create_task(client(place, node.address(way), kind, outcome, pace_s))
                    if not number % 20:
                        await asyncio.sleep(0.1)
                # Beside an Envoy, new tunnels are only opened between replacements: a successor that accepts a
                # connection before it has taken the tunnel connections dials one of its own.
                for way in (WAYS["joined"],) if far_envoy else (WAYS["tunnel"], WAYS["joined"]):
                    group.create_task(short_connections(place, near.address(way), outcome))
                await asyncio.sleep(1.0)
                outcome.round_trips_s.clear()
                replaced = [near] if far_envoy else [near, far]
                seen = far.get("/stats") if far_envoy else ""
                for number in range(replacements):
                    report.replacements.append(await measured(replaced[number % len(replaced)]))
                    report.during_s += drained(outcome.round_trips_s)
                    for _ in range(_NEW if far_envoy else 0):
                        await client(place, near.address(WAYS["tunnel"]), "short", outcome)
                    await asyncio.sleep(pause_s)
                    report.between_s += drained(outcome.round_trips_s)
                if far_envoy:
                    outcome.failures += noticed(seen, await asyncio.to_thread(far.get, "/stats"))
                outcome.stop.set()
        await _check_lines(report, near, far)
    return report


def noticed(before: str, after: str) -> list[str]:
    """Return what an Envoy has noticed of hand-overs at the other end of its tunnel connections.

    Args:
        before, after: its page ``/stats`` at two times, between which no such connection should have changed.
    """
    earlier, later = ({name: int(number) for name, number in _SEEN.findall(page)} for page in (before, after))
    found = [f"Envoy has no counter {name}" for name in _NEEDED if not any(each.endswith(name) for each in later)]
    return found + [
        f"Envoy counted {name} {number - earlier.get(name, 0)}"
        for name, number in later.items()
        if number > earlier.get(name, 0)
    ]


async def _check_lines(report: Report, near: Node, far: Node) -> None:
    """Note a failure unless each connection has one line, once every process has ended."""
    outcome = report.outcome
    for node in (near, far):
        process = node.process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(process.wait(), _START_S)
    wanted = sum(outcome.done.values())
    found = near.lines() + far.lines()
    if not outcome.failures and found != wanted:
        outcome.failures.append(f"{found} access lines of {wanted} connections")
