"""Kubeconfigs are read as kubectl reads them, and what is wrong in them is one sentence."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from logins import a_kubeconfig
from rota.kube.client.login.kubeconfig import LoginError, kubeconfig_files, namespace_of_context, read_kubeconfig


def written(path: Path, **content: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return path


def test_login_takes_of_several_kubeconfigs_the_first_that_names_something(tmp_path: Path) -> None:
    first = written(
        tmp_path / "a" / "config",
        contexts=[{"name": "here", "context": {"cluster": "one", "user": "me", "namespace": "shop"}}],
        users=[{"name": "me", "user": {"token": "first"}}],
    )
    second = written(
        tmp_path / "b" / "config",
        **{"current-context": "here"},
        contexts=[{"name": "here", "context": {"cluster": "two", "user": "other"}}],
        clusters=[{"name": "one", "cluster": {"server": "https://one/", "certificate-authority": "ca.crt"}}],
        users=[{"name": "me", "user": {"token": "second"}}],
    )
    third = written(tmp_path / "c" / "config", **{"current-context": "gone"})
    read = read_kubeconfig([tmp_path / "missing", first, second, third])
    assert (read.context, read.server, read.user) == ("here", "https://one", {"token": "first"})
    assert read.cluster["certificate-authority"] == str(tmp_path / "b" / "ca.crt")
    assert namespace_of_context([first, second, third]) == "shop"


def test_login_resolves_paths_relative_to_their_kubeconfig(tmp_path: Path) -> None:
    user = {"client-certificate": "me.crt", "client-key": "/keys/me.key", "exec": {"command": "./bin/login"}}
    read = read_kubeconfig([a_kubeconfig(tmp_path / "config", "https://one", user)])
    assert read.user["client-certificate"] == str(tmp_path / "me.crt")
    assert read.user["client-key"] == "/keys/me.key"
    assert read.login_program
    assert read.login_program.command == str(tmp_path / "bin" / "login")


def test_login_reads_the_named_context_and_its_impersonated_user(tmp_path: Path) -> None:
    path = written(
        tmp_path / "config",
        **{"current-context": "here"},
        contexts=[{"name": "there", "context": {"cluster": "two", "user": "viewer", "namespace": "bills"}}],
        clusters=[{"name": "two", "cluster": {"server": "https://two/k8s/clusters/c-1", "proxy-url": "http://p:3128"}}],
        users=[{"name": "viewer", "user": {"token": "t", "as": "jane", "as-groups": ["readers"]}}],
    )
    read = read_kubeconfig([path], "there")
    assert (read.server, read.proxy) == ("https://two/k8s/clusters/c-1", "http://p:3128")
    assert (read.impersonated_user, read.impersonated_groups) == ("jane", ["readers"])
    assert namespace_of_context([path], "there") == "bills"


def test_login_reads_the_named_kubeconfig_instead_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/a:{tmp_path}/b")
    assert kubeconfig_files() == [tmp_path / "a", tmp_path / "b"]
    assert kubeconfig_files("c") == [Path("c")]
    monkeypatch.delenv("KUBECONFIG")
    assert kubeconfig_files() == [Path("~/.kube/config").expanduser()]


ALONE = "current-context: a\ncontexts: [{name: a, context: {cluster: c}}]\n"
CONTEXT = "current-context: a\ncontexts: [{name: a, context: {cluster: c, user: u}}]\n"
PROXIED = "clusters: [{name: c, cluster: {server: 'https://c', proxy-url: 'socks5://p'}}]\nusers: [{name: u}]"
CLUSTER = "clusters: [{name: c, cluster: {server: 'https://c'}}]\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is no YAML; correct it"),
        ("some words", "has no lists of clusters, contexts and users; correct it"),
        ("contexts: 5", "has no lists of clusters, contexts and users; correct it"),
        ("", "The kubeconfig has no current context; run kubectl config use-context, or give --context"),
        ("current-context: gone", "The kubeconfig has no context 'gone'; kubectl config view shows what it has"),
        (CONTEXT, "The kubeconfig has no cluster 'c'; kubectl config view shows what it has"),
        (CONTEXT + "clusters: [{name: c}]", "The kubeconfig's cluster 'c' cannot be used: Object missing required"),
        (CONTEXT + "clusters: [{name: c, cluster: 5}]", "has a cluster that is no object; correct it"),
        (ALONE + "clusters: [{name: c, cluster: {server: here}}]", "The kubeconfig's server 'here' is no address"),
        (
            ALONE + "clusters: [{name: c, cluster: {server: 'https://c:0'}}]",
            "is no address; write it as https://HOST",
        ),
        (
            CONTEXT
            + "clusters: [{name: c, cluster: {server: 'https://c', proxy-url: 'socks5://p'}}]\nusers: [{name: u}]",
            "The kubeconfig's proxy-url is no address that can be used; write it as http://HOST:PORT",
        ),
        (CONTEXT + CLUSTER, "The kubeconfig has no user 'u'; kubectl config view shows what it has"),
        (
            CONTEXT + CLUSTER + "users: [{name: u, user: {exec: {}}}]",
            "The kubeconfig's user 'u' cannot be used: ",
        ),
        (
            "contexts: [{name: a, context: {cluster: [c]}}]\ncurrent-context: a",
            "The kubeconfig's context 'a' cannot be",
        ),
    ],
)
def test_login_with_a_malformed_kubeconfig_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(LoginError) as refused:
        read_kubeconfig([tmp_path / "config"])
    assert sentence in str(refused.value)
    assert str(refused.value).isprintable()


def test_login_with_a_missing_or_binary_kubeconfig_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LoginError, match=r"config cannot be read: No such file or directory; set KUBECONFIG"):
        read_kubeconfig([tmp_path / "config"])
    (tmp_path / "config").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LoginError, match=r"config is no text in UTF-8; correct it"):
        read_kubeconfig([tmp_path / "config"])
    with pytest.raises(LoginError, match=r"cannot be read: Is a directory"):
        read_kubeconfig([tmp_path])
