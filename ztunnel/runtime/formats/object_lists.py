"""Unpacks lists of Kubernetes objects in files. Pure."""

from collections.abc import Iterator, Mapping


def items_of(document: Mapping[str, object]) -> Iterator[object] | None:
    """Return the items of a list, each with apiVersion and kind. None if the document is not a list.

    Items of a ``List`` have their own apiVersion and kind. Items of a typed list, such as a ``NetworkPolicyList``
    printed by ``kubectl get --raw``, have neither; they get them from the list.
    """
    kind, items = document.get("kind"), document.get("items")
    if not isinstance(kind, str) or not kind.endswith("List") or not isinstance(items, list):
        return None
    implied = {"apiVersion": document.get("apiVersion"), "kind": kind.removesuffix("List")}
    if not implied["kind"]:
        return iter(items)
    return ({**implied, **item} if isinstance(item, Mapping) else item for item in items)
