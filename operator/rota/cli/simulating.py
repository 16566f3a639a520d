"""`rota pipeline simulate` and `generate`: what was, under other policies, and what might have been."""

# ruff: noqa: PLC0415 - Spark is imported by the command that needs it

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from rota.cli.given import UNREADABLE, name_of, text_of
from rota.cli.show import show, table
from rota.spec import Mistake, PolicySpec, policy_body, policy_spec

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from rota.pipeline.ingest import Facts
    from rota.pipeline.simulate import Simulation

TRIED = "results/_policies.json"  # what was simulated; Spark passes over names that begin so
SUMS = ("moves", "forced", "pause_seconds", "duplicates", "idle_member_hours")
MEANS = ("imbalance", "lag_mean")


def simulate(spark: "SparkSession", source: str, policies: str, to: str, *, days: int | None, output: str) -> None:
    """Simulate, write what came of it, and print a line for each policy."""
    from pyspark.sql import functions as F  # noqa: N812 - the name that everybody gives it

    from rota.pipeline.ingest import opened
    from rota.pipeline.manifests import check

    counts = [F.count("*").alias("groups"), F.count("problem").alias("problems")]
    measures = [F.sum(name).alias(name) for name in SUMS] + [F.avg(name).alias(name) for name in MEANS]
    given = policies_of(policies)
    check(given)
    results = played(spark, opened(spark, source, days), given, Path(to)).results
    lines = results.groupBy("policy").agg(*counts, *measures).orderBy("policy").collect()  # a line for each policy
    rows = [_rounded(line.asDict()) for line in lines]
    show(rows, output, lambda: table(rows))


def played(spark: "SparkSession", facts: "Facts", policies: Mapping[str, PolicySpec], to: Path) -> "Simulation":
    """Simulate, write results/ and series/ into a folder, and return them as they lie there."""
    from rota.pipeline.simulate import simulated

    made = simulated(facts, policies)
    shutil.rmtree(to / "results", ignore_errors=True)  # last to come and first to go: whoever finds it finds a whole
    made.series.write.mode("overwrite").parquet(str(to / "series"))
    made.results.write.mode("overwrite").parquet(str(to / "results"))
    (to / TRIED).write_bytes(_bodies_of(policies))
    return lying(spark, to)


def check_tried(folder: Path, policies: Mapping[str, PolicySpec]) -> None:
    """Refuse policies that are others than were simulated: figures would be told of what nobody tried."""
    given = msgspec.json.decode(_bodies_of(policies))
    tried = msgspec.json.decode((folder / TRIED).read_bytes()) if (folder / TRIED).exists() else {}
    for name, body in given.items():
        if body != tried.get(name):
            raise ValueError(f"Policy {name} was not simulated, or is not what it was then; simulate again")


def _bodies_of(policies: Mapping[str, PolicySpec]) -> bytes:
    return msgspec.json.encode({name: policy_body(it) for name, it in policies.items()})


def lying(spark: "SparkSession", folder: Path) -> "Simulation":
    """Return what a simulation wrote into a folder."""
    from rota.pipeline.schemas import RESULTS, SERIES
    from rota.pipeline.simulate import Simulation

    def read(name: str, schema: Any) -> "DataFrame":
        if not (folder / name / "_SUCCESS").exists():
            raise ValueError(f"{folder} holds no whole simulation; run `rota pipeline simulate` again")
        return spark.read.schema(schema).parquet(str(folder / name))

    return Simulation(read("results", RESULTS), read("series", SERIES))


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def generate(spark: "SparkSession", to: str, output: str, **given: Any) -> None:
    """Write a journal, and say how large it is."""
    from rota.pipeline.generate import generated

    [told] = generated(spark, to=Path(to), **given).collect()
    made = told.asDict()
    show(made, output, lambda: table([made]))


def policies_of(files: str) -> dict[str, PolicySpec]:
    """Read the RebalancePolicies in some files, by name."""
    found: dict[str, PolicySpec] = {}
    for file in filter(None, map(str.strip, files.split(","))):
        for body in _bodies(file):
            name = str(name_of(body) or "")
            if not name:
                raise ValueError(f"{file} holds a RebalancePolicy without a name; give it one")
            if name in found:
                raise ValueError(f"RebalancePolicy {name} is given twice; leave one of them")
            if name == "recorded":
                raise ValueError(
                    f"{file} names a RebalancePolicy recorded, as what was really used is called; rename it"
                )
            try:
                found[name] = policy_spec(body)
            except Mistake as mistake:
                raise ValueError(f"RebalancePolicy {name}: {mistake}") from None
    if not found:
        raise ValueError("--policies names no file; give one or more, separated by commas")
    return found


def _bodies(file: str) -> list[Mapping[str, Any]]:
    text = text_of(file)
    try:
        bodies = list(yaml.safe_load_all(text))
    except UNREADABLE:
        raise ValueError(f"{file} is no YAML; give a file with RebalancePolicies") from None
    found: list[Mapping[str, Any]] = [
        body for body in bodies if isinstance(body, dict) and body.get("kind") == "RebalancePolicy"
    ]
    if not found:
        raise ValueError(f"{file} holds no RebalancePolicy; give a file with one or more")
    return found
