"""Parses names of groups on the command line, and finds the namespace of a name without one."""

from contextlib import suppress
from dataclasses import dataclass, field

from rota.kube.client.login.kubeconfig import POD_ACCOUNT, LoginError, LoginOptions, namespace_of_context
from rota.model import single_line
from rota.spec.names import is_dns_label, is_dns_subdomain

DEFAULT_NAMESPACE = "default"


@dataclass(frozen=True)
class Scope:
    """The namespace of a command: the one from --namespace, or else the one that kubectl would use."""

    namespace_option: str | None = None
    login: LoginOptions = field(default_factory=LoginOptions)

    @property
    def namespace(self) -> str:
        """The namespace."""
        if self.namespace_option is None:
            return self._default_namespace()
        if not is_dns_label(self.namespace_option):
            problem = f"--namespace {single_line(self.namespace_option, 100)!r} is not a valid name"
            raise ValueError(f"{problem}; give one that kubectl get namespaces shows")
        return self.namespace_option

    def parse_group(self, text: str) -> tuple[str, str]:
        """Parse the name of a group, NAME or NAMESPACE/NAME; return its namespace and its name."""
        namespace, slash, name = text.rpartition("/")
        if not is_dns_subdomain(name) or (slash and not is_dns_label(namespace)):
            hint = "kubectl get consumergroups -A shows them"
            problem = f"GROUP {single_line(text, 100)!r} is not a valid name"
            raise ValueError(f"{problem}; write NAME or NAMESPACE/NAME, {hint}")
        if slash and self.namespace_option not in {None, namespace}:
            problem = f"GROUP {text} is in another namespace than --namespace {self.namespace_option}"
            raise ValueError(f"{problem}; remove one of them")
        return namespace or self.namespace, name

    def _default_namespace(self) -> str:
        """Return the pod's own namespace, or that of the kubeconfig's context.

        Unreadable files are ignored: the login, which reads them again, reports the error.
        """
        namespace = ""
        with suppress(OSError, LoginError, UnicodeDecodeError):
            if self.login.uses_pod_account:
                namespace = (POD_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
            else:
                namespace = namespace_of_context(self.login.files, self.login.context)
        return namespace if is_dns_label(namespace) else DEFAULT_NAMESPACE
