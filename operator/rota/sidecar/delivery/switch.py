"""Push or Pull, as the settings say: one at a time, and another one only after a drain."""

from typing import Protocol

from rota.model import Reason
from rota.sidecar.consume.queue_reader import Reading
from rota.sidecar.delivery import pull, push
from rota.sidecar.delivery.pull import Pull
from rota.sidecar.delivery.push import Push

_NODE_NETWORK = (
    "The pod has hostNetwork, so every process of its node could take its messages; remove that, or use Push"
)


class Shell(push.Shell, pull.Shell, Protocol):
    """What either asks, and tells, of the member."""


class Modes:
    """How messages reach the app."""

    def __init__(self, shell: Shell, host: str, port: int = pull.PORT, *, shares_node_network: bool = False) -> None:
        """`host` is where messages are posted, or requested; with `shares_node_network` the Pull port is not opened."""
        self._shell = shell
        self._host = host
        self._port = port
        self._shares_node_network = shares_node_network
        self._mode = ""
        self._app: Push | Pull | None = None

    def wake(self) -> None:
        """Go by the settings as they are now."""
        self._choose().wake()

    def offer(self, reading: Reading) -> None:
        """Deliver from a queue."""
        self._choose().offer(reading)

    def _choose(self) -> Push | Pull:
        """Return the one that the settings name; nothing is open when they name the other."""
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

    def cut(self, reading: Reading) -> None:
        """End a queue's open deliveries now."""
        if self._app:
            self._app.cut(reading)

    def queues_changed(self) -> None:
        """Hear that other queues may be held."""
        if self._app:
            self._app.queues_changed()

    async def close(self) -> None:
        """Let go of what is held."""
        if self._app:
            await self._app.close()
