"""Suggests the smallest set of AuthorizationPolicies that admits the observed connections. Pure."""

from collections.abc import Iterable
from typing import Any

from xds.model.workload import Workload
from ztunnel.ask.simulate.seen import Seen
from ztunnel.runtime.formats.go_yaml import dump_all

_SPIFFE = "spiffe://"


def suggest(connections: Iterable[tuple[Workload, Seen]]) -> str:
    """Return one ALLOW policy in YAML for each called application. It refuses all other connections.

    An application is a namespace and a canonical name, which the selector expects in the label ``app``. Callers
    with an identity are listed by identity, all others by address. The two lists are separate sources, because a
    source with both would match only callers with both.

    Args:
        connections: each with the workload it went to.
    """
    callers: dict[tuple[str, str], dict[int, set[Seen]]] = {}
    for workload, seen in connections:
        by_port = callers.setdefault((workload.namespace, workload.canonical_name or workload.name), {})
        by_port.setdefault(seen.destination.port, set()).add(seen)
    return dump_all(_policy(*key, by_port) for key, by_port in sorted(callers.items()))


def _policy(namespace: str, name: str, by_port: dict[int, set[Seen]]) -> dict[str, Any]:
    # Ports with the same callers share a rule.
    ports_of: dict[tuple[tuple[str, ...], tuple[str, ...]], list[int]] = {}
    for port, connections in sorted(by_port.items()):
        principals = tuple(sorted({seen.identity.removeprefix(_SPIFFE) for seen in connections if seen.identity}))
        blocks = tuple(sorted({_block(seen.source) for seen in connections if not seen.identity}))
        ports_of.setdefault((principals, blocks), []).append(port)
    rules = []
    for (principals, blocks), ports in ports_of.items():
        sources = [{"source": {"principals": list(principals)}}] if principals else []
        sources += [{"source": {"ipBlocks": list(blocks)}}] if blocks else []
        rules.append({"from": sources, "to": [{"operation": {"ports": [str(port) for port in ports]}}]})
    return {
        "apiVersion": "security.istio.io/v1",
        "kind": "AuthorizationPolicy",
        "metadata": {"name": f"{name}-callers", "namespace": namespace},
        "spec": {"selector": {"matchLabels": {"app": name}}, "action": "ALLOW", "rules": rules},
    }


def _block(address: str) -> str:
    return f"{address}/{128 if ':' in address else 32}"
