"""Answers ``/explain`` questions from a ``config_dump``, which is saved in a file or comes from a Rust ztunnel.
Pure.

Answers have the proxy's own wording, because they come from its functions. Each answer names the facts missing
from the dump.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from xds.dialects.istio.dumped_mesh import DumpedMesh, entries, read_dump
from xds.errors import ConfigError
from xds.model.identity import SpiffeId
from xds.model.workload import Protocol
from ztunnel.proxy.istio.path.explain import Answer, BadQuestion, Surroundings, certificate, explain, question

#: Keys that only our proxies' dumps have. The Rust ztunnel's dump has neither.
_LACKS_OF_OURS: Final = ("endpoints that failed a moment ago, which come last", "Calico's policies")
_LACKS_OF_RUST: Final = "what an inbound client has proven: it is taken for the workload at its address"
#: The most unreadable entries of a dump that are listed. Of more, only the number is given.
_MOST_TOLD: Final = 8


class SavedMesh:
    """The mesh in one dump, which can answer any number of questions.

    Attributes:
        identity_at: the identities of workloads that accept tunnels, by address.
    """

    def __init__(self, dump: Mapping[str, Any], now_s: float) -> None:
        """Read a dump.

        Args:
            dump: the parsed dump of a proxy in an Istio mesh.
            now_s: the wall clock in seconds, for the validity of certificates.

        Raises:
            ConfigError: it does not have the form of a dump.
        """
        found: DumpedMesh = read_dump(dump)
        config = dump.get("config") or {}
        if not isinstance(config, dict):
            raise ConfigError("config: must be a mapping")
        self._now_s = now_s
        self._certificates = list(entries(dump, "certificates"))
        self._around = Surroundings(
            mesh=found.mesh,
            network=str(config.get("network") or ""),
            cluster_domain=str(config.get("clusterDomain") or "cluster.local"),
            illegal_ports=[port for port in config.get("illegalPorts") or () if isinstance(port, int)],
        )
        self._lacks = [_LACKS_OF_RUST, *_unread(found)]
        if str((dump.get("version") or {}).get("rustVersion")).startswith("Python"):
            self._lacks[:1] = _LACKS_OF_OURS
        if not config:
            self._lacks.append("config, with the network and the proxy's own ports")
        self.identity_at = {
            address: str(workload.identity)
            for workload in found.mesh.workloads()
            if workload.protocol is Protocol.HBONE
            for address in workload.addresses
        }

    def ask(self, asked: Mapping[str, str]) -> Answer:
        """Return the answer to a question, given as the parameters of ``/explain``.

        Raises:
            BadQuestion: a party or a parameter is unknown.
        """
        given = {name: value for name, value in asked.items() if value}
        if "listener" in given:
            raise BadQuestion("listener: only in Envoy's dialect")
        identity = given.get("identity", "")
        if identity:
            try:
                SpiffeId.parse(identity)
            except ValueError as error:
                raise BadQuestion(str(error)) from None
        direction = given.get("direction", "")
        inbound = direction == "inbound"
        question_ = question(
            given.get("source", ""),
            given.get("destination", ""),
            identity,
            self._around,
            inbound=inbound,
            captured=direction == "outbound",
            endpoint=given.get("endpoint", ""),
        )
        answer = explain(question_, self._around)
        own = question_.source
        if not inbound and own is not None and question_.identity == str(own.identity):
            answer["certificate"] = self._certificate(str(own.identity))
        return answer | {"not_in_the_dump": self._lacks}

    def _certificate(self, identity: str) -> Answer:
        for entry in self._certificates:
            if entry.get("identity") == identity:
                chain = entry.get("certChain") or []
                if entry.get("state") == "Available" and chain:
                    time = str(chain[0].get("expirationTime"))
                    try:
                        return certificate("", datetime.fromisoformat(time), self._now_s)
                    except ValueError:
                        return certificate(f"Available; its time cannot be read: {time}", None, 0.0)
                return certificate(str(entry.get("state")), None, 0.0)
        return certificate("", None, 0.0)


def _unread(found: DumpedMesh) -> list[str]:
    told = list(found.unread[:_MOST_TOLD])
    more = len(found.unread) - len(told)
    return [*told, f"and {more} entries more that cannot be read"] if more else told
