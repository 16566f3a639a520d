"""In-memory RocketMQ cluster for an app developer's laptop, and for tests of code that uses the broker port.

It behaves like RocketMQ's brokers with default settings, as far as the port exposes that: the same contract tests run
on both. Locks, delays and message times use the cluster's own clock, which tests advance by hand. Pulls wait by the
event loop's clock.
"""

from rota.brokers.memory.cluster import BROKER, NAME_SERVER, MemoryCluster
from rota.brokers.memory.consumer import MemoryConsumer

__all__ = ["BROKER", "NAME_SERVER", "MemoryCluster", "MemoryConsumer"]
