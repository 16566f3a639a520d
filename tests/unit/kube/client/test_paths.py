"""Paths of the Kubernetes API: a malicious name never becomes part of a path."""

from pathlib import Path

import pytest
from yarl import URL

import rota
from rota.kube.client.objects import assignment_name
from rota.kube.client.paths import GROUPS, collection_path, object_path, proxy_path

SERVER = URL("https://api.example:6443")
MALICIOUS_NAMES = [
    "../../victim/secrets/rmq-admin",
    "..",
    ".",
    "%2e%2e",
    "%2e%2e/%2e%2e/victim/secrets/rmq-admin",
    "..%2f..%2fvictim",
    "rmq-admin?limit=1",
    "rmq-admin#",
    "rmq-admin/",
    "/rmq-admin",
    "a//b",
    "a..b",
    "a\\b",
    "rmq-admin\n",
    "rmq admin",
    "rmq-admin:80",
    "Admin",
    "\N{FULLWIDTH LATIN SMALL LETTER A}dmin",
    "",
    "a" * 254,
]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (collection_path("pods"), "/api/v1/pods"),
        (collection_path("configmaps", "shop"), "/api/v1/namespaces/shop/configmaps"),
        (collection_path(GROUPS), "/apis/rota.dev/v1alpha1/consumergroups"),
        (object_path("nodes", "", "node-1.example"), "/api/v1/nodes/node-1.example"),
        (object_path("secrets", "shop", "rmq-admin"), "/api/v1/namespaces/shop/secrets/rmq-admin"),
        (object_path("deployments", "shop", "orders"), "/apis/apps/v1/namespaces/shop/deployments/orders"),
        (
            object_path("leases", "rota-system", "rota"),
            "/apis/coordination.k8s.io/v1/namespaces/rota-system/leases/rota",
        ),
        (
            object_path(GROUPS, "shop", "orders", "status"),
            "/apis/rota.dev/v1alpha1/namespaces/shop/consumergroups/orders/status",
        ),
        (
            proxy_path("rota-system", "rota-0", 8080, "/v1/groups/shop/orders/why"),
            "/api/v1/namespaces/rota-system/pods/rota-0:8080/proxy/v1/groups/shop/orders/why",
        ),
        (object_path("secrets", "n" * 63, "a" * 253), f"/api/v1/namespaces/{'n' * 63}/secrets/{'a' * 253}"),
        (
            object_path("configmaps", "shop", assignment_name("g" * 63)),
            f"/api/v1/namespaces/shop/configmaps/{'g' * 63}-rota",
        ),
    ],
)
def test_api_path_reaches_the_server_unchanged(path: str, expected: str) -> None:
    assert path == expected
    assert SERVER.join(URL(path)).raw_path == expected


@pytest.mark.parametrize("name", MALICIOUS_NAMES)
def test_api_path_rejects_a_malicious_name_in_every_segment(name: str) -> None:
    with pytest.raises(ValueError, match="is not the name of a Kubernetes object"):
        object_path("secrets", "shop", name)
    with pytest.raises(ValueError, match="is not the name of a Kubernetes object"):
        proxy_path("shop", name, 8080, "/v1/groups")
    with pytest.raises(ValueError, match="is not a resource"):
        collection_path(name, "shop")
    with pytest.raises(ValueError, match="is not the name of a namespace"):
        collection_path("secrets", "n" * 64)
    if name:
        with pytest.raises(ValueError, match="is not the name of a namespace"):
            collection_path("secrets", name)
        with pytest.raises(ValueError, match="is not a subresource"):
            object_path("pods", "shop", "orders", name)


@pytest.mark.parametrize("path", ["", "v1", "/", "//v1", "/v1/..", "/v1/%2e%2e", "/v1/groups?x", "/v1/#", "/v1/\n"])
def test_api_path_of_a_proxied_request_stays_below_the_pod(path: str) -> None:
    with pytest.raises(ValueError, match="is not a path that a pod can be asked for"):
        proxy_path("shop", "rota-0", 8080, path)


@pytest.mark.parametrize("port", [-1, 0, 65536])
def test_api_path_of_a_proxied_request_rejects_an_invalid_port(port: int) -> None:
    with pytest.raises(ValueError, match="is not a port"):
        proxy_path("shop", "rota-0", port, "/v1/groups")


def test_api_path_is_built_by_one_module_only() -> None:
    root = Path(rota.__file__).parent
    builders = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if any(word in path.read_text() for word in ("/api/v1", "/apis/", "namespaces/", '"/namespaces'))
    }
    assert builders == {"kube/client/paths.py"}
