"""Damaged files: whatever a reader is given, the outcome is a run or a TorchprofError, in limited time and memory.

One real file of each kind is changed at random, in its structure (a value, a key, an entry of a list) or in its bytes.
What is read is then drawn, saved and read again, which must give the same run. Each kind has a process of its own with
a limit of memory, and each input a limit of time.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate

import torchprof
from torchprof import Run, TorchprofError
from torchprof.reports import known

SECONDS, MIB = 10, 1024
_DATA = Path(__file__).parents[1] / "test" / "data"

_NUMBERS = (0, 1, -1, 255, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400)
_FLOATS = (1.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), -float("inf"))
_TEXTS = ("", "x", "\ud800", "a\0b", "\x1b[31m", "<script>", "../../etc", "\n\r\t", "\u202e", "%s{}", "=1+1", "forward")
_TEXTS += ("backward", "cuda:0", "cuda:-1", "nan", "op", "aten::mm", "[1, 2]", "ProfilerStep#1", "nn.Module: Net_0")


def any_value(rng: random.Random) -> Any:
    """A value that may be anywhere in JSON, often one that no program would write."""
    nested: Any = 1
    for _ in range(rng.choice((3, 50, 700))):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    few = [rng.choice(_TEXTS) for _ in range(rng.randrange(3))]
    plain = (None, True, rng.choice(_NUMBERS), rng.choice(_FLOATS), rng.choice(_TEXTS), rng.randrange(-5, 100))
    return rng.choice((*plain, few, dict.fromkeys(few, 1), nested, "N" * rng.choice((300, 5_000)), rng.random() * 1e9))


def near(rng: random.Random, value: Any) -> Any:
    """A value like this one, but another."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, value * 1_000, value << 40, 0, f"{value:x}", [value]))
    if isinstance(value, float):
        return rng.choice((-value, value * 1e6, 0.0, value + 1, str(value)))
    if isinstance(value, str):
        return rng.choice((value[:-1], f"{value}#2", value * 2, value.upper(), value[::-1], rng.choice(_TEXTS)))
    entries = [*(value.items() if isinstance(value, dict) else value)]
    if entries:
        chosen = rng.randrange(len(entries))
        change: Sequence[Any] = rng.choice(([], [entries[chosen]] * 2, [rng.choice(entries)]))
        entries[chosen : chosen + 1] = change
    return dict(entries) if isinstance(value, dict) else entries


def change(rng: random.Random, document: Any) -> None:
    """Change one to four values in a JSON document, most of them deep inside."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        inside, place = document, None
        while isinstance(inside, (dict, list)) and inside and (place is None or rng.random() < 0.93):
            key = rng.choice([*inside]) if isinstance(inside, dict) else rng.randrange(len(inside))
            place, inside = (inside, key), inside[key]
        if place is None:
            return
        container, key = place
        if rng.random() < 0.1:
            del container[key]
        else:
            container[key] = near(rng, inside) if rng.random() < 0.6 else any_value(rng)


def damage(rng: random.Random, data: bytes) -> bytes:
    """The bytes of a file with some of them changed, left out, repeated or added."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        place, length = rng.randrange(len(changed) + 1), rng.choice((1, 2, 20, 500))
        which = rng.randrange(4)
        if which == 0:
            del changed[place : place + length]
        elif which == 1:
            changed[place:place] = rng.randbytes(min(length, 20))
        elif which == 2:
            changed[place:place] = changed[rng.randrange(len(changed) + 1) :][:length]
        else:
            changed[place : place + 1] = rng.randbytes(1)
    return bytes(changed[: rng.randrange(len(changed) + 1)] if rng.random() < 0.05 else changed)


def inputs(rng: random.Random, documents: Sequence[str], wrap: Callable[[bytes], bytes]) -> Iterator[bytes]:
    """Changed files without end. ``wrap`` makes a file of the text of a document."""
    while True:
        text = rng.choice(documents)
        if rng.random() < 0.25:
            yield damage(rng, wrap(text.encode()))
            continue
        document = json.loads(text)
        # A value of a trace is usually one of an event: many of them are changed, and few of them are needed.
        parts = (
            rng.sample(document["traceEvents"], 5) if "traceEvents" in document and rng.random() < 0.8 else [document]
        )
        for part in parts:
            change(rng, part)
        yield wrap(json.dumps(document, ensure_ascii=rng.random() < 0.9).encode("utf-8", "surrogatepass"))


def outcome(rng: random.Random, path: Path, read: Callable[[Path], Run]) -> str:
    """What becomes of a file: "run" or "refused". Any other exception than TorchprofError passes through."""
    try:
        run = read(path)
    except TorchprofError as error:
        assert 0 < len(str(error)) < 3_000, f"a message of {len(str(error))} characters"
        return "refused"
    for name in rng.sample([*known()], 3):
        try:
            str(run.report(name))
        except TorchprofError:
            continue
    str(run)
    with suppress(TorchprofError):
        torchprof.merge([run, run], add_cycles=True)
    run.save(path.parent / "again.json")
    assert torchprof.load(path.parent / "again.json") == run, "another run after saving"
    return "run"


# The files


def recorded(folder: Path) -> tuple[str, str]:
    """The text of a saved run of two ranks with all measures, and of the trace of another recording."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    flags = {"profile_memory": True, "with_flops": True, "record_shapes": True, "with_stack": True}
    with torchprof.Profile(model, with_timeline=True, **flags) as prof:
        for _ in range(2):
            model(torch.rand(4, 8)).sum().backward()
            prof.step()
    prof.run.save(folder / "run.json")
    text = (folder / "run.json").read_text()
    document = json.loads(text)
    document["metas"][0]["rank"] = 1
    with torchprof.annotate(model), torch.profiler.profile(**{**flags, "with_flops": False}) as trace:
        model(torch.rand(4, 8)).sum().backward()
    trace.export_chrome_trace(str(folder / "trace.json"))
    return text, (folder / "trace.json").read_text()


def traces_of_gpus() -> Iterator[str]:
    """The first events of real traces of GPUs."""
    for file in sorted(_DATA.glob("gpu/*/trace*.json.gz")):
        document = json.loads(gzip.decompress(file.read_bytes()))
        document["traceEvents"] = document["traceEvents"][:600]
        yield json.dumps(document)


def parquet_of(data: bytes, folder: Path) -> bytes:
    """A Parquet file whose metadata are the run of a document, and whose columns are those of a real file."""
    import pyarrow.parquet as parquet

    table = parquet.read_table(folder / "run.parquet")
    file = io.BytesIO()
    with parquet.ParquetWriter(file, table.schema, store_schema=False) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({b"torchprof-run": b64encode(gzip.compress(data, 1))})
    return file.getvalue()


def rank_of(data: bytes, template: bytes) -> bytes:
    """A file of a rank of a job folder like another one, but with the run of a document in it."""
    import pyarrow
    import pyarrow.parquet as parquet

    table = parquet.read_table(io.BytesIO(template))
    for name in ("run", "compared"):
        column = pyarrow.array([gzip.compress(data, 1)], pyarrow.binary())
        table = table.set_column(table.schema.get_field_index(name), name, column)
    file = io.BytesIO()
    parquet.write_table(table, file)
    return file.getvalue()


KINDS = {
    "run": "a saved run",
    "run.gz": "a saved run in gzip",
    "parquet": "a saved run as Parquet",
    "job": "a rank of a job folder",
    "trace": "a trace",
    "trace.gz": "a trace in gzip",
}


def cases(kind: str, folder: Path, rng: random.Random) -> tuple[Path, Iterator[bytes], Callable[[Path], Run]]:
    """The name of a file of this kind, what it has, and what reads it."""
    run, trace = recorded(folder)
    if kind.startswith("trace"):
        wrap = gzip.compress if kind.endswith("gz") else bytes
        return folder / "t.json", inputs(rng, [trace, *traces_of_gpus()], wrap), torchprof.from_trace
    old = [file.read_text() for file in sorted(_DATA.glob("run-schema-*.json"))]
    if not kind.startswith("run"):
        torchprof.load(folder / "run.json").save(folder / "run.parquet")
        torchprof.load(folder / "run.json").save(f"{folder}/job/")
    if kind == "parquet":
        return folder / "p.parquet", inputs(rng, [run], lambda data: parquet_of(data, folder)), torchprof.load
    if kind == "job":
        path = folder / "job" / "ranks" / "rank-000000.parquet"
        template = path.read_bytes()
        return path, inputs(rng, [run], lambda data: rank_of(data, template)), lambda _: torchprof.load(folder / "job")
    return folder / "r.json", inputs(rng, [run, *old], gzip.compress if kind == "run.gz" else bytes), torchprof.load


class TooLong(BaseException):
    """An input takes more than its time."""


def stop(*_: object) -> None:
    raise TooLong


def check(kind: str, seed: int, count: int) -> tuple[Counter[str], float]:
    """Outcomes of so many inputs, by name, and the seconds of the slowest. Prints each kind of failure once."""
    before = signal.signal(signal.SIGALRM, stop)
    rng, outcomes, longest = random.Random(seed), Counter[str](), 0.0
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path, files, read = cases(kind, Path(name), rng)
        for number, data in enumerate(islice(files, count)):
            path.write_bytes(data)
            start = time.perf_counter()
            signal.alarm(SECONDS)
            try:
                outcomes[outcome(rng, path, read)] += 1
            except (Exception, TooLong) as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                what = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}"
                outcomes["failed"] += 1
                if what not in outcomes:
                    kept = Path(tempfile.gettempdir()) / f"fuzz-{kind}-{seed}-{number}"
                    kept.write_bytes(data)
                    print(f"{kept}: {what}: {str(error)[:200]!r}", file=sys.stderr, flush=True)
                outcomes[what] += 1
            finally:
                signal.alarm(0)
            longest = max(longest, time.perf_counter() - start)
    signal.signal(signal.SIGALRM, before)
    return outcomes, longest


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few inputs: shows that it runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10_000, help="inputs of each kind (default: 10,000)")
    parser.add_argument("--kind", choices=[*KINDS], help="check one kind in this process")
    options = parser.parse_args()
    count = 20 if options.quick else options.count
    if options.kind:
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        pages = int(Path("/proc/self/statm").read_text().split()[0])  # of addresses, which are limited
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 * MIB << 20),) * 2)
        outcomes, longest = check(options.kind, options.seed, count)
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - used
        figures = [outcomes["run"], outcomes["refused"], outcomes["failed"], f"{longest:.1f} s", f"{more >> 10} MiB"]
        print(json.dumps([KINDS[options.kind], count, *figures]))
        sys.exit(1 if outcomes["failed"] or more >> 10 > MIB else 0)
    rows, failed = [], False
    for kind in KINDS:
        command = [sys.executable, "-m", "benchmarks.fuzz", "--kind", kind, "--seed", str(options.seed)]
        done = subprocess.run([*command, "--count", str(count)], stdout=subprocess.PIPE, text=True, check=False)
        failed |= done.returncode != 0
        rows.append(
            json.loads(done.stdout.splitlines()[-1]) if done.stdout else [KINDS[kind], count, "the process died"]
        )
    headings = ["Damaged file", "Inputs", "Runs", "Refused", "Failed", "Slowest", "Memory"]
    print(tabulate(rows, headings, tablefmt="github"))
    sys.exit(failed)


if __name__ == "__main__":
    main()
