"""Injects pods, and objects with a pod template, in the documents of a file. Pure.

Documents and list items without a pod template keep their bytes, including comments, so a whole file can be piped
through. An injected document or item is rewritten, with its keys in their order and without its comments. JSON
stays JSON.
"""

import copy
from typing import Any, Final

from xds.errors import ConfigError
from ztunnel.runtime.formats.file_kinds import FileKind, explained
from ztunnel.runtime.formats.go_yaml import Document, Span, dump, dump_json, json_items, load_documents, load_json
from ztunnel.sidecar.inject.config import InjectConfig
from ztunnel.sidecar.inject.decision import mapping
from ztunnel.sidecar.inject.inject import Denied, inject
from ztunnel.sidecar.inject.patch import same
from ztunnel.sidecar.inject.review import pod_name

#: For each kind of object, the path of its pod template.
_TEMPLATES: Final = {
    "Deployment": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "DaemonSet": ("spec", "template"),
    "ReplicaSet": ("spec", "template"),
    "ReplicationController": ("spec", "template"),
    "DeploymentConfig": ("spec", "template"),
    "PodTemplate": ("template",),
    "Job": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
    "Pod": (),
}


class BadDocument(Exception):
    """A document that cannot be injected; the text names the document."""


def inject_text(text: str, namespace: str, config: InjectConfig, notes: list[str]) -> str:
    """Return the file with all pods injected. Its order, and its language (YAML or JSON), are unchanged.

    Args:
        text: YAML, of any number of documents, or JSON, one value after the other.
        namespace: the namespace of objects that name none.
        config: the injector's.
        notes: receives a line for each pod: the action, or why there is none.

    Raises:
        BadDocument: names the object and its fault, or the file is neither YAML nor JSON.
    """
    try:
        values = load_json(text)
        if values is not None:
            made = _Rewrite(text, namespace, config, notes)
            for number, (value, start, end) in enumerate(values):
                made.json(value, start, end, f"document {number}")
            return made.text()
        made = _Rewrite(text, namespace, config, notes)
        for number, document in enumerate(load_documents(text)):
            if document.value is not None:
                made.yaml(document, f"document {number}")
        return made.text()
    except (ConfigError, RecursionError, BadDocument) as error:
        (fault,) = explained([" ".join(str(error).split())], text, FileKind.OBJECTS)
        raise BadDocument(fault) from error


class _Rewrite:
    """Builds a changed copy of a text by replacing parts, from the start to the end."""

    def __init__(self, text: str, namespace: str, config: InjectConfig, notes: list[str]) -> None:
        self._text = text
        self._namespace = namespace
        self._config = config
        self._notes = notes
        self._parts: list[str] = []
        self._at = 0

    def text(self) -> str:
        return "".join([*self._parts, self._text[self._at :]])

    def json(self, value: object, start: int, end: int, place: str) -> None:
        """Replace the parts of a JSON value that injection changes."""
        made = _injected(value, self._namespace, self._config, self._notes, place)
        if same(value, made):
            return
        changed = _changed_items(value, made)
        if changed is None:
            indent = 4 if "\n" in self._text[start:end].strip() else None
            self._replace(start, end, dump_json(made, indent))
            return
        places = json_items(self._text, start, "items")
        for number, item in changed:
            first, last = places[number]
            written = dump_json(item, 2 if "\n" in self._text[first:last] else None)
            line = self._text.rfind("\n", 0, first) + 1
            margin = first - line if not self._text[line:first].strip() else 0
            self._replace(first, last, written.replace("\n", "\n" + " " * margin))

    def yaml(self, document: Document, place: str) -> None:
        """Replace the parts of a YAML document that injection changes."""
        value = document.value
        made = _injected(value, self._namespace, self._config, self._notes, place)
        if same(value, made) or document.root is None:
            return
        changed = None if document.aliased else _changed_items(value, made)
        if changed is None or not isinstance(value, dict):
            self._block(document.root, made)
            return
        items = value["items"]
        for number, item in changed:
            span = document.spans[id(items[number])]
            if document.spans[id(items)].flow:
                self._replace(span.start, span.end, dump_json(item))
            else:
                self._block(span, item)

    def _block(self, span: Span, value: object) -> None:
        """Replace a mapping by a value in block style. A comment in the mapping's last line is replaced, too."""
        line = self._text.rfind("\n", 0, span.start) + 1
        before = self._text[line : span.start]
        end = span.end
        if self._text[end - 1] != "\n":  # a literal block ends after its last line
            end = self._text.find("\n", end) + 1 or len(self._text)
        written = dump(value)
        if before.startswith("---"):
            # A block cannot begin on the same line as the document marker.
            self._replace(line, end, f"---\n{written}")
            return
        margin = " " * len(before)
        lines = written.split("\n")
        indented = "\n".join(f"{margin}{each}" if each else each for each in lines)
        self._replace(span.start, end, indented[len(margin) :])

    def _replace(self, start: int, end: int, written: str) -> None:
        self._parts += self._text[self._at : start], written
        self._at = end


def _changed_items(value: object, made: object) -> list[tuple[int, object]] | None:
    """Return the items of a Kubernetes List that injection has changed, each with its index. None if the value is
    not a List.
    """
    items, made_items = (each.get("items") if isinstance(each, dict) else None for each in (value, made))
    if not isinstance(items, list) or not isinstance(made_items, list):
        return None
    pairs = zip(items, made_items, strict=True)
    return [(number, item) for number, (old, item) in enumerate(pairs) if not same(old, item)]


def _injected(
    document: Any, namespace: str, config: InjectConfig, notes: list[str], place: str, of_list: str | None = None
) -> Any:
    if not isinstance(document, dict):
        raise BadDocument(f"{place}: is not a Kubernetes object")
    kind = document.get("kind", of_list)
    if kind == "List" or (isinstance(kind, str) and kind.endswith("List") and "items" in document):
        items = document.get("items")
        if not isinstance(items, list):
            raise BadDocument(f"{place}.items: must be a list")
        # An item without a kind has the kind that its list is named after, as in answers of the API server.
        each_kind = kind.removesuffix("List")
        made = [
            _injected(item, namespace, config, notes, f"{place}.items[{at}]", each_kind)
            for at, item in enumerate(items)
        ]
        return {**document, "items": made}
    if kind is None:
        raise BadDocument(f"{place}: is not a Kubernetes object: it has no kind")
    path = _TEMPLATES.get(kind) if isinstance(kind, str) else None
    name = f"{kind} {pod_name(document)}"
    if path is None:
        if mapping(mapping(mapping(document, "spec"), "template"), "spec").get("containers"):
            notes.append(f"{name}: not injected: unknown kind; only the webhook injects its pods")
        return document
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
