"""Apache RocketMQ by its remoting protocol, in asyncio: what a consumer and its operator need of it.

Packages stand on those before them: wire, transport; the modules here are the two sides of the port.
"""
