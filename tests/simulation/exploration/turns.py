"""Everything that can happen next in a world, each as a turn of its own."""

from collections.abc import Iterator

from rota.handover import MIN_READY_LOST_SECONDS
from simulation.exploration import faults, operators, pods
from simulation.exploration.setting import Setting
from simulation.exploration.world import LOST_AFTER, ExploredState, Place, Turn, put

JUMPS = (LOST_AFTER + 2, MIN_READY_LOST_SECONDS + 1)


def turns(setting: Setting, world: ExploredState) -> Iterator[Turn]:
    """Return everything that can happen next."""
    for place in world.places:
        yield from pods.turns(setting, world, place)
        yield from operators.looks(world, place)
    yield from operators.turns(setting, world)
    yield from _time(world)
    if world.left[-1]:
        yield from faults.turns(setting, world)


def at_once(setting: Setting, world: ExploredState) -> ExploredState:
    """Let happen what takes no time in this configuration."""
    swift = setting.swift
    for place in world.places:
        it, facts = place, place.facts
        if facts and "ready" in swift and facts.ready != it.answers and not it.over:
            it = it._replace(facts=facts._replace(ready=it.answers))
        if facts and "show" in swift and pods.shows(world, it, facts):
            it = it._replace(shown=world.record)
        if it.seen != it.facts and "see" in swift:
            world = operators.see(world, it)
        elif it is not place:
            world = put(world, it)
    return world


def _time(world: ExploredState) -> Iterator[Turn]:
    """Let time pass: how old a thing is matters only of what is waited for, and of who does not answer."""
    silence = any(place.seen and not place.answers for place in world.places)
    waiting = world.record and (world.record.assignment.releasing or world.record.assignment.barrier)
    for jump in JUMPS if silence else JUMPS[:1] if waiting else ():
        yield Turn("wait", f"{jump:g} s pass", _later(world, jump))


def _later(world: ExploredState, seconds: float) -> ExploredState:
    places = tuple(_unheard(it, world.now) if it.seen else it for it in world.places)
    return world._replace(places=places, now=world.now + seconds)


def _unheard(it: Place, now: float) -> Place:
    """Who does not answer is not heard while time passes; who does again is heard within it."""
    if not it.answers:
        return it if it.silent is not None else it._replace(silent=now)
    if it.silent is not None and it.process and it.facts and it.seen and it.seen.uid == it.facts.uid:
        return it._replace(silent=None, heard=it.process.told)
    return it
