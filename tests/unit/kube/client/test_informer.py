"""An informer's conclusions from a list about objects that no watch has reported."""

from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from rota.kube.brokers.registry import BrokerRegistry
from rota.kube.client.api import Api, Page
from rota.kube.client.informer import Informer
from rota.kube.client.objects import CustomResource, Metadata, PartialObjectMetadata
from rota.kube.informers import custom_informers
from rota.kube.reconcile.controller import Controller


class OneList:
    """An API server with one list."""

    def __init__(self, version: int, *listed: PartialObjectMetadata) -> None:
        self.page = Page([*listed], str(version))

    async def pages(self, *_: object) -> AsyncGenerator[Page[Any]]:
        yield self.page


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
    deleted_objects: set[tuple[str, int]] = set()
    informer = Informer(
        api,
        "configmaps",
        "shop",
        PartialObjectMetadata,
        on_upsert=lambda _: None,
        on_delete=lambda meta: deleted_objects.add((meta.metadata.name, meta.metadata.version_number)),
        expected=lambda: [expected],
    )
    assert await informer.relist() == "10"
    assert deleted_objects == reported


async def test_watch_list_without_a_group_and_policy_that_only_kopf_reported_reports_them_as_deleted() -> None:
    """While kopf's watch is interrupted, it misses deletions; an object may have come after the previous list."""
    unused: Any = None
    controller = Controller(unused, unused, BrokerRegistry(unused), unused)
    spec = {"policyRef": {"name": "sticky"}}
    group = CustomResource(Metadata("orders", uid="1", namespace="shop", resource_version="7", generation=1), spec)
    policy = CustomResource(Metadata("sticky", uid="2", namespace="shop", resource_version="6", generation=1), {})
    controller.events.on_policy_upsert(policy)
    controller.events.on_group_upsert(group)
    notified = list[tuple[str, str]]()
    for informer in custom_informers(cast("Api", OneList(10)), controller, ["shop"], notified.append):
        await informer.relist()
    assert controller.groups == {}
    assert controller.events.policies == {}
    assert notified == [("shop", "orders")]
