"""Compares what ``/explain`` answers for a connection with what happens when the connection is opened."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.ztunnel.proxy.envoy.harness import (
    CLIENT,
    SERVER,
    Harness,
    Identities,
    Json,
    T,
    application,
    ask,
    chain,
    cluster,
    listener,
    page,
    run,
    tcp,
    tunnel,
)
from tests.ztunnel.proxy.envoy.path.test_calico import BY_CLIENT, BY_OTHER, CalicoHarness, with_calico
from tests.ztunnel.proxy.envoy.path.test_calico import policies as policies_of_calico

CASES = 40
ALL = "[{action: Allow}]"
RBAC = T + "envoy.extensions.filters.network.rbac.v3.RBAC"


def principal(rng: random.Random, depth: int = 0) -> Json:
    """A random condition about the client."""
    made: list[Json] = [
        {"any": True},
        {"direct_remote_ip": network(rng)},
        {"remote_ip": network(rng)},
        {"authenticated": {"principal_name": {"exact": rng.choice((CLIENT, SERVER))}}},
        {"authenticated": {}},
    ]
    if depth < 2:
        ids = {"ids": [principal(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        made += [{"not_id": principal(rng, depth + 1)}, {"and_ids": ids}, {"or_ids": ids}]
    return rng.choice(made)


def permission(rng: random.Random, ports: tuple[int, ...]) -> Json:
    """A random condition about the destination."""
    return rng.choice(
        [
            {"any": True},
            {"destination_port": rng.choice(ports)},
            {"not_rule": {"destination_port": rng.choice(ports)}},
            {"destination_ip": network(rng)},
        ]
    )


def network(rng: random.Random) -> Json:
    return {"address_prefix": rng.choice(("127.0.0.0", "10.0.0.0")), "prefix_len": 8}


def policies(rng: random.Random, *ports: int) -> list[Json]:
    """Some filters with some policies each."""
    return [
        {
            "name": "rbac",
            "typed_config": {
                "@type": RBAC,
                "stat_prefix": "tcp.",
                "rules": {
                    "action": rng.choice(("ALLOW", "ALLOW", "DENY", "LOG")),
                    "policies": {
                        f"p{number}": {"permissions": [permission(rng, ports)], "principals": [principal(rng)]}
                        for number in range(rng.randint(1, 3))
                    },
                },
            },
        }
        for _ in range(rng.randint(0, 2))
    ]


def test_explain_agrees_with_connections_under_calico_policies(tmp_path: Path) -> None:
    """Plain and in a tunnel, where it begins and where it ends, each with some of the identity and the ports."""

    async def body(made: CalicoHarness) -> None:
        rng, harness = random.Random(7), made.harness
        outcomes: set[bool] = set()
        async with application() as port:
            await tunnel(harness, port, Identities())
            before = ""
            for _ in range(CASES // 2):
                ports = f"[{rng.choice((port, harness.port('inbound'), 80, 1))}]"
                allow = f"[{{action: Allow, protocol: TCP, destination: {{ports: {ports}}}}}]"
                ingress, egress = rng.choice((BY_CLIENT, BY_OTHER)), rng.choice((ALL, allow))
                text = policies_of_calico(ingress, egress)
                if text == before:
                    continue
                await made.change(before := text)
                # The tunnel's authority is the application's address, so its far end needs a separate question.
                ends = [
                    explanation(harness, f"source=127.0.0.1&destination=127.0.0.1:{harness.port('l')}&listener=l"),
                    explanation(
                        harness, f"source=127.0.0.1&destination=127.0.0.1:80&identity={CLIENT}&listener=inbound"
                    ),
                ]
                worked = await ask(harness.port("l")) == b"ping"
                assert all(end["verdict"].startswith("allowed") for end in ends) == worked, (text, ends)
                outcomes.add(worked)
        assert outcomes == {True, False}

    with_calico(tmp_path, policies_of_calico(ingress=BY_CLIENT), body)


def explanation(harness: Harness, question: str) -> Json:
    answer: Json = json.loads(page(harness, "/explain", question))
    return answer


@pytest.mark.parametrize("seed", range(2))
def test_explain_agrees_with_plain_connections(tmp_path: Path, seed: int) -> None:
    """Through random policies, to a cluster that may be missing or empty, by a chain that may match nothing."""

    async def body(harness: Harness) -> None:
        rng = random.Random(seed)
        verdicts: set[str] = set()
        async with application() as port:
            await harness.published(listener(), cluster(port), cluster(name="empty"))
            await harness.until(lambda: harness.proxy.listeners.active)
            for number in range(CASES):
                bound = harness.port("l")
                target = rng.choice(("app", "app", "app", "empty", "missing"))
                more: dict[str, Any] = rng.choice(
                    ({}, {}, {"filter_chain_match": {"destination_port": rng.choice((bound, 1))}})
                )
                made = listener(chain(*policies(rng, bound, 1), tcp(target), name=f"case {number}", **more))
                assert await harness.published(made, cluster(port), cluster(name="empty")) is None
                await harness.until(lambda: harness.proxy.listeners.active and not harness.proxy.listeners.warming)
                answer = explanation(
                    harness, f"source=127.0.0.1&destination=127.0.0.1:{harness.port('l')}&listener=l"
                )
                worked = await ask(harness.port("l")) == b"ping"
                assert answer["verdict"].startswith("allowed") == worked, (made, answer)
                verdicts.add(answer["verdict"].partition("[")[0])
        assert len(verdicts) >= 4, verdicts

    run(tmp_path, body)


@pytest.mark.parametrize("seed", range(2))
def test_explain_agrees_with_tunnels(tmp_path: Path, seed: int) -> None:
    """Whose far end is the same proxy, with random policies about the client's identity there."""

    async def body(harness: Harness) -> None:
        rng, identities = random.Random(seed), Identities()
        outcomes: set[bool] = set()
        async with application() as port:
            for _ in range(CASES // 2):
                await tunnel(harness, port, identities, *policies(rng, 1, 2))
                answer = explanation(
                    harness, f"source=127.0.0.1&destination=127.0.0.1:80&identity={CLIENT}&listener=inbound"
                )
                worked = await ask(harness.port("l")) == b"ping"
                assert answer["verdict"].startswith("allowed") == worked, answer
                outcomes.add(worked)
        assert outcomes == {True, False}

    run(tmp_path, body)
