"""A broker that only these tests use and may kill: it retries after 1 s, keeps locks for 6 s and supports SQL92."""

from collections.abc import Iterator

import pytest

from ground.instance import temporary
from ground.rocketmq import RocketMQ

FAST_RETRIES = {"messageDelayLevel": " ".join(["1s"] * 18), "enablePropertyFilter": True}
SHORT_LOCKS = ("env", "JAVA_TOOL_OPTIONS=-Drocketmq.broker.rebalance.lockMaxLiveTime=6000")


@pytest.fixture(scope="session")
def rocketmq() -> Iterator[RocketMQ]:
    """Start a name server and a broker."""
    with temporary("sidecars") as instance:
        broker = RocketMQ(instance, settings=FAST_RETRIES, prefix=SHORT_LOCKS)
        broker.up()
        yield broker
        broker.down()
