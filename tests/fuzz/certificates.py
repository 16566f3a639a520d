"""Target: certificates in Secrets that tenants write, as far as Rota itself reads them."""

import base64
import ssl

from fuzz.target import Target, mutated
from rota.tls import KeyPair, certificate_validity

# Valid from 2020 to 2030 and to 2060: the second year is written with four digits.
CERTIFICATES = [
    base64.b64decode(
        "MIHJMH2gAwIBAgIBBzAFBgMrZXAwDzENMAsGA1UEAwwEcm90YTAeFw0yMDAxMDEwMDAwMDBaFw0zMDAxMDEwMDAwMDBaMA8xDTALBgNVBAMMBHJv"
        "dGEwKjAFBgMrZXADIQARBIFCsKR2P57w4r1IQUB1rQni+XVmxkXiwzCh8IIcjzAFBgMrZXADQQDoGZwXqtzitDSe6TB8cwfR0J0z8YcRNIKdbA8m"
        "svV0GL8cI6gq0+5BmFdTuAaHqRa2T+5Y4IObvWXUCy/mue0K"
    ),
    base64.b64decode(
        "MIHLMH+gAwIBAgIBBzAFBgMrZXAwDzENMAsGA1UEAwwEcm90YTAgFw0yMDAxMDEwMDAwMDBaGA8yMDYwMDEwMTAwMDAwMFowDzENMAsGA1UEAwwE"
        "cm90YTAqMAUGAytlcAMhABEEgUKwpHY/nvDivUhBQHWtCeL5dWbGReLDMKHwghyPMAUGAytlcANBAMs8RI7PS4d/X4KMZjshTRWReCqYTwuLK4H4"
        "RXOG1b7Ga2wwJ71oroTtUAJfL4joC/1Q9rxhhUS1NCblpvoxLQM="
    ),
]


def check_certificate(data: bytes) -> None:
    """Read a certificate's validity: two numbers, or None."""
    for text in (ssl.DER_cert_to_PEM_cert(data), data.decode(errors="replace")):
        validity = certificate_validity(KeyPair(text, ""))
        assert validity is None or all(isinstance(seconds, float) for seconds in validity)


TARGETS = (Target("certificate", check_certificate, (mutated(CERTIFICATES),)),)
