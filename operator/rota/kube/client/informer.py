"""List-watch informer: lists a collection page by page, then watches it; after an error it resumes or lists again.

A list is a consistent read, so a known object that is missing in it was deleted, even if no event reported that. Known
are the objects of earlier lists and events, and those that the operator itself has written: an object that was created
and deleted while the watch was interrupted is in no event and in no list.
"""

import asyncio
import logging
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, Generic, Protocol, TypeVar, cast

from msgspec.structs import replace

from rota.aio import loop_time
from rota.kube.client.api import Api, ApiError, NoResponseError, Params
from rota.kube.client.objects import Metadata, ObjectKey, part_to_cache
from rota.kube.client.paths import collection_path

MIN_RETRY_SECONDS = 0.2
MAX_RETRY_SECONDS = 10.0

_log = logging.getLogger(__name__)


class HasMetadata(Protocol):
    """An object with metadata."""

    @property
    def metadata(self) -> Metadata:
        """Its name, uid and version."""


T = TypeVar("T", bound=HasMetadata)


class ObjectHandlers(Protocol[T]):
    """Handles the objects of one kind: a class of `kube/reconcile/event_handlers.py`, such as `PodHandlers`.

    `kube/informers.py` (`object_informers`, `custom_resource_informers`) gives each informer the handlers of its kind.
    """

    def on_upsert(self, item: T, /) -> None:
        """Handle an added or changed object, or one that a list has."""

    def on_delete(self, item: T, /) -> None:
        """Handle a deleted object."""

    def expected(self) -> Iterable[T]:
        """Return the objects that exist as far as the operator knows, its own writes included.

        Only objects that match the informer's `params` may be among them: one that a list lacks counts as deleted.
        """


class Informer(Generic[T]):
    """Lists and watches one collection; its handlers get each object that exists, and each deleted one."""

    def __init__(
        self,
        api: Api,
        resource: str,
        namespace: str,
        kind: type[T],
        handlers: ObjectHandlers[T],
        *,
        params: Params | None = None,
    ) -> None:
        self.resource = resource
        self.namespace = namespace  # empty: all namespaces
        self.path = collection_path(resource, namespace)
        self._api = api
        self._kind = kind
        self._params = params
        self._handlers = handlers
        self._cache: dict[ObjectKey, T] = {}
        self._resource_version = ""  # version at which the next watch starts; empty: list first
        self.is_forbidden = False  # whether the operator may not list the collection, as the API server last said
        self.listed = asyncio.Event()  # set when all objects of the first list have been handled
        self.last_message_at = loop_time()  # time of the server's last message

    @property
    def silent_seconds(self) -> float:
        """Seconds since the server's last message."""
        return loop_time() - self.last_message_at

    async def run(self) -> None:
        """List and watch until cancelled."""
        pause = MIN_RETRY_SECONDS
        while True:
            previous_message_at = self.last_message_at
            has_failed = True
            try:
                self._resource_version = self._resource_version or await self.relist()
                await self._watch()
                has_failed = False
            except ApiError as error:
                if not error.is_expired:
                    _log.warning("The watch of %s failed: %s", self.path, error)
                self._resource_version = ""
            except NoResponseError as error:
                _log.info("%s", error)
            except Exception:  # noqa: BLE001 - if it ended here, the operator would see no more events
                _log.exception("The watch of %s failed unexpectedly; listing again", self.path)
                self._resource_version = ""
            # Pause after a failure, and after a watch without a message; longer each time while the server is silent.
            is_silent = self.last_message_at == previous_message_at
            pause = min(2 * pause, MAX_RETRY_SECONDS) if is_silent else MIN_RETRY_SECONDS
            if has_failed or is_silent:
                await asyncio.sleep(pause)

    async def relist(self) -> str:
        """List the collection and report deletions; return the version from which to watch."""
        listed_keys: set[ObjectKey] = set()
        version = ""
        try:
            async with aclosing(self._api.pages(self.path, self._kind, self._params)) as pages:
                async for page in pages:
                    self.last_message_at = loop_time()
                    version = page.version
                    for item in page.objects:
                        listed_keys.add(item.metadata.key)
                        self._upsert(item)
        except ApiError as error:
            self.is_forbidden = self.is_forbidden or error.is_forbidden  # other errors do not concern rights
            raise
        self.is_forbidden = False
        self._report_missing(listed_keys, version)
        self.listed.set()
        return version

    def _report_missing(self, listed_keys: Container[ObjectKey], version: str) -> None:
        """Report the known and the expected objects that are missing in a list as deleted."""
        for key, cached in list(self._cache.items()):
            if key not in listed_keys:
                self._delete(_with_list_version(cached, version))
        for item in list(self._handlers.expected()):
            is_watched_here = self.namespace in {"", item.metadata.namespace}
            if item.metadata.key in listed_keys or not is_watched_here:
                continue
            deleted = _with_list_version(item, version)
            # A list that is older than the write cannot have the object; `deleted` has the list's version.
            was_written_later = item.metadata.version_number > deleted.metadata.version_number
            if not was_written_later:
                self._delete(deleted)

    async def _watch(self) -> None:
        async with aclosing(self._api.watch(self.path, self._kind, self._resource_version, self._params)) as events:
            async for event_type, item, version in events:
                self.last_message_at = loop_time()
                self._resource_version = version
                if item is None:
                    continue
                if event_type == "DELETED":
                    self._delete(item)
                else:
                    self._upsert(item)

    def _upsert(self, item: T) -> None:
        cached = self._cache.get(item.metadata.key)
        if cached and cached.metadata.uid != item.metadata.uid:  # recreated, and the deletion's event was missed
            self._delete(cached)
        self._cache[item.metadata.key] = part_to_cache(item)
        with self._logged_failure(item):
            self._handlers.on_upsert(item)

    def _delete(self, item: T) -> None:
        self._cache.pop(item.metadata.key, None)
        with self._logged_failure(item):
            self._handlers.on_delete(item)

    @contextmanager
    def _logged_failure(self, item: T) -> Iterator[None]:
        """Log a handler's failure: if it fails for one object, the others are still handled."""
        try:
            yield
        except Exception:  # noqa: BLE001 - concerns one object
            _log.exception("The event handler of %s failed for %s/%s", self.path, *item.metadata.key)


def _with_list_version(item: T, version: str) -> T:
    """Return an object that is missing in a list, with the version of that list as that of its deletion.

    The cached version may be too low, because handlers may ignore a deletion with a lower version than they know: if
    events were missed, the object may have been written since it was cached, perhaps by this operator.
    """
    deleted: Any = item
    return cast("T", replace(deleted, metadata=replace(item.metadata, resource_version=version)))


def without_forbidden_namespaces(informers: Sequence[Informer[Any]]) -> list[Informer[Any]]:
    """Return the informers of namespaces that are neither deleted nor forbidden; all informers if there are none."""
    forbidden = {informer.namespace for informer in informers if informer.is_forbidden}
    return [informer for informer in informers if informer.namespace not in forbidden] or [*informers]
