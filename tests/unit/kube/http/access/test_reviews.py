"""Reviews by the API server: shared, cached, limited."""

import asyncio
from typing import Any

import msgspec
import pytest

from rota.kube.client.api import ApiError, NoResponseError
from rota.kube.http.access import reviews
from rota.kube.http.access.reviews import NO_RIGHTS_MESSAGE, Reviewer, ReviewError
from rota.kube.http.access.rights import READ_METRICS, User, right_to_read_groups

ALICE = User("alice")


class ApiServer:
    """An API server that knows one token and allows every right."""

    def __init__(self) -> None:
        self.reviews: list[str] = []
        self.problem: Exception | None = None
        self.answers_rights = False  # at once, while other reviews wait for `may_answer`
        self.answers_valid_tokens = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def create(self, path: str, body: Any, kind: Any) -> Any:
        self.reviews.append(path.rpartition("/")[2])
        is_valid_token = body["spec"].get("token") == "good"
        if not (self.answers_valid_tokens if is_valid_token else self.answers_rights and "token" not in body["spec"]):
            await self.may_answer.wait()
        if self.problem:
            raise self.problem
        user = {"username": "alice", "groups": ["ops"], "extra": {"b": ["2"], "a": ["1"]}}
        status = {"authenticated": is_valid_token, "user": user if is_valid_token else {}, "allowed": True}
        return msgspec.convert({"status": status}, kind)


@pytest.fixture
def api() -> ApiServer:
    return ApiServer()


@pytest.fixture
def reviewer(api: ApiServer) -> Reviewer:
    stand_in: Any = api
    return Reviewer(stand_in)


async def test_api_reviews_a_valid_or_invalid_token_once(api: ApiServer, reviewer: Reviewer) -> None:
    user = User("alice", ("ops",), "", (("a", ("1",)), ("b", ("2",))))
    assert [await reviewer.user_of("good") for _ in range(3)] == [user] * 3
    assert [await reviewer.user_of("bad") for _ in range(3)] == [None] * 3
    assert api.reviews == ["tokenreviews"] * 2


async def test_api_review_is_shared_by_concurrent_requests(api: ApiServer, reviewer: Reviewer) -> None:
    api.may_answer.clear()
    checks = [asyncio.create_task(reviewer.allows(ALICE, READ_METRICS)) for _ in range(64)]
    await asyncio.sleep(0)
    checks.pop().cancel()
    await asyncio.sleep(0)
    api.may_answer.set()
    assert await asyncio.gather(*checks) == [True] * 63
    assert api.reviews == ["subjectaccessreviews"]


async def test_api_reviews_of_unknown_tokens_delay_no_reviews_of_rights(
    api: ApiServer, reviewer: Reviewer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reviews, "SLOT_TIMEOUT_SECONDS", 0.05)
    api.may_answer.clear()
    api.answers_rights = True
    flood = [asyncio.create_task(reviewer.user_of(f"bad-{number}")) for number in range(300)]
    results = await asyncio.wait_for(
        asyncio.gather(*flood[reviews.MAX_CONCURRENT_REVIEWS :], return_exceptions=True), 20
    )
    assert {str(result) for result in results} == {"Too many users are being checked; retry"}
    assert await reviewer.allows(ALICE, right_to_read_groups("shop"))
    api.may_answer.set()
    await asyncio.gather(*flood, return_exceptions=True)


@pytest.mark.parametrize("cache_seconds", [reviews.CACHE_SECONDS, 1e-9])
async def test_api_reviews_of_unknown_tokens_delay_no_user_with_an_earlier_login(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch, cache_seconds: float
) -> None:
    monkeypatch.setattr(reviews, "CACHE_SECONDS", cache_seconds)
    stand_in: Any = api
    reviewer = Reviewer(stand_in)
    assert await reviewer.user_of("good")
    api.answers_valid_tokens = True
    api.may_answer.clear()
    flood = [asyncio.create_task(reviewer.user_of(f"bad-{number}")) for number in range(reviews.MAX_PENDING_REVIEWS)]
    await asyncio.sleep(0)  # each starts its review
    await asyncio.sleep(0)  # the first reviews reach the API server
    with pytest.raises(ReviewError):
        await reviewer.user_of("bad")
    assert await reviewer.user_of("good")
    assert api.reviews.count("tokenreviews") == 1 + reviews.MAX_CONCURRENT_REVIEWS + (cache_seconds < 1)
    await reviewer.close()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_api_rejected_tokens_are_remembered_up_to_a_limit(
    api: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reviews, "MAX_CACHED_USERS", 2)
    stand_in: Any = api
    reviewer = Reviewer(stand_in)
    for token in ("bad-1", "bad-2", "bad-3", "bad-3", "bad-2", "bad-1"):
        assert await reviewer.user_of(token) is None
    assert len(api.reviews) == 4, "only the oldest is reviewed again"


@pytest.mark.parametrize(
    ("problem", "sentence"),
    [
        (NoResponseError("no"), "The API server does not respond, so no user can log in; retry"),
        (ApiError(403, "Forbidden", "no"), NO_RIGHTS_MESSAGE),
        (ApiError(500, "", "etcd is away"), "The API server could not check the user: etcd is away"),
    ],
)
async def test_api_review_that_fails_is_one_sentence_and_not_remembered(
    api: ApiServer, reviewer: Reviewer, problem: Exception, sentence: str
) -> None:
    api.problem = problem
    with pytest.raises(ReviewError, match=sentence):
        await reviewer.user_of("good")
    api.problem = None
    assert await reviewer.user_of("good")


async def test_api_reviews_end_with_the_operator(api: ApiServer, reviewer: Reviewer) -> None:
    api.may_answer.clear()
    check = asyncio.create_task(reviewer.allows(ALICE, READ_METRICS))
    await asyncio.sleep(0)
    await reviewer.close()
    with pytest.raises(asyncio.CancelledError):
        await check
