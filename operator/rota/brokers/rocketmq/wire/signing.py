"""Request signing: adds the client's access key, and an HMAC that protects the request against changes."""

import base64
import hashlib
import hmac
from typing import NamedTuple

import msgspec

from rota.brokers.rocketmq.wire.frames import Frame


class Credentials(NamedTuple):
    """Credentials for brokers with access control."""

    access_key: str
    secret_key: str
    security_token: str = ""

    def __repr__(self) -> str:
        """Return a text without the secrets, for logs."""
        return f"Credentials({self.access_key!r})"


def sign_frame(frame: Frame, credentials: Credentials) -> Frame:
    """Return the signed frame; the signature covers the values of all fields, sorted by name, followed by the body."""
    fields = {**frame.fields, "AccessKey": credentials.access_key}
    fields.pop("Signature", None)  # a previous signature is not part of the signed content
    if credentials.security_token:
        fields["SecurityToken"] = credentials.security_token
    content = "".join(fields[name] for name in sorted(fields)).encode() + frame.body
    digest = hmac.new(credentials.secret_key.encode(), content, hashlib.sha1).digest()
    fields["Signature"] = base64.b64encode(digest).decode()
    return msgspec.structs.replace(frame, fields=fields)
