"""`rota pipeline simulate` and `generate`: what was, under other policies, and what might have been."""

# ruff: noqa: PLC0415 - Spark is imported by the command that needs it

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rota.cli.commands.pipeline.progress import Progress
from rota.cli.console.formatting import say
from rota.cli.console.inputs import Document, documents, name_of, spelled
from rota.cli.console.output import show, table
from rota.model import plain
from rota.pipeline.common.names import is_manifest_name
from rota.sentences import count
from rota.spec import PolicySpec, policy_body, policy_spec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

    from rota.pipeline.replay.job import Simulation

TRIED = "results/_policies.json"  # what was simulated; Spark passes over names that begin so


def simulate(
    spark: "SparkSession",
    progress: Progress,
    *,
    source: str,
    policies: Mapping[str, PolicySpec],
    to: str,
    days: int | None,
    output: str,
) -> None:
    """Simulate, write what came of it, and print a line for each policy."""
    from rota.pipeline.report.report_data import by_policy, problems

    results = played(spark, progress, policies, Path(to), source=source, days=days).results
    lines = [line.asDict() for line in by_policy(results).collect()]  # a line for each policy
    why = problems(results).collect()
    of_each = {line["policy"]: [it["problem"] for it in why if it["policy"] == line["policy"]] for line in lines}
    told = [_rounded(line) | {"unusable": of_each[line["policy"]]} for line in lines]
    show(told, output, lambda: _tell(lines, why))


def _tell(lines: list[dict[str, Any]], why: "list[Row]") -> None:
    from rota.pipeline.report.formatting import figure, span, unusable

    hours = max((line["hours"] or 0.0 for line in lines), default=0.0)
    shown = [{name: value for name, value in line.items() if name != "hours"} for line in lines]
    table([{name: "-" if value is None else figure(value) for name, value in line.items()} for line in shown])
    for row in why:
        say(unusable(row, int(lines[0]["groups"])))
    sums = f"Figures are sums over up to {span(hours * 3600)} of each group"
    say(f"{sums}; lag_mean is the sum of the groups' means, imbalance their mean")


def played(
    spark: "SparkSession",
    progress: Progress,
    policies: Mapping[str, PolicySpec],
    to: Path,
    *,
    source: str,
    days: int | None,
) -> "Simulation":
    """Simulate, write results/ and series/ into a folder, and return them as they lie there."""
    from rota.pipeline.ingest.facts import opened
    from rota.pipeline.replay.job import kept, replayed, stories

    progress(f"reading {source}")
    told = kept(stories(opened(spark, source, days)))
    many, tried = told.count(), len(policies) + 1
    progress(f"simulating {count(many, 'group')} \N{MULTIPLICATION SIGN} {tried} policies (recorded is one of them)")
    made = replayed(told, policies)
    shutil.rmtree(to / "results", ignore_errors=True)  # last to come and first to go: whoever finds it finds a whole
    made.series.write.mode("overwrite").parquet(str(to / "series"))
    progress(f"writing {to / 'results'}")
    made.results.write.mode("overwrite").parquet(str(to / "results"))
    (to / TRIED).write_bytes(_bodies_of(policies))
    return lying(spark, to)


def check_tried(folder: Path, policies: Mapping[str, PolicySpec]) -> None:
    """Refuse half a simulation, and policies that are others than were simulated: nobody tried them."""
    half = ValueError(f"{folder} holds no whole simulation; run `rota pipeline simulate` again")
    if not all((folder / name).exists() for name in ("results/_SUCCESS", "series/_SUCCESS", TRIED)):
        raise half
    try:
        tried = msgspec.json.decode((folder / TRIED).read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError:
        raise half from None
    given = msgspec.json.decode(_bodies_of(policies))
    for name, body in given.items():
        if body != tried.get(name):
            raise ValueError(f"Policy {name} was not simulated, or is not what it was then; simulate again")
    for name in sorted(tried.keys() - given.keys()):
        raise ValueError(f"Policy {plain(name, 60)} was simulated, but is in none of the files; give its file, too")


def _bodies_of(policies: Mapping[str, PolicySpec]) -> bytes:
    return msgspec.json.encode({name: policy_body(it) for name, it in policies.items()})


def lying(spark: "SparkSession", folder: Path) -> "Simulation":
    """Return what a simulation wrote into a folder."""
    from rota.pipeline.common.schemas import RESULTS, SERIES
    from rota.pipeline.replay.job import Simulation

    def read(name: str, schema: Any) -> "DataFrame":
        return spark.read.schema(schema).parquet(str(folder / name))

    return Simulation(read("results", RESULTS), read("series", SERIES))


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def generate(spark: "SparkSession", progress: Progress, *, to: str, output: str, **given: Any) -> None:
    """Write a journal, and say how large it is."""
    from rota.pipeline.synthetic.generate import generated

    progress(f"inventing {count(given['groups'], 'group')}, and writing {to}")
    [told] = generated(spark, to=Path(to), **given).collect()
    made = told.asDict()
    show(made, output, lambda: table([made]))


def policies_of(files: str) -> dict[str, PolicySpec]:
    """Read the RebalancePolicies in some files, by name; a mistake is a sentence that says where."""
    found: dict[str, PolicySpec] = {}
    places: dict[str, str] = {}
    for file in filter(None, map(str.strip, files.split(","))):
        for it in _policies(file):
            name = str(name_of(it.body) or "")
            _check_name(name, it)
            if name in found:
                first, again = places[name], it.at("metadata.name")
                raise ValueError(f"RebalancePolicy {name} is given twice, {first} and {again}; leave one of them")
            found[name] = it.parsed(policy_spec)
            places[name] = it.at("metadata.name")
    if not found:
        raise ValueError("--policies names no file; give one or more, separated by commas")
    return found


def _check_name(name: str, it: Document) -> None:
    where = it.at("metadata.name")
    if not name:
        raise ValueError(f"{where}: this RebalancePolicy has no name; give it one in metadata.name")
    if name == "recorded":
        raise ValueError(f"{where}: recorded is what the policy that was really used is called; rename yours")
    if not is_manifest_name(name):
        raise ValueError(f"{where}: {plain(name, 60)!r} cannot be a RebalancePolicy's name; take a-z, 0-9, - and .")


def _policies(file: str) -> list[Document]:
    found = [it for it in documents(file, "RebalancePolicies") if it.body.get("kind") == "RebalancePolicy"]
    if not found:
        raise ValueError(f"{spelled(file)} holds no RebalancePolicy; give a file with one or more")
    return found
