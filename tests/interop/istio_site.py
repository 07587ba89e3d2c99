"""The mesh on which our node proxy meets Envoys: three nodes, two networks, and an Envoy in each of six pods.

::

    w1                            w2                                w3, network ``far``
      client      captured          server      captured              remote      captured
      stranger    captured          guarded     captured, serves      gateway     Envoy: passes the bytes of
      dialler     Envoy: a client               waypoints only                    tunnels on to remote
                                    sandwich    captured, Envoy
                                    terminator  Envoy: ends tunnels
                                    spare       the same, 5 streams
                                    waypoint    Envoy: ends and opens tunnels

``terminator`` and ``spare`` have applications of their own and serve nobody called stranger; in services of both
the former is drawn nearly always. The embedded control plane signs; the mesh comes from local files, one for each
network.
"""

import asyncio
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml

from deploy.lab import Lab, Place, Worker
from tests.interop.apps import COMMAND, HTTP, Apps, Reply, get
from tests.interop.case import Opened
from tests.interop.istio_envoys import (
    HBONE_PORT,
    Config,
    Credentials,
    IstioEnvoy,
    address,
    chain,
    denied,
    destination_is_authority,
    http,
    http2,
    inner_listener,
    internal,
    listener,
    original_dst,
    static,
    tcp,
    tunnels,
    typed,
)
from tests.interop.proxies import eventually
from tests.netns.istio import AmbientMesh, NodeProxy

T = TypeVar("T")
WAIT_S = 15.0
DOMAIN = "default.svc.cluster.local"
IDENTITY = "spiffe://cluster.local/ns/default/sa/{}"
FAR = "far"
NODES = {
    "w1": ["client", "stranger", "dialler"],
    "w2": ["server", "guarded", "sandwich", "terminator", "spare", "waypoint"],
    "w3": ["remote", "gateway"],
}
CAPTURED = ["client", "stranger", "server", "guarded", "sandwich", "remote"]
APPS = ("server", "guarded", "terminator", "spare", "remote")
PORTS = {80: HTTP, COMMAND: COMMAND}
#: A port that both ends of tunnels refuse by policy, one where nobody listens, one where a waypoint is sandwiched.
BARRED, CLOSED, SANDWICH = 9403, 7777, 15088
FEW_STREAMS = 5
#: Last parts of the addresses of services.
SERVICES = {
    "terminator": 1,
    "spare": 2,
    "half-down": 3,
    "barred": 4,
    "by-address": 5,
    "by-hostname": 6,
    "sandwiched": 7,
    "shop": 8,
    "server": 9,
}
#: The listeners of the dialling Envoy, by their effect on a connection. Their ports are below clients' ports.
DIALS = {
    name: 10000 + number
    for number, name in enumerate(
        (
            "server",
            "command",
            "hostname",
            "unknown-hostname",
            "other-pod",
            "nonsense",
            "closed",
            "guarded",
            "denied",
            "foreign",
            "anonymous",
            "request",
            "websocket",
            "ten-requests",
        )
    )
}


def vip(name: str, version: int) -> str:
    """The address of a service."""
    return f"10.96.5.{SERVICES[name]}" if version == 4 else f"fd00:96::5:{SERVICES[name]:x}"


def at(host: str, port: int) -> str:
    """Return address and port as one string, with IPv6 in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


#: Lines of our proxies wait this long for others to be written with, and then some.
_LINES_S = 0.15


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A column: the version of IP that clients and Envoys use, the processes that carry a node's connections."""

    version: int
    workers: int = 1

    def __str__(self) -> str:
        return f"IPv{self.version}" + (f" {self.workers} workers" if self.workers > 1 else "")


class _Mesh(AmbientMesh):
    """Its third node is in another network, knows the addresses there, and renews certificates all the time."""

    def start_proxy(self, worker: Worker, place: Place | None = None, **env: str) -> "subprocess.Popen[bytes]":
        if worker.place.name == "w3":
            env = {"NETWORK": FAR, "LOCAL_XDS_PATH": f"{self.folder}/far.yaml", "SECRET_TTL": "8s", **env}
        return super().start_proxy(worker, place, **env)


class IstioSite(Opened):
    """``with IstioSite(Setting(version=4)) as site: ...``; agents and control plane run in a thread meanwhile.

    Attributes:
        setting: as given.
        mesh, apps: the network with our proxies, and the applications in it.
        credentials: certificates of the same authority.
        envoys: by pod.
    """

    def __init__(self, setting: Setting) -> None:
        super().__init__()
        self.setting = setting
        self.version = setting.version
        self.envoys: dict[str, IstioEnvoy] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over = asyncio.Event()

    def _open(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="interop-"))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        opened: Future[AmbientMesh] = Future()
        thread = threading.Thread(target=lambda: asyncio.run(self._run(opened)), name="mesh")
        thread.start()
        self._stack.callback(thread.join)
        self.mesh = opened.result()
        self._stack.callback(self._end)
        self.apps = self._stack.enter_context(Apps({name: self.pod(name) for name in APPS}))
        self.credentials = Credentials(self.folder)
        for name, describe in _ENVOYS.items():
            self.envoys[name] = IstioEnvoy(self.lab, self.pod(name), self.folder)
            self.envoys[name].run(*describe(self))
        for envoy in self.envoys.values():
            envoy.wait_until_ready()

    async def _run(self, opened: "Future[AmbientMesh]") -> None:
        self._loop = asyncio.get_running_loop()
        # The nodes' proxies ask for certificates of their Envoys too.
        known = {name: {"mesh": True} for name in _ENVOYS}
        mesh = _Mesh(
            NODES, self.folder, captured=CAPTURED, local=partial(_local, version=self.version), pods=known
        )
        try:
            async with mesh:
                opened.set_result(mesh)
                await self._over.wait()
        except BaseException as error:
            if opened.done():
                raise
            opened.set_exception(error)

    def _end(self) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._over.set)

    def wait_for(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the mesh's loop; return its result."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_S)

    # Addresses

    @property
    def lab(self) -> Lab:
        """The network."""
        return self.mesh.lab

    def pod(self, name: str) -> Place:
        """A pod."""
        return self.lab.pod(name)

    def ip(self, name: str) -> str:
        """A pod's address."""
        return str(self.pod(name).address(self.version))

    def vip(self, name: str) -> str:
        """A service's address."""
        return vip(name, self.version)

    def who(self, host: str) -> str:
        """An address in words."""
        for names in NODES.values():
            for name in names:
                if host in {str(each) for each in self.pod(name).addresses}:
                    return name
        return host

    def named(self, text: str) -> str:
        """A text with names for addresses."""
        for version in (4, 6):
            for name in SERVICES:
                text = text.replace(at(vip(name, version), 0)[:-1], f"{name}'s VIP:")
            for name in (name for names in NODES.values() for name in names):
                host = str(self.pod(name).address(version))
                text = text.replace(at(host, 0)[:-1], f"{name}:").replace(host, name)
        return text

    # Asking

    def get(self, service: str, client: str = "client") -> Reply:
        """A request of a captured pod to a service."""
        return get(self.pod(client), self.vip(service), 80)

    def through(self, dial: str) -> Reply:
        """A request through a listener of the dialling Envoy."""
        return get(self.pod("dialler"), self.ip("dialler"), DIALS[dial])

    def seen(self, reply: Reply) -> str:
        """Return a reply in words: the status, the pod that answered, and the peer that it saw."""
        gone = "closed" if reply.status == "reset" else reply.status  # a race, as to the peer's unread bytes
        return f"{gone} {reply.pod} sees {self.who(reply.peer)}" if reply.peer else gone

    # Logs

    def proxy(self, pod: str) -> NodeProxy:
        """Our proxy on a pod's node."""
        return self.mesh.node_of(pod)

    def mark(self, pod: str) -> int:
        """Wait until the lines of earlier connections are written; return an offset for :meth:`line`."""
        time.sleep(_LINES_S)
        return len(self.proxy(pod).access())

    def line(self, pod: str, direction: str, since: int = 0, **wanted: str) -> dict[str, Any]:
        """Return the first access line of our proxy, on a pod's node, whose fields contain the given ones.

        Raises:
            LookupError: there is none in time.
        """
        found: list[dict[str, Any]] = []

        def there() -> bool:
            found[:] = [
                line
                for line in self.proxy(pod).access()[since:]
                if line["direction"] == direction
                and all(text in line.get(name.replace("_", ".", 1), "") for name, text in wanted.items())
            ]
            return bool(found)

        if not eventually(there, WAIT_S):
            raise LookupError(f"no {direction} line of {pod}'s proxy with {wanted}")
        return found[0]

    def error(self, pod: str, direction: str, since: int) -> str:
        """The error of the first such line, with names for addresses."""
        return self.named(str(self.line(pod, direction, since).get("error", "none")))


# What our proxies know


def _service(name: str, **more: Any) -> Config:
    vips = [f"/{vip(name, version)}" for version in (4, 6)] if name in SERVICES else []
    hostname = f"{name}.{DOMAIN}"
    common = {"name": name, "namespace": "default", "hostname": hostname, "vips": vips}
    return {**common, "ports": dict(PORTS), **more}


def _of(*names: str, **mapped: int) -> Mapping[str, Any]:
    """Endpoint of services: with their own ports, or with the request port elsewhere."""
    plain = {f"default/{name}.{DOMAIN}": dict(PORTS) for name in names}
    return plain | {f"default/{name.replace('_', '-')}.{DOMAIN}": {80: port} for name, port in mapped.items()}


def _allow(name: str, *accounts: str) -> Config:
    who = [{"namespace": "default", "serviceAccount": account} for account in accounts]
    rules = [[[{"serviceAccounts": who}]]]
    return {
        "name": name,
        "namespace": "default",
        "scope": "WorkloadSelector",
        "action": "Allow",
        "dryRun": False,
        "rules": rules,
    }


def _local(mesh: AmbientMesh, version: int) -> Mapping[str, Any]:
    """Return the near network's mesh file, and write the far network's."""
    shop = {"subjectAltNames": [IDENTITY.format("remote")]}
    everyone = {workload["name"]: workload for workload in mesh.workloads()}
    here = {"network": FAR, "services": dict(_of("shop"))}
    far = {
        "workloads": [everyone["remote"] | here],
        "services": [_service("shop", **shop, vips=[f"{FAR}/{vip('shop', version)}" for version in (4, 6)])],
        "policies": [],
    }
    (mesh.folder / "far.yaml").write_text(yaml.safe_dump(far))

    def through(name: str) -> Config:
        return {"destination": f"/{mesh.lab.pod(name).address(version)}", "hboneMtlsPort": HBONE_PORT}

    ends = {"protocol": "HBONE"}
    about: dict[str, Config] = {
        "terminator": {
            **ends,
            "capacity": 1_000_000,
            "services": _of("terminator", half_down=CLOSED, barred=BARRED),
        },
        "spare": {**ends, "services": _of("spare", "half-down", barred=BARRED)},
        "waypoint": {**ends, "services": {f"default/waypoint.{DOMAIN}": {}}},
        "gateway": ends,
        "dialler": {},
        "sandwich": {"applicationTunnel": {"protocol": "PROXY", "port": SANDWICH}},
        "server": {"services": _of("server", "sandwiched"), "authorizationPolicies": ["default/not-denied"]},
        "guarded": {
            "services": _of("by-address", "by-hostname"),
            "waypoint": through("waypoint"),
            "authorizationPolicies": ["default/waypoints-only"],
        },
    }
    remote = {
        **everyone["remote"],
        "workloadIps": [],
        "network": FAR,
        "networkGateway": through("gateway"),
        "services": dict(_of("shop")),
    }
    by_hostname = {"destination": f"default/waypoint.{DOMAIN}", "hboneMtlsPort": HBONE_PORT}
    return {
        "workloads": [
            *(workload for workload in mesh.workloads(**about) if workload["name"] != "remote"),
            remote,
        ],
        "services": [
            _service("terminator"),
            _service("spare"),
            _service("half-down"),
            _service("barred"),
            _service("server"),
            _service("waypoint", ports={HBONE_PORT: HBONE_PORT}),
            _service("by-address", waypoint=through("waypoint")),
            _service("by-hostname", waypoint=by_hostname),
            _service("sandwiched", waypoint=through("sandwich")),
            _service("shop", **shop),
        ],
        "policies": [
            _allow("waypoints-only", "waypoint"),
            _allow("not-denied", "dialler", "client", "sandwich"),
        ],
    }


# What Envoys are

Described = tuple[list[Config], list[Config]]


def _ends_tunnels(site: IstioSite, account: str, **options: Any) -> Described:
    """Ends tunnels at applications of its pod."""
    stranger = site.pod("stranger")
    prefixes = [
        {"address_prefix": str(stranger.ipv4), "prefix_len": 32},
        {"address_prefix": str(stranger.ipv6), "prefix_len": 128},
    ]
    hbone = tunnels("application", denied(f":{BARRED}"), **options)
    nobody = site.credentials.server(account, {"exact": IDENTITY.format("nobody")})
    chains = (
        chain(hbone, socket=nobody, source_prefix_ranges=prefixes),
        chain(hbone, socket=site.credentials.server(account)),
    )
    application = original_dst("application", use_http_header=True, http_header_name=":authority")
    return [listener("hbone", HBONE_PORT, *chains)], [application]


def _terminator(site: IstioSite) -> Described:
    return _ends_tunnels(site, "terminator")


def _spare(site: IstioSite) -> Described:
    return _ends_tunnels(site, "spare", streams=FEW_STREAMS)


def _waypoint(site: IstioSite) -> Described:
    """Return an Envoy like Istio's waypoints: it terminates the tunnel, matches the dialled address, and opens a
    tunnel of its own.
    """
    guarded = site.ip("guarded")
    length = 32 if site.version == 4 else 128
    meant = [*((site.vip(name), 80, HTTP) for name in ("by-address", "by-hostname")), (guarded, HTTP, HTTP)]
    meant += [*((site.vip(name), COMMAND, COMMAND) for name in ("by-address", "by-hostname"))]
    meant += [(guarded, COMMAND, COMMAND)]
    chains = [
        chain(
            tcp("main", f"guarded:{target}"),
            destination_port=port,
            prefix_ranges=[{"address_prefix": host, "prefix_len": length}],
        )
        for host, port, target in meant
    ]
    originate = tcp("originate", "tunnels", tunneling_config={"hostname": "%DOWNSTREAM_LOCAL_ADDRESS%"})
    outer = tunnels("main", destination_is_authority())
    return [
        listener("hbone", HBONE_PORT, chain(outer, socket=site.credentials.server("waypoint"))),
        inner_listener("main", *chains),
        inner_listener("originate", chain(originate)),
    ], [
        internal("main", "main"),
        *(internal(f"guarded:{port}", "originate", original=at(guarded, port)) for port in (HTTP, COMMAND)),
        {
            **original_dst("tunnels", upstream_port_override=HBONE_PORT),
            **http2(),
            "transport_socket": site.credentials.client("waypoint", "guarded"),
        },
    ]


def _sandwich(site: IstioSite) -> Described:
    """Return a waypoint in a captured pod. A PROXY header has the client's identity and the dialled address.

    It dials the same address again. That connection is captured, and leaves for the endpoint with the pod's own
    identity.
    """
    proxy_protocol = typed(
        "proxy_protocol",
        "envoy.extensions.filters.listener.proxy_protocol.v3.ProxyProtocol",
        rules=[{"tlv_type": 0xD0, "on_tlv_present": {"key": "peer"}}],
    )
    again = chain(tcp("sandwich", "again"))
    return [listener("sandwich", SANDWICH, again, filters=[proxy_protocol])], [original_dst("again")]


def _gateway(site: IstioSite) -> Described:
    """Return a gateway: it ends the outer tunnel, and passes on the inner one."""
    remote = static("remote", {"address": address(site.ip("remote"), HBONE_PORT)})
    outer = chain(tunnels("remote"), socket=site.credentials.server("gateway"))
    return [listener("hbone", HBONE_PORT, outer)], [remote]


def _dialler(site: IstioSite) -> Described:
    """Return an Envoy that opens tunnels, as its listeners are configured."""
    server = site.ip("server")
    credentials = site.credentials

    def to(name: str, socket: Config, pod: str = "server", requests: int = 0) -> Config:
        endpoint = {"address": address(site.ip(pod), HBONE_PORT)}
        return static(name, endpoint, transport_socket=socket, **http2(requests))

    clusters = [
        to("server", credentials.client("dialler", "server")),
        to("guarded", credentials.client("dialler", "guarded"), "guarded"),
        to("denied", credentials.client("denied", "server")),
        to("foreign", credentials.client("dialler", "server", "elsewhere.example")),
        to("anonymous", credentials.client(None, "server")),
        to("ten-requests", credentials.client("dialler", "server"), requests=10),
    ]
    meant = {
        "server": ("server", at(server, HTTP)),
        "command": ("server", at(server, COMMAND)),
        "hostname": ("server", f"server.{DOMAIN}:80"),
        "unknown-hostname": ("server", "nobody.example.com:80"),
        "other-pod": ("server", at(site.ip("guarded"), HTTP)),
        "nonsense": ("server", "server"),
        "closed": ("server", at(server, CLOSED)),
        "guarded": ("guarded", at(site.ip("guarded"), HTTP)),
        "denied": ("denied", at(server, HTTP)),
        "foreign": ("foreign", at(server, HTTP)),
        "anonymous": ("anonymous", at(server, HTTP)),
        "ten-requests": ("ten-requests", at(server, HTTP)),
    }
    listeners = [
        listener(name, DIALS[name], chain(tcp(name, cluster, tunneling_config={"hostname": authority})))
        for name, (cluster, authority) in meant.items()
    ]
    route = {"match": {"prefix": "/"}, "route": {"cluster": "server", "timeout": "0s"}}
    listeners.append(listener("request", DIALS["request"], chain(http("request", [route]))))
    upgrading = http("websocket", [route], upgrade_configs=[{"upgrade_type": "websocket"}])
    listeners.append(listener("websocket", DIALS["websocket"], chain(upgrading)))
    return listeners, clusters


_ENVOYS: Mapping[str, Callable[[IstioSite], Described]] = {
    "terminator": _terminator,
    "spare": _spare,
    "waypoint": _waypoint,
    "sandwich": _sandwich,
    "gateway": _gateway,
    "dialler": _dialler,
}
