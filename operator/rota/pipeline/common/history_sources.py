"""Sources of histories: recorded by an operator, or generated. The namespace of a generated group tells its source."""

from enum import StrEnum

GENERATED_PREFIX = "synthetic-"
_RATES_PREFIX = "synthetic-rates-"
NAMESPACE_COUNT = 97  # namespaces of a generated journal: few, since in a real cluster many groups share one


class HistorySource(StrEnum):
    """Source of a group's history."""

    REAL = "real"  # an operator recorded it
    RATES = "rates"  # generated members; messages arrive at rates that were recorded elsewhere
    SYNTHETIC = "synthetic"  # generated members and rates


def generated_group_name(number: int, *, has_recorded_rates: bool) -> str:
    """Return namespace and name of a generated group, from which `source_of` gets its source."""
    prefix = _RATES_PREFIX if has_recorded_rates else GENERATED_PREFIX
    return f"{prefix}{number % NAMESPACE_COUNT}/group-{number:05d}"


def source_of(group: str) -> HistorySource:
    """Return the source of a group's history."""
    if group.startswith(_RATES_PREFIX):
        return HistorySource.RATES
    return HistorySource.SYNTHETIC if group.startswith(GENERATED_PREFIX) else HistorySource.REAL
