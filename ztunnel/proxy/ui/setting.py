"""The setting that decides where the live page is served, in both front ends: only on loopback, everywhere, or
nowhere.
"""

from typing import Final

from xds.model.address import canonical, is_loopback
from ztunnel.runtime.settings import boolean

VARIABLE: Final = "ZTUNNEL_UI"


def page_setting(text: str) -> bool | None:
    """Parse ``true`` (wherever the admin server listens), ``false``, or ``auto`` (None): on loopback only.

    Raises:
        ValueError: the text has another form.
    """
    if text == "auto":
        return None
    try:
        return boolean(text)
    except ValueError:
        raise ValueError("must be true, false or auto") from None


def is_on(setting: bool | None, host: str) -> bool:
    """Return whether an admin server that is bound to ``host`` serves the page."""
    return is_loopback(canonical(host)) if setting is None else setting
