"""Rows from files of this machine."""

from __future__ import annotations

import csv
import gzip
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from datasets import Dataset, Features, Json, load_dataset, load_from_disk
from datasets.utils import disable_progress_bars
from pandas.api.types import is_numeric_dtype
from pandas.errors import ParserWarning

from basis_rl.names import file_format


def load_saved(folder: str, split: str) -> Dataset:
    """A folder of `save_to_disk`, of one dataset or of several splits."""
    # Reading a file takes a moment: bars would only break up the log.
    disable_progress_bars()
    loaded = load_from_disk(folder)
    if isinstance(loaded, Dataset):
        return loaded
    if split not in loaded:
        raise ValueError(f"dataset_train_split, dataset_test_split: '{folder}' has no '{split}', only {list(loaded)}.")
    return loaded[split]


def load_files(name: str, paths: Sequence[Path]) -> Dataset:
    """The rows of files of one format.

    Raises:
        ValueError: they are of several, are empty, or cannot be read, with the reason and where it says so the place.
    """
    formats = {str(file_format(str(path))) for path in paths}
    if len(formats) > 1:
        raise ValueError(f"dataset_name: '{name}' are files of several formats, {', '.join(sorted(formats))}.")
    (kind,) = formats
    empty = not any(_first_line(path) for path in paths)
    try:
        disable_progress_bars()
        with warnings.catch_warnings():
            warnings.simplefilter("error", ParserWarning)
            if kind == "csv":
                return _load_csv(paths)
            rows = load_dataset(kind, data_files=list(map(str, paths)), split="train")
            # The loader makes times of texts that look like dates, and numbers of 64 bits of long ones.
            changed = {name: Json() for name in rows.features if kind == "json" and _may_have_changed(rows, name)}
            if changed:
                features = Features({**rows.features, **changed})
                rows = load_dataset(kind, data_files=list(map(str, paths)), split="train", features=features)
            return rows
    except Exception as error:
        if empty or "corresponds to no data" in str(error):
            raise ValueError(f"dataset_name: the file '{name}' holds no rows.") from error
        reason: BaseException = error
        # The error of datasets itself says only that something failed.
        while reason.__cause__ is not None:
            reason = reason.__cause__
        ending = paths[0].name.removesuffix(".gz").rpartition(".")[2]
        said = f"{ending} ({type(reason).__name__}: {' '.join(str(reason).split())[:300]})"
        raise ValueError(f"dataset_name: '{name}' cannot be read as {said}.") from error


def _may_have_changed(rows: Dataset, column: str) -> bool:
    """Whether cells of a column may be other than the file has them."""
    kind = repr(rows.features[column])
    return "timestamp" in kind or ("float64" in kind and any(map(_has_long_number, rows[column])))


def _has_long_number(cell: Any) -> bool:
    if isinstance(cell, (list, dict)):
        return any(map(_has_long_number, cell.values() if isinstance(cell, dict) else cell))
    return isinstance(cell, float) and abs(cell) >= 2**53


def _load_csv(paths: Sequence[Path]) -> Dataset:
    """Rows of texts; a column has numbers or truth values only if these, written out, are the same texts again.

    Else pandas would make 7 of a gold 007, and nothing of None.
    """
    # Without index_col, pandas takes the first column for row labels where every row has a field more than the header.
    layout: dict[str, Any] = {"sep": _separator(_first_line(paths[0])), "index_col": False, "low_memory": False}
    layout |= {"keep_default_na": False, "na_values": [""]}
    rows = pd.concat([pd.read_csv(path, dtype=str, **layout) for path in paths])
    typed = pd.concat([pd.read_csv(path, **layout) for path in paths])
    for column in rows:
        if is_numeric_dtype(typed[column]) and (typed[column].astype(str) == rows[column]).all():
            rows[column] = typed[column]
    return Dataset.from_pandas(rows, preserve_index=False)


def _first_line(path: Path) -> str:
    """The first line that is not blank, of at most a million bytes."""
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
        return file.read(1 << 20).decode(errors="replace").strip().partition("\n")[0]


def _separator(header: str) -> str:
    """What divides the header of a .csv file into most columns."""
    return max(",;\t", key=lambda each: len(next(csv.reader([header], delimiter=each), [])))
