"""Read DEMO_SECONDS, and show it all; little is loaded before a Ctrl-C is answered in good order."""

import os
import sys

from ground.report import plainly

MOST_SECONDS = 7 * 24 * 3600


def main() -> int:
    """Run the demo to its exit code."""
    told = os.environ.get("DEMO_SECONDS", "")
    fits = told.isascii() and told.isdigit() and len(told) < 10 and int(told) <= MOST_SECONDS
    if told and not fits:
        wish = f"give whole seconds, from 0 to {MOST_SECONDS}: so long the fleet stays up after it was shown"
        print(f"demo: DEMO_SECONDS is {told!r}; {wish}.", file=sys.stderr)
        return 2
    return plainly("demo", lambda: show(int(told) if told else None))


def show(seconds: int | None) -> None:
    """Show it, and leave the fleet up for so long; None: until Ctrl-C where somebody can press it."""
    from ground.demo.story import run  # noqa: PLC0415 - it takes a moment to load, in which Ctrl-C may be pressed

    run(seconds)


if __name__ == "__main__":
    sys.exit(main())
