"""`python -m loaded [FOLDER ...]`: run tests while six busy loops compete with them for the machine's cores.

No test may fail because a machine is slow. Each folder is a run of its own, with six times the time-out.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).parent
BUSY_LOOPS = 6
TIMEOUT_SECONDS = 6 * 600
EXIT_CODE_NO_TESTS = 5  # pytest's, for a folder whose tests were all left out


def main() -> int:
    """Run the folders one after another, and return 1 if a test failed in one of them."""
    parser = argparse.ArgumentParser(prog="python -m loaded", description=__doc__)
    parser.add_argument("folders", nargs="*", help="below tests/ (default: all)")
    parser.add_argument("--not-slow", action="store_true", help="leave out the slow tests")
    arguments = parser.parse_args()
    folders = arguments.folders or sorted({path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")})
    options = ["-m", "not slow"] if arguments.not_slow else []
    failed = []
    with _busy_loops():
        for folder in folders:
            started = time.monotonic()
            exit_code = _run(TESTS / folder, options)
            print(f"{folder}: exit code {exit_code} after {time.monotonic() - started:.0f} s", flush=True)
            if exit_code not in {0, EXIT_CODE_NO_TESTS}:
                failed.append(str(folder))
    print(f"failed: {', '.join(failed)}" if failed else "no test failed")
    return 1 if failed else 0


@contextmanager
def _busy_loops() -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(BUSY_LOOPS)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
        for loop in loops:
            loop.wait()


def _run(folder: Path, options: list[str]) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "--numprocesses=2", "--dist=loadfile", "--no-loadscope-reorder"]
    command += [f"--timeout={TIMEOUT_SECONDS}", *options, str(folder)]
    return subprocess.run(command, cwd=TESTS.parent, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
