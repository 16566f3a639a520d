"""Options of the operator process, and their validation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

from rota.brokers.rocketmq.transport.address_policy import read_networks
from rota.documents import ASSIGNMENT_SCHEMA
from rota.kube.client.login.kubeconfig import LoginOptions
from rota.kube.http.operator_probes import PORT, PROBE_PORT
from rota.kube.state.queue_quota import MAX_QUEUES
from rota.kube.telemetry.journal.journal_writer import DEFAULT_LIMIT
from rota.model import single_line
from rota.spec.names import is_dns_label, is_dns_subdomain

VERSION = version("rota-operator")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the operator process."""

    namespaces: Sequence[str] = ()  # namespaces to manage; empty: all
    own_namespace: str = "default"  # namespace of the operator's Lease
    lease: str = "rota"  # name of that Lease; operators with the same Lease elect one leader
    identity: str = ""  # in the Lease and the journal's file names; empty: host name and process id
    pod_uid: str = ""  # of the operator's pod, which `identity` names; empty outside a pod
    address: str = "127.0.0.1"  # address to listen on
    port: int = PORT
    probe_port: int = PROBE_PORT
    page_auth: str = "None"  # "None": everyone may read the page; "Kubernetes": users of the cluster
    page_tls: str = ""  # directory of the page's certificate, with page_auth "Kubernetes"; empty: a self-signed one
    journal: str = ""  # directory or URI; -: standard output; empty: no journal
    journal_limit: str = DEFAULT_LIMIT  # maximum size of the journal's directory, or of the spool for a URI
    journal_spool: str = ""  # directory for segments of the journal until they are stored; empty: the default
    queue_metrics: bool = True  # whether metrics have a series per queue
    broker_networks: Sequence[str] = ()  # networks allowed for name servers and brokers; empty: no check
    max_queues: int = MAX_QUEUES  # limit for all groups together
    document_schema: int = ASSIGNMENT_SCHEMA  # the highest schema version in which assignments are written
    fleets: bool = True  # whether the operator manages the Deployments of groups with a template
    image: str = ""  # image of injected sidecars; empty: that of this version
    login: LoginOptions = field(default_factory=LoginOptions)  # account for the API server


def parse_namespaces(texts: Sequence[str]) -> list[str]:
    """Parse texts that hold one or several comma-separated names. Raise ValueError for an invalid name."""
    names = list(filter(None, map(str.strip, ",".join(texts).split(","))))
    for name in names:
        _check_namespace("--namespace", name)
    return names


def _check_namespace(option: str, name: str) -> None:
    if not is_dns_label(name):
        mistake = f"{option} {single_line(name, 100)!r} is not a valid namespace name"
        raise ValueError(f"{mistake}; kubectl get namespaces lists them")


def check_options(options: Options) -> None:
    """Raise ValueError for invalid options; otherwise each use of them would fail at run time."""
    _check_namespace("--own-namespace", options.own_namespace)
    if not is_dns_subdomain(options.lease):
        mistake = f"--lease {single_line(options.lease, 100)!r} is not a valid object name"
        raise ValueError(f"{mistake}; use lower-case letters, digits and -, such as rota")
    if options.identity and not re.fullmatch(r"[A-Za-z0-9][-A-Za-z0-9_.]{,239}", options.identity):
        mistake = f"--identity {single_line(options.identity, 100)!r} is not valid"
        raise ValueError(f"{mistake}; it is part of journal file names: use up to 240 letters, digits, -, _ and .")
    if options.page_tls and options.page_auth == "None":
        raise ValueError("--page-tls needs --page-auth Kubernetes; give that as well, or remove --page-tls")
    read_networks(options.broker_networks)  # raises ValueError for an invalid one
