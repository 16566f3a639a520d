"""Settings of Spark's file system for S3, from the variables of obstore."""

import pytest

from rota.pipeline.common.s3a_settings import s3a_settings, shared_variables

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_SESSION_TOKEN": "token"}


def test_pipeline_s3_settings_for_aws_are_its_region_and_the_default_chain_of_credentials() -> None:
    settings = s3a_settings({**CREDENTIALS, "AWS_REGION": "eu-central-1"}, "bucket")
    assert settings["fs.s3a.endpoint.region"] == "eu-central-1"
    assert settings["fs.s3a.aws.credentials.provider"].endswith(".DefaultCredentialsProvider")
    assert not {"fs.s3a.endpoint", "fs.s3a.path.style.access"} & settings.keys()
    assert not {"secret", "token"} & set(settings.values())


@pytest.mark.parametrize(
    ("environ", "region"),
    [
        ({}, "us-east-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-1"}, "eu-west-1"),
        ({"AWS_DEFAULT_REGION": "eu-west-1", "AWS_REGION": "eu-west-2"}, "eu-west-2"),
    ],
)
def test_pipeline_s3_region_is_that_of_obstore(environ: dict[str, str], region: str) -> None:
    assert s3a_settings(environ, "bucket")["fs.s3a.endpoint.region"] == region


@pytest.mark.parametrize(
    ("environ", "endpoint", "is_path_style", "is_encrypted"),
    [
        ({"AWS_ENDPOINT_URL": "http://s3:9000"}, "http://s3:9000", "true", "false"),
        ({"AWS_ENDPOINT": "https://s3", "AWS_ENDPOINT_URL": ""}, "https://s3", "true", "true"),
        ({"AWS_ENDPOINT_URL": "https://a", "AWS_ENDPOINT_URL_S3": "https://b"}, "https://b", "true", "true"),
        (
            {"AWS_ENDPOINT_URL": "https://bucket.example.com", "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true"},
            "https://example.com",
            "false",
            "true",
        ),
    ],
)
def test_pipeline_s3_endpoint_is_that_of_obstore(
    environ: dict[str, str], endpoint: str, is_path_style: str, is_encrypted: str
) -> None:
    settings = s3a_settings(environ, "bucket")
    names = ("fs.s3a.endpoint", "fs.s3a.path.style.access", "fs.s3a.connection.ssl.enabled")
    assert [settings[name] for name in names] == [endpoint, is_path_style, is_encrypted]


def test_pipeline_s3_settings_without_a_signature_are_anonymous() -> None:
    settings = s3a_settings({**CREDENTIALS, "AWS_SKIP_SIGNATURE": "True"}, "bucket")
    assert settings["fs.s3a.aws.credentials.provider"].endswith(".AnonymousAWSCredentialsProvider")


def test_pipeline_s3_variables_of_executors_have_no_credentials() -> None:
    environ = {**CREDENTIALS, "AWS_REGION": "eu-west-1", "AWS_ALLOW_HTTP": "true", "AWS_ENDPOINT": "", "PATH": "/bin"}
    assert shared_variables(environ) == {"AWS_REGION": "eu-west-1", "AWS_ALLOW_HTTP": "true"}
