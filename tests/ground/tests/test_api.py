"""The API client: verbs, refusals, and events that are followed over gaps."""

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
    made = f"api-{secrets.token_hex(3)}"
    yield made
    for found in await api.list(MAPS, fieldSelector=f"metadata.name={made}"):
        await api.delete(f"{MAPS}/{found['metadata']['name']}")


def named(name: str, **data: str) -> Object:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


async def test_api_client_creates_replaces_patches_and_deletes_an_object(api: Api, name: str) -> None:
    path = f"{MAPS}/{name}"
    made = await api.create(MAPS, named(name, a="1"))
    await api.replace(path, {**made, "data": {"a": "2"}})
    await api.patch(path, {"data": {"b": "3"}})
    await api.patch(path, {"data": {"c": "4"}}, "strategic")
    await api.patch(path, [{"op": "remove", "path": "/data/b"}], "json")
    await api.patch(path, named(name, d="5"), "apply")
    assert (await api.get(path))["data"] == {"a": "2", "c": "4", "d": "5"}
    assert [found["metadata"]["name"] for found in await api.list(MAPS, fieldSelector=f"metadata.name={name}")] == [
        name
    ]
    await api.delete(path, {"preconditions": {"uid": made["metadata"]["uid"]}})
    with pytest.raises(ApiError) as refused:
        await api.get(path)
    assert (refused.value.status, refused.value.reason) == (404, "NotFound")
    assert name in str(refused.value)


async def test_api_client_stale_replace_is_rejected_as_a_conflict(api: Api, name: str) -> None:
    made = await api.create(MAPS, named(name))
    await api.patch(f"{MAPS}/{name}", {"data": {"a": "1"}})
    with pytest.raises(ApiError) as refused:
        await api.replace(f"{MAPS}/{name}", made)
    assert (refused.value.status, refused.value.reason) == (409, "Conflict")


async def test_api_client_watch_starts_with_existing_objects(api: Api, name: str) -> None:
    await api.create(MAPS, named(name, a="1"))
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
    assert not ApiError({"code": 410, "reason": "Expired"}).then_anew()
    with pytest.raises(ApiError):
        ApiError({"code": 403, "reason": "Forbidden"}).then_anew()


async def test_api_client_watch_of_an_unknown_resource_raises(api: Api) -> None:
    with pytest.raises(ApiError):
        async for _ in api.follow("/apis/example.com/v1/things"):
            pass


def test_api_client_watch_reports_objects_that_vanished_in_a_gap_as_deleted() -> None:
    old, kept, new = ({"metadata": {"uid": uid}} for uid in ("old", "kept", "new"))
    known = {"old": old, "kept": kept}
    told = [(event["type"], event["object"]["metadata"]["uid"]) for event in _differences(known, [kept, new])]
    assert told == [("DELETED", "old"), ("MODIFIED", "kept"), ("ADDED", "new")]
    assert set(known) == {"kept", "new"}
