"""The kernels in the source of a graph of Inductor: hand-made sources in its forms for the CPU and for a GPU."""

from __future__ import annotations

import pytest

from torchprof.record.compiled.kept_graph import SourceKernel, read_source

CPU = """
cpp_fused_relu_0 = async_compile.cpp_pybinding(['float*', 'const float*'], r'''
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C"  void  kernel(float* in_out_ptr0, const float* in_ptr0)
''')

class Runner:
    def call(self, args):
        primals_1, primals_2, tangents_1 = args
        args.clear()
        assert_size_stride(primals_1, (4, 8), (8, 1), 'input')
        buf0 = empty_strided_cpu((4, 4), (4, 1), torch.float32)
        # Topologically Sorted Source Nodes: [linear], Original ATen: [aten.mm]
        extern_kernels.mm(primals_1, reinterpret_tensor(primals_2, (8, 4), (1, 8), 0), out=buf0)
        del primals_1
        buf1 = reinterpret_tensor(buf0, (2, 8), (8, 1), 0); del buf0  # reuse
        cpp_fused_relu_0(buf1, tangents_1)
        buf2 = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(buf1, buf1, buf1, scale=0.5)
        buf3 = buf2[0]
        assert_alignment(buf3, 16, 'torch.ops.aten')
        buf4 = buf2[1]
        del buf2
        buf5 = extern_kernels.convolution(buf3, buf4, stride=(2, 2), padding=(0, 0), groups=1, bias=None)
        return (buf5, None, reinterpret_tensor(buf4, (4, ), (1, ), 0), primals_2, )
"""

GPU = """
triton_poi_fused_relu_0 = async_compile.triton('triton_poi_fused_relu_0', '''
import triton
@triton_heuristics.pointwise(size_hints=[64])
@triton.jit
def triton_poi_fused_relu_0(in_ptr0, in_out_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    xnumel = 64
''', device_str='cuda')

def call(args):
    arg0_1, arg1_1 = args
    args.clear()
    with torch.cuda._DeviceGuard(0):
        torch.cuda.set_device(0)
        buf0 = empty_strided_cuda((4, 4), (4, 1), torch.float32)
        stream0 = get_raw_stream(0)
        triton_poi_fused_relu_0.run(arg0_1, arg1_1, buf0, 64, stream=stream0)
        buf1 = empty_strided_cuda((4, 4), (4, 1), torch.float32)
        extern_kernels.addmm(arg0_1, buf0, arg1_1, alpha=1, beta=1, out=buf1)
        del buf0
    return (buf1, )
"""


def kernel(name: str, given: str, writes: str, has_event: bool = True) -> SourceKernel:
    is_library = bool(name) and "fused" not in name
    names = tuple(given.split())
    return SourceKernel(name, frozenset(names), frozenset(writes.split()), is_library, has_event, names)


def test_the_kernels_of_a_graph_on_the_cpu() -> None:
    graph = read_source(CPU)
    assert graph.inputs == ("primals_1", "primals_2", "tangents_1") and graph.is_backward
    attention = "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert graph.kernels == (
        kernel("extern_kernels.mm", "primals_1 primals_2", "buf0"),
        kernel("", "buf0", "buf1", has_event=False)._replace(given=()),
        kernel("cpp_fused_relu_0", "buf1 tangents_1", "buf1", has_event=False),
        kernel(attention, "buf1 buf1 buf1", "buf2"),
        kernel("extern_kernels.convolution", "buf2 buf2", "buf5"),
    )
    assert [one.number for one in graph.kernels if one.is_library] == [0, 2, 5]
    assert graph.returned == ("buf5", "", "buf2", "primals_2")


def test_the_kernels_of_a_graph_on_a_gpu() -> None:
    graph = read_source(GPU)
    assert not graph.is_backward
    first, second = graph.kernels
    assert first == kernel("triton_poi_fused_relu_0", "arg0_1 arg1_1 buf0", "arg1_1 buf0")
    assert second == kernel("extern_kernels.addmm", "arg0_1 buf0 arg1_1", "buf1")


def test_a_call_that_writes_into_the_result_of_another_has_no_number() -> None:
    (found,) = read_source(GPU.replace("out=buf1", "out=buf0")).kernels[1:]
    assert found.number is None


def test_a_kernel_in_cpp_that_opens_a_range_has_an_event() -> None:
    marked = CPU.replace("#include", "RAIIAtenRecordFunctionHandle record_graph_0;\n#include")
    assert [one.has_event for one in read_source(marked).kernels if "fused" in one.name] == [True]


def test_of_a_kernel_of_unknown_form_all_arguments_may_be_written() -> None:
    unknown = CPU.replace("['float*', 'const float*'], ", "")
    (found,) = [one for one in read_source(unknown).kernels if "fused" in one.name]
    assert found.writes == {"buf1", "tangents_1"}


@pytest.mark.parametrize(
    "source",
    [
        "def call(args:",
        "x = 1",
        GPU + "\ndef partition_0(args): pass\n",
        GPU + "\ndef call(args): pass\n",
        GPU.replace("        del buf0\n", "        mystery(buf0)\n"),
    ],
    ids=["no Python", "no graph", "partitions", "two graphs", "an unknown statement"],
)
def test_a_source_of_another_form_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match=r"source of|unknown statement"):
        read_source(source)
