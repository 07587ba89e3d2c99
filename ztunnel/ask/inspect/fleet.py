"""Sends the same query to one proxy, to all proxies of a cluster, or to those in an archive."""

from __future__ import annotations

import argparse
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, TypeVar

import msgspec

from ztunnel.ask.inspect.archive import Archive, BadArchive
from ztunnel.ask.inspect.source import AskFailed, LivePages, Pages, SavedDump
from ztunnel.runtime.console.output import Item, Silent

if TYPE_CHECKING:
    from ztunnel.ask.inspect.kubectl import Daemon, Kubectl

T = TypeVar("T")
I = TypeVar("I", bound=Item)  # noqa: E741  an item

#: The most concurrent port-forwards. Each is a process of kubectl and a stream through the API server.
MOST_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class Found(Generic[T]):
    """Answers by node.

    Attributes:
        by_node: each node's answer. The node's name is empty if one proxy was selected by its address or pod.
        silent: nodes without an answer.
        across: whether several nodes were selected.
    """

    by_node: Mapping[str, T]
    silent: Sequence[Silent] = ()
    across: bool = False


def gather(args: argparse.Namespace, look: Callable[[Pages], T], *, agent: bool = False) -> Found[T]:
    """Return the results of ``look`` for the pages of every proxy or agent that the flags select.

    Like :func:`gather_by_node`, for a ``look`` that does not need the node's name.
    """
    return gather_by_node(args, lambda node, pages: look(pages), agent=agent)


def gather_by_node(args: argparse.Namespace, look: Callable[[str, Pages], T], *, agent: bool = False) -> Found[T]:
    """Return the results of ``look`` for every proxy or agent that the flags select.

    Args:
        args: the command line.
        look: gets the node's name, as in :attr:`Found.by_node`, and its pages. It runs in threads, at most
            :data:`MOST_AT_ONCE` at a time.
        agent: query node agents instead of proxies.

    Raises:
        AskFailed: a single proxy does not answer, no proxy of several exists, or the flags contradict each other.
    """
    file, selector = getattr(args, "file", None), getattr(args, "selector", "")
    several = getattr(args, "all_nodes", False) or bool(selector)
    if file is not None:
        return _in_file(file, args, look, several=several)
    if not several and args.pod is None and args.node is None:
        return Found({"": _answer(look, "", LivePages(args.address, args.request_timeout))})
    from ztunnel.ask.inspect.kubectl import AGENT, PROXY, Unreachable, kubectl_of

    kubectl, daemon = kubectl_of(args), AGENT if agent else PROXY
    try:
        if not several:
            place = (
                kubectl.of_pod(args.pod, daemon) if args.pod is not None else kubectl.of_node(args.node, daemon)
            )
            node = args.node or ""
            with kubectl.forwarded(*place, daemon.port) as address:
                return Found({node: _answer(look, node, LivePages(address, args.request_timeout))})
        places = kubectl.of_all_nodes(daemon)
        if selector:
            nodes = set(kubectl.pods(selector, getattr(args, "namespace", "")).values())
            places = {node: place for node, place in places.items() if node in nodes}
    except Unreachable as error:
        hint = " (--address HOST:PORT queries one proxy)" if getattr(args, "all_by_default", False) else ""
        raise AskFailed(f"{error}{hint}") from None
    return ask_all(
        kubectl,
        daemon,
        places,
        lambda node, address: _answer(look, node, LivePages(address, args.request_timeout)),
    )


def _answer(look: Callable[[str, Pages], T], node: str, pages: Pages) -> T:
    """Return ``look``'s result for one node. A page of an unexpected form must not hide the other nodes' answers.

    Raises:
        AskFailed: there is no answer, or it has another form.
    """
    try:
        return look(node, pages)
    except (TypeError, AttributeError, LookupError, ValueError, msgspec.MsgspecError) as error:
        raise AskFailed(f"{pages.name}: its answer has an unexpected form: {error!r}") from error


def ask_all(
    kubectl: Kubectl, daemon: Daemon, places: Mapping[str, tuple[str, str]], ask: Callable[[str, str], T]
) -> Found[T]:
    """Call ``ask`` for every node in threads, with the node's name and a local address that leads to its pod.
    ``places`` has the namespace and name of that pod by node.
    """
    from ztunnel.ask.inspect.kubectl import Unreachable

    def one(node: str) -> T | Silent:
        try:
            with kubectl.forwarded(*places[node], daemon.port) as address:
                return ask(node, address)
        except (AskFailed, Unreachable) as error:
            return Silent(node=node, reason=str(error))

    with ThreadPoolExecutor(MOST_AT_ONCE, thread_name_prefix="node") as pool:
        answers = dict(zip(places, pool.map(one, places), strict=True))
    silent = [each for each in answers.values() if isinstance(each, Silent)]
    return Found({n: each for n, each in answers.items() if not isinstance(each, Silent)}, silent, across=True)


def _in_file(file: str, args: argparse.Namespace, look: Callable[[str, Pages], T], *, several: bool) -> Found[T]:
    archive = archive_of(args)
    if archive is None:
        if args.node is not None or several:
            raise AskFailed("--file is a dump that was saved: not with --node, -A or -l")
        return Found({"": _answer(look, "", SavedDump(file))})
    by_node: dict[str, T] = {}
    silent = []
    for node in [args.node] if args.node is not None else archive.nodes:
        try:
            by_node[node] = _answer(look, node, archive.pages(node))
        except AskFailed as error:
            silent.append(Silent(node=node, reason=str(error)))
    return Found(by_node, silent, across=args.node is None)


def archive_of(args: argparse.Namespace) -> Archive | None:
    """Return the archive that ``--file`` names, or ``None`` if the file is a saved dump.

    Raises:
        AskFailed: the file cannot be read, or the archive does not have the node of ``--node``.
    """
    if args.pod is not None:
        raise AskFailed("--file was saved: not with --pod")
    try:
        # A pipe, such as a shell's <(command), can be read only once. It has a dump.
        if not (Path(args.file).is_file() and tarfile.is_tarfile(args.file)):
            return None
        archive = Archive.read(args.file)
    except OSError as error:
        raise AskFailed(f"{args.file}: {error.strerror or error}") from None
    except BadArchive as error:
        raise AskFailed(f"{args.file}: {error}") from None
    if args.node is not None and args.node not in archive.nodes:
        nodes = ", ".join(archive.nodes) or "none"
        raise AskFailed(f"{args.file}: there is no node {args.node}; there are {nodes}")
    return archive


def saved_proxy(args: argparse.Namespace) -> Pages:
    """Return the saved pages of one proxy: of a dump, or of a node in an archive.

    Raises:
        AskFailed: the file cannot be read, or the flags do not choose one of its nodes.
    """
    archive = archive_of(args)
    if archive is None:
        if args.node is not None:
            raise AskFailed("--file is a dump that was saved: not with --node")
        return SavedDump(args.file)
    if args.node is None and len(archive.nodes) != 1:
        nodes = ", ".join(archive.nodes) or "none"
        raise AskFailed(f"{args.file}: the archive has several nodes: --node chooses one of {nodes}")
    return archive.pages(args.node or archive.nodes[0])


def items_of(found: Found[Iterable[I]]) -> list[I]:
    """Return the items of all nodes, each with the name of its node."""
    if not found.across:
        return [item for items in found.by_node.values() for item in items]
    return [msgspec.structs.replace(item, node=node) for node, items in found.by_node.items() for item in items]


def selected_pods(args: argparse.Namespace) -> set[tuple[str, str]] | None:
    """Return namespace and name of the pods that ``--pod`` and ``-l`` select; ``None`` means all.

    Raises:
        AskFailed: kubectl does not answer.
    """
    from ztunnel.ask.inspect.kubectl import Unreachable, kubectl_of, pod_name

    if args.pod is not None:
        return {pod_name(args.pod)}
    if not getattr(args, "selector", ""):
        return None
    try:
        return set(kubectl_of(args).pods(args.selector, args.namespace))
    except Unreachable as error:
        raise AskFailed(str(error)) from None
