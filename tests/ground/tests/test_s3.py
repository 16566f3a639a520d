"""The ground's S3 server."""

import http.client

from ground.s3 import Bucket, S3Server

CREDENTIAL = "AWS4-HMAC-SHA256 Credential=ground/20261121/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"


def put(server: S3Server, path: str, body: bytes, headers: dict[str, str]) -> int:
    connection = http.client.HTTPConnection(*server.address, timeout=30)
    connection.request("PUT", path, body, {"Authorization": CREDENTIAL, **headers})
    status = connection.getresponse().status
    connection.close()
    return status


def test_lake_s3_server_refuses_to_replace_an_object_on_that_condition(s3_server: S3Server, bucket: Bucket) -> None:
    path = f"/{bucket.name}/a"
    assert put(s3_server, path, b"1", {"If-None-Match": "*"}) == 200
    assert put(s3_server, path, b"2", {"If-None-Match": "*"}) == 412


def test_lake_s3_server_stores_nothing_of_an_upload_that_is_cut(s3_server: S3Server, bucket: Bucket) -> None:
    connection = http.client.HTTPConnection(*s3_server.address, timeout=30)
    connection.putrequest("PUT", f"/{bucket.name}/a")
    connection.putheader("Content-Length", "1000")
    connection.endheaders(b"only this")
    connection.close()
    assert put(s3_server, f"/{bucket.name}/a", b"2", {"If-None-Match": "*"}) == 200
