"""What is here, held against the release before: the newest tag v* that is older than this version."""

from collections.abc import Iterable

import yaml

from release.compat import Schema, incompatible, values_lost, values_refused
from release.versions import sections
from release.work import Failed, Work

VALUES, SCHEMA = "charts/rota/values.yaml", "charts/rota/values.schema.json"
DEFINITIONS = "charts/rota/definitions"


def compatible(work: Work) -> str:
    """Compare definitions and values with those of the release before."""
    changelog = sections((work.source / "CHANGELOG.md").read_text())
    if not work.last:
        earlier = [name for name in changelog if name not in {"Unreleased", work.version}]
        if earlier:
            told = f"CHANGELOG.md tells of {earlier[0]}, but there is no tag v{earlier[0]} to compare with"
            raise Failed(f"{told}; fetch it with `git fetch --tags`")
        return f"no tag v* is older than {work.version}: this is the first release, there is nothing to compare with"
    breaches = _breaches(work)
    untold = unnamed(breaches, next(iter(changelog.values()), ""))
    if untold:
        hint = 'put each place, as it stands before the colon, in backticks under "### Breaking" in CHANGELOG.md'
        raise Failed(f"not compatible with {work.last}: {'; '.join(untold)}. If that is meant, {hint}")
    told = f", but for what CHANGELOG.md calls Breaking ({len(breaches)})" if breaches else ""
    return f"what works with {work.last} works with this{told}"


def unnamed(breaches: Iterable[str], section: str) -> list[str]:
    """Return the breaches that a section of the changelog does not name under Breaking."""
    breaking = section.partition("### Breaking\n")[2].partition("\n### ")[0]
    return [it for it in breaches if f"`{it.partition(': ')[0]}`" not in breaking]


def _breaches(work: Work) -> list[str]:
    theirs = _definitions(work.before(path) for path in work.files_before(f"{DEFINITIONS}/"))
    ours = _definitions(path.read_text() for path in (work.source / DEFINITIONS).glob("*.yaml"))
    found = [f"{name} definition: was removed" for name in sorted(theirs.keys() - ours.keys())]
    for name in sorted(theirs.keys() & ours.keys()):
        found += incompatible(theirs[name], ours[name])
    for path, compare in ((VALUES, values_lost), (SCHEMA, values_refused)):
        before, now = (yaml.safe_load(text) or {} for text in (work.before(path), (work.source / path).read_text()))
        found += compare(before, now)
    return found


def _definitions(texts: Iterable[str]) -> dict[str, Schema]:
    return {body["metadata"]["name"]: body for body in map(yaml.safe_load, texts)}
