"""Tests the fuzzer with a few seeds; the nightly run, `python -m fuzz`, tries more."""

import json

import pytest

from fuzz import documents
from fuzz.corpus import BODIES, FRAMES, MESSAGES
from fuzz.run import CHECKS, TARGETS, choose, failure
from rota import records
from rota.brokers.rocketmq.wire import fastjson
from rota.brokers.rocketmq.wire.frames import Decoder, MalformedFrameError
from rota.brokers.rocketmq.wire.messages import decode_admitted
from rota.deliveries import decode_deliveries
from rota.documents import decode_assignment
from rota.reports import decode_report
from rota.spec import parse_group, parse_policy
from rota.spec.resolved import decode_settings


@pytest.mark.parametrize("first", range(0, 2000, 500))
def test_fuzz_finds_no_failure(first: int) -> None:
    assert [text for seed in range(first, first + 500) if (text := failure(seed))] == []


def test_fuzz_samples_of_rocketmq_can_be_read() -> None:
    assert all(list(Decoder().feed(data)) for data in FRAMES)
    assert all(isinstance(fastjson.decode_json(data, object), dict) for data in BODIES)
    damages = {message.body_error for data in MESSAGES for message in decode_admitted(data, "broker-a")[0]}
    assert damages == {
        "",
        "it exceeds 4 MiB when decompressed, the limit in spec.delivery.buffer.mebibytesPerMessage",
    }


def test_fuzz_samples_of_documents_can_be_read() -> None:
    readers = (
        (documents.ASSIGNMENTS, decode_assignment),
        (documents.REPORTS, decode_report),
        (documents.DELIVERIES, decode_deliveries),
        (documents.SETTINGS, decode_settings),
        (documents.JOURNAL, records.decode_record),
        (documents.GROUPS, lambda data: parse_group(json.loads(data))),
        (documents.POLICIES, lambda data: parse_policy(json.loads(data))),
    )
    assert all(read(sample) for samples, read in readers for sample in samples)


def test_fuzz_tries_every_target() -> None:
    assert {choose(seed)[0] for seed in range(200)} == TARGETS.keys()


def test_fuzz_prints_the_command_that_reproduces_a_failure() -> None:
    def fail(_: bytes) -> None:
        raise IndexError("out of range")

    name, data = choose(7)
    assert failure(7, {name: fail}) == (
        f"{name} of {len(data):,} bytes: IndexError: out of range\n  again: python -m fuzz --seed 7"
    )


def test_fuzz_counts_an_unhandled_exception_of_a_check_as_a_failure() -> None:
    def refuse(_: bytes) -> None:
        raise MalformedFrameError("it is")

    assert all("Malformed" in (failure(seed, dict.fromkeys(CHECKS, refuse)) or "") for seed in range(5))
