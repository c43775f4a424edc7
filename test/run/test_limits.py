"""Files that want to take the machine down, and writers that are interrupted: limits for readers, whole files."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from build.hand_made import label, op, row, run_of
from build.trace_files import memory_event, trace_event, write
from build.trace_files import op as traced_op

import torchprof
from benchmarks import fuzz
from torchprof import TorchprofError
from torchprof.run import saved
from torchprof.run.file import MOST_UNPACKED, free_bytes, host
from torchprof.run.formats import NumberRanges, numbers_in_words
from torchprof.run.lockstep import Lockstep
from torchprof.run.words import MOST_NESTED
from torchprof.traces.json_text import JsonText

RUN = run_of([row(0, cpu_ns=100), row(1, op("aten::mm"), calls=2, cpu_ns=4_000)])
_LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
import torchprof
run = (torchprof.load if "run" in sys.argv[1] else torchprof.from_trace)(sys.argv[1])
print(str(run), run.report("tree"), repr(run.missing_ranks), len(run.missing_ranks))
"""


def changed(folder: Path, **meta: Any) -> Path:
    """A saved run with other values in its metadata."""
    RUN.save(folder / "run.json")
    document = json.loads((folder / "run.json").read_text())
    document["metas"][0].update(meta)
    return write(folder / "run.json", document)


@pytest.mark.parametrize("size", [2, 10**9, 2**31])
def test_the_size_of_a_job_takes_no_memory(size: int, tmp_path: Path) -> None:
    """In a process that may have 1 GiB, and in a trace that has 200 bytes."""
    header = {"backend": "nccl", "rank": 0, "world_size": size}
    trace = write(tmp_path / "trace.json", {"distributedInfo": header, "traceEvents": [traced_op("aten::mm", 1, 1)]})
    for path in (trace, changed(tmp_path, world_size=size)):
        command = [sys.executable, "-c", _LIMITED, str(path)]
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout
        assert said.rstrip().endswith(f"<{numbers_in_words(NumberRanges.below(size, [0]))}> {size - 1}")


def test_numbers_as_ranges() -> None:
    numbers = NumberRanges.below(9, [2, 3, 8, 20])
    assert [*numbers] == [0, 1, 4, 5, 6, 7] and numbers == (0, 1, 4, 5, 6, 7) != numbers.ranges
    assert len(numbers) == 6 and 4 in numbers and 8 not in numbers and numbers[2] == 4
    assert numbers_in_words(numbers) == "0, 1 and 4 to 7" and not NumberRanges.below(3, range(3))


@pytest.mark.parametrize("value", [{"rank": 10**30}, {"wall_ns": 10**400}, {"steps": 2**63}, {"world_size": 2**63}])
def test_a_number_that_no_run_has_is_refused(value: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(TorchprofError, match="is a damaged run file"):
        torchprof.load(changed(tmp_path, **value))


def test_sums_of_cycles_that_are_too_large_are_refused() -> None:
    run = run_of([row(0, cpu_ns=2**62 + 1)])
    with pytest.raises(TorchprofError, match="of rank 0 does not fit into 64 bits"):
        torchprof.merge([run, run], add_cycles=True)


@pytest.mark.parametrize("part", ["frames", "within"])
def test_frames_nested_too_deep_are_refused(part: str, tmp_path: Path) -> None:
    document = json.loads(changed(tmp_path).read_text())
    deep = [["op", f"aten::x{number}", 0] for number in range(MOST_NESTED + 2)]
    document[part] += [deep] if part == "frames" else [[[0, "forward", [frame]] for frame in deep]]
    write(tmp_path / "run.json", document)
    with pytest.raises(TorchprofError, match="nested too deep"):
        torchprof.load(tmp_path / "run.json")


def test_a_rank_has_its_metadata_once(tmp_path: Path) -> None:
    document = json.loads(changed(tmp_path).read_text())
    write(tmp_path / "run.json", {**document, "metas": document["metas"] * 2})
    with pytest.raises(TorchprofError, match="metadata of 2 runs of 1 ranks"):
        torchprof.load(tmp_path / "run.json")


@pytest.mark.parametrize("name", ["rank", "world_size"])
def test_a_number_that_no_rank_has_is_ignored_in_a_trace(name: str, tmp_path: Path) -> None:
    header = {"rank": 0, "world_size": 2, name: 10**30}
    run = torchprof.from_trace(
        write(tmp_path / "t.json", {"distributedInfo": header, "traceEvents": [traced_op("aten::mm", 1, 1)]})
    )
    assert (run.meta.rank, run.meta.world_size) == (0, 2 if name == "rank" else 1)


def test_what_unpacks_to_too_much_is_refused_while_it_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    RUN.save(tmp_path / "run.json.gz")
    monkeypatch.setenv(MOST_UNPACKED, "1000000")
    assert torchprof.load(tmp_path / "run.json.gz") == RUN
    bomb = gzip.compress(b'{"format":"torchprof-run","x":"') + 64 * gzip.compress(bytes(2**20)) + gzip.compress(b'"}')
    (tmp_path / "bomb.json.gz").write_bytes(bomb)
    with pytest.raises(TorchprofError, match=rf"1\.00 MB or more when .* 976\.56 KB: .* set {MOST_UNPACKED} to"):
        torchprof.load(tmp_path / "bomb.json.gz")
    lists = gzip.compress(b'{"format":"torchprof-run","x":[0' + b",[]" * 20_000 + b"]}")  # 60 KB of text take 1 MB
    (tmp_path / "lists.json.gz").write_bytes(lists)
    with pytest.raises(TorchprofError, match="when it is unpacked"):
        torchprof.load(tmp_path / "lists.json.gz")
    event = json.dumps(traced_op("aten::mm", 1, 1))
    with gzip.open(tmp_path / "trace.json.gz", "wt") as file:
        file.write(f'{{"traceEvents":[{",".join([event] * 12_000)}]}}')
    with pytest.raises(TorchprofError, match=r"trace\.json\.gz has .* when it is unpacked"):
        torchprof.from_trace(tmp_path / "trace.json.gz")
    monkeypatch.setenv(MOST_UNPACKED, "plenty")
    with pytest.raises(TorchprofError, match="plenty is not a number of bytes"):
        torchprof.load(tmp_path / "bomb.json.gz")


def test_the_free_memory_is_that_of_the_machine_and_of_the_container(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       300 kB\nMemFree:   1 kB\nMemAvailable:   200 kB\n")
    for name, text in {"max": "100000", "current": "60000", "stat": "anon 1\ninactive_file 5000\n"}.items():
        assert [*free_bytes(tmp_path / "meminfo", tmp_path)] == [200 * 1024]
        (tmp_path / f"memory.{name}").write_text(text)
    assert [*free_bytes(tmp_path / "meminfo", tmp_path)] == [200 * 1024, 45_000]
    (tmp_path / "memory.max").write_text("max\n")
    assert [*free_bytes(tmp_path / "meminfo", tmp_path)] == [200 * 1024]
    assert [*free_bytes(tmp_path / "none", tmp_path)] == []


def test_a_parquet_file_is_refused_before_it_is_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    RUN.save(tmp_path / "run.parquet")
    table = parquet.read_table(tmp_path / "run.parquet")
    metadata = parquet.ParquetFile(tmp_path / "run.parquet").metadata.metadata
    longer = type(table).from_batches([*table.to_batches(), *table.to_batches()])
    with parquet.ParquetWriter(tmp_path / "longer.parquet", longer.schema, store_schema=False) as writer:
        writer.write_table(longer)
        writer.add_key_value_metadata({b"torchprof-run": metadata[b"torchprof-run"]})
    with pytest.raises(TorchprofError, match=rf"{2 * len(RUN.rows)} rows of costs for {len(RUN.rows)} rows"):
        torchprof.load(tmp_path / "longer.parquet")
    monkeypatch.setenv(MOST_UNPACKED, "100")
    with pytest.raises(TorchprofError, match="when it is unpacked"):
        torchprof.load(tmp_path / "run.parquet")


def test_numbers_that_are_none_are_repaired_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each repair decodes the event anew. Words in strings stay, also in one that is not read to its end."""
    repairs = []
    replace = JsonText._replace
    monkeypatch.setattr(JsonText, "_replace", lambda text, *new: (repairs.append(new), replace(text, *new)))
    values = ",".join(["nan", "-inf", '"a nan, inf"', "1"] * 50_000)
    event = f'{{"ph":"X","cat":"cpu_op","name":"aten::nan","ts":1,"dur":1,"pid":1,"tid":1,"args":{{"v":[{values}]}}}}'
    (tmp_path / "t.json").write_text(f'{{"traceEvents":[{event}]}}')
    with (tmp_path / "t.json").open("rb") as file:
        text = JsonText(file)
        document = text.whole_value()
    assert document["traceEvents"][0]["args"]["v"] == [None, None, "a nan, inf", 1] * 50_000
    assert document["traceEvents"][0]["name"] == "aten::nan" and len(repairs) < 20


def test_a_word_where_no_value_belongs_ends_the_event(tmp_path: Path) -> None:
    """It was repaired for ever."""
    good = json.dumps(traced_op("aten::mm", 1, 1))
    (tmp_path / "t.json").write_text(
        f'{{"traceEvents":[{good},{{"ph":"X","name"-inf:"a"}},{good.replace("mm", "mv")}]}}'
    )
    run = torchprof.from_trace(tmp_path / "t.json")
    assert {row.frames[-1].name for row in run.rows if row.frames} == {"aten::mm", "aten::mv"}
    assert "trace_events_unread" in {warning.code for warning in run.warnings}


def test_without_torch_a_trace_with_shapes_is_refused_in_words(tmp_path: Path) -> None:
    shaped = traced_op("aten::mm", 1, 1, Input_Dims=[[2, 2], [2, 2]], Input_type=["float", "float"])
    write(tmp_path / "t.json", {"traceEvents": [shaped]})
    write(tmp_path / "plain.json", {"traceEvents": [traced_op("aten::mm", 1, 1)]})
    code = (
        "import sys; sys.modules['torch'] = None; import torchprof; print(torchprof.from_trace('plain.json'))\n"
        "try: torchprof.from_trace('t.json')\n"
        "except torchprof.TorchprofError as error: print(error)"
    )
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=120).stdout
    assert "aten::mm" in said and "computed with torch, which is not installed here: pip install torch." in said


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no such files")
def test_only_files_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.json")
    for path in ("/dev/zero", tmp_path / "pipe.json"):
        with pytest.raises(TorchprofError, match="is not a file"):
            torchprof.load(path)
    with pytest.raises(TorchprofError, match="is empty"):  # nobody writes to it
        torchprof.from_trace(tmp_path / "pipe.json")


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_damaged_files_are_read_or_refused(kind: str) -> None:
    """``python -m benchmarks fuzz`` tries 10,000 of each kind."""
    if kind in ("parquet", "job"):
        pytest.importorskip("pyarrow")
    outcomes, _ = fuzz.check(kind, seed=56, count=80)
    assert outcomes["run"] and not outcomes["failed"], outcomes


class Full:
    """A disk that is full at the n-th write."""

    def __init__(self, file: Any, writes: int) -> None:
        self.file, self.writes = file, writes

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def write(self, data: bytes) -> int:
        self.writes -= 1
        if self.writes < 0:
            raise OSError(28, "No space left on device")
        written: int = self.file.write(data)
        return written


@pytest.mark.parametrize("name", ["run.json", "run.json.gz", "page.html", "rows.csv", "table.md"])
def test_a_full_disk_leaves_the_old_file_or_the_new_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer: Callable[[Path], None] = RUN.save if name.startswith("run") else RUN.export
    writer(tmp_path / name)
    new = (tmp_path / name).read_bytes()
    opened = Path.open
    for writes in (*range(40), *range(40, 4000, 37)):
        (tmp_path / name).write_bytes(b"old")
        with monkeypatch.context() as full:
            full.setattr(
                Path,
                "open",
                lambda path, mode="r", *a, **k: (
                    Full(opened(path, mode, *a, **k), writes)  # noqa: B023
                    if "w" in mode
                    else opened(path, mode, *a, **k)
                ),
            )
            full.setattr(Full, "__enter__", lambda self: self, raising=False)
            full.setattr(Full, "__exit__", lambda self, *error: self.file.close(), raising=False)
            try:
                writer(tmp_path / name)
            except OSError:
                assert (tmp_path / name).read_bytes() == b"old"
                assert [file.name for file in tmp_path.iterdir()] == [name]
            else:
                break
    assert (tmp_path / name).read_bytes() == new and writes > 0


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait(60)
    names = {
        "dead": f".run.json.{host()}-{killed.pid}-0123abcd.part",
        "alive": f".run.json.{host()}-{os.getpid()}-0123abcd.part",
        "elsewhere": f".run.json.other-{killed.pid}-0123abcd.part",
        "another": f".run2.json.{host()}-{killed.pid}-0123abcd.part",
    }
    for name in names.values():
        (tmp_path / name).touch()
    RUN.save(tmp_path / "run.json")
    left = {file.name for file in tmp_path.iterdir()}
    assert left == {"run.json", names["alive"], names["elsewhere"], names["another"]}


def test_a_name_of_many_numbers_or_backslashes_takes_linear_time(tmp_path: Path) -> None:
    """Both took time by the square of the length: minutes for these."""
    name = " ".join(map(str, range(40_000)))
    events = [trace_event("user_annotation", name, 1, 9), traced_op("aten::mm", 2, 3)]
    run = torchprof.from_trace(write(tmp_path / "t.json", {"traceEvents": events}))
    assert name in {layer.path[0] for layer in run.layers} | {
        frame.name for chain in run.rows.frames for frame in chain
    }
    slashes = run_of([row(0, label("\\" * 100_000 + "|"), cpu_ns=100)])
    assert "\\" * 100_000 in slashes.report("markdown")


def nested(depth: int, category: str, name: str) -> list[dict[str, Any]]:
    """Ranges inside one another, each a µs longer than the next on both sides. ``name`` may have the number of a range
    as {n}, or as a {word}, or a {path}."""
    letters = str.maketrans("01234567", "abcdefgh")
    names = (name.format(n=n, word=oct(n).translate(letters), path=".".join(["a"] * (n + 1))) for n in range(depth))
    return [trace_event(category, name, n, 2 * (depth - n)) for n, name in enumerate(names)]


@pytest.mark.parametrize(
    ("category", "name"),
    [
        ("user_annotation", "r{word}"),
        ("cpu_op", "aten::x{n}"),
        ("user_annotation", "torchprof:{path}"),
        ("python_function", "nn.Module: N_{n}"),
    ],
)
def test_what_is_nested_too_deep_counts_in_the_last_that_is_not(category: str, name: str, tmp_path: Path) -> None:
    """Sizes do not follow the square of the depth: 2,000 operators inside one another took 685 MiB, and 1,000 ranges
    raised RecursionError. No time is lost, and each range but the last has its own µs on both sides."""
    deep = [*nested(1_000, category, name), traced_op("aten::mm", 999.5, 1)]
    run = torchprof.from_trace(write(tmp_path / "t.json", {"traceEvents": deep}))
    assert [warning.code for warning in run.warnings].count("nested_too_deep") == 1
    assert max(len(frames) for frames in run.rows.frames) <= MOST_NESTED
    assert max((len(layer.path) for layer in run.layers), default=0) <= MOST_NESTED
    assert sum(row.cost.cpu_ns for row in run.rows) == 2_000_000
    if category == "cpu_op":
        own = {row.frames[-1].name: row.cost.cpu_ns for row in run.rows if row.frames}
        assert own[f"aten::x{MOST_NESTED - 2}"] == 2_000 and own[f"aten::x{MOST_NESTED - 1}"] == 2_000 * (1_001 - 128)
        assert all(row.calls == 1 for row in run.rows if row.frames)
    assert str(run) and all(run.report(report) for report in ("tree", "ops", "html", "summary", "markdown"))
    run.save(tmp_path / "run.json")
    assert torchprof.load(tmp_path / "run.json") == run


@pytest.mark.parametrize(
    "header", ['"x":[0' + ",0" * 600_000 + "]", ",".join(f'"k{n}":"{"a" * 100_000}"' for n in range(12))]
)
def test_a_header_that_is_too_large_is_refused(header: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events = json.dumps([traced_op("aten::mm", 1, 1)])
    with gzip.open(tmp_path / "t.json.gz", "wt") as file:
        file.write(f'{{{header},"traceEvents":{events}}}')
    assert torchprof.from_trace(tmp_path / "t.json.gz").rows
    monkeypatch.setenv(MOST_UNPACKED, "1000000")
    with pytest.raises(
        TorchprofError, match=r"t\.json\.gz has \S+ \wB or more when it is unpacked, and the limit is 976\.56 KB"
    ):
        torchprof.from_trace(tmp_path / "t.json.gz")


def test_how_often_a_collective_ran_takes_no_time() -> None:
    """The single times that are kept of a sum are chosen among those that were kept, if there are so many."""
    times = tuple(range(0, 100 * Lockstep.SIZE, 100))
    some = Lockstep((0,), (10**12,), (10**15,), (0,), times, (0,) * len(times), times)
    summed = some + some
    assert summed.counts == (2 * 10**12,) and summed.ns == (2 * 10**15,) and len(summed.times) == Lockstep.SIZE
    earlier = [number for number in summed.times if number < 10**12]
    assert {*earlier} <= {*times} and {number - 10**12 for number in summed.times[len(earlier) :]} <= {*times}
    assert summed.last_ns == tuple(number % 10**12 for number in summed.times)


def test_what_is_cut_at_the_end_of_a_chunk_is_not_repaired(tmp_path: Path) -> None:
    """A word that may go on ("Inf" of "Infinity"), and a string that ends behind a backslash: 64 KiB are read first."""
    event = '"ph":"X","cat":"cpu_op","name":"aten::mm","ts":1,"dur":1,"pid":1,"tid":1'
    for tail in ('"v":[nan,Infinity]', '"v":[nan,"C:\\\\\\\\nan, inf"]'):
        for cut in range(len(tail)):
            begin = f'{{"traceEvents":[{{{event},"args":{{"x":"'
            text = f'{begin}{"a" * (2**16 - len(begin) - 2 - cut)}",{tail}}}}}]}}'
            (tmp_path / "t.json").write_text(text)
            with (tmp_path / "t.json").open("rb") as file:
                value = JsonText(file).whole_value()["traceEvents"][0]["args"]["v"]
            assert value == [None, None] if "Infinity" in tail else value[1] == r"C:\\nan, inf"


def test_the_mode_of_a_file_and_a_long_name_stay(tmp_path: Path) -> None:
    path = tmp_path / f"{'n' * 240}.json"
    RUN.save(path)
    path.chmod(0o600)
    RUN.save(path)
    assert path.stat().st_mode & 0o777 == 0o600 and torchprof.load(path) == RUN


def test_memory_before_the_start_of_a_recording_is_drawn_and_ends(tmp_path: Path) -> None:
    """The picture has no width then. It took for ever."""
    events = [memory_event(-1e12, 64, Addr=5, Device_Type=0, Device_Id=-1), traced_op("aten::mm", -2e12, 3)]
    run = torchprof.from_trace(write(tmp_path / "t.json", {"traceEvents": events}), with_timeline=True)
    assert "64 B" in run.report("memory")


def test_a_pipe_is_no_run_and_a_rank_under_another_number_is_told(tmp_path: Path) -> None:
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.json")
        assert not saved.is_run_file(tmp_path / "pipe.json")
    pytest.importorskip("pyarrow")
    RUN.save(f"{tmp_path}/job/")
    ranks = tmp_path / "job" / "ranks"
    (ranks / "rank-000005.parquet").write_bytes((ranks / "rank-000000.parquet").read_bytes())
    (ranks / "rank-000006.parquet").mkdir()
    told: list[str] = []
    assert torchprof.open_job(tmp_path / "job").run(left_out=lambda error: told.append(str(error))) == RUN
    assert "has the run of rank 0: it was copied to another name" in told[0] and "cannot be read" in told[1]
