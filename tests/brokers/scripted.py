"""Servers that say just what a test wants: byte by byte, or as a name server or a broker would."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from ground.poll import PATIENCE_SECONDS
from rota.brokers.rocketmq.wire.codes import RequestCode, ResponseCode
from rota.brokers.rocketmq.wire.frames import Decoder, Frame, encode

Say = Callable[[Frame], bytes | None]
Replicas = dict[str, dict[int, str]]  # addresses of brokers, by name and id


@dataclass
class Server:
    """What a test looks at, and how it speaks."""

    say: Say
    address: str = ""
    heard: list[Frame] = field(default_factory=list)
    by: list[int] = field(default_factory=list)  # the number of the connection that each of them came by
    connections: int = 0
    ended: list[int] = field(default_factory=list)  # connections, by their numbers
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    presented: list[str] = field(default_factory=list)  # the common name in each client certificate

    def codes(self, connection: int = 0) -> list[int]:
        """Return what was asked, by any connection or by one."""
        return [it.code for it, by in zip(self.heard, self.by, strict=True) if connection in {0, by}]

    def cut(self) -> None:
        """Close all connections."""
        for writer in self.writers:
            writer.close()

    async def talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Say something to every frame; None closes the connection."""
        self.connections += 1
        self.writers.append(writer)
        if certificate := writer.get_extra_info("peercert"):
            self.presented.append(dict(certificate["subject"][0])["commonName"])
        number, decoder = self.connections, Decoder()
        try:
            while data := await reader.read(65536):
                for frame in decoder.feed(data):
                    self.heard.append(frame)
                    self.by.append(number)
                    answer = self.say(frame)
                    if answer is None:
                        return
                    writer.write(answer)
        except ConnectionError:
            pass
        finally:
            self.ended.append(number)
            writer.close()


@asynccontextmanager
async def a_server(say: Say, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """Start one, and take it away."""
    found = Server(say)
    server = await asyncio.start_server(found.talk, "127.0.0.1", 0, ssl=tls)
    host, port = server.sockets[0].getsockname()
    found.address = f"{host}:{port}"
    try:
        yield found
    finally:
        server.close()
        found.cut()


async def until(true: Callable[[], bool]) -> None:
    """Wait for what a server will have seen."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not true():  # noqa: ASYNC110 - what is waited for is a server's, not an event of ours
            await asyncio.sleep(0.005)


def an_answer(
    frame: Frame, body: object = b"", code: int = ResponseCode.SUCCESS, remark: str = "", **fields: object
) -> bytes:
    """Write an answer to a frame; a body that is no bytes is written as JSON."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    told = {name: str(value) for name, value in fields.items()}
    return encode(Frame(code=code, opaque=frame.opaque, flag=1, body=text, remark=remark, fields=told))


def a_broker(frame: Frame) -> bytes:
    """Answer as a broker where all is well, and every offset 7."""
    if frame.code == RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG:
        return an_answer(frame, {"groupName": "shop"})
    return an_answer(frame, offset=7)


def silent(_: Frame) -> bytes:
    """Say nothing."""
    return b""


@dataclass
class Names:
    """What a name server knows; call it to have it said."""

    brokers: Replicas
    topics: dict[str, dict[str, int]] = field(default_factory=dict)  # how many queues, by broker
    times: int = 1  # that each is said

    def __call__(self, frame: Frame) -> bytes:
        """Answer as a name server."""
        if frame.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            return an_answer(frame, {"brokerAddrTable": {it["brokerName"]: it for it in self._data(self.brokers)}})
        if frame.code != RequestCode.GET_ROUTEINFO_BY_TOPIC:
            return an_answer(frame, code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        there = {
            name: number for name, number in self.topics.get(frame.fields["topic"], {}).items() if name in self.brokers
        }
        if not there:
            return an_answer(frame, code=ResponseCode.TOPIC_NOT_EXIST)
        queues = [{"brokerName": name, "readQueueNums": number} for name, number in there.items()] * self.times
        replicas = {name: self.brokers[name] for name in there}
        return an_answer(frame, {"brokerDatas": self._data(replicas), "queueDatas": queues})

    @staticmethod
    def _data(brokers: Replicas) -> list[dict[str, object]]:
        return [{"brokerName": name, "brokerAddrs": {str(it): ids[it] for it in ids}} for name, ids in brokers.items()]
