"""`rota pipeline simulate` and `generate`: replay of history under other policies, and synthetic journals."""

# ruff: noqa: PLC0415 - Spark is imported by the command that needs it

import shutil
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from rota.cli.commands.pipeline.progress import Progress
from rota.cli.console.formatting import print_line
from rota.cli.console.inputs import YamlDocument, display_name, load_documents, of_kind, split_list
from rota.cli.console.output import print_table, print_value
from rota.model import single_line
from rota.pipeline.common.names import is_manifest_name
from rota.sentences import pluralize
from rota.spec import PolicySpec, parse_policy, policy_body

if TYPE_CHECKING:
    from pyspark.sql import Row, SparkSession

    from rota.pipeline.replay.job import Simulation

# The simulated policies; Spark ignores names that start with an underscore.
SIMULATED_POLICIES_FILE = "results/_policies.json"


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
    """Simulate, write the results, and print a line for each policy."""
    from rota.pipeline.report.report_data import count_problems, sum_by_policy

    results = run_simulation(spark, progress, policies, Path(to), source=source, days=days).results
    lines = [line.asDict() for line in sum_by_policy(results).collect()]
    problem_rows = count_problems(results).collect()
    problems: defaultdict[str, list[str]] = defaultdict(list)
    for row in problem_rows:
        problems[row["policy"]].append(row["problem"])
    rows = [_round_values(line) | {"unusable": problems[line["policy"]]} for line in lines]
    print_value(rows, output, lambda: _print_results(lines, problem_rows))


def _print_results(lines: list[dict[str, Any]], problem_rows: "list[Row]") -> None:
    from rota.pipeline.report.formatting import describe_problem, format_duration, format_value

    hours = max((line["hours"] or 0.0 for line in lines), default=0.0)
    table: list[dict[str, Any]] = []
    for line in lines:
        texts = {name: "-" if value is None else format_value(value) for name, value in line.items()}
        del texts["hours"]  # printed below the table
        table.append(texts)
    print_table(table)
    for row in problem_rows:
        print_line(describe_problem(row, int(lines[0]["groups"])))
    sums = f"Numbers are sums over up to {format_duration(hours * 3600)} of each group"
    print_line(f"{sums}; lag_mean is the sum of the groups' means, imbalance their mean")


def run_simulation(
    spark: "SparkSession",
    progress: Progress,
    policies: Mapping[str, PolicySpec],
    to: Path,
    *,
    source: str,
    days: int | None,
) -> "Simulation":
    """Simulate, write results/ and series/ into a folder, and return them as read from there."""
    from rota.pipeline.ingest.facts import load_source
    from rota.pipeline.replay.job import build_histories, persist_on_disk, replay_histories

    progress(f"reading {source}")
    histories = persist_on_disk(build_histories(load_source(spark, source, days)))
    groups = histories.count()
    tried = f"{len(policies) + 1} policies (recorded is one of them)"
    progress(f"simulating {pluralize(groups, 'group')} \N{MULTIPLICATION SIGN} {tried}")
    simulation = replay_histories(histories, policies)
    # `results` is removed first and written last, so a complete one proves that `series` is complete and belongs to it.
    shutil.rmtree(to / "results", ignore_errors=True)
    simulation.series.write.mode("overwrite").parquet(str(to / "series"))
    progress(f"writing {to / 'results'}")
    simulation.results.write.mode("overwrite").parquet(str(to / "results"))
    (to / SIMULATED_POLICIES_FILE).write_bytes(_bodies_of(policies))
    return read_simulation(spark, to)


def check_simulated(folder: Path, policies: Mapping[str, PolicySpec]) -> None:
    """Raise ValueError for an incomplete simulation, or policies that differ from the simulated ones."""
    incomplete = ValueError(f"{folder} contains no complete simulation; run `rota pipeline simulate` again")
    if not all((folder / name).exists() for name in ("results/_SUCCESS", "series/_SUCCESS", SIMULATED_POLICIES_FILE)):
        raise incomplete
    try:
        simulated = msgspec.json.decode((folder / SIMULATED_POLICIES_FILE).read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError:
        raise incomplete from None
    requested = msgspec.json.decode(_bodies_of(policies))
    for name, body in requested.items():
        if body != simulated.get(name):
            raise ValueError(f"Policy {name} was not simulated, or has changed since; simulate again")
    for name in sorted(simulated.keys() - requested.keys()):
        raise ValueError(f"Policy {single_line(name, 60)} was simulated, but is missing in --policies; add its file")


def _bodies_of(policies: Mapping[str, PolicySpec]) -> bytes:
    return msgspec.json.encode({name: policy_body(policy) for name, policy in policies.items()})


def read_simulation(spark: "SparkSession", folder: Path) -> "Simulation":
    """Return the tables that a simulation wrote into a folder."""
    from rota.pipeline.common.schemas import RESULTS, SERIES
    from rota.pipeline.replay.job import Simulation

    results = spark.read.schema(RESULTS).parquet(str(folder / "results"))
    return Simulation(results, spark.read.schema(SERIES).parquet(str(folder / "series")))


def _round_values(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def generate(spark: "SparkSession", progress: Progress, *, to: str, output: str, **options: Any) -> None:
    """Write a synthetic journal, and print its size."""
    from rota.pipeline.synthetic.generate import generate_journal

    progress(f"generating {pluralize(options['groups'], 'group')} in {to}")
    [row] = generate_journal(spark, to=Path(to), **options).collect()
    counts = row.asDict()
    print_value(counts, output, lambda: print_table([counts]))


def read_policies(files: str) -> dict[str, PolicySpec]:
    """Return the RebalancePolicies of the files by name; raise ValueError with the position of a mistake."""
    policies: dict[str, PolicySpec] = {}
    positions: dict[str, str] = {}
    for file in split_list(files):
        for document in _load_policy_documents(file):
            name = document.name
            position = document.position_of("metadata.name")
            _check_name(name, position)
            if name in policies:
                places = f"{positions[name]} and {position}"
                raise ValueError(f"RebalancePolicy {name} is defined twice, at {places}; remove one")
            policies[name] = document.parse(parse_policy)
            positions[name] = position
    if not policies:
        raise ValueError("--policies names no file; give one or more, separated by commas")
    return policies


def _check_name(name: str, position: str) -> None:
    if not name:
        raise ValueError(f"{position}: this RebalancePolicy has no name; give it one in metadata.name")
    if name == "recorded":
        raise ValueError(f"{position}: the name recorded is reserved for the policy in force; use another name")
    if not is_manifest_name(name):
        shown = single_line(name, 60)
        raise ValueError(f"{position}: {shown!r} is not a valid RebalancePolicy name; use a-z, 0-9, - and .")


def _load_policy_documents(file: str) -> list[YamlDocument]:
    policies = of_kind("RebalancePolicy", load_documents(file, "RebalancePolicies"))
    if not policies:
        raise ValueError(f"{display_name(file)} contains no RebalancePolicy; give a file with one or more")
    return policies
