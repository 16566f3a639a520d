"""Pure parts of local pods: files as the kubelet lays them out, variables and mount paths in text, probes."""

import asyncio
from pathlib import Path

import pytest

from ground.local.environment import expand, rewriter
from ground.local.probes import Failure, verdicts
from ground.local.volumes import publish, select_items
from ground.poll import PATIENCE_SECONDS
from ground.report import Missing


def visible_files(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir() if not path.name.startswith("..")}


def test_local_node_volume_files_are_swapped_by_one_symlink(tmp_path: Path) -> None:
    publish(tmp_path, {"a": (b"1", 0o644), "b": (b"2", 0o644)})
    first = (tmp_path / "..data").readlink()
    publish(tmp_path, {"b": (b"3", 0o600), "c": (b"4", 0o644)})
    assert visible_files(tmp_path) == {"b": "3", "c": "4"}
    assert (tmp_path / "..data").readlink() != first
    assert not (tmp_path / first).exists()
    assert (tmp_path / "b").stat().st_mode & 0o777 == 0o600


def test_local_node_volume_is_untouched_while_its_files_are_unchanged(tmp_path: Path) -> None:
    files = {"a": (b"1", 0o644), "sub/b": (b"2", 0o400)}
    publish(tmp_path, files)
    first = (tmp_path / "..data").readlink()
    publish(tmp_path, files)
    assert (tmp_path / "..data").readlink() == first
    assert (tmp_path / "sub" / "b").read_text() == "2"
    assert str((tmp_path / "sub").readlink()) == "..data/sub"


def test_local_node_volume_of_an_empty_object_is_an_empty_folder(tmp_path: Path) -> None:
    publish(tmp_path, {})
    publish(tmp_path, {"a": (b"1", 0o644)})
    publish(tmp_path, {})
    assert visible_files(tmp_path) == {}


def test_local_node_volume_items_select_and_rename_files() -> None:
    selection = {"items": [{"key": "a", "path": "x/y", "mode": 0o600}]}
    assert select_items("it", {"a": b"1", "b": b"2"}, selection, 0o644) == {"x/y": (b"1", 0o600)}


def test_local_node_volume_rejects_an_absent_item_unless_it_is_optional() -> None:
    selection = {"items": [{"key": "absent", "path": "x"}]}
    with pytest.raises(Missing, match="has no key absent"):
        select_items("it", {"a": b"1"}, selection, 0o644)
    assert select_items("it", {"a": b"1"}, {**selection, "optional": True}, 0o644) == {}


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("$(A)-$(A)", "1-1"),
        ("$(B)", "$(B)"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$1"),
        ("$A ${A} $", "$A ${A} $"),
        ("$(A", "$(A"),
    ],
)
def test_local_node_variables_are_expanded_as_the_kubelet_does(text: str, expanded: str) -> None:
    assert expand(text, {"A": "1"}) == expanded


@pytest.mark.parametrize(
    ("text", "real"),
    [
        ("/etc/rota", "/p/rota"),
        ("--at=/etc/rota/group.json", "--at=/p/rota/group.json"),
        ("/etc/rota/keys/a:/etc/rota", "/p/keys/a:/p/rota"),
        ("file:///etc/rota/x", "file:///p/rota/x"),
        ("cat '/etc/rota'", "cat '/p/rota'"),
        ("/etc/rota.d /etc/rota-old /old/etc/rota", "/etc/rota.d /etc/rota-old /old/etc/rota"),
        ("http://host/etc/rota", "http://host/etc/rota"),
    ],
)
def test_local_node_mount_paths_are_rewritten_to_host_paths(text: str, real: str) -> None:
    assert rewriter({"/etc/rota": Path("/p/rota"), "/etc/rota/keys": Path("/p/keys")})(text) == real


def test_local_node_mount_path_is_rewritten_once_only() -> None:
    assert rewriter({"/a": Path("/b"), "/b": Path("/a")})("/a /b") == "/b /a"


async def test_local_node_probe_decides_when_a_threshold_is_reached() -> None:
    answers = iter([False, False, True, False, False, False, True])

    async def attempt() -> None:
        if not next(answers):
            raise Failure("no")

    async with asyncio.timeout(PATIENCE_SECONDS):
        probe = {"periodSeconds": 0, "failureThreshold": 3, "successThreshold": 1}
        decisions = verdicts(probe, attempt, 0)
        decided = [await anext(decisions) for _ in range(3)]
    assert [verdict is None for verdict in decided] == [True, False, True]
