"""The removal of an installation without its groups, of a namespace with a group, and of all of Rota."""

import os
import subprocess

import pytest

from chart.charts import CHART
from e2e.consumers import NAME, Consumers
from e2e.release import GROUP_NAMESPACE, OPERATOR_NAMESPACE, TIMEOUT_SECONDS, WAIT, Installation
from ground.poll import eventually
from ground.programs import program
from kube.pages import ROOT, typed_commands

pytestmark = pytest.mark.node

LASTING = ("crd/consumergroups.rota.dev", "crd/rebalancepolicies.rota.dev", f"cg/{NAME}", f"deploy/{NAME}")
# As the chart's README says.
REMAINING = {"configmap/kube-root-ca.crt", "serviceaccount/default", "lease.coordination.k8s.io/rota"}


def uids_of(installation: Installation) -> list[str]:
    """Return the uids of the objects that outlive the release."""
    return [installation.group_kubectl("get", name, "-o", "jsonpath={.metadata.uid}") for name in LASTING]


@pytest.mark.slow("on a node, groups continue to consume after an uninstall, and the next release manages them")
def test_uninstall_leaves_groups_consuming_and_the_next_release_adopts_them(
    installation: Installation, consumers: Consumers
) -> None:
    uids = uids_of(installation)
    document = consumers.document()
    with consumers.under_load("uninstalled and installed again"):
        installation.helm_release("uninstall", *WAIT)
        eventually(lambda: installation.remaining_objects() == REMAINING, TIMEOUT_SECONDS)
        of_cluster = "clusterroles,clusterrolebindings,networkpolicies"
        assert not installation.group_kubectl(
            "get", of_cluster, "-A", "-l", "app.kubernetes.io/instance=rota", "-o", "name"
        )
        assert uids_of(installation) == uids
        consumers.wait_for_progress()
        installation.ensure_installed()
        installation.wait_for_operators()
        consumers.wait_settled()
    assert uids_of(installation) == uids
    assert consumers.document() == document


@pytest.mark.slow("on a node, a namespace with a group is deleted")
def test_namespace_with_a_group_is_deleted(installation: Installation, consumers: Consumers) -> None:
    with consumers.under_load("the namespace deleted and recreated"):
        installation.node.kubectl("delete", "namespace", GROUP_NAMESPACE, f"--timeout={TIMEOUT_SECONDS}s")
        installation.ensure_installed()
        consumers.reset()


def run_readme_commands(installation: Installation, *prefixes: str) -> None:
    """Run the commands of the chart's README that start with these prefixes, in its order."""
    all_commands = [page_command.command for page_command in typed_commands(CHART / "README.md")]
    commands = [command for command in all_commands if command.startswith(prefixes)]
    assert len(commands) == len(prefixes), commands
    programs = [str(program(name).parent) for name in ("kubectl", "helm")]
    env = {
        **os.environ,
        "PATH": os.pathsep.join([*programs, os.environ["PATH"]]),
        "KUBECONFIG": str(installation.node.kubeconfig),
    }
    for command in commands:
        completed = subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        assert completed.returncode == 0, f"{command}: {completed.stderr}"


@pytest.mark.slow("an uninstalled chart leaves nothing, and takes over CRDs that kubectl applied")
def test_uninstall_by_the_readme_removes_everything_and_install_adopts_crds_of_kubectl(
    installation: Installation, consumers: Consumers
) -> None:
    delete_all = "kubectl delete consumergroups,rebalancepolicies"
    names = LASTING[:2]
    run_readme_commands(
        installation,
        delete_all,
        "helm uninstall",
        "kubectl delete -f crds/",
        f"kubectl delete namespace {OPERATOR_NAMESPACE}",
    )
    kinds = "customresourcedefinitions,clusterroles,clusterrolebindings,namespaces"
    assert "rota" not in installation.node.kubectl("get", kinds, "-o", "name")
    installation.node.kubectl("apply", "-f", f"{ROOT}/crds/")
    run_readme_commands(installation, "kubectl label -f crds/", "kubectl annotate --overwrite -f crds/")
    installation.ensure_installed()
    managed = "jsonpath={.items[*].metadata.labels.app\\.kubernetes\\.io/managed-by}"
    assert installation.group_kubectl("get", *names, "-o", managed).split() == ["Helm"] * len(names)
    consumers.restart_watches()
    consumers.reset()
