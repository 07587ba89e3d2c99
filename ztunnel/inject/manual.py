"""Injects into the documents of a file: pods, and whatever has a template of pods. Pure.

Documents that have none are passed on as they are, so that a whole file can be piped through.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any, Final

from ztunnel.inject.config import InjectConfig
from ztunnel.inject.decision import mapping
from ztunnel.inject.inject import Denied, inject
from ztunnel.inject.review import pod_name

#: Where in an object its pod is.
_TEMPLATES: Final = {
    "Deployment": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "DaemonSet": ("spec", "template"),
    "ReplicaSet": ("spec", "template"),
    "ReplicationController": ("spec", "template"),
    "Job": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
    "Pod": (),
}


class BadDocument(Exception):
    """A document that cannot be injected; the text names it."""


def inject_documents(
    documents: Iterable[Any], namespace: str, config: InjectConfig, notes: list[str]
) -> Iterator[Any]:
    """Yield the documents with their pods injected.

    Args:
        documents: as YAML has loaded them; None for an empty one.
        namespace: of objects that name none.
        config: the injector's.
        notes: gets a line for each pod: what was done, or why not.

    Raises:
        BadDocument: names the object and what is wrong with it.
    """
    for number, document in enumerate(documents):
        if document is not None:
            yield _injected(document, namespace, config, notes, f"document {number}")


def _injected(document: Any, namespace: str, config: InjectConfig, notes: list[str], place: str) -> Any:
    if not isinstance(document, dict):
        raise BadDocument(f"{place}: is no object of Kubernetes")
    kind = document.get("kind")
    if kind == "List" or (isinstance(kind, str) and kind.endswith("List") and "items" in document):
        items = document.get("items")
        if not isinstance(items, list):
            raise BadDocument(f"{place}.items: must be a list")
        made = [_injected(item, namespace, config, notes, f"{place}.items[{at}]") for at, item in enumerate(items)]
        return {**document, "items": made}
    path = _TEMPLATES.get(kind) if isinstance(kind, str) else None
    if path is None:
        return document
    name = f"{kind} {pod_name(document)}"
    made_document = copy.deepcopy(document)
    holder: Any = {"": made_document}
    key = ""
    for part in path:
        holder, key = holder[key], part
        if not isinstance(holder, dict) or not isinstance(holder.get(key), dict):
            raise BadDocument(f"{place}, {name}: has no {'.'.join(path)}")
    own = mapping(document, "metadata").get("namespace")
    try:
        outcome = inject(holder[key], str(own or namespace), config)
    except Denied as error:
        raise BadDocument(f"{place}, {name}: {error}") from error
    if outcome.pod is not holder[key]:
        holder[key] = outcome.pod
    notes.append(f"{name}: {outcome.decision.reason}{''.join(f'; {each}' for each in outcome.warnings)}")
    return holder[key] if not path else made_document
