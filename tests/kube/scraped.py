"""The operator's metrics as they are scraped."""

from collections.abc import Iterator
from typing import NamedTuple

from kube.world import OperatedNamespace

Labels = dict[str, str]


class Series(NamedTuple):
    """One line of what is scraped."""

    name: str
    labels: Labels
    value: float


def series(text: str) -> Iterator[Series]:
    for line in text.splitlines():
        if not line.startswith("#"):
            head, _, value = line.rpartition(" ")
            name, _, labels = head.partition("{")
            pairs = (it.split("=", 1) for it in labels.rstrip("}").split(",") if it)
            yield Series(name, {key: told.strip('"') for key, told in pairs}, float(value))


async def scraped(world: OperatedNamespace, name: str, **labels: str) -> list[float]:
    """Return the values of one metric of the world's group, as they are scraped now."""
    found = series((await world.operator.measures.render(world.operator.sight)).decode())
    wanted = {"namespace": world.namespace, "group": world.fleet.group, **labels}
    return [it.value for it in found if it.name == name and wanted.items() <= it.labels.items()]
