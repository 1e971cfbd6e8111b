"""Rows of a data set of the hub as its files have them.

`datasets` gives JSON and CSV the types that pyarrow and pandas infer: the text "2009-06-15" becomes a time, "01" a number, and
the class "None" a missing value. So JSON is decoded here, and a column of CSV is text unless the data set declares its type.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

from compressor.tasks.sources import needed

Row = dict[str, Any]
TRUTHS = {"True": 1, "true": 1, "TRUE": 1, "False": 0, "false": 0, "FALSE": 0}
"""Truth values as they are spelt in CSV."""


def rows_as_written(builder: Any, split: str) -> tuple[Iterable[Row], Mapping[str, Any]]:
    """(rows of a split, features by column) of a builder of `datasets`; without columns that hold images or sound.

    Raises what the library raises, and ValueError for JSON that is no rows.
    """
    kind = type(builder.config).__name__
    if kind == "JsonConfig":
        declared = builder.info.features or {}
        media = {name for name, feature in declared.items() if _has_media(feature)}
        rows = _json_rows(builder, split)
        read = ({name: _as_declared(declared.get(name), row[name]) for name in row if name not in media} for row in rows)
        return read, declared
    if kind == "CsvConfig":
        _keep_cells(builder, split)
    rows = builder.as_streaming_dataset(split)
    features = rows.features or {}
    kept = {name: feature for name, feature in features.items() if not _has_media(feature)}
    if len(kept) < len(features):
        # a column that is left out is never decoded; JSON in another one is
        rows = rows.decode(False).select_columns(list(kept)).cast(type(features)(kept))
    return rows, kept


def _has_media(feature: Any) -> bool:
    """Whether a feature is an image, sound or the like, or holds one."""
    if isinstance(feature, dict):
        return any(map(_has_media, feature.values()))
    if (inner := getattr(feature, "feature", None)) is not None:  # of a list
        return _has_media(inner)
    return hasattr(feature, "decode_example") and type(feature).__name__ != "Json"


def _keep_cells(builder: Any, split: str) -> None:
    """Let a builder of CSV read cells as they are written, in columns that are declared as text or classes, or not at all."""
    config, declared = builder.config, builder.info.features
    if config.sep == "\t" and config.quoting == csv.QUOTE_MINIMAL:
        config.quoting = csv.QUOTE_NONE  # as in every other .tsv file
    given = [] if config.na_values is None else config.na_values
    marks = [str(mark) for mark in (given if isinstance(given, list) else [given])]
    if declared is None:
        config.keep_default_na, config.na_values = False, ["", *marks]
        if config.decimal != "." or config.thousands or config.true_values or config.false_values:
            return  # the data set itself says how its numbers are read, which pandas does
        declared = dict.fromkeys(next(iter(builder.as_streaming_dataset(split)), ()))
    else:
        declared = {name: feature for name, feature in declared.items() if _is_text(feature) or _is_class(feature)}
    numbered = config.header is None and config.names is None  # to pandas the columns are then numbers
    config.converters = {
        int(name) if numbered and name.isdigit() else name: partial(_cell, feature, frozenset(marks))
        for name, feature in declared.items()
    }


def _cell(feature: Any, marks: frozenset[str], text: str) -> Any:
    """A cell as it is written, or the number of a class; missing where it is empty or one of the marks of missing cells."""
    return None if text in marks else _as_declared(feature, text or None)


def _json_rows(builder: Any, split: str) -> Iterator[Row]:
    """The rows of JSON files: one object a line, or one list of objects or texts a file. Raises ValueError for others."""
    files = builder.config.data_files
    if split not in files:
        raise ValueError(f"Bad split: {split}. Available splits: {[*map(str, files)]}")
    for file in files[split]:
        one = type(files)({split: type(files[split])([file], files[split].origin_metadata)})
        for row in _rows_of_file(builder, one, split):
            if not isinstance(row, dict):
                raise ValueError("a row of JSON that is not an object")
            yield row


def _rows_of_file(builder: Any, file: Any, split: str) -> Iterator[Any]:
    """What one file, the only one of a split's, holds in its lines or in its list."""
    config = builder.config
    text = needed("datasets.packaged_modules.text.text", "a data set of the hub", "")

    def texts(sample: str) -> Iterator[str]:
        reader = text.Text(
            data_files=file,
            base_path=builder.base_path,
            token=builder.token,
            encoding="utf-8-sig" if config.encoding == "utf-8" else config.encoding,  # without a byte order mark
            encoding_errors=config.encoding_errors,
            sample_by=sample,
        )
        return (row["text"] for row in reader.as_streaming_dataset(split) if row["text"].strip())

    if config.field is None:
        lines = texts("line")
        if _is_object(first := next(lines, "")):
            return map(json.loads, chain([first], lines))
    return (row for text in texts("document") for row in _listed(json.loads(text), config.field))


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _listed(document: Any, field: str | None) -> Iterator[Any]:
    """The rows in a document, or in a field of it."""
    rows = document if field is None else document[field]
    if not isinstance(rows, list):
        raise ValueError("JSON that is neither one object a line nor a list of objects")
    return ({"text": row} if isinstance(row, str) else row for row in rows)


def _as_declared(feature: Any, value: Any) -> Any:
    """A value of JSON as its data set declares it: the name of a class is its number, and what is declared as text is text.

    Raises ValueError for a class that is not declared.
    """
    if value is None:
        return None
    if isinstance(feature, dict) and isinstance(value, dict):
        return {name: _as_declared(feature.get(name), inner) for name, inner in value.items()}
    if isinstance(value, list) and hasattr(feature, "feature"):
        return [_as_declared(feature.feature, inner) for inner in value]
    if _is_class(feature) and isinstance(value, str | int | float):
        return _class_number(feature, value)
    return json.dumps(value, ensure_ascii=False) if _is_text(feature) and not isinstance(value, str) else value


def _class_number(feature: Any, value: str | float) -> int | None:
    """The number of a class, given by its name or by that number, also as a truth value or with a decimal point: pandas writes
    1.0 where other labels of the column are missing, and those as NaN. Raises ValueError for a class that is not declared."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, str):
        with suppress(ValueError):
            return feature.encode_example(value)
    number = _whole(value)
    return feature.encode_example(str(value) if number is None else number)


def _whole(value: str | float) -> int | None:
    """The whole number that a value is, or that a text spells."""
    with suppress(ValueError, OverflowError):
        number = float(TRUTHS.get(value, value) if isinstance(value, str) else value)
        return int(number) if number.is_integer() else None
    return None


def _is_class(feature: Any) -> bool:
    return type(feature).__name__ == "ClassLabel"


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")
