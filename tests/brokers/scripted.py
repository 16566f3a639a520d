"""Servers with responses scripted by a test: byte by byte, or like those of a name server or a broker."""

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
    """A running server: its responses, and the frames and connections that a test inspects."""

    say: Say
    address: str = ""
    frames: list[Frame] = field(default_factory=list)
    frame_connections: list[int] = field(default_factory=list)  # for each frame, the number of its connection
    connections: int = 0  # so far; the first has number 1
    ended: list[int] = field(default_factory=list)  # connections, by their numbers
    writers: list[asyncio.StreamWriter] = field(default_factory=list)
    presented: list[str] = field(default_factory=list)  # the common name in each client certificate

    def codes(self, connection: int | None = None) -> list[int]:
        """Return the codes of all frames, or of those from the connection of this number."""
        frames = zip(self.frames, self.frame_connections, strict=True)
        return [frame.code for frame, number in frames if connection in {None, number}]

    def cut(self) -> None:
        """Close all connections."""
        for writer in self.writers:
            writer.close()

    async def handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Respond to every frame by `say`; if it returns None, close the connection."""
        self.connections += 1
        self.writers.append(writer)
        if certificate := writer.get_extra_info("peercert"):
            self.presented.append(dict(certificate["subject"][0])["commonName"])
        number = self.connections
        decoder = Decoder()
        try:
            while data := await reader.read(65536):
                for frame in decoder.feed(data):
                    self.frames.append(frame)
                    self.frame_connections.append(number)
                    response = self.say(frame)
                    if response is None:
                        return
                    writer.write(response)
        except ConnectionError:
            pass
        finally:
            self.ended.append(number)
            writer.close()


@asynccontextmanager
async def a_server(say: Say, tls: ssl.SSLContext | None = None) -> AsyncIterator[Server]:
    """Start a server, and stop it at the end of the context."""
    server = Server(say)
    listener = await asyncio.start_server(server.handle_connection, "127.0.0.1", 0, ssl=tls)
    host, port = listener.sockets[0].getsockname()
    server.address = f"{host}:{port}"
    try:
        yield server
    finally:
        listener.close()
        server.cut()


async def until(predicate: Callable[[], bool]) -> None:
    """Wait until a predicate about a server holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not predicate():  # noqa: ASYNC110 - the server sets no event
            await asyncio.sleep(0.005)


def an_answer(
    frame: Frame, body: object = b"", code: int = ResponseCode.SUCCESS, remark: str = "", **fields: object
) -> bytes:
    """Encode a response to a frame; a body other than bytes is encoded as JSON."""
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    texts = {name: str(value) for name, value in fields.items()}
    return encode(Frame(code=code, opaque=frame.opaque, flag=1, body=text, remark=remark, fields=texts))


def a_broker(frame: Frame) -> bytes:
    """Respond like a healthy broker; every offset is 7."""
    if frame.code == RequestCode.GET_SUBSCRIPTIONGROUP_CONFIG:
        return an_answer(frame, {"groupName": "shop"})
    return an_answer(frame, offset=7)


def silent(_: Frame) -> bytes:
    """Send no response."""
    return b""


@dataclass
class Names:
    """The responses of a name server, by the brokers and topics that it knows."""

    brokers: Replicas
    topics: dict[str, dict[str, int]] = field(default_factory=dict)  # number of queues by broker
    times: int = 1  # how often a route repeats each broker's queues

    def __call__(self, frame: Frame) -> bytes:
        """Respond like a name server."""
        if frame.code == RequestCode.GET_BROKER_CLUSTER_INFO:
            table = {data["brokerName"]: data for data in self._data(self.brokers)}
            return an_answer(frame, {"brokerAddrTable": table})
        if frame.code != RequestCode.GET_ROUTEINFO_BY_TOPIC:
            return an_answer(frame, code=ResponseCode.REQUEST_CODE_NOT_SUPPORTED)
        queue_counts = {
            name: number for name, number in self.topics.get(frame.fields["topic"], {}).items() if name in self.brokers
        }
        if not queue_counts:
            return an_answer(frame, code=ResponseCode.TOPIC_NOT_EXIST)
        queues = [{"brokerName": name, "readQueueNums": number} for name, number in queue_counts.items()] * self.times
        replicas = {name: self.brokers[name] for name in queue_counts}
        return an_answer(frame, {"brokerDatas": self._data(replicas), "queueDatas": queues})

    @staticmethod
    def _data(brokers: Replicas) -> list[dict[str, object]]:
        data: list[dict[str, object]] = []
        for name, replicas in brokers.items():
            addresses = {str(number): address for number, address in replicas.items()}
            data.append({"brokerName": name, "brokerAddrs": addresses})
        return data
