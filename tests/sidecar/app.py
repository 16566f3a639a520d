"""An app as users write one, controlled by a file of rules: `python app.py ADDRESS PORT LOG RULES [pull]`.

It listens at the port for pushed messages; with `pull`, it requests messages from the port and acks or nacks each.

RULES is a JSON file with a list of rules, re-read when it changes; the first rule that matches a message applies.
`numbers`, `queues`, `attempts` and `topics` restrict the messages that a rule matches; `status` is the response, and
`seconds` the delay before it; `act` may be `hang` (never respond), `hold` (respond once another rule applies) or `die`.
LOG gets a line when a request arrives, another before the response, and one when the app ends, unless it is killed.
"""

import asyncio
import base64
import json
import os
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

from aiohttp import ClientError, ClientSession, web

Message = dict[str, Any]


class App:
    """Logs each request and responds by the rules."""

    def __init__(self, log: Path, rules: Path) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._rules_path = rules
        self._rules_mtime = 0
        self._rules: list[Message] = []
        self._numbers = count()

    async def pull(self, url: str) -> None:
        """Request messages repeatedly; retry after a pause if the sidecar does not respond."""
        async with ClientSession(url) as session:
            while True:
                try:
                    async with session.get("/v1/messages?max=8&wait=5s") as response:
                        messages = (await response.json())["messages"]
                    await asyncio.gather(*(self._handle_pulled(session, message) for message in messages))
                except ClientError:
                    await asyncio.sleep(0.2)

    async def _handle_pulled(self, session: ClientSession, pulled: Message) -> None:
        name = self._next_name()
        body = base64.b64decode(pulled.pop("bodyBase64"))
        message = {**pulled, "generation": 0, "number": int(body.split()[0])}
        self.log(name=name, begin=time.monotonic(), messages=[message])
        rule = self._find_rule([message])
        if rule.get("act") == "die":
            self.die()
        if rule.get("act") == "hang":
            return
        await asyncio.sleep(rule.get("seconds", 0))
        status = rule.get("status", 204)
        self.log(name=name, end=time.monotonic(), status=status)
        async with session.post("/v1/acks" if status == 204 else "/v1/nacks", json={"ids": [pulled["id"]]}):
            pass

    def die(self) -> NoReturn:
        """End at once, without responding to open requests."""
        self.log(died=time.monotonic())
        os._exit(9)

    def log(self, **fields: object) -> None:
        """Append a line to the log by a single write."""
        os.write(self._log, json.dumps(fields).encode() + b"\n")

    async def handle_push(self, request: web.Request) -> web.Response:
        """Respond to a request with one message or a batch."""
        begin = time.monotonic()
        name = self._next_name()
        messages = _messages(request.headers, await request.read())
        self.log(name=name, begin=begin, messages=messages)
        while (rule := self._find_rule(messages)).get("act") == "hold":  # noqa: ASYNC110 - rules are in a file
            await asyncio.sleep(0.3)
        if rule.get("act") == "die":
            self.die()
        if rule.get("act") == "hang":
            await asyncio.Event().wait()
        await asyncio.sleep(rule.get("seconds", 0))
        status = rule.get("status", 204)
        self.log(name=name, end=time.monotonic(), status=status)
        return web.Response(status=status)

    def _next_name(self) -> str:
        return f"{os.getpid()}/{next(self._numbers)}"

    def _find_rule(self, messages: list[Message]) -> Message:
        for rule in self._read_rules():
            if any(_matches(rule, message) for message in messages):
                return rule
        return {}

    def _read_rules(self) -> list[Message]:
        try:
            mtime = self._rules_path.stat().st_mtime_ns
            if mtime != self._rules_mtime:
                self._rules = json.loads(self._rules_path.read_text())
                self._rules_mtime = mtime
        except FileNotFoundError:
            self._rules = []
        return self._rules


def _messages(headers: Any, body: bytes) -> list[Message]:
    if headers.get("content-type", "").startswith("application/cloudevents-batch+json"):
        return [_message(event, base64.b64decode(event["data_base64"])) for event in json.loads(body)]
    event = {name.lower().removeprefix("ce-"): value for name, value in headers.items()}
    return [_message(event, body)]


def _message(event: Message, body: bytes) -> Message:
    return {
        "id": event["id"],
        "topic": event["rocketmqtopic"],
        "broker": event["rocketmqbroker"],
        "queue": int(event["rocketmqqueue"]),
        "offset": int(event["rocketmqoffset"]),
        "attempt": int(event["rotaattempt"]),
        "generation": int(event["rotageneration"]),
        "number": int(body.split()[0]),
    }


def _matches(rule: Message, message: Message) -> bool:
    restrictions = (("numbers", "number"), ("queues", "queue"), ("attempts", "attempt"), ("topics", "topic"))
    return all(message[field] in rule.get(name, [message[field]]) for name, field in restrictions)


def main(address: str, port: str, log: str, rules: str, pull: str = "") -> NoReturn:
    """Serve or pull until killed; on SIGTERM end at once, as most apps do."""
    app = App(Path(log), Path(rules))
    if pull:
        asyncio.run(app.pull(f"http://{address}:{port}"))
    server = web.Application()
    server.add_routes([web.post("/", app.handle_push)])
    web.run_app(server, host=address, port=int(port), print=None, access_log=None, shutdown_timeout=0.1)
    app.log(stopped=time.monotonic())
    sys.exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
