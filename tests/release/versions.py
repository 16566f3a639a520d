"""Checks that all places that name a version, and the changelog, name the same one."""

import re
from collections.abc import Mapping

import yaml

from release.work import CheckFailedError, Work, git

_VERSION_PATTERNS = {"Dockerfile": r"^ARG VERSION=(.*)$", "uv.lock": r'name = "rota-operator"\nversion = "(.*)"'}
_IMAGE = re.compile(r"ghcr\.io/rota-dev/[\w-]+:(\d[\w.-]*)")


def check_versions(work: Work) -> str:
    """Compare all places with pyproject.toml, and the tag if this commit has one."""
    names = ["charts/rota/Chart.yaml", "charts/rota/values.yaml", "Dockerfile", "uv.lock", "CHANGELOG.md"]
    pages = [*work.source.glob("docs/**/*.md"), *work.source.glob("docs/**/*.yaml"), work.source / "README.md"]
    names += sorted(str(path.relative_to(work.source)) for path in pages)
    errors = disagreeing({name: (work.source / name).read_text() for name in names}, work.version)
    tags = [tag for tag in git("tag", "--points-at", "HEAD").split() if tag.startswith("v")]
    newest = next(iter(sections((work.source / "CHANGELOG.md").read_text())), "")
    if tags and tags != [f"v{work.version}"]:
        errors.append(f"the commit is tagged {', '.join(tags)}")
    if tags and newest == "Unreleased":
        errors.append(f"CHANGELOG.md calls Unreleased what is tagged {tags[0]}")
    if errors:
        raise CheckFailedError(f"pyproject.toml says {work.version}, but " + "; ".join(errors))
    return f"{work.version} everywhere; newest in CHANGELOG.md: {newest}"


def disagreeing(texts: Mapping[str, str], version: str) -> list[str]:
    """Return the places that name another version, and those without a required version."""
    chart = yaml.safe_load(texts["charts/rota/Chart.yaml"])
    errors = [
        f"{key} in charts/rota/Chart.yaml is {chart.get(key)}"
        for key in ("version", "appVersion")
        if chart.get(key) != version
    ]
    for path, value in _tags(yaml.safe_load(texts["charts/rota/values.yaml"])):
        if value:  # otherwise the templates use the appVersion
            errors.append(f"{path} in charts/rota/values.yaml is {value}")
    for name, pattern in _VERSION_PATTERNS.items():
        match = re.search(pattern, texts[name], re.MULTILINE)
        if not match or match[1] != version:
            errors.append(f"{name} says {match[1] if match else 'nothing'}")
    newest = next(iter(sections(texts["CHANGELOG.md"])), "nothing")
    if newest not in {"Unreleased", version}:
        errors.append(f"the newest section of CHANGELOG.md is {newest}")
    for name, text in texts.items():
        errors += [f"{name} shows an image of {match}" for match in _IMAGE.findall(text) if match != version]
    return errors


def sections(changelog: str) -> dict[str, str]:
    """Return a changelog's sections by version, newest first."""
    parts = re.split(r"^## (\S+).*$", changelog, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def _tags(values: object, path: str = "") -> list[tuple[str, object]]:
    """Return every `tag` in the chart's values."""
    if not isinstance(values, dict):
        return []
    own = [(f"{path}.tag".strip("."), values["tag"])] if "tag" in values else []
    return own + [tag for key, value in values.items() for tag in _tags(value, f"{path}.{key}".strip("."))]
