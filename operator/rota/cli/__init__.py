"""Command line `rota` (also `kubectl rota`): each command imports only the package that it needs."""

# ruff: noqa: PLC0415 - imports inside commands keep each one quick and small

from collections.abc import Collection
from functools import partial
from typing import Any

import click

from rota.cli.commands.pipeline.command_runner import translate_errors
from rota.cli.commands.pipeline.commands import pipeline, snapshot_options
from rota.cli.console.errors import CommandGroup, report_user_errors
from rota.cli.console.output import print_table, print_value
from rota.cli.options import (
    CONTEXT_OPTION,
    KUBECONFIG_OPTION,
    LOGIN_NAMES,
    OUTPUT_OPTION,
    PORT,
    WIDE_OUTPUT_OPTION,
    cluster_options,
    default_option,
    group_file_options,
    log_options,
    operator_options,
    take_login,
    take_target,
)


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rota-operator", prog_name="rota")
def main() -> None:
    """Manage fleets of message-queue consumers by rebalance policy."""


main.add_command(pipeline)


@main.command()
@group_file_options
@click.option("--diff", is_flag=True, help="Print the moves instead of the owners.")
@OUTPUT_OPTION
@report_user_errors
def plan(*, diff: bool, output: str, **options: Any) -> None:
    """Show which member would own which queue, without a cluster."""
    from rota.cli.commands import plan
    from rota.cli.console.inputs import read_group_inputs

    preview = plan.preview_plan(read_group_inputs(options))
    print_value(preview, output, lambda: plan.print_preview(preview, diff=diff))


@main.command()
@partial(group_file_options, required=False)
@operator_options
@click.argument("group", required=False)
@click.argument("queue", required=False)
@OUTPUT_OPTION
@report_user_errors
def explain(*, group: str | None, queue: str | None, output: str, **options: Any) -> None:
    """Explain why QUEUE (TOPIC/BROKER/ID) has its owner.

    For a live GROUP without a QUEUE: an example for each member, and the result of the last rebalance. With -f, for a
    group in a file: why each queue moves. If none moves (without --current, none does): an example for each member.
    """
    files = ["filename", "policy", "members", "queues", "name_server", "rooms", "foreign", "current"]
    live = ["operator", "operator_namespace", "lease", "watch", "namespace", *LOGIN_NAMES]
    target, scope = take_target(options)
    if options["filename"] is None:
        _reject_options(files, "describes a group in a file; add -f, or remove this option")
        if group is None:
            raise ValueError("No group is named; give a GROUP, or -f with a file")
        from rota.cli.client import watch
        from rota.cli.commands import status

        request = status.explain_request(group, queue, scope)
        watch.print_response(request, target, output=output, watch=options["watch"])
        return
    _reject_options(live, "is for a live group; remove this option, or remove -f")
    # With -f, the group is in the file, and the only argument is the queue; click has stored it as `group`.
    if queue is not None:
        raise ValueError(f"With -f the group is in the file; remove {group!r}, or remove -f")
    from rota.cli.commands import explain
    from rota.cli.console.inputs import read_group_inputs

    queue = group
    explanation = explain.explain_owners(read_group_inputs(options), queue)
    print_value(explanation, output, lambda: explain.print_reasons(explanation))


def _reject_options(names: Collection[str], reason: str) -> None:
    """Raise ValueError for options that were typed but would have no effect."""
    context = click.get_current_context()
    for parameter in context.command.params:
        is_typed = context.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
        if parameter.name in names and is_typed:
            raise ValueError(f"{parameter.opts[-1]} {reason}")


@main.command()
@operator_options
@click.argument("group", required=False)
@click.option("-A", "--all-namespaces", "everywhere", is_flag=True, help="Groups of all namespaces.")
@WIDE_OUTPUT_OPTION
@report_user_errors
def status(*, group: str | None, everywhere: bool, output: str, **options: Any) -> None:
    """Show the status of a namespace's groups, or the details of one GROUP."""
    from rota.cli.client import watch
    from rota.cli.commands import status

    target, scope = take_target(options)
    request = status.status_request(group, scope, everywhere=everywhere, wide=output == "wide")
    watch.print_response(request, target, output=output, watch=options["watch"])


@main.command()
@default_option("--port", type=PORT, default=8080, help="The port on 127.0.0.1.")
@cluster_options
@report_user_errors
def page(*, port: int, **options: Any) -> None:
    """Serve the operator's page on this machine, with the groups that you have permission to see."""
    from rota.cli.client.watch import Target
    from rota.cli.commands import page

    login = take_login(options)
    target = Target(
        operator=None, operator_namespace=options["operator_namespace"], lease=options["lease"], login=login
    )
    page.serve(target, port)


@main.command()
@operator_options
@click.argument("group")
@WIDE_OUTPUT_OPTION
@report_user_errors
def members(*, group: str, output: str, **options: Any) -> None:
    """List the members of GROUP and their problems; `-o wide` adds what their queues wait for."""
    from rota.cli.client import watch
    from rota.cli.commands import status

    target, scope = take_target(options)
    request = status.members_request(group, scope, wide=output == "wide")
    watch.print_response(request, target, output=output, watch=options["watch"])


@main.command()
@operator_options
@click.argument("group")
@default_option("--by", type=click.Choice(["queue", "lag"]), default="queue", help="Sort order.")
@click.option("--top", type=click.IntRange(min=1), help="Show only the first N queues of each kind of topic.")
@OUTPUT_OPTION
@report_user_errors
def lag(*, group: str, by: str, top: int | None, output: str, **options: Any) -> None:
    """Show the lag of each queue of GROUP."""
    from rota.cli.client import watch
    from rota.cli.commands import status

    target, scope = take_target(options)
    request = status.lag_request(group, scope, by, top)
    watch.print_response(request, target, output=output, watch=options["watch"])


@main.command()
@click.argument("group")
@click.option("--lake", required=True, help="The lake of `rota pipeline`: a folder or URI.")
@click.option("--hours", type=click.IntRange(1, 1_000_000), help="The last N hours of the rollups; default: 24.")
@click.option("--days", type=click.IntRange(1, 36_600), help="The last N times 24 hours of the rollups.")
@snapshot_options
@OUTPUT_OPTION
@report_user_errors
def history(*, group: str, lake: str, output: str, **options: Any) -> None:
    """Show the hourly rollups of a group from a lake.

    GROUP is NAMESPACE/NAME. Neither Spark nor Java is needed.
    """
    if options["hours"] and options["days"]:
        raise ValueError("--hours and --days exclude each other; give one of them")
    with translate_errors("pip install 'rota-operator[history]'"):
        from rota.cli.commands import history

        hours = options["hours"] or 24 * (options["days"] or 1)
        history.show_history(group, lake, hours, output, number=options["snapshot"], as_of=options["as_of"])


@main.command()
@OUTPUT_OPTION
@report_user_errors
def strategies(output: str) -> None:
    """List the strategies that a policy can choose."""
    from rota.strategies import REFERENCE_NAMES, STRATEGIES

    reference_names = {ours: reference for reference, ours in REFERENCE_NAMES.items()}
    rows: list[dict[str, str]] = []
    for name, strategy in STRATEGIES.items():
        summary = str(strategy.__doc__).partition("\n")[0]
        rows.append({"strategy": name, "reference": reference_names.get(name, ""), "does": summary})
    print_value(rows, output, lambda: print_table(rows))


@main.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@report_user_errors
def completion(shell: str) -> None:
    """Print the completion script for SHELL."""
    from click.shell_completion import BashComplete, FishComplete, ZshComplete

    complete = {"bash": BashComplete, "zsh": ZshComplete, "fish": FishComplete}[shell]
    click.echo(complete(main, {}, "rota", "_ROTA_COMPLETE").source())


@main.command()
@click.option("--group", required=True, help="The ConsumerGroup whose members the pods become.")
@click.option("-f", "--filename", required=True, help="A file with one or more manifests ('-': stdin).")
@click.option("--uninject", is_flag=True, help="Remove the group's label and sidecar instead.")
@click.option("--image", default="", help="The sidecar's image; by default that of this version.")
@default_option("--drain-timeout", default="30s", help="drainTimeout of the policy; pods get 15s more to end.")
@click.option("--credentials-secret", default="", help="The Secret that the group's credentialsSecret names.")
@click.option("--ca-secret", default="", help="The Secret that the group's tls.caSecret names.")
@click.option("--client-secret", default="", help="The Secret that the group's tls.clientSecret names.")
@report_user_errors
def inject(**options: Any) -> None:
    """Add the group's label and the sidecar to manifests.

    Prints all manifests; only Deployments, StatefulSets, DaemonSets and Pods are changed.
    """
    from rota.cli.commands import inject

    inject.run(options)


@main.command()
@click.option(
    "--namespace",
    "namespaces",
    envvar="ROTA_NAMESPACES",
    multiple=True,
    help="A namespace to watch; repeatable. Default: all namespaces.",
)
@default_option("--own-namespace", envvar="POD_NAMESPACE", default="default", help="Namespace of the Lease.")
@default_option("--lease", envvar="ROTA_LEASE", default="rota", help="Name of the operator's Lease.")
@click.option(
    "--identity", envvar="POD_NAME", default="", help="Identity in the Lease; default: host name and process id."
)
@click.option(
    "--pod-uid", envvar="POD_UID", default="", help="Uid of the pod, by which other replicas detect that it is gone."
)
@default_option("--address", envvar="POD_IP", default="127.0.0.1", help="Address to listen on.")
@default_option("--port", type=PORT, default=8080, help="Port to listen on.")
@default_option(
    "--probe-port", type=PORT, default=8081, help="Port for the kubelet's probes; serves only /healthz and /readyz."
)
@default_option(
    "--page-auth",
    envvar="ROTA_PAGE_AUTH",
    type=click.Choice(["None", "Kubernetes"]),
    default="None",
    help="Access to the page and metrics: unauthenticated, or users of the cluster by their permissions, over TLS.",
)
@click.option(
    "--page-tls",
    envvar="ROTA_PAGE_TLS",
    default="",
    help="With --page-auth Kubernetes: a folder with tls.crt and tls.key (default: a self-signed certificate).",
)
@click.option(
    "--journal",
    envvar="ROTA_JOURNAL",
    default="",
    help="A folder or URI for the journal, such as s3://BUCKET/PREFIX; -: standard output; default: none.",
)
@default_option(
    "--journal-limit",
    envvar="ROTA_JOURNAL_LIMIT",
    default="8Gi",
    help="Maximum size of the folder; with a URI, of the records that wait for the bucket.",
)
@click.option(
    "--journal-spool",
    envvar="ROTA_JOURNAL_SPOOL",
    default="",
    help="A folder for records that are not stored yet (default: in the journal's folder, or a temporary one).",
)
@default_option(
    "--queue-metrics/--no-queue-metrics",
    envvar="ROTA_QUEUE_METRICS",
    default=True,
    help="Export metrics for each queue.",
)
@click.option(
    "--broker-networks",
    envvar="ROTA_BROKER_NETWORKS",
    multiple=True,
    help="CIDR of allowed broker addresses, such as 10.0.0.0/8; repeatable. Default: no check.",
)
@click.option(
    "--max-queues",
    envvar="ROTA_MAX_QUEUES",
    type=click.IntRange(min=1),
    help="Maximum number of queues of all groups together (default: 300000).",
)
@default_option(
    "--document-schema",
    envvar="ROTA_DOCUMENT_SCHEMA",
    type=click.IntRange(1, 2),
    default=2,
    help="Highest schema of written assignments; use 1 before a downgrade to a version that cannot read 2.",
)
@default_option(
    "--fleets/--no-fleets", envvar="ROTA_FLEETS", default=True, help="Manage the Deployments of groups with a template."
)
@click.option("--sidecar-image", "image", envvar="ROTA_SIDECAR_IMAGE", help="Sidecar image in created Deployments.")
@KUBECONFIG_OPTION
@CONTEXT_OPTION
@log_options
@report_user_errors
def operator(*, namespaces: tuple[str, ...], log_level: str, log_format: str, **values: Any) -> None:
    """Run the operator, in a pod or against a kubeconfig."""
    import sys

    from rota import logs
    from rota.kube import operator, options
    from rota.kube.client.login.kubeconfig import LoginOptions

    logs.configure(log_level, log_format)
    watched_namespaces = options.parse_namespaces(namespaces)
    login = LoginOptions(kubeconfig=values.pop("kubeconfig"), context=values.pop("context"))
    chosen = {key: value for key, value in values.items() if value is not None}  # `Options` has the other defaults
    sys.exit(operator.run_process(options.Options(namespaces=watched_namespaces, login=login, **chosen)))


@main.command()
@click.option("--group", "filename", required=True, help="A file with a ConsumerGroup and maybe its RebalancePolicy.")
@click.option("--policy", help="Name of the policy in the file to use instead of spec.policyRef.")
@default_option(
    "--broker",
    default="memory",
    help="HOST:PORT of a name server; or memory: a broker in this process, which receives input lines `TOPIC BODY`.",
)
@default_option("--port", type=PORT, default=9911, help="Port to listen on.")
@click.option("--app-port", type=PORT, help="The app's port (Pull: the port that the app calls).")
@click.option("--credentials", envvar="ROTA_CREDENTIALS", default="", help="A folder with accessKey and secretKey.")
@click.option("--ca", "authorities", envvar="ROTA_CA", default="", help="A folder with ca.crt.")
@click.option(
    "--client-certificate", "client", envvar="ROTA_CLIENT", default="", help="A folder with tls.crt and tls.key."
)
@log_options
@report_user_errors
def sidecar(*, log_level: str, log_format: str, **options: Any) -> None:
    """Run one member without a cluster, until Ctrl-C.

    The member consumes every queue of the group's topics. At a real broker, use a group without other consumers;
    otherwise both consume the same queues, and messages are consumed twice.
    """
    from rota import logs
    from rota.cli.commands import sidecar

    logs.configure(log_level, log_format)
    sidecar.run(options)
