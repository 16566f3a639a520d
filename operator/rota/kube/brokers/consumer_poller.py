"""Asks unmanaged consumers (such as Java clients), through their brokers, for their subscriptions and other settings.

New consumers are asked at once, all consumers once a minute. The settings are compared with the group's spec. The
subscription table that a broker has of a group is no substitute: each consumer's heartbeat overwrites it.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping

from rota.aio import yield_periodically
from rota.brokers.errors import BrokerError
from rota.brokers.port import Brokers
from rota.kube.brokers.route_watcher import RouteWatcher
from rota.kube.client.objects import ObjectKey
from rota.logs import group_fields
from rota.spec.consumer_settings import ConsumerSettings

REFRESH_SECONDS = 60.0
MAX_CONSUMERS = 20  # consumers of a group that are asked
MAX_BROKERS_ASKED = 2  # brokers tried for one consumer, which is connected to all brokers of its topics
MAX_CONCURRENT_REQUESTS = 16  # to one cluster; a silent consumer occupies one for 10 s

_log = logging.getLogger(__name__)


class ConsumerPoller:
    """Polls the settings of the unmanaged consumers at one broker cluster."""

    def __init__(
        self,
        brokers: Brokers,
        route_watcher: RouteWatcher,
        unmanaged: Callable[[ObjectKey], Collection[str]],
        on_change: Callable[[ObjectKey], None],
    ) -> None:
        """`unmanaged` returns the ids of a group's unmanaged consumers; `on_change` is called if settings change."""
        self._brokers = brokers
        self._route_watcher = route_watcher
        self._unmanaged = unmanaged
        self._on_change = on_change
        self._settings: dict[ObjectKey, dict[str, ConsumerSettings | None]] = {}  # by client id; None: no response
        # Of each group that is being asked now: the client ids still to ask, as keys in order.
        self._pending: dict[ObjectKey, dict[str, None]] = {}
        self._slots = asyncio.Semaphore(MAX_CONCURRENT_REQUESTS)

    def settings_of(self, key: ObjectKey) -> Mapping[str, ConsumerSettings]:
        """Return the settings of a group's unmanaged consumers by client id, without consumers that did not respond."""
        if not self._settings.get(key):
            return {}
        responded = {client_id: settings for client_id, settings in self._settings[key].items() if settings is not None}
        unmanaged = {*self._unmanaged(key)}
        return {client_id: settings for client_id, settings in responded.items() if client_id in unmanaged}

    async def run(self) -> None:
        """Ask all unmanaged consumers periodically: a consumer may change its subscriptions while it runs.

        A group whose consumers are not all asked when the next minute starts does not delay the other groups.
        """
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(REFRESH_SECONDS)
                interests = self._route_watcher.interests_within_quota
                self._settings = {key: settings for key, settings in self._settings.items() if key in interests}
                async for key in yield_periodically([*interests]):
                    tasks.create_task(self.poll_settings(key, ask_all=True))

    async def poll_settings(self, key: ObjectKey, *, ask_all: bool = False) -> None:
        """Ask a group's unmanaged consumers that were not asked yet; with `ask_all`, all of them.

        A group's consumers are asked one after another, so silent consumers do not occupy all slots for requests. If a
        call for the group is running already, the consumers are added to its pending ones.
        """
        unmanaged = sorted(self._unmanaged(key))[:MAX_CONSUMERS]
        self._forget_consumers(key, unmanaged)
        known_settings = self._settings.get(key, {})
        to_ask: dict[str, None] = dict.fromkeys(unmanaged)
        if not ask_all:
            for client_id in known_settings:
                to_ask.pop(client_id, None)
        if key in self._pending:
            self._pending[key] |= to_ask
        elif to_ask:
            self._pending[key] = to_ask
            try:
                await self._ask_pending(key)
            finally:
                del self._pending[key]

    def _forget_consumers(self, key: ObjectKey, unmanaged: Collection[str]) -> None:
        """Forget the settings of consumers that are not in the group any more."""
        known_settings = self._settings.get(key, {})
        departed = [client_id for client_id in known_settings if client_id not in unmanaged]
        for client_id in departed:
            del known_settings[client_id]
        if departed:
            self._on_change(key)

    async def _ask_pending(self, key: ObjectKey) -> None:
        """Ask a group's pending consumers; `poll_settings` may add others meanwhile."""
        pending = self._pending[key]
        while pending:
            client_id = next(iter(pending))
            settings = await self._ask_consumer(key, client_id)
            pending.pop(client_id)
            if client_id not in self._unmanaged(key):
                continue
            known_settings = self._settings.setdefault(key, {})
            has_changed = settings != known_settings.get(client_id)
            known_settings[client_id] = settings
            if has_changed:
                self._on_change(key)

    async def _ask_consumer(self, key: ObjectKey, client_id: str) -> ConsumerSettings | None:
        """Return a consumer's settings from the first broker through which it responds."""
        interest = self._route_watcher.interests_within_quota.get(key)
        if interest is None:
            return None
        for broker in sorted(self._route_watcher.routes.brokers_of(interest.consumed_topics))[:MAX_BROKERS_ASKED]:
            try:
                async with self._slots:
                    return await self._brokers.consumer_settings(interest.consumer_group, client_id, broker)
            except BrokerError as error:
                _log.debug("Consumer %s did not return its settings: %s", client_id, error, extra=group_fields(*key))
        return None
