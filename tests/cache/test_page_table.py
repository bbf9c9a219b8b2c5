"""Rows of pages: allocated once, empty at first, and wide enough."""

from __future__ import annotations

from pensieve_jax.cache.page_table import PageTable


def row_of(table: PageTable, row: int) -> list[int]:
    return table.take([row])[0].tolist()


def test_rows_are_allocated_in_order_with_their_initial_pages():
    table = PageTable()
    assert [table.open([7, 8]), table.open([]), table.open([9])] == [0, 1, 2]
    assert table.take([2, 0]).tolist() == [[9] + [0] * 15, [7, 8] + [0] * 14]


def test_a_freed_row_is_empty_and_allocated_next():
    table = PageTable()
    rows = [table.open([3, 4]) for _ in range(3)]
    table.close(rows[1])
    assert not any(row_of(table, rows[1])) and row_of(table, rows[0])[:2] == [3, 4]
    assert table.open([5]) == rows[1] and row_of(table, rows[1])[:3] == [5, 0, 0]


def test_rows_double_when_all_are_in_use():
    table = PageTable()
    assert [table.open([i + 1]) for i in range(33)] == list(range(33))
    assert [row_of(table, row)[0] for row in range(33)] == list(range(1, 34))
    assert len(table.take(range(64))) == 64


def test_columns_double_for_an_index_beyond_the_last():
    table = PageTable()
    row, other = table.open([1]), table.open([2])
    table.set(row, 15, 5)
    assert len(row_of(table, row)) == 16
    table.set(row, 16, 6)
    assert row_of(table, row) == [1, *[0] * 14, 5, 6, *[0] * 15] and row_of(table, other)[0] == 2
    wide = table.open([*range(1, 34)])
    assert row_of(table, wide) == [*range(1, 34), *[0] * 31]
    assert len(row_of(table, table.open([*range(1, 65)]))) == 64
