"""How long a queue waits after a failed pull."""

from rota.brokers.errors import ConsumptionDisabledError, UnreachableError
from rota.sidecar.consume.queue_puller import MAX_BACKOFF_SECONDS, MIN_BACKOFF_SECONDS, next_backoff


def test_pull_backoff_doubles_up_to_its_maximum_and_starts_over_once_consumption_was_disabled() -> None:
    unreachable = UnreachableError("the broker did not respond")
    backoffs = [0.0]
    for _ in range(7):
        backoffs.append(next_backoff(unreachable, backoffs[-1]))
    assert backoffs[1:] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, MAX_BACKOFF_SECONDS]
    disabled = next_backoff(ConsumptionDisabledError("consumption is disabled"), backoffs[-1])
    assert next_backoff(unreachable, disabled) == MIN_BACKOFF_SECONDS
