"""Access to brokers with the Secrets that a group names."""

import base64
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from cryptography import x509

from ground.keys import Authority
from rota.kube.brokers.broker_access import BrokerAccessReader, MissingSecretError
from rota.kube.client.api import Api
from rota.spec import Reference, RocketMQ, Tls

MUTUAL = RocketMQ(name_servers=["ns:9876"], tls=Tls(enabled=True, client_secret=Reference(name="client")))


class Secrets:
    """An API server with one Secret."""

    def __init__(self, **data: str) -> None:
        self.data = {name.replace("_", "."): base64.b64encode(text.encode()).decode() for name, text in data.items()}

    async def get(self, path: str, kind: type[Any]) -> Any:
        assert path == "/api/v1/namespaces/shop/secrets/client"
        return msgspec.convert({"data": self.data}, kind)


def reader_of(secrets: Secrets) -> BrokerAccessReader:
    return BrokerAccessReader(cast("Api", secrets), None)


def a_pair(folder: Path, name: str) -> dict[str, str]:
    pair = Authority(folder, "authority").issue(name, name)
    return {"tls_crt": pair.certificate.read_text(), "tls_key": pair.key.read_text()}


async def test_tls_client_certificate_gets_a_context_and_a_renewed_one_a_new_context(tmp_path: Path) -> None:
    first = await reader_of(Secrets(**a_pair(tmp_path, "one"))).read("shop", MUTUAL, ())
    assert first.config.tls
    assert first.config.tls() is not None
    unchanged = await reader_of(Secrets(**a_pair(tmp_path, "one"))).read("shop", MUTUAL, {first.cluster_key})
    assert (unchanged.cluster_key, unchanged.config.tls) == (first.cluster_key, None)
    renewed = await reader_of(Secrets(**a_pair(tmp_path, "two"))).read("shop", MUTUAL, {first.cluster_key})
    assert renewed.cluster_key != first.cluster_key
    assert renewed.config.tls
    assert "PRIVATE KEY" not in repr(renewed)


async def test_tls_validity_of_the_client_certificate_is_read(tmp_path: Path) -> None:
    access = await reader_of(Secrets(**a_pair(tmp_path, "one"))).read("shop", MUTUAL, ())
    certificate = x509.load_pem_x509_certificate((tmp_path / "one.crt").read_bytes())
    times = certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()
    assert access.client_validity == times
    assert (await reader_of(Secrets()).read("shop", RocketMQ(name_servers=["ns:9876"]), ())).client_validity is None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "Secret client has no key tls.crt; add it"),
        ({"tls_crt": "x"}, "Secret client has no key tls.key; add it"),
        (
            {"tls_crt": "x", "tls_key": "x"},
            "Secret client has no usable certificate and key under tls.crt and tls.key: .*; correct them",
        ),
    ],
)
async def test_tls_client_certificate_that_cannot_be_used_is_a_sentence(data: dict[str, str], message: str) -> None:
    with pytest.raises(MissingSecretError, match=message):
        await reader_of(Secrets(**data)).read("shop", MUTUAL, ())


async def test_tls_client_secret_is_not_read_while_tls_is_off() -> None:
    without_tls = msgspec.structs.replace(MUTUAL, tls=msgspec.structs.replace(MUTUAL.tls, enabled=False))
    assert (await reader_of(Secrets()).read("shop", without_tls, ())).config.tls is None
