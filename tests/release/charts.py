"""The chart: linted, packed reproducibly, rendered for every Kubernetes version that it supports."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from chart.charts import EVERYTHING, PROMETHEUS, Helm, HelmError, Rendered
from ground.programs import KUBERNETES
from release.work import CheckFailedError, Work, repack, sha256

IMAGES = 3  # operator, sidecar, pipeline


def package(work: Work) -> str:
    """Lint and pack the chart of both copies; the archives must be equal."""
    repacked = []
    with _helm(work) as helm:
        for number, copy in enumerate(work.copies):
            chart = copy / "charts" / "rota"
            folder = work.into.parent / f"packed-{number}"
            helm("lint", "--strict", chart)
            helm("lint", "--strict", chart, values=EVERYTHING)
            helm("package", chart, "--destination", folder)
            repacked.append(folder / "repacked.tgz")
            repack(folder / f"rota-{work.version}.tgz", repacked[-1], work.epoch)  # helm writes the current time
    first, second = repacked
    if sha256(first) != sha256(second):
        raise CheckFailedError("two packings of the chart of one commit differ")
    archive = first.rename(work.into / f"rota-{work.version}.tgz")
    return f"{archive.name}, lint has nothing to say; packed twice, the same bytes"


def render(work: Work) -> str:
    """Render the packed chart, plain and with everything on, for all Kubernetes versions from oldest to newest."""
    archive = work.into / f"rota-{work.version}.tgz"
    if not archive.exists():
        raise CheckFailedError("there is no packed chart to render")
    metadata = yaml.safe_load((work.source / "charts" / "rota" / "Chart.yaml").read_text())
    oldest, newest = (int(re.findall(r"1\.(\d+)", text)[0]) for text in (metadata["kubeVersion"], KUBERNETES))
    with _helm(work) as helm:
        for minor in range(oldest, newest + 1):
            version = f"--kube-version=1.{minor}.0"
            plain = helm.template(version, chart=archive)
            full = helm.template(version, PROMETHEUS, chart=archive, **EVERYTHING)
            _check_images(full, work.version)
        counts = f"{len(plain.objects)} objects, {len(full.objects)} with everything on"
        too_old = f"1.{oldest - 1}.0"
        try:
            helm.template(f"--kube-version={too_old}", chart=archive)
        except HelmError:
            return f"{counts}, for Kubernetes 1.{oldest} to 1.{newest}; {too_old} is refused"
    raise CheckFailedError(f"Chart.yaml asks for {metadata['kubeVersion']}, and still {too_old} is taken")


def _check_images(rendered: Rendered, version: str) -> None:
    images = set(re.findall(r"ghcr\.io/[^\s\"']+", rendered.text))
    other_images = sorted(image for image in images if not image.endswith(f":{version}"))
    if other_images or len(images) != IMAGES:
        raise CheckFailedError(
            f"the chart names {len(images)} images, of which not of {version}: {', '.join(other_images) or 'none'}"
        )


@contextmanager
def _helm(work: Work) -> Iterator[Helm]:
    try:
        yield Helm(work.into.parent / "helm")
    except HelmError as refused:
        raise CheckFailedError(f"helm refused: {refused}") from None
