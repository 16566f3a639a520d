"""A standalone Spark cluster on loopback: a master and two workers, of the Spark that the environment has."""

import importlib.util
import json
import os
import sys
import urllib.request
from functools import partial
from pathlib import Path

from ground import java
from ground.instance import Instance
from ground.report import Missing

WORKERS = 2
START_SECONDS = 120
_PACKAGE = "org.apache.spark.deploy"
_WORKER_MEMORY = "1g"


def spark_home() -> Path:
    """Return the folder of the installed pyspark, which is a whole Spark."""
    found = importlib.util.find_spec("pyspark")
    if not found or not found.origin:
        raise Missing("pyspark is not installed; a Spark cluster runs its jars")
    return Path(found.origin).parent


def plain_python() -> Path:
    """Return the Python below the virtual environment, which has none of its packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return Path(sys.base_prefix, "bin", version)


class SparkCluster:
    """The Spark cluster of an instance. Its executors find `python3` on their path: one without any packages."""

    def __init__(self, instance: Instance) -> None:
        """Describe the cluster; `up` starts it."""
        self.instance = instance
        self.host = instance.address()
        self._port = instance.port("spark-master", 7077)
        self._page_port = instance.port("spark-master-page", 8080)

    @property
    def url(self) -> str:
        """The URL for spark-submit --master."""
        return f"spark://{self.host}:{self._port}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment of Spark's programs: the cluster's Spark, and a Python without packages."""
        path = f"{self._programs()}:{os.environ.get('PATH', '/usr/bin:/bin')}"
        return {
            "SPARK_HOME": str(spark_home()),
            "SPARK_SCALA_VERSION": "2.13",  # as Spark's scripts set it; workers take it for that of a source tree
            "SPARK_LOCAL_IP": self.host,
            "PATH": path,
            "PYTHONPATH": "",
        }

    def up(self) -> None:
        """Start master and workers, and wait until all workers are known to the master."""
        arguments = ("--host", self.host, "--port", str(self._port), "--webui-port", str(self._page_port))
        self._start("spark-master", "master.Master", *arguments)
        self.instance.wait("spark-master", partial(self.has_workers, 0), START_SECONDS, "Spark's master")
        for number in range(1, WORKERS + 1):
            self.start_worker(number)
        self.instance.wait("spark-master", partial(self.has_workers, WORKERS), START_SECONDS, "A Spark worker")

    def down(self) -> None:
        """Stop the cluster, with the executors of running applications."""
        for number in range(1, WORKERS + 1):
            self.kill_worker(number)
        self.instance.stop("spark-master", grace=2)

    def start_worker(self, number: int) -> None:
        """Start a worker of one core."""
        folder = self.instance.folder / f"spark-worker-{number}"
        arguments = ("--host", self.host, "--cores", "1", "--memory", _WORKER_MEMORY, "--work-dir", str(folder))
        self._start(f"spark-worker-{number}", "worker.Worker", *arguments, "--webui-port", "0", self.url)

    def kill_worker(self, number: int) -> None:
        """Kill a worker with its executor and Python tasks, as the loss of a machine."""
        self.instance.kill(f"spark-worker-{number}")

    def has_workers(self, number: int) -> bool:
        """Whether the master answers, and knows that many workers that are alive."""
        try:
            with urllib.request.urlopen(f"http://{self.host}:{self._page_port}/json/", timeout=5) as answer:
                workers: list[dict[str, str]] = json.load(answer)["workers"]
        except OSError:
            return False
        return [worker["state"] for worker in workers].count("ALIVE") >= number

    def _start(self, program: str, main: str, *arguments: str) -> None:
        home = self.instance.folder / program
        path = f"{spark_home()}/jars/*"
        argv = java.command(f"{_PACKAGE}.{main}", *arguments, home=home, path=path, level="WARN")
        environment = {**self.variables, "SPARK_LOCAL_DIRS": str(home / "tmp")}
        self.instance.start(program, argv, env=environment, cwd=home)

    def _programs(self) -> Path:
        folder = self.instance.folder / "spark-programs"
        folder.mkdir(exist_ok=True)
        for name, program in (("python3", plain_python()), ("spark-submit", spark_home() / "bin" / "spark-submit")):
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(program)
        return folder
