"""Secrets that groups name for their brokers, at an API server that has nothing else."""

import base64
from http import HTTPStatus
from typing import Any

import msgspec

from ground.keys import Pair
from rota.kube.client.api import ApiError


class GroupSecrets:
    """The API server; a Secret can be written anew at any time."""

    def __init__(self) -> None:
        self._data: dict[str, dict[str, str]] = {}

    def put(self, namespace: str, name: str, data: dict[str, str]) -> None:
        """Create a Secret, or replace what it holds."""
        encoded = {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}
        self._data[f"/api/v1/namespaces/{namespace}/secrets/{name}"] = encoded

    async def get(self, path: str, kind: type[Any]) -> Any:
        """Return a Secret."""
        if path not in self._data:
            raise ApiError(HTTPStatus.NOT_FOUND, "NotFound", "there is none")
        return msgspec.convert({"data": self._data[path]}, kind)


def pair_data(pair: Pair) -> dict[str, str]:
    """Return what a Secret of type kubernetes.io/tls holds."""
    return {"tls.crt": pair.certificate.read_text(), "tls.key": pair.key.read_text()}
