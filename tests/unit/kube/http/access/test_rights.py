"""Rights that requests need, and the cache of reviewed rights."""

from datetime import UTC, datetime

from rota.kube.http.access.access import user_of_certificate
from rota.kube.http.access.rights import (
    READ_ALL_GROUPS,
    READ_METRICS,
    ExpiringCache,
    Right,
    User,
    impersonated_user,
    review_of,
    right_to_read_groups,
    rights_to_impersonate,
)

ACCOUNT = "system:serviceaccount:shop:viewer"


def test_rbac_review_names_the_user_and_the_group_resource_of_one_namespace() -> None:
    user = User("alice", ("shop", "system:authenticated"), "7", (("scopes", ("read",)),))
    assert review_of(user, right_to_read_groups("shop")) == {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": "alice",
            "uid": "7",
            "groups": ["shop", "system:authenticated"],
            "extra": {"scopes": ("read",)},
            "resourceAttributes": {
                "verb": "get",
                "group": "rota.dev",
                "resource": "consumergroups",
                "namespace": "shop",
                "name": "",
            },
        },
    }


def test_rbac_review_of_metrics_names_their_path() -> None:
    spec = review_of(User("alice"), READ_METRICS)["spec"]
    assert spec["nonResourceAttributes"] == {"verb": "get", "path": "/metrics"}


def test_rbac_right_is_worded_as_arguments_of_kubectl_auth_can_i() -> None:
    assert str(right_to_read_groups("shop")) == "get consumergroups.rota.dev in namespace shop"
    assert str(READ_ALL_GROUPS) == "get consumergroups.rota.dev"
    assert str(READ_METRICS) == "get /metrics"
    assert str(Right("impersonate", "users", name="bob")) == "impersonate users/bob"


def test_rbac_impersonation_needs_a_right_to_the_user_and_to_each_group() -> None:
    assert rights_to_impersonate("bob", ["ops"]) == [
        Right("impersonate", "users", name="bob"),
        Right("impersonate", "groups", name="ops"),
    ]
    of_account = Right("impersonate", "serviceaccounts", namespace="shop", name="viewer")
    assert rights_to_impersonate(ACCOUNT, []) == [of_account]


def test_rbac_impersonated_user_has_the_groups_that_the_api_server_adds() -> None:
    assert impersonated_user("bob", ["ops", "ops"]) == User("bob", ("ops", "system:authenticated"))
    assert impersonated_user("system:anonymous", []) == User("system:anonymous", ("system:unauthenticated",))
    invalid_account = "system:serviceaccount:shop:a:b"
    assert rights_to_impersonate(invalid_account, []) == [Right("impersonate", "users", name=invalid_account)]
    account_groups = ("system:serviceaccounts", "system:serviceaccounts:shop", "system:authenticated")
    assert impersonated_user(ACCOUNT, []) == User(ACCOUNT, account_groups)


def test_rbac_user_of_a_certificate_is_its_common_name_with_its_organizations() -> None:
    subject = ((("organizationName", "ops"),), (("organizationName", "dev"),), (("commonName", "alice"),))
    certificate = {"subject": subject, "notAfter": "Nov 29 12:00:00 2026 GMT"}
    noon = datetime(2026, 11, 29, 12, tzinfo=UTC).timestamp()
    assert user_of_certificate(certificate, noon) == User("alice", ("ops", "dev", "system:authenticated"))
    assert user_of_certificate(certificate, noon + 1) is None, "it expired after the TLS handshake verified it"
    assert user_of_certificate({**certificate, "subject": ((("organizationName", "ops"),),)}, noon) is None
    assert user_of_certificate({}, noon) is None
    assert user_of_certificate(None, noon) is None


def test_cache_of_rights_expires_and_drops_the_oldest() -> None:
    cache: ExpiringCache[str, bool] = ExpiringCache(30, 2)
    cache.put("a", value=False, now=0)
    assert cache.get("a", 29.9) is False
    assert cache.get("a", 30) is None
    cache.put("a", value=True, now=40)
    cache.put("b", value=True, now=41)
    cache.put("a", value=True, now=42)
    cache.put("c", value=True, now=43)
    assert [cache.get(key, 44) for key in "abc"] == [True, None, True]
    cache.put("d", value=True, now=100)
    assert len(cache) == 1, "expired entries are dropped"
