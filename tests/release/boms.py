"""Bills of materials (CycloneDX 1.5): what comes with the wheel, alone and with each extra, from the lock file."""

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
from release.work import Failed, Work

Bom = dict[str, Any]

_HEAD = """What comes with Rota {version}, and under which licences. Each package keeps its text in its .dist-info.
Some carry libraries of others: pyspark those of Spark, told in its own licenses/ folder; numpy's wheels the runtime of
GCC's Fortran, whose exception allows that. Images also hold their base's packages, which tell theirs in /usr/share/doc.

"""


def written(work: Work) -> str:
    """Write a bill for the wheel alone and with each extra."""
    wrong, counts = [], []
    for extra in ("", *EXTRAS):
        bom, name = of_extra(work, extra), f"rota-{work.version}{f'-{extra}' if extra else ''}.cdx.json"
        wrong += [f"{name} {told}" for told in flaws(bom)]
        write(work, name, bom)
        counts.append(f"{len(bom['components'])} {f'with {extra}' if extra else 'in the wheel alone'}")
    if wrong:
        raise Failed("; ".join(wrong))
    return f"CycloneDX 1.5, components: {', '.join(counts)}"


def listed(work: Work) -> str:
    """Write down every dependency and its licence; none may be but those that are allowed."""
    users: dict[tuple[str, str], list[str]] = defaultdict(list)
    for extra in ("", *EXTRAS):
        for it in of_extra(work, extra)["components"]:
            users[it["name"], it["version"]].append(extra or "always")
    rows = [
        (name, version, licence_of(name), "always" if "always" in who else ", ".join(who))
        for (name, version), who in sorted(users.items())
    ]
    wrong = [f"{name} is under {', '.join(refused(licence))}" for name, _, licence, _ in rows if refused(licence)]
    if wrong:
        raise Failed(f"{'; '.join(wrong)}; only {', '.join(ALLOWED)} are allowed")
    lines = [f"{name:24} {version:12} {licence:56} {who}" for name, version, licence, who in rows]
    (work.into / "licences.txt").write_text(_HEAD.format(version=work.version) + "\n".join(lines) + "\n")
    kinds = {part for *_, licence, _ in rows for part in re.split(r" AND | OR ", licence)}
    return f"{len(rows)} packages under {', '.join(sorted(kinds))}"


def write(work: Work, name: str, bom: Bom) -> None:
    """Write a bill as people can read it too."""
    (work.into / name).write_text(json.dumps(bom, indent=2) + "\n")


def of_extra(work: Work, extra: str) -> Bom:
    """Return the bill of the wheel with an extra, or with none."""
    wanted = ("--extra", extra) if extra else ()
    bom: Bom = json.loads(work.uv("export", "--quiet", "--frozen", "--no-dev", "--format=cyclonedx1.5", *wanted))
    root = bom["metadata"]["component"]
    root |= {"type": "application", "purl": f"pkg:pypi/{root['name']}@{root['version']}"}
    for component in (root, *bom["components"]):
        component["licenses"] = licences(licence_of(component["name"]))
    return stamped(bom, work.epoch)


def stamped(bom: Bom, epoch: int) -> Bom:
    """Return a bill that is the same for the same content: uv gives it the time and a number by chance."""
    bom["metadata"]["timestamp"] = datetime.fromtimestamp(epoch, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    bom.pop("serialNumber", None)
    number = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bom, sort_keys=True))
    return {"bomFormat": bom["bomFormat"], "specVersion": bom["specVersion"], "serialNumber": number.urn} | bom


def licences(expression: str) -> list[Bom]:
    """Return an SPDX expression as bills spell it."""
    return [{"license": {"id": expression}} if " " not in expression else {"expression": expression}]


def flaws(bom: Bom) -> Iterator[str]:
    """Yield what is not as CycloneDX 1.5 says, or not known of a component."""
    if (bom.get("bomFormat"), bom.get("specVersion"), bom.get("version")) != ("CycloneDX", "1.5", 1):
        yield "is no CycloneDX 1.5"
    if not re.fullmatch(r"urn:uuid:[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", bom.get("serialNumber", "")):
        yield "has no serial number"
    components = [bom["metadata"]["component"], *bom["components"]]
    for it in components:
        yield from _of_component(it)
    known = [it.get("bom-ref") for it in components]
    for reference in sorted({it for it in known if known.count(it) > 1}):
        yield f"has {reference} twice"
    needs = {it["ref"]: it.get("dependsOn", []) for it in bom.get("dependencies", [])}
    for reference in sorted({*needs, *(it for some in needs.values() for it in some)} - set(known)):
        yield f"speaks of {reference}, which is not in it"


def _of_component(it: Bom) -> Iterator[str]:
    name, version, purl = (it.get(key, "") for key in ("name", "version", "purl"))
    ours = f"{name or 'a component'}"
    for key in ("type", "bom-ref", "name", "version", "purl"):
        if not it.get(key):
            yield f"{ours} has no {key}"
    if purl and not re.fullmatch(rf"pkg:(pypi|deb/debian)/{re.escape(name)}@{re.escape(version)}", unquote(purl)):
        yield f"the purl of {ours} is {purl}"
    if not it.get("licenses") and not purl.startswith("pkg:deb/"):  # Debian tells its licences as prose
        yield f"{ours} has no licence"
