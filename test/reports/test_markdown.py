"""The facts above the table in Markdown."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

import pytest
import torch
from build.hand_made import row, run_of
from build.page import data_in
from torch import nn

import torchprof
from torchprof import Profile
from torchprof.cli import main


def test_facts_with_commas_are_separated_by_semicolons() -> None:
    run = run_of(
        [row(0, cpu_ns=1)],
        environment=(("built", "kernels for AVX512, oneDNN"), ("threads", "2 in an operator, 2 between")),
        switches=(("cudnn_tf32", "True"), ("detect_anomaly", "False")),
        flags=(("record_shapes", True), ("profile_memory", True)),
    )
    assert run.report("markdown").splitlines()[1:4] == [
        "- Ran on: built: kernels for AVX512, oneDNN; threads: 2 in an operator, 2 between",
        "- Switches: cudnn\\_tf32=True; detect\\_anomaly=False",
        "- Recorded with: record\\_shapes; profile\\_memory",
    ]


def test_every_view_says_what_was_recorded_and_when(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHPROF_COMMIT", "0159fa72")
    monkeypatch.setattr("sys.argv", ["/home/me/train.py"])
    before = datetime.now(timezone.utc).replace(microsecond=0)
    with Profile(model := nn.Linear(2, 2)) as prof:
        after = datetime.now(timezone.utc)
        model(torch.rand(1, 2))
        time.sleep(1.1)
    run = prof.run
    assert run is not None
    date = datetime.strptime(run.meta.date, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc)
    assert before <= date <= after, "when the recording began, not when it ended"
    words = f"{date:%Y-%m-%d %H:%M:%S} UTC"
    assert run.meta.program == (("file", "train.py"), ("commit", "0159fa72"), ("date", words))
    run.save(tmp_path / "run.json")
    main(["show", str(tmp_path / "run.json")])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"file train.py commit 0159fa72 date {words}" in shown
    markdown = re.sub(r"\\(.)", r"\1", run.report("markdown"))
    assert f"- Recorded: file: train.py; commit: 0159fa72; date: {words}\n" in markdown
    where = f"{dict(run.meta.environment)['CPU']} · input [1, 2]"
    assert data_in(run.report("html"))["program"] == [f"train.py · commit 0159fa72 · {words} · {where}"]
    environment = (("CUDA", "12.8, cuDNN 91002, 1 × H100 (80 GB)"), ("CPU", "a processor"))
    on_device = replace(run, metas=(replace(run.meta, device="cuda", environment=environment),))
    [program] = data_in(on_device.report("html"))["program"]
    assert program.endswith(" UTC · CUDA 12.8, cuDNN 91002, 1 × H100 (80 GB) · input [1, 2]")
    earlier = replace(run, metas=(replace(run.meta, date="2026-01-02T03:04:05Z", commit=""),))
    assert data_in(torchprof.compare(earlier, run).report("html"))["program"] == [
        f"before: train.py · 2026-01-02 03:04:05 UTC · {where}",
        f"after: train.py · commit 0159fa72 · {words} · {where}",
    ]
