"""One version, in every place that names one, and in the changelog."""

import re
from collections.abc import Mapping

import yaml

from release.work import Failed, Work, git

_SAID = {"Dockerfile": r"^ARG VERSION=(.*)$", "uv.lock": r'name = "rota-operator"\nversion = "(.*)"'}
_IMAGE = re.compile(r"ghcr\.io/rota-dev/[\w-]+:(\d[\w.-]*)")


def agree(work: Work) -> str:
    """Compare the places, and the tag if this commit has one."""
    names = ["charts/rota/Chart.yaml", "charts/rota/values.yaml", "Dockerfile", "uv.lock", "CHANGELOG.md"]
    pages = [*work.source.glob("docs/**/*.md"), *work.source.glob("docs/**/*.yaml"), work.source / "README.md"]
    names += sorted(str(path.relative_to(work.source)) for path in pages)
    wrong = disagreeing({name: (work.source / name).read_text() for name in names}, work.version)
    tags = [tag for tag in git("tag", "--points-at", "HEAD").split() if tag.startswith("v")]
    newest = next(iter(sections((work.source / "CHANGELOG.md").read_text())), "")
    if tags and tags != [f"v{work.version}"]:
        wrong.append(f"the commit is tagged {', '.join(tags)}")
    if tags and newest == "Unreleased":
        wrong.append(f"CHANGELOG.md calls Unreleased what is tagged {tags[0]}")
    if wrong:
        raise Failed(f"pyproject.toml says {work.version}, but " + "; ".join(wrong))
    return f"{work.version} everywhere; newest in CHANGELOG.md: {newest}"


def disagreeing(texts: Mapping[str, str], version: str) -> list[str]:
    """Return what names another version, and where none is named that should be."""
    chart = yaml.safe_load(texts["charts/rota/Chart.yaml"])
    wrong = [
        f"{key} in charts/rota/Chart.yaml is {chart.get(key)}"
        for key in ("version", "appVersion")
        if chart.get(key) != version
    ]
    for path, value in _tags(yaml.safe_load(texts["charts/rota/values.yaml"])):
        if value:  # else the templates take the appVersion
            wrong.append(f"{path} in charts/rota/values.yaml is {value}")
    for name, pattern in _SAID.items():
        found = re.search(pattern, texts[name], re.MULTILINE)
        if not found or found[1] != version:
            wrong.append(f"{name} says {found[1] if found else 'nothing'}")
    newest = next(iter(sections(texts["CHANGELOG.md"])), "nothing")
    if newest not in {"Unreleased", version}:
        wrong.append(f"the newest section of CHANGELOG.md is {newest}")
    for name, text in texts.items():
        wrong += [f"{name} shows an image of {found}" for found in _IMAGE.findall(text) if found != version]
    return wrong


def sections(changelog: str) -> dict[str, str]:
    """Return the sections of a changelog by the version that heads them, newest first."""
    found = re.split(r"^## (\S+).*$", changelog, flags=re.MULTILINE)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


def _tags(values: object, path: str = "") -> list[tuple[str, object]]:
    """Return every `tag` in the chart's values."""
    if not isinstance(values, dict):
        return []
    here = [(f"{path}.tag".strip("."), values["tag"])] if "tag" in values else []
    return here + [found for key, value in values.items() for found in _tags(value, f"{path}.{key}".strip("."))]
