"""Asks unmanaged consumers, through their brokers, for their own settings: new ones at once, all of them once a minute.

A broker's own table of a group's subscriptions does not say this: it has only what the last heartbeat brought.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from rota.aio import gently
from rota.brokers.errors import BrokerError
from rota.brokers.port import Brokers
from rota.kube.brokers.route_watcher import Views
from rota.kube.client.objects import Key
from rota.spec.consumer_settings import ConsumerSettings

REFRESH_SECONDS = 60.0
MAX_CONSUMERS = 20  # of a group; others are not asked
CONCURRENT_REQUESTS = 16  # to one cluster; a consumer that does not answer keeps one for 10 s

_log = logging.getLogger(__name__)


class ConsumerPoller:
    """The settings of the unmanaged consumers at one cluster of brokers."""

    def __init__(
        self,
        brokers: Brokers,
        views: Views,
        unmanaged: Callable[[Key], Collection[str]],
        news: Callable[[Key], None],
    ) -> None:
        """`unmanaged` returns the client ids in a group that are not its members'; `news` is called after a change."""
        self._brokers, self._views = brokers, views
        self._unmanaged, self._news = unmanaged, news
        self._settings: dict[Key, dict[str, ConsumerSettings | None]] = {}  # None: the consumer gave no answer
        self._requests = asyncio.Semaphore(CONCURRENT_REQUESTS)

    def of(self, key: Key) -> Mapping[str, ConsumerSettings]:
        """Return the settings of a group's unmanaged consumers by client id, of those that answered."""
        if not self._settings.get(key):
            return {}
        unmanaged = {*self._unmanaged(key)}
        return {
            client_id: settings
            for client_id, settings in self._settings[key].items()
            if settings is not None and client_id in unmanaged
        }

    async def run(self) -> None:
        """Ask all unmanaged consumers periodically: a consumer may change its subscriptions while it runs."""
        while True:
            await asyncio.sleep(REFRESH_SECONDS)
            interests = self._views.interests
            self._settings = {key: known for key, known in self._settings.items() if key in interests}
            async with asyncio.TaskGroup() as tasks:
                async for key in gently([*interests]):
                    tasks.create_task(self.ask(key, again=True))

    async def ask(self, key: Key, *, again: bool = False) -> None:
        """Ask a group's unmanaged consumers that were not asked yet; with `again`, all of them."""
        before = self._settings.get(key, {})
        unmanaged = sorted(self._unmanaged(key))[:MAX_CONSUMERS]
        if not (before or unmanaged):
            return
        settings: dict[str, ConsumerSettings | None] = {}
        for client_id in unmanaged:  # one after another: a group whose consumers do not answer delays no other group
            known = client_id in before and not again
            settings[client_id] = before[client_id] if known else await self._ask_consumer(key, client_id)
        self._settings[key] = settings
        if settings != before:
            self._news(key)

    async def _ask_consumer(self, key: Key, client_id: str) -> ConsumerSettings | None:
        """Return a consumer's settings from the first broker through which it answers."""
        interest = self._views.interests.get(key)
        if interest is None:
            return None
        for broker in sorted(self._views.where(interest)):
            try:
                async with self._requests:
                    return await self._brokers.consumer_settings(interest.group, client_id, broker)
            except BrokerError as error:
                _log.debug("%s/%s: %s did not report its settings: %s", *key, client_id, error)
        return None
