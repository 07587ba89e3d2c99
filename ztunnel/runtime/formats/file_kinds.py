"""Recognizes a file for another command by its keys, so that the error can name the right command. Pure.

Otherwise, given a file for another command, this command would report useless faults in nearly every line.
"""

import json
import re
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import NamedTuple


class _Described(NamedTuple):
    name: str
    read_by: str


class FileKind(Enum):
    """A kind of file that operators write, with the command to read this kind."""

    MESH = _Described("a mesh file", "ztunnel control-plane")
    PODS = _Described("a pods file", "ztunnel agent --state")
    NODE = _Described("a node file", "ztunnel intercept -f")
    INJECTOR = _Described("an injector's configuration", "ztunnel inject --config")
    BOOTSTRAP = _Described("an Envoy bootstrap", "ztunnel proxy --bootstrap")
    LOCAL_MESH = _Described("a local mesh file", "LOCAL_XDS_PATH of ztunnel proxy")
    DUMP = _Described("a config_dump", "ztunnel status --file and the other commands that ask a proxy")
    OBJECTS = _Described("a file of Kubernetes objects", "kubectl apply -f")


#: Matches a key at the start of a YAML line.
_KEY = re.compile(r"^(?:- )?([A-Za-z_][\w.-]*|\"[\w.-]+\"):(?:\s|$)", re.MULTILINE)


def looks_like(text: str) -> FileKind | None:
    """Return the kind of a file by its keys, even if it cannot be parsed; ``None`` if it resembles no kind."""
    keys = _keys(text)
    if {"apiVersion", "kind"} <= keys:
        return FileKind.OBJECTS
    if keys & {"static_resources", "dynamic_resources", "staticResources", "dynamicResources"}:
        return FileKind.BOOTSTRAP
    if "configs" in keys or {"workloads", "certificates"} <= keys:
        return FileKind.DUMP
    if "workloads" in keys:
        return FileKind.LOCAL_MESH
    if {"host", "ztunnel"} <= keys:
        return FileKind.NODE
    if keys & {"gate", "sidecar", "defaultTemplates", "neverInjectSelector", "alwaysInjectSelector"}:
        return FileKind.INJECTOR
    if keys & {"nodes", "trust_domain", "waypoints"}:
        return FileKind.MESH
    if keys == {"pods"} and re.search(r"^\s+.*\bnetns:", text, re.MULTILINE):
        return FileKind.PODS
    return None


def belongs_elsewhere(text: str, wanted: FileKind) -> str:
    """Return a sentence if a faulty file looks like another kind than the expected one. Empty if not."""
    found = looks_like(text)
    if found is None or found is wanted:
        return ""
    return f"looks like {found.value.name}, for {found.value.read_by}; {wanted.value.name} is wanted here"


def explained(faults: list[str], text: str, wanted: FileKind) -> list[str]:
    """Return the faults of a file. If the file looks like another kind, return only that fault, because it causes
    all others.
    """
    elsewhere = belongs_elsewhere(text, wanted)
    return [f"file: {elsewhere}"] if elsewhere else faults


def _keys(text: str) -> AbstractSet[str]:
    try:
        loaded = json.loads(text)
    except (ValueError, RecursionError):
        return {key.strip('"') for key in _KEY.findall(text)}
    return loaded.keys() if isinstance(loaded, dict) else set()
