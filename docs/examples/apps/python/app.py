"""Asks the sidecar for messages, works each, and says which went well; run it with `python app.py`."""

import json
import os
import signal
import sys
import time
from base64 import b64decode
from http.client import HTTPConnection, HTTPException


def work(message: dict) -> None:
    """Do what there is to do; an error means: again, later."""
    print(message["topic"], message["attempt"], b64decode(message["bodyBase64"]).decode(), flush=True)


def ask(sidecar: HTTPConnection, method: str, path: str, told: dict | None = None) -> dict:
    """Ask, and return the answer."""
    sidecar.request(method, path, json.dumps(told) if told else None)
    answer = sidecar.getresponse()
    text = answer.read().decode()
    if answer.status != 200:
        raise HTTPException(text)
    return json.loads(text)


def turn(sidecar: HTTPConnection) -> None:
    """Ask for messages, work them, and say what became of them."""
    done, failed = [], []
    for message in ask(sidecar, "GET", "/v1/messages?max=32&wait=10s")["messages"]:
        try:
            work(message)
            done.append(message["id"])
        except Exception as error:
            print(error, file=sys.stderr)
            failed.append(message["id"])
    for path, ids in (("/v1/acks", done), ("/v1/nacks", failed)):
        if ids:
            ask(sidecar, "POST", path, {"ids": ids})


signal.signal(signal.SIGTERM, lambda *_: sys.exit())
connection = HTTPConnection(os.environ.get("ROTA", "127.0.0.1:9912"), timeout=60)  # one that lasts
while True:
    try:
        turn(connection)
    except (OSError, HTTPException) as error:  # the sidecar is not there yet
        print(error, file=sys.stderr)
        connection.close()
        time.sleep(1)
