"""Names of groups on the command line, and the namespace of a name without one."""

from contextlib import suppress
from dataclasses import dataclass, field

from rota.kube.client.login.kubeconfig import POD_ACCOUNT, LoginError, LoginOptions, namespace_of_context
from rota.model import plain
from rota.spec.names import is_dns_label, is_dns_subdomain

DEFAULT = "default"


@dataclass(frozen=True)
class Scope:
    """The namespace of a command: the one from --namespace, or else the one that kubectl would use."""

    given: str | None = None
    login: LoginOptions = field(default_factory=LoginOptions)

    @property
    def namespace(self) -> str:
        """The namespace."""
        if self.given is None:
            return self._default()
        if not is_dns_label(self.given):
            problem = f"--namespace {plain(self.given, 100)!r} is no name"
            raise ValueError(f"{problem}; give one that kubectl get namespaces shows")
        return self.given

    def group(self, text: str) -> tuple[str, str]:
        """Parse the name of a group, NAME or NAMESPACE/NAME; return its namespace and its name."""
        within, slash, name = text.rpartition("/")
        if not is_dns_subdomain(name) or (slash and not is_dns_label(within)):
            hint = "kubectl get consumergroups -A shows them"
            raise ValueError(f"GROUP {plain(text, 100)!r} is no name; write NAME or NAMESPACE/NAME, {hint}")
        if slash and self.given not in {None, within}:
            problem = f"GROUP {text} is in another namespace than --namespace {self.given}"
            raise ValueError(f"{problem}; leave one of them out")
        return within or self.namespace, name

    def _default(self) -> str:
        """Return the pod's own namespace, or that of the kubeconfig's context; the login reports errors later."""
        namespace = ""
        with suppress(OSError, LoginError, UnicodeDecodeError):
            if self.login.uses_pod_account:
                namespace = (POD_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
            else:
                namespace = namespace_of_context(self.login.files, self.login.context)
        return namespace if is_dns_label(namespace) else DEFAULT
