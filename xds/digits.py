"""Reads whole numbers from texts that a file or a peer has written. Pure."""


def whole_number(text: str, most: int) -> int | None:
    """Return the number that a text of ASCII digits stands for. None for another text, or if it exceeds ``most``.

    Python's ``int`` also reads signs, spaces, underscores and other scripts' digits, and raises an error for more
    than 4,300 digits.
    """
    if not (text.isascii() and text.isdigit()):
        return None
    digits = text.lstrip("0") or "0"
    number = int(digits) if len(digits) <= len(str(most)) else most + 1
    return number if number <= most else None
