"""The `rota` command line (also `kubectl rota`): each command imports the room it needs, and only that."""

# ruff: noqa: PLC0415 - imports inside commands keep each one quick and small

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from rota.cli.endings import plainly
from rota.cli.show import show, table

OUTPUT = click.option(
    "-o", "--output", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rota-operator", prog_name="rota")
def main() -> None:
    """Manage fleets of message-queue consumers by rebalance policy."""


def on_files(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that describe a group without a cluster; `rota.cli.given` reads them."""
    options = [
        click.option(
            "-f", "--filename", required=True, help="A ConsumerGroup, and perhaps its RebalancePolicy ('-': stdin)."
        ),
        click.option("--policy", help="A policy in the file, instead of the one that the group names."),
        click.option(
            "--members",
            default="3",
            show_default=True,
            help="How many, or their names (beside --foreign: client ids).",
        ),
        click.option("--queues", multiple=True, required=True, help="TOPIC=BROKER:N,BROKER:N; once for each topic."),
        click.option(
            "--rooms", default="", help="The members' rooms, where the policy asks for them: m0=east,m1=west."
        ),
        click.option("--foreign", default="", help="Client ids of consumers in the group that are not Rota's: a,b."),
        click.option(
            "--current", type=Path, help="Present owners: what `rota plan -o json` printed, or an assignment.json."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


@main.command()
@on_files
@click.option("--diff", is_flag=True, help="Print what moves instead of who owns what.")
@OUTPUT
@plainly
def plan(*, diff: bool, output: str, **given: Any) -> None:
    """Show who would own which queue, without a cluster."""
    from rota.cli import given as reading
    from rota.cli import planning

    outlook = planning.outlook(reading.world(given))
    show(outlook, output, lambda: planning.tables(outlook, diff=diff))


@main.command()
@on_files
@click.argument("queue", required=False)
@OUTPUT
@plainly
def explain(*, queue: str | None, output: str, **given: Any) -> None:
    """Say why QUEUE (TOPIC/BROKER/ID) has its owner; without one, why each queue moves that does.

    Where nothing moves, as without --current, there is a line for each member.
    """
    from rota.cli import explaining
    from rota.cli import given as reading

    told = explaining.reasons(reading.world(given), queue)
    show(told, output, lambda: explaining.sentences(told))


@main.command()
@OUTPUT
@plainly
def strategies(output: str) -> None:
    """List the strategies that a policy can choose."""
    from rota.strategies import REFERENCE_NAMES, STRATEGIES

    theirs = {ours: reference for reference, ours in REFERENCE_NAMES.items()}
    known = [
        {"strategy": name, "reference": theirs.get(name, ""), "does": str(strategy.__doc__).partition("\n")[0]}
        for name, strategy in STRATEGIES.items()
    ]
    show(known, output, lambda: table(known))


@main.command()
@click.option("--group", required=True, help="The ConsumerGroup whose members the pods become.")
@click.option("-f", "--filename", required=True, help="Manifests, as many as there are ('-': stdin).")
@click.option("--uninject", is_flag=True, help="Take out again what was put in for the group.")
@click.option("--image", default="", help="The sidecar's image; by default that of this version.")
@click.option(
    "--drain-timeout", default="30s", show_default=True, help="What the group's policy says; pods get 15s more to end."
)
@click.option("--credentials-secret", default="", help="The Secret that the group's credentialsSecret names.")
@click.option("--ca-secret", default="", help="The Secret that the group's tls.caSecret names.")
@plainly
def inject(**given: Any) -> None:
    """Put the group's label and the sidecar into manifests, and print them.

    Deployments, StatefulSets, DaemonSets and Pods are changed; all else is printed as it came.
    """
    from rota.cli import injecting

    injecting.run(given)


@main.command()
@click.option(
    "--namespace",
    "namespaces",
    envvar="ROTA_NAMESPACES",
    multiple=True,
    help="A namespace to look after, again for each; by default all.",
)
@click.option(
    "--own-namespace", envvar="POD_NAMESPACE", default="default", show_default=True, help="Where its Lease is."
)
@click.option("--lease", envvar="ROTA_LEASE", default="rota", show_default=True, help="What its Lease is called.")
@click.option("--identity", envvar="POD_NAME", default="", help="Its name in the Lease; by default that of the host.")
@click.option("--address", envvar="POD_IP", default="127.0.0.1", show_default=True, help="Where it answers.")
@click.option("--port", type=click.IntRange(1, 65535), default=8080, show_default=True, help="The port there.")
@click.option(
    "--journal",
    envvar="ROTA_JOURNAL",
    default="",
    help="A folder for the journal; -: standard output; default: none.",
)
@click.option("--sidecar-image", "image", envvar="ROTA_SIDECAR_IMAGE", default=None, help="Of sidecars in new fleets.")
@click.option("--verbose", is_flag=True, help="Log what is asked, too.")
@plainly
def operator(*, namespaces: tuple[str, ...], verbose: bool, **given: Any) -> None:
    """Run the operator against the cluster of this pod, or of the kubeconfig."""
    import asyncio
    import sys

    from rota import logs
    from rota.kube import run

    logs.begin(verbose=verbose)
    named = run.namespaces(namespaces)
    options = run.Options(namespaces=named, **{key: it for key, it in given.items() if it is not None})
    sys.exit(asyncio.run(run.operate(options)))


@main.command()
@click.option("--group", "filename", required=True, help="A ConsumerGroup, and perhaps its RebalancePolicy.")
@click.option("--policy", help="A policy in the file, instead of the one that the group names.")
@click.option(
    "--broker",
    default="memory",
    show_default=True,
    help="HOST:PORT of a name server; or memory: a broker in this process, to which lines `TOPIC BODY` are sent.",
)
@click.option("--port", type=click.IntRange(1, 65535), default=9911, show_default=True, help="Where it answers.")
@click.option("--app-port", type=click.IntRange(1, 65535), help="The app's port (Pull: the port that the app asks).")
@click.option("--credentials", envvar="ROTA_CREDENTIALS", default="", help="A folder with accessKey and secretKey.")
@click.option("--ca", "authorities", envvar="ROTA_CA", default="", help="A folder with ca.crt.")
@click.option("--verbose", is_flag=True, help="Log what is asked, too.")
@plainly
def sidecar(*, verbose: bool, **given: Any) -> None:
    """Run one member without a cluster, which works every queue of its group's topics, until Ctrl-C."""
    from rota import logs
    from rota.cli import sidecaring

    logs.begin(verbose=verbose)
    sidecaring.run(given)
