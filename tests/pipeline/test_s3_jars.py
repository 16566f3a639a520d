"""The jars by which Spark reads and writes S3: their list, and what is fetched from a Maven repository."""

import hashlib
import io
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pipeline.spark_buckets import s3_jars_folder
from rota.cli import main
from rota.pipeline.common import bucket_access, s3_jars
from rota.pipeline.common.s3_jars import Jar, fetch_jars, find_missing, read_list

NAMES = ("hadoop-aws", "sdk")
SPARK_BRINGS = re.compile(r"(netty-(?!nio)|slf4j|commons-(codec|logging)|http(client|core)-|jackson-)")


def repository(folder: Path) -> str:
    """Make a Maven repository of two jars, and return its URL."""
    for jar in read_list():
        path = folder / jar.path
        path.parent.mkdir(parents=True)
        path.write_bytes(jar.artifact.encode())
    return folder.as_uri()


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the list be of two jars, and return the folder of a repository that has them."""
    lines = [f"org.example:{name}:1.0 {hashlib.sha256(name.encode()).hexdigest()}" for name in NAMES]
    path = tmp_path / "list.txt"
    path.write_text("\n".join(["# a comment", *lines, ""]))
    monkeypatch.setattr(s3_jars, "LIST", path)
    folder = tmp_path / "mirror"
    monkeypatch.setenv("ROTA_MAVEN_URL", repository(folder))
    return folder


def jars_command(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["pipeline", "jars", *map(str, arguments)])


def test_pipeline_jars_have_coordinates_digests_and_nothing_that_spark_brings() -> None:
    jars = read_list()
    assert len({jar.name for jar in jars}) == len(jars)
    assert [jar.name for jar in jars if SPARK_BRINGS.match(jar.name)] == []
    assert all(re.fullmatch("[0-9a-f]{64}", jar.sha256) for jar in jars)
    assert not [jar for jar in jars if jar.artifact == "bundle"]  # hundreds of MB
    assert s3_jars.hadoop_version() == bucket_access._hadoop_version()


def test_pipeline_jars_are_small_and_contain_the_file_system_of_s3() -> None:
    folder = s3_jars_folder()
    assert find_missing(folder) == []
    paths = [folder / jar.name for jar in read_list()]
    assert sum(path.stat().st_size for path in paths) < 15e6
    classes = {name for path in paths for name in zipfile.ZipFile(io.BytesIO(path.read_bytes())).namelist()}
    assert "org/apache/hadoop/fs/s3a/S3AFileSystem.class" in classes
    assert "software/amazon/awssdk/services/sts/auth/StsWebIdentityTokenFileCredentialsProvider.class" in classes


def test_pipeline_jars_are_fetched_once(mirror: Path, tmp_path: Path) -> None:
    folder = tmp_path / "jars"
    assert fetch_jars(folder) == 2
    assert {path.name for path in folder.iterdir()} == {"hadoop-aws-1.0.jar", "sdk-1.0.jar"}
    (mirror / read_list()[1].path).unlink()
    assert fetch_jars(folder) == 0  # without a connection
    (folder / "sdk-1.0.jar").unlink()
    with pytest.raises(ValueError, match=r"sdk-1.0.jar cannot be fetched: .*; set ROTA_MAVEN_URL to a mirror, or "):
        fetch_jars(folder)


def test_pipeline_jar_with_another_digest_is_refused(mirror: Path, tmp_path: Path) -> None:
    jar = read_list()[1]
    (mirror / jar.path).write_bytes(b"other")
    folder = tmp_path / "jars"
    with pytest.raises(ValueError, match=r"mirror/.*/sdk-1.0.jar is not the jar that Rota names: its SHA-256 is "):
        fetch_jars(folder)
    assert not (folder / jar.name).exists()
    (folder / jar.name).write_bytes(b"damaged")
    with pytest.raises(
        ValueError, match=rf"{folder}/sdk-1.0.jar is not the jar .*; delete it, and it is fetched again"
    ):
        fetch_jars(folder)


def test_pipeline_jars_command_says_what_it_has_fetched(mirror: Path, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "jars"
    result = jars_command("--to", folder, "--repository", mirror.as_uri())
    assert (result.exit_code, result.stdout) == (
        0,
        f"{folder} has 2 jars for S3, of Hadoop 1.0; 2 of them were fetched\n",
    )


@pytest.mark.usefixtures("mirror")
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--to", "{folder}/file/jars"], "{folder}/file/jars cannot be written: Not a directory; name another folder"),
        (["--to", "/proc"], "/proc cannot be written: No such file or directory; name another folder"),
        (["--to", "{folder}", "--repository", "example.com"], "example.com is no address of a Maven repository; "),
        (["--to", "{folder}", "--repository", "http://127.0.0.1:1"], "http://127.0.0.1:1/org/example/"),
    ],
)
def test_pipeline_jars_command_rejects_what_it_cannot_use(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "file").write_text("")
    result = jars_command(*(argument.format(folder=tmp_path) for argument in arguments))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"rota: {sentence.format(folder=tmp_path)}")
    assert result.stderr.count("\n") == 1


def test_pipeline_jars_program_needs_no_other_module_of_rota(tmp_path: Path) -> None:
    program = tmp_path / "s3_jars.py"
    program.write_text(Path(s3_jars.__file__).read_text())
    (tmp_path / "s3_jars.txt").write_text("")
    subprocess.run([sys.executable, "-I", program, tmp_path / "jars"], check=True)


def test_pipeline_jars_of_another_hadoop_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "hadoop-client-api-3.4.2.jar").write_text("")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    with pytest.raises(
        ValueError, match=r"brings Hadoop 3\.4\.2, but .*--packages org\.apache\.hadoop:hadoop-aws:3\.4\.2"
    ):
        bucket_access.jar_settings(["s3://bucket/lake"])
    assert bucket_access.jar_settings(["/lake", "gs://bucket/lake"]) == {}


def test_pipeline_jars_that_spark_has_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "jars").mkdir()
    (tmp_path / "jars" / "hadoop-aws-3.4.2.jar").write_text("")
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert bucket_access.jar_settings(["s3a://bucket/lake"]) == {}


@pytest.mark.usefixtures("mirror")
def test_pipeline_jars_are_looked_for_in_the_users_cache_or_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_access, "_hadoop_version", s3_jars.hadoop_version)
    monkeypatch.delenv("ROTA_SPARK_JARS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache = tmp_path / "rota" / "s3-jars-1.0"
    assert bucket_access.jar_settings(["s3://bucket/lake"]) == {"spark.driver.extraClassPath": f"{cache}/*"}
    assert find_missing(cache) == []
    monkeypatch.setenv("ROTA_SPARK_JARS", str(tmp_path / "own"))
    assert bucket_access.jar_settings(["s3://bucket/lake"]) == {"spark.driver.extraClassPath": f"{tmp_path}/own/*"}


def test_pipeline_jar_names_are_those_of_a_maven_repository() -> None:
    jar = Jar("org.example", "sdk", "1.0", "")
    assert (jar.name, jar.path) == ("sdk-1.0.jar", "org/example/sdk/1.0/sdk-1.0.jar")
