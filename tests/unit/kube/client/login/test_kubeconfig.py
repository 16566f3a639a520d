"""Kubeconfigs are read as kubectl reads them; each mistake in one is reported as a sentence."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from logins import a_kubeconfig
from rota.kube.client.login import kubeconfig as kubeconfig_module
from rota.kube.client.login.kubeconfig import (
    Impersonation,
    LoginError,
    LoginOptions,
    namespace_of_context,
    read_kubeconfig,
)


def write_kubeconfig(path: Path, **content: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(content))
    return path


def test_login_takes_each_entry_from_the_first_of_several_kubeconfigs_that_has_it(tmp_path: Path) -> None:
    first = write_kubeconfig(
        tmp_path / "a" / "config",
        contexts=[{"name": "here", "context": {"cluster": "one", "user": "me", "namespace": "shop"}}],
        users=[{"name": "me", "user": {"token": "first"}}],
    )
    second = write_kubeconfig(
        tmp_path / "b" / "config",
        **{"current-context": "here"},
        contexts=[{"name": "here", "context": {"cluster": "two", "user": "other"}}],
        clusters=[{"name": "one", "cluster": {"server": "https://one/", "certificate-authority": "ca.crt"}}],
        users=[{"name": "me", "user": {"token": "second"}}],
    )
    third = write_kubeconfig(tmp_path / "c" / "config", **{"current-context": "gone"})
    kubeconfig = read_kubeconfig([tmp_path / "missing", first, second, third])
    assert (kubeconfig.context, kubeconfig.cluster.server, kubeconfig.user.token) == ("here", "https://one/", "first")
    assert kubeconfig.cluster.certificate_authority == str(tmp_path / "b" / "ca.crt")
    assert namespace_of_context([first, second, third]) == "shop"


def test_login_resolves_paths_relative_to_their_kubeconfig(tmp_path: Path) -> None:
    user = {"client-certificate": "me.crt", "client-key": "/keys/me.key", "exec": {"command": "./bin/login"}}
    kubeconfig = read_kubeconfig([a_kubeconfig(tmp_path / "config", "https://one", user)])
    assert kubeconfig.user.client_certificate == str(tmp_path / "me.crt")
    assert kubeconfig.user.client_key == "/keys/me.key"
    assert kubeconfig.user.exec
    assert kubeconfig.user.exec.command == str(tmp_path / "bin" / "login")


MORE = {"as-uid": "u-1", "as-user-extra": {"acme.com/team": ["a", "b"]}, "client-key-data": None, "username": ""}


def test_login_impersonates_user_groups_uid_and_extra_fields() -> None:
    impersonation = Impersonation("jane", ["a", "b"], "u-1", {"acme.com/team": ["x"]})
    assert [*impersonation.headers()] == [
        ("Impersonate-User", "jane"),
        ("Impersonate-Uid", "u-1"),
        ("Impersonate-Group", "a"),
        ("Impersonate-Group", "b"),
        ("Impersonate-Extra-acme.com%2Fteam", "x"),
    ]
    assert not [*Impersonation().headers()]
    with pytest.raises(LoginError, match="needs a user, too; give --as"):
        [*Impersonation(groups=["a"]).headers()]


def test_login_reads_the_named_context_and_its_impersonated_user(tmp_path: Path) -> None:
    path = write_kubeconfig(
        tmp_path / "config",
        **{"current-context": "here"},
        contexts=[{"name": "there", "context": {"cluster": "two", "user": "viewer", "namespace": "bills"}}],
        clusters=[{"name": "two", "cluster": {"server": "https://two/k8s/clusters/c-1", "proxy-url": "http://p:3128"}}],
        users=[{"name": "viewer", "user": {"token": "t", "as": "jane", "as-groups": ["readers"]} | MORE}],
    )
    kubeconfig = read_kubeconfig([path], "there")
    assert (kubeconfig.cluster.server, kubeconfig.cluster.proxy_url) == (
        "https://two/k8s/clusters/c-1",
        "http://p:3128",
    )
    user = kubeconfig.user
    assert (user.impersonated_user, user.impersonated_groups, user.impersonated_uid) == ("jane", ["readers"], "u-1")
    assert user.impersonated_extra == {"acme.com/team": ["a", "b"]}
    assert namespace_of_context([path], "there") == "bills"


def test_login_reads_the_named_kubeconfig_instead_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", f"{tmp_path}/a:{tmp_path}/b")
    assert LoginOptions().files == [tmp_path / "a", tmp_path / "b"]
    assert LoginOptions(kubeconfig="c").files == [Path("c")]
    assert LoginOptions(kubeconfig="").files == [tmp_path / "a", tmp_path / "b"]
    monkeypatch.delenv("KUBECONFIG")
    assert LoginOptions().files == [Path("~/.kube/config").expanduser()]


@pytest.mark.parametrize(
    ("options", "kubeconfig", "exists", "uses_pod_account"),
    [
        (LoginOptions(), None, True, True),
        (LoginOptions(), "config", True, False),
        (LoginOptions(), "config", False, True),
        (LoginOptions(prefers_kubeconfig=True), None, True, False),
        (LoginOptions(prefers_kubeconfig=True), None, False, True),
        (LoginOptions(context="prod"), None, True, False),
    ],
)
def test_login_in_a_pod_uses_its_account_unless_a_kubeconfig_is_named(
    options: LoginOptions,
    kubeconfig: str | None,
    *,
    exists: bool,
    uses_pod_account: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    account = tmp_path / "account"
    home = tmp_path / "home"
    (home / ".kube").mkdir(parents=True)
    account.mkdir()
    (account / "token").write_text("t")
    monkeypatch.setattr(kubeconfig_module, "POD_ACCOUNT", account)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    path = home / ".kube" / "config"
    if kubeconfig:
        path = tmp_path / kubeconfig
        monkeypatch.setenv("KUBECONFIG", str(path))
    if exists:
        path.write_text("{}")
    assert options.uses_pod_account == uses_pod_account
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST")
    assert not options.uses_pod_account


ALONE = "current-context: a\ncontexts: [{name: a, context: {cluster: c}}]\n"
CONTEXT = "current-context: a\ncontexts: [{name: a, context: {cluster: c, user: u}}]\n"
PROXIED = "clusters: [{name: c, cluster: {server: 'https://c', proxy-url: 'socks5://p'}}]\nusers: [{name: u}]"
CLUSTER = "clusters: [{name: c, cluster: {server: 'https://c'}}]\n"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [", "is not valid YAML; correct it"),
        ("some words", "has no lists of clusters, contexts and users; correct it"),
        ("contexts: 5", "has no lists of clusters, contexts and users; correct it"),
        ("", "The kubeconfig has no current context; run kubectl config use-context, or give --context"),
        ("current-context: gone", "The kubeconfig has no context 'gone'; kubectl config view shows its entries"),
        (CONTEXT, "The kubeconfig has no cluster 'c'; kubectl config view shows its entries"),
        (CONTEXT + "clusters: [{name: c}]", "The kubeconfig's cluster 'c' cannot be used: Object missing required"),
        (CONTEXT + "clusters: [{name: c, cluster: 5}]", "has a cluster that is not an object; correct it"),
        (ALONE + "clusters: [{name: c, cluster: {server: here}}]", "The server of the kubeconfig is not a valid URL"),
        (
            ALONE + "clusters: [{name: c, cluster: {server: 'https://c:0'}}]",
            "is not a valid URL; write it as https://HOST",
        ),
        (
            CONTEXT
            + "clusters: [{name: c, cluster: {server: 'https://c', proxy-url: 'socks5://p'}}]\nusers: [{name: u}]",
            "The proxy-url of the kubeconfig is not supported; write it as http://HOST:PORT",
        ),
        (CONTEXT + CLUSTER, "The kubeconfig has no user 'u'; kubectl config view shows its entries"),
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
    with pytest.raises(LoginError) as caught:
        read_kubeconfig([tmp_path / "config"])
    assert sentence in str(caught.value)
    assert str(caught.value).isprintable()


def nested(template: str) -> str:
    """Return a kubeconfig of nine anchors, each of which uses the previous one ten times."""
    levels = [f"&a{level} " + template.replace("*", ", ".join([f"*a{level - 1}"] * 10)) for level in range(1, 10)]
    return f"preferences: [&a0 {{key: value}}, {', '.join(levels)}]\n" + CONTEXT + CLUSTER + "users: [{name: u}]"


@pytest.mark.parametrize("text", [nested("[*]"), nested("{<<: [*]}"), nested("{a: [*]}"), "preferences: &a [*a]"])
def test_login_with_a_kubeconfig_whose_aliases_expand_without_bound_is_one_sentence(text: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(LoginError, match=r"config cannot be used: its aliases expand to more than 4,194,304 values; "):
        read_kubeconfig([tmp_path / "config"])


@pytest.mark.parametrize("number", ["9:" * 100_000 + "9", "9:" * 400 + "9.5"])
def test_login_with_a_number_in_base_60_that_is_too_long_is_one_sentence(number: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(f"preferences: {number}")
    with pytest.raises(LoginError, match=r"config is not valid YAML; correct it"):
        read_kubeconfig([tmp_path / "config"])


def test_login_reads_aliases_and_merge_keys(tmp_path: Path) -> None:
    users = "users: [{name: base, user: &base {token: t, as: joe}}, {name: u, user: {<<: *base, as: jane}}]\n"
    (tmp_path / "config").write_text(CONTEXT + CLUSTER + users)
    user = read_kubeconfig([tmp_path / "config"]).user
    assert (user.token, user.impersonated_user) == ("t", "jane")


def test_login_with_a_missing_or_binary_kubeconfig_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(LoginError, match=r"config does not exist; set KUBECONFIG"):
        read_kubeconfig([tmp_path / "config"])
    (tmp_path / "config").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LoginError, match=r"config is not UTF-8 text; correct it"):
        read_kubeconfig([tmp_path / "config"])
    with pytest.raises(LoginError, match=r"cannot be read: Is a directory"):
        read_kubeconfig([tmp_path])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(LoginError, match=r"pipe cannot be read: it is not a regular file"):
        read_kubeconfig([tmp_path / "pipe"])
