"""Adds each addon's predicted verdict to every candidate endpoint (``ways``) in the answer of ``/explain``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from xds.model.address import SocketAddress
from ztunnel.proxy.addons.interrupt import CurrentCall
from ztunnel.proxy.addons.load import AddonError, LoadedAddon
from ztunnel.proxy.addons.preview import Said, end_preview, preview_of, would_say
from ztunnel.proxy.addons.settings import AddonSettings
from ztunnel.proxy.istio.admin.inspected import InspectedProxy
from ztunnel.proxy.istio.path.addons import would_accept, would_connect
from ztunnel.proxy.istio.path.explain import Answer, Question
from ztunnel.runtime.watched_file import FileState, file_state


class _Preview(NamedTuple):
    """The addons of a process whose workers carry the connections, as loaded to predict their verdicts.

    Attributes:
        settings: the settings, kept so that their id is not reused.
        files: the states of the addons' files before they were read.
        addons: the addons, see :func:`~ztunnel.proxy.addons.preview.would_say`.
    """

    settings: AddonSettings
    files: list[FileState]
    addons: list[tuple[LoadedAddon, str]]


#: The previews, by the id of their settings.
_previews: dict[int, _Preview] = {}


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
    files = [file_state(Path(spec.file)) if spec.file else None for spec in settings.specs]
    if known is None or known.files != files:
        known = _previews[id(settings)] = _Preview(settings, files, _loaded(settings, known))
    return known.addons


def _loaded(settings: AddonSettings, before: _Preview | None) -> list[tuple[LoadedAddon, str]]:
    """Load the addons. If a changed file cannot be loaded, keep the version before, like the workers.

    Raises:
        AddonError: an addon cannot be loaded, and there is no version before.
    """
    try:
        loaded = preview_of(settings)
    except AddonError:
        if before is None:
            raise
        return before.addons
    if before is not None:
        end_preview(before.addons)
    return loaded


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
        denied = _put(way, would_say(addons, "connecting", facts, _current(proxy)))
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
    return _put(inbound, would_say(addons, "accepting", facts, _current(proxy)))


def _current(proxy: InspectedProxy) -> CurrentCall | None:
    return proxy.node.addons.host.current if proxy.node.addons is not None else None


def _put(place: dict[str, Any], said: list[Said]) -> str:
    if said:
        place["addons"] = [each.shown() for each in said]
    return next((each.addon for each in said if each.denies), "")


def _is_here(proxy: InspectedProxy, node: str) -> bool:
    return not proxy.config.node or node == proxy.config.node
