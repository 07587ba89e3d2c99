"""Finds a node's pods and their connections for packet captures (taps). Imported only where taps are permitted."""

from __future__ import annotations

from ztunnel.proxy.istio.admin.inspected import InspectedProxy
from ztunnel.proxy.istio.path.pod import PodProxy
from ztunnel.proxy.tap.taps import CannotTap, Carry


class TappedPods:
    """Implements :class:`ztunnel.proxy.tap.taps.TapSource` for an Istio mesh."""

    def __init__(self, proxy: InspectedProxy) -> None:
        self._proxy = proxy

    async def open_connections(self, pod: str) -> int:
        """Return the number of a pod's open connections. ``pod`` is ``NAMESPACE/NAME``."""
        here = [each for each in self._proxy.carried() if f"{each.name.namespace}/{each.name.name}" == pod]
        if not here:
            raise CannotTap(f"{pod}: this proxy carries no such pod; pods are named NAMESPACE/NAME")
        found = sum(each.open_connections for each in here if isinstance(each, PodProxy))
        workers = self._proxy.workers
        if workers is not None:
            by_pod = await workers.connections()
            found += sum(len(entries) for each in here for entries in by_pod.get(each, {}).values())
        return found

    def carriers(self) -> list[Carry]:
        # Even with workers, this process itself carries the connections of the proxy's own pod.
        taps, workers = self._proxy.node.taps, self._proxy.workers
        return [*([taps.carry] if taps is not None else []), *(workers.carriers() if workers is not None else [])]
