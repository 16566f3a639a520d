"""The command line before strangers: what they answer, and what was typed, harms neither terminal nor memory."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer
from click.testing import CliRunner, Result

from logins import a_kubeconfig
from rota.cli import main
from rota.cli.client import http
from rota.cli.console.errors import MAX_MESSAGE_CHARACTERS

ESCAPES = "\x1b]0;owned\x07\u009b31m\u202egnp"
A_GROUP = {"namespace": "shop", "name": "orders", "ready": True, "reason": "Settled", "message": "", "moving": False}
FIGURES = {"members": 1, "queues": 4, "idle": 0, "unowned": 0, "generation": 7}


def groups(**given: Any) -> dict[str, Any]:
    """Return an answer with one group."""
    operator = {"identity": "rota-0", "version": "0.1.0", "leads": True}
    return {"operator": operator, "groups": [{**A_GROUP, **FIGURES, "strategy": "Sticky", **given}]}


@asynccontextmanager
async def serving(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server:
        yield str(server.make_url("/")).rstrip("/")


@asynccontextmanager
async def saying(said: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> AsyncIterator[str]:
    body = said if isinstance(said, bytes) else json.dumps(said).encode()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers=headers)

    async with serving(answer) as url:
        yield url


@pytest.fixture(autouse=True)
def nobodys_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no kubeconfig."""
    for name in ("KUBECONFIG", "ROTA_OPERATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


async def rota(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, arguments, prog_name="rota")


async def refused(*arguments: str) -> str:
    """Return the one sentence with which a command refuses what was typed, or answered."""
    shown = await rota(*arguments)
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert shown.stderr.startswith("rota: ")
    assert shown.stderr.count("\n") == 1
    assert shown.stderr[:-1].isprintable()
    return shown.stderr.removeprefix("rota: ")[:-1]


# What reaches the terminal.


@pytest.mark.parametrize("queue", ["\x1b[31mx/b/one", "\u202e/b/x", "\u009b31m"])
async def test_cli_error_quotes_arguments_without_control_characters(queue: str) -> None:
    assert "Invalid queue" in await refused("explain", "orders", queue, "--operator", "http://127.0.0.1:9")


async def test_cli_error_relays_a_response_without_control_characters() -> None:
    async with saying({"error": f"no{ESCAPES}"}, 400) as url:
        assert (await refused("status", "--operator", url)).startswith("no\N{REPLACEMENT CHARACTER}]0;owned")


@pytest.mark.parametrize("output", ["json", "yaml"])
async def test_cli_json_and_yaml_escape_control_characters_without_loss(output: str) -> None:
    name = f"o\x7f\u00fc\u00a0\U000e0001{ESCAPES}"
    async with saying(groups(name=name)) as url:
        shown = (await rota("status", "-A", "-o", output, "--operator", url)).stdout
    assert shown.replace("\n", "").isprintable()
    read = json.loads(shown) if output == "json" else yaml.safe_load(shown)
    assert read["groups"][0]["name"] == name


async def test_cli_json_and_yaml_keep_printable_unicode() -> None:
    async with saying(groups(message="für Größe")) as url:
        assert "für Größe" in (await rota("status", "-A", "-o", "json", "--operator", url)).stdout
        assert "für Größe" in (await rota("status", "-A", "-o", "yaml", "--operator", url)).stdout


async def test_cli_table_has_no_trailing_spaces_or_blank_lines() -> None:
    async with saying(groups()) as url:
        lines = (await rota("status", "-A", "--operator", url)).stdout.splitlines()
    assert len(lines) == 2
    assert [line for line in lines if not line or line != line.rstrip()] == []


async def test_cli_error_truncates_long_arguments() -> None:
    long = "x" * 100_000
    for command in (
        ["explain", "orders", long],
        ["lag", long + "!"],
        ["status", "-n", long],
        ["lag", "o", "--by", long],
    ):
        assert len(await refused(*command, "--operator", "http://127.0.0.1:9")) <= MAX_MESSAGE_CHARACTERS + 1
    assert len(await refused("explain", "orders", long)) < 300
    assert len(await refused("status", "--operator", long)) < 300


# Usage.


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        (["lag"], "Missing argument 'GROUP'; see rota lag --help"),
        (
            ["lag", "o", "--by", "foo"],
            "Invalid value for '--by': 'foo' is not one of 'queue', 'lag'; see rota lag --help",
        ),
        (["lag", "o", "--top", "0"], "Invalid value for '--top': 0 is not in the range x>=1; see rota lag --help"),
        (["status", "-o", "xml"], "Invalid value for '-o' / '--output': 'xml' is not one of"),
        (["members", "o", "--nope"], "No such option '--nope'"),
        (["nope"], "No such command 'nope'; see rota --help"),
        (["pipeline", "nope"], "No such command 'nope'; see rota pipeline --help"),
        (["operator", "--port", "0"], "Invalid value for '--port': 0 is not in the range"),
    ],
)
async def test_cli_usage_error_is_one_sentence(command: list[str], sentence: str) -> None:
    assert (await refused(*command)).startswith(sentence)


async def test_cli_help_and_version_go_to_standard_output() -> None:
    for command in (["--help"], ["lag", "-h"], ["pipeline", "--help"], ["--version"]):
        shown = await rota(*command)
        assert (shown.exit_code, shown.stderr) == (0, "")
        assert "rota" in shown.stdout
    bare = await rota()
    assert (bare.exit_code, "Usage: rota" in bare.output) == (2, True)


# Who is asked.


async def test_cli_rejects_a_compressed_response_over_the_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_RESPONSE_BYTES", 1 << 20)
    packed = gzip.compress(b" " * (16 << 20))
    async with saying(packed, headers={"content-encoding": "gzip"}) as url:
        told = await refused("status", "--operator", url)
    assert told == f"The response of {url} is larger than 1 MiB; is it Rota's operator?"


async def test_cli_does_not_follow_redirects() -> None:
    async with saying(groups()) as other, saying(b"", 302, {"location": f"{other}/v1/groups"}) as url:
        told = await refused("status", "--operator", url)
        assert told.startswith(f"{url} redirects to {other}/v1/groups; redirects are not followed")


@pytest.mark.parametrize("given", ["http://u:secret@127.0.0.1:9", "http://u:secret@h:x", "u:secret@h"])
async def test_cli_rejects_a_password_in_the_url_without_repeating_it(given: str) -> None:
    told = await refused("status", "--operator", given)
    assert told.startswith("--operator must not contain a user name or password")
    assert "secret" not in told


async def test_cli_https_to_an_http_server_is_reported_as_such() -> None:
    async with saying(groups()) as url:
        told = await refused("status", "--operator", url.replace("http:", "https:"))
    assert "it does not support TLS, or its certificate is not trusted" in told
    assert "not permitted" not in told


# The login; `tests/unit/kube/client/login` has every mistake in a kubeconfig.


async def test_cli_login_options_that_name_nothing_are_one_sentence(tmp_path: Path) -> None:
    config = str(a_kubeconfig(tmp_path / "config", "http://127.0.0.1:1"))
    otherwise = ", or give --operator with its address"
    missing = await refused("status", "--kubeconfig", "/none")
    assert missing.startswith("The kubeconfig /none does not exist; set KUBECONFIG")
    assert await refused("status", "--kubeconfig", config, "--context", "prod") == (
        "The kubeconfig has no context 'prod'; kubectl config view shows its entries" + otherwise
    )
    assert await refused("status", "--kubeconfig", config, "--as-group", "readers") == (
        "A group, uid or extra field to impersonate needs a user, too; give --as" + otherwise
    )


async def test_cli_impersonation_is_refused_for_an_operator_at_an_address() -> None:
    told = await refused("status", "--operator", "http://127.0.0.1:1", "--as", "jane")
    assert told == "--as works only through the API server, not with --operator; remove one of them"


async def test_cli_login_options_are_refused_for_a_group_on_files(tmp_path: Path) -> None:
    (tmp_path / "group.yaml").write_text("")
    given = ("explain", "-f", str(tmp_path / "group.yaml"))
    assert await refused(*given, "--as", "jane") == "--as is for a live group; remove this option, or remove -f"
    assert await refused(*given, "--watch") == "--watch is for a live group; remove this option, or remove -f"
