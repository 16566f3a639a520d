"""Requests messages from the sidecar, processes each, and acknowledges or rejects it; run it with `python app.py`."""

import json
import os
import signal
import sys
import time
from base64 import b64decode
from http.client import HTTPConnection, HTTPException


def process(message: dict) -> None:
    """Process a message; after an error it is retried later."""
    print(message["topic"], message["attempt"], b64decode(message["bodyBase64"]).decode(), flush=True)


def request(sidecar: HTTPConnection, method: str, path: str, body: dict | None = None) -> dict:
    """Send a request and return the response."""
    sidecar.request(method, path, json.dumps(body) if body else None)
    response = sidecar.getresponse()
    text = response.read().decode()
    if response.status != 200:
        raise HTTPException(text)
    return json.loads(text)


def process_messages(sidecar: HTTPConnection) -> None:
    """Request messages, process them, and send acks and nacks."""
    done = []
    failed = []
    for message in request(sidecar, "GET", "/v1/messages?max=32&wait=10s")["messages"]:
        try:
            process(message)
            done.append(message["id"])
        except Exception as error:
            print(error, file=sys.stderr)
            failed.append(message["id"])
    for path, ids in (("/v1/acks", done), ("/v1/nacks", failed)):
        if ids:
            request(sidecar, "POST", path, {"ids": ids})


signal.signal(signal.SIGTERM, lambda *_: sys.exit())
connection = HTTPConnection(os.environ.get("ROTA", "127.0.0.1:9912"), timeout=60)  # persistent
while True:
    try:
        process_messages(connection)
    except (OSError, HTTPException) as error:  # the sidecar has not started yet, or was restarted
        print(error, file=sys.stderr)
        connection.close()
        time.sleep(1)
