"""A run's records as a pandas ``DataFrame``. pandas is an extra: it is imported where it is used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchprof.analyze.records import records_of
from torchprof.errors import TorchprofError
from torchprof.run.run import Run

if TYPE_CHECKING:
    import pandas


def dataframe(run: Run, of: str = "layers") -> pandas.DataFrame:
    """The records of ``torchprof.analyze.records``. Raises TorchprofError for unknown ones, and without pandas.

    Integers are pandas's nullable ``Int64`` and texts its nullable ``string``, so that what is not known is
    ``pandas.NA``; as a column of NumPy's it would be 0 or make all of them floats.
    """
    columns, records = records_of(run, of)
    try:
        import pandas
    except ImportError as error:
        raise TorchprofError("A data frame needs pandas, which is not installed here: pip install pandas") from error
    values = list(zip(*records)) or [()] * len(columns)
    # pyarrow, which pandas would choose for texts where it is there, takes no lone surrogates.
    types = {str: pandas.StringDtype("python"), int: pandas.Int64Dtype()}
    return pandas.DataFrame(
        {name: pandas.array(list(column), dtype=types[columns[name]]) for name, column in zip(columns, values)}
    )
