"""`python -m rota.sidecar.prestop`: the hook that the kubelet runs in the sidecar's container when the pod ends.

It tells the sidecar to drain, over a Unix socket in a volume that no other container mounts: what the kubelet itself
sends can carry no secret. It imports little, for messages wait until it has run.
"""

import os
import socket
import sys

SOCKET = "prestop.sock"
FOLDER = "/run/rota"
ANSWER_SECONDS = 5.0


def main() -> int:
    """Have the drain begin; how long it takes is up to the hooks of the app's containers."""
    folder = os.environ.get("ROTA_RUN") or FOLDER
    try:
        os.chdir(folder)  # a socket's path has at most 107 characters, so it is named from here
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(SOCKET)
            if connection.recv(1):
                return 0
            reason = "the sidecar ended meanwhile"
    except OSError as error:
        reason = error.strerror or str(error)
    sys.stderr.write(f"rota sidecar: cannot start the drain through {folder}/{SOCKET}: {reason}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main())
