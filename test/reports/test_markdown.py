"""The facts above the table in Markdown."""

from __future__ import annotations

from build.hand_made import row, run_of


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
