"""Entry point of the sidecar's container: `python -m rota.sidecar`."""

import asyncio
import os
import signal
import sys
from collections.abc import Mapping

# Set before the imports, which take half a second: the kernel drops signals to process 1 that have no handler.
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))

from rota import logs  # noqa: E402
from rota.sidecar.main import serve  # noqa: E402


def configure_logging(variables: Mapping[str, str]) -> None:
    """Configure logging by ROTA_LOG_LEVEL and ROTA_LOG_FORMAT; each log record names the pod."""
    pod = {"namespace": variables.get("POD_NAMESPACE"), "member": variables.get("POD_NAME")}
    fields = {field: value for field, value in pod.items() if value}
    logs.configure(variables.get("ROTA_LOG_LEVEL") or "info", variables.get("ROTA_LOG_FORMAT") or "json", fields)


def main() -> int:
    """Run the sidecar; return 2, and print one sentence, for an error in the pod's configuration."""
    try:
        configure_logging(os.environ)
        asyncio.run(serve(os.environ))
    except ValueError as error:
        print(f"rota sidecar: {error}", file=sys.stderr)  # noqa: T201 - for a user who reads the container's output
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
