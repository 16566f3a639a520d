"""The command and variables of a container, and the real paths of its mounts.

There is no mount namespace. So wherever a container's mountPath is a path, or the beginning of one, in its command,
arguments, working directory or variables, the volume's real path replaces it. Paths that are built into a program are
not replaced; pass them by an argument or a variable.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ground.local.volumes import Sources, path_of, subpath_of
from ground.report import Missing

Object = dict[str, Any]
Rewrite = Callable[[str], str]

_REFERENCE = re.compile(r"\$(?:\$|\(([^()]*)\))")


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace `$(NAME)` by the variable's value; `$$` becomes a dollar, and unknown names stay as they are."""

    def replace(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else values.get(match[1], match[0])

    return _REFERENCE.sub(replace, text)


def mount_paths(container: Object, volumes: Sequence[Object], folder: Path) -> dict[str, Path]:
    """Return the real path of each mountPath of a container."""
    volumes_by_name = {volume["name"]: volume for volume in volumes}
    paths = {}
    for mount in container.get("volumeMounts") or []:
        path = path_of(volumes_by_name[mount["name"]], folder)
        path = subpath_of(path, mount["subPath"]) if mount.get("subPath") else path
        paths[mount["mountPath"].rstrip("/") or "/"] = path
    return paths


def rewriter(mounts: Mapping[str, Path]) -> Rewrite:
    """Return a function that replaces mount paths by real paths, in one pass and the longest first."""
    paths = "|".join(re.escape(path) for path in sorted(mounts, key=len, reverse=True))
    if not paths:
        return lambda text: text
    # Not inside a longer path or name: `/etc/rota` is neither in `/old/etc/rota` nor in `/etc/rota.d`.
    pattern = re.compile(rf"(?:(?<=file://)|(?<![\w./@+~-]))(?:{paths})(?![\w.@+~-])")
    return lambda text: pattern.sub(lambda match: str(mounts[match[0]]), text)


async def resolve_variables(container: Object, common: Mapping[str, str], sources: Sources) -> dict[str, str]:
    """Return a container's variables: the common ones, then envFrom, then env, each of which sees the earlier ones."""
    env = dict(common)
    for source in container.get("envFrom") or []:
        kind, ref = next((kind, source[f"{kind}Ref"]) for kind in ("configMap", "secret") if f"{kind}Ref" in source)
        entries = await sources.content(kind, ref["name"], optional=ref.get("optional", False))
        env |= {source.get("prefix", "") + key: content.decode() for key, content in entries.items()}
    for variable in container.get("env") or []:
        text = await _value(variable, env, sources)
        if text is not None:
            env[variable["name"]] = text
    return env


async def _value(variable: Object, env: Mapping[str, str], sources: Sources) -> str | None:
    source = variable.get("valueFrom")
    if not source:
        return expand(variable.get("value", ""), env)
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
