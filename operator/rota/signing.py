"""The operator and its members authenticate each other: HMAC-SHA256 signatures with one shared key per group.

The keys themselves are never sent. The operator derives a group's key from its own key and the group's uid, writes it
to the group's Secret, and never has to read it back. Each kind of message is signed with a prefix of its own, so a
signature is never valid for another kind of message.
"""

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from itertools import product, starmap
from typing import Final, NamedTuple

SIGNATURE_HEADER: Final = "Rota-Signature"
NONCE_PARAMETER: Final = "nonce"  # the parameter of a request for a report
KEY_BYTES: Final = 32
NONCE_BYTES: Final = 16
MAX_SIGNATURES: Final = 2  # in a header: with the current key, and with the previous one

_GROUP_KEY_PREFIX = b"rota/group-key/1"
_FINGERPRINT_PREFIX = b"rota/fingerprint/1"
_REQUEST_PREFIX = b"rota/request/1"
_REPORT_PREFIX = b"rota/report/1"


def derive_group_key(operator_key: bytes, group_uid: str) -> bytes:
    """Return the key that the members of a group share with the operator."""
    return _hmac(operator_key, _GROUP_KEY_PREFIX, group_uid.encode())


class SignedRequest(NamedTuple):
    """The parts of a request that its signature covers."""

    method: str
    target: str  # the path with its query
    pod_uid: str  # of the member that receives it: a copy is invalid at any other pod
    body: bytes = b""


def fingerprint(key: bytes) -> str:
    """Return a short identifier of a key, from which the key cannot be derived."""
    return _hmac(key, _FINGERPRINT_PREFIX).hex()[:16]


def sign_request(keys: Iterable[bytes], request: SignedRequest) -> str:
    """Return the signature header of a request: a signature with each key, the current one first.

    Replaying a request to the same pod has no effect: requests for reports only read, a final drain is idempotent, and
    an assignment is obeyed only if it is newer than the obeyed one.
    """
    return ",".join(_request_signatures(keys, request))


def is_request_signed(keys: Iterable[bytes], header: str, request: SignedRequest) -> bool:
    """Whether one of the first MAX_SIGNATURES signatures in the header was made with one of these keys."""
    signatures = header.split(",", MAX_SIGNATURES)[:MAX_SIGNATURES]
    return _any_matches(signatures, _request_signatures(keys, request))


def sign_report(key: bytes, nonce: str, report: bytes) -> str:
    """Return the signature of a report; the nonce is that of the request which it answers."""
    return _hmac(key, _REPORT_PREFIX, nonce.encode(), report).hex()


def is_report_signed(keys: Sequence[bytes], signature: str, nonce: str, report: bytes) -> bool:
    """Whether the report was signed with one of these keys, as the answer to the request with that nonce."""
    return _any_matches([signature], [sign_report(key, nonce, report) for key in keys])


def _request_signatures(keys: Iterable[bytes], request: SignedRequest) -> list[str]:
    parts = (request.method.encode(), request.target.encode(), request.body, request.pod_uid.encode())
    return [_hmac(key, _REQUEST_PREFIX, *parts).hex() for key in keys]


def _hmac(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC over the parts; each is preceded by its length, so that no two lists of parts look the same."""
    signed = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        signed.update(len(part).to_bytes(8, "big"))
        signed.update(part)
    return signed.digest()


def _any_matches(signatures: Iterable[str], expected: Sequence[str]) -> bool:
    """Compare in constant time; text that is not ASCII is no signature."""
    candidates = [signature.strip() for signature in signatures if signature.isascii()]
    return any(starmap(hmac.compare_digest, product(candidates, expected)))
