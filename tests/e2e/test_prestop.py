"""The order in which the kubelet runs hooks and terminates containers of a pod; drains depend on it."""

from pathlib import Path

import pytest

from e2e.release import TIMEOUT_SECONDS, Installation
from ground.api import Object

pytestmark = pytest.mark.node

NAME = "hooks"
NOTE = "echo $0 $(date +%s%N) >> /notes/order"
# The sidecar's hook starts a drain, and the app's hook waits for it: for 3 s no container may be terminated.
HOOKS = {
    "sidecar": f"{NOTE.replace('$0', 'sidecar-hook')}; sleep 1; touch /notes/drained",
    "app": f"{NOTE.replace('$0', 'app-hook')}; until test -e /notes/drained; do sleep 0.1; done; sleep 2; "
    f"{NOTE.replace('$0', 'app-hook-ended')}",
}


def a_container(name: str, image: str, **fields: object) -> Object:
    """Return a container that logs its hook and its SIGTERM."""
    write_note = NOTE.replace("$0", f"{name}-terminated")
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", f"trap '{write_note}; exit 0' TERM; while :; do sleep 0.05; done"],
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", HOOKS[name]]}}},
        "volumeMounts": [{"name": "notes", "mountPath": "/notes"}],
        **fields,
    }


def test_drain_hook_of_a_sidecar_runs_with_the_apps_hook_and_before_any_container_is_terminated(
    installation: Installation, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    image = "{repository}:{tag}".format(**installation.values["sidecar"]["image"])
    pod: Object = {
        "kind": "Pod",
        "metadata": {"name": NAME},
        "spec": {
            "terminationGracePeriodSeconds": 60,
            "initContainers": [a_container("sidecar", image, restartPolicy="Always")],
            "containers": [a_container("app", image)],
            "volumes": [{"name": "notes", "hostPath": {"path": str(tmp_path)}}],
        },
    }
    installation.apply(pod)
    installation.group_kubectl("wait", f"pod/{NAME}", "--for=condition=Ready", f"--timeout={TIMEOUT_SECONDS}s")
    installation.group_kubectl("delete", "pod", NAME, f"--timeout={TIMEOUT_SECONDS}s")
    times = dict(line.split() for line in (tmp_path / "order").read_text().splitlines())
    order = sorted(times, key=lambda name: int(times[name]))
    assert sorted(order[:2]) == ["app-hook", "sidecar-hook"]
    assert order[2:] == ["app-hook-ended", "app-terminated", "sidecar-terminated"]
