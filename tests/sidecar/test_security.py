"""A sidecar at a broker that requires credentials and TLS; its secrets are corrected while it runs."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from cryptography import x509

from brokers.guarded import RIGHT, SETTINGS, a_mutual_tls_broker, a_tls_broker
from ground.keys import Authority, Pair
from ground.poll import soon
from ground.rocketmq import RocketMQ
from rota.brokers.rocketmq.routing import ConnectionConfig
from sidecar.fleet import SidecarFleet, a_fleet
from sidecar.pods import Pod

SECURED = {"credentialsSecret": {"name": "acl"}, "tls": {"enabled": True, "caSecret": {"name": "ca"}}}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("keys"), "authority")


@pytest.fixture(scope="module")
def guarded(authority: Authority) -> Iterator[RocketMQ]:
    with a_tls_broker(authority, "secured", settings=SETTINGS) as brokers:
        yield brokers


@pytest.fixture(scope="module")
def mutual(authority: Authority) -> Iterator[RocketMQ]:
    with a_mutual_tls_broker(authority, "mutual") as brokers:
        yield brokers


@pytest.mark.slow("a sidecar's credentials and CA are corrected while it runs, at a real broker")
async def test_credentials_and_ca_that_are_wrong_are_reported_until_the_secrets_are_fixed(
    guarded: RocketMQ, authority: Authority, tmp_path: Path
) -> None:
    trusting = ssl.create_default_context(cafile=str(authority.own.certificate))
    site = ConnectionConfig([guarded.name_server], lambda: trusting, lambda: RIGHT)
    broker = {"rocketmq": {"nameServers": [guarded.name_server], **SECURED}}
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    wrong = Authority(tmp_path / "wrong", "stranger")
    secrets.joinpath("ca.crt").write_bytes(wrong.own.certificate.read_bytes())
    secrets.joinpath("accessKey").write_text(RIGHT.access_key)
    secrets.joinpath("secretKey").write_text("wrong")
    async with a_fleet(guarded, tmp_path, site=site, broker=broker) as fleet:
        fleet.variables = {"ROTA_CREDENTIALS": str(secrets), "ROTA_CA": str(secrets)}
        pod = await fleet.add("a")
        fleet.owners = dict.fromkeys([*fleet.queues, fleet.retry], "a")
        fleet.publish()
        await fleet.send(20)
        assert "certificate verify failed" in await wait_for_problem(fleet, pod, "BrokerUnreachable")
        secrets.joinpath("ca.crt").write_bytes(authority.own.certificate.read_bytes())
        assert "check signature failed" in await wait_for_problem(fleet, pod, "BrokerRefuses")
        assert not fleet.delivered()
        secrets.joinpath("secretKey").write_text(RIGHT.secret_key)
        await fleet.wait_until_all_done()
        await fleet.wait_until_all_committed()
        report = await fleet.read_report("a")
        assert report
        assert report.troubles == {}
        assert RIGHT.secret_key not in pod.log.read_text()
        await fleet.check()


@pytest.mark.slow("a sidecar at a real broker that requires a client certificate")
async def test_tls_client_certificate_that_is_missing_or_foreign_is_reported_until_the_secret_is_fixed(
    mutual: RocketMQ, authority: Authority, tmp_path: Path
) -> None:
    own = authority.issue("tests", "tests")
    trusting = ssl.create_default_context(cafile=str(authority.own.certificate))
    trusting.load_cert_chain(own.certificate, own.key)
    site = ConnectionConfig([mutual.name_server], lambda: trusting)
    tls = {"enabled": True, "caSecret": {"name": "ca"}, "clientSecret": {"name": "client"}}
    secrets = tmp_path / "secrets"
    secrets.mkdir()
    secrets.joinpath("ca.crt").write_bytes(authority.own.certificate.read_bytes())
    put_pair(secrets, Authority(tmp_path / "other", "stranger").issue("foreign", "foreign"))
    async with a_fleet(
        mutual, tmp_path, site=site, broker={"rocketmq": {"nameServers": [mutual.name_server], "tls": tls}}
    ) as fleet:
        fleet.variables = {"ROTA_CLIENT": str(secrets), "ROTA_CA": str(secrets)}
        pod = await fleet.add("a")
        fleet.owners = dict.fromkeys([*fleet.queues, fleet.retry], "a")
        fleet.publish()
        await fleet.send(20)
        assert await wait_for_problem(fleet, pod, "BrokerUnreachable")
        assert not fleet.delivered()
        put_pair(secrets, authority.issue("member", "member"))
        await fleet.wait_until_all_done()
        certificate = x509.load_pem_x509_certificate(secrets.joinpath("tls.crt").read_bytes())
        expiration = f"{certificate.not_valid_after_utc.timestamp():.0f}"
        metrics = await pod.get(fleet.session, "/metrics")
        assert f"rota_sidecar_client_certificate_expiration_timestamp_seconds {expiration}\n" in metrics
        await fleet.check()


def put_pair(folder: Path, pair: Pair) -> None:
    folder.joinpath("tls.crt").write_bytes(pair.certificate.read_bytes())
    folder.joinpath("tls.key").write_bytes(pair.key.read_bytes())


async def wait_for_problem(fleet: SidecarFleet, pod: Pod, reason: str) -> str:
    """Return the sentence of a problem, once the sidecar reports it."""

    async def find_problem() -> str:
        report = await pod.report(fleet.session)
        return report.troubles.get(reason, "") if report else ""

    return await soon(find_problem)
