"""Signing requests: who asks, and a proof that nobody changed what is asked."""

import base64
import hashlib
import hmac
from typing import NamedTuple

import msgspec

from rota.brokers.rocketmq.wire.frames import Frame


class Credentials(NamedTuple):
    """What a broker with access control asks for."""

    access_key: str
    secret_key: str
    security_token: str = ""

    def __repr__(self) -> str:
        """Keep the secret out of logs."""
        return f"Credentials({self.access_key!r})"


def signed(frame: Frame, credentials: Credentials) -> Frame:
    """Return a frame with its signature: over the values of all fields in the order of their names, and the body."""
    fields = {**frame.fields, "AccessKey": credentials.access_key}
    fields.pop("Signature", None)  # of an earlier time; it does not sign itself
    if credentials.security_token:
        fields["SecurityToken"] = credentials.security_token
    content = "".join(fields[name] for name in sorted(fields)).encode() + frame.body
    proof = hmac.new(credentials.secret_key.encode(), content, hashlib.sha1).digest()
    fields["Signature"] = base64.b64encode(proof).decode()
    return msgspec.structs.replace(frame, fields=fields)
