"""Job folders on the command line."""

from __future__ import annotations

import gzip
import json
import sys
import weakref
from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from build.hand_made import op, row, run_of
from build.hand_made_ranks import run_of_ranks
from build.places import ROOT

import torchprof
from torchprof.analyze.report import without_warnings
from torchprof.cli.show import Files, saved_runs
from torchprof.ranks.sentences import with_comparison
from torchprof.reports import content_of
from torchprof.reports.documents import text_of
from torchprof.run import saved as job_folder
from torchprof.run.run import Run
from torchprof.run.saved import load, load_to_compare

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")

TRACE = ROOT / "examples" / "trace.json.gz"


@pytest.fixture
def ranks(here: Path) -> list[Run]:
    """The runs of eight ranks in runs/, of which rank 5 is slow."""
    Path("runs").mkdir()
    runs = []
    for rank in range(8):
        times = [(10_000 + rank + 9_000 * (rank == 5)) * 1000] * 20
        run = run_of_ranks({("Net.a", "forward"): {rank: times}}, world_size=8)
        rows = run_of([row(0, cpu_ns=1_000), row(1, op("aten::mm"), cpu_ns=times[0], rank=rank)]).rows
        rows.columns["rank"][:] = array("q", [rank] * len(rows))
        runs.append(replace(run, rows=replace(rows, layers=run.layers)))
        runs[-1].save(f"runs/rank{rank}.json")
    return runs


def test_show_writes_a_job_folder_and_shows_it(ranks: list[Run], cli: Any) -> None:
    assert cli("show runs -o job/") == ("", "Written: job/ has 8 ranks now.\n")
    assert torchprof.open_job("job").run() == torchprof.merge(ranks)
    for options in ([], ["--report", "ranks"], ["--depth", "1"], ["--rank", "5"], ["--json"]):
        shown = cli("show job", *options)
        files = ["runs/rank5.json"] if options[:1] == ["--rank"] else ["runs"]
        expected = cli("show", *files, *options)
        assert shown.err == expected.err == ""
        assert shown.out.splitlines()[1:] == expected.out.splitlines()[1:]
    cli("show job/ -o merged.json")
    assert torchprof.load("merged.json") == torchprof.merge(ranks)


def test_ranks_are_added_to_a_folder_that_is_there(ranks: list[Run], cli: Any) -> None:
    assert cli("show runs/rank3.json -o job/").err == "Written: job/ has 1 rank now.\n"
    assert cli("show runs/rank1.json runs/rank2.json -o job").err == "Written: job has 3 ranks now.\n"
    assert torchprof.open_job("job").run() == torchprof.merge(ranks[1:4])
    assert "job has rank 3 already" in cli("show runs/rank3.json -o job", code=2).err


def test_one_run_at_a_time_is_in_memory(ranks: list[Run], monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    """When a run is loaded, those before are gone."""
    ranks.clear()
    load, loaded = torchprof.load, []

    def counted(path: Any) -> Run:
        assert [run for run in loaded if run() is not None] == []
        run = load(path)
        loaded.append(weakref.ref(run))
        return run

    monkeypatch.setattr(torchprof, "load", counted)
    cli("show runs -o job/")
    assert len(loaded) == 8


def test_traces_go_into_a_job_folder_one_by_one(here: Path, cli: Any) -> None:
    trace = json.loads(gzip.decompress(TRACE.read_bytes()))
    for rank in range(2):
        file = Path(f"rank{rank}.json")
        file.write_text(json.dumps({**trace, "distributedInfo": {"rank": rank, "world_size": 2}}))
    torchprof.from_trace("rank1.json").save("saved.json")
    cli("show rank0.json saved.json -o job/")
    assert torchprof.open_job("job").run() == torchprof.from_trace(["rank0.json", "rank1.json"])


def test_of_many_ranks_only_some_are_loaded(ranks: list[Run], cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if 8 ranks were more than are loaded at once. Rank 5 is slow; rank 3 is the fourth of eight."""
    cli("show runs -o job/")
    read: list[Path] = []
    read_rank = job_folder._read_rank

    def noted(file: Path, **part: Any) -> Run:
        read.extend([] if part else [file])  # those that are read whole
        return read_rank(file, **part)

    monkeypatch.setattr("torchprof.cli.show.MOST_RANKS", 7)
    monkeypatch.setattr(job_folder, "_read_rank", noted)
    out, err = cli("show job -o some.json --report tree")
    assert err == "Written: some.json.\n"
    loaded = torchprof.load("some.json")
    metas = tuple(replace(meta, warnings=()) for meta in loaded.metas)
    assert replace(loaded, metas=metas) == torchprof.merge([ranks[0], ranks[3], ranks[5]])
    assert out == loaded.report("tree") + "\n" and "8 ranks were compared: Rank 5 is the straggler: " in out
    assert "Only ranks 0, 3 and 5 are in this run" in out and "missing" not in out
    assert [Path(path).name for path in read] == [f"rank-00000{rank}.parquet" for rank in (0, 3, 5)]
    read.clear()
    out = cli("show job").out
    compared = torchprof.merge(run.to_compare() for run in ranks)
    assert f"\n{text_of(without_warnings(content_of('ranks', compared, {})))}\n" in out
    assert len(read) == 3
    read.clear()
    assert cli("show job --rank 6 --report tree") == (ranks[6].report("tree") + "\n", "")
    assert [Path(path).name for path in read] == ["rank-000006.parquet"]


def test_of_many_saved_runs_all_are_compared_and_some_loaded(
    ranks: list[Run], cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if 8 were many: what is shown is that of a job folder, but the ranks are compared with their layers."""
    monkeypatch.setattr("torchprof.cli.show.MOST_RANKS", 7)
    read = []

    def noted(files: Files, arguments: Any, how: Any) -> Iterator[tuple[str, Run]]:
        read.append((how, files.saved))
        return saved_runs(files, arguments, how)

    monkeypatch.setattr("torchprof.cli.show.saved_runs", noted)
    out, err = cli("show runs --jobs 2 -o page.html --report ranks")
    assert err == "Written: page.html.\n"
    files = [f"runs/rank{rank}.json" for rank in range(8)]
    assert read == [(load_to_compare, files), (load, [files[rank] for rank in (0, 3, 5)])]
    comparison = torchprof.merge(run.to_compare(layers=True) for run in ranks)
    assert out == comparison.report("ranks") + "\n"
    assert "Most of the difference is Net.a in forward: 9.002ms a step." in out
    chosen = with_comparison(torchprof.merge(ranks[rank] for rank in (0, 3, 5)), comparison)
    assert Path("page.html").read_text() == chosen.report("html", compared=comparison)
    cli("show runs -o job/")
    cli("show job -o of_folder.html --report tree")
    assert Path("of_folder.html").read_text() == Path("page.html").read_text()
    for more in ([], ["-o", "again.html"]):
        assert cli("show job --report ranks", *more).out == out
    out = cli("show runs").out
    assert f"\n{text_of(without_warnings(content_of('ranks', comparison, {})))}\n" in out
    assert "8 ranks were compared: Rank 5 is the straggler" in out


def test_of_many_saved_runs_those_that_cannot_be_read_are_left_out(
    ranks: list[Run], cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One file has nothing in it, and one is of a newer torchprof. In that of rank 3, which is chosen, the rows are
    damaged, which are not compared. A file that is named is not left out."""
    monkeypatch.setattr("torchprof.cli.show.MOST_RANKS", 7)
    Path("runs/rank6.json").write_text('{"format": "torchprof-run", "schema": 2}')
    Path("runs/rank7.json").write_text('{"format": "torchprof-run", "schema": 99}')
    damaged = json.loads(Path("runs/rank3.json").read_text())
    Path("runs/rank3.json").write_text(json.dumps({**damaged, "rows": None}))
    for rank in (8, 9):
        replace(ranks[0], metas=(replace(ranks[0].meta, rank=rank),)).save(f"runs/rank{rank}.json")
    monkeypatch.setattr("torchprof.cli.show.chosen_ranks", lambda comparison: (0, 3, 5))
    out, err = cli("show runs --report tree")
    assert "Left out: runs/rank6.json is a damaged run file: KeyError 'samples'." in err
    assert "Left out: runs/rank7.json has schema 99; this torchprof reads up to" in err
    assert "Left out: runs/rank3.json is a damaged run file" in err
    assert "Only ranks 0 and 5 are in this run" in out
    said = cli("show", *map(str, sorted(Path("runs").iterdir())), "--report", "tree", code=2)
    assert "runs/rank6.json is a damaged run file" in said.err


@pytest.mark.parametrize(("cpus", "options", "expected"), [(2, [], 2), (192, [], 4), (2, ["--jobs", "6"], 6)])
def test_saved_runs_are_read_by_at_most_four_processes(
    cpus: int, options: list[str], expected: int, ranks: list[Run], monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    """As if 8 were many, and worth processes, on a machine with so many CPUs for this process."""
    monkeypatch.setattr("torchprof.cli.show.MOST_RANKS", 7)
    monkeypatch.setattr("torchprof.cli.show._WORTH_PROCESSES", 0)
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cpus)), raising=False)
    cli("show runs -o job/ --jobs 1")
    counts = []

    def noted(call: Any, items: Any, processes: int) -> Iterator[Any]:
        counts.append(processes)
        return map(call, items)

    monkeypatch.setattr("torchprof.cli.show.in_processes", noted)
    monkeypatch.setattr("torchprof.run.saved.in_processes", noted)
    for files in ("runs", "job"):
        cli("show", files, "--report", "ranks", *options)
    assert set(counts) == {expected}


def test_of_many_ranks_in_one_file_some_are_shown_whole(
    ranks: list[Run], cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if 8 were many. One report, and what other programs read, is still of all ranks."""
    monkeypatch.setattr("torchprof.cli.output.MOST_WHOLE_RANKS", 7)
    merged = torchprof.merge(ranks)
    merged.save("merged.json")
    out = cli("show merged.json -o again.json").out
    assert torchprof.load("again.json") == merged
    assert f"\n{text_of(without_warnings(content_of('ranks', merged, {})))}\n" in out
    assert "8 ranks were compared: Rank 5 is the straggler" in out and "3 of 8 ranks" in out
    assert cli("show merged.json --report tree").out == merged.report("tree") + "\n"


def test_of_chosen_ranks_none_are_chosen_again(ranks: list[Run], cli: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if three ranks, which were chosen of eight, were many. All files have their duration in the first line."""
    monkeypatch.setattr("torchprof.cli.show.MOST_RANKS", 7)
    replace(ranks[6], metas=(replace(ranks[6].meta, wall_ns=9_000_000_000, measured=("cpu_ns",)),)).save(
        "runs/rank6.json"
    )
    comparison = torchprof.merge(run.to_compare(layers=True) for run in ranks)
    some = torchprof.merge(ranks[rank] for rank in (0, 3, 5))
    chosen = with_comparison(some, comparison)
    texts = []
    for most in (64, 2):
        monkeypatch.setattr("torchprof.cli.output.MOST_WHOLE_RANKS", most)
        monkeypatch.setattr("torchprof.reports.html.MOST_WHOLE_RANKS", most)
        pages = [chosen.report("html"), *(run.report("html", compared=comparison) for run in (chosen, some))]
        texts.append([*pages, cli("show runs").out])
    assert texts[0] == texts[1]
    assert "Recorded: 9.00 s." in texts[0][-1]


def test_all_of_many_saved_runs_are_merged_for_other_programs(
    ranks: list[Run], cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchprof.cli.show.MOST_RANKS", 7)
    merged = torchprof.merge(ranks)
    compared = merged.to_compare(layers=True)
    out = cli("show runs -o merged.json -o page.html --report tree").out
    assert torchprof.load("merged.json") == merged
    assert out == merged.report("tree") + "\n"
    assert cli("show runs --report csv").out == merged.report("csv") + "\n"
    for report, data in (("tree", merged.report("tree").data), ("ranks", compared.report("ranks").data)):
        assert json.loads(cli("show runs --report", report, "--json").out) == json.loads(json.dumps(data))
    assert json.loads(cli("show runs --json").out) == json.loads(json.dumps(merged.report("overview").data))
    said = cli("show runs --model torch.nn:ReLU --report tree", code=2)
    assert "--model is for traces: a saved run has its model already." in said.err
    assert cli("show runs --rank 6 --report tree").out == ranks[6].report("tree") + "\n"
    assert "This run has no rank 8. It has ranks 0 to 7." in cli("show runs --rank 8 --report tree", code=2).err
    torchprof.merge(ranks[:2]).save("runs/rank0.json")  # a file of two ranks
    Path("runs/rank1.json").unlink()
    torchprof.merge(ranks[6:]).save("runs/rank6.json")
    Path("runs/rank7.json").unlink()
    monkeypatch.setattr("torchprof.cli.show.MOST_RANKS", 5)
    assert "Only ranks 0, 3 and 5 are in this run" in cli("show runs --report tree").out


def test_without_pyarrow_it_is_known_before_anything_runs(
    ranks: list[Run], cli: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No module of the model is imported, and no folder made."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for output in ("job/", "run.parquet"):
        said = cli("profile nowhere.py:Net -o", output, code=2)
        assert f"-o {output}: Parquet needs pyarrow, which is not installed here: pip" in said.err
    assert "Parquet needs pyarrow" in cli("show runs -o job/", code=2).err
    assert not Path("job").exists()


@pytest.mark.parametrize("command", ["run", "profile"])
def test_a_rank_that_is_there_is_known_before_anything_runs(command: str, here: Path, cli: Any) -> None:
    run_of([], rank=0).save("job/")
    Path("script.py").write_text("open('ran', 'w')\n", encoding="utf-8")
    said = cli(command, "-o", "job/", "script.py" if command == "run" else "script:Net", code=2)
    assert "job has rank 0 already. Save another job to another folder" in said.err
    assert not Path("ran").exists()


def test_another_job_is_known_before_anything_runs(here: Path, monkeypatch: pytest.MonkeyPatch, cli: Any) -> None:
    """The folder has rank 0 of a job of two. The second job has four ranks; this is its last one."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    run_of([], rank=0, world_size=2).save("job/")
    Path("script.py").write_text("open('ran', 'w')\n", encoding="utf-8")
    said = cli("run -o job/ script.py", code=2)
    assert "job has rank 0 of a job of 2 ranks, but rank 3 to be saved is of a job of 4" in said.err
    assert not Path("ran").exists()


@pytest.mark.parametrize(("elastic", "slurm"), [("b", "a"), ("none", "b")])
def test_a_job_of_another_name_is_known_before_anything_runs(
    elastic: str, slurm: str, here: Path, monkeypatch: pytest.MonkeyPatch, cli: Any
) -> None:
    """The folder has rank 0 of the job a."""
    names = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": elastic, "SLURM_JOB_ID": slurm}
    for name, value in names.items():
        monkeypatch.setenv(name, value)
    run = run_of([], rank=0, world_size=2)
    replace(run, metas=(replace(run.meta, job="a"),)).save("job/")
    Path("script.py").write_text("open('ran', 'w')\n", encoding="utf-8")
    said = cli("run -o job/ script.py", code=2)
    assert "job has rank 0 of the job 'a', but rank 1 to be saved is of the job 'b'" in said.err
    assert not Path("ran").exists()


def test_a_profile_goes_into_a_job_folder(here: Path, cli: Any) -> None:
    for output in (["-o", "job/", "-o", "run.json"], ["-o", "once.parquet"]):
        cli("profile torch.nn:ReLU --input 3", *output)
    assert torchprof.open_job("job").run() == torchprof.load("run.json")
    assert torchprof.load("once.parquet").layers == torchprof.load("run.json").layers


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["runs", "-o", "job/", "--report", "ranks"], "-o job/ only writes the folder: leave out --report."),
        (["runs", "-o", "job/", "-o", "run.json"], "leave out the other files. Then `torchprof show job/` shows it"),
        (["runs", "-o", "job/", "--add-cycles"], "leave out --add-cycles."),
        (["runs", "-o", "job/", "--rank", "0"], "leave out --rank."),
        (["runs", "-o", "no/job/"], "the folder no does not exist"),
        (["runs", "-o", "runs/"], "runs is not a job folder, and has other files: rank0.json, rank1.json"),
        (["runs", "-o", "runs"], "-o runs: this is a folder, not a file."),
        (["done", "runs"], "done is a job folder, which is shown alone."),
        (["done", "--add-cycles"], "a job folder has one run of each rank"),
        (["done", "--kwargs", '{"a": 1}'], "say which with --model"),
        (["done", "--rank", "9"], "done has no rank 9. It has ranks 0 to 7."),
        (["merged.json", "-o", "job/"], "This run is of ranks 0 to 7"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_bad_input_is_reported(arguments: list[str], says: str, ranks: list[Run], cli: Any) -> None:
    cli("show runs -o done/")
    torchprof.merge(ranks).save("merged.json")
    out, err = cli("show", *arguments, code=2)
    assert says in err and out == ""
