"""Reading files of torch.profiler that are invalid JSON, cut off, damaged, or no traces."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from build.hand_made import run_of
from build.trace_texts import (
    AFTER,
    BEFORE,
    BROKEN,
    EVENTS,
    LAYOUTS,
    SMALL,
    assert_refused,
    read_file,
    trace_text,
    write_file,
)

from torchprof import TorchprofError
from torchprof.traces import json_text

pytestmark = pytest.mark.usefixtures("decoder")


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
    events, header, warnings = read_file(path)
    assert events == [sound] * 500 + [REPAIRED[text]] + [sound] * 500
    assert header == {"schemaVersion": 1, "traceName": "trace.json"}
    assert warnings == []


def test_invalid_json_in_the_header_is_repaired(tmp_path: Path) -> None:
    text = r'{"memory": nan, "traceEvents": [{"ph": "X"}], "traceName": "C:\Users\me\trace.json"}'
    header = {"memory": None, "traceName": r"C:\Users\me\trace.json"}
    assert read_file(write_file(tmp_path, text)) == ([{"ph": "X"}], header, [])


def test_invalid_utf_8_is_replaced(tmp_path: Path) -> None:
    path = write_file(tmp_path, b'{"traceEvents": [{"name": "a\xffb"}, {"name": "\xe6\xbc"}]}')
    assert read_file(path)[0] == [{"name": "a\ufffdb"}, {"name": "\ufffd"}]


@pytest.mark.usefixtures("any_chunk")
@pytest.mark.parametrize("broken", BROKEN, ids=range(len(BROKEN)))
def test_an_unreadable_event_is_left_out_with_a_warning(tmp_path: Path, broken: str) -> None:
    sound = ['{"ph": "X", "name": "é", "args": {}}'] * 300
    text = trace_text(*sound, broken, *sound)
    events, header, warnings = read_file(write_file(tmp_path, text))
    assert events == [json.loads(sound[0])] * 600
    assert header == {"schemaVersion": 1, "traceName": "trace.json"}
    assert warnings == [
        f"Missing, because unreadable: 1 of 601 events of trace.json. The first begins at character "
        f"{text.index(broken):,}."
    ]


def test_several_unreadable_events_are_counted(tmp_path: Path) -> None:
    sound, broken = '{"ph": "X", "name": "a"}', BROKEN[0]
    mended = '{"ph": "X", "name": "a", "ts": nan}'
    text = trace_text(broken, *[sound] * 400, mended, broken, broken, *[sound] * 400, broken)
    events, header, warnings = read_file(write_file(tmp_path, text))
    assert len(events) == 801
    assert header["traceName"] == "trace.json"
    assert warnings == [
        "Missing, because unreadable: 4 of 805 events of trace.json. The first begins at character "
        f"{text.index(broken)}."
    ]


def test_an_event_over_the_limit_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its string is very long: without a limit, the whole file would be kept in memory to find the end."""
    monkeypatch.setattr(json_text, "_LONGEST", 10_000)
    monkeypatch.setattr(json_text, "_CHUNK", 1000)
    text = trace_text('{"ph": "X"}', '{"ph": "X", "name": "' + "a" * 50_000 + '"}', '{"ph": "i"}')
    events, _, warnings = read_file(write_file(tmp_path, text))
    assert events == [{"ph": "X"}, {"ph": "i"}]
    assert "1 of 3 events of" in warnings[0]


@pytest.mark.usefixtures("any_chunk")
def test_the_events_are_read_if_the_header_is_unreadable(tmp_path: Path) -> None:
    before = '{"a": 1, "x": "a "quoted" word", "traceEvents": [{"ph": "X"}], "b": 2}'
    warning = "The text before the events of trace.json could not be read."
    assert read_file(write_file(tmp_path, before)) == ([{"ph": "X"}], {"a": 1, "b": 2}, [warning])
    behind = '{"a": 1, "traceEvents": [{"ph": "X"}], "b": 2, "x": "a "quoted" word", "c": 3}' + " " * 9999 + "}"
    warning = "The text after the events of trace.json could not be read."
    assert read_file(write_file(tmp_path, behind)) == ([{"ph": "X"}], {"a": 1, "b": 2}, [warning])


def check_cut(path: Path) -> int:
    """Check that a cut off file gives its first events and a warning; returns the number of events."""
    try:
        events, header, warnings = read_file(path)
    except TorchprofError as error:
        assert any(word in str(error) for word in ("is empty", "ends before its first", "cannot be decompressed"))
        return 0
    assert events == SMALL["traceEvents"][: len(events)]
    assert header.items() <= {**BEFORE, **AFTER}.items()
    assert len(warnings) == 1
    assert path.name in warnings[0]
    if header != {**BEFORE, **AFTER}:
        assert f"is cut off after {len(events)} event" in warnings[0]
    return len(events)


@pytest.mark.usefixtures("any_chunk")
@pytest.mark.parametrize("layout", ["torch", "json", "unescaped"])
def test_all_complete_events_of_a_cut_off_file_are_read(tmp_path: Path, layout: str) -> None:
    data = LAYOUTS[layout](SMALL).encode()
    counts = [check_cut(write_file(tmp_path, data[:length])) for length in range(len(data))]
    assert counts == sorted(counts)
    assert set(counts) == set(range(7))
    assert read_file(write_file(tmp_path, data))[2] == []


@pytest.mark.usefixtures("any_chunk")
def test_all_complete_events_of_a_cut_off_gzip_file_are_read(tmp_path: Path) -> None:
    data = gzip.compress(json.dumps(SMALL).encode())
    # Gzip is recognized by two bytes.
    counts = [check_cut(write_file(tmp_path, data[:length])) for length in range(2, len(data))]
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_everything_that_can_be_decompressed_is_read(tmp_path: Path) -> None:
    many = [{"ph": "X", "name": f"op {at * at}", "ts": at / 7} for at in range(20_000)]
    data = gzip.compress(json.dumps({"traceEvents": many}).encode())
    for share in (0.1, 0.5, 0.9):
        part = data[: int(len(data) * share)]
        whole = zlib.decompressobj(31).decompress(part).count(b"}")
        events, _, warnings = read_file(write_file(tmp_path, part))
        assert events == many[:whole]
        assert warnings == [
            f"trace.json is cut off after {whole:,} events: its gzip data is cut off. Later events are missing."
        ]


def test_a_cut_off_list_of_events_without_a_header_is_read(tmp_path: Path) -> None:
    warning = "trace.json is cut off after 1 event. Later events are missing."
    assert read_file(write_file(tmp_path, '[{"ph": "X"}, {"ph"')) == ([{"ph": "X"}], {}, [warning])
    assert read_file(write_file(tmp_path, '[{"ph": "X"},\n')) == ([{"ph": "X"}], {}, [warning])


def test_a_file_that_ends_in_zero_bytes_counts_as_cut_off(tmp_path: Path) -> None:
    events, _, warnings = read_file(write_file(tmp_path, '{"traceEvents": [{"ph": "X"}, {"name": "a' + "\0" * 100_000))
    assert events == [{"ph": "X"}]
    assert warnings == ["trace.json is cut off after 1 event. Later events are missing."]


def test_a_damaged_gzip_file_is_read_as_far_as_possible(tmp_path: Path) -> None:
    data = gzip.compress(json.dumps({"traceEvents": EVENTS * 999}).encode())
    wrong_checksum = data[:-8] + bytes([data[-8] ^ 1]) + data[-7:]
    events, _, (warning,) = read_file(write_file(tmp_path, wrong_checksum))
    assert events == EVENTS * 999
    assert warning.startswith("All events of trace.json were read, but its gzip data is damaged (CRC check")
    events, _, (warning,) = read_file(write_file(tmp_path, data + b"garbage"))
    assert events == EVENTS * 999
    assert warning.startswith("All events of trace.json were read, but its gzip data is damaged (Not a gzip")
    assert read_file(write_file(tmp_path, data + b"\0" * 512))[2] == []  # padding of tapes and disks
    middle = len(data) // 2
    events, _, (warning, *_) = read_file(write_file(tmp_path, data[:middle] + b"\xff" * 40 + data[middle + 40 :]))
    assert 0 < len(events) < len(EVENTS * 999)
    assert "events: its gzip data is damaged (" in warning
    assert_refused(write_file(tmp_path, data[:3] + b"?" * 50), "cannot be decompressed", "Copy or record it again")


def test_text_after_the_trace_gives_a_warning(tmp_path: Path) -> None:
    text = json.dumps({"traceEvents": EVENTS})
    warning = "trace.json has more text after the end of its trace: it was ignored."
    assert read_file(write_file(tmp_path, text + "\n" * 99_999)) == (EVENTS, {}, [])
    assert read_file(write_file(tmp_path, text + "\n" * 99_999 + text)) == (EVENTS, {}, [warning])


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
    assert_refused(write_file(tmp_path, data), "is not a trace of torch.profiler", begins, "export_chrome_trace")


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
        read_file(tmp_path / "trace.json")


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_a_tar_archive_is_refused(mode: Any, tmp_path: Path) -> None:
    write_file(tmp_path, json.dumps(SMALL))
    with tarfile.open(tmp_path / "trace.tar", mode) as archive:
        archive.add(tmp_path / "trace.json", "trace.json")
    assert_refused(tmp_path / "trace.tar", "is a tar archive: unpack it first")


def test_a_saved_run_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    run_of([]).save(path)
    assert_refused(path, "a run saved by torchprof", "torchprof.load", "python -m torchprof show")


def test_an_exported_timeline_is_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    from torchprof import Profile

    with Profile(model, with_timeline=True) as prof:
        model(torch.rand(1, 2))
    path = tmp_path / "run.trace.json"
    prof.run.export(path)
    assert_refused(path, "is a timeline that torchprof drew", "torchprof.load")
