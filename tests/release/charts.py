"""The chart: linted, packed so that it repeats, rendered for every Kubernetes that it names."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from chart.charts import EVERYTHING, PROMETHEUS, Helm, Refused, Rendered
from ground.programs import KUBERNETES
from release.work import Failed, Work, repack, sha256

IMAGES = 3  # operator, sidecar, pipeline


def package(work: Work) -> str:
    """Lint and pack the chart of both copies."""
    made = []
    with _helm(work) as helm:
        for number, copy in enumerate(work.copies):
            chart, folder = copy / "charts" / "rota", work.into.parent / f"packed-{number}"
            helm("lint", "--strict", chart)
            helm("lint", "--strict", chart, values=EVERYTHING)
            helm("package", chart, "--destination", folder)
            made.append(folder / "repacked.tgz")
            repack(folder / f"rota-{work.version}.tgz", made[-1], work.epoch)  # helm's has the time of the packing
    one, another = made
    if sha256(one) != sha256(another):
        raise Failed("two packings of the chart of one commit differ")
    archive = one.rename(work.into / f"rota-{work.version}.tgz")
    return f"{archive.name}, lint has nothing to say; packed twice, the same bytes"


def renders(work: Work) -> str:
    """Render what was packed, plain and with everything on, for each Kubernetes from the oldest to the newest."""
    archive = work.into / f"rota-{work.version}.tgz"
    if not archive.exists():
        raise Failed("there is no packed chart to render")
    about = yaml.safe_load((work.source / "charts" / "rota" / "Chart.yaml").read_text())
    oldest, newest = (int(re.findall(r"1\.(\d+)", text)[0]) for text in (about["kubeVersion"], KUBERNETES))
    with _helm(work) as helm:
        for minor in range(oldest, newest + 1):
            version = f"--kube-version=1.{minor}.0"
            plain = helm.template(version, chart=archive)
            full = helm.template(version, PROMETHEUS, chart=archive, **EVERYTHING)
            _images_are_ours(full, work.version)
        counts = f"{len(plain.objects)} objects, {len(full.objects)} with everything on"
        too_old = f"1.{oldest - 1}.0"
        try:
            helm.template(f"--kube-version={too_old}", chart=archive)
        except Refused:
            return f"{counts}, for Kubernetes 1.{oldest} to 1.{newest}; {too_old} is refused"
    raise Failed(f"Chart.yaml asks for {about['kubeVersion']}, and still {too_old} is taken")


def _images_are_ours(rendered: Rendered, version: str) -> None:
    found = set(re.findall(r"ghcr\.io/[^\s\"']+", rendered.text))
    others = sorted(it for it in found if not it.endswith(f":{version}"))
    if others or len(found) != IMAGES:
        raise Failed(f"the chart names {len(found)} images, of which not of {version}: {', '.join(others) or 'none'}")


@contextmanager
def _helm(work: Work) -> Iterator[Helm]:
    try:
        yield Helm(work.into.parent / "helm")
    except Refused as refused:
        raise Failed(f"helm refused: {refused}") from None
