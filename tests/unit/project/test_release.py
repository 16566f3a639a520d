"""Tests the checks of a release with values; tests/chart/test_release.py runs all of them on a whole release."""

import copy
import io
import os
import tarfile
from email.message import Message
from pathlib import Path
from typing import Any

import pytest
import yaml

from release.before import unnamed
from release.boms import flaws, licences, stamped
from release.compat import incompatible, values_lost, values_refused
from release.licences import refused, spdx
from release.versions import disagreeing, sections
from release.work import newest, repack, sha256

ROOT = Path(__file__).parents[3]
SPEC = "spec.versions.0.schema.openAPIV3Schema.properties.spec"


def a_definition() -> Any:
    """Return a small definition with a field of every kind."""
    spec = {
        "type": "object",
        "required": ["size"],
        "x-kubernetes-validations": [{"rule": "self.size > 0", "message": "…"}],
        "properties": {
            "size": {"type": "integer", "minimum": 1, "maximum": 9, "default": 3},
            "name": {"type": "string", "pattern": "^a", "maxLength": 5, "nullable": True},
            "kind": {"type": "string", "enum": ["A", "B"]},
            "list": {"type": "array", "items": {"type": "object", "properties": {"key": {"type": "string"}}}},
            "labels": {"type": "object", "additionalProperties": {"type": "string"}},
            "any": {"type": "object", "x-kubernetes-preserve-unknown-fields": True},
            "port": {"x-kubernetes-int-or-string": True},
        },
    }
    version = {
        "name": "v1",
        "served": True,
        "storage": True,
        "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}},
    }
    names = {"kind": "Thing", "listKind": "ThingList", "plural": "things", "singular": "thing", "shortNames": ["th"]}
    spec_of_definition = {"group": "a.b", "scope": "Namespaced", "names": names, "versions": [version]}
    return {"metadata": {"name": "things.a.b"}, "spec": spec_of_definition}


def changed(path: str, value: Any) -> Any:
    """Return the definition with this value at the path; None removes the field."""
    definition = container = a_definition()
    *parents, last = path.split(".")
    for key in parents:
        container = container[int(key)] if isinstance(container, list) else container[key]
    if value is None:
        del container[last]
    else:
        container[last] = value
    return definition


FIELD = f"{SPEC}.properties"
NEW_RULE = [{"rule": "self.size > 0", "message": "other words"}, {"rule": "self.size < 8", "message": "…"}]
SECOND_VERSION = {"name": "v2", "served": True, "storage": True, "schema": {"openAPIV3Schema": {}}}
REMOVED = "was removed; what is said there is dropped or refused"
BREACHES = [
    (f"{FIELD}.name", None, f"spec.name: {REMOVED}"),
    (
        f"{FIELD}.list.items.properties.key",
        None,
        f"spec.list[].key: {REMOVED}",
    ),
    (f"{FIELD}.name.type", "integer", "spec.name: is integer now, was string"),
    (f"{FIELD}.port", {"type": "integer"}, "spec.port: is integer now, was integer or string"),
    (f"{FIELD}.kind.enum", ["A", "C"], "spec.kind: does not take B any more"),
    (f"{FIELD}.name.enum", ["a"], "spec.name: does not take anything else any more"),
    (f"{FIELD}.name.pattern", "^aa", "spec.name: pattern is ^aa now, was ^a"),
    (f"{FIELD}.kind.pattern", "^A", "spec.kind: pattern is ^A now, was not there"),
    (f"{FIELD}.size.minimum", 2, "spec.size: minimum is 2 now, was 1"),
    (f"{FIELD}.size.maximum", 8, "spec.size: maximum is 8 now, was 9"),
    (f"{FIELD}.name.minLength", 1, "spec.name: minLength is 1 now, was not there"),
    (f"{FIELD}.kind.maxLength", 1, "spec.kind: maxLength is 1 now, was not there"),
    (f"{FIELD}.name.nullable", False, "spec.name: may not be null any more"),
    (f"{FIELD}.size.default", 4, "spec.size: what is filled in is 4 now, was 3"),
    (f"{FIELD}.size.default", None, "spec.size: what is filled in is nothing now, was 3"),
    (f"{FIELD}.list.x-kubernetes-list-type", "set", "spec.list: x-kubernetes-list-type is set now, was not there"),
    (f"{FIELD}.list.items.required", ["key"], "spec.list[].key: must be there now, and has no default"),
    (f"{SPEC}.required", ["size", "name"], "spec.name: must be there now, and has no default"),
    (f"{SPEC}.x-kubernetes-validations", NEW_RULE, "spec: has a rule that was not there: self.size < 8"),
    (f"{FIELD}.labels.additionalProperties", None, "spec.labels: does not keep any other keys any more"),
    (f"{FIELD}.labels.additionalProperties.maxLength", 3, "spec.labels.*: maxLength is 3 now, was not there"),
    (f"{FIELD}.any.x-kubernetes-preserve-unknown-fields", None, "spec.any: does not keep any other keys any more"),
]
BREACHES_OF_DEFINITION = [
    ("metadata.name", "others.a.b", ["Thing metadata.name: changed from things.a.b to others.a.b"]),
    ("spec.group", "c.d", ["Thing group: changed from a.b to c.d"]),
    ("spec.scope", "Cluster", ["Thing scope: changed from Namespaced to Cluster"]),
    ("spec.names.kind", "Other", ["Thing names.kind: changed from Thing to Other"]),
    ("spec.names.plural", "others", ["Thing names.plural: changed from things to others"]),
    ("spec.names.shortNames", ["t"], ["Thing names.shortNames: th was removed"]),
    ("spec.versions.0.served", False, ["Thing/v1 version: is not served any more"]),
    ("spec.versions.0.subresources", {}, ["Thing/v1 subresources.status: was removed"]),
    (
        "spec.versions",
        [SECOND_VERSION],
        [
            "Thing the stored version: changed from v1 to v2",
            "Thing/v1 version: was removed; objects may be stored in it, and manifests name it",
        ],
    ),
]
HARMLESS = [
    (f"{FIELD}.more", {"type": "string"}),
    (f"{FIELD}.size.type", "number"),
    (f"{FIELD}.size.minimum", 0),
    (f"{FIELD}.size.maximum", None),
    (f"{FIELD}.size.description", "How large it is."),
    (f"{FIELD}.kind.enum", ["C", "B", "A"]),
    (f"{FIELD}.kind.default", "A"),
    (f"{FIELD}.name.pattern", None),
    (f"{FIELD}.name.minLength", 0),
    (f"{FIELD}.labels.additionalProperties", {}),
    (f"{FIELD}.list.items.required", []),
    (f"{SPEC}.required", []),
    (f"{SPEC}.x-kubernetes-validations", []),
    ("spec.names.shortNames", ["t", "th"]),
    ("spec.versions.0.subresources.scale", {"specReplicasPath": ".spec.size"}),
    ("spec.versions.0.additionalPrinterColumns", [{"name": "Size"}]),
]


@pytest.mark.parametrize(("path", "value", "expected"), BREACHES)
def test_release_names_breaking_changes_of_crd_fields(path: str, value: Any, expected: str) -> None:
    assert incompatible(a_definition(), changed(path, value)) == [f"Thing/v1 {expected}"]


@pytest.mark.parametrize(("path", "value", "expected"), BREACHES_OF_DEFINITION)
def test_release_names_breaking_changes_of_a_crd(path: str, value: Any, expected: list[str]) -> None:
    assert incompatible(a_definition(), changed(path, value)) == expected


@pytest.mark.parametrize(("path", "value"), HARMLESS)
def test_release_allows_compatible_crd_changes(path: str, value: Any) -> None:
    assert incompatible(a_definition(), changed(path, value)) == []


def test_release_allows_a_new_required_crd_field_with_a_default() -> None:
    new = changed(f"{FIELD}.more", {"type": "string", "default": "a"})
    new["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["required"] = ["size", "more"]
    assert incompatible(a_definition(), new) == []


def test_release_allows_a_new_crd_version() -> None:
    new = a_definition()
    new["spec"]["versions"].append({**SECOND_VERSION, "storage": False})
    assert incompatible(a_definition(), new) == []


@pytest.mark.parametrize("path", sorted((ROOT / "crds").glob("*.yaml")), ids=lambda path: path.stem)
def test_release_detects_removal_of_any_crd_field(path: Path) -> None:
    definition = yaml.safe_load(path.read_text())
    assert incompatible(definition, definition) == []
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for path_of_field, parent, name in fields(schema):
        removed = parent["properties"].pop(name)
        without_field = copy.deepcopy(definition)
        parent["properties"][name] = removed
        breaches = incompatible(definition, without_field)
        assert any(breach.partition(": ")[0].endswith(f" {path_of_field}") for breach in breaches), path_of_field


def fields(schema: Any, path: str = "") -> list[tuple[str, Any, str]]:
    all_fields = []
    for name, field in schema.get("properties", {}).items():
        field_path = f"{path}.{name}".strip(".")
        all_fields += [
            (field_path, schema, name),
            *fields(field, field_path),
            *fields(field.get("items", {}), f"{field_path}[]"),
        ]
    return all_fields


# The chart's values.


def test_release_names_removed_chart_values() -> None:
    old = {"image": {"tag": "", "digest": ""}, "labels": {}, "replicas": 2}
    assert values_lost(old, {"image": {"tag": ""}, "labels": {}, "more": 1}) == [
        "values image.digest: was removed",
        "values replicas: was removed",
    ]
    assert values_lost(old, {**old, "image": "a:b"}) == ["values image: is no map any more"]
    assert values_lost(old, {**old, "replicas": 3, "image": {"tag": "x", "digest": "", "pull": True}}) == []


def test_release_names_chart_values_that_are_no_longer_accepted() -> None:
    old: Any = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "open": {"type": "object"}}}
    assert values_refused(old, old) == []
    new = {"type": "object", "properties": {"kind": {"enum": ["a"]}, "open": {"type": "object"}}}
    assert values_refused(old, new) == ["values kind: does not take b any more"]
    closed = {**old["properties"], "open": {"type": "object", "additionalProperties": False}}
    expected = ["values open: does not keep any other keys any more"]
    assert values_refused(old, {**old, "properties": closed}) == expected
    assert values_refused({**old, "properties": closed}, old) == []


def test_release_accepts_a_breaking_change_named_in_the_changelog() -> None:
    breaches = ["Thing/v1 spec.name: was removed", "values image.tag: was removed"]
    section = "\n### Added\n\n- `values image.tag`\n\n### Breaking\n\n- `Thing/v1 spec.name` is gone.\n\n### Fixed\n"
    assert unnamed(breaches, section) == ["values image.tag: was removed"]
    assert unnamed(breaches, "") == breaches


# Versions.

CONSISTENT_FILES = {
    "charts/rota/Chart.yaml": 'version: 1.2.3\nappVersion: "1.2.3"\n',
    "charts/rota/values.yaml": 'image: {tag: ""}\npipeline: {image: {tag: ""}}\n',
    "Dockerfile": "FROM a\nARG VERSION=1.2.3\n",
    "uv.lock": '[[package]]\nname = "rota-operator"\nversion = "1.2.3"\n',
    "CHANGELOG.md": "# Changelog\n\n## 1.2.3 (2026-01-01)\n\nAll new.\n\n## 1.2.2 (2025-01-01)\n",
    "docs/pipeline.md": "image: ghcr.io/rota-dev/rota-pipeline:1.2.3\n",
}
INCONSISTENT_FILES = [
    ("charts/rota/Chart.yaml", "version: 1.2.3\nappVersion: 1.2.4\n", "appVersion in charts/rota/Chart.yaml is 1.2.4"),
    ("charts/rota/values.yaml", "pipeline: {image: {tag: a}}", "pipeline.image.tag in charts/rota/values.yaml is a"),
    ("Dockerfile", "ARG VERSION=1.2\n", "Dockerfile says 1.2"),
    ("uv.lock", "", "uv.lock says nothing"),
    ("CHANGELOG.md", "## 1.2.2\n", "the newest section of CHANGELOG.md is 1.2.2"),
    ("docs/pipeline.md", "ghcr.io/rota-dev/rota-operator:1.2.2", "docs/pipeline.md shows an image of 1.2.2"),
]


def test_release_accepts_one_version_everywhere() -> None:
    assert disagreeing(CONSISTENT_FILES, "1.2.3") == []
    assert disagreeing({**CONSISTENT_FILES, "CHANGELOG.md": "## Unreleased\n"}, "1.2.3") == []


@pytest.mark.parametrize(("name", "text", "expected"), INCONSISTENT_FILES)
def test_release_names_a_file_with_another_version(name: str, text: str, expected: str) -> None:
    assert disagreeing({**CONSISTENT_FILES, name: text}, "1.2.3") == [expected]


def test_release_splits_the_changelog_into_sections() -> None:
    sections_by_version = sections(CONSISTENT_FILES["CHANGELOG.md"])
    assert [*sections_by_version] == ["1.2.3", "1.2.2"]
    assert "All new." in sections_by_version["1.2.3"]


@pytest.mark.parametrize(
    ("tags", "version", "predecessor"),
    [
        ("", "0.1.0", ""),
        ("v0.1.0", "0.1.0", ""),
        ("v0.1.0 v0.9.0 v0.10.0 v0.11.0", "0.11.0", "v0.10.0"),
        ("v0.1.0 v0.2.0-rc.1 wip v9", "0.2.0", "v0.1.0"),
    ],
)
def test_release_predecessor_is_the_newest_older_version(tags: str, version: str, predecessor: str) -> None:
    assert newest(tags, version) == predecessor


# Licences and bills of materials.


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("MIT", []),
        ("Apache-2.0 AND MIT", []),
        ("GPL-3.0-only OR MIT", []),
        ("GPL-3.0-only", ["GPL-3.0-only"]),
        ("MIT AND GPL-2.0-only", ["GPL-2.0-only"]),
        ("(MIT)", ["(MIT)"]),
        ("", ["no licence"]),
    ],
)
def test_release_rejects_licences_that_are_not_allowed(licence: str, expected: list[str]) -> None:
    assert refused(licence) == expected


@pytest.mark.parametrize(
    ("headers", "licence"),
    [
        ({"License-Expression": "MIT OR Apache-2.0", "License": "see below"}, "MIT OR Apache-2.0"),
        ({"License": "Apache 2.0"}, "Apache-2.0"),
        ({"License": "MIT License\n\nCopyright …"}, "MIT"),
        ({"Classifier": "License :: OSI Approved :: MIT License"}, "MIT"),
        ({"License": "BSD", "Classifier": "License :: OSI Approved :: BSD License"}, "BSD, BSD License"),
        ({"License": "as is"}, "as is"),
        ({}, ""),
    ],
)
def test_release_reads_the_licence_from_unambiguous_package_metadata(headers: dict[str, str], licence: str) -> None:
    metadata = Message()
    for key, value in headers.items():
        metadata[key] = value
    assert spdx("thing", metadata) == licence


def a_bill() -> Any:
    def component(name: str, purl: str) -> Any:
        common_fields = {"type": "library", "name": name, "version": "1", "bom-ref": name}
        return {**common_fields, "purl": purl, "licenses": licences("MIT")}

    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": component("us", "pkg:pypi/us@1")},
        "components": [component("a", "pkg:pypi/a@1"), component("b", "pkg:deb/debian/b@1")],
        "dependencies": [{"ref": "us", "dependsOn": ["a"]}],
    }


def test_release_bill_of_materials_is_reproducible() -> None:
    bill = stamped(a_bill(), 0)
    assert [*flaws(bill)] == []
    assert bill["metadata"]["timestamp"] == "1970-01-01T00:00:00Z"
    assert stamped({**a_bill(), "serialNumber": "by chance"}, 0) == bill
    assert stamped({**a_bill(), "components": []}, 0)["serialNumber"] != bill["serialNumber"]


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("specVersion", "1.4", "is no CycloneDX 1.5"),
        ("serialNumber", "urn:uuid:1", "has no serial number"),
        ("components.0.version", "", "a has no version"),
        ("components.0.purl", "pkg:pypi/a@2", "the purl of a is pkg:pypi/a@2"),
        ("components.0.licenses", [], "a has no licence"),
        ("components.0.bom-ref", "b", "has b twice"),
        ("dependencies.0.dependsOn", ["c"], "speaks of c, which is not in it"),
    ],
)
def test_release_names_flaws_of_a_bill_of_materials(path: str, value: Any, expected: str) -> None:
    bill: Any = stamped(a_bill(), 0)
    container = bill
    *parents, last = path.split(".")
    for key in parents:
        container = container[int(key)] if isinstance(container, list) else container[key]
    container[last] = value
    assert expected in [*flaws(bill)]


def test_release_bill_of_materials_allows_debian_without_licence_and_expressions() -> None:
    bill = stamped(a_bill(), 0)
    bill["components"][1]["licenses"] = []
    bill["components"][0]["licenses"] = licences("MIT OR Apache-2.0")
    assert [*flaws(bill)] == []
    assert bill["components"][0]["licenses"] == [{"expression": "MIT OR Apache-2.0"}]


# Archives.


def test_release_archive_is_reproducible_after_repacking(tmp_path: Path) -> None:
    archives = []
    for number, names in enumerate((["a", "b"], ["b", "a"])):
        packed = tmp_path / f"{number}.tar"
        with tarfile.open(packed, "w") as tar:
            for name in names:
                member = tarfile.TarInfo(name)
                member.size, member.mtime, member.uid, member.mode = 1, number, number, 0o644 + 0o020 * number
                tar.addfile(member, io.BytesIO(b"x"))
        archives.append(tmp_path / f"{number}.tgz")
        os.utime(packed, (number, number))
        repack(packed, archives[-1], 7)
    assert sha256(archives[0]) == sha256(archives[1])
    assert int.from_bytes(archives[0].read_bytes()[4:8], "little") == 7, "the time in the header of the archive"
    with tarfile.open(archives[0]) as tar:
        assert [(entry.name, entry.mtime, entry.mode, entry.uid) for entry in tar] == [
            ("a", 7, 0o644, 0),
            ("b", 7, 0o644, 0),
        ]
        file = tar.extractfile("a")
        assert file
        assert file.read() == b"x"
