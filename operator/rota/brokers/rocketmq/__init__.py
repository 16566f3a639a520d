"""Apache RocketMQ by its remoting protocol: what a consumer and its operator need of it, in asyncio."""
