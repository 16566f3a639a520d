"""A real RocketMQ: a name server and one to three brokers, each on the instance's addresses with a store of its own."""

import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ground import cache, java, remoting
from ground.instance import Instance
from ground.poll import eventually
from ground.report import Missing, progress

NAME_SERVER = "name-server"
_NAME_SERVER_PORT = 9876
_BROKER_PORT = 10911  # plus 20 for each further broker: a broker needs its port, and its port - 2
_FULL_RATIO = 0.9  # of the disk in use; RocketMQ limits every such setting to this
_START_SECONDS = 90

# Files are small, and sparse: an idle broker takes 20 MB of disk.
SMALL: Mapping[str, object] = {
    "mappedFileSizeCommitLog": 64 * 2**20,
    "mappedFileSizeConsumeQueue": 30_000 * 20,
    "maxHashSlotNum": 10_000,
    "maxIndexNum": 40_000,
    "timerWheelEnable": False,  # it takes 140 MB; POP does not work without it
    "diskMaxUsedSpaceRatio": 95,
    "registerNameServerPeriod": 10_000,  # the shortest that RocketMQ accepts
    # A busy broker would otherwise reject messages that have waited for 200 ms, or during a write that takes 1 s.
    "waitTimeMillsInSendQueue": 60_000,
    "osPageCacheBusyTimeOutMills": 60_000,
    "transactionMetricFlushInterval": 500,  # a broker spins until the first flush: 10 s by default
}


@dataclass(frozen=True)
class Broker:
    """The name and address of a broker."""

    name: str
    address: str
    port: int

    @property
    def endpoint(self) -> str:
        """The broker's "ip:port"."""
        return f"{self.address}:{self.port}"


class RocketMQ:
    """The name server and the brokers of one instance; brokers are identified by their number, from 0."""

    def __init__(
        self,
        instance: Instance,
        brokers: int = 1,
        *,
        address: str | None = None,
        prefix: Sequence[str] = (),
        settings: Mapping[str, object] | None = None,
    ) -> None:
        """Describe the servers; `up` starts them.

        `prefix` is put before every command, to start it in another network, whose `address` this machine must reach.
        `settings` go into every broker's file; they may be changed before a broker is started again.
        """
        self.instance = instance
        self.folder = instance.folder / "rocketmq"
        self.address = address or instance.address()
        self.settings = dict(settings or {})
        self._count = brokers
        self._prefix = prefix

    @property
    def name_server(self) -> str:
        """The name server's "ip:port"."""
        return f"{self.address}:{self._port(NAME_SERVER, _NAME_SERVER_PORT)}"

    @property
    def brokers(self) -> list[Broker]:
        """The brokers, with their latest ports."""
        return [self._broker(number) for number in range(self._count)]

    def up(self) -> None:
        """Start the servers that do not run, and wait until the name server knows every broker."""
        java.jars()
        self._need_disk()
        all_run = all(self.instance.process(name) for name in self._programs())
        with nullcontext() if all_run else progress(f"starting RocketMQ with {self._count} broker(s)"):
            self.start_name_server()
            for number in range(self._count):
                self._launch(number)
            self._wait_for(self.brokers)

    def down(self) -> None:
        """Stop all servers and remove their store."""
        for program in self._programs():
            self.instance.kill(program)  # an orderly end takes 10 s, and the store is removed anyway
        cache.remove(self.folder)

    def start_broker(self, number: int, port: int | None = None) -> None:
        """Start a broker again with its stored messages, on its previous port or another one."""
        self._launch(number, port)
        self._wait_for([self.brokers[number]])

    def kill_broker(self, number: int) -> None:
        """End a broker at once, as a crash would."""
        self.instance.kill(f"broker-{number}")

    def stop_broker(self, number: int) -> None:
        """Suspend a broker: its connections stay open, and no request is answered."""
        self._signal(f"broker-{number}", signal.SIGSTOP)

    def continue_broker(self, number: int) -> None:
        """Resume a suspended broker."""
        self._signal(f"broker-{number}", signal.SIGCONT)

    def stop_name_server(self) -> None:
        """End the name server; brokers and clients continue with their last routes."""
        self.instance.kill(NAME_SERVER)

    def start_name_server(self) -> None:
        """Start the name server again, empty; brokers register within 10 s, or when `up` makes them."""
        port = self._port(NAME_SERVER, _NAME_SERVER_PORT)
        settings = {
            "listenPort": port,
            "bindAddress": self.address,
            "rocketmqHome": self.folder,
            "kvConfigPath": self.folder / "kvConfig.json",
            "configStorePath": self.folder / "namesrv.properties",
        }
        if not self.instance.process(NAME_SERVER):
            self._need_ports(NAME_SERVER, port)
            config = self._write(NAME_SERVER, settings)
            self.instance.start(NAME_SERVER, self.java("org.apache.rocketmq.namesrv.NamesrvStartup", "-c", config))
        self.instance.wait(NAME_SERVER, self._name_server_answers, _START_SECONDS, "RocketMQ's name server")

    def change_setting(self, broker: Broker, name: str, value: object) -> None:
        """Change a setting of a running broker, until its next start."""
        remoting.ask(broker.endpoint, remoting.UPDATE_BROKER_CONFIG, {}, f"{name}={_text(value)}")

    def create_topic(self, topic: str, queues: int, *, brokers: Sequence[int] | None = None) -> None:
        """Create a topic with that many queues on each of these brokers (default: all), or change it to that many."""
        targets = self.brokers if brokers is None else [self.brokers[number] for number in brokers]
        for broker in targets:
            remoting.create_topic(broker.endpoint, topic, queues)
        counts = {broker.name: queues for broker in targets}
        eventually(lambda: counts.items() <= self.queues(topic).items())

    def delete_topic(self, topic: str) -> None:
        """Delete a topic everywhere."""
        for broker in self.brokers:
            try:
                remoting.ask(broker.endpoint, remoting.DELETE_TOPIC_IN_BROKER, {"topic": topic})
            except remoting.Refused as refusal:
                if "TimerMessageStore" not in str(
                    refusal
                ):  # without a timer wheel the broker reports this error after the topic is deleted
                    raise
        remoting.ask(self.name_server, remoting.DELETE_TOPIC_IN_NAME_SERVER, {"topic": topic})
        eventually(lambda: not self.queues(topic))

    def queues(self, topic: str) -> dict[str, int]:
        """Return the number of a topic's queues on each broker, as the name server knows them."""
        return {data["brokerName"]: data["readQueueNums"] for data in self._route(topic).get("queueDatas", [])}

    def mqadmin(self, *arguments: str) -> str:
        """Run a command of RocketMQ's own admin tool and return its output; its exit code means nothing."""
        main = "org.apache.rocketmq.tools.command.MQAdminStartup"
        argv = self.java(main, *arguments, "-n", self.name_server, level="OFF")
        ended = subprocess.run(argv, cwd=self.folder, capture_output=True, text=True, check=False, timeout=120)
        return ended.stdout + ended.stderr

    def java(self, main: str, *arguments: str | Path, path: str = "", level: str = "INFO") -> list[str | Path]:
        """Return the command line of a Java program with RocketMQ's jars on the class path."""
        command = java.command(main, *arguments, home=self.folder, path=path or java.class_path(), level=level)
        return [*self._prefix, *command]

    def _launch(self, number: int, port: int | None = None) -> None:
        broker = self._broker(number, port)
        if self.instance.process(broker.name):
            return
        ha = self._ha_port(number)
        self._need_ports(broker.name, broker.port, broker.port - 2, ha)
        store = self.folder / broker.name
        settings: dict[str, object] = {
            **SMALL,
            "brokerClusterName": "DefaultCluster",
            "brokerName": broker.name,
            "brokerId": 0,
            "namesrvAddr": self.name_server,
            "listenPort": broker.port,
            "haListenPort": ha,
            "bindAddress": self.address,
            "brokerIP1": self.address,
            "brokerIP2": self.address,
            "rocketmqHome": self.folder,
            "storePathRootDir": store,
            **self.settings,
        }
        config = self._write(broker.name, settings)
        cache.remove(store / "tmp")  # native libraries that a killed broker had unpacked
        self.instance.write(f"rocketmq/{broker.name}.port", str(broker.port))
        main = "org.apache.rocketmq.broker.BrokerStartup"
        command = java.command(main, "-c", config, home=store, path=java.class_path())
        self.instance.start(broker.name, [*self._prefix, *command])

    def _wait_for(self, brokers: Sequence[Broker]) -> None:
        for broker in brokers:
            self.instance.wait(
                broker.name, partial(self._is_routed, broker), _START_SECONDS, f"RocketMQ's {broker.name}"
            )

    def _is_routed(self, broker: Broker) -> bool:
        """Whether the name server has the broker's route: each broker registers a topic of its name at start."""
        try:
            brokers = self._route(broker.name).get("brokerDatas", [])
            if any(data["brokerAddrs"].get("0") == broker.endpoint for data in brokers):
                return True
            # A broker that starts before its name server client is ready registers 10 s later, or when this is set.
            self.change_setting(broker, "brokerPermission", self.settings.get("brokerPermission", 6))
        except (OSError, remoting.Refused):
            pass
        return False

    def _name_server_answers(self) -> bool:
        try:
            return self._route("any") == {}
        except (OSError, remoting.Refused):
            return False

    def _route(self, topic: str) -> dict[str, Any]:
        try:
            fields = {"topic": topic, "acceptStandardJsonOnly": "true"}
            route: dict[str, Any] = remoting.ask(self.name_server, remoting.GET_ROUTE, fields)
        except remoting.Refused as refusal:
            if refusal.code != remoting.TOPIC_NOT_EXIST:
                raise
            return {}
        return route

    def _programs(self) -> list[str]:
        return [NAME_SERVER, *(f"broker-{number}" for number in range(self._count))]

    def _signal(self, program: str, number: signal.Signals) -> None:
        for process in self.instance.processes():
            if process.program == program:
                process.signal(number)

    def _write(self, program: str, settings: Mapping[str, object]) -> Path:
        lines = [f"{key}={_text(value)}" for key, value in settings.items()]
        return self.instance.write(f"rocketmq/{program}.conf", "\n".join([*lines, ""]))

    def _broker(self, number: int, port: int | None = None) -> Broker:
        name = f"broker-{number}"
        preferred = _BROKER_PORT + 20 * number
        noted = self.folder / f"{name}.port"
        return Broker(
            name, self.address, port or (int(noted.read_text()) if noted.exists() else self._port(name, preferred))
        )

    def _port(self, what: str, preferred: int) -> int:
        return self.instance.port(what, preferred, self.address) if not self._prefix else preferred

    def _ha_port(self, number: int) -> int:
        """Return the port for replicas; a broker always opens it, on all addresses, so each instance has its own."""
        preferred = 20_000 + 32 * int(self.instance.block.split(".")[1]) + number
        return self.instance.port(f"broker-{number}-ha", preferred, "0.0.0.0") if not self._prefix else preferred

    def _need_ports(self, program: str, *ports: int) -> None:
        for port in () if self._prefix else ports:
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((self.address, port))
                except OSError as error:
                    raise Missing(f"{program} needs {self.address}:{port} ({error.strerror}); free that port") from None

    def _need_disk(self) -> None:
        """Raise if the disk is nearly full: RocketMQ then rejects messages, but reports it only after a minute."""
        disk = shutil.disk_usage(self.instance.folder)
        if disk.used > _FULL_RATIO * (disk.used + disk.free):
            raise Missing(
                f"The disk of {self.instance.folder} is over {_FULL_RATIO:.0%} full, where RocketMQ takes no messages;"
                " free some or set ROTA_GROUND_HOME to a folder on another one"
            )


def _text(value: object) -> str:
    """Return a setting's value in the format of Java's properties."""
    return str(value).lower() if isinstance(value, bool) else str(value)
