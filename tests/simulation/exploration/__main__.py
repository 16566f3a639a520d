"""`python -m simulation.exploration`: go through configurations and say how much there was."""

import sys
import time

from simulation.exploration.configurations import CONFIGURATIONS, DEEP
from simulation.exploration.search import Exploration


def main(names: list[str]) -> None:
    """Go through the named configurations, or those that tests go through."""
    for name in names or CONFIGURATIONS:
        begun = time.process_time()
        found = Exploration((CONFIGURATIONS | DEEP)[name]).run()
        told = f"{found.states:9,} states {found.transitions:10,} transitions {found.plans:7,} plans"
        print(f"{name:12} {told} {time.process_time() - begun:6.1f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
