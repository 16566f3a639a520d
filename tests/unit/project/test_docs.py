"""Tests the pages: the files, targets and options that they name exist, and their commands on files run."""

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from kube.pages import ON_A_NODE, blocks, typed_commands
from rota import strategies
from rota.cli import main
from rota.documents import decode_assignment, encode_assignment
from rota.model import Queue, Reason, ReasonKind, Roster, reasons_of_kind

ROOT = Path(__file__).parents[3]
FOLDERS = ("", "docs", "docs/decisions", "bench", "charts/rota")
PAGES = [page for folder in FOLDERS for page in sorted((ROOT / folder).glob("*.md"))]
# Tests type the commands of these pages line by line.
ON_A_FLEET = ("command-line", "conditions", "fleets", "journal", "lag", "operator", "runbook")
TYPED = {
    "tutorial.md": "tests/kube/test_tutorial.py",
    "migration.md": "tests/kube/test_migration.py",
    **{f"{page}.md": "tests/kube/test_pages.py" for page in ON_A_FLEET},
    "policies.md": "tests/unit/project/test_policies_page.py",
    "pull.md": "tests/sidecar/test_pull_examples.py",
}
ON_A_SPARK_CLUSTER = (
    "pip install --target libs",
    "rm -r libs/pyspark*",
    "export PYTHONPATH=$PWD/libs",
    "spark-submit --master spark://",
    "python3 -m rota.cli pipeline jars",
)
ON_KUBERNETES = ("kubectl create serviceaccount", "kubectl create role", "spark-submit --master k8s://")
# Other tests run commands with these beginnings, mostly with other arguments.
ELSEWHERE = {
    **dict.fromkeys(ON_A_NODE, "tests/e2e/test_install.py"),
    "kubectl apply -f advice/": "tests/kube/test_pages.py",
    "kubectl patch consumergroup": "tests/kube/test_pages.py",
    "kubectl wait cg/orders --for=condition=Reconciling": "tests/kube/test_gitops.py",
    "kubectl wait cg/orders --for=condition=Stalled": "tests/kube/test_gitops.py",
    "kubectl patch secret rota-operator-key": "tests/kube/test_operator.py",
    "rota pipeline ": "tests/pipeline/test_docs_page.py",
    "rota history": "tests/pipeline/test_history.py",
    **dict.fromkeys(ON_A_SPARK_CLUSTER, "tests/pipeline/test_cluster.py"),
    **dict.fromkeys(ON_KUBERNETES, "tests/e2e/test_spark_submit.py"),
    "sha256sum --check": "tests/chart/test_release.py",
    "make demo": "tests/ground/tests/test_demo.py",
    "make install": ".ci/run",
    "make kind": "tests/ground/tests/test_kind.py",
    "python -m ground up": "tests/ground/tests/test_command.py",
    "python -m ground status": "tests/ground/tests/test_command.py",
    "python -m ground down": "tests/ground/tests/test_command.py",
    "rota sidecar --group": "tests/sidecar/test_command.py",
    "docker build": "tests/images/test_images.py",
    "helm install": "tests/e2e/test_install.py",
    "helm test": "tests/e2e/test_install.py",
    "helm uninstall": "tests/e2e/test_uninstall.py",
    "kubectl delete namespace": "tests/e2e/test_uninstall.py",
    "kubectl delete": "tests/e2e/test_uninstall.py",
    "kubectl label -f crds/": "tests/e2e/test_uninstall.py",
    "kubectl annotate --overwrite -f crds/": "tests/e2e/test_uninstall.py",
}


def commands(page: Path) -> list[str]:
    """Return the commands of a page, without their comments and without the path of the virtual environment."""
    return [re.sub(r"  +# .*|\.venv/bin/", "", block.command).strip() for block in typed_commands(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_docs_links_and_paths_exist(page: Path) -> None:
    text = page.read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)[^)]*\)", text) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    paths = re.findall(r"`((?:docs|tests|operator|bench|charts)/[\w./-]+)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_docs_make_targets_exist(page: Path) -> None:
    offered = subprocess.run(["make", "-qp"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    named = set(re.findall(r"(?:`|\$ |^    )make ([a-z-]+)", page.read_text(), re.MULTILINE))
    assert [target for target in named if f"\n{target}:" not in offered] == []


TYPED_COMMANDS = {command for page in PAGES if page.name in TYPED for command in commands(page)}
OTHER_COMMANDS = [(page.name, command) for page in PAGES if page.name not in TYPED for command in commands(page)]
RUNNABLE_COMMANDS = [
    (page, command)
    for page, command in OTHER_COMMANDS
    if command.startswith("rota ") and command not in TYPED_COMMANDS and not command.startswith(tuple(ELSEWHERE))
]


@pytest.mark.parametrize(
    ("page", "command"), RUNNABLE_COMMANDS, ids=[f"{page}: {command}" for page, command in RUNNABLE_COMMANDS]
)
def test_docs_rota_commands_run(page: str, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert CliRunner().invoke(main, shlex.split(command)[1:]).exit_code == 0, f"{page}: {command}"


def test_docs_commands_are_each_run_by_a_test() -> None:
    tests = {*TYPED.values(), *ELSEWHERE.values()}
    assert [test for test in tests if not (ROOT / test).exists()] == []
    assert [page for page, test in TYPED.items() if page not in (ROOT / test).read_text()] == []
    assert [
        (page, command)
        for page, command in OTHER_COMMANDS
        if command not in TYPED_COMMANDS
        and (page, command) not in RUNNABLE_COMMANDS
        and not command.startswith(tuple(ELSEWHERE))
    ] == []


def test_docs_contain_every_command_listed_as_run_elsewhere() -> None:
    shown = [
        *TYPED_COMMANDS,
        *(command for _, command in OTHER_COMMANDS),
        *(command for page in PAGES for command in bash_commands(page)),
    ]
    assert [start for start in ELSEWHERE if not any(command.startswith(start) for command in shown)] == []


ROTA_COMMANDS_IN_BASH = [
    (page.name, command)
    for page in PAGES
    for block in blocks(page, "bash")
    for line in block.splitlines()
    for command in re.findall(r"(?:^|\| )(?:\.venv/bin/)?(rota [^|>&#]*)", line)
    if "${" not in command
]


@pytest.mark.parametrize(
    ("page", "command"), ROTA_COMMANDS_IN_BASH, ids=[f"{page}: {command}" for page, command in ROTA_COMMANDS_IN_BASH]
)
def test_docs_rota_commands_use_existing_options(page: str, command: str) -> None:
    """Only parse the command: some need a cluster, or run for ever."""
    cli_command: click.Command = main
    name, *words = shlex.split(re.sub(r" 2$", "", command))
    with click.Context(main) as context:
        while isinstance(cli_command, click.Group):
            name = words.pop(0)
            subcommand = cli_command.get_command(context, name)
            assert subcommand, f"{page}: {command}"
            cli_command = subcommand
        cli_command.make_context(name, words, parent=context)


# Commands of `bash` blocks that no test types literally. Do not add more: use a `console` block, which the test of its
# page types.
UNTYPED = (
    # No release is published yet; tests/chart/test_release.py does the quick part of `make release-check`.
    ("pipeline.md", "pip install 'rota-operator[pipeline]'"),
    ("releasing.md", "git clone --branch v0.2.0 https://github.com/rota-dev/rota && cd rota"),
    ("releasing.md", "make release-check"),
    ("releasing.md", "diff dist/SHA256SUMS ../SHA256SUMS"),
)


def bash_commands(page: Path) -> list[str]:
    """Return the commands in the shell blocks of a page, each with all of its lines."""
    text = "".join(block for language in ("bash", "sh", "shell") for block in blocks(page, language))
    text = re.sub(r"<<'EOF'\n.*?^EOF$", "", text, flags=re.DOTALL | re.MULTILINE)
    return [
        line.removeprefix(".venv/bin/") for line in re.findall(r"^[^\s#}].*", re.sub(r"\\\n", "", text), re.MULTILINE)
    ]


def test_docs_bash_blocks_have_no_new_untested_command() -> None:
    shell_commands = [(page.name, command) for page in PAGES for command in bash_commands(page)]
    assert [
        (page, command)
        for page, command in shell_commands
        if not command.startswith(tuple(ELSEWHERE))
        and not any(page == untyped_page and command.startswith(beginning) for untyped_page, beginning in UNTYPED)
    ] == []
    outdated = [
        (untyped_page, beginning)
        for untyped_page, beginning in UNTYPED
        if not any(page == untyped_page and command.startswith(beginning) for page, command in shell_commands)
    ]
    assert outdated == [], "a test types it now, or no page has it any more"


def test_docs_image_builds_name_arguments_targets_and_base_images_of_the_dockerfile() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    defaults = dict(re.findall(r"^ARG (\w+)=(\S+)", dockerfile, re.MULTILINE))
    targets = set(re.findall(r"^FROM \S+ AS ([\w-]+)", dockerfile, re.MULTILINE))
    builds = [command for page in PAGES for command in commands(page) if command.startswith("docker build")]
    arguments = [argument for command in builds for argument in re.findall(r"--build-arg (\w+)=\S+/(\S+)", command)]
    assert {name for name, _ in arguments} == {"BASE", "UV"}
    assert [(name, image) for name, image in arguments if image != defaults[name].rpartition("/")[2]] == []
    assert {target for command in builds for target in re.findall(r"--target (\S+)", command)} <= targets


def test_docs_strategy_of_the_contributing_page_works(monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = blocks(ROOT / "docs/contributing.md", "python")
    namespace: dict[str, Any] = {}
    exec(source, namespace)  # noqa: S102 - our own page
    monkeypatch.setitem(strategies.STRATEGIES, "WholeTopics", namespace["whole_topics"])
    monkeypatch.setitem(strategies.REASONS, "WholeTopics", namespace["why_whole_topics"])
    queues = [Queue(topic, "broker-a", number) for topic in ("a", "b", "c") for number in range(3)]
    shares = strategies.allocate("WholeTopics", queues, ["m0", "m1"])
    assert {member: {queue.topic for queue in share} for member, share in shares.items()} == {
        "m0": {"a", "c"},
        "m1": {"b"},
    }
    assert sum(map(len, shares.values())) == len(queues)
    roster = Roster.of(queues, ["m0", "m1"], {queue: member for member, share in shares.items() for queue in share})
    owners = strategies.prepared("WholeTopics")(roster)
    assert list(owners) == list(roster.owners), "with its own result as present owners, nothing changes"
    assert owners.dtype == "int32"
    sentence = strategies.explain("WholeTopics", roster, owners, queues[3])
    assert sentence == "b/broker-a/0 stays with m1: b is topic 2 of 3, and m1 gets it as a whole"


def test_docs_conditions_page_lists_every_reason_once_and_no_other() -> None:
    page = (ROOT / "docs" / "conditions.md").read_text()
    assert sorted(re.findall(r"^\| `(.*?)` \|", page, re.MULTILINE)) == sorted(Reason)


def test_docs_conditions_page_lists_the_reasons_that_stall_a_group() -> None:
    page = (ROOT / "docs" / "conditions.md").read_text()
    (listed,) = re.findall(r"^These stall a group: ([^.]*)\.", page, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(reasons_of_kind(ReasonKind.STALLS))


def test_docs_handover_page_shows_a_valid_assignment_document() -> None:
    json_blocks = re.findall(r"^```json\n(.*?)^```", (ROOT / "docs/handover.md").read_text(), re.MULTILINE | re.DOTALL)
    (assignment_block,) = (block for block in json_blocks if '"releasing"' in block)
    document = decode_assignment(assignment_block)
    assert json.loads(encode_assignment(document)["assignment.json"]) == json.loads(assignment_block)
    assert {release.holder.name for release in document.releasing.values()} == {"m1"}


def test_docs_decision_about_long_lived_tasks_lists_every_task() -> None:
    page = (ROOT / "docs" / "decisions" / "23-long-lived-tasks.md").read_text()
    table = page.partition("## Decision")[2].partition("\n## ")[0]
    supervised = {
        name
        for source in (ROOT / "operator" / "rota").rglob("*.py")
        if "supervise(" in (text := source.read_text())
        for name in re.findall(r'supervise\(f?"([\w ]+?) ?[{"]|"([\w ]+)": [\w.]+\.\w+[,}]', text)
        for name in name
        if name
    }
    ending = re.findall(r'name="([\w ]+)"', (ROOT / "operator/rota/kube/operator.py").read_text())
    assert {"beat", "lag poller", "HTTP server", "report watcher of"} <= supervised
    assert [name for name in [*supervised, *ending] if f"`{name}`" not in table] == []
