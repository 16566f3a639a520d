"""An app that asks: `python -m bench.asker ADDRESS` takes messages, 32 at a time over two connections, and is done."""

import http.client
import re
import sys
import threading
import time
from contextlib import suppress

_ID = re.compile(rb'"id":"([^"]*)"')


def ask(address: str) -> None:
    """Ask, and acknowledge, until ended; as little JSON as will do."""
    there = http.client.HTTPConnection(address, 9912)
    while there.sock is None:  # the sidecar answers once it knows that it will be asked
        with suppress(ConnectionRefusedError):
            there.connect()
        time.sleep(0.05)
    while True:
        there.request("GET", "/v1/messages?max=32&wait=5s")
        names = _ID.findall(there.getresponse().read())
        if names:
            body = b'{"ids":["' + b'","'.join(names) + b'"]}'
            there.request("POST", "/v1/acks", body)
            there.getresponse().read()


if __name__ == "__main__":
    for _ in range(2):
        threading.Thread(target=ask, args=[sys.argv[1]]).start()
