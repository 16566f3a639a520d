"""The life of local pods: start order, probes, restarts, the end."""

import os
import signal
from pathlib import Path

from ground.api import Object
from ground.local.processes import VARIABLE
from ground.poll import soon
from ground.space import Space, container, is_ready, waits_for

SLEEP = ["sh", "-c", "echo began; exec sleep 600"]
STAMP = 'stamp() { echo "$1 $(date +%s%N)"; }'
# Writes the time of SIGTERM and of its end; not by `exec`, as a shell ignores traps while a foreground child runs.
POLITE = f"""
{STAMP}
trap 'stamp told; sleep 0.2; stamp ended; exit 0' TERM
stamp began; touch began
while :; do sleep 0.05; done
"""
DEAF = f"""
{STAMP}
trap 'stamp told' TERM
while :; do stamp lives; sleep 0.05; done
"""
SERVER = """
import http.server, os
http.server.HTTPServer((os.environ["ROTA_LOCAL"], 8080), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def app(command: list[str], name: str = "app", **fields: object) -> Object:
    return {"name": name, "image": "none", "command": command, **fields}


def times(lines: list[str]) -> dict[str, int]:
    fields = [line.split() for line in lines]
    return {field[0]: int(field[1]) for field in fields if len(field) == 2}


async def wait_until_began(space: Space, pod: str, *containers: str) -> None:
    """Wait until containers handle SIGTERM."""
    await space.eventually(lambda: all("began" in times(space.log(pod, name)) for name in containers))


def count_marked(folder: Path) -> int:
    """Return how many processes belong to containers below a folder; signal 0 would not distinguish child processes."""
    mark = f"{VARIABLE}={folder}".encode()
    count = 0
    for entry in Path("/proc").iterdir():
        try:
            count += entry.name.isdigit() and mark in (entry / "environ").read_bytes()
        except OSError:
            continue
    return count


def pods_folder(space: Space) -> Path:
    return space.node.folder / "pods" / f"{space.name}_"


async def wait_for_no_process(space: Space) -> None:
    await space.eventually(lambda: not count_marked(pods_folder(space)))


async def test_local_node_deployment_becomes_ready(space: Space) -> None:
    labels = {"app": "web"}
    template = {"metadata": {"labels": labels}, "spec": space.spec(app(SLEEP))}
    await space.make(
        "Deployment", "web", spec={"replicas": 3, "selector": {"matchLabels": labels}, "template": template}
    )
    deployment = await space.until(
        lambda deployment: deployment["status"].get("availableReplicas") == 3, "web", "Deployment"
    )
    assert deployment["status"]["readyReplicas"] == 3
    pods = await space.api.list(space.path("Pod"))
    assert {pod["status"]["phase"] for pod in pods} == {"Running"}
    assert len({pod["status"]["podIP"] for pod in pods}) == 3
    assert all(pod["status"]["podIP"].startswith(f"{space.node.instance.block}.") for pod in pods)


async def test_local_node_readiness_probe_reaches_a_server_on_the_pods_address(space: Space) -> None:
    probe = {"httpGet": {"path": "/", "port": "http"}, "periodSeconds": 1}
    served = app(["python", "-c", SERVER], readinessProbe=probe, ports=[{"name": "http", "containerPort": 8080}])
    for name in ("one", "two"):  # the same port: each has its own address
        await space.pod(name, served)
    pods = [await space.until(is_ready, name) for name in ("one", "two")]
    assert pods[0]["status"]["podIP"] != pods[1]["status"]["podIP"]
    silent = app(SLEEP, readinessProbe=probe, ports=[{"name": "http", "containerPort": 8080}])
    await space.pod("silent", silent)
    pod = await space.until(lambda pod: pod["status"]["phase"] == "Running", "silent")
    assert not is_ready(pod)
    ready = next(condition for condition in pod["status"]["conditions"] if condition["type"] == "Ready")
    assert ready["message"] == "containers with unready status: [app]"


async def test_local_node_native_sidecar_starts_before_its_app_and_outlives_it(space: Space) -> None:
    probe = {"exec": {"command": ["test", "-e", "began"]}, "periodSeconds": 1}
    sidecar = app(["sh", "-c", POLITE], "sidecar", restartPolicy="Always", startupProbe=probe)
    await space.pod("pair", app(["sh", "-c", POLITE]), initContainers=[sidecar])
    await wait_until_began(space, "pair", "sidecar", "app")
    await space.api.delete(space.path("Pod", "pair"))
    await space.wait_until_deleted("pair")
    first, second = times(space.log("pair", "sidecar")), times(space.log("pair"))
    assert first["began"] < second["began"] < second["told"] < second["ended"] < first["told"] < first["ended"]


async def test_local_node_init_containers_run_to_completion_in_sequence(space: Space) -> None:
    step = "echo began $(date +%s%N); sleep 0.2; echo ended $(date +%s%N)"
    inits = [app(["sh", "-c", step], name) for name in ("first", "second")]
    await space.pod("steps", app(["sh", "-c", step]), initContainers=inits, restartPolicy="Never")
    await space.until(lambda pod: pod["status"].get("phase") == "Succeeded", "steps")
    first, second, last = (times(space.log("steps", name)) for name in ("first", "second", "app"))
    assert first["ended"] < second["began"] < second["ended"] < last["began"]


async def test_local_node_failed_init_container_fails_a_pod_that_never_restarts(space: Space) -> None:
    await space.pod("broken", app(SLEEP), initContainers=[app(["false"], "init")], restartPolicy="Never")
    pod = await space.until(lambda pod: pod["status"].get("phase") == "Failed", "broken")
    assert container(pod, "init")["state"]["terminated"]["exitCode"] == 1
    assert not space.log("broken")


async def test_local_node_startup_probe_holds_back_the_next_container(space: Space) -> None:
    slow = "until [ -e /gate/open ]; do sleep 0.05; done; echo open $(date +%s%N); touch open; exec sleep 600"
    probe = {"exec": {"command": ["test", "-e", "open"]}, "periodSeconds": 1, "failureThreshold": 60}
    sidecar = app(["sh", "-c", slow], "sidecar", restartPolicy="Always", startupProbe=probe)
    sidecar["volumeMounts"] = [{"name": "gate", "mountPath": "/gate"}]
    gate = {"name": "gate", "emptyDir": {}}
    await space.pod("gated", app(["sh", "-c", POLITE]), initContainers=[sidecar], volumes=[gate])
    pod = await space.until(lambda pod: "running" in container(pod, "sidecar")["state"], "gated")
    assert pod["status"]["phase"] == "Pending"
    assert container(pod)["state"]["waiting"]["reason"] == "PodInitializing"
    (space.volume(pod, "gate") / "open").touch()
    await wait_until_began(space, "gated", "app")
    assert times(space.log("gated", "sidecar"))["open"] < times(space.log("gated"))["began"]


async def test_local_node_killed_container_is_restarted_and_counted(space: Space) -> None:
    await space.pod("victim", app(["sh", "-c", "echo $$$$; exec sleep 600"]))  # $$$$ is $$ to the shell
    await space.eventually(lambda: bool(space.log("victim")))
    os.kill(int(space.log("victim")[0]), signal.SIGKILL)
    pod = await space.until(lambda pod: container(pod)["restartCount"] == 1 and is_ready(pod), "victim")
    last = container(pod)["lastState"]["terminated"]
    assert (last["exitCode"], last["signal"], last["reason"]) == (137, 9, "Error")
    assert container(pod)["containerID"] != last["containerID"]


async def test_local_node_container_that_keeps_failing_backs_off(space: Space) -> None:
    await space.pod("crash", app(["sh", "-c", "exit 3"]))
    pod = await space.until(
        lambda pod: "waiting" in container(pod)["state"] and container(pod)["restartCount"], "crash"
    )
    assert container(pod)["state"]["waiting"]["reason"] == "CrashLoopBackOff"
    assert container(pod)["lastState"]["terminated"]["exitCode"] == 3
    assert pod["status"]["phase"] == "Running"


async def test_local_node_unknown_command_is_reported_in_the_pod_status(space: Space) -> None:
    await space.pod("typo", app(["no-such-command"]))
    pod = await space.until(lambda pod: container(pod)["lastState"], "typo")
    last = container(pod)["lastState"]["terminated"]
    assert last["reason"] == "StartError"
    assert "no-such-command" in last["message"]


async def test_local_node_container_of_an_unknown_image_waits_with_a_message(space: Space) -> None:
    await space.pod("image", {"name": "app", "image": "registry.example/team/thing:1"})
    pod = await space.until(waits_for("registry.example/team/thing:1"), "image")
    assert container(pod)["state"]["waiting"]["reason"] == "ImageNotFound"


async def test_local_node_failing_liveness_probe_restarts_the_container(space: Space) -> None:
    alive = {"exec": {"command": ["test", "-e", "alive"]}, "periodSeconds": 1, "failureThreshold": 1}
    await space.pod("ill", app(["sh", "-c", "touch alive; sleep 1; rm alive; sleep 600"], livenessProbe=alive))
    pod = await space.until(lambda pod: container(pod)["restartCount"] == 1, "ill")
    assert container(pod)["lastState"]["terminated"]["exitCode"] == 143


async def test_local_node_pre_stop_hook_runs_before_sigterm(space: Space) -> None:
    hook = {"preStop": {"exec": {"command": ["sh", "-c", "sleep 0.3; date +%s%N > $KEEP/hooked"]}}}
    held = app(["sh", "-c", POLITE], lifecycle=hook, env=[{"name": "KEEP", "value": "/keep"}])
    held["volumeMounts"] = [{"name": "keep", "mountPath": "/keep"}]
    keep = space.node.folder / "kept"
    volume = {"name": "keep", "hostPath": {"path": str(keep), "type": "DirectoryOrCreate"}}
    await space.pod("hooked", held, volumes=[volume])
    await wait_until_began(space, "hooked", "app")
    await space.api.delete(space.path("Pod", "hooked"))
    await space.wait_until_deleted("hooked")
    assert int((keep / "hooked").read_text()) < times(space.log("hooked"))["told"]


async def test_local_node_pre_stop_request_reaches_the_sidecar_of_the_same_pod(space: Space) -> None:
    sidecar = app(["python", "-c", SERVER], "sidecar", restartPolicy="Always")
    sidecar["startupProbe"] = {"tcpSocket": {"port": 8080}, "periodSeconds": 1}
    hook = {"preStop": {"httpGet": {"path": "/drain", "port": 8080}}}
    await space.pod("drained", app(SLEEP, lifecycle=hook), initContainers=[sidecar])
    await space.until(is_ready, "drained")
    await space.api.delete(space.path("Pod", "drained"))
    await space.wait_until_deleted("drained")
    assert any('"GET /drain HTTP/1.1"' in line for line in space.log("drained", "sidecar"))


async def test_local_node_sigkill_ends_a_container_that_ignores_sigterm(space: Space) -> None:
    await space.pod("deaf", app(["sh", "-c", DEAF]), terminationGracePeriodSeconds=2)
    await space.eventually(lambda: "lives" in times(space.log("deaf")))
    await space.api.delete(space.path("Pod", "deaf"))
    await space.wait_until_deleted("deaf")
    last = times(space.log("deaf"))
    assert last["told"] < last["lives"], "it was given no time after SIGTERM"
    await wait_for_no_process(space)


async def test_local_node_force_delete_leaves_no_process(space: Space) -> None:
    await space.pod("forced", app(["sh", "-c", "trap '' TERM; echo deaf; while :; do sleep 0.1; done"]))
    await space.wait_for_line("deaf", "forced")
    await space.api.delete(space.path("Pod", "forced"), {"gracePeriodSeconds": 0})
    await space.wait_until_deleted("forced")
    await wait_for_no_process(space)


async def test_local_node_delete_leaves_no_process(space: Space) -> None:
    daemon = "setsid sleep 600 & sleep 600 & echo began; wait"
    await space.pod("many", app(["sh", "-c", daemon]), terminationGracePeriodSeconds=2)
    await space.wait_for_line("began", "many")

    async def all_began() -> bool:  # a process that replaces its program has no environment for a moment
        return count_marked(pods_folder(space)) >= 3

    await soon(all_began)
    await space.api.delete(space.path("Pod", "many"))
    await space.wait_until_deleted("many")
    await wait_for_no_process(space)


async def test_local_node_rejects_a_pod_without_its_node_selector(space: Space) -> None:
    bound_spec = {"nodeName": space.node.name, "tolerations": space.node.tolerations}
    await space.make("Pod", "stray", spec={"containers": [app(["true"])], **bound_spec})
    rejected = await space.until(lambda pod: "reason" in pod["status"], "stray")
    assert "nodeSelector rota.dev/ground" in rejected["status"]["message"]
    await space.api.delete(space.path("Pod", "stray"))
    await space.wait_until_deleted("stray")
    assert not space.log("stray")


async def test_local_node_pod_that_never_restarts_succeeds_or_fails(space: Space) -> None:
    await space.pod("good", app(["true"]), restartPolicy="Never")
    await space.pod("bad", app(["sh", "-c", "exit 7"]), restartPolicy="Never")
    good = await space.until(lambda pod: pod["status"].get("phase") == "Succeeded", "good")
    bad = await space.until(lambda pod: pod["status"].get("phase") == "Failed", "bad")
    assert container(good)["state"]["terminated"]["reason"] == "Completed"
    assert container(bad)["state"]["terminated"]["exitCode"] == 7
    assert container(bad)["restartCount"] == 0


async def test_local_node_sidecar_ends_when_its_pods_containers_complete(space: Space) -> None:
    sidecar = app(["sh", "-c", POLITE], "sidecar", restartPolicy="Always")
    await space.pod("work", app(["sleep", "0.5"]), initContainers=[sidecar], restartPolicy="OnFailure")
    pod = await space.until(lambda pod: pod["status"].get("phase") in {"Succeeded", "Failed"}, "work")
    assert pod["status"]["phase"] == "Succeeded"
    assert "ended" in times(space.log("work", "sidecar"))
