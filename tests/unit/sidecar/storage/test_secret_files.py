"""A member's credentials and TLS files: mounted Secrets, read together, and again when they are renewed."""

import ssl
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509

from ground.keys import Authority
from rota.sidecar.storage.environment import PodIdentity
from rota.sidecar.storage.secret_files import SecretFiles
from rota.spec import RocketMQ, Tls

IDENTITY = PodIdentity("a", "ns", "uid-a")


def mount(folder: Path, time: str, **files: str) -> None:
    """Mount files in the kubelet's way."""
    (folder / f"..{time}").mkdir(parents=True)
    for name, text in files.items():
        (folder / f"..{time}" / name).write_text(text)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")
    (folder / "..fresh").symlink_to(f"..{time}")
    (folder / "..fresh").rename(folder / "..data")


def keys(secrets: SecretFiles) -> tuple[str, str]:
    config = secrets.connection_config(RocketMQ(name_servers=["ns:9876"]))
    assert config.credentials
    credentials = config.credentials()
    return credentials.access_key, credentials.secret_key


def test_credentials_and_tls_are_absent_without_secrets() -> None:
    config = SecretFiles(IDENTITY).connection_config(RocketMQ(name_servers=["ns:9876"]))
    assert (config.credentials, config.tls) == (None, None)


def test_credentials_are_replaced_after_the_secret_is_renewed(tmp_path: Path) -> None:
    mount(tmp_path, "1", accessKey="rota\n", secretKey="one")
    secrets = SecretFiles(IDENTITY._replace(credentials_folder=str(tmp_path)))
    assert keys(secrets) == ("rota", "one")
    config = secrets.connection_config(RocketMQ(name_servers=["ns:9876"]))
    mount(tmp_path, "2", accessKey="rota", secretKey="two")
    secrets.renew_files()
    assert config.credentials
    assert config.credentials().secret_key == "two"


def test_credentials_unreadable_at_start_are_rejected_and_later_the_previous_ones_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secrets = SecretFiles(IDENTITY._replace(credentials_folder=str(tmp_path)))
    with pytest.raises(ValueError, match=r"cannot be read: .*; correct the Secret"):
        keys(secrets)
    mount(tmp_path, "1", accessKey="rota", secretKey="one")
    config = secrets.connection_config(RocketMQ(name_servers=["ns:9876"]))
    mount(tmp_path, "2", accessKey="rota")
    (tmp_path / "..1" / "secretKey").unlink()
    for _ in range(2):
        secrets.renew_files()
    assert config.credentials
    assert config.credentials().secret_key == "one"
    assert len([message for message in caplog.messages if "the previous files stay in use" in message]) == 1


def test_tls_trusts_a_new_certificate_authority_and_not_the_replaced_one(tmp_path: Path) -> None:
    first, second = (Authority(tmp_path / "keys", name).own.certificate.read_text() for name in ("one", "other"))
    mount(tmp_path / "ca", "1", **{"ca.crt": first})
    secrets = SecretFiles(IDENTITY._replace(ca_folder=str(tmp_path / "ca")))
    tls = secrets.connection_config(RocketMQ(name_servers=["ns:9876"], tls=Tls(enabled=True))).tls
    assert tls
    context = tls()
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert trusted_authorities(context) == trusted_authorities(context_of(first))
    secrets.renew_files()
    assert tls() is context, "the files are unchanged"
    for time, text in (("2", second), ("3", "nonsense")):
        mount(tmp_path / "ca", time, **{"ca.crt": text})
        secrets.renew_files()
        assert trusted_authorities(tls()) == trusted_authorities(context_of(second))
    mount(tmp_path / "ca", "4", **{"ca.crt": f"# Zürich\n{first}# and\n{second}"})
    secrets.renew_files()
    assert len(trusted_authorities(tls())) == 2


def context_of(authority: str) -> ssl.SSLContext:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.load_verify_locations(cadata=authority)
    return tls


def trusted_authorities(tls: ssl.SSLContext) -> list[bytes]:
    return tls.get_ca_certs(binary_form=True)


@pytest.mark.parametrize("text", ["nonsense", ""])
def test_tls_certificate_authority_that_is_invalid_is_rejected_with_a_sentence(tmp_path: Path, text: str) -> None:
    mount(tmp_path, "1", **{"ca.crt": text})
    secrets = SecretFiles(IDENTITY._replace(ca_folder=str(tmp_path)))
    with pytest.raises(ValueError, match=r"There is no certificate in .*/ca.crt: .*; add one in PEM format"):
        secrets.connection_config(RocketMQ(name_servers=["ns:9876"], tls=Tls(enabled=True)))


def secrets_with_client_certificate(tmp_path: Path) -> tuple[SecretFiles, Authority, Path]:
    """Return the SecretFiles of a member with a client certificate, its authority, and the Secret's mount folder."""
    authority = Authority(tmp_path / "keys", "authority")
    folder = tmp_path / "client"
    return SecretFiles(IDENTITY._replace(client_folder=str(folder))), authority, folder


def mount_pair(folder: Path, time: str, authority: Authority, name: str) -> None:
    pair = authority.issue(name, name)
    mount(folder, time, **{"tls.crt": pair.certificate.read_text(), "tls.key": pair.key.read_text()})


def presented_name(tls: ssl.SSLContext, authority: Authority) -> str:
    """Return the common name that a server sees in the certificate of a client with this context."""
    pair = authority.issue("server", "server", dns=["broker"])
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(pair.certificate, pair.key)
    server.load_verify_locations(authority.own.certificate)
    server.verify_mode = ssl.CERT_REQUIRED
    tls.load_verify_locations(authority.own.certificate)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_side = tls.wrap_bio(to_client, to_server, server_hostname="broker")
    server_side = server.wrap_bio(to_server, to_client, server_side=True)
    for side in (client_side, server_side, client_side, server_side):
        with suppress(ssl.SSLWantReadError):
            side.do_handshake()
    certificate = server_side.getpeercert()
    assert certificate
    subject = certificate["subject"]
    return str(dict(field[0] for field in subject)["commonName"])  # type: ignore[misc]


def test_tls_presents_the_client_certificate_and_a_renewed_one(tmp_path: Path) -> None:
    secrets, authority, folder = secrets_with_client_certificate(tmp_path)
    mount_pair(folder, "1", authority, "one")
    tls = secrets.connection_config(RocketMQ(name_servers=["ns:9876"], tls=Tls(enabled=True))).tls
    assert tls
    assert presented_name(tls(), authority) == "one"
    mount_pair(folder, "2", authority, "two")
    secrets.renew_files()
    assert presented_name(tls(), authority) == "two"
    mount(folder, "3", **{"tls.crt": "nonsense", "tls.key": "nonsense"})
    secrets.renew_files()
    assert presented_name(tls(), authority) == "two", "an unusable certificate does not replace the previous one"


def test_tls_validity_is_that_of_the_client_certificate_in_use(tmp_path: Path) -> None:
    secrets, authority, folder = secrets_with_client_certificate(tmp_path)
    assert secrets.client_validity() is None
    mount_pair(folder, "1", authority, "one")
    secrets.connection_config(RocketMQ(name_servers=["ns:9876"], tls=Tls(enabled=True)))
    validity = secrets.client_validity()
    assert validity
    certificate = x509.load_pem_x509_certificate(authority.issue("one", "one").certificate.read_bytes())
    assert validity.not_after == certificate.not_valid_after_utc.timestamp()
    mount(folder, "2", **{"tls.crt": "nonsense", "tls.key": "nonsense"})
    secrets.renew_files()
    assert secrets.client_validity() == validity
    secrets.connection_config(RocketMQ(name_servers=["ns:9876"]))
    assert secrets.client_validity() is None, "without TLS no certificate is presented"


def test_tls_client_certificate_is_renewed_although_the_credentials_cannot_be_read(tmp_path: Path) -> None:
    secrets, authority, folder = secrets_with_client_certificate(tmp_path)
    mount(tmp_path / "acl", "1", accessKey="rota", secretKey="one")
    mount_pair(folder, "1", authority, "one")
    secrets = SecretFiles(IDENTITY._replace(client_folder=str(folder), credentials_folder=str(tmp_path / "acl")))
    tls = secrets.connection_config(RocketMQ(name_servers=["ns:9876"], tls=Tls(enabled=True))).tls
    assert tls
    mount(tmp_path / "acl", "2", accessKey="rota")
    (tmp_path / "acl" / "..1" / "secretKey").unlink()
    mount_pair(folder, "2", authority, "two")
    secrets.renew_files()
    assert presented_name(tls(), authority) == "two"


@pytest.mark.parametrize("files", [{}, {"tls.crt": "nonsense", "tls.key": "nonsense"}])
def test_tls_client_certificate_that_is_invalid_is_rejected_with_a_sentence(
    tmp_path: Path, files: dict[str, str]
) -> None:
    secrets, _, folder = secrets_with_client_certificate(tmp_path)
    mount(folder, "1", **files)
    with pytest.raises(
        ValueError, match=r"There is no usable tls.crt and tls.key in .*/client: .*; correct the Secret"
    ):
        secrets.connection_config(RocketMQ(name_servers=["ns:9876"], tls=Tls(enabled=True)))
