"""An informer's conclusions from a list about objects that no watch has reported."""

from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.api import Api, Page
from rota.kube.client.informer import Informer
from rota.kube.client.objects import CustomResource, Metadata, PartialObjectMetadata
from rota.kube.informers import custom_resource_informers
from rota.kube.reconcile.controller import Controller
from rota.kube.reconcile.event_handlers import EventHandlers


class OneList:
    """An API server with one list."""

    def __init__(self, version: int, *listed: PartialObjectMetadata) -> None:
        self.page = Page([*listed], str(version))

    async def pages(self, *_: object) -> AsyncGenerator[Page[Any]]:
        yield self.page


class SeenObjects:
    """Handlers that keep the present objects by name, and the deleted ones."""

    def __init__(self, *expected: Any) -> None:
        self.present: dict[str, Any] = {}
        self.deleted: list[Any] = []
        self._expected = expected

    def on_upsert(self, item: Any) -> None:
        self.present[item.metadata.name] = item

    def on_delete(self, item: Any) -> None:
        self.present.pop(item.metadata.name, None)
        self.deleted.append(item)

    def expected(self) -> tuple[Any, ...]:
        return self._expected


def an_object(name: str, version: int, namespace: str = "shop") -> PartialObjectMetadata:
    return PartialObjectMetadata(Metadata(name, uid=name, namespace=namespace, resource_version=str(version)))


@pytest.mark.parametrize(
    ("expected", "reported"),
    [
        (an_object("written", 7), {("written", 10)}),
        (an_object("written", 10), {("written", 10)}),
        (an_object("written", 11), set[tuple[str, int]]()),
        (an_object("listed", 7), set[tuple[str, int]]()),
        (an_object("written", 7, "elsewhere"), set[tuple[str, int]]()),
    ],
    ids=["before the list", "just before it", "after it", "that is listed", "in another namespace"],
)
async def test_watch_list_without_an_object_written_earlier_reports_the_object_as_deleted(
    expected: PartialObjectMetadata, reported: set[tuple[str, int]]
) -> None:
    api = cast("Api", OneList(10, an_object("listed", 8)))
    seen = SeenObjects(expected)
    assert await Informer(api, "configmaps", "shop", PartialObjectMetadata, seen).relist() == "10"
    assert {(item.metadata.name, item.metadata.version_number) for item in seen.deleted} == reported


async def test_watch_list_without_a_group_and_policy_that_only_kopf_reported_reports_them_as_deleted() -> None:
    """While kopf's watch is interrupted, it misses deletions; an object may have come after the previous list."""
    unused: Any = None
    controller = Controller(unused, unused, BrokerRegistry(unused), unused)
    notified = list[tuple[str, str]]()
    events = EventHandlers(controller, notified.append)
    spec = {"policyRef": {"name": "sticky"}}
    group = CustomResource(Metadata("orders", uid="1", namespace="shop", resource_version="7", generation=1), spec)
    policy = CustomResource(Metadata("sticky", uid="2", namespace="shop", resource_version="6", generation=1), {})
    events.policies.on_upsert(policy)
    events.groups.on_upsert(group)
    notified.clear()
    for informer in custom_resource_informers(cast("Api", OneList(10)), events, ["shop"]):
        await informer.relist()
    assert controller.groups == {}
    assert controller.specs.policies == {}
    assert notified == [("shop", "orders")]
