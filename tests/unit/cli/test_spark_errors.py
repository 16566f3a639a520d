"""Errors of Spark's file system for S3 as sentences."""

import pytest

from rota.cli.commands.pipeline.spark.errors import describe_user_error

OBJECT = "s3a://bucket/lake/offsets/date=2026-11-21/run1-a.parquet"
DENIED = f"java.nio.file.AccessDeniedException: {OBJECT}: "
S3_ERROR = (
    "software.amazon.awssdk.services.s3.model.S3Exception: Forbidden (Service: S3, Status Code: {}, Request ID: a)"
)
HTTP_ERROR = (
    "SdkClientException: Unable to execute HTTP request: Connect to s3:1 failed: Connection refused (SDK Attempt"
)
FAILED_READ = f"[FAILED_READ_FILE.NO_HINT] Encountered error while reading file {OBJECT}. SQLSTATE: KD001\n"


class SparkError(Exception):
    __module__ = "pyspark.errors"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"{DENIED}{S3_ERROR.format(403)}:null", "the server answered 403"),
        (f"{FAILED_READ}Caused by: {OBJECT}: {S3_ERROR.format(503)}", "the server answered 503"),
        (f"getFileStatus on {OBJECT}: {HTTP_ERROR} Count: 4)", "Connect to s3:1 failed: Connection refused"),
        (f"{DENIED}NoAuthWithAWSException: No AWS Credentials provided by a", "Spark found no credentials; its driver"),
        (FAILED_READ, "the file is damaged or missing; read an older snapshot, or recreate the lake"),
    ],
)
def test_spark_error_of_an_object_says_what_the_server_answered(text: str, reason: str) -> None:
    sentence = describe_user_error(SparkError(text))
    assert sentence
    assert sentence.startswith(f"{OBJECT} cannot be read: {reason}")


def test_pipeline_error_of_an_object_that_a_bucket_lacks_is_no_error_of_the_output() -> None:
    assert describe_user_error(FileNotFoundError("s3://bucket: a cannot be read")) == "s3://bucket: a cannot be read"
