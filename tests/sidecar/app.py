"""An app as users write one, that does as it is told: `python app.py ADDRESS PORT LOG RULES [asks]`.

It is posted to at that port; or, with a last word, asks there for messages, and says yes or no to each.

RULES is a JSON file, read anew whenever it changes: a list of what to do, of which the first that fits holds. What is
named under `numbers`, `queues`, `attempts` or `topics` are the messages it is about; `status` and `seconds` say what is
answered, and when; `act` may be `hang` (never answer), `hold` (answer once another rule holds) or `die`. LOG gets a
line when a request comes, another one before it is answered, and one when the app ends, unless it is killed.
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
    """What came, and what is answered."""

    def __init__(self, log: Path, rules: Path) -> None:
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._path, self._seen, self._rules = rules, 0, list[Message]()
        self._numbers = count()

    async def ask(self, there: str) -> None:
        """Ask, again and again; who is not there is asked a moment later."""
        async with ClientSession(there) as session:
            while True:
                try:
                    async with session.get("/v1/messages?max=8&wait=5s") as answer:
                        handed = (await answer.json())["messages"]
                    await asyncio.gather(*(self._handed(session, it) for it in handed))
                except ClientError:
                    await asyncio.sleep(0.2)

    async def _handed(self, session: ClientSession, handed: Message) -> None:
        name, body = f"{os.getpid()}/{next(self._numbers)}", base64.b64decode(handed.pop("bodyBase64"))
        message = {**handed, "generation": 0, "number": int(body.split()[0])}
        self.note(name=name, begin=time.monotonic(), messages=[message])
        rule = self._rule([message])
        if rule.get("act") == "die":
            self.die()
        if rule.get("act") == "hang":
            return
        await asyncio.sleep(rule.get("seconds", 0))
        status = rule.get("status", 204)
        self.note(name=name, end=time.monotonic(), status=status)
        async with session.post("/v1/acks" if status == 204 else "/v1/nacks", json={"ids": [handed["id"]]}):
            pass

    def die(self) -> NoReturn:
        """End at once, with whatever is open."""
        self.note(died=time.monotonic())
        os._exit(9)

    def note(self, **told: object) -> None:
        """Put a line into the log, whole, at once."""
        os.write(self._log, json.dumps(told).encode() + b"\n")

    async def posted(self, request: web.Request) -> web.Response:
        """Take a delivery."""
        begin, name = time.monotonic(), f"{os.getpid()}/{next(self._numbers)}"
        messages = _messages(request.headers, await request.read())
        self.note(name=name, begin=begin, messages=messages)
        while (rule := self._rule(messages)).get("act") == "hold":  # noqa: ASYNC110 - a file tells
            await asyncio.sleep(0.3)
        if rule.get("act") == "die":
            self.die()
        if rule.get("act") == "hang":
            await asyncio.Event().wait()
        await asyncio.sleep(rule.get("seconds", 0))
        status = rule.get("status", 204)
        self.note(name=name, end=time.monotonic(), status=status)
        return web.Response(status=status)

    def _rule(self, messages: list[Message]) -> Message:
        return next((rule for rule in self._now() for it in messages if _fits(rule, it)), {})

    def _now(self) -> list[Message]:
        try:
            changed = self._path.stat().st_mtime_ns
            if changed != self._seen:
                self._rules, self._seen = json.loads(self._path.read_text()), changed
        except FileNotFoundError:
            self._rules = []
        return self._rules


def _messages(headers: Any, body: bytes) -> list[Message]:
    if headers.get("content-type", "").startswith("application/cloudevents-batch+json"):
        return [_message(event, base64.b64decode(event["data_base64"])) for event in json.loads(body)]
    return [_message({name.lower()[3:]: value for name, value in headers.items()}, body)]


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


def _fits(rule: Message, message: Message) -> bool:
    wanted = (("numbers", "number"), ("queues", "queue"), ("attempts", "attempt"), ("topics", "topic"))
    return all(message[field] in rule.get(name, [message[field]]) for name, field in wanted)


def main(address: str, port: str, log: str, rules: str, asks: str = "") -> NoReturn:
    """Serve, or ask, until killed; its own end is as quick as that of most apps."""
    it = App(Path(log), Path(rules))
    if asks:
        asyncio.run(it.ask(f"http://{address}:{port}"))
    app = web.Application()
    app.add_routes([web.post("/", it.posted)])
    web.run_app(app, host=address, port=int(port), print=None, access_log=None, shutdown_timeout=0.1)
    it.note(stopped=time.monotonic())
    sys.exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
