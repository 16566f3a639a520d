"""Check that the sidecar can be injected into a pod template; the API server validates everything else."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from rota.model import single_line
from rota.spec import InvalidSpecError


class _Named(Struct):
    name: str


class _TemplateMount(Struct, rename="camel"):
    name: str
    mount_path: str


class _Hook(Struct, rename="camel"):
    http_get: dict[str, Any] | None = None


class _Lifecycle(Struct, rename="camel"):
    pre_stop: _Hook | None = None


class _TemplateContainer(Struct, rename="camel"):
    name: str
    lifecycle: _Lifecycle | None = None
    volume_mounts: list[_TemplateMount] | None = None


class _Metadata(Struct):
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class _TemplatePodSpec(Struct, rename="camel"):
    containers: Annotated[list[_TemplateContainer], Meta(min_length=1)]
    init_containers: list[_TemplateContainer] | None = None
    volumes: list[_Named] | None = None
    termination_grace_period_seconds: int | None = None


class _Template(Struct):
    spec: _TemplatePodSpec
    metadata: _Metadata | None = None


def check_template(template: Mapping[str, Any]) -> None:
    """Raise an InvalidSpecError that names the field if the sidecar cannot be injected into a template."""
    try:
        msgspec.convert(template, _Template)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")  # the path is `$.spec.containers[0].name`, for example
        where = path.strip("`").rpartition("$")[2]
        text = f"spec.template{where}: {message[0].lower()}{message[1:]}".replace("`", "")
        raise InvalidSpecError(single_line(text)) from None
