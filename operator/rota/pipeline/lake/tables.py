"""All tables of a lake, declared once, and the lake itself: its tables, snapshots and ingest runs."""

from datetime import date, datetime
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DateType,
    IntegerType,
    LongType,
    StringType,
    StructType,
    TimestampType,
)

from rota.object_store import FOLDER_SCHEME, open_store, parse_location
from rota.pipeline.common import schemas
from rota.pipeline.lake.data_files import TableSpec
from rota.pipeline.lake.runs import RunStore
from rota.pipeline.lake.snapshots import LakeSnapshot, SnapshotStore
from rota.pipeline.lake.storage import check_root
from rota.pipeline.lake.table import Table, TableHead

OFFSET_BUCKETS = 16  # partitions of a day of lake/offsets, by a hash of the group; a task reads one bucket


def _with_columns(schema: StructType, **columns: DataType) -> StructType:
    extended = StructType(list(schema.fields))
    for name, kind in columns.items():
        extended.add(name, kind)
    return extended


_FILES = schemas.table_schema(
    key=StringType(),
    etag=StringType(),
    size_bytes=LongType(),
    run=LongType(),
    lines=LongType(),
    first_at=TimestampType(),  # time of the first record; null without a record
    last_at=TimestampType(),
    date=DateType(),
)
# The only columns of lake/offsets with a dictionary in Parquet. Offsets are nearly all different: dictionaries of them
# would cost time and space.
_OFFSETS_DICTIONARIES = (
    "group",
    "topics.key_value.key",
    "topics.key_value.value.key_value.key",
    "verdicts.key_value.key",
)
_OFFSETS = _with_columns(schemas.JOURNAL_SCHEMAS["offsets"], digest=BinaryType(), bucket=IntegerType())


# `digest` is the first 16 bytes of the SHA-256 of a journal line; rows are compared by it.
def _record_table(kind: str, schema: StructType) -> TableSpec:
    if kind == "offsets":
        return TableSpec(
            "lake/offsets", _OFFSETS, ("date", "bucket"), order=("group", "at"), dictionaries=_OFFSETS_DICTIONARIES
        )
    order = ("group", "at") if "group" in schema.fieldNames() else ("at",)
    return TableSpec(f"lake/{kind}", _with_columns(schema, digest=BinaryType()), order=order)


RECORD_TABLES = {kind: _record_table(kind, schema) for kind, schema in schemas.JOURNAL_SCHEMAS.items()}
QUARANTINE_TABLE = TableSpec("lake/quarantine", _with_columns(schemas.QUARANTINE, digest=BinaryType()))
FILES_TABLE = TableSpec("lake/files", _FILES)  # ledger of the ingested segments of the journal
MARTS = (
    TableSpec("marts/rollup", _with_columns(schemas.ROLLUP, date=DateType()), order=("group", "hour")),
    TableSpec("marts/intervals", schemas.INTERVALS, partitions=(), order=("group", "since")),
    TableSpec("marts/violations", schemas.VIOLATIONS, partitions=(), order=("group", "since")),
    TableSpec("marts/results", schemas.RESULTS, partitions=(), order=("group", "policy")),
    TableSpec("marts/series", schemas.SERIES, partitions=(), order=("group", "policy", "at")),
    TableSpec("marts/costs", schemas.COSTS, partitions=(), order=("group", "rank")),
    TableSpec("marts/chosen", schemas.CHOSEN, partitions=(), order=("group",)),
    TableSpec("marts/backtest", schemas.BACKTEST, partitions=(), order=("group",)),
)
# Ingest appends to these tables, in commits with the number of the run.
_INGESTED = (*RECORD_TABLES.values(), QUARANTINE_TABLE, FILES_TABLE)
INGESTED_TABLES = tuple(spec.name for spec in _INGESTED)
TABLES = {spec.name: spec for spec in (*_INGESTED, *MARTS)}


class Lake:
    """A lake below a root (folder, or prefix in a bucket); raises ValueError if an early version of Rota wrote it."""

    def __init__(self, uri: str) -> None:
        self.store = open_store(uri)
        self.uri = self.store.uri  # a URI, or the absolute path of a folder
        check_root(self.uri)
        self._check_layout()
        self.snapshots = SnapshotStore(self.store)
        self.runs = RunStore(self.store)
        self._tables: dict[str, Table] = {}

    def table(self, name: str) -> Table:
        """Return a table by its name, such as lake/offsets: always the same one, which loads each version once."""
        if name not in self._tables:
            self._tables[name] = Table(self.store, TABLES[name])
        return self._tables[name]

    def snapshot(self, number: int | None = None, as_of: datetime | None = None) -> LakeSnapshot:
        """Return a snapshot by number or time, else the newest; raise ValueError if the lake has no such snapshot."""
        return self.snapshots.choose(number, as_of)

    def read(self, spark: SparkSession, snapshot: LakeSnapshot, name: str, since: date | None = None) -> DataFrame:
        """Return the rows of a table in a snapshot, or only rows of the day `since` and later days."""
        return self.table(name).read(spark, snapshot.version(name), since)

    def head(self, snapshot: LakeSnapshot, name: str) -> TableHead:
        """Return the newest version of a table, before a write to it, and the last ingest run in it.

        Raise ValueError if the snapshot has a later version: the log has lost commits, and a write would create their
        versions again with other rows.
        """
        head = self.table(name).head()
        published = snapshot.version(name)
        if published is not None and (head.version is None or head.version < published):
            newest = "it has no log" if head.version is None else f"the newest in its log is {head.version}"
            raise ValueError(
                f"{self.uri}/{name} lacks version {published} of snapshot {snapshot.number}: {newest}; restore "
                f"{name}/_delta_log, or recreate the lake from the journal"
            )
        return head

    def add_missing_columns(self) -> None:
        """Add the declared columns to all tables that lack them; only ingest adds columns."""
        for name in TABLES:
            self.table(name).add_missing_columns()

    def _check_layout(self) -> None:
        """Raise ValueError if the root is inside a lake, or is a lake of an early version, which wrote only folders."""
        if parse_location(self.uri).scheme != FOLDER_SCHEME:
            return
        parent = Path(self.uri).parent
        if (parent / "_rota").is_dir():
            raise ValueError(f"{self.uri} is inside the lake {parent}; name that one")
        for name in ("_checkpoint", *schemas.JOURNAL_SCHEMAS, "quarantine"):
            if Path(self.uri, name).is_dir():
                raise ValueError(
                    f"{self.uri} is a lake of an earlier version of Rota (it has {name}/); make it anew in an empty "
                    "folder: rota pipeline ingest NEW_FOLDER --journal JOURNAL"
                )
