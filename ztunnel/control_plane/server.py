"""Serves a mesh: builds snapshots per node and flavour, follows edits of the file, renews certificates.

The node message of an xDS request selects the flavour: Envoy is recognised by its user agent, Istio's node proxy
by the form of its id. Every other client is this project's proxy in Envoy's dialect.
"""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Self

import grpc
from google.protobuf.message import Message

from xds.aio.grpc_server import server_tls
from xds.aio.server import SnapshotServer
from xds.grpc.serve_error import ServeError
from xds.model.calico import EndpointId
from xds.model.identity import SpiffeId
from xds.model.secret import Certificate
from xds.proto import registry
from xds.proto.envoy.config.core.v3.core_pb2 import Node
from xds.proto.envoy.extensions.transport_sockets.tls.v3.tls_pb2 import Secret
from xds.proto.istio.workload.workload_pb2 import Address
from xds.protocol.snapshot import Answered, Snapshot
from ztunnel.control_plane.accounts import NODE_ACCOUNTS
from ztunnel.control_plane.generate import Flavour, NodeConfig
from ztunnel.control_plane.istio import METHOD, Registrar, is_node_proxy, node_name
from ztunnel.control_plane.mesh import Mesh, MeshFaults, parse_mesh
from ztunnel.control_plane.policies import policy_resources
from ztunnel.control_plane.token_review import Api, KubeRegistrar
from ztunnel.control_plane.workloads import WorkloadConfig
from ztunnel.policy.calico.compile import Compiled, compile_resources
from ztunnel.policy.policysync.server import NODE_STREAMS, PolicySyncServer
from ztunnel.proxy.identity import authority as ca
from ztunnel.runtime.text_file import read_again, read_text
from ztunnel.runtime.watched_file import InPlaceEdits, file_state

log = logging.getLogger(__name__)

_POLL_S = 0.2
_ROOT = "ROOTCA"
_NODE_PROXY = "istio"
_ADDRESS = registry.type_url(Address)
_SERVING_LIFE = timedelta(days=3650)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reviews:
    """The settings for reviews of service account tokens; see :class:`KubeRegistrar`."""

    api: Api
    audience: str = "istio-ca"
    node_accounts: Sequence[str] = NODE_ACCOUNTS


class NodePolicies:
    """Serves the policies of a mesh by PolicySync, on a socket for each node, while entered.

    Args:
        folder: the sockets' folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = PolicySyncServer()
        self._nodes: dict[str, str] = {}  # by the path of their socket

    async def __aenter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._server.__aexit__(*exception)

    async def publish(self, mesh: Mesh) -> None:
        """Serve another mesh. Sockets of nodes that it lacks are closed.

        Raises:
            ServeError: see :meth:`open_sockets`.
        """
        self._server.publish(compile_resources(policy_resources(mesh)))
        self._nodes = {str(self._folder / f"{node}.sock"): node for node in mesh.nodes}
        for path in self._server.paths:
            if path not in self._nodes:
                await self._server.close(path)
        await self.open_sockets()

    async def open_sockets(self) -> None:
        """Open the sockets of nodes that have none yet. After a failure, call this again.

        Raises:
            ServeError: the first socket that cannot be served. The sockets of all other nodes have been opened.
        """
        failure: ServeError | None = None
        for path, node in self._nodes.items():
            if path in self._server.paths:
                continue
            try:
                # Like the xDS socket: only proxies of this user or of root can connect.
                await self._server.open(path, partial(_on_node, node), streams=NODE_STREAMS, mode=0o600)
            except ServeError as error:
                failure = failure or error
        if failure is not None:
            raise failure


def _on_node(node: str, compiled: Compiled) -> list[EndpointId]:
    return [key for key, where in compiled.nodes.items() if where == node]


@dataclass(slots=True)
class _Leaf:
    certificate: Certificate
    renew_at: datetime


class ControlPlane:
    """The embedded control plane, as a server.

    Args:
        path: the mesh file. Edits in place and atomic renames are both detected.
        addresses: the addresses to serve, ``unix:/path`` or ``host:port``.
        ca_directory: the folder of the root, which is created if it is missing.
        lifetime: the lifetime of leaf certificates, which are renewed at half their lifetime.
        access_log: the path of the proxies' access logs, sent to proxies.
        log_json: whether access logs are JSON lines.
        tls_hosts: this server's names and addresses. If given, TCP uses TLS and callers need tokens. Clients trust
            ``root-cert.pem`` of the authority's directory.
        reviews: reviews tokens of service accounts. None refuses them.
        policy_folder: the folder of a socket for each node, ``NODE.sock``, on which PolicySync serves the file's
            policies to that node's proxy. None serves no policies.
        ready: an event that is set once this serves.
    """

    def __init__(
        self,
        path: Path,
        addresses: list[str],
        ca_directory: Path,
        *,
        lifetime: timedelta = timedelta(hours=24),
        access_log: str = "/dev/stdout",
        log_json: bool = False,
        tls_hosts: Sequence[str] = (),
        reviews: Reviews | None = None,
        policy_folder: Path | None = None,
    ) -> None:
        self._path = path
        self._policies = None if policy_folder is None else NodePolicies(policy_folder)
        self._policy_failure = ""
        self._lifetime = lifetime
        self._access_log = access_log
        self._log_json = log_json
        self._state = file_state(path)
        self._edits = InPlaceEdits()
        self._text = read_text(path)
        self._mesh = parse_mesh(self._text)
        self._ca = ca.CertificateAuthority.open(ca_directory, self._mesh.trust_domain, ca.now())
        self._leaves: dict[SpiffeId, _Leaf] = {}
        self._tls = bool(tls_hosts)
        self._root_file = ca_directory / "root-cert.pem"
        self._node_proxies = {""}  # the nodes of this mesh and of earlier ones; clients of other nodes share ""
        self._proxies: set[tuple[str, Flavour]] = set()  # of Envoy's dialect; they have connected at least once
        self._registrar = Registrar(lambda: self._mesh, self._ca, ca.token_secret(ca_directory), lifetime, ca.now)
        judge: Registrar | KubeRegistrar = self._registrar
        if reviews is not None:
            judge = KubeRegistrar(
                self._registrar,
                reviews.api,
                lambda: self._mesh.trust_domain,
                audience=reviews.audience,
                node_accounts=reviews.node_accounts,
            )
        self._server = SnapshotServer(
            addresses,
            tls=self._serving_tls(tls_hosts) if tls_hosts else None,
            identifier="ztunnel control-plane",
            key_of=self._key_of,
            on_answer=self._answered,
            admit=judge.admit,
            unary={METHOD: judge.create_certificate},
        )
        self.ready = asyncio.Event()

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    async def run(self) -> None:
        """Serve until cancelled.

        Raises:
            ServeError: an address cannot be served.
        """
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._server)
            self._publish()
            self._publish_workloads()
            if self._policies is not None:
                await stack.enter_async_context(self._policies)
                await self._policies.publish(self._mesh)
            self.ready.set()
            log.info("serving %s on %s", self._path, ", ".join(self._server.addresses))
            if self._tls:
                log.info("the TCP port uses TLS: each client needs a token, and must trust %s", self._root_file)
            while True:
                await asyncio.sleep(_POLL_S)
                changed = self._reload()
                renewed = self._renew()
                if changed or renewed:
                    self._publish()
                if changed:
                    self._publish_workloads()
                if self._policies is not None:
                    await self._publish_policies(self._policies, changed=changed)

    async def _publish_policies(self, policies: NodePolicies, *, changed: bool) -> None:
        """Publish a changed mesh, and retry to open sockets. Each failure is logged once."""
        try:
            await (policies.publish(self._mesh) if changed else policies.open_sockets())
        except ServeError as error:
            if str(error) != self._policy_failure:
                log.error("policies of a new node are not served: %s; tried again", error)
            self._policy_failure = str(error)
        else:
            self._policy_failure = ""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses on which this serves, with port 0 replaced by the actual port."""
        return self._server.addresses

    def _serving_tls(self, hosts: Sequence[str]) -> grpc.ServerCredentials:
        """Return server credentials with a new certificate, valid as long as the root."""
        certificate = self._ca.issue_for_hosts(hosts, ca.now(), _SERVING_LIFE)
        return server_tls(certificate.key_pem, certificate.chain_pem)

    def _reload(self) -> bool:
        """Read the file again if it changed. If it is faulty, keep serving the last good mesh."""
        state = file_state(self._path)
        if state != self._state and self._edits.is_written(self._path, self._state, state):
            return False
        self._state = state
        try:
            text = read_again(self._path, holds=bool(self._text))
        except OSError as error:
            if self._text:
                log.error("%s: %s; the last good mesh stays active", self._path, error.strerror)
                self._text = ""
            return False
        if text == self._text:
            return False
        self._text = text
        try:
            self._mesh = parse_mesh(text)
        except MeshFaults as error:
            for fault in error.faults:
                log.error("%s: %s", self._path, fault)
            log.error("%s: %d faults; the last good mesh stays active", self._path, len(error.faults))
            return False
        log.info("%s changed: %d pods, %d services", self._path, len(self._mesh.pods), len(self._mesh.services))
        return True

    def _renew(self) -> bool:
        """Renew the certificates that are past half their lifetime, and forget those of removed identities."""
        now = ca.now()
        present = {pod.identity for pod in self._mesh.pods.values() if pod.mesh}
        for identity in self._leaves.keys() - present:
            del self._leaves[identity]
        due = [identity for identity, leaf in self._leaves.items() if leaf.renew_at <= now]
        for identity in due:
            self._issue(identity, now)
        return bool(due)

    def _issue(self, identity: SpiffeId, now: datetime) -> Certificate:
        certificate = self._ca.issue(identity, now, self._lifetime)
        self._leaves[identity] = _Leaf(certificate, now + self._lifetime / 2)
        return certificate

    def _publish(self) -> None:
        """Publish to the proxies of Envoy's dialect that have connected before. Most meshes have none."""
        for node, flavour in self._proxies:
            self._publish_to(node, flavour)

    def _publish_to(self, node: str, flavour: Flavour) -> None:
        # A node that was removed gets a configuration without pods, so that its proxy drops their certificates. A
        # name that was never in the mesh is probably misspelt, and gets nothing.
        if node in self._mesh.nodes or node in self._node_proxies:
            config = NodeConfig(self._mesh, node, flavour, self._access_log, self._log_json)
            messages = [*config.messages(), *self._secrets(config)]
            self._server.publish(f"{node}/{flavour}", Snapshot.of(messages))

    def _publish_workloads(self) -> None:
        """Publish the resources of Istio's node proxies. They are the same for every node, except for the
        resources that on-demand clients get without a request.
        """
        config = WorkloadConfig(self._mesh)
        everything = Snapshot.of(config.resources())
        self._node_proxies.update(self._mesh.nodes)
        for node in self._node_proxies:
            own = {_ADDRESS: config.uids_on(node)}
            self._server.publish(f"{node}/{_NODE_PROXY}", replace(everything, own=own))

    def _secrets(self, config: NodeConfig) -> Iterator[Message]:
        """Return the root certificate, and the certificates of the identities on one node."""
        now = ca.now()
        for identity in config.identities:
            leaf = self._leaves.get(identity)
            certificate = leaf.certificate if leaf is not None else self._issue(identity, now)
            secret = Secret(name=str(identity))
            secret.tls_certificate.certificate_chain.inline_string = certificate.chain_pem.decode()
            secret.tls_certificate.private_key.inline_string = certificate.key_pem.decode()
            yield secret
        root = Secret(name=_ROOT)
        root.validation_context.trusted_ca.inline_string = self._ca.root_pem.decode()
        yield root

    @staticmethod
    def _answered(key: str, answered: Answered) -> None:
        kind = answered.type_url.rpartition(".")[2]
        if answered.error is not None:
            log.warning("%s refused %s %s: %s", key, kind, answered.version, answered.error)
        else:
            log.debug("%s accepted %s %s", key, kind, answered.version)

    def _key_of(self, node: Node) -> str:
        """Return the snapshot key of a node: its name and flavour."""
        name = node_name(node)
        if is_node_proxy(node):
            if self._mesh.registry_only:
                log.warning(
                    "outbound: REGISTRY_ONLY cannot be sent to Istio's node proxies: node %s will pass through "
                    "traffic to unknown destinations",
                    name,
                )
            return f"{name if name in self._node_proxies else ''}/{_NODE_PROXY}"
        flavour = Flavour.STOCK_ENVOY if node.user_agent_name == "envoy" else Flavour.ZTUNNEL
        if (name, flavour) not in self._proxies:
            self._proxies.add((name, flavour))
            self._publish_to(name, flavour)
        return f"{name}/{flavour}"
