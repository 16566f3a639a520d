"""Options that several `rota` commands share, and their conversion into values."""

# ruff: noqa: PLC0415 - imports inside functions keep each command quick and small

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rota.logs import FORMATS, LEVELS

if TYPE_CHECKING:
    from rota.cli.client.names import Scope
    from rota.cli.client.watch import Target
    from rota.kube.client.login.kubeconfig import LoginOptions

Command = Callable[..., None]
PORT = click.IntRange(1, 65535)

default_option = partial(click.option, show_default=True)  # an option whose help ends with its default

OUTPUT_OPTION = default_option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table")
WIDE_OUTPUT_OPTION = default_option(
    "-o", "--output", type=click.Choice(["table", "wide", "name", "json", "yaml"]), default="table"
)
KUBECONFIG_OPTION = click.option("--kubeconfig", help="The kubeconfig; by default KUBECONFIG or ~/.kube/config.")
CONTEXT_OPTION = click.option("--context", help="The context of the kubeconfig; by default the current one.")
LOGIN_NAMES = ("kubeconfig", "context", "impersonate", "impersonate_groups")  # fields of LoginOptions; see `take_login`


def log_options(command: Command) -> Command:
    """Add the logging options of a long-running command."""
    return _add_options(
        command,
        default_option(
            "--log-level",
            envvar="ROTA_LOG_LEVEL",
            type=click.Choice(LEVELS),
            default="info",
            help="Log level; debug also logs requests to members and brokers.",
        ),
        default_option(
            "--log-format",
            envvar="ROTA_LOG_FORMAT",
            type=click.Choice(FORMATS),
            default="json",
            help="Log format; text is for terminals.",
        ),
    )


LEASE_OPTIONS = (
    default_option(
        "--operator-namespace",
        envvar="ROTA_OPERATOR_NAMESPACE",
        default="rota-system",
        help="Namespace of the operator's Lease; not used with --operator.",
    ),
    default_option("--lease", envvar="ROTA_LEASE", default="rota", help="Name of the Lease."),
)
IMPERSONATION_OPTIONS = (
    click.option("--as", "impersonate", default="", help="Username to impersonate."),
    click.option("--as-group", "impersonate_groups", multiple=True, help="Group to impersonate; repeatable."),
)


def group_file_options(command: Command, *, required: bool = True) -> Command:
    """Add the options that describe a group without a cluster; `rota.cli.console.inputs` reads them."""
    return _add_options(
        command,
        click.option(
            "-f", "--filename", required=required, help="A ConsumerGroup, and maybe its RebalancePolicy ('-': stdin)."
        ),
        click.option("--policy", help="Name of the policy in the file to use instead of spec.policyRef."),
        default_option(
            "--members", default="3", help="Number of members, or their names: a,b (with --foreign: client ids)."
        ),
        click.option("--queues", multiple=True, help="Queues of a topic: TOPIC=BROKER:N,BROKER:N; repeatable."),
        click.option("--name-server", help="Name server to read the existing queues from: host:9876."),
        click.option(
            "--rooms", default="", help="Machine rooms of the members, if the policy needs them: m0=east,m1=west."
        ),
        click.option("--foreign", default="", help="Client ids of unmanaged consumers in the group: a,b."),
        click.option(
            "--current", type=Path, help="Present owners: an output of `rota plan -o json`, or an assignment.json."
        ),
    )


def operator_options(command: Command) -> Command:
    """Add the options that name a group and its operator; `take_target` reads all of them but `--watch`."""
    return _add_options(
        command,
        click.option("-n", "--namespace", help="Namespace of the group; default: that of the kubeconfig's context."),
        click.option("--operator", envvar="ROTA_OPERATOR", help="The operator's address, http://127.0.0.1:8080."),
        *LEASE_OPTIONS,
        click.option("-w", "--watch", is_flag=True, help="Print every change until Ctrl-C."),
        KUBECONFIG_OPTION,
        CONTEXT_OPTION,
        *IMPERSONATION_OPTIONS,
    )


def cluster_options(command: Command) -> Command:
    """Add the options that name an operator in a cluster and the user's account."""
    return _add_options(command, *LEASE_OPTIONS, KUBECONFIG_OPTION, CONTEXT_OPTION, *IMPERSONATION_OPTIONS)


def take_login(options: dict[str, Any]) -> "LoginOptions":
    """Remove the options of the user's account from `options`, and return them as LoginOptions."""
    from rota.kube.client.login.kubeconfig import LoginOptions

    account: dict[str, Any] = {}
    for name in LOGIN_NAMES:
        if name in options:
            account[name] = options.pop(name)
    return LoginOptions(prefers_kubeconfig=True, **account)


def take_target(options: dict[str, Any]) -> "tuple[Target, Scope]":
    """Remove the options that `operator_options` added, except `watch`, and return them as values."""
    from rota.cli.client.names import Scope
    from rota.cli.client.watch import Target

    login = take_login(options)
    target = Target(options.pop("operator"), options.pop("operator_namespace"), options.pop("lease"), login)
    return target, Scope(options.pop("namespace"), login)


def _add_options(command: Command, *options: Callable[[Command], Command]) -> Command:
    for option in reversed(options):
        command = option(command)
    return command
