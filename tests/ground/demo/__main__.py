"""Entry point of the demo: reads DEMO_SECONDS. It imports little, so that Ctrl-C is answered in good order early on."""

import os
import sys

from ground.report import plainly

MOST_SECONDS = 7 * 24 * 3600


def main() -> int:
    """Run the demo and return its exit code."""
    value = os.environ.get("DEMO_SECONDS", "")
    fits = value.isascii() and value.isdigit() and len(value) < 10 and int(value) <= MOST_SECONDS
    if value and not fits:
        advice = f"give whole seconds, from 0 to {MOST_SECONDS}: so long the fleet stays up after it was shown"
        print(f"demo: DEMO_SECONDS is {value!r}; {advice}.", file=sys.stderr)
        return 2
    return plainly("demo", lambda: show(int(value) if value else None))


def show(seconds: int | None) -> None:
    """Run the demo and keep the fleet up for this many seconds; None: until Ctrl-C, if the input is a terminal."""
    from ground.demo.story import run  # noqa: PLC0415 - this import takes a moment, in which Ctrl-C may be pressed

    run(seconds)


if __name__ == "__main__":
    sys.exit(main())
