"""Tests TLS contexts and certificates from text in memory."""

import datetime as dt
import os
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from ground.keys import Authority
from rota.tls import KeyPair, Validity, certificate_validity, client_context, load_key_pair, read_key_pair


def a_pair(folder: Path, name: str = "one") -> KeyPair:
    pair = Authority(folder, "authority").issue(name, name)
    return KeyPair(pair.certificate.read_text(), pair.key.read_text())


@pytest.mark.parametrize("has_memory_files", [True, False])
def test_tls_key_pair_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_memory_files: bool) -> None:
    if not has_memory_files:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    load_key_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), a_pair(tmp_path))


def test_tls_key_pair_with_the_key_of_another_certificate_is_rejected(tmp_path: Path) -> None:
    pair = a_pair(tmp_path)._replace(key=a_pair(tmp_path, "two").key)
    with pytest.raises(ValueError, match="KEY_VALUES_MISMATCH"):
        load_key_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), pair)


def test_tls_key_that_is_encrypted_is_rejected_without_asking_for_its_password(tmp_path: Path) -> None:
    pair = a_pair(tmp_path)
    key = serialization.load_pem_private_key(pair.key.encode(), None)
    encrypted = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    )
    with pytest.raises(ValueError, match=r"\w"):
        load_key_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), pair._replace(key=encrypted.decode()))


@pytest.mark.parametrize("text", ["", "nonsense", "-----BEGIN CERTIFICATE-----\nYQ==\n-----END CERTIFICATE-----"])
def test_tls_authority_that_is_no_certificate_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        client_context(text)


def test_tls_private_key_stays_out_of_logs(tmp_path: Path) -> None:
    pair = a_pair(tmp_path)
    assert pair.key not in f"{pair} {pair!r}"


def test_tls_key_pair_of_a_mounted_secret_is_read_from_one_version(tmp_path: Path) -> None:
    for version, text in (("..1", "old"), ("..2", "new")):
        (tmp_path / version).mkdir()
        for name in ("tls.crt", "tls.key"):
            (tmp_path / version / name).write_text(text)
    for name in ("tls.crt", "tls.key"):  # as a kubelet links them; tls.key already links to the next version
        (tmp_path / name).symlink_to(f"..{1 + (name == 'tls.key')}/{name}")
    (tmp_path / "..data").symlink_to("..1")
    assert read_key_pair(tmp_path) == KeyPair("old", "old")


def certificate(not_before: dt.datetime, not_after: dt.datetime) -> str:
    """Return a certificate in PEM that is valid between two times."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), not_before, not_after)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


@pytest.mark.parametrize(
    "time",
    [
        dt.datetime(1951, 2, 3, 4, 5, 6, tzinfo=dt.UTC),
        dt.datetime(1999, 12, 31, 23, 59, 59, tzinfo=dt.UTC),
        dt.datetime(2026, 11, 27, 8, 0, 1, tzinfo=dt.UTC),
        dt.datetime(2049, 12, 31, 23, 59, 59, tzinfo=dt.UTC),
        dt.datetime(2050, 1, 1, tzinfo=dt.UTC),
        dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC),
    ],
)
def test_tls_validity_of_a_certificate_is_read(time: dt.datetime) -> None:
    text = certificate(dt.datetime(1950, 1, 1, tzinfo=dt.UTC), time)
    assert certificate_validity(KeyPair(f"subject=one\n{text}", "")) == Validity(-631_152_000.0, time.timestamp())


def test_tls_validity_is_that_of_the_certificate_itself_and_not_of_its_authorities(tmp_path: Path) -> None:
    pair = a_pair(tmp_path)
    authorities = certificate(dt.datetime(1990, 1, 1), dt.datetime(1991, 1, 1))  # noqa: DTZ001
    validity = certificate_validity(pair._replace(certificate=pair.certificate + authorities))
    own = x509.load_pem_x509_certificate(pair.certificate.encode())
    assert validity == Validity(own.not_valid_before_utc.timestamp(), own.not_valid_after_utc.timestamp())


@pytest.mark.parametrize("der", [b"", b"0", b"0\x82", b"0\x03\x30\x01\x00", b"a" * 100, b"0\xff" + b"\xff" * 200])
def test_tls_validity_of_a_malformed_certificate_is_unknown(der: bytes) -> None:
    assert certificate_validity(KeyPair(ssl.DER_cert_to_PEM_cert(der), "")) is None
    assert certificate_validity(KeyPair("nonsense", "")) is None
