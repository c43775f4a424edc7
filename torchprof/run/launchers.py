"""What the launchers of jobs, torchrun and Slurm, tell each process."""

from __future__ import annotations

import os


def name_of_job() -> str:
    """The job ID of torchrun or Slurm, "" without one. torchrun's is "none" if the user gave none."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return os.environ.get("SLURM_JOB_ID", "") if name == "none" else name
