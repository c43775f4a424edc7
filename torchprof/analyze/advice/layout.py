"""Memory layout: conversions for kernels that need another layout."""

from __future__ import annotations

import re
from collections.abc import Iterator

from torchprof.analyze.advice import Advice, merged, rule
from torchprof.analyze.advice.chains import Frames, among, is_device_work
from torchprof.analyze.advice.evidence import Evidence

# cuDNN's names; nhwcToFoldedNhwc is not such a conversion.
_CONVERSION = re.compile(r"nchwto\w*nhwc|nhwcto\w*nchw", re.IGNORECASE)


@rule
def channels_last_missed(evidence: Evidence) -> Iterator[Advice]:
    """Kernels that convert between NCHW and NHWC around a convolution, by cuDNN's names for them (``nchwToNhwcKernel``,
    ``nhwcToNchwKernel``).

    Tensor cores need channels last, so cuDNN converts other layouts. The gain is the time of these kernels. On the CPU
    oneDNN reorders inside an op, where it is not recorded. Needs a device.
    """
    took = evidence.took(_is_conversion)
    for group in merged(evidence, {number: work.device_ns for number, work in took.items()}):
        calls = sum(took[number].calls for number in group.numbers)
        yield group.advice(
            f"{calls:,} kernel{'s convert' if calls != 1 else ' converts'} between NCHW and NHWC around convolutions, "
            f"for {group.time} in total.",
            "Use channels last: `model = model.to(memory_format=torch.channels_last)`, and the same for the input.",
        )


@among(is_device_work)
def _is_conversion(frames: Frames) -> bool:
    return _CONVERSION.search(frames[-1].name) is not None
