"""Manifests to apply: a RebalancePolicy for each recommended policy, with the commands for the groups that use it."""

import json
from collections.abc import Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import yaml
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from rota.model import single_line
from rota.pipeline.common.names import MANIFEST_PREFIX, is_manifest_name, replace_unprintable
from rota.pipeline.common.schemas import RECORDED_POLICY
from rota.spec import PolicySpec, policy_body
from rota.spec.names import is_dns_label


class GroupName(NamedTuple):
    """A group's namespace and name."""

    namespace: str
    name: str


def parse_group_name(group: str) -> GroupName | None:
    """Return a group's namespace and name; None if one is not valid in Kubernetes: journals may have any text."""
    namespace, _, name = group.partition("/")
    return GroupName(namespace, name) if is_dns_label(namespace) and is_manifest_name(name) else None


def check_policy_names(policies: Mapping[str, PolicySpec]) -> None:
    """Raise ValueError for a policy's name that Kubernetes would reject, or that is reserved."""
    if RECORDED_POLICY in policies:
        raise ValueError(f"The policy name {RECORDED_POLICY} is reserved for the policy in force; use another name")
    for name in policies:
        if not is_manifest_name(name):
            raise ValueError(f"{single_line(name, 60)!r} is not a valid RebalancePolicy name; use a-z, 0-9, - and .")


def build_manifest(name: str, policy: PolicySpec, namespace: str | None = None) -> str:
    """Return a RebalancePolicy in YAML, valid for `rota.spec` and the CRD."""
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    head = {"apiVersion": "rota.dev/v1alpha1", "kind": "RebalancePolicy", "metadata": metadata}
    return yaml.safe_dump(head | {"spec": policy_body(policy)}, sort_keys=False, allow_unicode=True)


def patch_command(group: str, policy: str) -> str | None:
    """Return the kubectl command for a group; None if its name is not valid: a shell might interpret it."""
    if not (location := parse_group_name(group)):
        return None
    patch = json.dumps({"spec": {"policyRef": {"name": policy}}}, separators=(",", ":"))
    return f"kubectl patch consumergroup -n {location.namespace} {location.name} --type merge -p '{patch}'"


def write_manifests(chosen: DataFrame, policies: Mapping[str, PolicySpec], folder: Path) -> list[Path]:
    """Write `<folder>/<policy>.yaml` for each recommended policy; return the paths of these files.

    Rows arrive one partition at a time, so the driver never holds all groups.
    """
    check_policy_names(policies)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.yaml"):
        # Remove manifests of an earlier run, since this run may not recommend their policies: files with the first line
        # of a manifest, and files with a policy's name, which a recommendation would replace anyway.
        if old.stem in policies or old.read_bytes().startswith(MANIFEST_PREFIX.encode()):
            old.unlink()
    changing = chosen.filter("change").filter(F.col("use").isin(*policies)).select("use", "group")
    group_counts = changing.groupBy("use").agg(F.count("*").alias("groups")).collect()
    counts = {str(row["use"]): int(row["groups"]) for row in group_counts}
    ordered = changing.orderBy("use", "group").toLocalIterator()
    for name, rows in groupby(ordered, key=lambda row: str(row["use"])):
        with (folder / f"{name}.yaml").open("w", encoding="utf-8") as file:
            groups = (str(row["group"]) for row in rows)
            file.writelines(_manifest_lines(name, policies[name], groups, counts[name]))
    return [folder / f"{name}.yaml" for name in sorted(counts)]


def _manifest_lines(name: str, policy: PolicySpec, groups: Iterator[str], group_count: int) -> Iterator[str]:
    noun = "group" if group_count == 1 else "groups"
    yield f"{MANIFEST_PREFIX}{name} for {group_count:,} {noun}.\n"
    yield f"# Review the changes first:  kubectl diff -f {name}.yaml; kubectl apply -f {name}.yaml\n"
    yield "# Then run the commands below each policy, group by group.\n"
    for namespace, named in groupby(groups, key=_group_namespace):
        if namespace is None:
            yield "---\n"
            for group in named:  # with a line break, a name would end its comment
                yield f"# {replace_unprintable(single_line(group))}: not a valid Kubernetes name\n"
        else:
            yield f"---\n{build_manifest(name, policy, namespace)}"
            for group in named:
                yield f"# {patch_command(group, name)}\n"


def _group_namespace(group: str) -> str | None:
    location = parse_group_name(group)
    return location.namespace if location else None
