"""Ends: of an installation whose groups go on, of a namespace with a group in it, and of all that there is of Rota."""

import os
import subprocess

import pytest

from chart.charts import CHART
from e2e.consumers import NAME, Consumers
from e2e.release import HOME, SECONDS, SHOP, WAIT, Installed
from ground.poll import eventually
from ground.programs import program
from kube.pages import ROOT, typed_commands

pytestmark = pytest.mark.node

LASTING = ("crd/consumergroups.rota.dev", "crd/rebalancepolicies.rota.dev", f"cg/{NAME}", f"deploy/{NAME}")
LEFT = {"configmap/kube-root-ca.crt", "serviceaccount/default", "lease.coordination.k8s.io/rota"}  # the README says so


def ids(installed: Installed) -> list[str]:
    """Return by what those that outlive the release are told from later ones of the same names."""
    return [installed.shop("get", one, "-o", "jsonpath={.metadata.uid}") for one in LASTING]


@pytest.mark.slow("on a node, groups consume on without a release and the next release takes them up")
def test_uninstall_leaves_groups_consuming_and_the_next_release_adopts_them(
    installed: Installed, consumers: Consumers
) -> None:
    before, document = ids(installed), consumers.document()
    with consumers.under_load("uninstalled and installed again"):
        installed.release("uninstall", *WAIT)
        eventually(lambda: installed.left() == LEFT, SECONDS)
        of_cluster = "clusterroles,clusterrolebindings,networkpolicies"
        assert not installed.shop("get", of_cluster, "-A", "-l", "app.kubernetes.io/instance=rota", "-o", "name")
        assert ids(installed) == before
        consumers.goes_on()
        installed.ensure()
        installed.whole()
        consumers.works()
    assert ids(installed) == before
    assert consumers.document() == document


@pytest.mark.slow("on a node, a namespace ends although a group is in it")
def test_namespace_with_a_group_is_deleted(installed: Installed, consumers: Consumers) -> None:
    with consumers.under_load("the namespace deleted, and all of it made again"):
        installed.node.kubectl("delete", "namespace", SHOP, f"--timeout={SECONDS}s")
        installed.ensure()
        consumers.up()


def type_all(installed: Installed, *starts: str) -> None:
    """Type those commands of the chart's page that begin so, in its order."""
    found = [it.command for it in typed_commands(CHART / "README.md") if it.command.startswith(starts)]
    assert len(found) == len(starts), found
    programs = [str(program(name).parent) for name in ("kubectl", "helm")]
    env = {
        **os.environ,
        "PATH": os.pathsep.join([*programs, os.environ["PATH"]]),
        "KUBECONFIG": str(installed.node.kubeconfig),
    }
    for command in found:
        ended = subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, f"{command}: {ended.stderr}"


@pytest.mark.slow("an uninstalled chart leaves nothing, and takes over CRDs that kubectl applied")
def test_uninstall_by_the_readme_removes_everything_and_install_adopts_crds_of_kubectl(
    installed: Installed, consumers: Consumers
) -> None:
    of_all, names = "kubectl delete consumergroups,rebalancepolicies", LASTING[:2]
    type_all(installed, of_all, "helm uninstall", "kubectl delete -f crds/", f"kubectl delete namespace {HOME}")
    of_ours = "customresourcedefinitions,clusterroles,clusterrolebindings,namespaces"
    assert "rota" not in installed.node.kubectl("get", of_ours, "-o", "name")
    installed.node.kubectl("apply", "-f", f"{ROOT}/crds/")
    type_all(installed, "kubectl label -f crds/", "kubectl annotate --overwrite -f crds/")
    installed.ensure()
    managed = "jsonpath={.items[*].metadata.labels.app\\.kubernetes\\.io/managed-by}"
    assert installed.shop("get", *names, "-o", managed).split() == ["Helm"] * len(names)
    consumers.renew()
    consumers.up()
