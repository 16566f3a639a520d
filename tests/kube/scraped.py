"""The operator's metrics as they are scraped."""

from collections.abc import Iterator
from typing import NamedTuple

from kube.world import OperatedNamespace

Labels = dict[str, str]


class Series(NamedTuple):
    """One line of the scraped text."""

    name: str
    labels: Labels
    value: float


def parse_series(text: str) -> Iterator[Series]:
    for line in text.splitlines():
        if not line.startswith("#"):
            head, _, value = line.rpartition(" ")
            name, _, labels = head.partition("{")
            pairs = (pair.split("=", 1) for pair in labels.rstrip("}").split(",") if pair)
            yield Series(name, {key: quoted.strip('"') for key, quoted in pairs}, float(value))


async def metric_values(world: OperatedNamespace, name: str, **labels: str) -> list[float]:
    """Return the current values of one metric of the group."""
    all_series = parse_series((await world.operator.metrics.render(world.operator.read_model)).decode())
    required_labels = {"namespace": world.namespace, "group": world.fleet.group, **labels}
    return [
        series.value
        for series in all_series
        if series.name == name and required_labels.items() <= series.labels.items()
    ]
