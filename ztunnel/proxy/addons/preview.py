"""Predicts addon verdicts on a hypothetical connection, for ``ztunnel explain`` and ``ztunnel simulate``.

Only hooks whose verdicts follow from the facts are called. An addon with ``pure = False`` is not called, nor is an
``async def`` hook, which probably asks another service. Calls are not counted, and a fault does not suspend the
addon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple

from ztunnel.addons import Facts, Verdict
from ztunnel.proxy.addons.decide import fault_of, in_words
from ztunnel.proxy.addons.interrupt import CurrentCall
from ztunnel.proxy.addons.load import AddonError, LoadedAddon, end, find_class, load_class, where
from ztunnel.proxy.addons.settings import AddonSettings

_NOT_PURE: Final = "not known here: it depends on more than the connection"
_WAITS: Final = "not known here: it is asynchronous"


class Said(NamedTuple):
    """The answer that one addon would give.

    Attributes:
        addon: the addon's name.
        says: the answer in words.
        verdict: the predicted verdict. ``None`` if the addon returns none or it cannot be predicted.
        known: whether the answer can be predicted.
        denies: whether the connection would be refused.
    """

    addon: str
    says: str
    verdict: Verdict | None = None
    known: bool = True
    denies: bool = False

    def shown(self) -> dict[str, Any]:
        """Return the prediction as JSON values, as ``/explain`` answers."""
        return {"addon": self.addon, "says": self.says}


def would_say(
    addons: Iterable[tuple[LoadedAddon, str]], hook: str, facts: Facts, current: CurrentCall | None = None
) -> list[Said]:
    """Return the predicted answers of the addons that have a hook, in order, up to the first denial.

    Args:
        addons: the addons, each with the reason why it is suspended, or an empty text.
        hook: ``connecting`` or ``accepting``.
        facts: the connection's facts.
        current: in a process that carries connections, interrupts a hook that blocks.
    """
    current = current or CurrentCall()
    found = []
    for loaded, suspended in addons:
        function = loaded.hooks.get(hook)
        if function is None:
            continue
        said = _one(loaded, suspended, hook, function, facts, current)
        found.append(said)
        if said.denies:
            break
    return found


def _one(
    loaded: LoadedAddon,
    suspended: str,
    hook: str,
    function: Callable[..., Any],
    facts: Facts,
    current: CurrentCall,
) -> Said:
    name, denies = loaded.name, loaded.common.denies
    if suspended:
        effect = "deny" if denies else "nothing"
        return Said(name, f"{effect}: it is suspended: {suspended}", denies=denies)
    if hook in loaded.waits:
        return Said(name, _WAITS, known=False)
    if not loaded.pure:
        return Said(name, _NOT_PURE, known=False)
    try:
        with current.calling(f"addon {name}, hook {hook}"):
            verdict = function(facts)
    except BaseException as error:  # noqa: BLE001  part of the answer; SystemExit must not end the proxy
        return Said(name, f"it fails: {where(error)}", denies=denies)
    fault = fault_of(hook, verdict)
    if fault:
        return Said(name, f"it fails: it {fault}", denies=denies)
    words = in_words(verdict)
    if "server_name" in loaded.needs and not facts.server_name and not facts.destination.name:
        words += " (without a server name)"
    return Said(name, words, verdict, denies=type(verdict).__name__ == "Deny")


def preview_of(settings: AddonSettings) -> list[tuple[LoadedAddon, str]]:
    """Load addons to predict their verdicts, in a process that carries no connections.

    Addons whose verdicts do not follow from the facts are loaded without being started, so that they have no
    effect.

    Raises:
        AddonError: an addon cannot be loaded. Addons that were already started have been ended.
    """
    found: list[tuple[LoadedAddon, str]] = []
    try:
        for spec in settings.specs:
            cls, digest = find_class(spec)
            starts = getattr(cls, "pure", True) and any(hasattr(cls, hook) for hook in ("connecting", "accepting"))
            loaded = load_class(cls, settings.options, spec, digest, start=bool(starts))
            found.append((loaded, ""))
    except AddonError:
        end_preview(found)
        raise
    return found


def end_preview(addons: Iterable[tuple[LoadedAddon, str]]) -> None:
    """End the addons that :func:`preview_of` has started."""
    for addon, _ in addons:
        if not isinstance(addon.instance, type):  # otherwise it was not started
            end(addon)
