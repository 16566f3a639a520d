"""The `rota` command line (also `kubectl rota`): each command imports the room it needs, and only that."""

import click


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rota-operator", prog_name="rota")
def main() -> None:
    """Manage fleets of message-queue consumers by rebalance policy."""
