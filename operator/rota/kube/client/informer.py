"""Objects as they are now: listed page by page, then watched; whatever breaks, it goes on or begins anew.

What is not in a list has ended, for a list is a consistent read: so a deletion is known even if nobody was told of it.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any, Generic, Protocol, TypeVar, cast

from msgspec.structs import replace

from rota.kube.client.api import Api, ApiError, Params, Unanswered
from rota.kube.client.objects import Metadata
from rota.kube.client.paths import collection_path

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0

_log = logging.getLogger(__name__)


class Named(Protocol):
    """An object with metadata."""

    @property
    def metadata(self) -> Metadata:
        """Who it is."""


T = TypeVar("T", bound=Named)


class Follower(Generic[T]):
    """One list and watch; `seen` and `gone` are told of what is there and of what is not any more."""

    def __init__(
        self,
        api: Api,
        resource: str,
        namespace: str,
        kind: type[T],
        *,
        seen: Callable[[T], None],
        gone: Callable[[T], None],
        kept: Callable[[T], T] = lambda it: it,
        params: Params | None = None,
    ) -> None:
        """Do nothing before `run`; an empty namespace stands for all of them.

        `kept` returns what `gone` is told of an object that is missing in a list: the follower keeps that of each.
        """
        self.resource = resource
        self.namespace = namespace
        self.path = collection_path(resource, namespace)
        self._api, self._kind, self._params = api, kind, params
        self._seen, self._gone, self._kept = seen, gone, kept
        self._known: dict[tuple[str, str], T] = {}
        self._version = ""  # from which a watch goes on; none: everything is listed first
        self.refused = False  # it is not ours to see
        self.listed = asyncio.Event()  # all that was there when we began has been told
        self.heard = asyncio.get_running_loop().time()  # when the server last said something

    async def run(self) -> None:
        """Follow for ever."""
        pause = FIRST_PAUSE
        while True:
            before, failed = self.heard, True
            try:
                self._version = self._version or await self.relist()
                await self._watch()
                failed = False
            except ApiError as error:
                if not error.expired:
                    _log.warning("%s cannot be followed: %s", self.path, error)
                self._version = ""
            except Unanswered as error:
                _log.info("%s", error)
            except Exception:  # noqa: BLE001 - without this watch the operator would see nothing any more
                _log.exception("%s cannot be followed; it is listed again", self.path)
                self._version = ""
            pause = FIRST_PAUSE if self.heard > before else min(2 * pause, LONGEST_PAUSE)
            if failed or self.heard == before:
                await asyncio.sleep(pause)

    async def relist(self) -> str:
        """Read everything anew; return the version to go on from."""
        here: set[tuple[str, str]] = set()
        version = ""
        try:
            async with aclosing(self._api.pages(self.path, self._kind, self._params)) as pages:
                async for page in pages:
                    self._word()
                    version = page.version
                    for it in page.objects:
                        here.add(it.metadata.key)
                        self._learn(it)
        except ApiError as error:
            self.refused = self.refused or error.forbidden  # other errors say nothing of rights
            raise
        self.refused = False
        for key, known in list(self._known.items()):
            if key not in here:
                self._lose(_as_of(known, version))
        self.listed.set()
        return version

    async def _watch(self) -> None:
        async with aclosing(self._api.watch(self.path, self._kind, self._version, self._params)) as told:
            async for what, it, at in told:
                self._word()
                self._version = at
                if it is None:
                    continue
                if what == "DELETED":
                    self._lose(it)
                else:
                    self._learn(it)

    def _learn(self, it: T) -> None:
        known = self._known.get(it.metadata.key)
        if known and known.metadata.uid != it.metadata.uid:
            self._lose(known)
        self._known[it.metadata.key] = self._kept(it)
        self._tell(self._seen, it)

    def _lose(self, it: T) -> None:
        self._known.pop(it.metadata.key, None)
        self._tell(self._gone, it)

    def _tell(self, handler: Callable[[T], None], it: T) -> None:
        """Call a handler; one object that it fails for keeps no other from being seen."""
        try:
            handler(it)
        except Exception:  # noqa: BLE001 - of one object
            _log.exception("%s: %s/%s cannot be handled", self.path, *it.metadata.key)

    def _word(self) -> None:
        self.heard = asyncio.get_running_loop().time()


def _as_of(it: T, version: str) -> T:
    """Return an object that a list does not have any more, with the version of that list.

    Events may have been missed: then it was written after it was last seen, perhaps by this operator.
    """
    deleted: Any = it
    return cast("T", replace(deleted, metadata=replace(it.metadata, resource_version=version)))


def counted(following: Sequence[Follower[Any]]) -> list[Follower[Any]]:
    """Leave out namespaces that are gone, or not ours any more, as long as there are others."""
    refused = {it.namespace for it in following if it.refused}
    return [it for it in following if it.namespace not in refused] or [*following]
