"""Sends a hundred messages to the topic `orders`; run it with `.venv/bin/python docs/examples/ground/send.py`."""

# ruff: noqa: INP001, T201 - a program of its own, which speaks

import asyncio
import os
import sys

from rota.brokers.rocketmq.admin import AdminClient
from rota.brokers.rocketmq.routing import ConnectionConfig


async def main() -> None:
    """Send, one after the other; any queue will do."""
    brokers = AdminClient(ConnectionConfig([os.environ["ROTA_NAME_SERVER"]]))
    for number in range(100):
        await brokers.send("orders", f"order {number}".encode())
    await brokers.close()
    print("100 messages sent")


if "ROTA_NAME_SERVER" not in os.environ:
    sys.exit('ROTA_NAME_SERVER is not set; first: eval "$(.venv/bin/python -m ground env)"')
asyncio.run(main())
