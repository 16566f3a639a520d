"""Errors of the broker port: adapters raise these when a request has no result, and no others."""


class BrokerError(Exception):
    """A request to a broker or a name server failed; the message is a sentence for users."""


class UnreachableError(BrokerError):
    """The request was not sent or not answered: the caller must not conclude anything about the broker's state."""


class MalformedResponseError(UnreachableError):
    """The broker answered, but its response cannot be parsed."""


class NotFoundError(BrokerError):
    """The topic, queue or group does not exist, according to an explicit response."""


class RejectedError(BrokerError):
    """The broker answered and rejected the request."""

    def __init__(self, message: str, code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class ConsumptionDisabledError(RejectedError):
    """Consumption is disabled at the broker, for the group or the topic."""
