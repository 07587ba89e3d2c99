"""Answers the CNI plugin of container runtimes: ``POST /cmdadd`` over a Unix socket, as istio-cni's agent does.

The plugin announces each sandbox before a process starts in it, and fails the sandbox unless the answer is 200.
The body is istio-cni's, so its plugin can use this socket (``cni_agent_run_dir``)::

    {"Netns": "/var/run/netns/cni-...", "PodName": "web", "PodNamespace": "shop",
     "IPs": [{"Interface": 0, "Address": {"IP": "10.0.0.7", "Mask": "////AA=="}, "Gateway": "10.0.0.1"}]}

Ours adds ``PodUID``, which distinguishes a pod of a StatefulSet from its predecessor. Other members are ignored:
the addresses are read from the namespace itself.
"""

import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec

from ztunnel.node.agent.enroller import Added
from ztunnel.node.agent.errors import CannotAdd
from ztunnel.runtime.clock import SystemClock
from ztunnel.runtime.http.page import PLAIN, Page, PageRequest, text
from ztunnel.runtime.http.server import LocalServer

log = logging.getLogger(__name__)

Add = Callable[[Added], Awaitable[str]]
#: The most connections, more than the pods of a node, which can all start at once. Each connection stays open
#: until its pod is in the mesh.
_CONNECTIONS: Final = 1024


class BadEvent(ValueError):
    """A request does not announce a sandbox correctly; the text is the reason."""


class _Event(msgspec.Struct):
    netns: str = msgspec.field(name="Netns")
    name: str = msgspec.field(name="PodName")
    namespace: str = msgspec.field(name="PodNamespace")
    uid: str = msgspec.field(name="PodUID", default="")


_decoder: Final = msgspec.json.Decoder(_Event)


def read_event(body: bytes) -> Added:
    """Parse the sandbox that a plugin announces.

    Raises:
        BadEvent: the body is not JSON, lacks a member, or names a path that is not absolute.
    """
    try:
        event = _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise BadEvent(str(error)) from None
    for member, value in (("PodName", event.name), ("PodNamespace", event.namespace)):
        if not value:
            raise BadEvent(f"{member} is empty")
    if not event.netns.startswith("/"):
        raise BadEvent(f"Netns is {event.netns!r}, which is not an absolute path")
    return Added(namespace=event.namespace, name=event.name, netns=event.netns, uid=event.uid)


class CniServer(LocalServer):
    """Listens for the plugin while entered.

    Args:
        path: the socket's path. Its mode is 0600: only root's processes, such as container runtimes, can connect.
        add: called with each sandbox.

    Raises:
        OSError: on entering, the socket cannot be bound.
    """

    def __init__(self, path: Path, add: Add) -> None:
        super().__init__("cni", path, self._answer, SystemClock(), max_connections=_CONNECTIONS)
        self._add = add

    async def _answer(self, request: PageRequest) -> Page:
        if request.target != "/cmdadd":
            return text("no such page; this socket has /cmdadd\n", 404, PLAIN)
        if request.method != "POST":
            return text("/cmdadd takes POST\n", 405, PLAIN)
        try:
            event = read_event(request.body)
        except BadEvent as error:
            log.error("unusable message of a CNI plugin error=%s", error)
            return text(f"bad event: {error}\n", 400, PLAIN)
        try:
            done = await self._add(event)
        except CannotAdd as error:
            log.error("sandbox refused netns=%s: %s", event.netns, error)
            return text(f"{error}\n", 500, PLAIN)
        log.info("sandbox netns=%s: %s", event.netns, done)
        return text(f"{done}\n", content_type=PLAIN)
