"""A broker of these tests' own, which may be hurt and is in a hurry: retries come after a second, locks last six."""

from collections.abc import Iterator

import pytest

from ground.instance import temporary
from ground.rocketmq import RocketMQ

QUICK = {"messageDelayLevel": " ".join(["1s"] * 18)}
SHORT_LOCKS = ("env", "JAVA_TOOL_OPTIONS=-Drocketmq.broker.rebalance.lockMaxLiveTime=6000")


@pytest.fixture(scope="session")
def hurried() -> Iterator[RocketMQ]:
    """Start a name server and a broker."""
    with temporary("hurried") as instance:
        broker = RocketMQ(instance, settings=QUICK, prefix=SHORT_LOCKS)
        broker.up()
        yield broker
        broker.down()
