"""Settings of Hadoop's file system for S3 (s3a://), from the AWS_* variables that obstore and deltalake read."""

from collections.abc import Mapping

_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
_DEFAULT_REGION = "us-east-1"  # obstore's default; without it, the AWS SDK would ask the metadata service
_TRUE = {"1", "true", "yes", "on", "t", "y"}
_DEFAULT_CHAIN = "software.amazon.awssdk.auth.credentials.DefaultCredentialsProvider"
_ANONYMOUS = "org.apache.hadoop.fs.s3a.AnonymousAWSCredentialsProvider"
# Variables that Python tasks of executors need, too. Credentials are not passed on, since the cluster provides them.
SHARED_VARIABLES = (
    *_ENDPOINTS,
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ALLOW_HTTP",
    "AWS_VIRTUAL_HOSTED_STYLE_REQUEST",
    "AWS_SKIP_SIGNATURE",
    "AWS_CONDITIONAL_PUT",
)
_FIXED = {
    # The default stream needs an additional jar, and prefetches megabytes, although most of our objects are smaller.
    "fs.s3a.input.stream.type": "classic",
    # These flags skip checks for existing files and folders: a lake creates each object under a new name.
    "fs.s3a.performance.flags": "create,mkdir",
    "fs.s3a.connection.establish.timeout": "5s",
    "fs.s3a.connection.timeout": "60s",  # without a byte received
    "fs.s3a.attempts.maximum": "3",  # attempts of the SDK; then S3A repeats the whole operation
    "fs.s3a.retry.limit": "5",
    "fs.s3a.retry.throttle.limit": "8",  # after 503, each time with a longer pause
    # With true, which a core-site.xml of the cluster may set, S3A rejects endpoints other than AWS's.
    "fs.s3a.endpoint.fips": "false",
}


def s3a_settings(environ: Mapping[str, str], bucket: str) -> dict[str, str]:
    """Return the settings of Hadoop with which s3a:// reaches a bucket in the same way as obstore."""
    region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or _DEFAULT_REGION
    settings = {
        **_FIXED,
        "fs.s3a.endpoint.region": region,
        "fs.s3a.aws.credentials.provider": _ANONYMOUS if _is_true(environ, "AWS_SKIP_SIGNATURE") else _DEFAULT_CHAIN,
    }
    endpoint = find_endpoint(environ)
    if endpoint:
        is_virtual = _is_true(environ, "AWS_VIRTUAL_HOSTED_STYLE_REQUEST")
        # For virtual-hosted requests, obstore needs the bucket in the endpoint's host name. S3A adds it, so remove it.
        settings["fs.s3a.endpoint"] = endpoint.replace(f"//{bucket}.", "//", 1) if is_virtual else endpoint
        settings["fs.s3a.path.style.access"] = str(not is_virtual).lower()
        settings["fs.s3a.connection.ssl.enabled"] = str(not endpoint.startswith("http://")).lower()
    return settings


def find_endpoint(environ: Mapping[str, str]) -> str:
    """Return the URL of the S3 server; empty for AWS itself."""
    return next(filter(None, map(environ.get, _ENDPOINTS)), "")


def shared_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that Python tasks of executors need, without credentials."""
    return {name: environ[name] for name in SHARED_VARIABLES if environ.get(name)}


def _is_true(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() in _TRUE
