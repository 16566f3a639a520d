"""Status of a Deployment: how far a rollout has progressed."""

from enum import Enum, auto

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from rota.model import single_line


class RolloutState(Enum):
    """How far a Deployment's pods follow its newest template."""

    COMPLETE = auto()
    UNDER_WAY = auto()
    FAILED = auto()  # no progress for progressDeadlineSeconds


class DeploymentCondition(Struct, frozen=True):
    """A condition of a Deployment."""

    type: str
    reason: str = ""
    message: str = ""


class DeploymentStatus(Struct, frozen=True, rename="camel"):
    """The progress of a rollout, as the Deployment controller reports it."""

    observed_generation: int = 0
    replicas: int = 0
    updated_replicas: int = 0
    conditions: tuple[DeploymentCondition, ...] = ()

    def __post_init__(self) -> None:
        """Drop unused conditions, and the end of a long message."""
        kept = [condition for condition in self.conditions if condition.type == "Progressing"]
        shortened = tuple(replace(condition, message=single_line(condition.message)) for condition in kept)
        force_setattr(self, "conditions", shortened)

    @property
    def progressing(self) -> DeploymentCondition:
        """The condition Progressing; if the controller sets none, as without a deadline, success is assumed."""
        return self.conditions[0] if self.conditions else DeploymentCondition("Progressing", "NewReplicaSetAvailable")
