"""Requests to members and their reports, signed as the operator and sidecars do."""

import secrets

from aiohttp import ClientSession, ClientTimeout
from yarl import URL

from rota.signing import NONCE_PARAMETER, SIGNATURE_HEADER, SignedRequest, is_report_signed, sign_request

PATIENCE = ClientTimeout(90)


def signed_headers(key: bytes, method: str, url: URL, uid: str) -> dict[str, str]:
    """Return the headers with which the pod of that uid accepts a request."""
    return {SIGNATURE_HEADER: sign_request([key], SignedRequest(method, url.raw_path_qs, uid))}


async def signed_report(session: ClientSession, url: str, uid: str, key: bytes) -> str:
    """Return a member's report; fail if it is not signed."""
    nonce = secrets.token_hex(16)
    signed_url = URL(url).update_query({NONCE_PARAMETER: nonce})
    async with session.get(
        signed_url, headers=signed_headers(key, "GET", signed_url, uid), timeout=PATIENCE
    ) as response:
        body = await response.read()
        assert response.status == 200, body
        assert is_report_signed([key], response.headers[SIGNATURE_HEADER], nonce, body)
        return body.decode()


async def signed_drain(session: ClientSession, url: str, uid: str, key: bytes) -> int:
    """Request a final drain, and return the response's status."""
    headers = signed_headers(key, "POST", URL(url), uid)
    async with session.post(url, headers=headers, timeout=PATIENCE) as response:
        return response.status
