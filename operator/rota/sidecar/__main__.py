"""`python -m rota.sidecar`: what the sidecar's container runs."""

import asyncio
import os
import signal
import sys

# Before the imports, which take half a second: a container's first process hears no signal for which it has no handler.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

from rota import logs  # noqa: E402
from rota.sidecar.main import serve  # noqa: E402


def main() -> int:
    """Run to an exit code: 2 for what the pod's maker must mend, in one sentence."""
    logs.begin(verbose=bool(os.environ.get("ROTA_VERBOSE")))
    try:
        asyncio.run(serve(os.environ))
    except ValueError as error:
        print(f"rota sidecar: {error}", file=sys.stderr)  # noqa: T201 - people read it
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
