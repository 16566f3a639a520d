"""Renders, installs and starts the chart, by the real helm."""

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


class HelmError(Exception):
    """Helm failed; the text is its error output."""


class Rendered:
    """The rendered objects of a chart, by kind and name."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.objects: list[Object] = list(filter(None, yaml.safe_load_all(text)))
        self.by_kind: dict[str, list[Object]] = defaultdict(list)
        for body in self.objects:
            self.by_kind[body["kind"]].append(body)

    def __getitem__(self, key: str) -> Object:
        """Return the only object of that "Kind" or "Kind/name"."""
        kind, _, name = key.partition("/")
        (match,) = (body for body in self.by_kind[kind] if name in {"", body["metadata"]["name"]})
        return match

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
        (container,) = self.pod["spec"]["containers"]
        result: Object = container
        return result

    @property
    def env(self) -> dict[str, str]:
        """The operator's variables with a literal value."""
        return {variable["name"]: variable["value"] for variable in self.container["env"] if "value" in variable}


class Helm:
    """The real helm, with empty configuration folders."""

    def __init__(self, home: Path) -> None:
        self._program = program("helm")
        homes = {f"HELM_{kind}_HOME": str(home / kind) for kind in ("CACHE", "CONFIG", "DATA")}
        self._env = {**os.environ, **homes, "KUBECONFIG": os.devnull}  # no cluster by default

    def __call__(self, *arguments: str | Path, values: Object | None = None) -> str:
        """Run helm with these values; return its output."""
        process = self.run(*arguments, values=values)
        if process.returncode != 0:
            raise HelmError(process.stderr.strip() or process.stdout.strip())
        return process.stdout

    def run(self, *arguments: str | Path, values: Object | None = None) -> "subprocess.CompletedProcess[str]":
        """Run helm with these values; return its exit code, output and warnings."""
        options, stdin = ([], None) if values is None else (["--values", "-"], json.dumps(values))
        argv = [self._program, *arguments, *options]
        return subprocess.run(argv, input=stdin, capture_output=True, text=True, check=False, env=self._env)

    def template(self, *options: str, chart: Path = CHART, **values: Any) -> Rendered:
        """Render a chart without a cluster."""
        return Rendered(self("template", "rota", chart, "--namespace", "rota-system", *options, values=values))


class Release:
    """A release of the chart on a cluster, in a namespace of its own name."""

    def __init__(self, helm: Helm, cluster: Cluster, name: str) -> None:
        self.name = self.namespace = name
        self._helm = helm
        self._cluster = cluster
        self._where = ("--kubeconfig", str(cluster.kubeconfig), "--namespace", name)

    def install(self, *options: str, **values: Any) -> str:
        """Install or upgrade the release, and return helm's output; existing definitions are taken over."""
        arguments = ("--install", "--take-ownership", *options, *self._where)
        return self._helm("upgrade", self.name, CHART, *arguments, values=values)

    def uninstall(self) -> None:
        """Uninstall the release, if it is installed."""
        self._helm("uninstall", self.name, "--ignore-not-found", *self._where)

    def template(self, **values: Any) -> Rendered:
        """Render the release without installing it."""
        options = ("--namespace", self.namespace, "--api-versions", "monitoring.coreos.com/v1")
        return Rendered(self._helm("template", self.name, CHART, *options, values=values))

    def try_out(self, account: Path, server: str, operator: str) -> "subprocess.CompletedProcess[str]":
        """Run the command of `helm test`'s pod, with a folder for its account's files and these addresses."""
        rendered = self.template()
        test_account = rendered[f"ServiceAccount/{rendered['Pod']['spec']['serviceAccountName']}"]
        self._cluster.kubectl("apply", "-f", "-", feed=json.dumps(test_account))
        (account / "token").write_text(self.token(test_account["metadata"]["name"]))
        (account / "ca.crt").write_text(self.authority())
        (container,) = rendered["Pod"]["spec"]["containers"]
        program, *arguments = container["command"] + container["args"]
        assert program == "python"
        env = {variable["name"]: variable["value"] for variable in container["env"]} | {"ACCOUNT": str(account)}
        env["KINDS"] = env["KINDS"].replace("https://kubernetes.default.svc", server)
        env["READY"] = env["READY"].replace(f"https://{self.name}.{self.namespace}:8080", operator)
        argv = [sys.executable, *arguments]
        return subprocess.run(argv, env={**os.environ, **env}, capture_output=True, text=True, check=False)

    def token(self, account: str = "") -> str:
        """Return a token of a ServiceAccount of the release, by default the operator's."""
        return self._cluster.kubectl("create", "token", account or self.name, "-n", self.namespace).strip()

    def authority(self) -> str:
        """Return the certificate authority by which the release's pods verify the API server."""
        command = ("get", "configmap", "kube-root-ca.crt", "-n", self.namespace, "-o", r"jsonpath={.data.ca\.crt}")
        return eventually(lambda: self._cluster.kubectl(*command, check=False))


def environment(rendered: Rendered, fields: dict[str, str]) -> dict[str, str]:
    """Return the container's variables in a pod with these fields."""
    variables = rendered.env
    for variable in rendered.container["env"]:
        if "valueFrom" in variable:
            variables[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
    return variables


@asynccontextmanager
async def started(
    rendered: Rendered, kubeconfig: Path, fields: dict[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the command of the operator's container as a process, which is killed at the end if it still runs.

    Its journal and its log are files next to the kubeconfig; the log is printed, for tests that fail.
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
    """Return the file with the stdout of the operator that `started` ran with this kubeconfig."""
    return kubeconfig.with_suffix(".journal")


def log_of(kubeconfig: Path) -> Path:
    """Return the file with the stderr of the operator that `started` ran with this kubeconfig."""
    return kubeconfig.with_suffix(".log")


def as_its_account(cluster: Cluster, release: Release, path: Path) -> Path:
    """Write a kubeconfig for the release's ServiceAccount."""
    config = json.loads(cluster.kubectl("config", "view", "--raw", "--flatten", "--minify", "-o", "json"))
    config["users"][0]["user"] = {"token": release.token()}
    path.write_text(json.dumps(config))
    return path
