"""RocketMQ's remoting protocol, one request at a time: the ground's requests to name server and brokers without a JVM.

It is apart from Rota's own protocol code on purpose: test equipment must not share the mistakes of the tested code.
"""

import json
import socket
import struct
from collections.abc import Mapping
from typing import Any

UPDATE_AND_CREATE_TOPIC = 17
UPDATE_BROKER_CONFIG = 25
GET_ROUTE = 105
DELETE_TOPIC_IN_BROKER = 215
DELETE_TOPIC_IN_NAME_SERVER = 216
TOPIC_NOT_EXIST = 17
_VERSION = 493  # of 5.4.0; from 401 on the name server responds in proper JSON
_SECONDS = 5


class Refused(Exception):  # noqa: N818 - an expected response
    """The server responded with another code than SUCCESS."""

    def __init__(self, code: int, remark: str) -> None:
        super().__init__(f"RocketMQ answered {code}: {remark}")
        self.code = code


def ask(address: str, code: int, fields: Mapping[str, str], body: str = "") -> Any:
    """Send one request and return the response's JSON body, or None; a code other than SUCCESS raises `Refused`."""
    request = {"code": code, "language": "PYTHON", "version": _VERSION, "opaque": 1, "flag": 0, "extFields": fields}
    header, content = json.dumps(request).encode(), body.encode()
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), _SECONDS) as connection, connection.makefile("rb") as answers:
        connection.sendall(struct.pack(">II", 4 + len(header) + len(content), len(header)) + header + content)
        start = answers.read(8)
        if len(start) < 8:
            raise ConnectionError(f"{address} closed the connection")
        total, word = struct.unpack(">II", start)
        length = word & 0xFFFFFF  # the top byte is the header's encoding; a request in JSON gets a response in JSON
        frame = answers.read(total - 4)
    answer = json.loads(frame[:length])
    if answer["code"] != 0:
        raise Refused(answer["code"], answer.get("remark") or "")
    return json.loads(frame[length:]) if frame[length:] else None


def create_topic(broker: str, topic: str, queues: int) -> None:
    """Create a topic with that many queues on one broker, or change it to that many."""
    fields = {
        "topic": topic,
        "defaultTopic": "TBW102",
        "readQueueNums": str(queues),
        "writeQueueNums": str(queues),
        "perm": "6",
        "topicFilterType": "SINGLE_TAG",
        "topicSysFlag": "0",
        "order": "false",
    }
    ask(broker, UPDATE_AND_CREATE_TOPIC, fields)
