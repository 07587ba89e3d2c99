"""The roles of netpol and of the PolicySync server on a real API server: each is enough, and no more than that."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from tests.apiserver.server import ApiServer
from ztunnel.kube.client import connect
from ztunnel.kube.errors import ApiRefused
from ztunnel.kube.events import EventWriter
from ztunnel.kube.informer import Informer
from ztunnel.kube.kinds import EVENT, NODE, SECRET, Kind, Selection
from ztunnel.kube.objects import ObjectKey
from ztunnel.policy.policysync.kinds import SELECTIONS, SERVED

FOLDER = Path(__file__).parents[2] / "deploy" / "kustomize"
RBAC = "rbac.authorization.k8s.io/v1"
KINDS = {
    "ServiceAccount": Kind("ServiceAccount", "v1", "serviceaccounts"),
    "ClusterRole": Kind("ClusterRole", RBAC, "clusterroles", namespaced=False),
    "ClusterRoleBinding": Kind("ClusterRoleBinding", RBAC, "clusterrolebindings", namespaced=False),
}
SYSTEM = "kube-system"
WAIT_S = 60


@pytest.mark.parametrize(("folder", "followed"), [("netpol", SELECTIONS), ("policy", SERVED)])
def test_the_role_of_the_policy_server_suffices(
    cluster: ApiServer, folder: str, followed: Sequence[Selection]
) -> None:
    async def check() -> None:
        async with connect(cluster.kubeconfig()) as admin:
            for document in yaml.safe_load_all((FOLDER / folder / "rbac.yaml").read_text()):
                space = document["metadata"].get("namespace", "")
                await admin.create(KINDS[document["kind"]], space, document)
            account = Kind("TokenRequest", "v1", f"serviceaccounts/ztunnel-{folder}/token")
            request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
            token = (await admin.create(account, SYSTEM, request))["status"]["token"]
            async with (
                connect(cluster.kubeconfig(token)) as client,
                Informer(client, followed) as informer,
                EventWriter(client, f"ztunnel-{folder}", "n1", informer.known) as events,
                asyncio.timeout(WAIT_S),
            ):
                # Kinds that are not installed are refused with 404, not with 403: their names are in the role. The
                # role itself is known to the API server a moment after it was created.
                while not informer.synced:
                    await asyncio.sleep(0.02)
                assert informer.faults == {}
                events.event(ObjectKey("NetworkPolicy", SYSTEM, "one"), "PolicyNotApplied", f"said by {folder}")
                while f"said by {folder}" not in {
                    event["message"] for event in (await admin.list_page(Selection(EVENT, namespace=SYSTEM))).items
                }:
                    await asyncio.sleep(0.05)
                for kind in (SECRET, NODE):
                    with pytest.raises(ApiRefused, match=r"its role lacks this \(RBAC\)"):
                        await client.list_page(Selection(kind))

    asyncio.run(check())
