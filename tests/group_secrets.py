"""An API server in memory that serves only Secrets, with the credentials of groups."""

import base64
from http import HTTPStatus
from typing import Any

import msgspec

from ground.keys import Pair
from rota.kube.client.api import ApiError


class GroupSecrets:
    """The API server; a Secret can be replaced at any time."""

    def __init__(self) -> None:
        self._data: dict[str, dict[str, str]] = {}

    def put(self, namespace: str, name: str, data: dict[str, str]) -> None:
        """Create or replace a Secret."""
        encoded = {key: base64.b64encode(text.encode()).decode() for key, text in data.items()}
        self._data[f"/api/v1/namespaces/{namespace}/secrets/{name}"] = encoded

    async def get(self, path: str, kind: type[Any]) -> Any:
        """Return a Secret, or raise a 404."""
        if path not in self._data:
            raise ApiError(HTTPStatus.NOT_FOUND, "NotFound", "there is none")
        return msgspec.convert({"data": self._data[path]}, kind)


def pair_data(pair: Pair) -> dict[str, str]:
    """Return the data of a Secret of type kubernetes.io/tls."""
    return {"tls.crt": pair.certificate.read_text(), "tls.key": pair.key.read_text()}
