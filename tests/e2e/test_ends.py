"""Ends: of an installation whose groups go on, and of a namespace with a group in it."""

import pytest

from e2e.consumers import NAME, Consumers
from e2e.release import SECONDS, SHOP, WAIT, Installed
from ground.poll import eventually

pytestmark = pytest.mark.node

LASTING = ("crd/consumergroups.rota.dev", "crd/rebalancepolicies.rota.dev", f"cg/{NAME}", f"deploy/{NAME}")
LEFT = {"configmap/kube-root-ca.crt", "serviceaccount/default", "lease.coordination.k8s.io/rota"}  # the README says so


def ids(installed: Installed) -> list[str]:
    """Return by what those that outlive the release are told from later ones of the same names."""
    return [installed.shop("get", one, "-o", "jsonpath={.metadata.uid}") for one in LASTING]


def test_groups_go_on_without_the_release_and_are_taken_up_by_the_next(
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


def test_a_namespace_ends_with_the_group_in_it(installed: Installed, consumers: Consumers) -> None:
    with consumers.under_load("the namespace deleted, and all of it made again"):
        installed.node.kubectl("delete", "namespace", SHOP, f"--timeout={SECONDS}s")
        installed.ensure()
        consumers.up()
