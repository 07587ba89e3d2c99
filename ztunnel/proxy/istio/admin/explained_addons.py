"""Adds each addon's predicted verdict to every candidate endpoint (``ways``) in the answer of ``/explain``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from xds.model.address import SocketAddress
from ztunnel.proxy.addons.load import AddonError, LoadedAddon
from ztunnel.proxy.addons.preview import Said, preview_of, would_say
from ztunnel.proxy.addons.settings import AddonSettings
from ztunnel.proxy.istio.admin.inspected import InspectedProxy
from ztunnel.proxy.istio.path.addons import would_accept, would_connect
from ztunnel.proxy.istio.path.explain import Answer, Question

_previews: dict[int, tuple[AddonSettings, list[tuple[LoadedAddon, str]]]] = {}


def ask_addons(proxy: InspectedProxy, asked: Question, answer: Answer) -> None:
    """Add the addons' predicted verdicts to each candidate endpoint (``ways``). A denial changes the overall
    verdict.
    """
    try:
        addons = _addons(proxy)
    except AddonError as error:
        answer["addons"] = f"not known here: {error}"
        return
    ways = answer.get("ways")
    if ways is None:  # a connection from outside the mesh, or without any candidate
        denials = [_arriving(proxy, asked, answer["inbound"], addons)] if "inbound" in answer else []
    else:
        denials = [_leaving(proxy, asked, way, addons) for way in ways]
    refused = [each for each in denials if each]
    if not refused or not str(answer["verdict"]).startswith("allowed"):
        return
    some = "" if len(refused) == len(denials) else f" for {len(refused)} of {len(denials)} endpoints"
    answer["verdict"] = f"refused by addon {refused[0]}{some}"


def _addons(proxy: InspectedProxy) -> Sequence[tuple[LoadedAddon, str]]:
    running = proxy.node.addons
    if running is not None:
        return [(each.loaded, each.suspended) for each in running.host.addons]
    settings = proxy.config.addons
    assert settings is not None
    # The addons run in worker processes. An addon that decides by the facts alone returns the same verdict here.
    known = _previews.get(id(settings))
    if known is None:
        known = _previews[id(settings)] = (settings, preview_of(settings))
    return known[1]


def _leaving(
    proxy: InspectedProxy, asked: Question, way: dict[str, Any], addons: Sequence[tuple[LoadedAddon, str]]
) -> str:
    """Return the name of the addon that would deny a candidate endpoint, or the empty string."""
    source, mesh = asked.source, proxy.mesh
    denied = ""
    if source is not None and asked.captured and _is_here(proxy, source.node):
        there = mesh.workload(way["workload"]) if "workload" in way else None
        service = mesh.service_at(source.network, asked.destination.host, source.namespace)
        running = proxy.node.addons
        pod = (source.namespace, source.name)
        names = running.names.of(pod, asked.destination.host) if running is not None else ()
        facts = would_connect(source, asked.host, asked.destination, service, there, way, names)
        denied = _put(way, would_say(addons, "connecting", facts))
    inbound = way.get("inbound")
    return denied or (_arriving(proxy, asked, inbound, addons) if inbound else "")


def _arriving(
    proxy: InspectedProxy, asked: Question, inbound: dict[str, Any], addons: Sequence[tuple[LoadedAddon, str]]
) -> str:
    there = proxy.mesh.workload(inbound.get("workload", ""))
    if there is None or not _is_here(proxy, there.node) or "application" not in inbound or "refused" in inbound:
        return ""  # addons run on the destination's node, and are not asked about a refused connection
    application = SocketAddress.parse(inbound["application"])
    facts = would_accept(asked.source, asked.host, asked.identity, there, application)
    return _put(inbound, would_say(addons, "accepting", facts))


def _put(place: dict[str, Any], said: list[Said]) -> str:
    if said:
        place["addons"] = [each.shown() for each in said]
    return next((each.addon for each in said if each.denies), "")


def _is_here(proxy: InspectedProxy, node: str) -> bool:
    return not proxy.config.node or node == proxy.config.node
