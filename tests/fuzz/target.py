"""A fuzz target: a parser, the makers of its input, and the check that must hold for any input."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from fuzz.mutations import mutate

Maker = Callable[[Random], bytes]


@dataclass(frozen=True)
class Target:
    """A parser of untrusted bytes; `check` fails if the parser violates its contract."""

    name: str
    check: Callable[[bytes], None]
    makers: Sequence[Maker]


def mutated(samples: Sequence[bytes]) -> Maker:
    """Return a maker that changes one of the samples."""
    return lambda chance: mutate(chance, chance.choice(samples), samples)
