"""A real RocketMQ: a name server and one to three brokers, each on the instance's addresses with a store of its own."""

import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ground import cache, java, remoting
from ground.instance import Instance
from ground.poll import eventually
from ground.report import Missing, progress

CLUSTER = "DefaultCluster"
_NAME_SERVER_PORT = 9876
_BROKER_PORT = 10911  # the next broker takes the next but 19: each needs its port, and its port - 2
_STEP = 20
_REFUSES_AT = 0.9  # of the disk in use; RocketMQ caps every setting of it there
_SECONDS = 90

Setting = str | int | bool

# Files are small, and sparse: an idle broker takes a megabyte of disk.
SMALL: Mapping[str, Setting] = {
    "mappedFileSizeCommitLog": 64 * 2**20,
    "mappedFileSizeConsumeQueue": 30_000 * 20,
    "maxHashSlotNum": 10_000,
    "maxIndexNum": 40_000,
    "timerWheelEnable": False,  # it takes 140 MB; without it POP does not work
    "diskMaxUsedSpaceRatio": 95,
    "registerNameServerPeriod": 10_000,  # the shortest it takes: a new name server knows the brokers after 10 s
}


@dataclass(frozen=True)
class Broker:
    """A broker as clients see it."""

    name: str
    address: str
    port: int

    @property
    def endpoint(self) -> str:
        """Its "ip:port"."""
        return f"{self.address}:{self.port}"


class RocketMQ:
    """A name server and its brokers; brokers are told apart by their number, from 0."""

    def __init__(
        self,
        instance: Instance,
        brokers: int = 1,
        *,
        address: str | None = None,
        prefix: Sequence[str] = (),
        settings: Mapping[str, Setting] | None = None,
        name: str = "rocketmq",
    ) -> None:
        """Describe it; `up` starts it.

        `prefix` is put before every command, to start it elsewhere; `settings` go into every broker's file and may be
        changed before a broker is started again; `name` tells several in one instance apart.
        """
        self.instance = instance
        self.name = name
        self.folder = instance.folder / name
        self.address = address or instance.address()
        self.settings = dict(settings or {})
        self._count = brokers
        self._prefix = prefix

    @property
    def name_server(self) -> str:
        """The name server's "ip:port"."""
        return f"{self.address}:{self._port(f'{self.name}-name-server', _NAME_SERVER_PORT)}"

    @property
    def brokers(self) -> list[Broker]:
        """The brokers, with the ports they were last started on."""
        ports = [self._note(i).read_text() if self._note(i).exists() else self._wish(i) for i in range(self._count)]
        return [Broker(f"broker-{i}", self.address, int(port)) for i, port in enumerate(ports)]

    def up(self) -> None:
        """Start what does not run and wait until every broker is known to the name server."""
        java.jars()
        self._need_disk()
        numbers = range(self._count)
        if all(self._program_runs(name) for name in ["name-server", *(f"broker-{i}" for i in numbers)]):
            return self._wait_for(numbers)
        with progress(f"starting RocketMQ with {self._count} broker(s)"):
            self._launch_name_server()
            for number in numbers:
                self._launch(number)
            return self._wait_for(numbers)

    def down(self) -> None:
        """End it and remove its store."""
        for name in [*(f"broker-{i}" for i in range(self._count)), "name-server"]:
            self.instance.stop(f"{self.name}-{name}", grace=0)  # an orderly end takes 10 s, and the store goes anyway
        cache.remove(self.folder)

    def start_broker(self, number: int, port: int | None = None) -> None:
        """Start a broker again with what it had stored, perhaps on another port."""
        self._launch(number, port)
        self._wait_for([number])

    def kill_broker(self, number: int) -> None:
        """End a broker at once, as a crash would."""
        self._signal(f"broker-{number}", signal.SIGKILL)
        eventually(lambda: not self._program_runs(f"broker-{number}"))

    def stop_broker(self, number: int) -> None:
        """Freeze a broker: its connections stay open, and nothing answers."""
        self._signal(f"broker-{number}", signal.SIGSTOP)

    def continue_broker(self, number: int) -> None:
        """Let a frozen broker go on."""
        self._signal(f"broker-{number}", signal.SIGCONT)

    def stop_name_server(self) -> None:
        """End the name server; brokers and clients go on with what they know."""
        self._signal("name-server", signal.SIGKILL)
        eventually(lambda: not self._program_runs("name-server"))

    def start_name_server(self) -> None:
        """Start the name server again, empty; brokers register within 10 s, and `up` waits for that."""
        self._launch_name_server()

    def create_topic(self, topic: str, queues: int, *, brokers: Sequence[int] | None = None) -> None:
        """Make a topic with that many queues on each of these brokers (default: all), or change it to that."""
        wanted = [self.brokers[i] for i in (range(self._count) if brokers is None else brokers)]
        fields = {
            "topic": topic,
            "defaultTopic": "TBW102",
            "readQueueNums": str(queues),
            "writeQueueNums": str(queues),
            "perm": "6",
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": "0",
            "order": "false",
        }
        for broker in wanted:
            remoting.ask(broker.endpoint, remoting.UPDATE_AND_CREATE_TOPIC, fields, prefix=self._prefix)
        counts = {broker.name: queues for broker in wanted}
        eventually(lambda: counts.items() <= self.queues(topic).items())

    def delete_topic(self, topic: str) -> None:
        """Delete a topic everywhere."""
        for broker in self.brokers:
            try:
                remoting.ask(broker.endpoint, remoting.DELETE_TOPIC_IN_BROKER, {"topic": topic}, prefix=self._prefix)
            except remoting.Refused as refusal:
                if "TimerMessageStore" not in str(refusal):  # without a timer wheel it stumbles when all is done
                    raise
        remoting.ask(self.name_server, remoting.DELETE_TOPIC_IN_NAME_SERVER, {"topic": topic}, prefix=self._prefix)
        eventually(lambda: not self.queues(topic))

    def queues(self, topic: str) -> dict[str, int]:
        """Return how many queues of a topic the name server knows on each broker."""
        return {data["brokerName"]: data["readQueueNums"] for data in self._route(topic).get("queueDatas", [])}

    def mqadmin(self, *arguments: str) -> str:
        """Run a command of RocketMQ's own admin tool and return what it printed; its exit code tells nothing."""
        asked = arguments if "-n" in arguments else (*arguments, "-n", self.name_server)
        argv = self.java("org.apache.rocketmq.tools.command.MQAdminStartup", *asked, level="OFF")
        ended = subprocess.run(argv, cwd=self.folder, capture_output=True, text=True, check=False, timeout=120)
        return ended.stdout + ended.stderr

    def java(self, main: str, *arguments: str | Path, path: str = "", level: str = "INFO") -> list[str | Path]:
        """Return the command line of a Java program beside RocketMQ, its jars on the class path."""
        command = java.command(main, *arguments, home=self.folder, path=path or java.class_path(), level=level)
        return [*self._prefix, *command]

    def _launch_name_server(self) -> None:
        program = f"{self.name}-name-server"
        host, _, port = self.name_server.rpartition(":")
        settings = {
            "listenPort": port,
            "bindAddress": host,
            "rocketmqHome": self.folder,
            "kvConfigPath": self.folder / "name-server" / "kvConfig.json",
            "configStorePath": self.folder / "name-server" / "namesrv.properties",
        }
        if not self._program_runs("name-server"):
            self._need_ports(program, int(port))
            config = self._write("name-server.conf", settings)
            self.instance.start(program, self.java("org.apache.rocketmq.namesrv.NamesrvStartup", "-c", config))
        self.instance.wait(program, self._name_server_answers, _SECONDS, "RocketMQ's name server")

    def _launch(self, number: int, port: int | None = None) -> None:
        program, broker = f"{self.name}-broker-{number}", self.brokers[number]
        if self._program_runs(f"broker-{number}"):
            return
        store, listen = self.folder / broker.name, port or broker.port
        ha = self._ha_port(number)
        self._need_ports(program, listen, listen - 2, ha)
        settings: dict[str, object] = {
            **SMALL,
            "brokerClusterName": CLUSTER,
            "brokerName": broker.name,
            "brokerId": 0,
            "namesrvAddr": self.name_server,
            "listenPort": listen,
            "haListenPort": ha,
            "bindAddress": self.address,
            "brokerIP1": self.address,
            "brokerIP2": self.address,
            "rocketmqHome": self.folder,
            "storePathRootDir": store,
            **self.settings,
        }
        config = self._write(f"{broker.name}.conf", settings)
        cache.remove(store / "tmp")  # unpacked native libraries of a broker that was killed
        command = java.command(
            "org.apache.rocketmq.broker.BrokerStartup", "-c", config, home=store, path=java.class_path()
        )
        self.instance.start(program, [*self._prefix, *command])
        self.instance.write(str(self._note(number)), str(listen))

    def _wait_for(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            known = partial(self._is_routed, self.brokers[number])
            self.instance.wait(f"{self.name}-broker-{number}", known, _SECONDS, f"RocketMQ's broker {number}")

    def _is_routed(self, broker: Broker) -> bool:
        """Whether the name server leads to it: every broker has a topic of its own name, registered at its start."""
        try:
            found = self._route(broker.name).get("brokerDatas", [])
            if any(data["brokerAddrs"].get("0") == broker.endpoint for data in found):
                return True
            # A broker that starts before its name server client is ready registers 10 s later, or when this is set.
            permission = f"brokerPermission={self.settings.get('brokerPermission', 6)}"
            remoting.ask(broker.endpoint, remoting.UPDATE_BROKER_CONFIG, {}, permission, self._prefix)
        except (OSError, remoting.Refused):
            pass
        return False

    def _name_server_answers(self) -> bool:
        try:
            self._route(CLUSTER)
        except (OSError, remoting.Refused):
            return False
        return True

    def _route(self, topic: str) -> dict[str, Any]:
        try:
            fields = {"topic": topic, "acceptStandardJsonOnly": "true"}
            route: dict[str, Any] = remoting.ask(self.name_server, remoting.GET_ROUTE, fields, prefix=self._prefix)
        except remoting.Refused as refusal:
            if refusal.code != remoting.TOPIC_NOT_EXIST:
                raise
            return {}
        return route

    def _program_runs(self, name: str) -> bool:
        return self.instance.process(f"{self.name}-{name}") is not None

    def _signal(self, name: str, number: signal.Signals) -> None:
        for process in self.instance.processes():
            if process.program == f"{self.name}-{name}":
                process.signal(number)

    def _write(self, file: str, settings: Mapping[str, object]) -> Path:
        lines = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in settings.items()]
        return self.instance.write(f"{self.name}/{file}", "\n".join([*lines, ""]))

    def _note(self, number: int) -> Path:
        return self.folder / f"broker-{number}.port"

    def _wish(self, number: int) -> int:
        return self._port(f"{self.name}-broker-{number}", _BROKER_PORT + _STEP * number)

    def _port(self, what: str, wish: int) -> int:
        return self.instance.port(what, wish, self.address) if not self._prefix else wish

    def _ha_port(self, number: int) -> int:
        """Return the port for replicas; a broker always opens it, on all addresses, so each instance has its own."""
        wish = 20_000 + 32 * int(self.instance.block.split(".")[1]) + number
        return self.instance.port(f"{self.name}-broker-{number}-ha", wish, "0.0.0.0") if not self._prefix else wish

    def _need_ports(self, program: str, *ports: int) -> None:
        """Say which port is busy; one that a killed broker had is free a moment after its end."""
        for port in () if self._prefix else ports:
            try:
                eventually(partial(_is_free, self.address, port), 2)
            except TimeoutError:
                raise Missing(
                    f"{program} needs {self.address}:{port}, which is taken; end what listens there"
                ) from None

    def _need_disk(self) -> None:
        """RocketMQ takes no message on a disk that is nearly full, but says so only a minute after its start."""
        disk = shutil.disk_usage(self.instance.folder)
        if disk.used > _REFUSES_AT * (disk.used + disk.free):
            raise Missing(
                f"The disk of {self.instance.folder} is over {_REFUSES_AT:.0%} full, where RocketMQ takes no messages;"
                " free some or set ROTA_GROUND_HOME to a folder on another one"
            )


def _is_free(address: str, port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
        return True
