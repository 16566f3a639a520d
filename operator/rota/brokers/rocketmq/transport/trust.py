"""TLS contexts that trust given certificate authorities."""

import re
import ssl

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----[\x00-\x7f]*?-----END CERTIFICATE-----")


def trusting(authorities: str) -> ssl.SSLContext:
    """Return a context that trusts these certificates in PEM and no others; raise ValueError if there are none.

    Text around them is ignored, as OpenSSL does with files.
    """
    certificates = "\n".join(_CERTIFICATE.findall(authorities))
    if not certificates:
        raise ValueError("it has no certificate in PEM")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        tls.load_verify_locations(cadata=certificates)
    except ssl.SSLError as error:
        raise ValueError(str(error)) from None
    return tls
