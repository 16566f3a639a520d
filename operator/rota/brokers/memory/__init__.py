"""A cluster in memory: for an app developer's laptop, and for tests of what stands on the port.

It does what RocketMQ's brokers do by default, as far as the port shows it: one contract is tested on both. Its
clock serves locks, delays and the times of messages: who turns it by hand need not wait. Pulls wait by the loop's.
"""

from rota.brokers.memory.cluster import BROKER, NAME_SERVER, Memory
from rota.brokers.memory.consumer import MemoryConsumer

__all__ = ["BROKER", "NAME_SERVER", "Memory", "MemoryConsumer"]
