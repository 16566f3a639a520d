"""Apache RocketMQ client for asyncio (remoting protocol), limited to the requests of consumers and their operator.

Layers: `wire`, then `transport`, which uses it; the modules here implement `Consumer` and `Brokers` on both.
"""
