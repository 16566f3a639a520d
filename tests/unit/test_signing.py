"""Tests signatures between the operator and members: the parts they cover, and the accepted keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rota.signing import (
    KEY_BYTES,
    SignedRequest,
    derive_group_key,
    is_report_signed,
    is_request_signed,
    sign_report,
    sign_request,
)

KEY, PREVIOUS, OTHER = (bytes([number]) * KEY_BYTES for number in range(3))
REQUEST = SignedRequest("POST", "/v1/drain", "uid-a", b"{}")


def test_signature_key_of_a_group_depends_on_the_operators_key_and_the_groups_uid() -> None:
    keys = {derive_group_key(key, uid) for key in (KEY, OTHER) for uid in ("a", "b")}
    assert len(keys) == 4
    assert {len(key) for key in keys} == {KEY_BYTES}
    assert derive_group_key(KEY, "a") == derive_group_key(KEY, "a")


@pytest.mark.parametrize(
    "changed",
    [
        REQUEST._replace(method="GET"),
        REQUEST._replace(target="/v1/drain?"),
        REQUEST._replace(pod_uid="uid-b"),
        REQUEST._replace(body=b"{} "),
        REQUEST._replace(target="/v1/drai", body=b"n{}"),
    ],
    ids=["method", "target", "pod", "body", "boundary between target and body"],
)
def test_signature_of_a_request_covers_each_part_of_it(changed: SignedRequest) -> None:
    header = sign_request([KEY], REQUEST)
    assert is_request_signed([KEY], header, REQUEST)
    assert not is_request_signed([KEY], header, changed)


def test_signature_of_a_request_is_accepted_while_either_key_holds() -> None:
    both = sign_request([KEY, PREVIOUS], REQUEST)
    assert is_request_signed([PREVIOUS], both, REQUEST), "a member that does not have the current key yet"
    assert is_request_signed([KEY, PREVIOUS], sign_request([PREVIOUS], REQUEST), REQUEST)
    assert not is_request_signed([OTHER], both, REQUEST)
    assert not is_request_signed([], both, REQUEST), "a member without a key"
    assert not is_request_signed([KEY], sign_request([], REQUEST), REQUEST), "an operator without a key"


@pytest.mark.parametrize("header", ["", ",", "é" * 64, "0" * 64, "\n", ",".join(["0" * 64] * 1000)])
def test_signature_header_of_another_kind_is_rejected(header: str) -> None:
    assert not is_request_signed([KEY], header, REQUEST)
    assert not is_report_signed([KEY], header, "nonce", b"{}")


def test_signature_of_a_report_covers_its_body_and_the_nonce() -> None:
    signature = sign_report(KEY, "nonce", b"{}")
    assert is_report_signed([OTHER, KEY], signature, "nonce", b"{}")
    assert not is_report_signed([KEY], signature, "another", b"{}")
    assert not is_report_signed([KEY], signature, "nonce", b"{ }")
    assert not is_report_signed([KEY], signature, "nonce{", b"}")
    assert not is_report_signed([], signature, "nonce", b"{}")


@given(st.text(st.characters(codec="ascii")), st.binary())
def test_signature_of_a_report_is_none_of_a_request(nonce: str, body: bytes) -> None:
    request = SignedRequest("", "", "", body)
    assert not is_request_signed([KEY], sign_report(KEY, nonce, body), request)
    assert not is_report_signed([KEY], sign_request([KEY], request), nonce, body)
    assert sign_report(KEY, nonce, body) != derive_group_key(KEY, nonce).hex()
