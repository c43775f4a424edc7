"""Reading valid files of torch.profiler in all layouts, compared with Python's json."""

from __future__ import annotations

import gzip
import json
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from build.examples import examples
from build.trace_texts import AFTER, BEFORE, BROKEN, EVENTS, LAYOUTS, NASTY, SMALL, read_file, trace_text, write_file
from hypothesis import given
from hypothesis import strategies as st

from torchprof.traces import json_text
from torchprof.traces.file import TraceFile

pytestmark = pytest.mark.usefixtures("decoder")


@pytest.mark.usefixtures("any_chunk")
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "document",
    [
        {**BEFORE, "traceEvents": EVENTS},
        {"traceEvents": EVENTS, **AFTER},
        {**BEFORE, "traceEvents": EVENTS * 9, **AFTER},
        {"traceEvents": EVENTS},
        {"traceEvents": [], **BEFORE},
        {"traceEvents": []},
        {"traceEvents": [{}]},
    ],
    ids=["header before", "header after", "both", "no header", "no events", "nothing", "one event"],
)
def test_a_valid_file_is_read_as_json_reads_it(
    tmp_path: Path, document: dict[str, Any], layout: str, pack: Callable[[bytes], bytes]
) -> None:
    text = LAYOUTS[layout](document)
    assert json.loads(text.removeprefix("\ufeff")) == document
    header = {key: value for key, value in document.items() if key != "traceEvents"}
    assert read_file(write_file(tmp_path, pack(text.encode()))) == (document["traceEvents"], header, [])


@pytest.mark.usefixtures("any_chunk")
@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_of_events_without_a_header_is_read(tmp_path: Path, indent: int | None) -> None:
    assert read_file(write_file(tmp_path, json.dumps(EVENTS, indent=indent))) == (EVENTS, {}, [])


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_file_that_torch_wrote_is_read_as_json_reads_it(tmp_path: Path, name: str) -> None:
    with torch.profiler.profile(record_shapes=True, with_stack=True, profile_memory=True) as prof:
        torch.nn.Linear(3, 4)(torch.rand(2, 3)).sum().backward()
    path = tmp_path / name
    prof.export_chrome_trace(str(path))
    data = path.read_bytes()
    document = json.loads(gzip.decompress(data) if name.endswith(".gz") else data)
    events = document.pop("traceEvents")
    assert len(events) > 100
    assert read_file(path) == (events, document, [])


def test_gzip_is_recognized_by_content_and_not_by_name(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": EVENTS})
    assert read_file(write_file(tmp_path, gzip.compress(text.encode()), "trace.json"))[0] == EVENTS
    assert read_file(write_file(tmp_path, text, "trace.json.gz"))[0] == EVENTS
    # A gzip file may have several members, for example if its writer was flushed.
    parts = gzip.compress(text[:100].encode()) + gzip.compress(text[100:].encode())
    assert read_file(write_file(tmp_path, parts)) == (EVENTS, {}, [])


strings = st.one_of(st.text(max_size=8), st.lists(st.sampled_from(NASTY), max_size=4).map("".join))
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | strings,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(strings, inner, max_size=3),
    max_leaves=6,
)
events = st.dictionaries(st.sampled_from(["ph", "name", "args", "ts"]) | strings, values, max_size=4)
headers = st.dictionaries(
    strings.filter(lambda key: key not in ("format", "traceEvents", "otherData")), values, max_size=3
)


@examples(80)
@given(
    st.lists(events, max_size=6),
    headers,
    headers,
    st.sampled_from([name for name in LAYOUTS if name != "wide"]),
    st.integers(1, 120),
    st.booleans(),
)
def test_any_content_is_read_with_any_chunk_size(
    events: list[dict[str, Any]],
    before: dict[str, Any],
    after: dict[str, Any],
    layout: str,
    chunk: int,
    is_packed: bool,
) -> None:
    text = LAYOUTS[layout]({**before, "traceEvents": events, **after})
    # json can write half of a surrogate pair, which UTF-8 cannot encode.
    data = text.encode("utf-8", "replace")
    expected = json.loads(data.decode().removeprefix("\ufeff"))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_text, "_CHUNK", chunk)
        path = write_file(Path(folder), gzip.compress(data) if is_packed else data)
        assert read_file(path) == (expected.pop("traceEvents"), expected, [])


def test_the_last_value_of_a_repeated_key_counts(tmp_path: Path) -> None:
    text = '{"a": 1, "b": 1, "traceEvents": [{"ph": "X"}], "a": 2}'
    assert read_file(write_file(tmp_path, text)) == ([{"ph": "X"}], {"a": 2, "b": 1}, [])


@pytest.mark.usefixtures("any_chunk")
def test_entries_that_are_no_objects_are_ignored(tmp_path: Path) -> None:
    text = trace_text('{"a": 1}', "null", '{"a": 2}', '12, "}, {", [{"a": 3}], -1.5e3, true', '{"a": 4}', "null", "")
    events, header, warnings = read_file(write_file(tmp_path, text))
    assert (events, warnings) == ([{"a": 1}, {"a": 2}, {"a": 4}], [])
    assert header == {"schemaVersion": 1, "traceName": "trace.json"}


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_text_in_other_encodings_is_read(codec: str, tmp_path: Path) -> None:
    assert read_file(write_file(tmp_path, json.dumps(SMALL).encode(codec))) == read_file(
        write_file(tmp_path, json.dumps(SMALL))
    )


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_progress_rises_to_one(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    # Python 3.12 and newer read 128 KB of a gzip file at a time.
    many = [{"ph": "X", "name": f"op {at * at}", "ts": at / 7} for at in range(120_000)]
    shares: list[float] = []
    file = TraceFile(write_file(tmp_path, pack(json.dumps({"traceEvents": many}).encode())))
    for number, _ in enumerate(file.pieces(shares.append), 1):
        assert len(shares) >= number
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.5
    assert len(set(shares)) > 5
    assert shares[-1] == 1.0


def test_a_file_can_be_read_twice(tmp_path: Path) -> None:
    path = write_file(tmp_path, trace_text('{"ph": "X"}', BROKEN[0], '{"ph": "X"}')[:-3])
    file = TraceFile(path)
    first = list(file.pieces()), file.header, [*map(str, file.warnings)]
    assert len(file.warnings) == 2
    assert (list(file.pieces()), file.header, [*map(str, file.warnings)]) == first


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_large_file_needs_little_memory(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    event = json.dumps({"ph": "X", "name": "aten::mm", "ts": 1.5, "args": {"Input Dims": [[1, 2, 3]] * 8}}, indent=2)
    count = 10_000_000 // len(event)
    path = write_file(tmp_path, pack(trace_text(*[event] * count).encode()))
    tracemalloc.start()
    try:
        assert sum(map(len, TraceFile(path).pieces())) == count
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("number", ["0.0", "12.5", "1e5", "1.5E-3", "-0.25"])
def test_a_number_may_be_split_between_two_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: str) -> None:
    monkeypatch.setattr(json_text, "_CHUNK", 1)
    path = write_file(tmp_path, f'{{"traceEvents": [], "after": {number}, "last": {number}}}')
    assert read_file(path) == ([], {"after": float(number), "last": float(number)}, [])
