"""TLS contexts from text in memory."""

import os
import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from ground.keys import Authority
from rota.tls import KeyPair, load_key_pair, read_key_pair, trusting


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
        trusting(text)


def test_tls_private_key_stays_out_of_logs(tmp_path: Path) -> None:
    pair = a_pair(tmp_path)
    assert pair.key not in f"{pair} {pair!r}"


def test_tls_key_pair_of_a_mounted_secret_is_read_from_one_version(tmp_path: Path) -> None:
    for version, text in (("..1", "old"), ("..2", "new")):
        (tmp_path / version).mkdir()
        for name in ("tls.crt", "tls.key"):
            (tmp_path / version / name).write_text(text)
    for name in ("tls.crt", "tls.key"):  # links that a kubelet makes; here the second one already leads elsewhere
        (tmp_path / name).symlink_to(f"..{1 + (name == 'tls.key')}/{name}")
    (tmp_path / "..data").symlink_to("..1")
    assert read_key_pair(tmp_path) == KeyPair("old", "old")
