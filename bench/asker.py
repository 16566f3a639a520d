"""A minimal app in mode Pull: `python -m bench.asker ADDRESS` requests and acknowledges messages, 32 at a time.

It uses two connections, each in a thread of its own.
"""

import http.client
import re
import sys
import threading
import time
from contextlib import suppress

_ID = re.compile(rb'"id":"([^"]*)"')


def consume(address: str) -> None:
    """Request and acknowledge messages until the process is stopped; parse no more of the JSON than the ids."""
    connection = http.client.HTTPConnection(address, 9912)
    while connection.sock is None:  # the sidecar listens once it has read the settings of mode Pull
        with suppress(ConnectionRefusedError):
            connection.connect()
        time.sleep(0.05)
    while True:
        connection.request("GET", "/v1/messages?max=32&wait=5s")
        ids = _ID.findall(connection.getresponse().read())
        if ids:
            body = b'{"ids":["' + b'","'.join(ids) + b'"]}'
            connection.request("POST", "/v1/acks", body)
            connection.getresponse().read()


if __name__ == "__main__":
    for _ in range(2):
        threading.Thread(target=consume, args=[sys.argv[1]]).start()
