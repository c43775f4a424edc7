"""A run's records as a pandas ``DataFrame``. pandas is optional, so it is imported only when it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchprof.analyze.records import records_of
from torchprof.errors import TorchprofError
from torchprof.run.run import Run

if TYPE_CHECKING:
    import pandas


def dataframe(run: Run, of: str = "layers") -> pandas.DataFrame:
    """The records of ``torchprof.analyze.records``. Raises TorchprofError for unknown ones, and without pandas.

    Columns have pandas's nullable types ``Int64`` and ``string``, so unknown values are ``pandas.NA``. In a NumPy
    column they would be 0, or would make all values floats.
    """
    columns, records = records_of(run, of)
    try:
        import pandas
    except ImportError as error:
        raise TorchprofError("A data frame needs pandas, which is not installed here: pip install pandas") from error
    values = list(zip(*records)) or [()] * len(columns)
    # pandas would use pyarrow for text if it is installed, and pyarrow rejects lone surrogates.
    types = {str: pandas.StringDtype("python"), int: pandas.Int64Dtype()}
    return pandas.DataFrame(
        {name: pandas.array(list(column), dtype=types[columns[name]]) for name, column in zip(columns, values)}
    )
