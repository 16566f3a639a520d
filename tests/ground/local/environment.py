"""What a container is started with: its command, its variables, and where its mounts really are.

There is no mount namespace. So wherever a container's mountPath stands as a path, or at the head of one, in its
command, arguments, working directory or variables, the volume's real place is put instead. Paths that a program
knows by heart are not found; give them by an argument or a variable.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ground.local.volumes import Sources, place, within
from ground.report import Missing

Object = dict[str, Any]
Rewrite = Callable[[str], str]

_REFERENCE = re.compile(r"\$(?:\$|\(([^()]*)\))")


def expand(text: str, known: Mapping[str, str]) -> str:
    """Put variables in place of `$(NAME)`; `$$` stands for a dollar, and what is not known stays as it is."""

    def one(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else known.get(match[1], match[0])

    return _REFERENCE.sub(one, text)


def places(container: Object, volumes: Sequence[Object], folder: Path) -> dict[str, Path]:
    """Return where each mountPath of a container really lies."""
    known = {volume["name"]: volume for volume in volumes}
    found = {}
    for mount in container.get("volumeMounts") or []:
        path = place(known[mount["name"]], folder)
        found[mount["mountPath"].rstrip("/") or "/"] = within(path, mount["subPath"]) if mount.get("subPath") else path
    return found


def rewriter(mounts: Mapping[str, Path]) -> Rewrite:
    """Return what puts real places in place of mount paths, in one pass and the longest first."""
    paths = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
    if not paths:
        return lambda text: text
    # Not inside a longer path or name: `/etc/rota` is neither in `/old/etc/rota` nor in `/etc/rota.d`.
    pattern = re.compile(rf"(?:(?<=file://)|(?<![\w./@+~-]))(?:{paths})(?![\w.@+~-])")
    return lambda text: pattern.sub(lambda match: str(mounts[match[0]]), text)


async def variables(container: Object, given: Mapping[str, str], sources: Sources) -> dict[str, str]:
    """Return a container's variables: what it is given, then envFrom, then env, each seeing those before."""
    made = dict(given)
    for source in container.get("envFrom") or []:
        kind, ref = next((kind, source[f"{kind}Ref"]) for kind in ("configMap", "secret") if f"{kind}Ref" in source)
        entries = await sources.content(kind, ref["name"], optional=ref.get("optional", False))
        made |= {source.get("prefix", "") + key: content.decode() for key, content in entries.items()}
    for variable in container.get("env") or []:
        text = await _value(variable, made, sources)
        if text is not None:
            made[variable["name"]] = text
    return made


async def _value(variable: Object, made: Mapping[str, str], sources: Sources) -> str | None:
    source = variable.get("valueFrom")
    if not source:
        return expand(variable.get("value", ""), made)
    if "fieldRef" in source:
        return sources.field(source["fieldRef"]["fieldPath"])
    kind = next((kind for kind in ("configMap", "secret") if f"{kind}KeyRef" in source), None)
    if kind is None:
        raise Missing(f"variable {variable['name']}: local pods do not know {', '.join(source)}")
    ref = source[f"{kind}KeyRef"]
    entries = await sources.content(kind, ref["name"], optional=ref.get("optional", False))
    if ref["key"] not in entries and not ref.get("optional"):
        raise Missing(f'{kind.lower()} "{ref["name"]}" has no key {ref["key"]}')
    content = entries.get(ref["key"])
    return None if content is None else content.decode()
