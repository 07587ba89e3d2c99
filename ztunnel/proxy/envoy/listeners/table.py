"""The table of active listeners, by name, address and port.

Only the listener manager changes the table. The data path looks up listeners in the table.
"""

from collections.abc import Collection, Iterator

from xds.model.address import SocketAddress
from ztunnel.proxy.envoy.listeners.listener import LiveListener


class ListenerTable:
    """The active listeners, in order of addition.

    Attributes:
        version: the number of changes so far.
    """

    def __init__(self) -> None:
        self.version = 0
        self._active: dict[str, LiveListener] = {}
        self._by_address: dict[SocketAddress, LiveListener] = {}
        self._by_port: dict[int, LiveListener] = {}

    def __len__(self) -> int:
        return len(self._active)

    def __iter__(self) -> Iterator[LiveListener]:
        return iter(self._active.values())

    def get(self, name: str) -> LiveListener | None:
        """Return the active listener with this name, or ``None``."""
        return self._active.get(name)

    def put(self, listener: LiveListener) -> None:
        """Add a listener, or replace the listener with the same name."""
        self._active[listener.name] = listener
        self._index()

    def pop(self, name: str) -> LiveListener | None:
        """Remove and return the listener with a name, or ``None``."""
        listener = self._active.pop(name, None)
        self._index()
        return listener

    def _index(self) -> None:
        self.version += 1
        self._by_address = {a: each for each in self._active.values() for a in each.model.addresses}
        self._by_port = {address.port: listener for address, listener in self._by_address.items()}

    def internal(self, name: str) -> LiveListener | None:
        """Return the active internal listener with this name, or ``None``."""
        listener = self._active.get(name)
        return listener if listener is not None and listener.model.internal else None

    def listening_on(self, port: int) -> LiveListener | None:
        """Return the listener with a socket on this port, or ``None``."""
        return self._by_port.get(port)

    def hand_off(self, destination: SocketAddress, own: LiveListener) -> LiveListener:
        """Return the listener for a connection that ``own`` accepted, by its original destination.

        If ``own`` has ``use_original_dst``, this is the listener bound to the exact address, or else the listener
        bound to the port's wildcard address, or else ``own``.
        """
        found = self._by_address.get(destination)
        if found is None and destination.port in self._by_port:
            found = self._by_address.get(SocketAddress("0.0.0.0", destination.port)) or self._by_address.get(
                SocketAddress("::", destination.port)
            )
        return found or own

    @property
    def own_ports(self) -> Collection[int]:
        """Return the ports that this proxy listens on."""
        return self._by_port.keys()
