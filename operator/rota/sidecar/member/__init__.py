"""The member as pure state machines: which queues it holds, how each is released, how much memory they share.

Knows values of `rota.documents` only; no I/O and no clock.
"""
