"""Shell completion: ``ztunnel completion bash`` prints a script that calls this program at each TAB.

The script passes the words to ``ztunnel completion --words``, which prints the candidates for the last one, a line
each: commands and flags from their parsers, names from a running proxy and from kubectl.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from ztunnel.ask.inspect.parts import NoSuchPart, part, parts_of
from ztunnel.ask.inspect.source import AskFailed, ask_json
from ztunnel.runtime.console.subcommands import subcommands
from ztunnel.runtime.formats.entries import names_of

#: The longest wait for names after a TAB.
_NAMES_S: Final = 1.0

SCRIPTS: Final[Mapping[str, str]] = {
    # Split the line again, because the shell also splits words at colons, which occur in addresses and services.
    "bash": r"""_ztunnel() {
    local line=${COMP_LINE:0:COMP_POINT} words last
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    last=${words[-1]}
    mapfile -t COMPREPLY < <(ztunnel completion --words "${words[@]:1}" 2>/dev/null)
    COMPREPLY=("${COMPREPLY[@]#"${last%"${last##*:}"}"}")
    # bash inserts words as they are, and names such as "outbound|80||x" contain special characters.
    (( ${#COMPREPLY[@]} )) && mapfile -t COMPREPLY < <(printf '%q\n' "${COMPREPLY[@]}")
}
complete -o default -F _ztunnel ztunnel
""",
    "zsh": r"""#compdef ztunnel
_ztunnel() {
    local -a found
    found=(${(f)"$(ztunnel completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    (( $#found )) && compadd -- $found || _files
}
compdef _ztunnel ztunnel
""",
    "fish": r"""function __ztunnel
    set -l found (ztunnel completion --words (commandline -opc)[2..] (commandline -ct) 2>/dev/null)
    if set -q found[1]
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete -c ztunnel -f -a '(__ztunnel)'
""",
}


def candidates(
    parser: argparse.ArgumentParser, words: Sequence[str], names: Callable[[str], Iterable[str]] = lambda _: ()
) -> list[str]:
    """Return the completions of the last word, in order. Empty where a file name is possible.

    Args:
        parser: the whole program's parser.
        words: the words after the program's name. The last one is incomplete, and can be empty.
        names: returns names for an argument, by its name in the parser.
    """
    *given, last = words or [""]
    waiting: argparse.Action | None = None
    place = 0
    for word in given:
        if waiting is not None:
            waiting = None
        elif word.startswith("-"):
            option = parser._option_string_actions.get(word)
            waiting = option if option is not None and option.nargs != 0 else None
        elif word in subcommands(parser):
            parser, place = subcommands(parser)[word], 0
        else:
            place += 1
    found: Iterable[str]
    if waiting is not None:
        found = map(str, waiting.choices) if waiting.choices else names(waiting.dest)
    elif last.startswith("-"):
        found = parser._option_string_actions
    elif below := subcommands(parser):
        found = below
    else:
        arguments = [action for action in parser._actions if not action.option_strings]
        argument = arguments[place] if place < len(arguments) else None
        choices = argument.choices if argument is not None else None
        found = map(str, choices) if choices else names(argument.dest) if argument is not None else ()
    return sorted({each for each in found if each.startswith(last)})


def names_for(words: Sequence[str], address: str) -> Callable[[str], Iterable[str]]:
    """Return the source of names for :func:`candidates`: the proxy that the command line addresses, and kubectl's
    cluster.

    There are no names if there is no answer within :data:`_NAMES_S`. A proxy selected by ``--pod`` or ``--node``
    is not queried, because reaching it takes longer.
    """
    command = words[0] if words else ""
    if "--address" in words[:-2]:
        address = words[words.index("--address") + 1]
    remote = "--pod" in words[:-1] or "--node" in words[:-1]

    def names(argument: str) -> Iterable[str]:
        try:
            if argument in _OF_CLUSTER and (command, argument) not in _OF_DUMP:
                return _of_cluster(_OF_CLUSTER[argument], words)
            if (command, argument) == ("log", "level"):
                return _LEVELS
            if remote:
                return ()
            if argument == "connection":
                return list(_sources(ask_json(address, "/connections", limit_s=_NAMES_S)))
            read = _OF_DUMP.get((command, argument)) or _OF_DUMP.get(("", argument))
            if read is None:
                return ()
            return list(read(ask_json(address, "/config_dump", limit_s=_NAMES_S), words))
        except (AskFailed, NoSuchPart, TypeError, AttributeError, KeyError):
            return ()  # a TAB must not print an error, whichever server is at that address

    return names


def _of_cluster(kind: str, words: Sequence[str]) -> list[str]:
    from ztunnel.ask.inspect.kubectl import Kubectl, Unreachable  # slow to import

    context = words[words.index("--context") + 1] if "--context" in words[:-2] else ""
    try:
        return list(Kubectl(context).names(kind, _NAMES_S))
    except Unreachable:
        return []


def _sources(page: Any) -> Iterator[str]:
    if isinstance(page.get("connections"), list):
        yield from (str(each["source"]) for each in page["connections"])
        return
    for state in page.values():
        for entries in (state.get("connections") or {}).values():
            yield from (str(each["src"]) for each in entries)


def _pods(dump: Any, words: Sequence[str]) -> Iterator[str]:
    for each in dump.get("workloads") or []:
        yield f"{each.get('namespace')}/{each.get('name')}"


def _services(dump: Any, words: Sequence[str]) -> Iterator[str]:
    for each in dump.get("services") or []:
        yield from (f"{each.get('hostname')}:{port}" for port in each.get("ports", {}))


def _namespaces(dump: Any, words: Sequence[str]) -> Iterator[str]:
    for key in ("workloads", "services", "policies"):
        yield from (str(each["namespace"]) for each in dump.get(key) or [] if each.get("namespace"))


def _identities(dump: Any, words: Sequence[str]) -> Iterator[str]:
    for each in dump.get("workloads") or []:
        domain = each.get("trustDomain") or "cluster.local"
        account = each.get("serviceAccount") or "default"
        yield f"spiffe://{domain}/ns/{each.get('namespace')}/sa/{account}"


def _policies(dump: Any, words: Sequence[str]) -> Iterator[str]:
    for each in dump.get("policies") or []:
        yield f"{each.get('namespace')}/{each.get('name')}"


def _parts(dump: Any, words: Sequence[str]) -> Iterator[str]:
    yield from parts_of(dump)


def _entries(dump: Any, words: Sequence[str]) -> Iterator[str]:
    """Yield the names of a dump part's entries. The second-to-last word on the command line names the part."""
    found = part(dump, words[-2])
    listed = found if isinstance(found, list) else []
    if isinstance(found, Mapping):
        yield from (key for key, value in found.items() if not isinstance(value, list))
        listed = [each for value in found.values() if isinstance(value, list) for each in value]
    for each in listed:
        yield from list(names_of(each))[:1]


#: The kind of object that kubectl lists for a flag's value.
_OF_CLUSTER: Final[Mapping[str, str]] = {"pod": "pods", "node": "nodes"}
_LEVELS: Final = ("error", "warn", "info", "debug", "trace", "off")
#: Functions that find names in a dump, by command and argument. An empty command means any command.
_OF_DUMP: Final[Mapping[tuple[str, str], Callable[[Any, Sequence[str]], Iterator[str]]]] = {
    ("explain", "source"): _pods,
    ("explain", "destination"): _services,
    ("", "identity"): _identities,
    ("", "namespace"): _namespaces,
    ("tap", "pod"): _pods,  # on the node of the proxy, by its admin server
    ("simulate", "remove"): _policies,
    ("simulate", "enforce"): _policies,
    ("config", "part"): _parts,
    ("config", "entry"): _entries,
}
