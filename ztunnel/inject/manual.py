"""Injects into the documents of a file: pods, and whatever has a template of pods. Pure.

What has none is passed on as it was written, comments included, so that a whole file can be piped through. A
document that is changed is written anew, with its keys in their order: YAML's library keeps no comments, but for
those before its first line. JSON stays JSON.
"""

import copy
import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

import yaml

from ztunnel.inject.config import InjectConfig
from ztunnel.inject.decision import mapping
from ztunnel.inject.inject import Denied, inject
from ztunnel.inject.patch import same
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


def inject_text(text: str, namespace: str, config: InjectConfig, notes: list[str]) -> str:
    """Return a file with its pods injected, in the order and the language that it has.

    Args:
        text: YAML, of any number of documents, or JSON, one value after the other.
        namespace: of objects that name none.
        config: the injector's.
        notes: as of :func:`inject_documents`.

    Raises:
        BadDocument: as there, or the file is neither.
    """
    found = _json_values(text)
    if found is not None:
        indent = 4 if "\n" in text.strip() else None
        made = inject_documents(found, namespace, config, notes)
        return "".join(f"{json.dumps(each, indent=indent, ensure_ascii=False)}\n" for each in made)
    parts = []
    try:
        for number, (written, head, document) in enumerate(_yaml_documents(text)):
            made_document = document
            if document is not None:
                made_document = _injected(document, namespace, config, notes, f"document {number}")
            if same(document, made_document):
                parts.append(written)
            else:
                parts.append(head + yaml.safe_dump(made_document, sort_keys=False, default_flow_style=False))
    except (yaml.YAMLError, RecursionError) as error:
        raise BadDocument(" ".join(str(error).split())) from error
    # A last line without its end would run into the next document's.
    return "".join(part if part.endswith("\n") or not part else f"{part}\n" for part in parts)


def _json_values(text: str) -> list[Any] | None:
    """Return the values of a JSON text; ``None``: it is none."""
    decoder, found, at = json.JSONDecoder(), [], 0
    try:
        while rest := text[at:].lstrip():
            if rest[0] not in "{[":
                return None
            value, length = decoder.raw_decode(rest)
            found.append(value)
            at = len(text) - len(rest) + length
    except (ValueError, RecursionError):
        return None
    return found or None


def _yaml_documents(text: str) -> Iterator[tuple[str, str, Any]]:
    """Yield for each document its text, the part of that before its first node, in whole lines, and its value.

    The texts together are the whole of the file.
    """
    # Where each begins: at its "---", but for the first one, which has what is before that, too.
    starts = [
        event.start_mark.index
        for event in yaml.parse(text)
        if isinstance(event, yaml.DocumentStartEvent) and event.start_mark is not None
    ]
    values = yaml.safe_load_all(text)
    for start, end in zip([0, *starts[1:]], [*starts[1:], len(text)], strict=False):
        chunk = text[start:end]
        value = next(values, None)
        node = yaml.compose(chunk)
        begins = len(chunk) if node is None else chunk.rfind("\n", 0, node.start_mark.index) + 1
        # A node may begin in the line of its "---".
        mark = "---\n" if chunk[begins:].startswith("---") else ""
        yield chunk, chunk[:begins] + mark, value


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
        workload = str(mapping(document, "metadata").get("name") or "") if path else ""
        outcome = inject(holder[key], str(own or namespace), config, workload=workload)
    except Denied as error:
        raise BadDocument(f"{place}, {name}: {error}") from error
    if outcome.pod is not holder[key]:
        holder[key] = outcome.pod
    notes.append(f"{name}: {outcome.decision.reason}{''.join(f'; {each}' for each in outcome.warnings)}")
    return holder[key] if not path else made_document
