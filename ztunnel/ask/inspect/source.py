"""Reads pages for commands: from the admin server of a proxy or agent, or from a file."""

import argparse
import http.client
import json
import sys
import urllib.error
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

from ztunnel.runtime.console.output import add_output
from ztunnel.runtime.console.terminal import complain
from ztunnel.runtime.http.admin_request import open_page
from ztunnel.runtime.settings import duration_s, plain_reason
from ztunnel.runtime.text_file import read_text

ADDRESS: Final = "127.0.0.1:15000"
#: The time limit for a page of an admin server.
ANSWER_S: Final = 30.0
NOT_FOUND: Final = 404


class AskFailed(Exception):
    """The server or file gave no answer. The text names the server or file, and a remedy.

    Attributes:
        status: the HTTP status, if a server refused. Otherwise 0.
    """

    def __init__(self, text: str, status: int = 0) -> None:
        super().__init__(text)
        self.status = status


class Pages(Protocol):
    """The pages of one admin server, live or saved.

    Attributes:
        name: the name of the server or file, for errors.
        saved: whether the pages come from a file, so that requests and changes are impossible.
    """

    name: str
    saved: bool

    def text(self, path: str, parameters: Mapping[str, str | None] | None = None) -> str:
        """Return a page.

        Raises:
            AskFailed: there is no answer; the status is 404 if the server has no such page.
        """

    def json(self, path: str, parameters: Mapping[str, str | None] | None = None) -> Any:
        """Return a page of JSON; raises like :meth:`text`."""


class LivePages:
    """The pages of a running proxy or agent at ``HOST:PORT``, each with a time limit."""

    saved = False

    def __init__(self, address: str, limit_s: float | None = None) -> None:
        self.name = address
        self._limit_s = ANSWER_S if limit_s is None else limit_s

    def text(self, path: str, parameters: Mapping[str, str | None] | None = None) -> str:
        return ask(self.name, path, parameters, limit_s=self._limit_s)

    def json(self, path: str, parameters: Mapping[str, str | None] | None = None) -> Any:
        return ask_json(self.name, path, parameters, limit_s=self._limit_s)


class SavedDump:
    """The pages of a file with one saved ``config_dump``."""

    saved = True

    def __init__(self, file: str) -> None:
        self.name = file
        self._dump = read_json(file)

    def text(self, path: str, parameters: Mapping[str, str | None] | None = None) -> str:
        return json.dumps(self.json(path))

    def json(self, path: str, parameters: Mapping[str, str | None] | None = None) -> Any:
        if path != "/config_dump":
            raise AskFailed(f"{self.name}: a config_dump has no {path}", status=404)
        return self._dump


def page_or_none(pages: Pages, path: str, parameters: Mapping[str, str | None] | None = None) -> Any:
    """Return a page of JSON. ``None`` if the server or the file does not have the page.

    Raises:
        AskFailed: there is no answer.
    """
    try:
        return pages.json(path, parameters)
    except AskFailed as error:
        if error.status != NOT_FOUND:
            raise
        return None


def add_source(
    parser: argparse.ArgumentParser,
    *,
    of_agent: str = "",
    across: bool = False,
    all_by_default: bool = False,
    saved: bool = False,
    short_file: str | None = "-f",
    own_pod: bool = False,
    forms: tuple[str, ...] = (),
) -> None:
    """Add the flags of every command that asks a proxy; :func:`reaching` and ``fleet.gather`` obey them.

    Args:
        parser: the command's parser.
        of_agent: whether the command queries the node agent, by default at this address.
        across: whether the command can query all nodes.
        all_by_default: whether it does so without flags; see :func:`query_all_by_default`.
        saved: whether the command can read a file.
        short_file: the short form of ``--file``.
        own_pod: whether ``--pod`` has another meaning in this command.
        forms: further forms of ``-o``.
    """
    title = "which agent to query" if of_agent else "which proxy to query"
    group = parser.add_argument_group(title)
    where = group.add_mutually_exclusive_group()
    default = of_agent or ADDRESS
    what = (
        "the agent's --metrics server at this loopback address" if of_agent else "the admin server at this address"
    )
    usual = f", such as {default}" if all_by_default else f" (default {default})"
    add_address(where, default, f"query {what}{usual}")
    beside = "agent of a pod's node" if of_agent else "proxy of a pod, on its node or beside it"
    if own_pod:
        parser.set_defaults(pod=None)
    else:
        where.add_argument(
            "--pod", metavar="NAME.NAMESPACE", help=f"query the {beside}, through kubectl; also NAMESPACE/NAME"
        )
    daemon = "agent" if of_agent else "ztunnel"
    where.add_argument("--node", metavar="NAME", help=f"query the {daemon} of this node, through kubectl")
    if across:
        where.add_argument(
            *("-A", "--all-nodes"),
            action="store_true",
            help=f"query the {daemon} of every node, through kubectl{' (default)' if all_by_default else ''}",
        )
    if saved:
        group.add_argument(
            *("--file", *([] if short_file is None else [short_file])),
            metavar="FILE",
            help="read a saved config_dump or an archive of ztunnel bug-report instead; - is standard input",
        )
    add_cluster(parser)
    add_output(parser, forms)


def add_address(group: argparse._ActionsContainer, default: str, text: str) -> None:
    """Add ``--address``. Giving it chooses one proxy, even with the default as its value; see
    :func:`chose_one`.
    """
    group.add_argument("--address", default=default, action=_Address, metavar="HOST:PORT", help=text)


class _Address(argparse.Action):
    """Stores the address, and also that the flag was given, because its value can equal the default."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option: str | None = None,
    ) -> None:
        namespace.address, namespace.chose_address = values, True


def chose_one(args: argparse.Namespace) -> bool:
    """Return whether the flags choose one proxy or a file. Otherwise some commands query all nodes."""
    chose_address = getattr(args, "chose_address", False)
    return chose_address or args.pod is not None or args.node is not None or args.file is not None


def query_all_by_default(args: argparse.Namespace) -> None:
    """Query all nodes, unless the flags choose one proxy or a file."""
    args.all_by_default = not (args.all_nodes or chose_one(args))
    args.all_nodes = args.all_nodes or args.all_by_default


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add the flags for kubectl's access to the cluster."""
    group = parser.add_argument_group("which cluster to query, with kubectl's flags")
    group.add_argument("--context", default="", metavar="NAME", help="use this context of the kubeconfig")
    group.add_argument("--kubeconfig", default="", metavar="FILE", help="use this kubectl configuration")
    group.add_argument("--as", default="", dest="as_user", metavar="USER", help="impersonate this user")
    group.add_argument(
        *("--request-timeout",),
        type=_timeout_s,
        metavar="DURATION",
        help="wait at most this long for one answer, such as 5s (default 30s)",
    )


def _timeout_s(text: str) -> float | None:
    if text == "0":
        return None
    try:
        return duration_s(text if not text.isdigit() else f"{text}s")
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}: {text!r}") from None


def reaching(
    run: Callable[[argparse.Namespace], int], *, agent: bool = False
) -> Callable[[argparse.Namespace], int]:
    """Return a command that first sets ``args.address`` to the proxy that ``--pod`` or ``--node`` selects, and
    then runs.

    Args:
        run: the command.
        agent: whether to address the node agent instead of the proxy.
    """

    def reached(args: argparse.Namespace) -> int:
        # With a file, the command itself reads --node, which chooses a node of an archive.
        if (args.pod is None and args.node is None) or getattr(args, "file", None) is not None:
            return run(args)
        from ztunnel.ask.inspect.kubectl import AGENT, PROXY, Unreachable, kubectl_of

        kubectl, daemon = kubectl_of(args), AGENT if agent else PROXY
        try:
            pod = kubectl.of_pod(args.pod, daemon) if args.pod is not None else kubectl.of_node(args.node, daemon)
            with kubectl.forwarded(*pod, daemon.port) as args.address:
                return run(args)
        except Unreachable as error:
            return failed(args, str(error))

    return reached


def answer_limit_s(args: argparse.Namespace) -> float:
    """Return the time limit for one answer: that of ``--request-timeout``, or the default."""
    return ANSWER_S if args.request_timeout is None else float(args.request_timeout)


def failed(args: argparse.Namespace, reason: str) -> int:
    """Print why a command has no answer, and return its exit status."""
    complain(f"ztunnel {args.command}: {reason}")
    return 2


def ask(
    server: str,
    path: str,
    parameters: Mapping[str, str | None] | None = None,
    method: str = "GET",
    *,
    limit_s: float = ANSWER_S,
) -> str:
    """Return a page of an admin server.

    Args:
        server: ``HOST:PORT`` or a URL.
        path: the page's path, from ``/``.
        parameters: the query's parameters. Those that are ``None`` are left out.
        method: the request's method.
        limit_s: the time limit for each step of the server's answer.

    Raises:
        AskFailed: the server or the page does not exist, or the server refuses.
    """
    base = server if "://" in server else f"http://{server}"
    given = {name: value for name, value in (parameters or {}).items() if value is not None}
    query = f"?{urllib.parse.urlencode(given)}" if given else ""
    try:
        with open_page(f"{base.rstrip('/')}{path}{query}", method=method, limit_s=limit_s) as response:
            page: bytes = response.read()
    except urllib.error.HTTPError as error:
        try:
            reason = error.read().decode(errors="replace").strip().partition("\n")[0]
        except (http.client.HTTPException, OSError):  # the status is known, but the reason did not arrive
            reason = error.reason
        raise AskFailed(f"{server}: {path}: {error.code} {reason}", error.code) from None
    except urllib.error.URLError as error:
        reason = getattr(error.reason, "strerror", None) or str(error.reason)
        raise AskFailed(f"{server}: {reason}; is a proxy's admin server there? --address names another") from None
    except (http.client.InvalidURL, ValueError) as error:
        raise AskFailed(f"{server}: not an address, HOST:PORT or a URL ({error})") from None
    except http.client.HTTPException:
        raise AskFailed(f"{server}: {path}: no whole answer of HTTP; is a proxy's admin server there?") from None
    except OSError as error:
        raise AskFailed(f"{server}: {plain_reason(error)}") from None
    return page.decode(errors="replace")


def ask_json(
    server: str, path: str, parameters: Mapping[str, str | None] | None = None, *, limit_s: float = ANSWER_S
) -> Any:
    """Return a page of JSON; see :func:`ask`."""
    return parsed(ask(server, path, parameters, limit_s=limit_s), f"{server}: {path}")


def read_json(file: str) -> Any:
    """Return the JSON in a file; ``-`` is standard input.

    Raises:
        AskFailed: the file cannot be read, or is not JSON.
    """
    try:
        text = sys.stdin.read() if file == "-" else read_text(Path(file))
    except OSError as error:
        raise AskFailed(f"{file}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise AskFailed(f"{file}: not text") from None
    return parsed(text, "standard input" if file == "-" else file)


def parsed(text: str, name: str) -> Any:
    """Return a JSON value, with lone surrogates escaped.

    Raises:
        AskFailed: the text is not JSON; ``name`` is the text's source, for the error.
    """
    try:
        value = json.loads(text)
        return _unicode(value) if "\\ud" in text or "\\uD" in text else value
    except ValueError as error:
        where = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        raise AskFailed(f"{name}: not JSON{where}") from None
    except RecursionError:
        raise AskFailed(f"{name}: JSON that is nested too deeply") from None


def _unicode(value: Any) -> Any:
    """Return a JSON value whose lone surrogates are escaped, because no output can encode them."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, dict):
        return {_unicode(key): _unicode(inner) for key, inner in value.items()}
    return [_unicode(inner) for inner in value] if isinstance(value, list) else value
