"""Switch between Push and Pull delivery, as the settings say; the mode changes only after a drain."""

from rota.model import Reason
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.delivery import pull
from rota.sidecar.delivery.pull import PullDelivery
from rota.sidecar.delivery.push import PushDelivery
from rota.sidecar.delivery.settlement import DeliveryHost

_NODE_NETWORK_MESSAGE = (
    "The pod uses hostNetwork, so any process on its node could receive its messages; "
    "remove hostNetwork, or use Push delivery"
)


class DeliverySwitch:
    """Delivers messages by the mode in force."""

    def __init__(
        self, host: DeliveryHost, app_host: str, pull_port: int = pull.PORT, *, shares_node_network: bool = False
    ) -> None:
        """Push posts to `app_host`; Pull listens there at `pull_port`, but not with `shares_node_network`."""
        self._host = host
        self._app_host = app_host
        self._pull_port = pull_port
        self._shares_node_network = shares_node_network
        self._mode = ""
        self._delivery: PushDelivery | PullDelivery | None = None

    def apply_settings(self) -> None:
        """Apply the current settings."""
        self._ensure_delivery().apply_settings()

    def offer(self, reader: QueueReader) -> None:
        """Deliver messages from a queue."""
        self._ensure_delivery().offer(reader)

    def _ensure_delivery(self) -> PushDelivery | PullDelivery:
        """Return the delivery of the mode in force; create it first, and close that of another mode.

        A changed mode needs a rejoin, which drains all queues, so no delivery is open then.
        """
        mode = self._host.settings.delivery.mode
        if self._delivery is None or self._mode != mode:
            if self._delivery:
                self._host.start_task(self._delivery.close())
            self._mode = mode
            self._delivery = self._start_pull() if mode == "Pull" else PushDelivery(self._host, self._app_host)
        return self._delivery

    def _start_pull(self) -> PullDelivery:
        pull_delivery = PullDelivery(self._host, self._app_host, self._pull_port)
        # Pull keeps the held queues and the visibility timeout; Push looks up what it needs at each delivery.
        pull_delivery.on_queues_changed()
        pull_delivery.apply_settings()
        if self._shares_node_network:
            self._host.problems.set_problem(Reason.PULL_PORT_UNAVAILABLE, _NODE_NETWORK_MESSAGE)
        else:
            self._host.start_task(pull_delivery.serve())
        return pull_delivery

    def abort_deliveries(self, reader: QueueReader) -> None:
        """Abort a queue's open deliveries now."""
        if self._delivery:
            self._delivery.abort_deliveries(reader)

    def on_queues_changed(self) -> None:
        """Handle a changed report: the member may hold other queues."""
        if self._delivery:
            self._delivery.on_queues_changed()

    async def close(self) -> None:
        """Close connections and ports."""
        if self._delivery:
            await self._delivery.close()
