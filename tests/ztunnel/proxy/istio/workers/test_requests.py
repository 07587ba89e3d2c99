"""What the main process answers its workers: certificates of this node's pods, and no others."""

import asyncio
from typing import Any
from unittest import mock

import pytest

from tests.ztunnel.proxy.istio.pods import ELSEWHERE, workload
from xds.model.identity import SpiffeId
from xds.model.mesh import Mesh
from ztunnel.proxy.istio.settings.config import PodName
from ztunnel.proxy.istio.workers.channel import Refused
from ztunnel.proxy.istio.workers.main import Workers
from ztunnel.proxy.istio.workers.messages import GetCertificate

HERE, THERE = workload("here", "127.0.0.1"), workload("there", "127.0.0.2", node=ELSEWHERE)
PLAIN = workload("plain", "127.0.0.3")


class Asked(Exception):
    """The certificate manager was asked."""


def workers() -> Workers:
    made = Workers.__new__(Workers)
    mesh = Mesh(node="w1")
    mesh.apply([HERE, THERE, PLAIN])
    made._node = mock.Mock(mesh=mesh)
    made._certificates = mock.Mock(fetch=mock.Mock(side_effect=Asked))
    name = PodName(name="plain", namespace="default", service_account="plain")
    made._pods = {1: mock.Mock()}
    made._pods[1].name = name  # a Mock's own keyword
    return made


async def ask(identity: SpiffeId) -> Any:
    return [value async for value in workers()._requested(mock.Mock(), GetCertificate(identity))]


@pytest.mark.parametrize("pod", [HERE, PLAIN], ids=["takes tunnels", "only opens them"])
def test_a_worker_gets_certificates_of_pods_of_this_node(pod: Any) -> None:
    with pytest.raises(Asked):
        asyncio.run(ask(pod.identity))


@pytest.mark.parametrize(
    "identity", [THERE.identity, SpiffeId("cluster.local", "kube-system", "admin")], ids=["elsewhere", "invented"]
)
def test_a_worker_gets_no_certificate_of_another_identity(identity: SpiffeId) -> None:
    with pytest.raises(Refused, match="no pod of this node has the identity"):
        asyncio.run(ask(identity))
