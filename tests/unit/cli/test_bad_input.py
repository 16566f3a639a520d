"""Hostile input to the command line: neither responses nor arguments can harm the terminal or the memory."""

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


def groups_response(**changes: Any) -> dict[str, Any]:
    """Return an operator's response with one group."""
    operator = {"identity": "rota-0", "version": "0.1.0", "leads": True}
    return {"operator": operator, "groups": [{**A_GROUP, **FIGURES, "strategy": "Sticky", **changes}]}


@asynccontextmanager
async def run_server(handler: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(app) as server:
        yield str(server.make_url("/")).rstrip("/")


@asynccontextmanager
async def run_fixed_server(
    content: Any, status: int = 200, headers: Mapping[str, str] | None = None
) -> AsyncIterator[str]:
    body = content if isinstance(content, bytes) else json.dumps(content).encode()

    async def respond(_: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers=headers)

    async with run_server(respond) as url:
        yield url


@pytest.fixture(autouse=True)
def no_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make sure that no kubeconfig is found."""
    for name in ("KUBECONFIG", "ROTA_OPERATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))


async def rota(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, main, arguments, prog_name="rota")


async def error_of(*arguments: str) -> str:
    """Return the one sentence with which a command rejects its arguments or a response."""
    result = await rota(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("rota: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr[:-1].isprintable()
    return result.stderr.removeprefix("rota: ")[:-1]


# Output to the terminal.


@pytest.mark.parametrize("queue", ["\x1b[31mx/b/one", "\u202e/b/x", "\u009b31m"])
async def test_cli_error_quotes_arguments_without_control_characters(queue: str) -> None:
    assert "Invalid queue" in await error_of("explain", "orders", queue, "--operator", "http://127.0.0.1:9")


async def test_cli_error_relays_a_response_without_control_characters() -> None:
    async with run_fixed_server({"error": f"no{ESCAPES}"}, 400) as url:
        assert (await error_of("status", "--operator", url)).startswith("no\N{REPLACEMENT CHARACTER}]0;owned")


@pytest.mark.parametrize("output", ["json", "yaml"])
async def test_cli_json_and_yaml_escape_control_characters_without_loss(output: str) -> None:
    name = f"o\x7f\u00fc\u00a0\U000e0001{ESCAPES}"
    async with run_fixed_server(groups_response(name=name)) as url:
        printed = (await rota("status", "-A", "-o", output, "--operator", url)).stdout
    assert printed.replace("\n", "").isprintable()
    decoded = json.loads(printed) if output == "json" else yaml.safe_load(printed)
    assert decoded["groups"][0]["name"] == name


async def test_cli_json_and_yaml_keep_printable_unicode() -> None:
    async with run_fixed_server(groups_response(message="für Größe")) as url:
        assert "für Größe" in (await rota("status", "-A", "-o", "json", "--operator", url)).stdout
        assert "für Größe" in (await rota("status", "-A", "-o", "yaml", "--operator", url)).stdout


async def test_cli_table_has_no_trailing_spaces_or_blank_lines() -> None:
    async with run_fixed_server(groups_response()) as url:
        lines = (await rota("status", "-A", "--operator", url)).stdout.splitlines()
    assert len(lines) == 2
    assert [line for line in lines if not line or line != line.rstrip()] == []


async def test_cli_error_truncates_long_arguments() -> None:
    text = "x" * 100_000
    for command in (
        ["explain", "orders", text],
        ["lag", text + "!"],
        ["status", "-n", text],
        ["lag", "o", "--by", text],
    ):
        assert len(await error_of(*command, "--operator", "http://127.0.0.1:9")) <= MAX_MESSAGE_CHARACTERS + 1
    assert len(await error_of("explain", "orders", text)) < 300
    assert len(await error_of("status", "--operator", text)) < 300


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
        (["pipeline", "rolup"], "No such command 'rolup'. Did you mean 'rollup'? See rota pipeline --help"),
        (["operator", "--port", "0"], "Invalid value for '--port': 0 is not in the range"),
    ],
)
async def test_cli_usage_error_is_one_sentence(command: list[str], sentence: str) -> None:
    assert (await error_of(*command)).startswith(sentence)


async def test_cli_help_and_version_go_to_standard_output() -> None:
    for command in (["--help"], ["lag", "-h"], ["pipeline", "--help"], ["--version"]):
        result = await rota(*command)
        assert (result.exit_code, result.stderr) == (0, "")
        assert "rota" in result.stdout
    bare = await rota()
    assert (bare.exit_code, "Usage: rota" in bare.output) == (2, True)


# Responses of servers that may not be Rota's operator.


async def test_cli_rejects_a_compressed_response_over_the_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_RESPONSE_BYTES", 1 << 20)
    compressed = gzip.compress(b" " * (16 << 20))
    async with run_fixed_server(compressed, headers={"content-encoding": "gzip"}) as url:
        error = await error_of("status", "--operator", url)
    assert error == f"The response of {url} is larger than 1 MiB; is it Rota's operator?"


async def test_cli_does_not_follow_redirects() -> None:
    async with (
        run_fixed_server(groups_response()) as target,
        run_fixed_server(b"", 302, {"location": f"{target}/v1/groups"}) as url,
    ):
        error = await error_of("status", "--operator", url)
        assert error.startswith(f"{url} redirects to {target}/v1/groups; redirects are not followed")


@pytest.mark.parametrize("url", ["http://u:secret@127.0.0.1:9", "http://u:secret@h:x", "u:secret@h"])
async def test_cli_rejects_a_password_in_the_url_without_repeating_it(url: str) -> None:
    error = await error_of("status", "--operator", url)
    assert error.startswith("--operator must not contain a user name or password")
    assert "secret" not in error


async def test_cli_https_to_an_http_server_is_reported_as_such() -> None:
    async with run_fixed_server(groups_response()) as url:
        error = await error_of("status", "--operator", url.replace("http:", "https:"))
    assert "it does not support TLS, or its certificate is not trusted" in error
    assert "not permitted" not in error


# The login; `tests/unit/kube/client/login` has every mistake in a kubeconfig.


async def test_cli_login_options_that_name_nothing_are_one_sentence(tmp_path: Path) -> None:
    config = str(a_kubeconfig(tmp_path / "config", "http://127.0.0.1:1"))
    hint = ", or give --operator with its address"
    missing = await error_of("status", "--kubeconfig", "/none")
    assert missing.startswith("The kubeconfig /none does not exist; set KUBECONFIG")
    assert await error_of("status", "--kubeconfig", config, "--context", "prod") == (
        "The kubeconfig has no context 'prod'; kubectl config view shows its entries" + hint
    )
    assert await error_of("status", "--kubeconfig", config, "--as-group", "readers") == (
        "A group, uid or extra field to impersonate needs a user, too; give --as" + hint
    )


async def test_cli_impersonation_is_refused_for_an_operator_at_an_address() -> None:
    error = await error_of("status", "--operator", "http://127.0.0.1:1", "--as", "jane")
    assert error == "--as works only through the API server, not with --operator; remove one of them"


async def test_cli_login_options_are_refused_for_a_group_on_files(tmp_path: Path) -> None:
    (tmp_path / "group.yaml").write_text("")
    command = ("explain", "-f", str(tmp_path / "group.yaml"))
    assert await error_of(*command, "--as", "jane") == "--as is for a live group; remove this option, or remove -f"
    assert await error_of(*command, "--watch") == "--watch is for a live group; remove this option, or remove -f"
