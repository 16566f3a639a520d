"""Switch between Push and Pull delivery, as the settings say; the mode changes only after a drain."""

from typing import Protocol

from rota.model import Reason
from rota.sidecar.consume.queue_reader import QueueReader
from rota.sidecar.delivery import pull, push
from rota.sidecar.delivery.pull import Pull
from rota.sidecar.delivery.push import Push

_NODE_NETWORK = (
    "The pod has hostNetwork, so every process of its node could take its messages; remove that, or use Push"
)


class SwitchHost(push.PushHost, pull.PullHost, Protocol):
    """The member, as either mode needs it."""


class DeliverySwitch:
    """Delivers messages by the mode in force."""

    def __init__(
        self, shell: SwitchHost, host: str, port: int = pull.PORT, *, shares_node_network: bool = False
    ) -> None:
        """`host` is the app's address, and the Pull port's; with `shares_node_network` that port is not opened."""
        self._shell = shell
        self._host = host
        self._port = port
        self._shares_node_network = shares_node_network
        self._mode = ""
        self._app: Push | Pull | None = None

    def wake(self) -> None:
        """Apply the current settings."""
        self._choose().wake()

    def offer(self, reading: QueueReader) -> None:
        """Deliver messages from a queue."""
        self._choose().offer(reading)

    def _choose(self) -> Push | Pull:
        """Return the mode that the settings name; when the mode changes, no delivery is open."""
        mode = self._shell.settings.delivery.mode
        if self._app is None or self._mode != mode:
            if self._app:
                self._shell.start(self._app.close())
            self._mode, self._app = mode, self._pull() if mode == "Pull" else Push(self._shell, self._host)
        return self._app

    def _pull(self) -> Pull:
        pulling = Pull(self._shell, self._host, self._port)
        pulling.queues_changed()
        pulling.wake()
        if self._shares_node_network:
            self._shell.health.trouble(Reason.PULL_NOT_ANSWERED, _NODE_NETWORK)
        else:
            self._shell.start(pulling.serve())
        return pulling

    def cut(self, reading: QueueReader) -> None:
        """Abort a queue's open deliveries now."""
        if self._app:
            self._app.cut(reading)

    def queues_changed(self) -> None:
        """Handle a changed report: the member may hold other queues."""
        if self._app:
            self._app.queues_changed()

    async def close(self) -> None:
        """Close connections and ports."""
        if self._app:
            await self._app.close()
