"""Finds incompatible changes of definitions and of the chart's values between two releases.

Each change is reported as "place: description"; a place in backticks under "### Breaking" in the changelog declares the
change as intended.
"""

from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]

_NAMES = ("kind", "listKind", "plural", "singular")
_LEAST = {"minimum": float("-inf"), "minLength": 0, "minItems": 0, "minProperties": 0}  # with the default of each
_MOST = ("maximum", "maxLength", "maxItems", "maxProperties")
# Keywords with values that cannot be ordered by strictness: a new or changed value counts as an incompatible change.
_UNORDERED = [
    *("pattern", "format", "multipleOf", "uniqueItems", "exclusiveMinimum", "exclusiveMaximum", "const", "$ref"),
    *("allOf", "anyOf", "oneOf", "not"),
    *(f"x-kubernetes-{keyword}" for keyword in ("embedded-resource", "list-type", "list-map-keys", "map-type")),
]


def incompatible(old: Schema, new: Schema) -> list[str]:
    """Return the changes of a CustomResourceDefinition that break objects, manifests or clients of the older one."""
    old_spec, new_spec = old["spec"], new["spec"]
    kind = old_spec["names"]["kind"]
    pairs = [(f"names.{key}", old_spec["names"].get(key), new_spec["names"].get(key)) for key in _NAMES]
    pairs += [(key, old_spec[key], new_spec[key]) for key in ("group", "scope")]
    pairs += [("metadata.name", old["metadata"]["name"], new["metadata"]["name"])]
    pairs += [("the stored version", _stored_version(old_spec), _stored_version(new_spec))]
    changes = [f"{kind} {place}: changed from {was} to {now}" for place, was, now in pairs if was != now]
    for key in ("shortNames", "categories"):
        removed = set(old_spec["names"].get(key, ())) - set(new_spec["names"].get(key, ()))
        changes += [f"{kind} names.{key}: {name} was removed" for name in sorted(removed)]
    new_versions = {name["name"]: name for name in new_spec["versions"]}
    for version in old_spec["versions"]:
        changes += _compare_version(f"{kind}/{version['name']}", version, new_versions.get(version["name"]))
    return changes


def values_lost(old: Schema, new: Schema, path: str = "") -> list[str]:
    """Return the keys of values.yaml that were removed, or that are no maps any more."""
    changes = []
    for key, value in old.items():
        key_path = f"{path}.{key}".strip(".")
        if key not in new:
            changes.append(f"values {key_path}: was removed")
        elif isinstance(value, dict) and value:  # users may put any keys into an empty map
            new_value = new[key]
            changes += (
                values_lost(value, new_value, key_path)
                if isinstance(new_value, dict)
                else [f"values {key_path}: is no map any more"]
            )
    return changes


def values_refused(old: Schema, new: Schema) -> list[str]:
    """Return the values that the older values.schema.json accepted and the newer one rejects."""
    return [f"values {change}" for change in narrowed(_as_open_schema(old), _as_open_schema(new))]


def narrowed(old: Schema, new: Schema, path: str = "") -> Iterator[str]:
    """Yield the places where a schema accepts less than before, drops keys that it kept, or has another default."""
    for change in _restrictions(old, new):
        yield f"{path or '(whole)'}: {change}"
    yield from _field_changes(old, new, path)
    if "items" in new:
        yield from narrowed(old.get("items", {}), new["items"], f"{path}[]")
    old_rest, new_rest = _schema_of_other_keys(old), _schema_of_other_keys(new)
    if old_rest is not None and new_rest is None:
        yield f"{path or '(whole)'}: does not keep any other keys any more"
    elif old_rest is not None and new_rest is not None:
        yield from narrowed(old_rest, new_rest, f"{path}.*".strip("."))


def _compare_version(name: str, old: Schema, new: Schema | None) -> Iterator[str]:
    if new is None:
        yield f"{name} version: was removed; objects may be stored in it, and manifests name it"
        return
    if old["served"] and not new["served"]:
        yield f"{name} version: is not served any more"
    for key, value in old.get("subresources", {}).items():
        new_value = new.get("subresources", {}).get(key)
        if new_value != value:
            yield f"{name} subresources.{key}: {'was removed' if new_value is None else 'changed'}"
    for change in narrowed(old["schema"]["openAPIV3Schema"], new["schema"]["openAPIV3Schema"]):
        yield f"{name} {change}"


def _stored_version(spec: Schema) -> str:
    return next(str(version["name"]) for version in spec["versions"] if version["storage"])


def _field_changes(old: Schema, new: Schema, path: str) -> Iterator[str]:
    properties = new.get("properties", {})
    other_keys = _schema_of_other_keys(new)
    for name, field in old.get("properties", {}).items():
        field_path = f"{path}.{name}".strip(".")
        if name in properties:
            yield from narrowed(field, properties[name], field_path)
        elif other_keys is None:
            yield f"{field_path}: was removed; what is said there is dropped or refused"
        else:
            yield from narrowed(field, other_keys, field_path)
    for name in sorted(set(new.get("required", ())) - set(old.get("required", ()))):
        if "default" not in properties.get(name, {}):
            yield f"{path}.{name}: ".lstrip(".") + "must be there now, and has no default"


def _schema_of_other_keys(schema: Schema) -> Schema | None:
    """Return the schema of keys that are not listed, or None if they are dropped."""
    if schema.get("x-kubernetes-preserve-unknown-fields"):
        return {}
    other_keys = schema.get("additionalProperties", False)
    if isinstance(other_keys, bool):
        return {} if other_keys else None
    return dict(other_keys)


def _restrictions(old: Schema, new: Schema) -> Iterator[str]:
    yield from _type_changes(old, new)
    yield from _bound_changes(old, new)
    if "default" in old and new.get("default") != old["default"]:
        yield f"what is filled in is {new.get('default', 'nothing')} now, was {old['default']}"
    old_rules = {rule["rule"] for rule in old.get("x-kubernetes-validations", ())}
    for rule in new.get("x-kubernetes-validations", ()):
        if rule["rule"] not in old_rules:
            yield f"has a rule that was not there: {rule['rule']}"


def _bound_changes(old: Schema, new: Schema) -> Iterator[str]:
    for key, unbound in _LEAST.items():
        if new.get(key, unbound) > old.get(key, unbound):
            yield f"{key} is {new[key]} now, was {old.get(key, 'not there')}"
    for key in _MOST:
        if key in new and new[key] < old.get(key, float("inf")):
            yield f"{key} is {new[key]} now, was {old.get(key, 'not there')}"
    for key in _UNORDERED:
        if new.get(key) and new[key] != old.get(key):
            yield f"{key} is {new[key]} now, was {old.get(key, 'not there')}"


def _type_changes(old: Schema, new: Schema) -> Iterator[str]:
    """Yield lost types, lost null and lost values; a schema without a type or an enum accepts anything."""
    old_types, new_types = _types(old), _types(new)
    accepted_types = new_types | {"integer"} if "number" in new_types else new_types
    if new_types and not (old_types and old_types <= accepted_types):
        yield f"is {' or '.join(sorted(new_types))} now, was {' or '.join(sorted(old_types)) or 'anything'}"
    if old.get("nullable") and not new.get("nullable"):
        yield "may not be null any more"
    if "enum" in new:
        removed = [value for value in old["enum"] if value not in new["enum"]] if "enum" in old else ["anything else"]
        if removed:
            yield f"does not take {', '.join(map(str, removed))} any more"


def _types(schema: Schema) -> set[str]:
    if schema.get("x-kubernetes-int-or-string"):
        return {"integer", "string"}
    types = schema.get("type", [])
    return {types} if isinstance(types, str) else set(types)


def _as_open_schema(schema: Schema) -> Schema:
    """Convert a plain JSON schema, which allows other keys by default, to the API server's rules, which drop them."""
    opened = {key: _as_open_schema(value) if key == "items" else value for key, value in schema.items()}
    opened["properties"] = {key: _as_open_schema(value) for key, value in schema.get("properties", {}).items()}
    opened["additionalProperties"] = schema.get("additionalProperties", True)
    if isinstance(opened["additionalProperties"], dict):
        opened["additionalProperties"] = _as_open_schema(opened["additionalProperties"])
    return opened
