"""Columns: the figure of a row is exact, a lower bound, unknown or blank."""

from torchprof.analyze.columns import Column
from torchprof.analyze.figures import Figures
from torchprof.analyze.report import ReportTable, TableRow
from torchprof.run.formats import Bound, Figure, ReportCell
from torchprof.run.measures import MEASURES, Cost
from torchprof.run.words import FORWARD

TIME = MEASURES[0]
COST = {FORWARD: Cost(cpu_ns=12)}
AVERAGE = Column("CPU avg", "average", measure=TIME)


def test_an_average_is_as_certain_as_its_sum_and_its_calls() -> None:
    assert AVERAGE.figure(Figures(COST, COST, 4)) == Figure(3)
    some_count_for_a_layer_above = Figures(COST, COST, 4, incomplete={FORWARD})
    assert AVERAGE.figure(some_count_for_a_layer_above) == Figure(3, Bound.AT_LEAST)
    assert AVERAGE.figure(Figures(COST, COST, 4, has_more_calls=True)).bound is Bound.UNKNOWN
    assert AVERAGE.figure(Figures(COST, COST, 4, unknown=True)).bound is Bound.UNKNOWN
    assert AVERAGE.figure(Figures(COST, COST)).bound is Bound.BLANK


def test_a_figure_that_does_not_add_up_belongs_to_one_phase() -> None:
    figures = Figures(COST, COST, more={("peak", FORWARD, False): Figure(2048)})
    assert str(Column("Peak", "peak").text(figures, None)) == "2.00 KB"
    assert Column("Backward peak", "peak", "backward").text(figures, None) == ""


def test_a_word_comes_before_the_whole_figure() -> None:
    assert str(Figure(2, Bound.AT_LEAST, "first").text(Column("MACs", "cost").write)) == "first ≥ 2"


def test_a_figure_is_no_share_of_a_negative_sum_nor_if_it_is_unknown() -> None:
    row = TableRow(["Net", ReportCell("-1 B", -1, "bytes"), ReportCell("3 B", 3, "bytes"), "–"])
    table = ReportTable(["Module", "Net", "Allocated", "Freed"], [row], wholes=[None, -4, 6, 6])
    assert table.shares(row) == [None, None, 0.5, None]
    assert table.shares(TableRow(row.cells, is_part=False)) == [None] * 4
