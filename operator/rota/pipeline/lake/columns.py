"""Compares a table's stored columns with the columns that this version of Rota declares."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType

from rota.sentences import join_names


@dataclass(frozen=True)
class ColumnDifferences:
    """How stored columns differ from the declared ones; nested columns are named by their path: topics.value.ids."""

    missing: list[str] = field(default_factory=list)  # declared, not stored
    unknown: list[str] = field(default_factory=list)  # stored, not declared
    conflicting: list[str] = field(default_factory=list)  # such as "lag is double instead of bigint"

    def check_readable(self, table: str) -> None:
        """Raise ValueError if a column has another type than the declared one."""
        if self.conflicting:
            raise ValueError(
                f"{table} was written by another version of Rota: {join_names(self.conflicting)}; "
                "use that version, or recreate the lake from the journal"
            )

    def check_writable(self, table: str) -> None:
        """Raise ValueError if rows with the declared columns cannot be written."""
        self.check_readable(table)
        if self.unknown:
            raise ValueError(
                f"{table} has columns that this version of Rota does not know: {join_names(self.unknown)}; "
                "a newer version has added them: use that one to write"
            )
        if self.missing:
            raise ValueError(f"{table} lacks {join_names(self.missing)}; `rota pipeline ingest` adds missing columns")


def compare_columns(declared: StructType, stored: StructType) -> ColumnDifferences:
    """Return the differences of columns by name; order and nullability are not compared."""
    differences = ColumnDifferences()
    _compare(declared, stored, "", differences)
    return differences


def find_missing_fields(declared: StructType, stored: StructType) -> list[StructField]:
    """Return the declared top-level columns that the stored schema lacks, wholly or in part."""
    missing: set[str] = set()
    for name in compare_columns(declared, stored).missing:
        missing.add(name.partition(".")[0])
    return [column for column in declared.fields if column.name in missing]


def _compare(declared: DataType, stored: DataType, name: str, differences: ColumnDifferences) -> None:
    if isinstance(declared, StructType) and isinstance(stored, StructType):
        _compare_fields(declared, stored, name, differences)
    elif type(declared) is type(stored) and isinstance(declared, ArrayType | MapType):
        for (part, declared_part), (_, stored_part) in zip(_inner_types(declared), _inner_types(stored), strict=True):
            _compare(declared_part, stored_part, f"{name}.{part}", differences)
    elif declared.simpleString() != stored.simpleString():
        differences.conflicting.append(f"{name} is {stored.simpleString()} instead of {declared.simpleString()}")


def _compare_fields(declared: StructType, stored: StructType, name: str, differences: ColumnDifferences) -> None:
    prefix = f"{name}." if name else ""
    declared_types = {column.name: column.dataType for column in declared}
    stored_types = {column.name: column.dataType for column in stored}
    for column in declared_types:
        if column not in stored_types:
            differences.missing.append(prefix + column)
    for column in stored_types:
        if column not in declared_types:
            differences.unknown.append(prefix + column)
    for column, declared_type in declared_types.items():
        if column in stored_types:
            _compare(declared_type, stored_types[column], prefix + column, differences)


def _inner_types(kind: DataType) -> Iterator[tuple[str, DataType]]:
    """Yield the name and type of the elements of a list, or of the keys and values of a map."""
    if isinstance(kind, ArrayType):
        yield "element", kind.elementType
    if isinstance(kind, MapType):
        yield "key", kind.keyType
        yield "value", kind.valueType
