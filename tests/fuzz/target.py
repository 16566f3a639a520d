"""What a fuzz target is: a parser, the input it is tried with, and what must hold whatever comes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from fuzz.mutations import mutate

Maker = Callable[[Random], bytes]


@dataclass(frozen=True)
class Target:
    """A parser that meets bytes of others; `check` fails if the parser does what it must not."""

    name: str
    check: Callable[[bytes], None]
    makers: Sequence[Maker]


def mutated(samples: Sequence[bytes]) -> Maker:
    """Make input by changing one of the samples."""
    return lambda chance: mutate(chance, chance.choice(samples), samples)
