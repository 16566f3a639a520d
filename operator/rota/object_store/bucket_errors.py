"""Turns errors of obstore, which quote Rust structures and XML, into reasons that users understand."""

import re

_CREDENTIAL_ERROR_TEXTS = (
    "169.254.",  # no variable gave credentials, so the metadata service or an agent on the node was asked for them
    "/latest/api/token",
    "/latest/meta-data",
    "metadata.google.internal",
    "token request",
    "POST REDACTED",  # the request to STS; its address contains a token
    "Missing AccessKeyId",
    "Missing SecretAccessKey",
    "credential error",
    "service account file",
)
_CREDENTIAL_SOURCES = {
    "s3": "AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY, AWS_WEB_IDENTITY_TOKEN_FILE with AWS_ROLE_ARN (IRSA),"
    " AWS_CONTAINER_CREDENTIALS_FULL_URI (Pod Identity), the node's metadata service; not ~/.aws",
    "gs": "GOOGLE_SERVICE_ACCOUNT (a file), GOOGLE_SERVICE_ACCOUNT_KEY, GOOGLE_APPLICATION_CREDENTIALS,"
    " gcloud's default login, the metadata service (Workload Identity)",
    "az": "AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, AZURE_CLIENT_ID with AZURE_TENANT_ID and"
    " AZURE_CLIENT_SECRET or AZURE_FEDERATED_TOKEN_FILE (workload identity), the metadata service",
}
_CREDENTIAL_SOURCES["abfs"] = _CREDENTIAL_SOURCES["az"]
_STATUS = re.compile(r"status code: (\d{3}[A-Za-z -]*)")
# An error code in XML (S3, Azure) or in JSON (Google Cloud Storage).
_CODE = re.compile(r"<Code>(\w+)</Code>|\"(?:reason|code)\": ?\"(\w+)\"")
_MISSING_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|specified bucket does not exist")
_FIXED_REASONS = {  # a text in the error → the reason
    "redirect without LOCATION": "the bucket is in another region; set AWS_REGION",
    "MissingAccount": "the storage account is not known; set AZURE_STORAGE_ACCOUNT_NAME",
    "status code: 501": "the server does not support conditional requests (If-None-Match)",
    "conditional put is disabled": "conditional requests are disabled; remove the variable AWS_CONDITIONAL_PUT",
    "InvalidCertificate": "the certificate of {host} is not valid, or its authority not in SSL_CERT_FILE",
    "kind: Timeout": "it did not answer in time",
    "kind: Connect": "no connection to {host}",
    "builder error": "{host} is not a valid address",
    "error sending request": "the connection to {host} was lost",
    "error decoding response": "the connection to {host} was lost",
}
_GENERIC = re.compile(r"Generic \w+ error: ")
_USER_INFO = re.compile(r"(https?://)[^/\s?]*@")
_HOST = re.compile(r"https?://([^/\s?]+)")


def hide_credentials(text: str) -> str:
    """Return text without the user and password of its addresses."""
    return _USER_INFO.sub(r"\1", text)


def is_missing_bucket(error: BaseException) -> bool:
    """Return whether an error is about a missing bucket rather than a missing object."""
    return _MISSING_BUCKET.search(str(error)) is not None


def explain_error(error: BaseException, scheme: str) -> str:
    """Return the reason of an error as a part of a sentence; credentials are never in it."""
    text = hide_credentials(str(error))
    # Before the other reasons: a failed request for credentials would read like a lost connection to the bucket.
    if any(part in text for part in _CREDENTIAL_ERROR_TEXTS):
        return f"no valid credentials were found; looked for {_CREDENTIAL_SOURCES[scheme]}"
    if is_missing_bucket(error):
        return "the bucket does not exist"
    host = _HOST.search(text)
    for part, reason in _FIXED_REASONS.items():
        if part in text:
            return reason.format(host=host[1] if host else "the bucket's server")
    status = _STATUS.search(text)
    if status:
        code = _CODE.search(text)
        details = f" ({code[1] or code[2]})" if code else ""
        return f"the server answered {status[1].strip()}{details}"
    return _GENERIC.sub("", text.partition("\n")[0]).strip()[:300] or type(error).__name__
