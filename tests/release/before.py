"""Compares definitions and values with those of the previous release: the newest older tag v*."""

from collections.abc import Iterable

import yaml

from release.compat import Schema, incompatible, values_lost, values_refused
from release.versions import sections
from release.work import CheckFailedError, Work

VALUES = "charts/rota/values.yaml"
SCHEMA = "charts/rota/values.schema.json"
DEFINITIONS = "charts/rota/definitions"


def check_compatibility(work: Work) -> str:
    """Compare definitions and values with those of the previous release."""
    changelog = sections((work.source / "CHANGELOG.md").read_text())
    if not work.last:
        earlier = [name for name in changelog if name not in {"Unreleased", work.version}]
        if earlier:
            text = f"CHANGELOG.md tells of {earlier[0]}, but there is no tag v{earlier[0]} to compare with"
            raise CheckFailedError(f"{text}; fetch it with `git fetch --tags`")
        return f"no tag v* is older than {work.version}: this is the first release, there is nothing to compare with"
    breaches = _find_breaches(work)
    undeclared = unnamed(breaches, next(iter(changelog.values()), ""))
    if undeclared:
        hint = 'put each place, as it stands before the colon, in backticks under "### Breaking" in CHANGELOG.md'
        raise CheckFailedError(f"not compatible with {work.last}: {'; '.join(undeclared)}. If that is meant, {hint}")
    text = f", but for what CHANGELOG.md calls Breaking ({len(breaches)})" if breaches else ""
    return f"what works with {work.last} works with this{text}"


def unnamed(breaches: Iterable[str], section: str) -> list[str]:
    """Return the breaches that a changelog section does not list under Breaking."""
    breaking = section.partition("### Breaking\n")[2].partition("\n### ")[0]
    return [breach for breach in breaches if f"`{breach.partition(': ')[0]}`" not in breaking]


def _find_breaches(work: Work) -> list[str]:
    theirs = _definitions(work.read_previous(path) for path in work.previous_files(f"{DEFINITIONS}/"))
    ours = _definitions(path.read_text() for path in (work.source / DEFINITIONS).glob("*.yaml"))
    breaches = [f"{name} definition: was removed" for name in sorted(theirs.keys() - ours.keys())]
    for name in sorted(theirs.keys() & ours.keys()):
        breaches += incompatible(theirs[name], ours[name])
    for path, compare in ((VALUES, values_lost), (SCHEMA, values_refused)):
        old = yaml.safe_load(work.read_previous(path)) or {}  # the previous release may not have the file
        new = yaml.safe_load((work.source / path).read_text()) or {}
        breaches += compare(old, new)
    return breaches


def _definitions(texts: Iterable[str]) -> dict[str, Schema]:
    return {body["metadata"]["name"]: body for body in map(yaml.safe_load, texts)}
