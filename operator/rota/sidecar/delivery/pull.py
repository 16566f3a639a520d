"""Pull: the app asks for messages, and says what became of each.

| the app | the message |
|---|---|
| acknowledges it | is done |
| says no, or nothing for visibilityTimeout | is tried again, by the retry topic; after its last attempt it is dead |
| is gone before it is answered | goes back at once, and no attempt is counted |

Each time that a message is handed out it has another id, and no other sidecar's: what is said of it too late, or to
another process, is said of an id that nobody knows, and changes nothing.

Nothing is made for a message alone, neither task nor timer. What is open lies in the order in which it was handed out,
so whatever is overdue lies in front.
"""

import asyncio
import re
import secrets
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from itertools import count, takewhile
from typing import NamedTuple, Protocol, Self

import msgspec
from aiohttp import web

from rota.brokers.message import MEBIBYTE, Message
from rota.deliveries import AppAnswer, DeliveryOutcome
from rota.http_server import BodyReader, Limits, listen
from rota.model import Queue, Reason
from rota.sidecar.consume.queue_reader import Reading
from rota.sidecar.delivery import settlement
from rota.sidecar.delivery.asker import Asker
from rota.sidecar.delivery.assignment_events import Assignments
from rota.sidecar.delivery.scheduler import Shelf, Taken
from rota.sidecar.delivery.settlement import Endings
from rota.sidecar.member.window import Delivery
from rota.sidecar.status.control_api import Reports, duration
from rota.sidecar.status.problems import Health
from rota.sidecar.status.sidecar_metrics import Measures, topic_label

PORT = 9912
MOST = 1000  # messages in an answer
LARGEST = 8 * MEBIBYTE  # an answer; its last message may go beyond it
SIDE_BY_SIDE = 32  # messages on their way back to their brokers, of those that end together
WRITE_BYTES = 256 * 1024  # of an answer at once: what the transport cannot send yet, it copies
LEAST_SWEEP = 0.05  # between two looks for what is overdue
STOOD_STILL = 0.5  # that late a look is only where the whole process was
OPEN_AGAIN = 2.0  # where the port cannot be listened at
MAX_IDS_BYTES = MEBIBYTE  # of acks or nacks in one request: of 1,000 messages they take 30 KiB
MAX_IDS_BODIES = 64  # being read at the same time
KEPT = 3600.0  # seconds that a connection of the app is kept for: it may work at a message for long, and ack it then


_NUMBER = re.compile(r"[0-9]{1,4}", re.ASCII)
_BY_OUTCOME = {"later": DeliveryOutcome.NACK, "expired": DeliveryOutcome.TIMEOUT}


class Handed(msgspec.Struct, omit_defaults=True):
    """A message as the app gets it."""

    id: str
    topic: str
    broker: str
    queue: int
    offset: int
    attempt: int
    tag: str
    keys: str
    properties: Mapping[str, str]
    body: bytes = msgspec.field(name="bodyBase64")
    damage: str = ""  # why the body is not what was sent, if that is so

    @classmethod
    def of(cls, name: str, it: Message, attempt: int) -> Self:
        """Return a message under a name of its own."""
        properties = dict(it.properties)  # of one of a batch they are a view, which cannot be written
        where, told = (it.topic, it.queue.broker, it.queue.id, it.offset), (it.tag, it.keys, properties, it.body)
        return cls(name, *where, attempt, *told, it.damage)


class Ids(msgspec.Struct):
    """What the app says yes or no to."""

    ids: list[str]


class Open(NamedTuple):
    """A message that the app has, and since when."""

    taken: Taken
    message: Message
    since: float

    @property
    def here(self) -> bool:
        """Whether it is still the app's: a queue that was cut took its messages back."""
        return self.message.offset in self.taken.delivery.left


class Shell(settlement.DeliveringShell, Protocol):
    """What is asked, and told, of the member."""

    health: Health
    measures: Measures

    def may_deliver(self, queue: Queue) -> bool:
        """Whether a delivery may begin."""

    def may_send(self, queue: Queue, since: float) -> bool:
        """Whether what was handed out then may be sent back; not if its queue was reassigned during a stall."""

    @property
    def status(self) -> Reports:
        """What the member says of itself."""

    def start(self, work: Coroutine[None, None, object]) -> None:
        """Do something beside all else."""


class Pull:
    """Delivers to who asks."""

    def __init__(self, shell: Shell, host: str, port: int = PORT) -> None:
        """Answer nothing yet."""
        self._shell, self._host, self._port = shell, host, port
        self._shelf, self._endings = Shelf(shell.may_deliver), Endings(shell)
        self._assignments = Assignments()
        self._asking: dict[Asker, None] = {}  # whoever came first first
        self._open: dict[str, Open] = {}  # by id, in the order of `since`
        self._ids_body = BodyReader(MAX_IDS_BYTES, MAX_IDS_BODIES)
        self._patience = 0.0  # seconds for which a message may be open
        self._names = (f"{name}-{number}" for name in [secrets.token_hex(6)] for number in count(1))
        self._sweeper: asyncio.TimerHandle | None = None
        self._woken = self._closed = False
        self._runner: web.AppRunner | None = None

    async def serve(self) -> None:
        """Answer from now on; while that cannot be, say why, and try again."""
        while not self._closed:
            app = web.Application()
            app.add_routes(
                [
                    web.get("/v1/messages", self._messages, allow_head=False),
                    web.post("/v1/acks", partial(self._told, self._ack)),
                    web.post("/v1/nacks", partial(self._told, partial(self._later, "later"))),
                    web.get("/v1/assignments", self._assignments.follow, allow_head=False),
                ]
            )
            try:
                self._runner = await listen(app, self._host, self._port, limits=Limits(keepalive_seconds=KEPT))
            except ValueError as error:
                self._shell.health.trouble(Reason.PULL_NOT_ANSWERED, str(error))
                await asyncio.sleep(OPEN_AGAIN)
                continue
            self._shell.health.trouble(Reason.PULL_NOT_ANSWERED, "")
            break
        if self._closed:
            await self.close()

    async def close(self) -> None:
        """Answer whoever waits, with nothing, and no one any more."""
        self._closed = True
        self._shell.health.trouble(Reason.PULL_NOT_ANSWERED, "")
        for asker in self._asking:
            asker.serve(asker.taken)
        self._assignments.close()
        if self._sweeper:
            self._sweeper.cancel()
        if self._runner:
            await self._runner.cleanup()

    # What can be handed out.

    def offer(self, reading: Reading) -> None:
        """Hand out from a queue: it has something, or is allowed again."""
        if not reading.window.stopped:
            self._shelf.offer(reading.queue, reading.window)
            if self._asking and not self._woken:
                self._woken = True
                asyncio.get_running_loop().call_soon(self._fill)

    def wake(self) -> None:
        """Go by the settings as they are now."""
        before, self._patience = self._patience, self._shell.settings.delivery.pull.visibility_timeout
        if self._patience != before:
            self._sweep()

    def queues_changed(self) -> None:
        """Tell the app which queues it has, and look, and tell, no more of those that it has not."""
        for queue in self._assignments.told(self._shell.status.report()):
            self._shelf.withdraw(queue)
        self._endings.look()

    def cut(self, reading: Reading) -> None:
        """Take a queue's open messages back now."""
        taken = [Taken(reading.queue, reading.window, delivery) for delivery in [*reading.window.open]]
        some = [Open(it, message, it.delivery.since) for it in taken for message in it.delivery.messages]
        some = [it for it in some if it.here]
        self._back(some)
        self._ended(some, "cut")

    def _fill(self) -> None:
        """Serve those who wait, as long as there is something."""
        self._woken = False
        for asker in [*self._asking]:
            if asker.there:
                taken = self._take(asker.most)
                if not taken:
                    return
                asker.serve(taken)

    def _take(self, room: int) -> list[Taken]:
        """Take so many messages, or fewer if they are large, of one queue after another."""
        taken: list[Taken] = []
        now, size = self._shell.now(), 0
        while room > 0 and size < LARGEST and (it := self._shelf.take(now, partial(self._most, room, LARGEST - size))):
            it.window.note_given(it.delivery)
            taken.append(it)
            room -= len(it.delivery.messages)
            size += sum([message.encoded_bytes for message in it.delivery.messages])
        return taken

    def _most(self, room: int, size: int, queue: Queue) -> int:
        """Return how many messages of a queue fit into what is left of an answer; one at least."""
        reading = self._shell.reading(queue)
        return reading.window.fit(room, size) if reading else room

    # What the app asks.

    async def _messages(self, asked: web.Request) -> web.StreamResponse:
        most, wait = asked.query.get("max", "32"), duration(asked.query.get("wait", "10s"))
        if not _NUMBER.fullmatch(most) or not 1 <= int(most) <= MOST or wait is None:
            told = f"max is a number from 1 to {MOST}, wait a duration such as 10s"
            return web.Response(status=400, text=f"{told}\n")
        asker = Asker(asked, int(most))
        self._asking[asker] = None
        answer = web.StreamResponse()
        try:
            self._fill()
            await asker.wait(wait)
            await self._write(answer, asked, self._hand_out(asker.taken))
        except (ConnectionError, TimeoutError):
            self._return(asker.taken)
        except BaseException:
            self._return(asker.taken)
            raise
        finally:
            del self._asking[asker]
        return answer

    async def _write(self, answer: web.StreamResponse, asked: web.Request, body: bytes) -> None:
        """Write an answer as fast as the app reads it; close the connection of one that does not in time."""
        answer.content_type = "application/json"
        answer.content_length = len(body)
        parts = memoryview(body)
        try:
            async with asyncio.timeout(self._patience or None):
                await answer.prepare(asked)
                for start in range(0, len(body), WRITE_BYTES):
                    await answer.write(parts[start : start + WRITE_BYTES])
                await answer.write_eof()
        except TimeoutError:  # its messages are the app's no more, so their copies go
            if asked.transport:
                asked.transport.abort()
            raise
        if asked.transport is None:  # the end of a connection is no error to aiohttp
            raise ConnectionResetError

    def _hand_out(self, taken: Iterable[Taken]) -> bytes:
        """Return an answer's body; what is in it is open from now on."""
        now, handed = self._shell.now(), []
        for it in taken:
            for message in it.delivery.messages:
                name, attempt = next(self._names), self._endings.attempt(it, message)
                self._open[name] = Open(it, message, now)
                handed.append(Handed.of(name, message, attempt))
        if handed:
            self._sweep_at(now + self._patience)
        if again := sum([it.attempt > 1 for it in handed]):
            self._shell.measures.redelivered.inc(again)
        return msgspec.json.encode({"messages": handed})

    def _return(self, taken: Iterable[Taken]) -> None:
        """Take back what did not get to the app."""
        some = [Open(it, message, it.delivery.since) for it in taken for message in it.delivery.messages]
        self._back(some)
        self._changed(some)

    # What the app says.

    async def _told(self, do: Callable[[list[Open]], None], asked: web.Request) -> web.Response:
        try:
            ids = msgspec.json.decode(await self._ids_body.read(asked), type=Ids).ids
        except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
            told = f'The body is to be {{"ids": [...]}}, with ids of messages: {error}'
            return web.Response(status=400, text=f"{told}\n")
        some, unknown = [], []
        for name in ids:
            it = self._open.pop(name, None)
            if it and it.here:
                some.append(it)
            else:
                unknown.append(name)
        do(some)
        return web.Response(body=msgspec.json.encode({"unknown": unknown}), content_type="application/json")

    def _ack(self, some: Sequence[Open]) -> None:
        self._count_answers(some, DeliveryOutcome.DONE)
        for it in some:
            self._endings.finish(it.taken, it.message)
        self._ended(some, "done")

    def _later(self, outcome: str, some: Sequence[Open]) -> None:
        """Have messages tried again, at another time; the app need not wait until the broker has them.

        Those whose queue was reassigned while the process stood still are not sent back: the next owner has them.
        """
        reassigned: list[Open] = []
        returnable: list[Open] = []
        for it in some:
            (returnable if self._shell.may_send(it.taken.queue, it.since) else reassigned).append(it)
        self._back(reassigned)
        self._ended(reassigned, "cut")
        some = returnable
        self._count_answers(some, _BY_OUTCOME[outcome])
        if some:
            self._ended([it for it in some if not self._endings.spent(it.taken, it.message)], outcome)
            self._ended([it for it in some if self._endings.spent(it.taken, it.message)], "dead")
            self._shell.start(self._give_back(some))

    def _count_answers(self, answered: Sequence[Open], outcome: DeliveryOutcome) -> None:
        """Count what the app said of each message, while its attempt is known."""
        now, counts, topics = self._shell.now(), self._shell.delivery_counts, self._shell.settings.topics
        for it in answered:
            attempt = self._endings.attempt(it.taken, it.message)
            counts.count(it.taken.queue, [(it.message, attempt)], AppAnswer(outcome), now)
            counts.count_time(topic_label(it.message, topics), now - it.since)

    async def _give_back(self, some: Sequence[Open]) -> None:
        for first in range(0, len(some), SIDE_BY_SIDE):
            few = [it for it in some[first : first + SIDE_BY_SIDE] if it.here]
            await asyncio.gather(*(self._endings.later(it.taken, it.message) for it in few))
            self._changed(few)

    def _back(self, some: Iterable[Open]) -> None:
        for it in some:
            self._endings.back(it.taken, [it.message])
        self._open = {name: it for name, it in self._open.items() if it.here}  # the others' bodies would stay

    def _ended(self, some: Iterable[Open], outcome: str) -> None:
        """Count what has ended; what was handed out together counts together."""
        together: dict[tuple[Delivery, str], list[Open]] = {}
        for it in some:
            together.setdefault((it.taken.delivery, it.message.topic), []).append(it)
        now = self._shell.now()
        for group in together.values():
            messages = [it.message for it in group]
            self._shell.measures.answered(now - group[0].since, messages)
            self._shell.delivery_ended(messages, outcome, now - group[0].since)
        self._changed(some)

    def _changed(self, some: Iterable[Open]) -> None:
        """Have those look who wait for room, for the end of a drain, or for what came back."""
        now = self._shell.now()
        for queue in dict.fromkeys([it.taken.queue for it in some]):
            if reading := self._shell.reading(queue):
                reading.delivered_at = now
                reading.changed()
                self.offer(reading)

    # What the app says nothing of.

    def _sweep_at(self, when: float) -> None:
        if self._sweeper is None and not self._closed:
            now = self._shell.now()
            due = max(now + LEAST_SWEEP, when)
            self._sweeper = asyncio.get_running_loop().call_later(due - now, self._sweep_due, due)

    def _sweep_due(self, due: float) -> None:
        """Sweep; but a process that stood still first reads what the app said meanwhile."""
        now = self._shell.now()
        if now - due < STOOD_STILL:
            self._sweep()
        else:
            self._sweeper = asyncio.get_running_loop().call_later(LEAST_SWEEP, self._sweep_due, now + LEAST_SWEEP)

    def _sweep(self) -> None:
        """Have what is overdue tried again, and look again when the next will be."""
        if self._sweeper:
            self._sweeper.cancel()
            self._sweeper = None
        latest = self._shell.now() - self._patience
        overdue = list(takewhile(lambda it: it[1].since <= latest, self._open.items()))
        for name, _ in overdue:
            del self._open[name]
        self._later("expired", [it for _, it in overdue if it.here])
        for it in self._open.values():
            self._sweep_at(it.since + self._patience)
            break
