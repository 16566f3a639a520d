"""A group's settings: members are poked after a change, and the group is settled once all of them use it."""

import pytest

from ground.poll import soon
from kube.world import OperatedNamespace, add_two_members

pytestmark = pytest.mark.usefixtures("crds", "node")

CHANGED = {"spec": {"subscriptions": [{"topic": "orders", "expression": "paid"}]}}


async def test_settings_that_change_are_poked_and_group_is_settled_once_all_members_obey(
    world: OperatedNamespace,
) -> None:
    owners = await add_two_members(world)
    await soon(world.settled)
    pokes = await world.pokes()
    ignoring = world.fleet.members["orders-b"]
    ignoring.ignores_pokes = True
    await world.api.patch(world.path, CHANGED)

    async def is_not_obeyed() -> bool:
        progressing = (await world.conditions())["Progressing"]
        return (progressing["reason"], progressing["message"]) == (
            "SettingsNotObeyed",
            "orders-b does not use the group's new settings yet",
        )

    await soon(is_not_obeyed)
    assert (await world.conditions())["Ready"]["status"] == "True"
    later_pokes = await world.pokes()
    assert all(later_pokes[name].generation > pokes[name].generation for name in ("orders-a", "orders-b"))
    ignoring.ignores_pokes = False
    await soon(world.settled)
    assert world.fleet.owners() == owners, "no queue moves"


async def test_settings_not_obeyed_long_after_they_changed_make_the_group_degraded(
    world: OperatedNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    await add_two_members(world)
    await soon(world.settled)
    monkeypatch.setattr(
        "rota.planner.status.problems.SETTINGS_PATIENCE_SECONDS", -30.0
    )  # added to the drain timeout, so it has passed at once
    world.fleet.members["orders-b"].ignores_pokes = True
    await world.api.patch(world.path, CHANGED)

    async def is_reported() -> bool:
        message: str = (await world.wait_for_condition("SettingsNotObeyed"))["message"]
        return message.startswith("orders-b still uses old settings")

    await soon(is_reported)
    assert (await world.wait_for_condition("Degraded"))["reason"] == "SettingsNotObeyed"
    world.fleet.members["orders-b"].ignores_pokes = False
    await world.wait_until_cleared("SettingsNotObeyed")
