"""What a broker can answer instead of a result; adapters raise these errors and no others."""


class BrokerError(Exception):
    """Something that a broker or a name server did not do; a sentence for people."""


class Unreachable(BrokerError):  # noqa: N818 - it says what is so
    """It could not be asked, or did not answer: nothing is known, and that nothing is known means nothing."""


class Garbled(Unreachable):
    """It answered, but what it said cannot be read."""


class Unknown(BrokerError):  # noqa: N818 - as above
    """There is no such topic, queue or group, by a positive answer."""


class Refused(BrokerError):  # noqa: N818 - as above
    """It was asked, and said no."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class SwitchedOff(Refused):
    """Consumption is switched off at the broker, for the group or the topic."""
