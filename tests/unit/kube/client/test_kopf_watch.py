"""Settings of kopf in the operator."""

from rota.kube.client import kopf_watch

MIN_OBJECTS_PER_SECOND = 1000  # by default kopf passes on 20 a second: a list of 1,000 groups took 45 s


def test_watch_passes_on_enough_objects_a_second() -> None:
    queueing = kopf_watch.build_settings().queueing
    assert queueing.worker_limit is not None
    assert queueing.worker_limit / queueing.idle_timeout >= MIN_OBJECTS_PER_SECOND
