"""Rows of a Parquet file, checked as those of a text file are: bounded memory, and the number of the row in each error."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import UserError
from compressor.tasks.listing import require_distinct
from compressor.tasks.sources import needed
from compressor.tasks.sources.content import DATA, data_bytes
from compressor.text_files import too_large

BATCH = 1024
"""Rows that are decoded at once."""
LEAST_OF_A_CELL = 2
"""Bytes of a cell and its separator in a text file: by them a file is refused whose equal values are stored once."""


def parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, cells by column) of every row; dates, decimals and binary values in UTF-8 as text.

    Raises UserError E907 (pyarrow is missing), E201, E202, E215, E203 (not UTF-8), E210 (not Parquet), E216 (a column
    twice).
    """
    arrow = needed("pyarrow", "a Parquet file", str(path))
    parquet = needed("pyarrow.parquet", "a Parquet file", str(path))
    content = data_bytes(path)
    if not content:
        raise UserError("E204", "the file is empty", "Give at least one row", str(path))
    with _readable(arrow, path):
        buffer = arrow.BufferReader(content)
        schema = parquet.read_schema(buffer)
        require_distinct(schema.names, path)
        # strings stay as they are stored, each once, until their size is known
        texts = [field.name for field in schema if _is_text(arrow, field.type)]
        file = parquet.ParquetFile(buffer, read_dictionary=texts)
    facts, size, first = file.metadata, 0, 1
    stored = sum(facts.row_group(group).total_byte_size for group in range(facts.num_row_groups))
    if (least := max(stored, LEAST_OF_A_CELL * facts.num_rows * len(schema))) > DATA.most:
        raise too_large(least, DATA, str(path))
    batches = file.iter_batches(batch_size=BATCH)
    while True:
        with _readable(arrow, path):
            batch = next(batches, None)
            if batch is None:
                return
            size += sum(_size(arrow, column) for column in batch.columns)
            if size > DATA.most:
                raise too_large(size, DATA, str(path))
            columns = [_cells(arrow, column, first, path) for column in batch.columns]
        for number, cells in enumerate(zip(*columns, strict=True), start=first):
            yield number, dict(zip(schema.names, cells, strict=True))
        first += batch.num_rows


@contextmanager
def _readable(arrow: Any, path: Path) -> Iterator[None]:
    """Context in which pyarrow's errors are those of a damaged file."""
    try:
        yield
    except (arrow.ArrowException, OSError, ValueError, OverflowError) as error:
        what = (
            f"not a readable Parquet file ({str(error).splitlines()[0]:.80})" if str(error) else "not a readable Parquet file"
        )
        raise UserError("E210", what, "Write the file again, or copy it again", str(path)) from None


def _is_text(arrow: Any, kind: Any) -> bool:
    return arrow.types.is_string(kind) or arrow.types.is_large_string(kind)


def _size(arrow: Any, column: Any) -> int:
    """Bytes of a column's values, each counted as often as it occurs."""
    if not arrow.types.is_dictionary(column.type) or not _is_text(arrow, column.type.value_type):
        return column.nbytes
    compute = needed("pyarrow.compute", "a Parquet file", "")
    return compute.sum(compute.take(compute.binary_length(column.dictionary), column.indices)).as_py() or 0


def _cells(arrow: Any, column: Any, first: int, path: Path) -> list[Any]:
    """The values of a column, whose first row has the number `first`. Raises UserError E203."""
    if arrow.types.is_timestamp(column.type):  # Python has no nanoseconds
        column = column.cast(arrow.string())
    try:
        values = column.to_pylist()
    except UnicodeDecodeError:
        row = first + next(number for number in range(len(column)) if not _decodes(column[number]))
        raise UserError("E203", "not UTF-8", "Write the column as text in UTF-8", f"{path}:{row}") from None
    if arrow.types.is_float32(column.type) or arrow.types.is_float16(column.type):
        return [shortest(value, np.float32 if arrow.types.is_float32(column.type) else np.float16) for value in values]
    return [_plain(value) for value in values]


def shortest(value: float | None, kind: type[np.floating]) -> float | None:
    """A number of single or half precision (`kind`) without the digits that it has in double precision alone: 3.8, not
    3.7999999."""
    return None if value is None else float(str(kind(value)))


def _decodes(cell: Any) -> bool:
    try:
        cell.as_py()
    except UnicodeDecodeError:
        return False
    return True


def text_of(value: bytes) -> str | None:
    """The text of bytes in UTF-8, None for others. Hive, Impala and older versions of Spark write texts as binary columns."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _plain(value: Any) -> Any:
    """A value as a text file would have it: dates, decimals and bytes that are UTF-8 are text, also in lists. Other bytes stay
    what they are: a column that no task reads may hold them, and no kind of task takes them for text or for a label."""
    if isinstance(value, decimal.Decimal):
        return format(value, "f")
    if isinstance(value, bytes):
        text = text_of(value)
        return value if text is None else text
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value.isoformat() if isinstance(value, datetime.date | datetime.time) else value
