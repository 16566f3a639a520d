"""The connections that the chart's NetworkPolicies admit, together with other policies, by a model of NetworkPolicy."""

from typing import Any

import pytest

from chart.charts import Helm, Rendered
from chart.network_model import Endpoint, admits
from ground.api import Object

MEMBER = Endpoint("shop", {"rota.dev/group": "orders", "app": "orders"})
ATTACKER = Endpoint("attackers", {"app": "curl"})
NEIGHBOUR = Endpoint("shop", {"app": "web"})
SCRAPER = Endpoint("monitoring", {"app": "prometheus"})
DENY_ALL: Object = {"metadata": {"namespace": "shop"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress"]}}
REPORT_PORT, CONTROL_PORT = MEMBER_PORTS = 9911, 9913
APP_PORT = 8080


def policies(helm: Helm, **network_policy: Any) -> list[Object]:
    return rendered(helm, **network_policy).by_kind["NetworkPolicy"]


def rendered(helm: Helm, **network_policy: Any) -> Rendered:
    return helm.template(networkPolicy={"enabled": True, "memberNamespaces": ["shop"], **network_policy})


def operator_pod(helm: Helm) -> Endpoint:
    template = rendered(helm).pod
    ports = {port["name"]: port["containerPort"] for port in template["spec"]["containers"][0]["ports"]}
    return Endpoint("rota-system", template["metadata"]["labels"], ports)


@pytest.mark.parametrize("port", MEMBER_PORTS)
def test_network_policy_lets_only_the_operator_reach_members(helm: Helm, port: int) -> None:
    closed = policies(helm)
    assert admits(closed, operator_pod(helm), MEMBER, port)
    for source in (ATTACKER, NEIGHBOUR, SCRAPER, Endpoint("", address="10.0.0.1")):
        assert not admits(closed, source, MEMBER, port)
    impostor = operator_pod(helm)._replace(namespace="attackers")
    assert not admits(closed, impostor, MEMBER, port), "the labels of the operator are no secret"


def test_network_policy_lets_scrapers_of_members_reach_only_their_metrics(helm: Helm) -> None:
    scraped = policies(helm, scrapeMembersFrom=["monitoring"])
    assert admits(scraped, SCRAPER, MEMBER, REPORT_PORT)
    assert not admits(scraped, SCRAPER, MEMBER, CONTROL_PORT)


@pytest.mark.parametrize("protocol", ["TCP", "UDP", "SCTP"])
@pytest.mark.parametrize("port", [1, APP_PORT, 9910, 9912, 9914, 65535])
def test_network_policy_opens_no_port_that_another_policy_closes(helm: Helm, port: int, protocol: str) -> None:
    assert not admits([DENY_ALL, *policies(helm)], ATTACKER, MEMBER, port, protocol)
    opened = policies(helm, openOtherPorts=True)
    assert admits([DENY_ALL, *opened], ATTACKER, MEMBER, port, protocol)
    for member_port in MEMBER_PORTS:
        assert not admits([DENY_ALL, *opened], ATTACKER, MEMBER, member_port)


def test_network_policy_keeps_what_other_policies_open(helm: Helm) -> None:
    other_policy = {
        "metadata": {"namespace": "shop"},
        "spec": {
            "podSelector": {"matchLabels": {"app": "orders"}},
            "ingress": [{"ports": [{"port": APP_PORT}], "from": [{"podSelector": {"matchLabels": {"app": "web"}}}]}],
        },
    }
    both = [other_policy, *policies(helm)]
    assert admits(both, NEIGHBOUR, MEMBER, APP_PORT)
    assert not admits(both, ATTACKER, MEMBER, APP_PORT)


def test_network_policy_leaves_pods_without_a_sidecar_alone(helm: Helm) -> None:
    assert admits(policies(helm), ATTACKER, NEIGHBOUR, APP_PORT)


def test_network_policy_lets_operators_helm_test_and_scrapers_reach_the_operator(helm: Helm) -> None:
    closed = policies(helm, scrapeFrom=["monitoring"])
    operator = operator_pod(helm)
    test_pod = Endpoint("rota-system", rendered(helm)["Pod"]["metadata"]["labels"])
    for source in (operator, test_pod, SCRAPER):
        assert admits(closed, source, operator, 8080)
    for source in (ATTACKER, MEMBER, Endpoint("rota-system", {"app": "other"})):
        assert not admits(closed, source, operator, 8080)


def test_network_policy_lets_peers_of_read_from_reach_only_the_operator(helm: Helm) -> None:
    nodes = {"ipBlock": {"cidr": "10.0.0.0/24", "except": ["10.0.0.128/25"]}}
    people = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ingress"}}, "podSelector": {}}
    closed = policies(helm, readFrom=[nodes, people])
    for source, is_admitted in (
        (Endpoint("", address="10.0.0.1"), True),
        (Endpoint("", address="10.0.0.200"), False),
        (Endpoint("", address="10.0.1.1"), False),
        (Endpoint("ingress", {"app": "nginx"}), True),
    ):
        assert admits(closed, source, operator_pod(helm), 8080) is is_admitted
        assert not admits(closed, source, MEMBER, CONTROL_PORT)


def test_network_policy_protects_members_in_watched_namespaces(helm: Helm) -> None:
    rendering = helm.template(watchNamespaces=["shop", "billing"], networkPolicy={"enabled": True})
    for namespace in ("shop", "billing"):
        member = MEMBER._replace(namespace=namespace)
        assert not admits(rendering.by_kind["NetworkPolicy"], ATTACKER, member, CONTROL_PORT)
    assert admits(rendering.by_kind["NetworkPolicy"], ATTACKER, MEMBER._replace(namespace="other"), CONTROL_PORT)


def test_network_policy_for_egress_opens_the_port_of_the_bucket_only_if_asked(helm: Helm) -> None:
    assert all(policy["spec"]["policyTypes"] == ["Ingress"] for policy in policies(helm))
    (egress,) = (policy for policy in policies(helm, bucketPort=443) if policy["spec"]["policyTypes"] == ["Egress"])
    assert egress["metadata"]["name"] == "rota-bucket"
    assert egress["spec"]["podSelector"]["matchLabels"].items() <= operator_pod(helm).labels.items()
    ports = [(port.get("protocol", "TCP"), port["port"]) for port in egress["spec"]["egress"][0]["ports"]]
    assert ports == [("TCP", 443), ("TCP", 53), ("UDP", 53)]
