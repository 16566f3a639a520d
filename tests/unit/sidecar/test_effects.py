"""Effects that cannot be stored: they wait, or are run all the same if the member ends; a problem says which."""

from pathlib import Path

import pytest

from rota.model import Queue, Reason
from rota.sidecar.effects import EffectRunner
from rota.sidecar.member.member import Effects, Member
from rota.sidecar.member.queue_lifecycle import Command, LeaseAction
from rota.sidecar.status.problems import Problems
from rota.sidecar.storage.state_store import StateStore

STOP = Command(LeaseAction.STOP, Queue("orders", "broker-a", 3), 1)


def run_effects(folder: Path, effects: Effects, *, member_ends: bool) -> tuple[str, list[Command]]:
    """Submit effects whose state cannot be written; return the problem and the commands that were run."""
    (folder / "state").touch()  # a file, so no state file can be created in it
    store = StateStore(folder / "state")
    store.load("uid-m1")
    problems = Problems()
    commands: list[Command] = []
    runner = EffectRunner(store, problems, Member("m1", "uid-m1").report, commands.append, lambda: None)
    if member_ends:
        runner.skip_failed_writes()
    runner.submit_effects(effects)
    return problems.messages[Reason.STATE_WRITE_FAILED].partition(": ")[0], commands


@pytest.mark.parametrize(
    ("effects", "problem"),
    [
        (Effects(store_generation=7, commands=(STOP,)), "so generation 7 is not applied yet"),
        (Effects(store_final=True, commands=(STOP,)), "so the final drain is postponed"),
    ],
)
async def test_sidecar_state_that_cannot_be_written_postpones_its_effects(
    effects: Effects, problem: str, tmp_path: Path
) -> None:
    message, commands = run_effects(tmp_path, effects, member_ends=False)
    assert (message, commands) == (f"The member's state cannot be written, {problem}", [])


@pytest.mark.parametrize(
    "effects", [Effects(store_generation=7, commands=(STOP,)), Effects(store_final=True, commands=(STOP,))]
)
async def test_sidecar_state_that_cannot_be_written_does_not_postpone_the_end_of_the_process(
    effects: Effects, tmp_path: Path
) -> None:
    message, commands = run_effects(tmp_path, effects, member_ends=True)
    assert message == "The member's state cannot be written; its process ends, so it releases its queues all the same"
    assert commands == [STOP]
