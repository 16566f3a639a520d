"""A short run of the fuzzer; `python -m fuzz` in tests/ goes on."""

import pytest

from fuzz.corpus import BODIES, FRAMES, MESSAGES
from fuzz.run import READERS, broken, made
from rota.brokers.rocketmq import fastjson
from rota.brokers.rocketmq.frames import Decoder, Malformed
from rota.brokers.rocketmq.messages import prefix


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_mutated_bytes_are_read_or_malformed(first: int) -> None:
    assert [found for seed in range(first, first + 500) if (found := broken(seed))] == []


def test_what_is_mutated_can_be_read() -> None:
    assert all(list(Decoder().feed(data)) for data in FRAMES)
    assert all(isinstance(fastjson.read(data, object), dict) for data in BODIES)
    damages = {it.damage for data in MESSAGES for it in prefix(data, "broker-a")[0]}
    assert damages == {
        "",
        "it has more than 4 MiB unpacked, the most that delivery.buffer.mebibytesPerMessage allows",
    }


def test_a_reader_that_fails_is_told_with_the_line_that_shows_it_again() -> None:
    def fail(_: bytes) -> None:
        raise IndexError("out of range")

    name, data = made(7)
    assert broken(7, {name: fail}) == (
        f"{name} of {len(data):,} bytes: IndexError: out of range\n  again: python -m fuzz --seed 7"
    )


def test_malformed_bytes_are_none_of_its_failures() -> None:
    def refuse(_: bytes) -> None:
        raise Malformed("it is")

    assert READERS.keys() == {made(seed)[0] for seed in range(50)}
    assert all("Malformed" in (broken(seed, dict.fromkeys(READERS, refuse)) or "") for seed in range(5))
