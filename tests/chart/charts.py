"""The chart, as the real helm renders it."""

import asyncio
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from ground.api import Object
from ground.cluster import Cluster
from ground.poll import eventually
from ground.programs import program
from ground.subprocesses import kill

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts" / "rota"
STRICT = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}  # of a namespace
PROMETHEUS = "--api-versions=monitoring.coreos.com/v1"
EVERYTHING: Object = {
    "networkPolicy": {"enabled": True, "memberNamespaces": ["shop"], "scrapeFrom": ["monitoring"]},
    "serviceMonitor": {"enabled": True, "labels": {"prometheus": "main"}},
    "podMonitor": {"enabled": True, "labels": {"prometheus": "main"}},
    "prometheusRule": {"enabled": True},
    "dashboards": {"enabled": True},
    "journal": {"kind": "volume"},
    "pipeline": {"enabled": True, "claim": "history"},
}


class Refused(Exception):  # noqa: N818 - it is what happened
    """Helm said no; what it said."""


class Rendered:
    """What a chart makes, by kind and name."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.objects: list[Object] = [body for body in yaml.safe_load_all(text) if body]
        self.by_kind: dict[str, list[Object]] = defaultdict(list)
        for body in self.objects:
            self.by_kind[body["kind"]].append(body)

    def __getitem__(self, wanted: str) -> Object:
        """Return the one object of that "Kind" or "Kind/name"."""
        kind, _, name = wanted.partition("/")
        (found,) = (it for it in self.by_kind[kind] if name in {"", it["metadata"]["name"]})
        return found

    def __contains__(self, kind: str) -> bool:
        return kind in self.by_kind

    @property
    def pod(self) -> Object:
        """The operator's pod template."""
        template: Object = self["Deployment"]["spec"]["template"]
        return template

    @property
    def container(self) -> Object:
        """The operator's container."""
        (only,) = self.pod["spec"]["containers"]
        found: Object = only
        return found

    @property
    def env(self) -> dict[str, str]:
        """The operator's settings that are given by value."""
        return {it["name"]: it["value"] for it in self.container["env"] if "value" in it}


class Helm:
    """The real helm, with a home of its own."""

    def __init__(self, home: Path) -> None:
        self._program = program("helm")
        homes = {f"HELM_{it}_HOME": str(home / it) for it in ("CACHE", "CONFIG", "DATA")}
        self._env = {**os.environ, **homes, "KUBECONFIG": os.devnull}  # no cluster is taken without being asked

    def __call__(self, *arguments: str | Path, values: Object | None = None) -> str:
        """Run it with those values; return what it printed."""
        ended = self.run(*arguments, values=values)
        if ended.returncode != 0:
            raise Refused(ended.stderr.strip() or ended.stdout.strip())
        return ended.stdout

    def run(self, *arguments: str | Path, values: Object | None = None) -> "subprocess.CompletedProcess[str]":
        """Run it with those values; return its exit code, output and warnings."""
        given, feed = ([], None) if values is None else (["--values", "-"], json.dumps(values))
        argv = [self._program, *arguments, *given]
        return subprocess.run(argv, input=feed, capture_output=True, text=True, check=False, env=self._env)

    def template(self, *options: str, chart: Path = CHART, **values: Any) -> Rendered:
        """Render a chart without a cluster."""
        return Rendered(self("template", "rota", chart, "--namespace", "rota-system", *options, values=values))


class Release:
    """A release of the chart on a cluster, in a namespace of its own name."""

    def __init__(self, helm: Helm, cluster: Cluster, name: str) -> None:
        self.name = self.namespace = name
        self._helm, self._cluster = helm, cluster
        self._where = ("--kubeconfig", str(cluster.kubeconfig), "--namespace", name)

    def install(self, *options: str, **values: Any) -> str:
        """Install or upgrade it, and return what helm told; definitions that are there are taken over."""
        how = ("--install", "--take-ownership", *options, *self._where)
        return self._helm("upgrade", self.name, CHART, *how, values=values)

    def uninstall(self) -> None:
        """Remove what is there of it."""
        self._helm("uninstall", self.name, "--ignore-not-found", *self._where)

    def template(self, **values: Any) -> Rendered:
        """Render it without installing it."""
        how = ("--namespace", self.namespace, "--api-versions", "monitoring.coreos.com/v1")
        return Rendered(self._helm("template", self.name, CHART, *how, values=values))

    def try_out(self, account: Path, server: str, operator: str) -> "subprocess.CompletedProcess[str]":
        """Run what the pod of `helm test` runs, with a folder for its account and these addresses."""
        rendered = self.template()
        test_account = rendered[f"ServiceAccount/{rendered['Pod']['spec']['serviceAccountName']}"]
        self._cluster.kubectl("apply", "-f", "-", feed=json.dumps(test_account))
        (account / "token").write_text(self.token(test_account["metadata"]["name"]))
        (account / "ca.crt").write_text(self.authority())
        (container,) = rendered["Pod"]["spec"]["containers"]
        program, *arguments = container["command"] + container["args"]
        assert program == "python"
        told = {it["name"]: it["value"] for it in container["env"]} | {"ACCOUNT": str(account)}
        told["KINDS"] = told["KINDS"].replace("https://kubernetes.default.svc", server)
        told["READY"] = told["READY"].replace(f"https://{self.name}.{self.namespace}:8080", operator)
        argv = [sys.executable, *arguments]
        return subprocess.run(argv, env={**os.environ, **told}, capture_output=True, text=True, check=False)

    def token(self, account: str = "") -> str:
        """Return a token of a ServiceAccount of the release, by default the operator's."""
        return self._cluster.kubectl("create", "token", account or self.name, "-n", self.namespace).strip()

    def authority(self) -> str:
        """Return what the release's pods know the API server by."""
        found = ("get", "configmap", "kube-root-ca.crt", "-n", self.namespace, "-o", r"jsonpath={.data.ca\.crt}")
        return eventually(lambda: self._cluster.kubectl(*found, check=False))


def environment(rendered: Rendered, fields: dict[str, str]) -> dict[str, str]:
    """Return what a container's variables are in a pod with those fields."""
    told = rendered.env
    for it in rendered.container["env"]:
        if "valueFrom" in it:
            told[it["name"]] = fields[it["valueFrom"]["fieldRef"]["fieldPath"]]
    return told


@asynccontextmanager
async def started(
    rendered: Rendered, kubeconfig: Path, fields: dict[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Start the operator's container without a container; it is killed if it still runs at the end.

    Its journal and its log are files beside the kubeconfig; the log is printed for a test that fails.
    """
    (program,) = rendered.container["command"]
    argv = [Path(sys.executable).with_name(program), *rendered.container["args"]]
    with journal_of(kubeconfig).open("wb") as journal, log_of(kubeconfig).open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *argv,
            env={**os.environ, **environment(rendered, fields), "KUBECONFIG": str(kubeconfig)},
            stdout=journal,
            stderr=log,
        )
    try:
        yield process
    finally:
        exit_code = process.returncode
        await kill(process)
        print(f"{kubeconfig.name}: {exit_code}\n{log_of(kubeconfig).read_text()}")


def journal_of(kubeconfig: Path) -> Path:
    """Return the file with what an operator that was started with a kubeconfig wrote to stdout."""
    return kubeconfig.with_suffix(".journal")


def log_of(kubeconfig: Path) -> Path:
    """Return the file with what an operator that was started with a kubeconfig wrote to stderr."""
    return kubeconfig.with_suffix(".log")


def as_its_account(cluster: Cluster, release: Release, path: Path) -> Path:
    """Write a kubeconfig for the release's ServiceAccount."""
    config = json.loads(cluster.kubectl("config", "view", "--raw", "--flatten", "--minify", "-o", "json"))
    config["users"][0]["user"] = {"token": release.token()}
    path.write_text(json.dumps(config))
    return path
