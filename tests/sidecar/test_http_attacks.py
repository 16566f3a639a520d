"""Hostile clients of a sidecar: probes and the operator get responses, memory stays small, and it is not drained."""

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from ground.memory_limit import peak_bytes
from ground.poll import soon
from ground.rocketmq import RocketMQ
from http_attacks import ATTACKS, MEBIBYTE, attacked, probed
from rota.sidecar.status.control_api import PORT as CONTROL_PORT
from sidecar.fleet import SidecarFleet, a_fleet
from sidecar.pods import PORT

LIMIT_BYTES = 64 * MEBIBYTE  # that an attack may add to the sidecar's memory
PROBES = 12  # that must be answered while the attack goes on


@pytest.fixture
async def fleet(rocketmq: RocketMQ, tmp_path: Path) -> AsyncIterator[SidecarFleet]:
    """Start a sidecar that consumes four queues."""
    async with a_fleet(rocketmq, tmp_path) as fleet:
        await fleet.add("a")
        await fleet.grant(a=fleet.queues)
        yield fleet


OTHER_PORT = pytest.mark.slow("each HTTP attack on the sidecar's second port")
# In `make test` the attacks take turns at the ports: both are served by the same HTTP server.
COMBINATIONS = [
    pytest.param(attack, port, marks=[] if (number + place) % 2 == 0 else OTHER_PORT)
    for number, attack in enumerate(ATTACKS)
    for place, port in enumerate((PORT, CONTROL_PORT))
]


@pytest.mark.parametrize(("attack", "port"), COMBINATIONS)
async def test_http_server_of_a_sidecar_under_attack_fails_no_probe_and_takes_little_memory(
    fleet: SidecarFleet, attack: str, port: int
) -> None:
    pod = fleet.pods["a"]
    assert pod.sidecar
    initial_bytes = peak_bytes(pod.sidecar.pid)
    async with attacked(pod.address, port, attack):
        for number in range(PROBES):
            path = ("/healthz", "/readyz", "/metrics")[number % 3]
            assert await probed(pod.address, PORT, path) == 200
            await asyncio.sleep(0.1)
        assert await soon(partial(pod.report, fleet.session)), "the operator's signed request is answered"
    assert pod.sidecar.poll() is None
    added = peak_bytes(pod.sidecar.pid) - initial_bytes
    print(f"{attack}: {added / MEBIBYTE:.0f} MiB added")
    assert added < LIMIT_BYTES
    assert not pod.complaints()


async def test_drain_by_an_attacker_who_knows_the_pods_uid_is_rejected(fleet: SidecarFleet) -> None:
    """Two requests drained a member for good: the uid that a final drain must name is in the report."""
    pod = fleet.pods["a"]
    report = json.loads(await pod.get(fleet.session, "/v1/report"))
    attempts = {
        (method, port, path): 401 if (port, path) == (CONTROL_PORT, "/v1/drain") and method == "POST" else 404
        for method in ("GET", "POST")
        for port in (PORT, CONTROL_PORT)
        for path in ("/v1/drain", "/v1/drain/")
    }
    attempts["GET", CONTROL_PORT, "/v1/drain"] = 405
    attempts["GET", CONTROL_PORT, "/v1/report"] = 401
    attempts["POST", PORT, "/v1/drained"] = 405
    for (method, port, path), status in attempts.items():
        url = f"http://{pod.address}:{port}{path}"
        async with fleet.session.request(method, url, json={"uid": report["uid"]}) as response:
            assert response.status == status, (method, port, path)
    assert await pod.drain_for_good(fleet.session, "uid-of-another-pod") == 401
    assert (await fleet.wait_until_obeyed("a")).state == "serving"
    assert await pod.drain_for_good(fleet.session, pod.uid) == 200
    assert (await fleet.wait_until_obeyed("a", "drained")).final
