"""What worked with an older release and would not with a newer one: definitions, and the chart's values.

Each answer is "place: what happened"; the place, in backticks under "### Breaking" in the changelog, is meant.
"""

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_NAMES = ("kind", "listKind", "plural", "singular")
_LEAST = {"minimum": float("-inf"), "minLength": 0, "minItems": 0, "minProperties": 0}  # and what no bound means
_MOST = ("maximum", "maxLength", "maxItems", "maxProperties")
# Of two of these nobody can tell which is the stricter one.
_NEW = [
    *("pattern", "format", "multipleOf", "uniqueItems", "exclusiveMinimum", "exclusiveMaximum", "const", "$ref"),
    *("allOf", "anyOf", "oneOf", "not"),
    *(f"x-kubernetes-{it}" for it in ("embedded-resource", "list-type", "list-map-keys", "map-type")),
]


def incompatible(old: Schema, new: Schema) -> list[str]:
    """Return what of a CustomResourceDefinition would break objects, manifests or clients of the older one."""
    theirs, ours = old["spec"], new["spec"]
    kind = theirs["names"]["kind"]
    pairs = [(f"names.{key}", theirs["names"].get(key), ours["names"].get(key)) for key in _NAMES]
    pairs += [(key, theirs[key], ours[key]) for key in ("group", "scope")]
    pairs += [("metadata.name", old["metadata"]["name"], new["metadata"]["name"])]
    pairs += [("the stored version", _stored(theirs), _stored(ours))]
    found = [f"{kind} {what}: changed from {was} to {now}" for what, was, now in pairs if was != now]
    for key in ("shortNames", "categories"):
        gone = set(theirs["names"].get(key, ())) - set(ours["names"].get(key, ()))
        found += [f"{kind} names.{key}: {it} was removed" for it in sorted(gone)]
    known = {it["name"]: it for it in ours["versions"]}
    for version in theirs["versions"]:
        found += _of_version(f"{kind}/{version['name']}", version, known.get(version["name"]))
    return found


def values_lost(old: Schema, new: Schema, path: str = "") -> list[str]:
    """Return the keys of values.yaml that vanished, or that are no maps any more."""
    found = []
    for key, value in old.items():
        where = f"{path}.{key}".strip(".")
        if key not in new:
            found.append(f"values {where}: was removed")
        elif isinstance(value, dict) and value:  # an empty one is filled by users as they like
            now = new[key]
            found += (
                values_lost(value, now, where) if isinstance(now, dict) else [f"values {where}: is no map any more"]
            )
    return found


def values_refused(old: Schema, new: Schema) -> list[str]:
    """Return which values the older values.schema.json took and the newer one does not."""
    return [f"values {told}" for told in narrowed(_open(old), _open(new))]


def narrowed(old: Schema, new: Schema, path: str = "") -> Iterator[str]:
    """Yield where a schema takes less than before, drops what it kept, or fills in something else."""
    for told in _stricter(old, new):
        yield f"{path or '(whole)'}: {told}"
    yield from _fields(old, new, path)
    if "items" in new:
        yield from narrowed(old.get("items", {}), new["items"], f"{path}[]")
    was, now = _rest(old), _rest(new)
    if was is not None and now is None:
        yield f"{path or '(whole)'}: does not keep any other keys any more"
    elif was is not None and now is not None:
        yield from narrowed(was, now, f"{path}.*".strip("."))


def _of_version(name: str, old: Schema, new: Schema | None) -> Iterator[str]:
    if new is None:
        yield f"{name} version: was removed; objects may be stored in it, and manifests name it"
        return
    if old["served"] and not new["served"]:
        yield f"{name} version: is not served any more"
    for key, value in old.get("subresources", {}).items():
        now = new.get("subresources", {}).get(key)
        if now != value:
            yield f"{name} subresources.{key}: {'was removed' if now is None else 'changed'}"
    for told in narrowed(old["schema"]["openAPIV3Schema"], new["schema"]["openAPIV3Schema"]):
        yield f"{name} {told}"


def _stored(spec: Schema) -> str:
    return next(str(it["name"]) for it in spec["versions"] if it["storage"])


def _fields(old: Schema, new: Schema, path: str) -> Iterator[str]:
    ours, rest = new.get("properties", {}), _rest(new)
    for name, field in old.get("properties", {}).items():
        where = f"{path}.{name}".strip(".")
        if name in ours:
            yield from narrowed(field, ours[name], where)
        elif rest is None:
            yield f"{where}: was removed; what is said there is dropped or refused"
        else:
            yield from narrowed(field, rest, where)
    for name in sorted(set(new.get("required", ())) - set(old.get("required", ()))):
        if "default" not in ours.get(name, {}):
            yield f"{path}.{name}: ".lstrip(".") + "must be there now, and has no default"


def _rest(schema: Schema) -> Schema | None:
    """Return what holds for keys that are not named; None: there are none, they are dropped."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return {}
    rest = schema.get("additionalProperties", False)
    return None if rest is False else {} if rest is True else rest


def _stricter(old: Schema, new: Schema) -> Iterator[str]:
    yield from _other_type(old, new)
    yield from _other_bounds(old, new)
    if "default" in old and new.get("default") != old["default"]:
        yield f"what is filled in is {new.get('default', 'nothing')} now, was {old['default']}"
    before = {it["rule"] for it in old.get("x-kubernetes-validations", ())}
    for it in new.get("x-kubernetes-validations", ()):
        if it["rule"] not in before:
            yield f"has a rule that was not there: {it['rule']}"


def _other_bounds(old: Schema, new: Schema) -> Iterator[str]:
    for key, unbound in _LEAST.items():
        if new.get(key, unbound) > old.get(key, unbound):
            yield f"{key} is {new[key]} now, was {old.get(key, 'not there')}"
    for key in _MOST:
        if key in new and new[key] < old.get(key, float("inf")):
            yield f"{key} is {new[key]} now, was {old.get(key, 'not there')}"
    for key in _NEW:
        if new.get(key) and new[key] != old.get(key):
            yield f"{key} is {new[key]} now, was {old.get(key, 'not there')}"


def _other_type(old: Schema, new: Schema) -> Iterator[str]:
    was, now = _types(old), _types(new)
    if now and not (was and was <= now | ({"integer"} if "number" in now else set())):
        yield f"is {' or '.join(sorted(now))} now, was {' or '.join(sorted(was)) or 'anything'}"
    if old.get("nullable") and not new.get("nullable"):
        yield "may not be null any more"
    if "enum" in new:
        gone = [it for it in old["enum"] if it not in new["enum"]] if "enum" in old else ["anything else"]
        if gone:
            yield f"does not take {', '.join(map(str, gone))} any more"


def _types(schema: Schema) -> set[str]:
    if schema.get("x-kubernetes-int-or-string"):
        return {"integer", "string"}
    found = schema.get("type", [])
    return {found} if isinstance(found, str) else set(found)


def _open(schema: Schema) -> Schema:
    """Return a schema of plain JSON as one of the API server's, which keeps nothing that is not named."""
    found = {key: _open(value) if key == "items" else value for key, value in schema.items()}
    found["properties"] = {key: _open(value) for key, value in schema.get("properties", {}).items()}
    found["additionalProperties"] = schema.get("additionalProperties", True)
    if isinstance(found["additionalProperties"], dict):
        found["additionalProperties"] = _open(found["additionalProperties"])
    return found
