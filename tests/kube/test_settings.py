"""A group's settings on their way to its members: they are poked, and the group is settled once all obey."""

import pytest

from ground.poll import soon
from kube.world import OperatedNamespace, two_members

pytestmark = pytest.mark.usefixtures("crds", "node")

CHANGED = {"spec": {"subscriptions": [{"topic": "orders", "expression": "paid"}]}}


async def test_settings_that_change_are_poked_and_group_is_settled_once_all_members_obey(
    world: OperatedNamespace,
) -> None:
    before = await two_members(world)
    await soon(world.settled)
    pokes = await world.pokes()
    deaf = world.fleet.members["orders-b"]
    deaf.deaf = True
    await world.api.patch(world.path, CHANGED)

    async def waits_for_one() -> bool:
        told = (await world.conditions())["Progressing"]
        return (told["reason"], told["message"]) == (
            "SettingsNotObeyed",
            "orders-b does not use the group's new settings yet",
        )

    await soon(waits_for_one)
    assert (await world.conditions())["Ready"]["status"] == "True"
    after = await world.pokes()
    assert all(after[name].generation > pokes[name].generation for name in ("orders-a", "orders-b"))
    deaf.deaf = False
    await soon(world.settled)
    assert world.fleet.as_value() == before, "no queue moves"


async def test_settings_not_obeyed_long_after_they_changed_make_the_group_degraded(
    world: OperatedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two_members(world)
    await soon(world.settled)
    monkeypatch.setattr("rota.planner.status.problems.SETTINGS_PATIENCE_SECONDS", -30.0)  # beyond the drain's time-out
    world.fleet.members["orders-b"].deaf = True
    await world.api.patch(world.path, CHANGED)

    async def only_one_is_late() -> bool:
        message: str = (await world.condition("SettingsNotObeyed"))["message"]
        return message.startswith("orders-b still uses old settings")

    await soon(only_one_is_late)
    assert (await world.condition("Degraded"))["reason"] == "SettingsNotObeyed"
    world.fleet.members["orders-b"].deaf = False
    await world.well("SettingsNotObeyed")
