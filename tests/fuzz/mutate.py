"""Deterministic mutations of valid inputs, for ``make test`` and for ``make fuzz`` without atheris."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

_INTERESTING = (0, 1, 2, 7, 8, 15, 16, 31, 32, 63, 64, 127, 128, 192, 254, 255)


def mutations(corpus: Sequence[bytes], count: int, most_bytes: int, seed: int) -> Iterator[bytes]:
    """Yield ``corpus`` unchanged, then ``count`` inputs made from it; equal arguments yield equal inputs."""
    yield from corpus
    rng = random.Random(seed)
    for _ in range(count):
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.choice((1, 1, 1, 2, 2, 4, 8))):
            _mutate(data, corpus, rng)
        yield bytes(data[:most_bytes])


def _mutate(data: bytearray, corpus: Sequence[bytes], rng: random.Random) -> None:
    at = rng.randrange(len(data)) if data else 0
    length = min(rng.choice((1, 1, 2, 4, 8, 32)), len(data) - at)
    match rng.randrange(8):
        case 0 if data:
            data[at] ^= 1 << rng.randrange(8)
        case 1 if data:
            data[at] = rng.choice(_INTERESTING)
        case 2 if data:
            data[at] = rng.randrange(256)
        case 3:
            del data[at : at + length]
        case 4:
            data[at:at] = data[at : at + length] * rng.choice((1, 2, 8))
        case 5:
            del data[at:]
        case 6:
            other = rng.choice(corpus)
            start = rng.randrange(len(other) + 1)
            data[at:at] = other[start : start + rng.choice((1, 4, 16, 64))]
        case _:
            data[at : at + length] = rng.randbytes(length)
