"""Completion in a shell: ``ztunnel completion bash`` prints what makes the shell ask this program at each TAB.

The words come back to ``ztunnel completion --words``, which answers with the candidates for the last one, a line
each: commands and flags from their parsers, and for ``ztunnel explain`` the names of a running proxy's mesh.
"""

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from ztunnel.inspect.source import AskFailed, ask_json
from ztunnel.runtime.subcommands import subcommands

#: The longest that somebody waits for names after a TAB.
_NAMES_S: Final = 1.0

SCRIPTS: Final[Mapping[str, str]] = {
    # The line is parted again: the shell's own words end at colons, which addresses and services have.
    "bash": r"""_ztunnel() {
    local line=${COMP_LINE:0:COMP_POINT} words last
    read -ra words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    last=${words[-1]}
    mapfile -t COMPREPLY < <(ztunnel completion --words "${words[@]:1}" 2>/dev/null)
    COMPREPLY=("${COMPREPLY[@]#"${last%"${last##*:}"}"}")
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
    ztunnel completion --words (commandline -opc)[2..] (commandline -ct) 2>/dev/null
end
complete -c ztunnel -a '(__ztunnel)'
""",
}


def candidates(
    parser: argparse.ArgumentParser, words: Sequence[str], names: Callable[[str], Iterable[str]] = lambda _: ()
) -> list[str]:
    """Return what the last word may become, in order; nothing where it may be a file.

    Args:
        parser: of the whole program.
        words: after the program's name; the last one is begun, perhaps empty.
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
        found = map(str, waiting.choices or ())
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
    """Return what gives :func:`candidates` names: of the proxy that a line asks; none if it does not answer."""
    if words[:1] != ["explain"]:
        return lambda _: ()
    if "--address" in words[:-2]:
        address = words[words.index("--address") + 1]

    def names(argument: str) -> Iterable[str]:
        try:
            dump = ask_json(address, "/config_dump", limit_s=_NAMES_S)
        except AskFailed:
            return ()
        return _names(dump, argument)

    return names


def _names(dump: Any, argument: str) -> Iterable[str]:
    workloads = dump.get("workloads") or []
    pods = [f"{each.get('namespace')}/{each.get('name')}" for each in workloads]
    if argument == "source":
        return pods
    return [
        f"{each.get('hostname')}:{port}" for each in dump.get("services") or [] for port in each.get("ports", {})
    ]
