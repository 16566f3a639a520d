"""Certificates for the parts of a cluster: one authority, and the certificates that it signs. No openssl needed."""

import datetime as dt
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_YEAR = dt.timedelta(days=365)
PrivateKey = ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    certificate: Path
    key: Path


class Authority:
    """A certificate authority with its files in a folder; existing files are kept."""

    def __init__(self, folder: Path, name: str) -> None:
        """Load the authority `name` from `folder`, or create it."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.own = Pair(folder / f"{name}.crt", folder / f"{name}.key")
        self._name = _subject(name, "")
        if not self.own.key.exists():
            key = ec.generate_private_key(ec.SECP256R1())
            _write(self.own, key, self._certificate(self._name, key, key, authority=True))

    def issue(
        self, name: str, common: str, organisation: str = "", *, dns: Sequence[str] = (), ips: Sequence[str] = ()
    ) -> Pair:
        """Return a certificate for servers and clients, signed by this authority."""
        pair = Pair(self.folder / f"{name}.crt", self.folder / f"{name}.key")
        if not pair.key.exists():
            signer = serialization.load_pem_private_key(self.own.key.read_bytes(), None)
            assert isinstance(signer, ec.EllipticCurvePrivateKey)
            key = ec.generate_private_key(ec.SECP256R1())
            names = [*map(x509.DNSName, dns), *(x509.IPAddress(ipaddress.ip_address(ip)) for ip in ips)]
            _write(pair, key, self._certificate(_subject(common, organisation), key, signer, names=names))
        return pair

    def _certificate(
        self,
        subject: x509.Name,
        key: PrivateKey,
        signer: ec.EllipticCurvePrivateKey,
        *,
        authority: bool = False,
        names: Sequence[x509.GeneralName] = (),
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))  # clocks in tests jump
            .not_valid_after(now + _YEAR)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        )
        if not authority:
            usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(signer, hashes.SHA256())


def signing_key(path: Path) -> Pair:
    """Return a key pair (public key in place of a certificate) to sign service account tokens with."""
    pair = Pair(path.with_suffix(".pub"), path.with_suffix(".key"))
    if not pair.key.exists():
        key = rsa.generate_private_key(65537, 2048)
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        pair.certificate.write_bytes(public)
        _write_key(pair.key, key)
    return pair


def _subject(common: str, organisation: str) -> x509.Name:
    parts = [x509.NameAttribute(NameOID.COMMON_NAME, common)]
    if organisation:
        parts.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, organisation))
    return x509.Name(parts)


def _write(pair: Pair, key: PrivateKey, certificate: x509.Certificate) -> None:
    pair.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_key(pair.key, key)  # last: if the key exists, the certificate does, too


def _write_key(path: Path, key: PrivateKey) -> None:
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    fresh = path.with_suffix(".fresh")
    fresh.touch(mode=0o600)
    fresh.write_bytes(text)
    fresh.rename(path)
