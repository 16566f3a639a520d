"""`python -m simulation.exploration`: explore configurations and print how many states each has."""

import sys
import time

from simulation.exploration.configurations import CONFIGURATIONS, DEEP
from simulation.exploration.search import Exploration


def main(names: list[str]) -> None:
    """Explore the named configurations; without names, those of the tests."""
    for name in names or CONFIGURATIONS:
        started_at = time.process_time()
        coverage = Exploration((CONFIGURATIONS | DEEP)[name]).run()
        counts = f"{coverage.states:9,} states {coverage.transitions:10,} transitions {coverage.plans:7,} plans"
        print(f"{name:12} {counts} {time.process_time() - started_at:6.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
