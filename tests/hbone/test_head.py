"""Heads of requests and responses by their fields."""

from __future__ import annotations

from itertools import product

from hbone.head import Malformed, ResponseHead, parse_response


def test_octets_outside_rfc_9110_are_refused_in_field_values() -> None:
    """RFC 9113, 8.2.1: no NUL, CR or LF anywhere, and neither space nor tab at the ends."""
    for length in range(6):
        for octets in product(b"a\xff \t\x00\r\n", repeat=length):
            value = bytes(octets)
            allowed = not set(value) & set(b"\x00\r\n") and value == value.strip(b" \t")
            parsed = parse_response(((b":status", b"200"), (b"name", value)))
            assert isinstance(parsed, ResponseHead if allowed else Malformed), value
