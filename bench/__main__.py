"""`python -m bench [NAME...]`: each benchmark runs Rota and a peer on the same work and prints the ratio."""

import sys
from collections.abc import Callable, Iterator

from bench import (
    advice,
    attacks,
    brokers,
    events,
    executors,
    ground,
    handover,
    joins,
    journal,
    memory,
    pipeline,
    planner,
    rebalance,
    scale,
    settings,
    sidecar,
    strategies,
    watching,
)
from ground.report import Missing, say

BENCHMARKS: dict[str, Callable[[], Iterator[object]]] = {  # each yields the rows of its table
    "ground": ground.rows,
    "strategies": strategies.rows,
    "planner": planner.rows,
    "brokers": brokers.rows,
    "sidecar": sidecar.rows,
    "memory": memory.rows,
    "attacks": attacks.rows,
    "handover": handover.rows,
    "settings": settings.rows,
    "joins": joins.rows,
    "rebalance": rebalance.rows,
    "scale": scale.rows,
    "journal": journal.rows,
    "watching": watching.rows,
    "events": events.rows,
    "pipeline": pipeline.rows,
    "executors": executors.rows,
    "advice": advice.rows,
}


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all of them, and print a table of each."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"bench: there is no benchmark {unknown[0]}; choose among {', '.join(BENCHMARKS)}.", file=sys.stderr)
        return 2
    for name in names or BENCHMARKS:
        print(f"\n## {name}\n\n| what | ours | peer | ours / peer | target |\n|---|---|---|---|---|")
        try:
            for row in BENCHMARKS[name]():
                print(row, flush=True)
        except Missing as missing:
            say(f"{name} is left out: {missing}.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
