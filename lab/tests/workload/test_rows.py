"""Files of rows: the line of a row, and the line of an error."""

from __future__ import annotations

import gzip
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lab.tests.workload.helpers import write
from pensieve_lab.workload import TraceError
from pensieve_lab.workload.rows import read_csv, read_json_array, read_json_lines

objects = st.lists(st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=3), max_size=4)


@given(values=objects, indent=st.sampled_from([None, 0, 2]))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_arrays_are_read_as_json_reads_them(values, indent, tmp_path):
    path = write(tmp_path / "a.json", json.dumps(values, indent=indent))
    assert [dict(row.values) for row in read_json_array(path)] == values


def test_rows_know_their_lines(tmp_path):
    array = write(tmp_path / "a.json", '\n[\n  {"a":\n 1},\n\n  {"a": 2}, {"a": 3}\n]\n')
    assert [(row.line, row.values["a"]) for row in read_json_array(array)] == [(3, 1), (6, 2), (6, 3)]
    lines = write(tmp_path / "a.jsonl", '{"a": 1}\n\n{"a": "\u2028"}\n{"a": 3}')
    assert [row.line for row in read_json_lines(lines)] == [1, 3, 4]
    table = write(tmp_path / "a.csv", 'a,b\n1,x\n\n2.5,"y"\n')
    assert [(row.line, *row.values.values()) for row in read_csv(table)] == [(2, 1, "x"), (4, 2.5, "y")]


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "must be a JSON array"),
        ('{"a": 1}', 1, "must be a JSON array"),
        ("[", 1, "is not JSON"),
        ('[\n{"a": 1},\n{"a": "cut o', 3, "is not JSON"),
        ('[\n{"a": 1}\n', 3, 'expected "," or "]"'),
        ('[\n{"a": 1}\n{"a": 2}]', 3, 'expected "," or "]"'),
        ('[{"a": 1},\n]', 2, "is not JSON"),
        ('[{"a": 1},\n7]', 2, "holds a int"),
        ("[]\n\n{}", 3, "has more after the end"),
        ("[" * 100_000, 1, "is not JSON"),
    ],
)
def test_a_broken_array_is_refused_with_the_line(tmp_path, text, line, reason):
    with pytest.raises(TraceError) as caught:
        list(read_json_array(write(tmp_path / "a.json", text)))
    assert caught.value.line == line
    assert reason in caught.value.reason


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ('{"a": 1}\n{"a": ', 2, "is not JSON (Expecting value, column 7)"),
        ('{"a": 1}\n[1]\n', 2, "holds a list"),
        ("1" * 5000, 1, "is not JSON"),
    ],
)
def test_broken_lines_are_refused_with_the_line(tmp_path, text, line, reason):
    with pytest.raises(TraceError) as caught:
        list(read_json_lines(write(tmp_path / "a.jsonl", text)))
    assert caught.value.line == line
    assert reason in caught.value.reason


def test_a_csv_row_of_another_width_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"a\.csv, line 3: has 1 values, but must have 2"):
        list(read_csv(write(tmp_path / "a.csv", "a,b\n1,2\n3\n")))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_text_that_is_not_utf8_is_refused_with_the_line(tmp_path, name):
    data = b'{"a": 1}\n{"a": "\xff"}\n'
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(TraceError, match="line 2: is not UTF-8"):
        list(read_json_lines(tmp_path / name))
    array = tmp_path / "a.json"
    array.write_bytes(b'[\n\n"\xff"]')
    with pytest.raises(TraceError, match="line 3: is not UTF-8"):
        list(read_json_array(array))


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-9], lambda data: b"no archive", lambda data: data[:25]]
)
def test_a_broken_archive_is_refused(tmp_path, damage):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(damage(gzip.compress(b'{"a": 1}\n' * 1000)))
    with pytest.raises(TraceError, match="is not a whole gzip archive"):
        list(read_json_lines(path))


def test_a_byte_order_mark_is_no_content(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"a": 1}\n')
    assert [dict(row.values) for row in read_json_lines(tmp_path / "a.jsonl")] == [{"a": 1}]


def test_a_missing_file_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        list(read_json_lines(tmp_path / "none.jsonl"))


def test_long_values_are_shortened_in_errors(tmp_path):
    row = next(read_json_lines(write(tmp_path / "a.jsonl", json.dumps({"a": "x" * 1000}))))
    assert len(str(row.error("a", "short"))) < 250
