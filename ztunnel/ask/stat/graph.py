"""Draws pairs of workloads as a graph in Graphviz' language: ``ztunnel edges -o dot``. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from ztunnel.ask.stat.traffic import Edge


def dot(edges: Iterable[Edge]) -> Iterator[str]:
    """Yield the lines of a graph. Namespaces are boxes, and each pair is an edge: dashed if it is unencrypted, red
    if it fails.
    """
    every = list(edges)
    names = sorted({name for each in every for name in (each.source, each.destination)})
    yield "digraph mesh {"
    yield "  rankdir=LR; node [shape=box, style=rounded];"
    for number, namespace in enumerate(sorted({name.partition("/")[0] for name in names if "/" in name})):
        yield f"  subgraph cluster_{number} {{ label={_quoted(namespace)};"
        for name in names:
            if name.startswith(f"{namespace}/"):
                yield f"    {_quoted(name)} [label={_quoted(name.partition('/')[2])}];"
        yield "  }"
    for each in every:
        yield f"  {_quoted(each.source)} -> {_quoted(each.destination)} [{_look(each)}];"
    yield "}"


def _look(edge: Edge) -> str:
    label = f"{edge.connections} connections"
    if edge.failed or edge.denied:
        label += f", {edge.failed} failed, {edge.denied} denied"
    if edge.connect_p99_seconds is not None:
        label += f", p99 {edge.connect_p99_seconds * 1000:.1f} ms"
    plain = edge.security == "plain"
    colour = "red" if edge.failed or edge.denied else "orange" if plain else "darkgreen"
    return f"label={_quoted(label)}, color={colour}{', style=dashed' if plain else ''}"


def _quoted(text: str) -> str:
    """Return a text as a string of Graphviz. JSON's escapes of quotes and backslashes have the same meaning
    there.
    """
    return json.dumps(text, ensure_ascii=False)
