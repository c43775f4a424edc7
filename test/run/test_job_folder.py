"""Job folders: every number against the merged run, and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from build.examples import examples
from build.hand_made import run_of
from build.hand_made_ranks import run_of_ranks
from build.jobs import planted
from build.merging import jobs
from build.nonempty import at_least_one
from build.places import ROOT
from hypothesis import given

import torchprof
from torchprof import TorchprofError
from torchprof.run import saved as job_folder
from torchprof.run.file import host
from torchprof.run.lockstep import NOT_RECORDED, Lockstep
from torchprof.run.measures import FIELDS
from torchprof.run.meta import Meta
from torchprof.run.run import Run
from torchprof.run.saved import JobFolder

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")


def folder_of(runs: Sequence[Run], path: Path) -> JobFolder:
    """A job folder with these runs."""
    for run in runs:
        run.save(f"{path}/")
    return torchprof.open_job(path)


@pytest.fixture
def ranks() -> list[Run]:
    """The ranks of a job of four, in which rank 2 is slow."""
    return [*planted().of_ranks(range(4))]


@pytest.fixture
def job(ranks: list[Run], tmp_path: Path) -> JobFolder:
    return folder_of(ranks, tmp_path / "job")


def files_in(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


# What it has


@examples(40)
@given(jobs())
def test_all_and_some_ranks_are_what_merge_makes_of_them(runs: list[Run]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = folder_of(runs, Path(folder) / "job")
        numbers = [run.meta.rank for run in runs]
        assert job.ranks == tuple(sorted(numbers))
        assert job.run() == torchprof.merge(runs)
        assert job.run([numbers[0]]) == runs[0]
        assert job.run(iter(numbers[:2])) == torchprof.merge(runs[:2])


@examples(20)
@given(jobs())
def test_sums_by_layer_phase_and_rank_are_those_of_the_merged_run(runs: list[Run]) -> None:
    """Against a plain sum over ``Run.rows``."""
    with tempfile.TemporaryDirectory() as folder:
        job = folder_of(runs, Path(folder) / "job")
        merged = torchprof.merge(runs)
        sums: dict[tuple[Any, ...], Counter[str]] = {}
        for number, row in enumerate(merged.rows):
            key = merged.layers.name_of(merged.rows.columns["layer"][number]), row.phase, row.rank
            of_place = sums.setdefault(key, Counter())
            of_place.update({name: getattr(row.cost, name) for name in FIELDS})
            of_place["calls"] += row.calls
        names = ("calls", *FIELDS)
        added = ", ".join(f"coalesce(sum({name}), 0)" for name in names)
        lines = job.sql(f"SELECT layer, phase, rank, {added} FROM rows GROUP BY layer, phase, rank").fetchall()
        assert {line[:3]: line[3:] for line in lines} == {
            key: tuple(of_place[name] for name in names) for key, of_place in sums.items()
        }


@examples(20)
@given(jobs())
def test_each_step_has_the_time_of_the_lockstep(runs: list[Run]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = folder_of(runs, Path(folder) / "job")
        expected: Counter[tuple[Any, ...]] = Counter()
        for run in runs:
            for key, lockstep in run.lockstep.items():
                place = (None, None)
                if key.what not in ("step", "gap", "exchanges"):
                    phase = "other" if key.layer == -1 and key.phase == "forward" else key.phase
                    place = run.layers.name_of(key.layer), phase
                group = tuple(part or None for part in key.group or NOT_RECORDED)
                for number, ns in enumerate(lockstep.last_ns):
                    expected[(run.meta.rank, *place, key.device, key.what, *group, number, ns)] += 1
        assert Counter(job.sql("SELECT * FROM steps").fetchall()) == expected


def test_steps_have_the_numbers_of_those_that_were_kept(tmp_path: Path) -> None:
    """Of 300 steps 256 are kept. Each takes as many ns as its number."""
    run = run_of_ranks({("Net.a", "forward"): {0: range(300)}})
    run = replace(run, lockstep={key: Lockstep.of(0, range(300)) for key in run.lockstep})
    job = folder_of([run], tmp_path / "job")
    lines = job.sql("SELECT number, ns FROM steps WHERE what = 'step' ORDER BY number").fetchall()
    assert len(lines) == 256 and all(number == ns for number, ns in lines)
    assert job.run() == run


def test_a_line_says_how_each_rank_was_recorded(tmp_path: Path) -> None:
    meta = Meta(("Net", "Other"), measured=("cpu_ns", "flops"))
    metas = [
        replace(meta, rank=0, world_size=2, job="of-two", machine="node-1", steps=3, cycles=2, wall_ns=9),
        replace(meta, rank=1, world_size=2, device="cuda", process_cpu_ns=5, run_delay_ns=0),
    ]
    job = folder_of([replace(run_of([]), metas=(of_rank,)) for of_rank in metas], tmp_path / "job")
    lines = job.sql("SELECT * EXCLUDE (run, compared) FROM ranks ORDER BY rank").fetchall()
    models, measured = ["Net", "Other"], ["cpu_ns", "flops"]
    assert lines == [
        (0, 2, "of-two", "node-1", "cpu", models, measured, 2, 3, 9, None, None),
        (1, 2, None, None, "cuda", models, measured, 1, 0, 0, 5, 0),
    ]


def test_the_query_of_the_page_finds_the_slow_rank(job: JobFolder, ranks: list[Run]) -> None:
    """Rank 2 takes 25 ms in 18 of 20 steps. In the other two rank 0 takes 42. All else takes 16."""
    page = (ROOT / "docs" / "job-folder.md").read_text(encoding="utf-8")
    blocks = [block for block in re.findall(r"```sql\n(.*?)```", page, re.DOTALL) if "EXTERNAL" not in block]
    assert len(blocks) == 2
    own = {run.meta.rank: next(one.last_ns for key, one in run.lockstep.items() if key.what == "step") for run in ranks}
    together = [median(step) for step in zip(*own.values())]
    ratios = {rank: median(ns / typical for ns, typical in zip(times, together)) for rank, times in own.items()}
    lines = job.sql(blocks[0]).fetchall()
    assert lines[0] == (2, 25.0, 16.0, pytest.approx(25 / 16))
    assert {rank: ratio for rank, _, _, ratio in lines} == pytest.approx(ratios)
    assert {own_ms for _, own_ms, _, _ in lines[1:]} == {16.0}
    assert job.sql(blocks[1]).fetchall() == []  # the ranks of a merged run have no single times of layers


def test_a_job_folder_is_loaded_and_compared_as_its_merged_run(
    job: JobFolder, ranks: list[Run], tmp_path: Path
) -> None:
    merged = torchprof.merge(ranks)
    assert torchprof.load(tmp_path / "job") == merged
    assert str(torchprof.compare(tmp_path / "job", ranks[0])) == str(torchprof.compare(merged, ranks[0]))


# Adding


def test_ranks_can_be_added_later(ranks: list[Run], tmp_path: Path) -> None:
    job = folder_of(ranks[2:], tmp_path / "job")
    assert job.ranks == (2, 3)
    assert job.sql("SELECT count(*) FROM ranks").fetchall() == [(2,)]
    folder_of(ranks[:1], tmp_path / "job")
    assert job.ranks == (0, 2, 3), "the same object sees it"
    assert job.sql("SELECT rank FROM ranks ORDER BY rank").fetchall() == [(0,), (2,), (3,)]
    assert job.run() == torchprof.merge([ranks[0], *ranks[2:]])
    assert repr(job) == f"<JobFolder '{tmp_path / 'job'}' of 3 ranks>"
    assert files_in(tmp_path / "job") == sorted(
        ["torchprof-job.json"]
        + [f"{of}/rank-00000{rank}.parquet" for of in ("ranks", "rows", "steps") for rank in (0, 2, 3)]
    )


def test_a_rank_that_is_there_is_an_error(job: JobFolder, ranks: list[Run], tmp_path: Path) -> None:
    before = {name: (tmp_path / "job" / name).read_bytes() for name in files_in(tmp_path / "job")}
    with pytest.raises(TorchprofError, match=r"job has rank 2 already. .* remove .*ranks/rank-000002.parquet first"):
        replace(ranks[2], samples={}).save(tmp_path / "job")
    assert {name: (tmp_path / "job" / name).read_bytes() for name in files_in(tmp_path / "job")} == before
    (tmp_path / "job" / "ranks" / "rank-000002.parquet").unlink()
    assert job.ranks == (0, 1, 3)
    ranks[2].save(tmp_path / "job")
    assert job.run() == torchprof.merge(ranks)


def test_a_rank_appears_only_when_all_its_files_are_complete(
    ranks: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing fails at each of the three tables, the last in the middle of its file."""
    write_table = job_folder.write_table
    for count in range(3):
        written: list[Any] = []

        def failing(table: Any, file: Any, last: int = count, written: list[Any] = written) -> None:
            if len(written) == last:
                file.write(b"half")
                raise OSError("No space left on device")
            written.append(table)
            write_table(table, file)

        monkeypatch.setattr(job_folder, "write_table", failing)
        with pytest.raises(OSError, match="No space left"):
            ranks[0].save(f"{tmp_path}/job/")
        assert files_in(tmp_path / "job") == ["torchprof-job.json"]
    monkeypatch.undo()
    assert folder_of(ranks, tmp_path / "job").run() == torchprof.merge(ranks)


def test_a_rank_appears_last_in_the_table_that_says_it_is_there(
    ranks: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends between two renames leaves no rank, so that it can be written again."""
    renamed: list[str] = []
    replace_file = Path.replace

    def noted(file: Path, target: Path) -> Path:
        renamed.append(target.parent.name)
        return replace_file(file, target)

    monkeypatch.setattr(Path, "replace", noted)
    ranks[0].save(f"{tmp_path}/job/")
    assert renamed == ["job", "rows", "steps", "ranks"]


def test_files_that_are_being_written_are_not_read(job: JobFolder, tmp_path: Path) -> None:
    for name in ("ranks", "rows", "steps"):
        (tmp_path / "job" / name / ".rank-000009.parquet.123.part").write_bytes(b"half")
    assert job.ranks == (0, 1, 2, 3)
    for name in ("ranks", "rows", "steps"):
        assert job.sql(f"SELECT count(DISTINCT rank) FROM {name}").fetchall()[0][0] in (0, 4)


def test_another_process_may_be_making_the_folder(ranks: list[Run], tmp_path: Path) -> None:
    """It has made the folder and a part of what is in it."""
    (tmp_path / "job" / "rows").mkdir(parents=True)
    (tmp_path / "job" / ".torchprof-job.json.1.part").touch()
    assert folder_of(ranks, tmp_path / "job").run() == torchprof.merge(ranks)


def test_ranks_can_be_written_at_once(ranks: list[Run], tmp_path: Path) -> None:
    """Into a folder that each of them makes, and in which each looks for ranks of another job."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        [*threads.map(lambda run: run.save(f"{tmp_path}/job/"), ranks)]
    assert torchprof.open_job(tmp_path / "job").run() == torchprof.merge(ranks)


def test_strip_removes_names_of_machines(ranks: list[Run], tmp_path: Path) -> None:
    run = replace(ranks[0], metas=(replace(ranks[0].meta, machine="secret", script="secret.py", job="secret"),))
    run.save(f"{tmp_path}/job/", strip=True)
    job = torchprof.open_job(tmp_path / "job")
    assert job.sql("SELECT host, job FROM ranks").fetchall() == [(None, None)]
    assert job.run() == ranks[0]


@pytest.mark.parametrize("name", ["a'b", "a[1]", "a*b", "a?b", "naïve job"])
def test_the_folder_may_have_any_name(name: str, ranks: list[Run], tmp_path: Path) -> None:
    folder_of(ranks[:1], tmp_path / "a1")  # what a pattern of the name could also mean
    folder_of(ranks[:1], tmp_path / "axb")
    job = folder_of(ranks[1:3], tmp_path / name)
    assert job.sql("SELECT rank FROM ranks ORDER BY rank").fetchall() == [(1,), (2,)]


def test_ranks_of_a_job_of_unknown_size_are_saved(ranks: list[Run], tmp_path: Path) -> None:
    """A world size of 1 is that of a trace that says nothing of its job."""
    unknown = [replace(run, metas=(replace(run.meta, world_size=1),)) for run in ranks[:2]]
    job = folder_of([unknown[0], ranks[2], unknown[1]], tmp_path / "job")
    assert job.run() == torchprof.merge([*unknown, ranks[2]])


def test_beside_a_damaged_rank_others_are_saved(ranks: list[Run], tmp_path: Path) -> None:
    """The damaged file says nothing of its job; the others do."""
    job = folder_of(ranks[:2], tmp_path / "job")
    (tmp_path / "job" / "ranks" / "rank-000000.parquet").write_bytes(b"half")
    ranks[2].save(tmp_path / "job")
    assert job.run([1, 2]) == torchprof.merge(ranks[1:3])
    with pytest.raises(
        TorchprofError, match=r"has rank [12] of a job of 4 ranks, but rank 3 to be saved is of a job of 8"
    ):
        replace(ranks[3], metas=(replace(ranks[3].meta, world_size=8),)).save(tmp_path / "job")


# What is refused


def test_a_run_of_several_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TorchprofError, match=r"This run is of ranks 0 to 3, and .*job is for the run of each rank"):
        planted().save(f"{tmp_path}/job/")
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize(
    ("another", "says"),
    [
        ({"world_size": 8}, "has rank 1 of a job of 4 ranks, but rank 3 to be saved is of a job of 8 ranks."),
        ({"job": "b"}, "has rank 1 of the job 'a', but rank 3 to be saved is of the job 'b'."),
    ],
)
def test_a_rank_of_another_job_is_refused(another: dict[str, Any], says: str, ranks: list[Run], tmp_path: Path) -> None:
    first, last = (replace(run, metas=(replace(run.meta, job="a"),)) for run in (ranks[1], ranks[3]))
    folder_of([first], tmp_path / "job")
    before = files_in(tmp_path / "job")
    with pytest.raises(TorchprofError, match=says + " A folder is for the ranks of one job: save this one to another"):
        replace(last, metas=(replace(last.meta, **another),)).save(tmp_path / "job")
    assert files_in(tmp_path / "job") == before
    folder_of([last, ranks[2]], tmp_path / "job")  # the name of the job is unknown in the last one
    assert torchprof.open_job(tmp_path / "job").ranks == (1, 2, 3)


def test_ranks_that_are_not_there(job: JobFolder, tmp_path: Path) -> None:
    with pytest.raises(TorchprofError, match=r"job has no ranks 4 and 9. It has ranks 0 to 3."):
        job.run([1, 4, 9])
    with pytest.raises(TorchprofError, match=r"job has no ranks to read. It has ranks 0 to 3."):
        job.run([])


def test_a_folder_without_ranks(job: JobFolder, tmp_path: Path) -> None:
    for file in (tmp_path / "job" / "ranks").iterdir():
        file.unlink()
    assert job.ranks == ()
    with pytest.raises(TorchprofError, match=r"job has no ranks to read. It has none."):
        job.run()
    with pytest.raises(TorchprofError, match="job has no rank yet"):
        job.sql("SELECT 1 FROM ranks")


def test_what_is_not_a_job_folder_is_refused(ranks: list[Run], tmp_path: Path) -> None:
    with pytest.raises(TorchprofError, match=r"nowhere does not exist. `torchprof show RUNS -o"):
        torchprof.open_job(tmp_path / "nowhere")
    (tmp_path / "other").mkdir()
    with pytest.raises(TorchprofError, match=r"other is not a job folder: it has no torchprof-job.json"):
        torchprof.open_job(tmp_path / "other")
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(TorchprofError, match=r"other is not a job folder, and has other files: thesis.tex"):
        ranks[0].save(f"{tmp_path}/other/")
    assert files_in(tmp_path / "other") == ["thesis.tex"]
    with pytest.raises(TorchprofError, match=r"job cannot be made: the folder .*no does not exist"):
        ranks[0].save(f"{tmp_path}/no/job/")


@pytest.mark.parametrize("mark", ["", "[]", '{"format": "torchprof-job"}', '{"format": "x", "schema": 1}'])
def test_a_damaged_mark_is_refused(mark: str, job: JobFolder, ranks: list[Run], tmp_path: Path) -> None:
    (tmp_path / "job" / "torchprof-job.json").write_text(mark)
    for use in (lambda: torchprof.open_job(tmp_path / "job"), lambda: ranks[0].save(tmp_path / "job")):
        with pytest.raises(TorchprofError, match=r"torchprof-job.json is damaged"):
            use()


def test_a_folder_of_a_newer_schema_is_refused(job: JobFolder, ranks: list[Run], tmp_path: Path) -> None:
    (tmp_path / "job" / "torchprof-job.json").write_text(json.dumps({"format": "torchprof-job", "schema": 2}))
    for use in (lambda: torchprof.open_job(tmp_path / "job"), lambda: ranks[0].save(tmp_path / "job")):
        with pytest.raises(TorchprofError, match="has schema 2; this torchprof reads up to 1"):
            use()


def test_a_damaged_file_is_named(job: JobFolder, tmp_path: Path) -> None:
    file = tmp_path / "job" / "ranks" / "rank-000001.parquet"
    whole = file.read_bytes()
    for data in at_least_one((whole[:-9], b"", (tmp_path / "job" / "rows" / file.name).read_bytes())):
        file.write_bytes(data)
        with pytest.raises(TorchprofError, match=r"rank-000001.parquet is a damaged Parquet file"):
            job.run()
        assert job.run([0, 2]).metas


def test_a_number_of_processes_that_is_none_is_refused(job: JobFolder) -> None:
    for layers in (False, True):
        with pytest.raises(TorchprofError, match="processes= must be a number of processes, 1 or more, not 0"):
            job.comparison(layers=layers, processes=0)


def test_without_the_packages_errors_say_how_to_install_them(
    job: JobFolder, ranks: list[Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "duckdb", None)
    with pytest.raises(TorchprofError, match=r'pip install duckdb, or pip install "torchprof\[job\]"'):
        job.sql("SELECT 1")
    assert job.run() == torchprof.merge(ranks)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for use in (job.run, lambda: ranks[0].save(f"{tmp_path}/new/")):
        with pytest.raises(TorchprofError, match=r'pip install pyarrow, or pip install "torchprof\[job\]"'):
            use()
    assert job.ranks == (0, 1, 2, 3)


def test_damaged_ranks_are_left_out_and_told(job: JobFolder, ranks: list[Run], tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    for rank, content in ((1, pyarrow.array([[1, 2]])), (3, None)):
        file = tmp_path / "job" / "ranks" / f"rank-{rank:06}.parquet"
        if content is None:
            file.write_bytes(file.read_bytes()[:-100])
            continue
        table = pyarrow.parquet.read_table(file)
        for column in ("run", "compared"):
            at = table.schema.get_field_index(column)
            table = table.set_column(at, column, content)
        pyarrow.parquet.write_table(table, file)
    kept = [ranks[0], ranks[2]]
    for read, merged in (
        (job.run, torchprof.merge(kept)),
        (job.comparison, torchprof.merge(run.to_compare() for run in kept)),
    ):
        told: list[str] = []
        assert read(left_out=lambda error: told.append(str(error))) == merged  # noqa: B023
        assert ["rank-000001.parquet is a damaged" in told[0], "rank-000003.parquet is a damaged" in told[1]] == [
            True
        ] * 2
        with pytest.raises(
            TorchprofError, match=r"rank-000001.parquet is a damaged Parquet file: its column '\w+' has no"
        ):
            read()


def test_a_query_reaches_no_file_outside_of_the_folder(job: JobFolder, tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb")
    outside = tmp_path / "outside.csv"
    outside.write_text("a\n1\n")
    for query in (
        f"SELECT * FROM read_csv('{outside}')",
        f"COPY (SELECT 1) TO '{tmp_path / 'new.csv'}'",
        "SET enable_external_access = true",
        "INSTALL httpfs",
    ):
        with pytest.raises(duckdb.Error):
            job.sql(query).fetchall()
    assert not (tmp_path / "new.csv").exists()
    assert job.sql("SELECT count(*) FROM ranks").fetchall() == [(4,)]
    assert job.sql(f"SELECT * FROM read_csv('{outside}')", external=True).fetchall() == [(1,)]


def test_of_processes_that_save_one_rank_at_once_one_wins(ranks: list[Run], tmp_path: Path) -> None:
    """All tables are of one run, and the others get an error."""
    runs = [replace(ranks[0], metas=(replace(ranks[0].meta, machine=f"m{number}"),)) for number in range(6)]

    def saved(run: Run) -> str:
        try:
            run.save(f"{tmp_path}/job/")
        except TorchprofError as error:
            return str(error)
        return run.meta.machine

    with ThreadPoolExecutor(6) as pool:
        told = [*pool.map(saved, runs)]
    [winner] = [text for text in told if len(text) == 2]
    assert all("saves rank 0" in text or "has rank 0 already" in text for text in told if text != winner)
    job = torchprof.open_job(tmp_path / "job")
    assert job.run() == runs[int(winner[1])]
    assert files_in(tmp_path / "job") == [
        *(f"{name}/rank-000000.parquet" for name in ("ranks", "rows", "steps")),
        "torchprof-job.json",
    ]


def test_what_a_killed_process_claimed_is_free(ranks: list[Run], tmp_path: Path) -> None:
    folder_of(ranks[1:2], tmp_path / "job")
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait(60)
    claim = tmp_path / "job" / "ranks" / "rank-000000.claim"
    claim.write_text(f"elsewhere-{killed.pid}-0")
    with pytest.raises(TorchprofError, match=r"Another process saves rank 0 .* remove .*rank-000000\.claim"):
        ranks[0].save(f"{tmp_path}/job/")
    claim.write_text(f"{host()}-{killed.pid}-0")
    ranks[0].save(f"{tmp_path}/job/")
    assert torchprof.open_job(tmp_path / "job").ranks == (0, 1) and not claim.exists()
