"""Sends a hundred messages to the topic `orders`; run it with `python docs/examples/ground/send.py`."""

# ruff: noqa: INP001, T201 - a program of its own, which speaks

import asyncio
import os

from rota.brokers.rocketmq.client import Site
from rota.brokers.rocketmq.cluster import Cluster


async def main() -> None:
    """Send, one after the other; any queue will do."""
    brokers = Cluster(Site([os.environ["ROTA_NAME_SERVER"]]))
    for number in range(100):
        await brokers.send("orders", f"order {number}".encode())
    await brokers.close()
    print("100 messages sent")


asyncio.run(main())
