"""The API client: verbs, rejections, and a watch that continues after gaps."""

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from ground.api import Api, ApiError, Object, _differences
from ground.poll import PATIENCE_SECONDS

MAPS = "/api/v1/namespaces/default/configmaps"


@pytest.fixture
async def name(api: Api) -> AsyncIterator[str]:
    name_of_test = f"api-{secrets.token_hex(3)}"
    yield name_of_test
    for config_map in await api.list(MAPS, fieldSelector=f"metadata.name={name_of_test}"):
        await api.delete(f"{MAPS}/{config_map['metadata']['name']}")


def config_map(name: str, **data: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


async def test_api_client_creates_replaces_patches_and_deletes_an_object(api: Api, name: str) -> None:
    path = f"{MAPS}/{name}"
    created = await api.create(MAPS, config_map(name, a="1"))
    await api.replace(path, {**created, "data": {"a": "2"}})
    await api.patch(path, {"data": {"b": "3"}})
    await api.patch(path, {"data": {"c": "4"}}, "strategic")
    await api.patch(path, [{"op": "remove", "path": "/data/b"}], "json")
    await api.patch(path, config_map(name, d="5"), "apply")
    assert (await api.get(path))["data"] == {"a": "2", "c": "4", "d": "5"}
    listed = await api.list(MAPS, fieldSelector=f"metadata.name={name}")
    assert [config_map["metadata"]["name"] for config_map in listed] == [name]
    await api.delete(path, {"preconditions": {"uid": created["metadata"]["uid"]}})
    with pytest.raises(ApiError) as rejected:
        await api.get(path)
    assert (rejected.value.status, rejected.value.reason) == (404, "NotFound")
    assert name in str(rejected.value)


async def test_api_client_stale_replace_is_rejected_as_a_conflict(api: Api, name: str) -> None:
    created = await api.create(MAPS, config_map(name))
    await api.patch(f"{MAPS}/{name}", {"data": {"a": "1"}})
    with pytest.raises(ApiError) as rejected:
        await api.replace(f"{MAPS}/{name}", created)
    assert (rejected.value.status, rejected.value.reason) == (409, "Conflict")


async def test_api_client_watch_starts_with_existing_objects(api: Api, name: str) -> None:
    await api.create(MAPS, config_map(name, a="1"))
    async with (
        asyncio.timeout(PATIENCE_SECONDS),
        aclosing(api.follow(MAPS, fieldSelector=f"metadata.name={name}")) as events,
    ):
        assert (await anext(events))["type"] == "ADDED"
        await api.patch(f"{MAPS}/{name}", {"data": {"a": "2"}})
        changed = await anext(events)
        assert (changed["type"], changed["object"]["data"]) == ("MODIFIED", {"a": "2"})
        await api.delete(f"{MAPS}/{name}")
        assert (await anext(events))["type"] == "DELETED"


def test_api_client_watch_restarts_on_an_expired_version_and_raises_other_errors() -> None:
    assert not ApiError({"code": 410, "reason": "Expired"}).relist_version()
    with pytest.raises(ApiError):
        ApiError({"code": 403, "reason": "Forbidden"}).relist_version()


async def test_api_client_watch_of_an_unknown_resource_raises(api: Api) -> None:
    with pytest.raises(ApiError):
        async for _ in api.follow("/apis/example.com/v1/things"):
            pass


def test_api_client_watch_reports_objects_that_vanished_in_a_gap_as_deleted() -> None:
    old, same, new = ({"metadata": {"uid": uid}} for uid in ("old", "same", "new"))
    objects = {"old": old, "same": same}
    events = [(event["type"], event["object"]["metadata"]["uid"]) for event in _differences(objects, [same, new])]
    assert events == [("DELETED", "old"), ("MODIFIED", "same"), ("ADDED", "new")]
    assert set(objects) == {"same", "new"}
