"""The contents of local pods' containers: variables, files, tokens."""

import json
import re
from pathlib import Path

from ground.api import Object
from ground.space import Space, container, is_ready, waits_for

REPORT = "import json, os, sys; print(json.dumps({'env': dict(os.environ), 'argv': sys.argv[1:]}), flush=True)"
TOKEN = """
import json, os, ssl, sys, urllib.request
folder = sys.argv[1]
server = f"https://{os.environ['KUBERNETES_SERVICE_HOST']}:{os.environ['KUBERNETES_SERVICE_PORT']}"
token, trust = open(f"{folder}/token").read(), ssl.create_default_context(cafile=f"{folder}/ca.crt")
body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
path = "/apis/authentication.k8s.io/v1/selfsubjectreviews"
request = urllib.request.Request(server + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
request.add_header("Authorization", f"Bearer {token}")
print(json.load(urllib.request.urlopen(request, context=trust))["status"]["userInfo"]["username"], flush=True)
"""
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


def app(*command: str, **fields: object) -> Object:
    return {"name": "app", "image": "none", "command": list(command), **fields}


def variable(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def mounted(volume: str, at: str) -> Object:
    return {"volumeMounts": [{"name": volume, "mountPath": at}]}


def has_ended(pod: Object) -> bool:
    return pod["status"].get("phase") in {"Succeeded", "Failed"}


async def test_local_node_variables_come_from_values_config_maps_secrets_and_pod_fields(space: Space) -> None:
    await space.make("ConfigMap", "settings", data={"colour": "red", "size": "5"})
    await space.make("Secret", "secrets", stringData={"password": "pa$$word"})
    env = [
        {"name": "GREETING", "value": "hello $(PRE_size) $(NOBODY) $$(PRE_size)"},
        {"name": "COLOUR", "valueFrom": {"configMapKeyRef": {"name": "settings", "key": "colour"}}},
        {"name": "PASSWORD", "valueFrom": {"secretKeyRef": {"name": "secrets", "key": "password"}}},
        {"name": "NOTHING", "valueFrom": {"secretKeyRef": {"name": "absent", "key": "x", "optional": True}}},
        variable("POD", "metadata.name"), variable("UID", "metadata.uid"), variable("IP", "status.podIP"),
        variable("NODE", "spec.nodeName"), variable("NOTE", "metadata.annotations['a/note']"),
    ]  # fmt: skip
    reporter = app("python", "-c", REPORT, args=["$(COLOUR)", "$$(COLOUR)", "$(NOBODY)"], env=env)
    reporter["envFrom"] = [{"prefix": "PRE_", "configMapRef": {"name": "settings"}}]
    await space.pod("env", reporter, annotations={"a/note": "noted"}, restartPolicy="Never")
    pod = await space.until(has_ended, "env")
    report = json.loads(space.log("env")[0])
    variables = report["env"]
    assert report["argv"] == ["red", "$(COLOUR)", "$(NOBODY)"]
    assert variables["GREETING"] == "hello 5 $(NOBODY) $(PRE_size)"
    assert (variables["COLOUR"], variables["PASSWORD"], variables["NOTE"]) == ("red", "pa$$word", "noted")
    assert (variables["POD"], variables["UID"], variables["NODE"]) == ("env", pod["metadata"]["uid"], space.node.name)
    assert variables["IP"] == variables["ROTA_LOCAL"] == pod["status"]["podIP"]
    assert "NOTHING" not in variables
    assert "PYTEST_CURRENT_TEST" not in variables
    assert Path(variables["TMPDIR"]).is_relative_to(Path(variables["HOME"]))


async def test_local_node_service_account_token_authenticates_at_the_api_server(space: Space) -> None:
    await space.pod("account", app("python", "-c", TOKEN, ACCOUNT), restartPolicy="Never")
    await space.until(has_ended, "account")
    assert space.log("account") == [f"system:serviceaccount:{space.name}:default"]


async def test_local_node_config_map_volume_has_the_kubelets_layout(space: Space) -> None:
    await space.make("ConfigMap", "settings", data={"a": "1", "b": "2"}, binaryData={"raw": "AP8="})
    volume = {"name": "etc", "configMap": {"name": "settings", "defaultMode": 0o600}}
    await space.pod("files", app("sleep", "600", **mounted("etc", "/etc/x")), volumes=[volume])
    folder = space.volume(await space.until(is_ready, "files"), "etc")
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith("..")) == ["a", "b", "raw"]
    assert str((folder / "a").readlink()) == "..data/a"
    assert re.fullmatch(r"\.\.\d{4}(_\d\d){5}\.\w+", str((folder / "..data").readlink()))
    assert (folder / "raw").read_bytes() == b"\0\xff"
    assert (folder / "a").stat().st_mode & 0o777 == 0o600


async def test_local_node_config_map_change_reaches_the_file_when_an_annotation_changes(space: Space) -> None:
    await space.make("ConfigMap", "settings", data={"text": "old", "gone": "x"})
    show = "until grep -q new /etc/x/text; do sleep 0.02; done; echo seen; exec sleep 600"
    volume = {"name": "etc", "configMap": {"name": "settings"}}
    await space.pod("watching", app("sh", "-c", show, **mounted("etc", "/etc/x")), volumes=[volume])
    folder = space.volume(await space.until(is_ready, "watching"), "etc")
    previous = (folder / "..data").readlink()
    await space.api.patch(space.path("ConfigMap", "settings"), {"data": {"text": "new", "gone": None, "fresh": "y"}})
    await space.api.patch(space.path("Pod", "watching"), {"metadata": {"annotations": {"poke": "1"}}})
    await space.wait_for_line("seen", "watching")
    assert (folder / "..data").readlink() != previous
    assert sorted(path.name for path in folder.iterdir() if not path.name.startswith("..")) == ["fresh", "text"]
    assert not (folder / previous).exists()


async def test_local_node_config_map_files_of_a_terminating_pod_do_not_change(space: Space) -> None:
    await space.make("ConfigMap", "settings", data={"text": "old"})
    # Holds the pod while it terminates; a live pod with the same volume shows when the change has been written.
    last = "trap 'echo told' TERM; echo began; until test -e $HOME/go; do sleep 0.05; done"
    volume = {"name": "etc", "configMap": {"name": "settings"}}
    for name in ("ending", "live"):
        await space.pod(name, app("sh", "-c", last, **mounted("etc", "/etc/x")), volumes=[volume])
    ending, live = [await space.until(is_ready, name) for name in ("ending", "live")]
    for name in ("ending", "live"):
        await space.wait_for_line("began", name)
    await space.api.delete(space.path("Pod", "ending"))
    await space.wait_for_line("told", "ending")
    await space.api.patch(space.path("ConfigMap", "settings"), {"data": {"text": "new"}})
    for name in ("ending", "live"):
        await space.api.patch(space.path("Pod", name), {"metadata": {"annotations": {"poke": "1"}}})
    followed = space.volume(live, "etc") / "text"
    await space.eventually(lambda: followed.read_text() == "new")
    assert (space.volume(ending, "etc") / "text").read_text() == "old"
    (space.volume(ending, "etc").parent.parent / "app" / "go").touch()
    await space.wait_until_deleted("ending")


async def test_local_node_pod_waits_for_a_missing_config_map(space: Space) -> None:
    volume = {"name": "etc", "configMap": {"name": "late"}}
    await space.pod("patient", app("sleep", "600", **mounted("etc", "/etc/x")), volumes=[volume])
    pod = await space.until(waits_for('configmap "late" not found'), "patient")
    assert container(pod)["state"]["waiting"]["reason"] == "ContainerCreating"
    await space.make("ConfigMap", "late", data={"text": "here"})
    await space.until(is_ready, "patient")


async def test_local_node_waiting_pod_can_be_deleted(space: Space) -> None:
    volume = {"name": "etc", "configMap": {"name": "never"}}
    await space.pod("held", app("sleep", "600", **mounted("etc", "/etc/x")), volumes=[volume])
    pod = await space.until(waits_for('configmap "never" not found'), "held")
    assert "podIP" not in pod["status"]
    await space.api.delete(space.path("Pod", "held"))
    await space.wait_until_deleted("held")


async def test_local_node_container_waits_for_a_missing_secret_of_a_variable(space: Space) -> None:
    ref = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "late", "key": "key"}}}
    await space.pod("waiting", app("sleep", "600", env=[ref]))
    pod = await space.until(waits_for('secret "late" not found'), "waiting")
    assert container(pod)["state"]["waiting"]["reason"] == "CreateContainerConfigError"
    await space.make("Secret", "late", stringData={"key": "k"})
    await space.until(is_ready, "waiting")


async def test_local_node_projected_and_downward_api_files_follow_the_pod(space: Space) -> None:
    await space.make("ConfigMap", "settings", data={"a": "1", "b": "2"})
    sources = [
        {"configMap": {"name": "settings", "items": [{"key": "a", "path": "sub/first"}]}},
        {"secret": {"name": "absent", "optional": True}},
        {"downwardAPI": {"items": [{"path": "notes", "fieldRef": {"fieldPath": "metadata.annotations"}}]}},
        {"serviceAccountToken": {"path": "token", "audience": "rota", "expirationSeconds": 600}},
    ]
    volumes = [{"name": "all", "projected": {"sources": sources}}, {"name": "own", "emptyDir": {"medium": "Memory"}}]
    show = (
        "ls /all/sub; echo mine > /own/file; cat /own/file; until grep -q two /all/notes; do sleep 0.05; done; echo two"
    )
    mounts = [{"name": "all", "mountPath": "/all"}, {"name": "own", "mountPath": "/own/"}]
    await space.pod("mixed", app("sh", "-c", show, volumeMounts=mounts), annotations={"n": "one"}, volumes=volumes)
    pod = await space.until(is_ready, "mixed")
    assert (space.volume(pod, "all") / "notes").read_text() == 'n="one"'
    assert (space.volume(pod, "all") / "token").read_text().count(".") == 2
    await space.api.patch(space.path("Pod", "mixed"), {"metadata": {"annotations": {"n": "two"}}})
    await space.wait_for_line("two", "mixed")
    assert space.log("mixed")[:2] == ["first", "mine"]
