"""`python -m rota.sidecar`: what the sidecar's container runs."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping

# Before the imports, which take half a second: a container's first process hears no signal for which it has no handler.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

from rota import logs  # noqa: E402
from rota.sidecar.main import serve  # noqa: E402


def begin_logs(variables: Mapping[str, str]) -> None:
    """Log as ROTA_LOG_LEVEL and ROTA_LOG_FORMAT say; each record names the pod."""
    pod = {"namespace": variables.get("POD_NAMESPACE"), "member": variables.get("POD_NAME")}
    named = {field: value for field, value in pod.items() if value}
    logs.begin(variables.get("ROTA_LOG_LEVEL") or "info", variables.get("ROTA_LOG_FORMAT") or "json", named)


def main() -> int:
    """Run to an exit code: 2 for what the pod's maker must mend, in one sentence."""
    try:
        begin_logs(os.environ)
        asyncio.run(serve(os.environ))
    except ValueError as error:
        print(f"rota sidecar: {error}", file=sys.stderr)  # noqa: T201 - people read it
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
