"""An ended pod leaves no reference cycles. On a node with much churn they would wait hours to be collected."""

import gc
from collections import Counter
from pathlib import Path

from tests.ztunnel.proxy.istio.pods import CLIENT, SERVER, Cluster, WiredSockets, play, workload
from ztunnel.proxy.istio.path.pod import PodProxy
from ztunnel.proxy.istio.settings.config import PodName

_PODS = 20
_OURS = ("hbone", "tproxy", "xds", "ztunnel")


def test_ended_pods_leave_no_reference_cycles(tmp_path: Path) -> None:
    async def body(cluster: Cluster) -> None:
        await cluster.start(workload("client", CLIENT), workload("server", SERVER))
        cluster.application(SERVER)

        async def one(number: int) -> None:
            name = PodName(name=f"p{number}", namespace="default", service_account="p")
            sockets = WiredSockets(cluster.node, cluster.wire, "127.0.1.9")
            pod = PodProxy(cluster.node, name, sockets)
            await pod.start()
            await pod.stop()
            sockets.accepted = {}  # the test double's own; real ones close their listeners

        await one(0)
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for number in range(_PODS):
                await one(number)
            gc.collect()
        finally:
            gc.set_debug(0)
            garbage = Counter(
                f"{type(each).__module__}.{type(each).__qualname__}"
                for each in gc.garbage
                if type(each).__module__.partition(".")[0] in _OURS
            )
            gc.garbage.clear()
        assert not {name: count for name, count in garbage.items() if count >= _PODS}

    play(tmp_path, body)
