"""`rota pipeline simulate` and `generate`: replay histories under other policies, and write synthetic journals."""

# ruff: noqa: PLC0415 - Spark is imported by the command that needs it

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rota.cli.commands.pipeline.opened_lake import OpenedLake
from rota.cli.commands.pipeline.progress import Progress
from rota.cli.console.formatting import print_line
from rota.cli.console.inputs import YamlDocument, display_name, load_documents, of_kind, split_list
from rota.cli.console.output import print_table, print_value
from rota.model import single_line
from rota.object_store import ObjectStore
from rota.pipeline.common.names import is_manifest_name
from rota.sentences import pluralize
from rota.spec import PolicySpec, parse_policy

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession

    from rota.pipeline.replay.job import Simulation
    from rota.pipeline.synthetic.rates import RecordedRates


def simulate(
    spark: "SparkSession",
    progress: Progress,
    *,
    opened: OpenedLake,
    policies: Mapping[str, PolicySpec],
    days: int | None,
    output: str,
    **_: Any,
) -> None:
    """Simulate, write the results, and print a line for each policy."""
    from rota.pipeline.report.report_data import count_problems, sum_by_policy

    histories = read_histories(spark, progress, opened, days)
    results = run_simulation(progress, histories, policies, opened).results
    opened.publish()
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


def read_histories(spark: "SparkSession", progress: Progress, opened: OpenedLake, days: int | None) -> "DataFrame":
    """Return the history of each group, which Spark computes once and keeps on disk."""
    from rota.pipeline.history.reading.buckets import read_history
    from rota.pipeline.replay.group_history import REPLAYED_KINDS
    from rota.pipeline.replay.job import build_histories, persist_on_disk

    progress("reading the history")
    history = read_history(spark, opened.lake, opened.snapshot, REPLAYED_KINDS, opened.first_day(days))
    return persist_on_disk(build_histories(history))


def run_simulation(
    progress: Progress, histories: "DataFrame", policies: Mapping[str, PolicySpec], opened: OpenedLake
) -> "Simulation":
    """Simulate, write the marts `results` and `series`, and return the written tables."""
    from rota.pipeline.replay.job import Simulation, replay_histories

    groups = histories.count()
    tried = f"{len(policies) + 1} policies (recorded is one of them)"
    progress(f"simulating {pluralize(groups, 'group')} \N{MULTIPLICATION SIGN} {tried}")
    simulation = replay_histories(histories, policies)
    series = opened.write("marts/series", simulation.series)
    progress("writing the results")
    return Simulation(opened.write("marts/results", simulation.results), series)


def _round_values(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}


def generate(
    spark: "SparkSession", progress: Progress, *, journal: ObjectStore, output: str, to: str, **options: Any
) -> None:
    """Write a synthetic journal into a lake, and print its size."""
    from rota.pipeline.synthetic.generate import generate_journal

    progress(f"generating {pluralize(options['groups'], 'group')} in {to}")
    [row] = generate_journal(spark, journal=journal, **options).collect()
    counts = row.asDict()
    print_value(counts, output, lambda: print_table([counts]))


def read_recorded_rates(file: str | None, scale: float | None) -> "RecordedRates | None":
    """Return the message rates of a file, times a scale (1 by default); None: rates are generated."""
    from rota.pipeline.synthetic.rates import read_rates

    if file is None:
        if scale is not None:
            raise ValueError("--scale multiplies recorded rates; name their file by --rates, too")
        return None
    return read_rates(Path(file), 1.0 if scale is None else scale)


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
