"""preStop hook of the sidecar's container: the kubelet runs `python -m rota.sidecar.prestop` when the pod ends.

The hook starts the drain over a Unix socket in a volume that no other container mounts, because an HTTP hook of the
kubelet cannot carry a secret. It imports little, to start fast: before it has connected, no queue is handed over.
"""

import os
import socket
import sys

SOCKET_NAME = "prestop.sock"
DEFAULT_FOLDER = "/run/rota"
ANSWER_SECONDS = 5.0  # timeout for the sidecar's answer


def main() -> int:
    """Start the drain; return 0, or 1 if that fails. The hooks of the app's containers wait for the drain's end."""
    folder = os.environ.get("ROTA_RUN") or DEFAULT_FOLDER
    try:
        os.chdir(folder)  # a Unix socket's path has at most 107 characters: use a relative one
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(SOCKET_NAME)
            if connection.recv(1):  # sent once the drain has started
                return 0
            reason = "the sidecar has already stopped"
    except OSError as error:
        reason = error.strerror or str(error)
    sys.stderr.write(f"rota sidecar: cannot start the drain through {folder}/{SOCKET_NAME}: {reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
