"""Tables of rows by columns, and strict JSON."""

import json
import math
from typing import NamedTuple

from jaxcomp import tables
from jaxcomp.tables import Column


class Leaf(NamedTuple):
    name: str
    bits: float | None


class Row(NamedTuple):
    leaf: Leaf
    count: int


COLUMNS = (
    Column("leaf", "leaf.name"),
    Column("bits", "leaf.bits", ".2f", right=True),
    Column("count", lambda row: 10 * row.count, ",", right=True),
    Column("", "count", lambda count: "!" if count > 99 else ""),
)
ROWS = [Row(Leaf("w", 4.125), 100), Row(Leaf("bias", None), 2)]


def test_columns_are_aligned_below_their_titles_and_a_rule():
    assert tables.text(COLUMNS, ROWS).splitlines() == [
        "leaf  bits  count",
        "--------------------",
        "w     4.12  1,000  !",
        "bias           20",
    ]


def test_a_table_without_rows_has_its_titles():
    assert tables.text(COLUMNS[:2], []) == "leaf  bits\n----------"


def test_attributes_are_named_by_the_last_part_of_their_paths():
    assert tables.attributes(ROWS[0], "leaf.name", "count") == {"name": "w", "count": 100}


def test_json_has_no_infinities():
    found = {"a": math.inf, "b": (1.5, {"c": math.nan}), "d": Leaf}
    assert json.loads(tables.to_json(found, default=lambda kind: kind.__name__)) == {
        "a": None,
        "b": [1.5, {"c": None}],
        "d": "Leaf",
    }
