"""Reading files of torch.profiler in all layouts, cut off and broken, compared with Python's json."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import pickle
import tarfile
import tempfile
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from build.examples import examples
from build.hand_made import run_of
from hypothesis import given
from hypothesis import strategies as st

from torchprof import TorchprofError
from torchprof.traces import json_text
from torchprof.traces.file import TraceFile

NASTY = [
    "}, {",
    '"}, {"ph": "X',
    "\\",
    '\\"',
    "C:\\work",
    "]}",
    "[{",
    "\n\t\x01",
    "é",
    "漢字",
    "🔥🔥",
    "nan",
    ": inf,",
    "",
]
EVENTS: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "ts": 0.5, "args": {"name": "python"}},
    *(
        {"ph": "X", "cat": "cpu_op", "name": name, "pid": 1, "tid": 2, "ts": 1e12 + at / 8, "dur": 1.125, "args": {}}
        for at, name in enumerate(NASTY)
    ),
    {"ph": "X", "name": "dims", "args": {"Input Dims": [[1, 2], []], "of": [{"name": 1}, {"name": 2}], "x": None}},
    {},
    {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": 9},
]
BEFORE = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "A100"}, {"id": 1, "name": "}, {"}],
    "with_stack": 1,
}
AFTER = {
    "traceName": "a/trace.json",
    "distributedInfo": {"rank": 0, "pg_config": [{"pg": "0"}, {"pg": "1"}]},
    "end": 12,
}


def as_torch_writes(document: dict[str, Any]) -> str:
    """The layout of torch, which differs from that of json: blank lines, commas at the start of lines."""
    around = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in document.items()]
    place = list(document).index("traceEvents")
    events = ",\n".join(
        "  {\n    "
        + ",\n    ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in event.items())
        + "\n    \n  }"
        for event in document["traceEvents"]
    )
    around[place] = f'"traceEvents": [\n    \n{events}\n  ]'
    return "\n {\n    " + ",\n    \n    ".join(around) + " }"


LAYOUTS: dict[str, Callable[[Any], str]] = {
    "torch": as_torch_writes,
    "json": json.dumps,
    "compact": lambda document: json.dumps(document, separators=(",", ":")),
    "indented": lambda document: json.dumps(document, indent=1),
    "wide": lambda document: json.dumps(document, indent=60),
    "sorted": lambda document: json.dumps(document, sort_keys=True),
    "unescaped": lambda document: json.dumps(document, ensure_ascii=False),
    "Windows": lambda document: json.dumps(document, indent=2).replace("\n", "\r\n"),
    "BOM": lambda document: "\ufeff" + json.dumps(document) + "\n",
}


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    file = TraceFile(path)
    events = [event for piece in file.pieces() for event in piece]
    return events, file.header, [*map(str, file.warnings)]


def write_file(folder: Path, text: str | bytes, name: str = "trace.json") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def trace_text(*events: str) -> str:
    return '{"schemaVersion": 1, "traceEvents": [\n' + ",\n".join(events) + '\n], "traceName": "trace.json"}'


def assert_refused(path: Path, *words: str) -> None:
    with pytest.raises(TorchprofError) as caught:
        read(path)
    for word in (*words, str(path)):
        assert word in str(caught.value)


@pytest.fixture(autouse=True, params=["orjson", "json"])
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test reads with orjson (the extra "fast") and without."""
    if request.param == "json":
        monkeypatch.setattr(json_text, "_quick", None)
    else:
        pytest.importorskip("orjson")


@pytest.fixture(params=[1 << 16, 1000, 7], ids=lambda size: f"{size} bytes at a time")
def any_chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_text, "_CHUNK", request.param)


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
    assert read(write_file(tmp_path, pack(text.encode()))) == (document["traceEvents"], header, [])


@pytest.mark.usefixtures("any_chunk")
@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_of_events_without_a_header_is_read(tmp_path: Path, indent: int | None) -> None:
    assert read(write_file(tmp_path, json.dumps(EVENTS, indent=indent))) == (EVENTS, {}, [])


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
    assert read(path) == (events, document, [])


def test_gzip_is_recognized_by_content_and_not_by_name(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": EVENTS})
    assert read(write_file(tmp_path, gzip.compress(text.encode()), "trace.json"))[0] == EVENTS
    assert read(write_file(tmp_path, text, "trace.json.gz"))[0] == EVENTS
    # A gzip file may have several members, for example if its writer was flushed.
    parts = gzip.compress(text[:100].encode()) + gzip.compress(text[100:].encode())
    assert read(write_file(tmp_path, parts)) == (EVENTS, {}, [])


strings = st.one_of(st.text(max_size=8), st.lists(st.sampled_from(NASTY), max_size=4).map("".join))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | strings,
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
        assert read(path) == (expected.pop("traceEvents"), expected, [])


def test_the_last_value_of_a_repeated_key_counts(tmp_path: Path) -> None:
    text = '{"a": 1, "b": 1, "traceEvents": [{"ph": "X"}], "a": 2}'
    assert read(write_file(tmp_path, text)) == ([{"ph": "X"}], {"a": 2, "b": 1}, [])


@pytest.mark.usefixtures("any_chunk")
def test_entries_that_are_no_objects_are_ignored(tmp_path: Path) -> None:
    text = trace_text('{"a": 1}', "null", '{"a": 2}', '12, "}, {", [{"a": 3}], -1.5e3, true', '{"a": 4}', "null", "")
    events, header, warnings = read(write_file(tmp_path, text))
    assert (events, warnings) == ([{"a": 1}, {"a": 2}, {"a": 4}], [])
    assert header == {"schemaVersion": 1, "traceName": "trace.json"}


REPAIRED = {
    '{"ts": nan}': {"ts": None},
    '{"a": [inf, -inf, -nan, 1], "b": NaN, "c": -Infinity}': {"a": [None, None, None, 1], "b": None, "c": None},
    r'{"name": "C:\work\new\x, nan", "a": nan}': {"name": r"C:\work\new\x, nan", "a": None},
    r'{"name": "C:\users\"me\"\\", "b": "\u00e9\n"}': {"name": 'C:\\users"me"\\', "b": "é\n"},
    '{"name": "a\nb\x00"}': {"name": "a\nb\x00"},
}


@pytest.mark.usefixtures("any_chunk")
@pytest.mark.parametrize("text", REPAIRED)
def test_some_invalid_json_is_repaired(tmp_path: Path, text: str) -> None:
    """The thousand valid events around it are unchanged."""
    sound = {"ph": "X", "name": "nan, inf, C:\\work", "ts": 1.5}
    many = [json.dumps(sound)] * 500
    path = write_file(tmp_path, trace_text(*many, text, *many))
    events, header, warnings = read(path)
    assert events == [sound] * 500 + [REPAIRED[text]] + [sound] * 500
    assert header == {"schemaVersion": 1, "traceName": "trace.json"}
    assert warnings == []


def test_invalid_json_in_the_header_is_repaired(tmp_path: Path) -> None:
    text = r'{"memory": nan, "traceEvents": [{"ph": "X"}], "traceName": "C:\Users\me\trace.json"}'
    header = {"memory": None, "traceName": r"C:\Users\me\trace.json"}
    assert read(write_file(tmp_path, text)) == ([{"ph": "X"}], header, [])


def test_invalid_utf_8_is_replaced(tmp_path: Path) -> None:
    path = write_file(tmp_path, b'{"traceEvents": [{"name": "a\xffb"}, {"name": "\xe6\xbc"}]}')
    assert read(path)[0] == [{"name": "a\ufffdb"}, {"name": "\ufffd"}]


BROKEN = [
    '{"ph": "X", "name": "a "quoted" word", "ts": 1}',
    '{"ph": "X", "name": "ends in a backslash\\", "ts": 1}',
    '{"ph": "X", "name" "a", "ts": 1}',
    '{"ph": "X", "name": "a", "ts": 1, "args": {"x": 1}',
    '{"ph": "X", "name": "a", "ts": , "args": {"x": 1}}',
    '{"ph": "X", "name": "a", "ts": ' + "1" * 5000 + "}",
    '{"ph": "X", "name": "a", "args": ' + "[" * 100_000 + "}",
]


@pytest.mark.usefixtures("any_chunk")
@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_an_unreadable_event_is_left_out_with_a_warning(tmp_path: Path, broken: str) -> None:
    sound = ['{"ph": "X", "name": "é", "args": {}}'] * 300
    text = trace_text(*sound, broken, *sound)
    events, header, warnings = read(write_file(tmp_path, text))
    assert events == [json.loads(sound[0])] * 600
    assert header == {"schemaVersion": 1, "traceName": "trace.json"}
    assert warnings == [
        f"1 of 601 events of trace.json could not be read and is missing: it begins at character "
        f"{text.index(broken):,}."
    ]


def test_several_unreadable_events_are_counted(tmp_path: Path) -> None:
    sound, broken = '{"ph": "X", "name": "a"}', BROKEN[0]
    mended = '{"ph": "X", "name": "a", "ts": nan}'
    text = trace_text(broken, *[sound] * 400, mended, broken, broken, *[sound] * 400, broken)
    events, header, warnings = read(write_file(tmp_path, text))
    assert len(events) == 801
    assert header["traceName"] == "trace.json"
    assert warnings == [
        "4 of 805 events of trace.json could not be read and are missing: the first of them begins at character "
        f"{text.index(broken)}."
    ]


def test_an_event_over_the_limit_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its string is very long: without a limit, the whole file would be kept in memory to find the end."""
    monkeypatch.setattr(json_text, "_LONGEST", 10_000)
    monkeypatch.setattr(json_text, "_CHUNK", 1000)
    text = trace_text('{"ph": "X"}', '{"ph": "X", "name": "' + "a" * 50_000 + '"}', '{"ph": "i"}')
    events, _, warnings = read(write_file(tmp_path, text))
    assert events == [{"ph": "X"}, {"ph": "i"}]
    assert warnings[0].startswith("1 of 3 events")


@pytest.mark.usefixtures("any_chunk")
def test_the_events_are_read_if_the_header_is_unreadable(tmp_path: Path) -> None:
    before = '{"a": 1, "x": "a "quoted" word", "traceEvents": [{"ph": "X"}], "b": 2}'
    warning = "What stands before the events of trace.json could not be read."
    assert read(write_file(tmp_path, before)) == ([{"ph": "X"}], {"a": 1, "b": 2}, [warning])
    behind = '{"a": 1, "traceEvents": [{"ph": "X"}], "b": 2, "x": "a "quoted" word", "c": 3}' + " " * 9999 + "}"
    warning = "What stands behind the events of trace.json could not be read."
    assert read(write_file(tmp_path, behind)) == ([{"ph": "X"}], {"a": 1, "b": 2}, [warning])


SMALL = {**BEFORE, "traceEvents": EVENTS[:3] + EVENTS[-3:], **AFTER}


def check_cut(path: Path) -> int:
    """Check that a cut off file gives its first events and a warning; returns the number of events."""
    try:
        events, header, warnings = read(path)
    except TorchprofError as error:
        assert any(word in str(error) for word in ("is empty", "ends before its first", "cannot be decompressed"))
        return 0
    assert events == SMALL["traceEvents"][: len(events)]
    assert header.items() <= {**BEFORE, **AFTER}.items()
    assert len(warnings) == 1
    assert warnings[0].startswith(path.name)
    if header != {**BEFORE, **AFTER}:
        assert f"ends in the middle (after {len(events)} event" in warnings[0]
    return len(events)


@pytest.mark.usefixtures("any_chunk")
@pytest.mark.parametrize("layout", ["torch", "json", "unescaped"])
def test_all_complete_events_of_a_cut_off_file_are_read(tmp_path: Path, layout: str) -> None:
    data = LAYOUTS[layout](SMALL).encode()
    counts = [check_cut(write_file(tmp_path, data[:length])) for length in range(len(data))]
    assert counts == sorted(counts)
    assert set(counts) == set(range(7))
    assert read(write_file(tmp_path, data))[2] == []


@pytest.mark.usefixtures("any_chunk")
def test_all_complete_events_of_a_cut_off_gzip_file_are_read(tmp_path: Path) -> None:
    data = gzip.compress(json.dumps(SMALL).encode())
    counts = [
        check_cut(write_file(tmp_path, data[:length])) for length in range(2, len(data))
    ]  # gzip is recognized by two bytes
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_everything_that_can_be_decompressed_is_read(tmp_path: Path) -> None:
    many = [{"ph": "X", "name": f"op {at * at}", "ts": at / 7} for at in range(20_000)]
    data = gzip.compress(json.dumps({"traceEvents": many}).encode())
    for share in (0.1, 0.5, 0.9):
        part = data[: int(len(data) * share)]
        whole = zlib.decompressobj(31).decompress(part).count(b"}")
        events, _, warnings = read(write_file(tmp_path, part))
        assert events == many[:whole]
        assert warnings == [
            f"trace.json ends in the middle (after {whole:,} events; its gzip data is cut off): what came later is "
            "missing."
        ]


def test_a_cut_off_list_of_events_without_a_header_is_read(tmp_path: Path) -> None:
    warning = "trace.json ends in the middle (after 1 event): what came later is missing."
    assert read(write_file(tmp_path, '[{"ph": "X"}, {"ph"')) == ([{"ph": "X"}], {}, [warning])
    assert read(write_file(tmp_path, '[{"ph": "X"},\n')) == ([{"ph": "X"}], {}, [warning])


def test_a_file_that_ends_in_zero_bytes_counts_as_cut_off(tmp_path: Path) -> None:
    events, _, warnings = read(write_file(tmp_path, '{"traceEvents": [{"ph": "X"}, {"name": "a' + "\0" * 100_000))
    assert events == [{"ph": "X"}]
    assert warnings == ["trace.json ends in the middle (after 1 event): what came later is missing."]


def test_a_damaged_gzip_file_is_read_as_far_as_possible(tmp_path: Path) -> None:
    data = gzip.compress(json.dumps({"traceEvents": EVENTS * 999}).encode())
    wrong_checksum = data[:-8] + bytes([data[-8] ^ 1]) + data[-7:]
    events, _, (warning,) = read(write_file(tmp_path, wrong_checksum))
    assert events == EVENTS * 999
    assert warning.startswith("trace.json was read to the end of its events, but its gzip data is damaged (CRC check")
    events, _, (warning,) = read(write_file(tmp_path, data + b"garbage"))
    assert events == EVENTS * 999
    assert warning.startswith("trace.json was read to the end of its events, but its gzip data is damaged (Not a gzip")
    assert read(write_file(tmp_path, data + b"\0" * 512))[2] == []  # padding of tapes and disks
    middle = len(data) // 2
    events, _, (warning, *_) = read(write_file(tmp_path, data[:middle] + b"\xff" * 40 + data[middle + 40 :]))
    assert 0 < len(events) < len(EVENTS * 999)
    assert "; its gzip data is damaged (" in warning
    assert_refused(write_file(tmp_path, data[:3] + b"?" * 50), "cannot be decompressed", "Copy or record it again")


def test_text_after_the_trace_gives_a_warning(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": EVENTS})
    warning = "trace.json goes on behind the end of its trace: that was not read."
    assert read(write_file(tmp_path, text + "\n" * 99_999)) == (EVENTS, {}, [])
    assert read(write_file(tmp_path, text + "\n" * 99_999 + text)) == (EVENTS, {}, [warning])


@pytest.mark.parametrize("text", ["", "  \n", "\ufeff", "\ufeff\n"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_an_empty_file_is_refused(tmp_path: Path, text: str, pack: Callable[[bytes], bytes]) -> None:
    assert_refused(write_file(tmp_path, pack(text.encode())), "is empty", "export_chrome_trace")


@pytest.mark.parametrize(
    ("data", "begins"),
    [
        (b"<!DOCTYPE html><html></html>", "'<!DOCTYPE html><html'"),
        (pickle.dumps({"a": 1}), "'\ufffd"),
        (b"\x7fELF\x02\x01\x01\x00", "'\\x7fELF"),
        (b"null", "'null'"),
        (b'"traceEvents"', "traceEvents"),
        (b"17", "'17'"),
        (gzip.compress(gzip.compress(b"{}")), "x1f"),
    ],
    ids=["html", "pickle", "program", "null", "string", "number", "gzip in gzip"],
)
def test_files_that_are_no_traces_are_refused(tmp_path: Path, data: bytes, begins: str) -> None:
    assert_refused(write_file(tmp_path, data), "is no trace of torch.profiler", begins, "export_chrome_trace")


@pytest.mark.usefixtures("any_chunk")
@pytest.mark.parametrize(
    "text",
    [
        "{}",
        '{"model": [1, 2], "x": {"traceEvents": 1}}',
        '{"traceEvents": null}',
        '{"traceEvents": {"a": 1}, "b": 2}',
        "{'traceEvents': [{'ph': 'X'}]}",
        "{" + "a" * 5000 + "}",
        "{" * 5000,
        "[" * 3 + "{" + '"a": ' * 3,
    ],
)
def test_json_without_events_is_refused(tmp_path: Path, text: str) -> None:
    assert_refused(write_file(tmp_path, text), "export_chrome_trace")


def test_other_compressed_formats_are_refused(tmp_path: Path) -> None:
    data = json.dumps({"traceEvents": EVENTS}).encode()
    assert_refused(write_file(tmp_path, bz2.compress(data)), "is a bzip2 file", "decompress it first")
    assert_refused(write_file(tmp_path, lzma.compress(data)), "is a xz file")
    assert_refused(write_file(tmp_path, b"\x28\xb5\x2f\xfd" + data), "is a zstd file")
    assert_refused(write_file(tmp_path, b"\x04\x22\x4d\x18" + data), "is a lz4 file")
    with zipfile.ZipFile(tmp_path / "trace.zip", "w") as archive:
        archive.writestr("trace.json", data)
    assert_refused(tmp_path / "trace.zip", "is a zip file")


def test_a_missing_file_raises_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "trace.json")


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_tar_archive_is_refused(mode: Any, tmp_path: Path) -> None:
    write_file(tmp_path, json.dumps(SMALL))
    with tarfile.open(tmp_path / "trace.tar", mode) as archive:
        archive.add(tmp_path / "trace.json", "trace.json")
    assert_refused(tmp_path / "trace.tar", "is an archive of tar: unpack it first")


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be", "utf-8-sig"])
def test_text_in_other_encodings_is_read(codec: str, tmp_path: Path) -> None:
    assert read(write_file(tmp_path, json.dumps(SMALL).encode(codec))) == read(write_file(tmp_path, json.dumps(SMALL)))


def test_a_saved_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run_of([]).save(path)
    assert_refused(path, "a run that torchprof saved", "torchprof.load", "python -m torchprof show")


def test_an_exported_timeline_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    from torchprof import Profile

    with Profile(model, with_timeline=True) as prof:
        model(torch.rand(1, 2))
    path = tmp_path / "run.trace.json"
    prof.run.export(path)
    assert_refused(path, "is a picture of a run", "torchprof.load")


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_progress_rises_to_one(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    many = [{"ph": "X", "name": f"op {at * at}", "ts": at / 7} for at in range(20_000)]
    shares: list[float] = []
    file = TraceFile(write_file(tmp_path, pack(json.dumps({"traceEvents": many}).encode())))
    for number, _ in enumerate(file.pieces(shares.append), 1):
        assert len(shares) >= number
    assert shares == sorted(shares)
    assert 0 < shares[0] < 0.2
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
    assert read(path) == ([], {"after": float(number), "last": float(number)}, [])
