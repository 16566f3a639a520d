"""What an operator is started with, and what is wrong with that."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

from rota.brokers.rocketmq.transport.address_policy import read_networks
from rota.documents import SCHEMA
from rota.kube.client.login.kubeconfig import LoginOptions
from rota.kube.http.operator_probes import PORT, PROBE_PORT
from rota.kube.state.queue_quota import MAX_QUEUES
from rota.kube.telemetry.journal.journal_writer import LIMIT
from rota.model import plain
from rota.spec.names import is_dns_label, is_dns_subdomain

VERSION = version("rota-operator")


@dataclass(frozen=True, kw_only=True)
class Options:
    """What an operator is started with."""

    namespaces: Sequence[str] = ()  # that it looks after; none: all
    own_namespace: str = "default"  # where its Lease is
    lease: str = "rota"  # and what it is called: operators who share it take turns
    identity: str = ""
    pod_uid: str = ""  # of the pod that it runs in, whose name is its identity; outside a pod empty
    address: str = "127.0.0.1"  # where it answers
    port: int = PORT
    probe_port: int = PROBE_PORT
    page_auth: str = "None"  # who may read it: everybody, or with "Kubernetes" users of the cluster
    page_tls: str = ""  # the folder of its certificate, where users of the cluster read it
    journal: str = ""
    journal_limit: str = LIMIT  # how much its folder may hold
    queue_metrics: bool = True  # whether each queue has series of its own
    broker_networks: Sequence[str] = ()  # that name servers and brokers are in; none: they are not checked
    max_queues: int = MAX_QUEUES  # of all groups together
    document_schema: int = SCHEMA  # the highest in which assignments are written
    fleets: bool = True  # whether it manages the Deployments of groups with a template
    image: str = ""  # of sidecars
    login: LoginOptions = field(default_factory=LoginOptions)  # with which account it asks the API server


def namespaces(texts: Sequence[str]) -> list[str]:
    """Read names, each alone or several with commas between them."""
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    for name in names:
        if not is_dns_label(name):
            raise ValueError(f"--namespace {plain(name, 100)!r} is no name; give one that kubectl get namespaces shows")
    return names


def check(options: Options) -> None:
    """Refuse names that nothing can have: what uses them would only fail, again and again."""
    if not is_dns_label(options.own_namespace):
        told = f"--own-namespace {plain(options.own_namespace, 100)!r} is no name"
        raise ValueError(f"{told}; give one that kubectl get namespaces shows")
    if not is_dns_subdomain(options.lease):
        told = f"--lease {plain(options.lease, 100)!r} is no name"
        raise ValueError(f"{told} that an object can have; give lower-case letters, digits and -, such as rota")
    if options.identity and not re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9_.]{,239}", options.identity):
        told = f"--identity {plain(options.identity, 100)!r} is no name"
        raise ValueError(f"{told}; files of the journal have it, too: give 240 letters, digits, -, _ and . at most")
    if options.page_tls and options.page_auth == "None":
        raise ValueError("--page-tls is for --page-auth Kubernetes; give both or none of them")
    read_networks(options.broker_networks)
