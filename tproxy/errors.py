"""The errors of :mod:`tproxy`. Each type has the facts that an operator needs to fix the cause.

::

    TproxyError
    ├── NeedCapability      the process lacks a capability; names it and the request
    ├── MissingFeature      the kernel lacks a module (nf_tables, TPROXY, sockets, veth)
    ├── UnknownNamespace    no network namespace has this name, path or process id
    ├── UnknownInterface    a named device does not exist
    ├── NotOurs             a foreign resource occupies the place of ours
    ├── KernelRefused       any other refusal, with the request and the errno
    ├── PortTaken           another process listens on the port
    └── ConnectFailed       a connection was not made; ``error`` is the operating system's reason
        └── ConnectTimedOut
"""

import errno
import os


class TproxyError(Exception):
    """Base class of the errors that :mod:`tproxy` raises."""


class NeedCapability(TproxyError):
    """EPERM or EACCES: the process lacks a capability in the user namespace that owns the network namespace."""

    def __init__(self, capability: str, doing: str) -> None:
        super().__init__(capability, doing)
        self.capability = capability
        self.doing = doing

    def __str__(self) -> str:
        return (
            f"not allowed to {self.doing}: needs {self.capability}; run as root, or add {self.capability} "
            "to the container's securityContext.capabilities"
        )


class MissingFeature(TproxyError):
    """The kernel does not know the requested feature. Usually its module is neither built in nor loaded."""

    def __init__(self, doing: str, modules: str) -> None:
        super().__init__(doing, modules)
        self.doing = doing
        self.modules = modules

    def __str__(self) -> str:
        return f"this kernel cannot do {self.doing}: load the module ({self.modules}) on the node"


class UnknownNamespace(TproxyError):
    """No network namespace has this name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name

    def __str__(self) -> str:
        return (
            f"no network namespace {self.name!r}: give a name (ip netns list), a path (/proc/PID/ns/net) or a PID"
        )


class UnknownInterface(TproxyError):
    """No device of this name exists in the namespace."""

    def __init__(self, device: str, namespace: str) -> None:
        super().__init__(device, namespace)
        self.device = device
        self.namespace = namespace

    def __str__(self) -> str:
        return f"no interface {self.device!r} in the {self.namespace} namespace: compare with `ip link` there"


class NotOurs(TproxyError):
    """A resource of another program occupies the place of our resource. It is left unchanged."""

    def __init__(self, resource: object) -> None:
        super().__init__(resource)
        self.resource = resource

    def __str__(self) -> str:
        return f"a foreign resource is in the place of ours; remove one of the two: {self.resource}"


class KernelRefused(TproxyError):
    """The kernel refused a request. ``doing`` describes the request, and ``code`` is the errno."""

    def __init__(self, doing: str, code: int) -> None:
        super().__init__(doing, code)
        self.doing = doing
        self.code = code

    def __str__(self) -> str:
        name = errno.errorcode.get(self.code, str(self.code))
        return f"kernel refused {self.doing}: {name} ({os.strerror(self.code)})"


class PortTaken(TproxyError):
    """EADDRINUSE: another socket is bound to the port."""

    def __init__(self, address: str, port: int) -> None:
        super().__init__(address, port)
        self.address = address
        self.port = port

    def __str__(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"another process listens on {host}:{self.port}: stop it (ss -ltnp) or use reuse_port on both"


class ConnectFailed(TproxyError):
    """No connection to ``destination`` was made; ``error`` is the operating system's reason, if it gave one."""

    def __init__(self, destination: tuple[str, int], error: OSError | None = None) -> None:
        super().__init__(destination, error)
        self.destination = destination
        self.error = error

    def __str__(self) -> str:
        reason = "no reason given" if self.error is None else self.error.strerror
        return f"connect to {self.destination[0]} port {self.destination[1]}: {reason}"


class ConnectTimedOut(ConnectFailed):
    """The destination did not answer within ``timeout_s``."""

    def __init__(self, destination: tuple[str, int], timeout_s: float) -> None:
        super().__init__(destination)
        self.timeout_s = timeout_s

    def __str__(self) -> str:
        return f"connect to {self.destination[0]} port {self.destination[1]}: no answer in {self.timeout_s} s"
