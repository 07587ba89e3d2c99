"""Upgrade or uninstallation: the decision by the agent's own DaemonSet, and without an answer about it."""

import asyncio
from typing import Any

import pytest

from ztunnel.kube.errors import ApiRefused, ApiUnreachable
from ztunnel.kube.kinds import Kind
from ztunnel.node.agent.last_agent import is_last


class Api:
    """Answers ``get`` of the two kinds that are asked for."""

    def __init__(self, daemon_set: Any, node: Any = None) -> None:
        self.answers = {"DaemonSet": daemon_set, "Node": node}

    async def get(self, kind: Kind, namespace: str, name: str) -> Any:
        answer = self.answers[kind.name]
        if isinstance(answer, Exception):
            raise answer
        return answer


def refused(status: int) -> ApiRefused:
    return ApiRefused("GET /x", status, "", "no")


def daemon_set(selector: dict[str, str] | None = None, **metadata: str) -> dict[str, Any]:
    return {"metadata": metadata, "spec": {"template": {"spec": {"nodeSelector": selector}}}}


NODE = {"metadata": {"labels": {"kubernetes.io/os": "linux"}}}
LINUX = {"kubernetes.io/os": "linux"}


@pytest.mark.parametrize(
    ("api", "last"),
    [
        (Api(daemon_set()), False),
        (Api(daemon_set(LINUX), NODE), False),
        (Api(daemon_set({"mesh": "yes"}), NODE), True),
        (Api(daemon_set(deletionTimestamp="2026-01-01T00:00:00Z")), True),
        (Api(refused(404)), True),
        (Api(refused(401)), True),
        (Api(refused(403)), False),
        (Api(refused(500)), False),
        (Api(ApiUnreachable("https://api", "no answer")), False),
        (Api(daemon_set(LINUX), refused(403)), False),
        (Api(daemon_set(LINUX), refused(404)), True),
        (Api({}), False),
    ],
)
def test_removal_depends_on_whether_another_agent_follows(api: Api, last: bool) -> None:
    assert asyncio.run(is_last(api, "istio-system", "ztunnel-agent", "n1")) is last  # type: ignore[arg-type]
