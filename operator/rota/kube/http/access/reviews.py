"""Client of TokenReviews and SubjectAccessReviews: the API server authenticates users and checks their rights."""

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec

from rota.aio import loop_time
from rota.kube.client.api import Api, ApiError, NoResponseError
from rota.kube.client.paths import collection_path
from rota.kube.http.access.rights import ExpiringCache, Right, User, review_of
from rota.model import single_line

T = TypeVar("T")

CACHE_SECONDS = 30.0
MAX_CACHED_USERS = 1_000
RECENT_SECONDS = 600.0  # after it was accepted, a token is reviewed in slots apart from those of unknown tokens
MAX_CACHED_RIGHTS = 20_000  # listing groups checks one right per namespace for a user without the right to all
MAX_CONCURRENT_REVIEWS = 8  # concurrent reviews of each kind at the API server
MAX_PENDING_REVIEWS = 256  # including reviews that wait for a slot
SLOT_TIMEOUT_SECONDS = 5.0
BUSY_MESSAGE = "Too many users are being checked; retry"
NO_RIGHTS_MESSAGE = (
    "The operator may not create tokenreviews and subjectaccessreviews, so no user can log in; "
    "give its ServiceAccount the ClusterRole system:auth-delegator"
)


class ReviewError(Exception):
    """The API server could not authenticate a user or check a right."""


class _UserInfo(msgspec.Struct):
    username: str = ""
    uid: str = ""
    groups: list[str] = []
    extra: dict[str, list[str]] = {}


class _TokenStatus(msgspec.Struct):
    authenticated: bool = False
    user: _UserInfo = msgspec.field(default_factory=_UserInfo)


class _TokenReview(msgspec.Struct):
    status: _TokenStatus


class _AccessStatus(msgspec.Struct):
    allowed: bool = False


class _AccessReview(msgspec.Struct):
    status: _AccessStatus


class Reviewer:
    """Reviews tokens and rights. Results are cached for 30 s, so a revoked right remains usable for up to 30 s.

    Cache keys are digests: no token stays in memory, and all keys have the same size.
    """

    def __init__(self, api: Api) -> None:
        self._api = api
        self._users: ExpiringCache[bytes, User] = ExpiringCache(CACHE_SECONDS, MAX_CACHED_USERS)
        self._rejected: ExpiringCache[bytes, bool] = ExpiringCache(CACHE_SECONDS, MAX_CACHED_USERS)
        self._rights: ExpiringCache[bytes, bool] = ExpiringCache(CACHE_SECONDS, MAX_CACHED_RIGHTS)
        self._recent_tokens: ExpiringCache[bytes, bool] = ExpiringCache(RECENT_SECONDS, MAX_CACHED_USERS)
        # Separate slots, so that a client that sends invalid tokens cannot delay the reviews of logged-in users.
        self._token_reviews = _SharedReviews()
        self._recent_token_reviews = _SharedReviews()
        self._right_reviews = _SharedReviews()

    async def close(self) -> None:
        """Cancel all reviews."""
        for reviews in (self._token_reviews, self._recent_token_reviews, self._right_reviews):
            await reviews.close()

    async def user_of(self, token: str) -> User | None:
        """Return the user of a token; None if the API server rejects it."""
        key = _digest(token)
        if self._rejected.get(key, loop_time()):
            return None
        if user := self._users.get(key, loop_time()):
            return user
        reviews = self._recent_token_reviews if self._recent_tokens.get(key, loop_time()) else self._token_reviews
        return await reviews.run(key, lambda: self._review_token(key, token))

    async def allows(self, user: User, right: Right) -> bool:
        """Whether a user has a right."""
        key = _digest(user, right)
        is_allowed = self._rights.get(key, loop_time())
        if is_allowed is not None:
            return is_allowed
        return await self._right_reviews.run(key, lambda: self._review_right(key, user, right))

    async def _review_token(self, key: bytes, token: str) -> User | None:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        status = (await self._create(collection_path("tokenreviews"), body, _TokenReview)).status
        if not status.authenticated:
            self._rejected.put(key, value=True, now=loop_time())
            return None
        info = status.user
        extra = tuple((name, tuple(values)) for name, values in sorted(info.extra.items()))
        user = User(info.username, tuple(info.groups), info.uid, extra)
        self._users.put(key, user, loop_time())
        self._recent_tokens.put(key, value=True, now=loop_time())
        return user

    async def _review_right(self, key: bytes, user: User, right: Right) -> bool:
        path = collection_path("subjectaccessreviews")
        is_allowed = (await self._create(path, review_of(user, right), _AccessReview)).status.allowed
        self._rights.put(key, is_allowed, loop_time())
        return is_allowed

    async def _create(self, path: str, body: Mapping[str, Any], kind: type[T]) -> T:
        try:
            return await self._api.create(path, body, kind)
        except NoResponseError as error:
            raise ReviewError("The API server does not respond, so no user can log in; retry") from error
        except ApiError as error:
            if error.is_forbidden:
                raise ReviewError(NO_RIGHTS_MESSAGE) from error
            raise ReviewError(f"The API server could not check the user: {single_line(str(error), 200)}") from error


class _SharedReviews:
    """Reviews in progress. Concurrent requests with one key share a review, which goes on if they disconnect."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_REVIEWS)
        self._running: dict[bytes, asyncio.Task[Any]] = {}

    async def run(self, key: bytes, review: Callable[[], Coroutine[None, None, T]]) -> T:
        """Return the result of the review for `key`, starting it unless it is in progress already."""
        task = self._running.get(key)
        if task is None:
            if len(self._running) >= MAX_PENDING_REVIEWS:
                raise ReviewError(BUSY_MESSAGE)
            task = asyncio.create_task(self._run_in_slot(review), name="review")
            self._running[key] = task
            task.add_done_callback(lambda task: self._on_done(key, task))
        result: T = await asyncio.shield(task)
        return result

    async def close(self) -> None:
        """Cancel all reviews and wait until they have ended."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run_in_slot(self, review: Callable[[], Coroutine[None, None, T]]) -> T:
        try:
            async with asyncio.timeout(SLOT_TIMEOUT_SECONDS):
                await self._slots.acquire()
        except TimeoutError:
            raise ReviewError(BUSY_MESSAGE) from None
        try:
            return await review()
        finally:
            self._slots.release()

    def _on_done(self, key: bytes, task: asyncio.Task[Any]) -> None:
        self._running.pop(key, None)
        if not task.cancelled():
            task.exception()  # mark the exception as retrieved: waiting requests get it by themselves


def _digest(*values: object) -> bytes:
    return hashlib.sha256(repr(values).encode()).digest()
