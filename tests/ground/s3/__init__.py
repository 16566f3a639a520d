"""A real S3 server: moto's, with buckets for tests, and a proxy in front of it that fails as asked."""

import secrets
import sys
import urllib.request
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ground import cache
from ground.instance import Instance
from ground.poll import answers
from ground.programs import install

_FOLDER = Path(__file__).parent
_PORT = 9000
REQUIREMENTS = _FOLDER / "requirements.txt"


def packages() -> Path:
    """Return a folder with moto and its dependencies, installed once from PyPI."""
    return cache.entry("moto", REQUIREMENTS.read_text(), partial(install, ["-r", str(REQUIREMENTS)], "moto"))


class Bucket(NamedTuple):
    """An empty bucket of a server."""

    endpoint: str
    name: str

    @property
    def uri(self) -> str:
        """The bucket's URI."""
        return f"s3://{self.name}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables by which obstore and deltalake find and enter it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "ground",
            "AWS_SECRET_ACCESS_KEY": "ground",
            "AWS_CONDITIONAL_PUT": "etag",
        }


class S3Server:
    """The S3 server of an instance; objects are in its memory."""

    def __init__(self, instance: Instance, host: str = "", prefix: Sequence[str] = ()) -> None:
        """Describe the server; `up` starts it.

        `prefix` is put before its command, to start it in another network, where this machine reaches it at `host`.
        """
        self.instance = instance
        self._host = host or instance.address()
        self._prefix = prefix

    @property
    def address(self) -> tuple[str, int]:
        """The server's address."""
        return self._host, _PORT if self._prefix else self.instance.port("s3", _PORT, self._host)

    @property
    def endpoint(self) -> str:
        """The server's URL."""
        host, port = self.address
        return f"http://{host}:{port}"

    def up(self) -> None:
        """Start the server and wait until it answers."""
        host, port = self.address
        environment = {"PYTHONPATH": str(packages()), "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": str(2**30)}
        argv: list[str | Path] = [*self._prefix, sys.executable, _FOLDER / "server.py", host, str(port)]
        self.instance.start("s3", argv, env=environment)
        self.instance.wait("s3", partial(answers, f"{self.endpoint}/moto-api/"), 60, "The S3 server")

    def down(self) -> None:
        """Stop the server; its objects end with it."""
        self.instance.stop("s3", grace=2)

    def bucket(self, name: str = "") -> Bucket:
        """Create a bucket; without a name a new and empty one."""
        name = name or f"rota-{secrets.token_hex(8)}"
        request = urllib.request.Request(f"{self.endpoint}/{name}", data=b"", method="PUT")
        with urllib.request.urlopen(request, timeout=30):
            return Bucket(self.endpoint, name)
