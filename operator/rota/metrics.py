"""What collects metrics and renders them as Prometheus reads them; their names stand where they are counted."""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[str, ...]  # values, in the order of the metric's own


@dataclass(frozen=True)
class Metric:
    """What a metric is called and what it tells."""

    name: str
    help: str
    labels: Labels = ()

    def head(self, kind: str) -> Iterator[str]:
        """Yield the lines that come before its samples."""
        yield f"# HELP {self.name} {self.help}"
        yield f"# TYPE {self.name} {kind}"

    def samples(self, values: Iterable[tuple[Labels, float]], suffix: str = "", extra: str = "") -> Iterator[str]:
        """Yield the lines of samples."""
        told = ",".join([*(f'{name}="%s"' for name in self.labels), *([extra] if extra else [])])
        form = f"{self.name}{suffix}{{{told}}} %s" if told else f"{self.name}{suffix} %s"
        count = len(self.labels)
        for labels, value in values:
            if len(labels) != count:
                raise ValueError(f"{self.name}: {labels} is longer or shorter than {self.labels}")
            yield form % (*_escaped(labels), _number(value))


@dataclass(frozen=True)
class Counter(Metric):
    """Something that only grows."""

    _values: dict[Labels, float] = field(default_factory=dict, init=False, compare=False)

    def add(self, *labels: str, by: float = 1) -> None:
        """Count."""
        self._values[labels] = self._values.get(labels, 0) + by

    def keep(self, known: Callable[[Labels], bool]) -> None:
        """Forget what is about somebody who is not known any more."""
        for labels in [labels for labels in self._values if not known(labels)]:
            del self._values[labels]

    def lines(self) -> Iterator[str]:
        """Yield it as text."""
        yield from self.head("counter")
        yield from self.samples(sorted((self._values or ({} if self.labels else {(): 0.0})).items()))


@dataclass(frozen=True)
class Gauge(Metric):
    """Something that is looked up when it is asked for, so that it is never old."""

    look: Callable[[], Mapping[Labels, float]] = field(default=dict, kw_only=True)
    kind: str = field(default="gauge", kw_only=True)  # or counter: something else counts it

    def lines(self) -> Iterator[str]:
        """Yield it as text."""
        yield from self.head(self.kind)
        yield from self.samples(self.look().items())


@dataclass(frozen=True)
class Histogram(Metric):
    """How often something took how long."""

    bounds: tuple[float, ...] = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
    _values: dict[Labels, tuple[list[int], list[float]]] = field(default_factory=dict, init=False, compare=False)

    def observe(self, value: float, *labels: str, times: int = 1) -> None:
        """Note one, or several of the same."""
        found = self._values.get(labels)
        if found is None:
            found = self._values[labels] = [0] * (len(self.bounds) + 1), [0.0]
        found[0][bisect_left(self.bounds, value)] += times
        found[1][0] += value * times

    def keep(self, known: Callable[[Labels], bool]) -> None:
        """Forget what is about somebody who is not known any more."""
        for labels in [labels for labels in self._values if not known(labels)]:
            del self._values[labels]

    def lines(self) -> Iterator[str]:
        """Yield it as text."""
        yield from self.head("histogram")
        bounds = [f'le="{bound}"' for bound in [*map(_number, self.bounds), "+Inf"]]
        for labels, (counts, total) in sorted(self._values.items()):
            for bound, under in zip(bounds, accumulate(counts), strict=True):
                yield from self.samples([(labels, under)], "_bucket", bound)
            yield from self.samples([(labels, total[0])], "_sum")
            yield from self.samples([(labels, sum(counts))], "_count")


def render(metrics: Iterable[Counter | Gauge | Histogram]) -> str:
    """Write metrics as Prometheus reads them."""
    return "\n".join([*(line for metric in metrics for line in metric.lines()), ""])


def _number(value: float) -> str:
    if type(value) is int:
        return str(value)
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _escaped(labels: Labels) -> Iterable[str]:
    """Escape what has to be; hardly ever anything, which is seen sooner of all of them together."""
    every = "".join(labels)
    if '"' in every or "\\" in every or "\n" in every:
        return [text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for text in labels]
    return labels
