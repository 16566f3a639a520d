"""In which order the kubelet runs the hooks of a pod's containers and ends them: drains rest on that."""

from pathlib import Path

import pytest

from e2e.release import SECONDS, Installed
from ground.api import Object

pytestmark = pytest.mark.node

NAME = "hooks"
NOTE = "echo $0 $(date +%s%N) >> /notes/order"
# The sidecar's hook starts a drain, and the app's waits for it: 3 s here, in which nobody may be told to end.
HOOKS = {
    "sidecar": f"{NOTE.replace('$0', 'sidecar-hook')}; sleep 1; touch /notes/drained",
    "app": f"{NOTE.replace('$0', 'app-hook')}; until test -e /notes/drained; do sleep 0.1; done; sleep 2; "
    f"{NOTE.replace('$0', 'app-hook-ended')}",
}


def a_container(name: str, image: str, **fields: object) -> Object:
    """Return a container that notes its hook and when it is told to end."""
    told = NOTE.replace("$0", f"{name}-terminated")
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", f"trap '{told}; exit 0' TERM; while :; do sleep 0.05; done"],
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", HOOKS[name]]}}},
        "volumeMounts": [{"name": "notes", "mountPath": "/notes"}],
        **fields,
    }


def test_drain_hook_of_a_sidecar_runs_beside_those_of_the_app_and_before_any_container_is_terminated(
    installed: Installed, tmp_path: Path
) -> None:
    tmp_path.chmod(0o777)
    image = "{repository}:{tag}".format(**installed.values["sidecar"]["image"])
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
    installed.apply(pod)
    installed.shop("wait", f"pod/{NAME}", "--for=condition=Ready", f"--timeout={SECONDS}s")
    installed.shop("delete", "pod", NAME, f"--timeout={SECONDS}s")
    noted = dict(line.split() for line in (tmp_path / "order").read_text().splitlines())
    order = sorted(noted, key=lambda what: int(noted[what]))
    assert sorted(order[:2]) == ["app-hook", "sidecar-hook"]
    assert order[2:] == ["app-hook-ended", "app-terminated", "sidecar-terminated"]
