"""The agent as a process of its own."""

import argparse
import asyncio
import shlex
from pathlib import Path

import aiohttp

from ground.api import Api
from ground.local.agent import Addresses, serve
from ground.local.containers import Site


def main() -> None:
    """Read the command line and act as the node until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m ground.local", description="runs a node's pods as plain processes")
    parser.add_argument("--kubeconfig", type=Path, required=True)
    parser.add_argument("--node", default="local", help="name of the node to be")
    parser.add_argument(
        "--folder", type=lambda text: Path(text).absolute(), required=True, help="where pods' files and logs go"
    )
    parser.add_argument("--block", required=True, help="first two numbers of the pods' addresses: 127.37")
    parser.add_argument("--addresses", type=Path, help="where the last one used is noted (default: in the folder)")
    parser.add_argument("--label", default="local", help="value of the node's label rota.dev/ground")
    parser.add_argument(
        "--guarded", action="store_true", help="taint the node, for pods that tolerate it by that label"
    )
    parser.add_argument(
        "--image",
        action="append",
        default=[],
        metavar="NAME=COMMAND",
        help="what to run for an image, known by its name without registry, folders and tag",
    )
    parser.add_argument(
        "--variable",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an environment variable of all containers",
    )
    parser.add_argument("--sync-seconds", type=float, default=60, help="least time between refreshes of volumes")
    parser.add_argument("--backoff-seconds", type=float, default=10, help="delay before the second restart; it doubles")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    asyncio.run(_run(options))


async def _run(options: argparse.Namespace) -> None:
    images = dict(image.split("=", 1) for image in options.image)
    closing = aiohttp.TCPConnector(ssl=False, force_close=True, limit=0)  # as the kubelet's probes
    async with Api.connect(options.kubeconfig) as api, aiohttp.ClientSession(connector=closing) as web:
        site = Site(
            api=api,
            web=web,
            node=options.node,
            address=f"{options.block}.0.1",
            folder=options.folder,
            images={name: shlex.split(command) for name, command in images.items()},
            added_variables=dict(variable.split("=", 1) for variable in options.variable),
            sync_seconds=options.sync_seconds,
            backoff_seconds=options.backoff_seconds,
            label=options.label,
            guarded=options.guarded,
        )
        await serve(site, Addresses(options.addresses or options.folder / "addresses", options.block))


if __name__ == "__main__":
    main()
