"""Tables of pandas, which is imported when one is asked for."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    import pandas


def by_query(columns: Mapping[str, Tensor]) -> pandas.DataFrame:
    """DataFrame with a row for each query and a named column for each vector (queries,)."""
    try:
        table = import_module("pandas").DataFrame({name: column.tolist() for name, column in columns.items()})
    except ImportError:
        raise ImportError("to_pandas needs pandas: pip install pandas") from None
    return table.rename_axis(index="query")
