"""Reads the rows of a Delta table's version with pyarrow, and names a damaged or missing file."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.dataset as ds

from rota.object_store import ObjectStore
from rota.pipeline.lake.reading.log_reader import LogReader, first_line
from rota.pipeline.lake.storage import is_damage, native_filesystem, storage_errors

_MISSING_FILE = re.compile(r"(?:Object at location |local file ')(.*?)(?: not found|'\.)")


def open_rows(store: ObjectStore, name: str, version: int) -> ds.Dataset:
    """Return a dataset of a version, with the columns that are stored; raise ValueError if its log is damaged."""
    reader = LogReader(store, name)
    table = reader.load(version)
    assert table is not None  # noqa: S101 - `load` returns None only if no version is given
    return table.to_pyarrow_dataset(filesystem=native_filesystem(reader.uri))


def collect_rows(
    dataset: ds.Dataset, uri: str, columns: Sequence[str] | None = None, where: ds.Expression | None = None
) -> pa.Table:
    """Return the rows that match an expression; raise ValueError with the path of a damaged file."""
    with data_file_errors(uri):
        try:
            return dataset.to_table(columns=columns, filter=where)
        except Exception as error:
            if is_damage(error):  # pyarrow rarely names the file
                _check_files(dataset, uri)
            raise


def _check_files(dataset: ds.Dataset, uri: str) -> None:
    """Raise ValueError for the first file that is damaged."""
    for fragment in dataset.get_fragments():
        with data_file_errors(f"{uri}/{fragment.path}"):
            fragment.to_table(schema=dataset.schema, use_threads=False)


@contextmanager
def data_file_errors(uri: str) -> Iterator[None]:
    """Turn the errors of reading a data file, or a table with data files, into ValueError or StoreError."""
    try:
        with storage_errors(uri):
            try:
                yield
            except Exception as error:
                if is_damage(error):
                    sentence = f"{uri} is damaged; restore it, or recreate the lake: {first_line(error)}"
                    raise ValueError(sentence) from error
                raise
    except FileNotFoundError as error:
        path = _MISSING_FILE.search(str(error))
        raise ValueError(missing_file_sentence(path[1] if path else uri)) from error


def missing_file_sentence(path: str) -> str:
    """Return the sentence for users about a missing data file of a version."""
    return f"{path} is missing; restore it, read a newer snapshot, or recreate the lake from the journal"
