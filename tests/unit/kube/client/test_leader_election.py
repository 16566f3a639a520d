"""Leader election without an obtainable Lease: the failure is logged once, and retries are slow."""

import asyncio
import contextlib
import selectors
from typing import Any

import pytest

from rota.kube import operator, options
from rota.kube.client import leader_election
from rota.kube.client.api import ApiError
from rota.kube.client.leader_election import LeaderElector, Lease, LeaseSpec
from rota.kube.client.objects import Metadata


class NoSuchNamespace:
    """An API server without the namespace; `reached` is set after a number of attempts to create a Lease."""

    def __init__(self, times: int) -> None:
        self.remaining = times
        self.reached = asyncio.Event()

    async def get(self, *_: Any) -> Any:
        raise ApiError(404, "NotFound", "leases not found")

    async def create(self, *_: Any) -> Any:
        self.remaining -= 1
        if self.remaining <= 0:
            self.reached.set()
        raise ApiError(404, "NotFound", 'namespaces "nosuch" not found')


async def test_leader_election_logs_an_unobtainable_lease_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(leader_election, "RENEW_INTERVAL_SECONDS", 0.001)
    # a rejected request is retried after the interval of renewals, not after this shorter period
    monkeypatch.setattr(leader_election, "RETRY_PERIOD_SECONDS", 1000.0)
    api: Any = NoSuchNamespace(5)
    election = asyncio.create_task(LeaderElector(api, "nosuch", "rota-0", lambda _: None, "rota").run())
    await api.reached.wait()
    election.cancel()
    await asyncio.wait([election])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].startswith(
        "The Lease /apis/coordination.k8s.io/v1/namespaces/nosuch/leases/rota could not be renewed"
    )
    assert 'namespaces "nosuch" not found' in warnings[0]


class LeaseOfAnother:
    """An API server with a Lease of another candidate, until it is deleted; then another candidate creates it first."""

    is_deleted = False

    async def get(self, *_: Any) -> Lease:
        if self.is_deleted:
            raise ApiError(404, "NotFound", "leases not found")
        metadata = Metadata("rota", annotations={"rota.dev/address": "10.0.0.1"})
        return Lease(metadata, LeaseSpec(holder_identity="rota-1", renew_time="2030-01-01T00:00:00.000000Z"))

    async def create(self, *_: Any) -> None:
        raise ApiError(409, "Conflict", "leases already exists")


async def test_leader_election_forgets_the_holder_of_a_deleted_lease() -> None:
    """Otherwise a replica would pass requests on to the former leader for the rest of the lease's duration."""
    api: Any = LeaseOfAnother()
    elector = LeaderElector(api, "default", "rota-0", lambda _: None, "rota")
    await elector._try_acquire()
    assert elector.holder_annotations == {"rota.dev/address": "10.0.0.1"}
    api.is_deleted = True
    await elector._try_acquire()
    assert elector.holder_annotations == {}
    assert not elector.is_leading


class SkippingSelector(selectors.DefaultSelector):
    """Skips waiting times instead of waiting, and counts the skipped seconds."""

    skipped = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.skipped += timeout or 0.0
        return super().select(0)


class SilentAfterFirst:
    """An API server that creates a Lease, and responds to no later request."""

    is_silent = False

    async def get(self, *_: Any) -> Any:
        if self.is_silent:
            await asyncio.Event().wait()
        raise ApiError(404, "NotFound", "leases not found")

    async def create(self, *_: Any) -> None:
        self.is_silent = True


def test_leader_election_ends_leadership_at_the_renew_deadline_of_a_silent_api_server() -> None:
    """Not at the end of the attempt that is under way then: another candidate acquires the Lease after 15 s."""
    selector = SkippingSelector()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.skipped  # type: ignore[method-assign]
    changes: list[tuple[bool, float]] = []

    async def lead_once() -> None:
        lost = asyncio.Event()

        def note(is_leading: bool) -> None:  # noqa: FBT001 - the elector's signature
            changes.append((is_leading, loop.time()))
            if not is_leading:
                lost.set()

        api: Any = SilentAfterFirst()
        election = loop.create_task(LeaderElector(api, "rota-system", "rota-0", note, "rota").run())
        await lost.wait()
        election.cancel()
        await asyncio.wait([election])

    with contextlib.closing(loop):
        loop.run_until_complete(lead_once())
    (_, gained_at), (_, lost_at) = changes
    assert lost_at - gained_at == pytest.approx(leader_election.RENEW_DEADLINE_SECONDS, abs=0.01)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (options.Options(lease="O 3"), "--lease 'O 3' is not a valid object name"),
        (options.Options(lease=""), "--lease '' is not a valid object name"),
        (options.Options(own_namespace="no such"), "--own-namespace 'no such' is not a valid namespace name"),
        (options.Options(own_namespace="a.b"), "--own-namespace 'a.b' is not a valid namespace name"),
        (options.Options(identity="a/b"), "--identity 'a/b' is not valid; it is part of journal file names"),
        (options.Options(identity="a\nb"), "--identity 'a b' is not valid"),
        (options.Options(identity="a\n"), "--identity 'a' is not valid"),
        (options.Options(identity=".."), "--identity '..' is not valid"),
        (options.Options(identity="x" * 256), "--identity 'xxx"),
    ],
)
def test_leader_election_rejects_invalid_names_at_start(options: options.Options, sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the message is checked below
        operator.run_process(options)
    assert str(caught.value).startswith(sentence)
    assert len(str(caught.value)) < 300


def test_leader_election_accepts_names_of_pods_and_machines() -> None:
    for identity in ("", "rota-0", "My_Laptop.local-4711", "x" * 240):
        options.check_options(options.Options(identity=identity, own_namespace="rota-system", lease="rota.dev"))
