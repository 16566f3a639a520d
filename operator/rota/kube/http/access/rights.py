"""Users, the rights that their requests need, and a cache for the results of reviews; without I/O."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from rota.kube.client.paths import GROUPS
from rota.spec.names import is_dns_label, is_dns_subdomain

K = TypeVar("K")
V = TypeVar("V")

AUTHENTICATED = "system:authenticated"
ANONYMOUS = "system:anonymous"
_SERVICE_ACCOUNT = "system:serviceaccount:"


class User(NamedTuple):
    """A user as the API server identifies it."""

    name: str
    groups: tuple[str, ...] = ()
    uid: str = ""
    extra: tuple[tuple[str, tuple[str, ...]], ...] = ()


class Right(NamedTuple):
    """A verb on objects of a resource, or on a URL path if `path` is set."""

    verb: str
    resource: str = ""
    api_group: str = ""
    namespace: str = ""  # empty: all namespaces, or a cluster-scoped resource
    name: str = ""  # empty: all objects
    path: str = ""

    def __str__(self) -> str:
        """Format it like the arguments of `kubectl auth can-i`."""
        if self.path:
            return f"{self.verb} {self.path}"
        resource = f"{self.resource}.{self.api_group}" if self.api_group else self.resource
        named = f"{resource}/{self.name}" if self.name else resource
        return f"{self.verb} {named}" + (f" in namespace {self.namespace}" if self.namespace else "")


READ_METRICS = Right("get", path="/metrics")
READ_ALL_GROUPS = Right("get", GROUPS, "rota.dev")


def right_to_read_groups(namespace: str) -> Right:
    """Return the right to read the groups of a namespace."""
    return READ_ALL_GROUPS._replace(namespace=namespace)


def rights_to_impersonate(user: str, groups: Iterable[str]) -> list[Right]:
    """Return the rights that the API server requires of a client that impersonates a user with these groups."""
    account = service_account_of(user)
    if account:
        namespace, name = account
        of_user = Right("impersonate", "serviceaccounts", namespace=namespace, name=name)
    else:
        of_user = Right("impersonate", "users", name=user)
    return [of_user, *(Right("impersonate", "groups", name=group) for group in groups)]


def service_account_of(user: str) -> tuple[str, str] | None:
    """Return the namespace and name of a ServiceAccount; None for another user."""
    namespace, colon, name = user.removeprefix(_SERVICE_ACCOUNT).partition(":")
    is_account = user.startswith(_SERVICE_ACCOUNT) and colon and is_dns_label(namespace) and is_dns_subdomain(name)
    return (namespace, name) if is_account else None


def impersonated_user(user: str, groups: Sequence[str]) -> User:
    """Return the impersonated user with these groups, and those that the API server adds to them."""
    account = service_account_of(user)
    implied = ["system:unauthenticated" if user == ANONYMOUS else AUTHENTICATED]
    if account and not groups:
        implied = ["system:serviceaccounts", f"system:serviceaccounts:{account[0]}", AUTHENTICATED]
    return User(user, tuple(dict.fromkeys([*groups, *implied])))


def review_of(user: User, right: Right) -> Mapping[str, Any]:
    """Return the SubjectAccessReview that asks whether a user has a right."""
    if right.path:
        attributes = {"nonResourceAttributes": {"verb": right.verb, "path": right.path}}
    else:
        of_resource = {"verb": right.verb, "group": right.api_group, "resource": right.resource}
        attributes = {"resourceAttributes": {**of_resource, "namespace": right.namespace, "name": right.name}}
    subject = {"user": user.name, "groups": list(user.groups), "uid": user.uid, "extra": dict(user.extra)}
    return {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": {**subject, **attributes}}


class ExpiringCache(Generic[K, V]):
    """Cache with a time to live; above its limit it drops the oldest entries."""

    def __init__(self, seconds: float, limit: int) -> None:
        """`limit` is the maximum number of entries, at least 1."""
        self._seconds = seconds
        self._limit = limit
        self._entries: dict[K, tuple[V, float]] = {}  # the oldest first

    def get(self, key: K, now: float) -> V | None:
        """Return the value; None if it is absent or has expired."""
        absent = (None, now)  # counts as expired
        value, expires = self._entries.get(key, absent)
        return value if expires > now else None

    def put(self, key: K, value: V, now: float) -> None:
        """Store a value, and drop expired entries."""
        self._entries.pop(key, None)
        self._entries[key] = (value, now + self._seconds)
        # The loop ends at the new entry at the latest: it is the last one, is not expired, and the limit is at least 1.
        while len(self._entries) > self._limit or self._oldest_expires() <= now:
            del self._entries[next(iter(self._entries))]

    def _oldest_expires(self) -> float:
        _, expires = next(iter(self._entries.values()))
        return expires

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)
