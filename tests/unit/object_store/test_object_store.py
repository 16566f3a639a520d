"""Tests the places of stores, and the folder as a store."""

import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from journal_shipping import file_size_limit
from rota.object_store import FolderStore, NotAnObjectError, StoreError, create_same, open_store, parse_location
from rota.object_store.bucket_errors import explain_error
from rota.object_store.segments import SegmentName, parse_segment, segment_hour


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("s3://bucket/rota/journal/", "s3://bucket/rota/journal"),
        ("s3a://bucket", "s3://bucket"),
        ("gs://bucket//a//b", "gs://bucket/a/b"),
        ("az://container/a", "az://container/a"),
        ("abfss://c@account.dfs.core.windows.net/a", "abfs://c@account.dfs.core.windows.net/a"),
        ("file:///var/lib/rota", "/var/lib/rota"),
        ("bucket/prefix", "bucket/prefix"),
        ("./s3.amazonaws.com", "./s3.amazonaws.com"),
        ("12:30/journal", "12:30/journal"),
    ],
)
def test_lake_place_is_a_folder_or_a_bucket(text: str, uri: str) -> None:
    assert parse_location(text).uri == uri


@pytest.mark.parametrize(
    ("text", "mistake"),
    [
        ("", "neither a folder nor a URI"),
        ("a\0b", "neither a folder nor a URI"),
        ("ftp://host/x", "'ftp://host/x' has the unknown scheme ftp; use s3://BUCKET/PREFIX"),
        ("hdfs://name/x", "unknown scheme hdfs"),
        ("https://bucket.s3.amazonaws.com/x", "unknown scheme https"),
        ("//bucket/x", "has no scheme"),
        ("bucket.s3.eu-west-1.amazonaws.com/x", "has no scheme"),
        ("account.blob.core.windows.net/c", "has no scheme"),
        ("s3:/bucket/x", "lacks // after its scheme"),
        ("s3:///x", "names no bucket"),
        ("s3://key:secret@bucket/x", "credentials do not belong into a URI"),
        ("s3://buck et/x", "no valid bucket name"),
        ("s3://bucket/a/../b", "no usable prefix"),
        ("s3://bucket/a?versionId=1", "no usable prefix"),
        ("file://host/x", "names no absolute folder"),
        ("lake\udcff", "is not UTF-8 text; rename the folder"),
    ],
)
def test_lake_place_that_cannot_be_used_is_told_in_a_sentence(text: str, mistake: str) -> None:
    with pytest.raises(ValueError, match=r"\w") as raised:
        open_store(text)
    assert mistake in str(raised.value)


def test_lake_bucket_without_its_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rota.object_store.bucket", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ValueError, match=r"needs the package obstore.*pip install 'rota-operator\[bucket\]'"):
        open_store("s3://bucket/x")


def test_lake_bucket_without_encryption_needs_a_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:secret@127.0.0.1:1")
    monkeypatch.delenv("AWS_ALLOW_HTTP", raising=False)
    with pytest.raises(ValueError, match=r": http://127\.0\.0\.1:1 is not encrypted; set AWS_ALLOW_HTTP=true"):
        open_store("s3://bucket/x")


@pytest.mark.parametrize(
    ("name", "uri"),
    [("AWS_ENDPOINT_URL", "s3://bucket/x"), ("GOOGLE_BASE_URL", "gs://bucket/x"), ("AZURE_ENDPOINT", "az://bucket/x")],
)
@pytest.mark.parametrize("endpoint", ["u:secret@minio:9000", "", "http://", "http://a b", "http://h:99999", "ftp://h"])
def test_lake_bucket_whose_server_has_no_valid_address_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, name: str, uri: str, endpoint: str
) -> None:
    monkeypatch.setenv(name, endpoint)
    with pytest.raises(ValueError, match=rf"{name} is not a valid address; write it as https://HOST:PORT") as raised:
        open_store(uri)
    assert "secret" not in str(raised.value)


def test_lake_bucket_of_an_unknown_account_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME", raising=False)
    with pytest.raises(ValueError, match="set AZURE_STORAGE_ACCOUNT_NAME"):
        open_store("az://container/x")


@pytest.mark.parametrize(
    ("error", "scheme", "reason"),
    [
        ("Error performing PUT http://169.254.169.254/latest/api/token in 1ms", "s3", "looked for AWS_ACCESS_KEY_ID"),
        ("Generic GCS error: Error performing token request: Error", "gs", "looked for GOOGLE_SERVICE_ACCOUNT"),
        (
            "Generic MicrosoftAzure error: Error performing token request",
            "abfs",
            "looked for AZURE_STORAGE_ACCOUNT_KEY",
        ),
        ("status code: 404 Not Found: <Code>NoSuchBucket</Code>", "s3", "the bucket does not exist"),
        (
            "GET https://h/b - status code: 403 Forbidden: <Error><Code>AccessDenied</Code></Error>",
            "s3",
            "the server answered 403 Forbidden (AccessDenied)",
        ),
        (
            "GET https://h:9/b - status code: 503 Service Unavailable: \n\nDebug",
            "s3",
            "answered 503 Service Unavailable",
        ),
        (
            "PUT https://h/b - status code: 501 Not Implemented: <Error><Code>NotImplemented</Code></Error>",
            "s3",
            "the server does not support conditional requests",
        ),
        (
            "`PutMode::Create` when conditional put is disabled not yet implemented",
            "s3",
            "remove the variable AWS_COND",
        ),
        ("GET https://h/b - HTTP error\nkind: Timeout", "s3", "it did not answer in time"),
        ("GET https://h:9/b - HTTP error\nkind: Connect", "s3", "no connection to h:9"),
        (
            "GET https://h:9/b - kind: Connect, InvalidCertificate(UnknownIssuer)",
            "s3",
            "the certificate of h:9 is not valid",
        ),
        ("GET https://u:p@ss@h:9/b - HTTP error\nkind: Connect", "s3", "no connection to h:9"),
        ("no such thing at https://user:secret@h/b", "s3", "no such thing at https://h/b"),
        ("Received redirect without LOCATION", "s3", "set AWS_REGION"),
        ("something new\n\nDebug source", "s3", "something new"),
        ("", "s3", "ValueError"),
    ],
)
def test_lake_bucket_errors_have_a_reason(error: str, scheme: str, reason: str) -> None:
    assert reason in explain_error(ValueError(error), scheme)


def test_lake_folder_keeps_what_was_created_first(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "new")
    assert [*store.list_objects()] == []
    assert store.create("a/b", b"one")
    assert not store.create("a/b", b"two")
    assert create_same(store, "a/b", b"one")
    assert not create_same(store, "a/b", b"two")
    assert store.read("a/b") == b"one"
    assert [path.name for path in (tmp_path / "new").rglob("*")] == ["a", "b"]


def test_lake_folder_lets_one_of_many_writers_win(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    with ThreadPoolExecutor(8) as pool:
        won = [*pool.map(lambda number: store.create("key", b"%d" % number), range(40))]
    assert won.count(True) == 1
    assert store.read("key") == b"%d" % won.index(True)


def test_lake_folder_lists_regular_files_without_hidden_ones(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for key in ("top", "x/one", "x/y/two", "xy/three", "x/.hidden", ".spool/four"):
        store.create(key, b"12345")
    (tmp_path / "x/link").symlink_to(tmp_path / "top")
    os.mkfifo(tmp_path / "x/pipe")
    assert {info.key for info in store.list_objects()} == {"top", "x/one", "x/y/two", "xy/three"}
    assert {info.key for info in store.list_objects("x")} == {"x/one", "x/y/two"}
    assert [*store.list_objects("nothing")] == []
    info = next(store.list_objects("x/y"))
    assert info.size_bytes == 5
    assert info.etag == f"{(tmp_path / 'x/y/two').stat().st_mtime_ns:x}-5"
    assert info.modified.timestamp() == pytest.approx((tmp_path / "x/y/two").stat().st_mtime, abs=0.001)


def test_lake_folder_deletes_once_and_again(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    store.create("a", b"")
    for key in ("a", "a", "a/b", "b/c"):
        store.delete(key)
    assert [*store.list_objects()] == []
    with pytest.raises(FileNotFoundError):
        store.read("a")


def test_lake_folder_that_a_maintenance_removes_is_created_again_for_a_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "date=2026-11-21"
    real_mkdir = Path.mkdir

    def create_and_remove(path: Path, **options: bool) -> None:
        monkeypatch.undo()
        real_mkdir(path, **options)
        folder.rmdir()

    monkeypatch.setattr(Path, "mkdir", create_and_remove)
    with FolderStore(tmp_path).open_writer("date=2026-11-21/key") as file:
        file.write(b"content")
    assert (folder / "key").read_bytes() == b"content"


def test_lake_folder_names_the_file_that_cannot_be_completed(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    buffered = store.open_writer("a/buffered")
    buffered.write(b"12345")
    large = store.open_writer("a/large")
    with file_size_limit(1):
        with pytest.raises(StoreError, match="a/buffered cannot be written: File too large"):
            buffered.close()
        with pytest.raises(StoreError, match="a/large cannot be written: File too large"):
            large.write(bytes(1_000_000))
    large.close()


@pytest.fixture
def synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the files and folders that are written to the disk, in their order."""
    synced: list[str] = []
    real_fsync = os.fsync

    def record_fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        is_named = (tmp_path / "new/date=2026-11-21/key").exists()
        synced.append(f"{path.relative_to(tmp_path)}{' (named)' if is_named else ''}")

    monkeypatch.setattr(os, "fsync", record_fsync)
    return synced


@pytest.mark.skipif(sys.platform != "linux", reason="/proc names the files of descriptors")
def test_lake_folder_writes_a_file_and_the_names_of_its_folders_to_the_disk(tmp_path: Path, synced: list[str]) -> None:
    FolderStore(tmp_path / "new").create("date=2026-11-21/key", b"content")
    (draft,) = [path for path in synced if path.endswith(".draft")]
    assert synced == [".", "new", draft, "new/date=2026-11-21 (named)"]


@pytest.mark.skipif(sys.platform != "linux", reason="/proc names the files of descriptors")
def test_lake_folder_writes_a_large_file_and_the_names_of_its_folders_to_the_disk(
    tmp_path: Path, synced: list[str]
) -> None:
    with FolderStore(tmp_path / "new").open_writer("date=2026-11-21/key") as file:
        file.write(b"content")
    assert synced == [".", "new", "new/date=2026-11-21/key (named)", "new/date=2026-11-21 (named)"]


@pytest.mark.parametrize("key", ["", "..", "a/../../b", "a//b", "./a", "a\0b"])
def test_lake_folder_is_never_left(tmp_path: Path, key: str) -> None:
    store = FolderStore(tmp_path / "root")
    for act in (store.read, store.delete, lambda key: store.create(key, b"")):
        with pytest.raises(StoreError, match="not a valid key"):
            act(key)
    assert [*tmp_path.iterdir()] == []


def test_lake_folder_refuses_links_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "pipe")
    store = FolderStore(tmp_path)
    with pytest.raises(StoreError, match="link cannot be read: it is a symbolic link"):
        store.read("link")
    with pytest.raises(StoreError, match="pipe is not a regular file"):
        store.read("pipe")
    assert not store.create("link", b"")


def test_lake_folder_at_the_root_of_a_disk_is_listed_without_its_lost_files(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    for key in ("lost+found/x", "date=2026-11-21/lost+found/x", "a"):
        store.create(key, b"")
    assert sorted(info.key for info in store.list_objects()) == ["a", "date=2026-11-21/lost+found/x"]


def _count_descriptors() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def test_lake_folder_at_a_key_is_refused_without_a_descriptor_that_stays_open(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    store = FolderStore(tmp_path)
    descriptors_at_start = _count_descriptors() if sys.platform == "linux" else 0
    for _ in range(10):
        with pytest.raises(NotAnObjectError, match="is not a regular file"):
            store.read("a")
    assert sys.platform != "linux" or _count_descriptors() < descriptors_at_start + 10


def test_lake_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"file/key cannot be written: (File exists|Not a directory)"):
        FolderStore(tmp_path / "file").create("key", b"")


def test_lake_folder_without_hard_links_points_to_buckets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(1, "Operation not permitted", str(source), None, str(target))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match=r"has no hard links, .*; use a bucket"):
        FolderStore(tmp_path).create("key", b"")
    assert [*tmp_path.iterdir()] == []


def test_lake_folder_files_have_the_mode_of_the_umask(tmp_path: Path) -> None:
    FolderStore(tmp_path).create("key", b"")
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o666 & ~mask


NAME = SegmentName("2026-11-21T08", "rota-6c8d-x2", "0f8e1c5a", "20261121T075812Z", 3)
KEY = "date=2026-11-21/08-rota-6c8d-x2-0f8e1c5a-20261121T075812Z-000003.jsonl.gz"


def test_journal_segment_names_are_read_back() -> None:
    assert NAME.key == KEY
    assert parse_segment(KEY) == NAME
    assert parse_segment(NAME._replace(sequence=12_345_678).key) == NAME._replace(sequence=12_345_678)


def test_journal_segment_name_fits_into_a_file_name() -> None:
    name = NAME._replace(pod="p" * 240, uid="0" * 32)
    assert len(name.key.partition("/")[2]) < 200
    assert parse_segment(name.key) == name._replace(pod="p" * 120)


@pytest.mark.parametrize(
    ("key", "hour"),
    [
        (KEY, "2026-11-21T08"),
        ("date=2026-11-21/23-copy.jsonl.gz", "2026-11-21T23"),
        ("date=2026-11-21/24-copy.jsonl.gz", None),
        ("date=2026-02-30/00-copy.jsonl.gz", None),
        ("date=2026-11-21/08-copy.jsonl", None),
        ("date=2026-11-21/08.jsonl.gz", None),
        ("date=2026-11-21/x/08-copy.jsonl.gz", None),
        ("08-copy.jsonl.gz", None),
        ("date=2026-11-21/08-ü ✓.jsonl.gz", "2026-11-21T08"),
        ("date=2026-11-21/08-\udcff.jsonl.gz", None),
    ],
)
def test_journal_segments_of_other_names_have_an_hour(key: str, hour: str | None) -> None:
    assert segment_hour(key) == hour
    assert (parse_segment(key) is not None) == (key == KEY)
