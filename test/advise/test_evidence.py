"""The evidence of rules: both ways to sum the rows of a run agree."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from build.all_kinds import KINDS

from torchprof.advise.chains import always
from torchprof.advise.evidence import Evidence
from torchprof.run.words import BACKWARD, FORWARD, PHASES


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phases", [PHASES, (FORWARD,), (BACKWARD,)], ids=["all", "forward", "backward"])
def test_took_of_all_rows_is_what_a_predicate_that_always_holds_takes(kind: str, phases: Sequence[str]) -> None:
    """``always`` is answered from the sums of the run by layer, other predicates from the rows themselves."""
    evidence = Evidence(KINDS[kind]())
    assert evidence.took(always, phases=phases) == evidence.took(lambda frames: True, phases=phases)
