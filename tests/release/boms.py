"""Bills of materials (CycloneDX 1.5): the wheel's dependencies, alone and with each extra, from the lock file."""

import json
import re
import uuid
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

from release.licences import ALLOWED, licence_of, refused
from release.packages import EXTRAS
from release.work import CheckFailedError, Work

Bom = dict[str, Any]

_HEAD = """What comes with Rota {version}, and under which licences. Each package keeps its text in its .dist-info.
Some carry libraries of others: pyspark those of Spark, told in its own licenses/ folder; numpy's wheels the runtime of
GCC's Fortran, whose exception allows that. Images also hold their base's packages, which tell theirs in /usr/share/doc.

"""


def write_all(work: Work) -> str:
    """Write a bill for the wheel alone and one for each extra."""
    errors = []
    counts = []
    for extra in ("", *EXTRAS):
        bom = bom_of_extras(work, *filter(None, [extra]))
        name = f"rota-{work.version}{f'-{extra}' if extra else ''}.cdx.json"
        errors += [f"{name} {flaw}" for flaw in flaws(bom)]
        write(work, name, bom)
        counts.append(f"{len(bom['components'])} {f'with {extra}' if extra else 'in the wheel alone'}")
    if errors:
        raise CheckFailedError("; ".join(errors))
    return f"CycloneDX 1.5, components: {', '.join(counts)}"


def list_licences(work: Work) -> str:
    """List every dependency with its licence; fail if a licence is not allowed."""
    users: dict[tuple[str, str], list[str]] = defaultdict(list)
    for extra in ("", *EXTRAS):
        for component in bom_of_extras(work, *filter(None, [extra]))["components"]:
            users[component["name"], component["version"]].append(extra or "always")
    lines = []
    errors = []
    kinds: set[str] = set()
    for (name, version), extras in sorted(users.items()):
        licence = licence_of(name)
        if not_allowed := refused(licence):
            errors.append(f"{name} is under {', '.join(not_allowed)}")
        needed = "always" if "always" in extras else ", ".join(extras)
        lines.append(f"{name:24} {version:12} {licence:56} {needed}")
        kinds |= {*re.split(r" AND | OR ", licence)}
    if errors:
        raise CheckFailedError(f"{'; '.join(errors)}; only {', '.join(ALLOWED)} are allowed")
    (work.into / "licences.txt").write_text(_HEAD.format(version=work.version) + "\n".join(lines) + "\n")
    return f"{len(lines)} packages under {', '.join(sorted(kinds))}"


def write(work: Work, name: str, bom: Bom) -> None:
    """Write a bill as indented JSON."""
    (work.into / name).write_text(json.dumps(bom, indent=2) + "\n")


def bom_of_extras(work: Work, *extras: str) -> Bom:
    """Return the bill of the wheel with extras."""
    options = [option for extra in extras for option in ("--extra", extra)]
    bom: Bom = json.loads(work.uv("export", "--quiet", "--frozen", "--no-dev", "--format=cyclonedx1.5", *options))
    root = bom["metadata"]["component"]
    root |= {"type": "application", "purl": f"pkg:pypi/{root['name']}@{root['version']}"}
    for component in (root, *bom["components"]):
        component["licenses"] = licences(licence_of(component["name"]))
    return stamped(bom, work.epoch)


def stamped(bom: Bom, epoch: int) -> Bom:
    """Return a bill that depends only on its content: uv writes the current time and a random number."""
    bom["metadata"]["timestamp"] = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    bom.pop("serialNumber", None)
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bom, sort_keys=True))
    return {"bomFormat": bom["bomFormat"], "specVersion": bom["specVersion"], "serialNumber": number.urn} | bom


def licences(expression: str) -> list[Bom]:
    """Return an SPDX expression in the format of bills."""
    return [{"license": {"id": expression}} if " " not in expression else {"expression": expression}]


def flaws(bom: Bom) -> Iterator[str]:
    """Yield violations of CycloneDX 1.5, and missing fields of components."""
    if (bom.get("bomFormat"), bom.get("specVersion"), bom.get("version")) != ("CycloneDX", "1.5", 1):
        yield "is no CycloneDX 1.5"
    if not re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bom.get("serialNumber", "")):
        yield "has no serial number"
    components = [bom["metadata"]["component"], *bom["components"]]
    for component in components:
        yield from _component_flaws(component)
    references = [component.get("bom-ref") for component in components]
    for reference in sorted({reference for reference in references if references.count(reference) > 1}):
        yield f"has {reference} twice"
    dependencies = {component["ref"]: component.get("dependsOn", []) for component in bom.get("dependencies", [])}
    mentioned = set(dependencies).union(*dependencies.values())
    for reference in sorted(mentioned - set(references)):
        yield f"speaks of {reference}, which is not in it"


def _component_flaws(component: Bom) -> Iterator[str]:
    name, version, purl = (component.get(key, "") for key in ("name", "version", "purl"))
    label = f"{name or 'a component'}"
    for key in ("type", "bom-ref", "name", "version", "purl"):
        if not component.get(key):
            yield f"{label} has no {key}"
    if purl and not re.fullmatch(rf"pkg:(pypi|deb/debian)/{re.escape(name)}@{re.escape(version)}", unquote(purl)):
        yield f"the purl of {label} is {purl}"
    if not component.get("licenses") and not purl.startswith("pkg:deb/"):  # Debian has its licences as prose
        yield f"{label} has no licence"
