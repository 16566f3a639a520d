"""Asks the API server which user a token belongs to, and which rights a user has."""

import asyncio
import hashlib
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec

from rota.http_server import AdmissionLimit
from rota.kube.client.api import Api, ApiError, Unanswered
from rota.kube.client.paths import collection_path
from rota.kube.http.access.rights import ExpiringCache, Right, User, review_of
from rota.model import plain

T = TypeVar("T")

CACHE_SECONDS = 30.0
MAX_TOKENS = 1_000
MAX_RIGHTS = 20_000  # a user of one namespace has one for each namespace with groups
MAX_CONCURRENT = 16
NO_RIGHTS = (
    "The operator may not create tokenreviews and subjectaccessreviews, so nobody can log in here; "
    "give its ServiceAccount the ClusterRole system:auth-delegator"
)


class ReviewError(Exception):
    """The API server did not say who a user is, or what the user may do."""


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
    """Reviews tokens and rights. Answers are kept for 30 s, so a user whose rights are revoked reads on for as long."""

    def __init__(self, api: Api) -> None:
        """`api` has connections of its own: users must not delay the operator's requests."""
        self._api = api
        self._users: ExpiringCache[bytes, User | bool] = ExpiringCache(CACHE_SECONDS, MAX_TOKENS)
        self._rights: ExpiringCache[tuple[User, Right], bool] = ExpiringCache(CACHE_SECONDS, MAX_RIGHTS)
        self._concurrent = AdmissionLimit(MAX_CONCURRENT)

    async def user_of(self, token: str) -> User | None:
        """Return the user of a token; None if the API server rejects it."""
        key = hashlib.sha256(token.encode()).digest()  # no token stays in memory
        user = self._users.get(key, _now())
        if user is None:
            user = await self._review_token(token) or False
            self._users.put(key, user, _now())
        return None if isinstance(user, bool) else user

    async def allows(self, user: User, right: Right) -> bool:
        """Whether a user has a right."""
        key = (user, right)
        is_allowed = self._rights.get(key, _now())
        if is_allowed is None:
            review = await self._create(collection_path("subjectaccessreviews"), review_of(user, right), _AccessReview)
            is_allowed = review.status.allowed
            self._rights.put(key, is_allowed, _now())
        return is_allowed

    async def _review_token(self, token: str) -> User | None:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenReview", "spec": {"token": token}}
        status = (await self._create(collection_path("tokenreviews"), body, _TokenReview)).status
        if not status.authenticated:
            return None
        info = status.user
        extra = tuple((name, tuple(values)) for name, values in sorted(info.extra.items()))
        return User(info.username, tuple(info.groups), info.uid, extra)

    async def _create(self, path: str, body: Mapping[str, Any], kind: type[T]) -> T:
        with self._concurrent.admit() as is_admitted:
            if not is_admitted:
                raise ReviewError("Too many users are being checked; try again")
            try:
                return await self._api.create(path, body, kind)
            except Unanswered as error:
                raise ReviewError("The API server does not answer, so nobody can log in here; try again") from error
            except ApiError as error:
                if error.status == HTTPStatus.FORBIDDEN:
                    raise ReviewError(NO_RIGHTS) from error
                raise ReviewError(f"The API server checks no user: {plain(str(error), 200)}") from error


def _now() -> float:
    return asyncio.get_running_loop().time()
