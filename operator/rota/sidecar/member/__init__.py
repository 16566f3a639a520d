"""Pure state machines of one member: the queues that it holds, how each is released, and how they share memory."""
