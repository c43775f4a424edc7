"""MACs and FLOPs of whole models, forward and backward: against torch's counter where it is correct, and by hand."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from build.architectures import ARCHITECTURES, attention_macs, encoder
from build.events import MAIN, op, walk_of
from build.libraries import HAS_SHAPES_OF_LISTS, RELEASE, usable_transformers
from build.models import Checkpointed, Layers, Several
from build.phases import in_column_of
from build.snapshots import snapshot
from build.warnings import sentences
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call, grad, jacrev, vmap
from torch.nn import functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.conv import _ConvNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

import torchprof
from examples.models import AlexNet, LeNet5
from torchprof.attribute.event_names import STOPPED
from torchprof.attribute.events import Event, Kind
from torchprof.attribute.rule import Attribution
from torchprof.measure.flops.estimate import Estimate
from torchprof.run.words import Signature


def profiled(step: Callable[[], Any], model: nn.Module | list[nn.Module] | None = None) -> torchprof.Run:
    with torchprof.Profile(model or nn.Identity(), with_flops=True) as prof:
        step()
    return prof.run


def counted(step: Callable[[], Any], model: nn.Module | None = None) -> torchprof.Run:
    """A run in which nothing may be uncounted."""
    run = profiled(step, model)
    assert not uncounted(run)
    return run


def total(run: torchprof.Run, field: str = "macs", phase: str = "forward") -> int:
    """A sum over the trees and the work outside layers, which must equal the sum over the rows."""
    inside = sum(getattr(run.tree(phase, root).total, field) for root in range(len(run.roots)))
    result: int = inside + getattr(run.no_layer(phase), field)
    assert result == sum(getattr(row.cost, field) for row in run.rows if in_column_of(row.phase) == phase)
    return result


def macs(step: Callable[[], Any]) -> int:
    """The MACs of all phases together; nothing may be uncounted."""
    run = counted(step)
    return sum(total(run, "macs", phase) for phase in run.phases())


def uncounted(run: torchprof.Run) -> list[str]:
    """The ops that are not counted, which must be the same in the table and in the rows."""
    listed = [warning for warning in sentences(run) if warning.startswith("Not counted")]
    assert bool(listed) == any(total(run, "uncounted", phase) for phase in run.phases())
    return listed


def torchs(step: Callable[[], Any]) -> FlopCounterMode:
    """torch's counter around a step. It counts attention as separate products: two FLOPs for each MAC."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        step()
    return counter


def back(output: Any) -> None:
    """Run backward from any result."""
    while not isinstance(output, Tensor):
        output = output[0]
    output.sum().backward()


class Rule:
    """A run of a model whose modules have known multiply-accumulates: ``forward`` and ``backward``. Backward has those
    of forward once for the weight and once for the input, if they need a gradient."""

    def __init__(self, model: nn.Module, *inputs: Any) -> None:
        self.forward = 0
        self.backward = 0
        kinds = (_ConvNd, nn.Linear, nn.LSTM)
        handles = [m.register_forward_hook(self._called) for m in model.modules() if isinstance(m, kinds)]
        model(*inputs)
        for handle in handles:
            handle.remove()

    def _called(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        given = inputs[0]
        if isinstance(module, nn.LSTM):
            # Each token meets every weight; the library always computes all gradients.
            found = given.numel() // module.input_size * sum(p.numel() for p in module.parameters() if p.dim() == 2)
            times = 2
        else:
            assert isinstance(module, (_ConvNd, nn.Linear))
            # An element of the result (transposed: of the input) meets one row of the weights.
            elements = given if isinstance(module, _ConvNd) and module.transposed else output
            found = elements.numel() * module.weight[0].numel()
            times = module.weight.requires_grad + given.requires_grad
        self.forward += found
        self.backward += times * found


@contextlib.contextmanager
def formula(target: Any, function: Callable[..., int]) -> Iterator[None]:
    """A user's formula, in place of any existing one, inside the block."""
    before = dict(flop_registry)
    for key in (target, *(getattr(target, name) for name in target.overloads())):
        flop_registry.pop(key, None)
    try:
        register_flop_formula(target)(function)
        yield
    finally:
        flop_registry.clear()
        flop_registry.update(before)


# Architectures


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_counts_of_an_architecture_equal_torchs_counter_and_the_rule(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, inputs = architecture.make(), architecture.inputs()

    def step() -> None:
        back(model(*inputs))

    run = counted(step, model)
    forward, backward = total(run), total(run, "macs", "backward")
    assert forward > 0 and backward > 0
    if architecture.layers_only:
        rule = Rule(model, *inputs)
        assert (forward, backward) == (rule.forward, rule.backward)
    if not any(isinstance(module, nn.LSTM) for module in model.modules()):
        theirs = torchs(lambda: model(*inputs)).get_total_flops()
        assert 2 * forward == theirs
        if not architecture.grouped:
            # A fused kernel of attention makes QKᵀ again: half as much more as the forward's two products.
            expected = torchs(step).get_total_flops() - theirs + architecture.attention
            assert 2 * backward == expected
    for row in run.rows:
        assert row.cost.flops >= 2 * row.cost.macs
    assert total(run, "flops") > 2 * forward


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_counts_of_each_layer_equal_torchs_counter(name: str) -> None:
    """In eval mode without gradients: some models then take another path with the same products."""
    architecture = ARCHITECTURES[name]
    model, inputs = architecture.make().eval(), architecture.inputs()
    with torch.no_grad():
        run = counted(lambda: model(*inputs), model)
    kinds = {type(module) for module in model.modules()}
    if nn.LSTM in kinds:
        assert total(run) == Rule(model, *inputs).forward
        return
    theirs = torchs(lambda: model(*inputs)).get_flop_counts()  # with gradients: it does not know the fused paths
    if nn.MultiheadAttention in kinds:
        assert 2 * total(run) == sum(theirs["Global"].values())
        return
    nodes = {node.layer.name: node for node in run.tree("forward").walk()}
    assert theirs.keys() - {"Global"} <= nodes.keys()
    for path in theirs.keys() - {"Global"}:
        assert 2 * nodes[path].total.macs == sum(theirs[path].values())
    assert 2 * nodes[type(model).__name__].total.macs == sum(theirs["Global"].values())


@pytest.mark.parametrize("name", [name for name, each in ARCHITECTURES.items() if each.attention])
def test_attention_in_separate_products_has_a_backward_of_twice_the_forward(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, inputs = architecture.make(), architecture.inputs()

    def step() -> None:
        with sdpa_kernel(SDPBackend.MATH):
            back(model(*inputs))

    run = profiled(step, model)
    theirs = torchs(step).get_total_flops()
    assert 2 * (total(run) + total(run, "macs", "backward")) == theirs


# Known figures


def test_lenet_5() -> None:
    model, images = LeNet5().eval(), torch.rand(1, 1, 32, 32)
    run = profiled(lambda: model(images), model)
    assert total(run) == 416_520
    # Biases and tanh of 6·28², 16·10², 120 and 84, biases of 10, average pools of 4 elements a window.
    others = 2 * (4704 + 1600 + 120 + 84) + 10 + 4704 + 1600
    assert total(run, "flops") == 2 * 416_520 + others


def test_alexnet() -> None:
    with torch.device("meta"):
        model, images = AlexNet().eval(), torch.rand(1, 3, 224, 224)
    assert total(profiled(lambda: model(images), model)) == 714_188_480


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_bert_base(attention: str) -> None:
    transformers = usable_transformers()
    config = transformers.BertConfig(attn_implementation=attention)
    with torch.device("meta"):
        model, tokens = transformers.BertModel(config).eval(), torch.zeros(1, 128, dtype=torch.long)
        mask = torch.ones(1, 12, 128, 128)  # passed in full: making a mask reads values, which meta tensors do not have
    with torch.no_grad():
        run = profiled(lambda: model(tokens, attention_mask=mask), model)
    assert total(run) == 11_174_215_680
    assert not uncounted(run)


@pytest.mark.parametrize("train", [True, False])
def test_lstm_and_attention_of_known_size(train: bool) -> None:
    def once(model: nn.Module, *inputs: Tensor) -> torchprof.Run:
        model.train(train)
        with torch.set_grad_enabled(train):
            return counted(lambda: model(*inputs), model)

    assert total(once(nn.LSTM(128, 256, 2), torch.rand(32, 4, 128))) == 117_440_512
    x = torch.rand(2, 64, 256)
    assert total(once(nn.MultiheadAttention(256, 8, batch_first=True), x, x, x)) == 37_748_736
    assert total(once(nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True), x)) == 104_857_600


# Models of transformers

_SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 40}
_WORDS = {"vocab_size": 60, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 1, "num_heads": 4, "decoder_start_token_id": 0}
_BERT = {"attention_probs_dropout_prob": 0.0}
_LENGTH = 9
_ONCE = attention_macs(2, 4, _LENGTH, _LENGTH, 8)  # one layer's, of batch 2, 4 heads of 8


class Pretrained:
    """A class of transformers with its configuration; ``fused``: the calls of attention with a fused kernel."""

    def __init__(self, name: str, config: dict[str, Any], fused: int, grouped_mm: int = 0) -> None:
        self.name = name
        self.config = config
        self.fused = fused
        self.grouped_mm = grouped_mm

    def make(self, attention: str) -> nn.Module:
        transformers = usable_transformers()
        kind = getattr(transformers, self.name)
        config = kind.config_class(**self.config, attn_implementation=attention)
        model: nn.Module = kind(config)
        return model


_EXPERTS = 4
PRETRAINED = {
    "BERT": Pretrained("BertForMaskedLM", {**_SMALL, **_WORDS, **_BERT}, fused=1),
    "GPT-2": Pretrained("GPT2LMHeadModel", {**_GPT2, **_WORDS}, fused=1),
    # Where there is a bias of positions it needs a gradient, which no fused kernel gives: only what looks across is.
    "T5": Pretrained("T5ForConditionalGeneration", {**_T5, **_WORDS, "dropout_rate": 0.0}, fused=1),
    "Llama": Pretrained("LlamaForCausalLM", {**_SMALL, **_WORDS, "num_key_value_heads": 2}, fused=1),
    "Mixtral": Pretrained(
        "MixtralForCausalLM",
        {**_SMALL, **_WORDS, "num_key_value_heads": 2, "num_local_experts": _EXPERTS, "num_experts_per_tok": 2},
        fused=1,
        # Of each token two experts: gate and up are one matrix, then down.
        grouped_mm=(2 * _LENGTH) * 2 * (32 * 80 + 40 * 32),
    ),
}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", PRETRAINED)
def test_the_counts_of_a_transformers_model_equal_torchs_counter(name: str, attention: str) -> None:
    pretrained = PRETRAINED[name]
    model = pretrained.make(attention).train()
    tokens = torch.randint(3, 60, (2, _LENGTH))

    def forward() -> Tensor:
        return model(input_ids=tokens, labels=tokens).loss

    run = counted(lambda: forward().backward(), model)
    theirs = torchs(forward).get_total_flops() // 2
    both = torchs(lambda: forward().backward()).get_total_flops() // 2
    # torch's counter does not know the products of grouped experts.
    ran_grouped = pretrained.grouped_mm if "aten::_grouped_mm" in names(run) else 0
    assert total(run) == theirs + ran_grouped
    fused = pretrained.fused * _ONCE // 2 if attention == "sdpa" else 0
    if "aten::_scaled_dot_product_flash_attention_for_cpu_backward" not in names(run):
        assert attention == "eager" or pretrained.fused == 0 or RELEASE < (2, 7)
        fused = 0
    assert total(run, "macs", "backward") == both - theirs + fused + 2 * ran_grouped


def names(run: torchprof.Run) -> set[str]:
    return {frame.name for row in run.rows for frame in row.frames}


# What needs a gradient


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4))


FIRST, LAST, ROWS = 3 * 5, 5 * 4, 7


@pytest.mark.parametrize("input_needs", [True, False])
@pytest.mark.parametrize("frozen", [(), ("0",), ("2",), ("0", "2")])
def test_backward_is_once_for_each_weight_and_each_input_that_needs_a_gradient(
    input_needs: bool, frozen: tuple[str, ...]
) -> None:
    model = two_layers()
    for number in frozen:
        model.get_submodule(number).requires_grad_(False)
    if not input_needs and len(frozen) == 2:
        return  # nothing needs a gradient
    x = torch.rand(ROWS, 3, requires_grad=input_needs)
    run = profiled(lambda: back(model(x)), model)
    first, _, last = run.tree("backward").children
    reached = input_needs or "0" not in frozen  # whether a gradient goes back past the last layer
    assert first.total.macs == ROWS * FIRST * (("0" not in frozen) + input_needs)
    assert last.total.macs == ROWS * LAST * (("2" not in frozen) + reached)
    assert total(run) == ROWS * (FIRST + LAST)


def test_only_biases_need_no_products() -> None:
    model = two_layers()
    model[0].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    run = profiled(lambda: back(model(torch.rand(ROWS, 3))), model)
    assert total(run, "macs", "backward") == ROWS * LAST  # for what goes on to the first bias


def test_detached_and_under_no_grad() -> None:
    model = two_layers()

    def step() -> None:
        with torch.no_grad():
            hidden = model[0](torch.rand(ROWS, 3))
        back(model[2](hidden))

    run = profiled(step, model)
    assert total(run) == ROWS * (FIRST + LAST)
    assert total(run, "macs", "backward") == ROWS * LAST
    assert macs(lambda: model[0](torch.rand(ROWS, 3)).detach()) == ROWS * FIRST


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_counts_the_segment_again(use_reentrant: bool) -> None:
    model, x = Checkpointed(use_reentrant), torch.rand(2, 4, requires_grad=True)
    run = counted(lambda: back(model(x)), model)
    layer = 2 * 4 * 4
    assert total(run) == 3 * layer
    assert total(run, "macs", "backward") == 6 * layer
    # The segment's forward again, bias and tanh too.
    block = run.tree("forward").children[1].total
    assert (block.macs, block.flops) == (layer, 2 * layer + 8 + 8)
    again = run.tree("recompute")
    assert (again.total.macs, again.total.flops) == (block.macs, block.flops)
    assert again.children[1].total.macs == layer


@pytest.mark.parametrize(("use_reentrant", "early_stop"), [(True, True), (True, False), (False, False), (False, True)])
def test_recomputed_work_equals_torchs_counter(use_reentrant: bool, early_stop: bool) -> None:
    """Non-reentrant checkpoints stop as soon as backward has all it needs: before the last product of the segment."""
    segment, x = two_layers(), torch.rand(ROWS, 3, requires_grad=True)

    def step() -> None:
        with set_checkpoint_early_stop(early_stop):
            back(checkpoint(segment, x, use_reentrant=use_reentrant))

    run = profiled(step, segment)
    assert (total(run), total(run, "macs", "backward")) == (ROWS * (FIRST + LAST), 2 * ROWS * (FIRST + LAST))
    again = torchs(step).get_total_flops() // 2 - 3 * ROWS * (FIRST + LAST)
    assert total(run, "macs", "recompute") == again == run.tree("recompute").total.macs


def test_gradients_that_are_there_are_added_to() -> None:
    model, x = two_layers(), torch.rand(ROWS, 3)

    def step() -> None:
        back(model(x))

    first, second = profiled(step, model), profiled(step, model)
    twice = profiled(lambda: (step(), step()), model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert total(first, "macs", "backward") == total(second, "macs", "backward")
    assert total(second, "flops", "backward") == total(first, "flops", "backward") + parameters
    assert total(twice, "macs", "backward") == 2 * total(first, "macs", "backward")
    assert total(twice, "flops", "backward") == 2 * total(second, "flops", "backward")


def test_double_backward() -> None:
    """y = xW, g = 1Wᵀ; for the sum of the squares of both: all products by hand, and by torch's counter."""
    weight = torch.rand(3, 5, requires_grad=True)

    def step() -> None:
        x = torch.rand(ROWS, 3, requires_grad=True)
        (gradient,) = torch.autograd.grad((x @ weight).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()

    run = profiled(step)
    # Forward, its gradient; then for gradient = 2yWᵀ those of both factors, and for y again those of both.
    assert total(run) + total(run, "macs", "backward") == 6 * ROWS * 15
    assert torchs(step).get_total_flops() == 2 * 6 * ROWS * 15


# More than one model, and more than one call


def test_a_layer_that_is_called_again_counts_again() -> None:
    model = Several()
    run = profiled(lambda: back(model(torch.rand(2, 4))), model)
    shared, once = run.tree("forward").children
    assert (shared.total.macs, once.total.macs) == (3 * 32, 32)
    assert total(run, "macs", "backward") == 2 * 4 * 32 - 32  # the first of them has an input without a gradient


def test_several_models() -> None:
    """A step of a GAN: the gradient of the generator goes through the discriminator."""
    generator, discriminator = nn.Linear(3, 4), nn.Linear(4, 1)
    run = profiled(lambda: back(discriminator(generator(torch.rand(2, 3)))), [generator, discriminator])
    assert [run.tree("forward", root).total.macs for root in (0, 1)] == [24, 8]
    assert [run.tree("backward", root).total.macs for root in (0, 1)] == [24, 16]
    assert total(run) == 32


def test_work_of_layers_that_were_not_selected_is_separate() -> None:
    model, x = two_layers(), torch.rand(ROWS, 3)
    with torchprof.Profile(model, with_flops=True, paths=["0"]) as prof:
        model(x)
    run = prof.run
    assert run.tree("forward").children[0].total.macs == ROWS * FIRST
    assert run.no_layer("forward", selected=False).macs == ROWS * LAST


# Optimizers

LISTS = pytest.mark.skipif(not HAS_SHAPES_OF_LISTS, reason="this torch records no shapes of lists of tensors")
_EACH = pytest.mark.parametrize(
    "how", [pytest.param("plain", id="plain"), *(pytest.param(how, marks=LISTS) for how in ("foreach", "fused"))]
)


def optimizer_step(kind: type[torch.optim.Optimizer], how: str, **options: Any) -> tuple[int, torchprof.Run]:
    """The FLOPs of one step on parameters of 6 and 4 elements, without the step counter: one for each parameter."""
    model = nn.Linear(3, 2, bias=False)
    model.more = nn.Parameter(torch.rand(4))
    implementation = {"foreach": how == "foreach", "fused": how == "fused"}
    optimizer = kind(model.parameters(), **options, **implementation)
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    optimizer.step()  # its first step makes the states
    run = counted(optimizer.step, model)
    assert (run.tree("forward").total.flops, total(run)) == (0, 0)
    counts = 2 if any("step" in state for state in optimizer.state.values()) else 0
    return run.no_layer("forward").flops - counts, run


@_EACH
def test_a_step_of_adam_is_outside_of_the_layers(how: str) -> None:
    # lerp and addcmul 3, mul 1, root, division and epsilon 3, addcdiv 3.
    assert optimizer_step(torch.optim.Adam, how)[0] == 13 * 10
    assert optimizer_step(torch.optim.AdamW, how)[0] == 14 * 10


@_EACH
def test_a_step_of_sgd_is_outside_of_the_layers(how: str) -> None:
    flops, run = optimizer_step(torch.optim.SGD, how, lr=0.1)
    assert flops in (10, 2 * 10)
    assert run.phases() == ("forward",)


@LISTS
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.Adam, {"weight_decay": 0.1}),
    ],
)
def test_a_step_costs_the_same_however_it_is_implemented(kind: Any, options: dict[str, Any]) -> None:
    each = [optimizer_step(kind, how, **options)[0] for how in ("plain", "foreach", "fused")]
    assert len(set(each)) == 1


# Kinds of numbers


@pytest.mark.parametrize("name", ["ResNet", "GPT", "encoder", "GRU", "LSTM", "mixture of experts"])
def test_autocast_changes_no_macs(name: str) -> None:
    architecture = ARCHITECTURES[name]
    model, inputs = architecture.make(), architecture.inputs()

    def step(enabled: bool) -> Callable[[], None]:
        def run() -> None:
            torch.manual_seed(0)
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                output = model(*inputs)
            back(output.float())

        return run

    try:
        step(True)()
    except RuntimeError as error:
        if "could not create a primitive descriptor" in str(error):
            pytest.skip("oneDNN cannot run this in bfloat16 on this processor")
        raise
    plain, cast = profiled(step(False), model), profiled(step(True), model)
    assert not uncounted(cast)
    if name != "mixture of experts":  # there rounding may choose other experts, which are as large
        for node, other in zip(plain.tree("forward").walk(), cast.tree("forward").walk()):
            assert node.total.macs == other.total.macs
    assert [total(plain, "macs", phase) for phase in plain.phases()] == [
        total(cast, "macs", phase) for phase in cast.phases()
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", ["U-Net", "ConvNeXt", "GPT", "translator"])
def test_the_type_of_the_weights_changes_no_macs(name: str, dtype: torch.dtype) -> None:
    architecture = ARCHITECTURES[name]
    model, inputs = architecture.make(), architecture.inputs()
    plain = profiled(lambda: back(model(*inputs)), model)
    model = model.to(dtype)
    inputs = tuple(each.to(dtype) if each.is_floating_point() else each for each in inputs)
    other = counted(lambda: back(model(*inputs)), model)
    for phase in plain.phases():
        assert total(other, "macs", phase) == total(plain, "macs", phase)


def test_a_complex_mac_is_four_real_ones() -> None:
    model = nn.Linear(3, 4).to(torch.complex64)
    run = profiled(lambda: model(torch.randn(2, 3, dtype=torch.complex64)).abs().sum().backward(), model)
    assert total(run) == 4 * 24
    assert total(run, "macs", "backward") == 4 * 24
    assert total(profiled(lambda: torch.fft.fft(torch.randn(8, dtype=torch.complex64)))) == 0


# Transformations of functions


def single(step: Callable[..., Any], *examples: Tensor) -> tuple[int, int]:
    run = counted(lambda: step(*examples))
    return total(run), total(run, "macs", "backward")


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters())


_LINEAR, _CONV, _DEPTHWISE = nn.Linear(4, 6), nn.Conv2d(4, 6, 3), nn.Conv2d(4, 4, 3, groups=4)
_MLP = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 2))
_ATTENTION = nn.MultiheadAttention(4, 2, batch_first=True).eval()
VMAPPED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "linear": (_LINEAR, ((3, 4),)),
    "linear of a vector": (_LINEAR, ((4,),)),
    "convolution": (_CONV, ((2, 4, 5, 5),)),
    "convolution without a batch": (_CONV, ((4, 5, 5),)),
    "depthwise convolution": (_DEPTHWISE, ((2, 4, 5, 5),)),
    "transposed convolution": (nn.ConvTranspose2d(4, 3, 2), ((2, 4, 5, 5),)),
    "weights of many models": (F.linear, ((3, 4), (6, 4), (6,))),
    "kernels of many models": (F.conv2d, ((2, 4, 5, 5), (6, 4, 3, 3))),
    "mm": (torch.mm, ((2, 3), (3, 4))),
    "mv": (torch.mv, ((2, 3), (3,))),
    "dot": (torch.dot, ((3,), (3,))),
    "bmm": (torch.bmm, ((5, 2, 3), (5, 3, 4))),
    "addmm": (torch.addmm, ((2, 4), (2, 3), (3, 4))),
    "baddbmm": (torch.baddbmm, ((5, 2, 4), (5, 2, 3), (5, 3, 4))),
    "addbmm": (torch.addbmm, ((2, 4), (5, 2, 3), (5, 3, 4))),
    "addmv": (torch.addmv, ((2,), (2, 3), (3,))),
    "matmul": (torch.matmul, ((5, 2, 3), (3, 4))),
    "einsum": (lambda q, k: torch.einsum("hqd,hkd->hqk", q, k), ((2, 3, 4), (2, 5, 4))),
    "bilinear": (nn.Bilinear(4, 3, 2), ((5, 4), (5, 3))),
    "attention": (F.scaled_dot_product_attention, ((2, 7, 4),) * 3),
    "attention of a batch": (F.scaled_dot_product_attention, ((2, 2, 7, 4),) * 3),
    "multi-head attention": (lambda x: _ATTENTION(x, x, x)[0], ((2, 7, 4),)),
    "multi-head attention, no weights": (lambda x: _ATTENTION(x, x, x, need_weights=False)[0], ((2, 7, 4),)),
    "GRU cell": (nn.GRUCell(4, 3), ((2, 4), (2, 3))),
    "two layers": (_MLP, ((3, 4),)),
}


@pytest.mark.parametrize(("function", "shapes"), VMAPPED.values(), ids=VMAPPED.keys())
def test_under_vmap_macs_are_those_of_one_example_times_the_batch(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...]
) -> None:
    forward, _ = single(function, *(torch.rand(*shape) for shape in shapes))
    assert forward > 0
    batched = [torch.rand(5, *shape) for shape in shapes]
    assert single(lambda *each: vmap(function, randomness="same")(*each), *batched)[0] == 5 * forward
    nested = [torch.rand(2, 5, *shape) for shape in shapes]
    assert single(lambda *each: vmap(vmap(function, randomness="same"), randomness="same")(*each), *nested) == (
        10 * forward,
        0,
    )


@pytest.mark.parametrize(
    ("function", "shapes", "each"),
    [
        (nn.LayerNorm(4), ((3, 4),), 12 * 7),
        (nn.GroupNorm(2, 4), ((3, 4),), 12 * 7),
        (torch.relu, ((3, 4),), 12),
        (torch.add, ((3, 4), (3, 4)), 12),
        (torch.mul, ((3, 4), (4,)), 12),
        (torch.outer, ((3,), (4,)), 12),
        (lambda x: x.softmax(-1), ((3, 4),), 12 * 5),
        (lambda x: x.sum(-1), ((3, 4),), 12),
        (nn.MaxPool2d(2), ((2, 3, 8, 8),), 6 * 16 * 4),
        (nn.AvgPool2d(2), ((2, 3, 8, 8),), 6 * 16 * 4),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), ((2, 3, 4, 4),), 6 * 64 * 7),
        (torch.cdist, ((2, 4), (3, 4)), 3 * 2 * 3 * 4),
    ],
)
def test_under_vmap_other_flops_are_those_of_the_batch_too(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], each: int
) -> None:
    run = counted(lambda: vmap(function)(*(torch.rand(5, *shape) for shape in shapes)))
    assert (total(run), total(run, "flops")) == (0, 5 * each)


def test_gradients_of_each_example() -> None:
    def loss(parameters: dict[str, Tensor], model: nn.Module, x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).square().sum()

    for model, shape, forward, extra in (
        (_LINEAR, (4,), 24, 0),
        (_MLP, (4,), 24 + 12, 12),  # backward: both weights, and once the input of the last layer
        (_CONV, (1, 4, 5, 5), 6 * 9 * 36, 0),
        (_DEPTHWISE, (1, 4, 5, 5), 4 * 9 * 9, 0),
    ):
        examples = torch.rand(5, *shape)
        gradients = vmap(grad(loss), in_dims=(None, None, 0))
        found = single(lambda: gradients(parameters_of(model), model, examples))  # noqa: B023
        assert found == (5 * forward, 5 * (forward + extra))


def test_grad_and_jacobian() -> None:
    assert single(lambda: grad(lambda x: _LINEAR(x).sum())(torch.rand(4))) == (24, 24)
    assert single(lambda: vmap(grad(lambda x: _LINEAR(x).relu().sum()))(torch.rand(5, 4))) == (120, 120)
    assert single(lambda: jacrev(_LINEAR)(torch.rand(4))) == (24, 6 * 24)


def test_backward_through_vmap() -> None:
    run = profiled(lambda: vmap(_CONV)(torch.rand(5, 2, 4, 5, 5)).sum().backward())
    assert (total(run), total(run, "macs", "backward")) == (2 * 5 * 6 * 9 * 36,) * 2


@pytest.mark.parametrize(
    "step",
    [
        lambda: torch.func.jvp(torch.relu, (torch.rand(3),), (torch.rand(3),)),  # _has_same_storage_numel
        lambda: -torch.eye(3).to_sparse(),  # copy_sparse_to_sparse_
        lambda: torch.linalg.inv(torch.eye(3)),  # _linalg_check_errors
    ],
    ids=["forward derivative", "sparse", "linear algebra"],
)
def test_ops_without_arithmetic_give_no_warning(step: Callable[[], Any]) -> None:
    counted(step)


# Work that cannot be counted is uncounted, and not 0


def test_a_dynamically_quantized_layer_is_not_counted() -> None:
    engines = [name for name in torch.backends.quantized.supported_engines if name != "none"]
    if not engines:
        pytest.skip("this torch has no quantized kernels")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = torch.ao.quantization.quantize_dynamic(two_layers(), {nn.Linear}, dtype=torch.qint8)
        run = profiled(lambda: model(torch.rand(ROWS, 3)), model)
    assert uncounted(run)
    assert total(run) == 0
    for layer in run.tree("forward").children[::2]:
        assert layer.total.uncounted and not layer.total.macs


SPARSE: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse,
    "csr": Tensor.to_sparse_csr,
    "csc": Tensor.to_sparse_csc,
    "bsr": lambda dense: dense.to_sparse_bsr((2, 2)),
}


@pytest.mark.parametrize("kind", SPARSE)
@pytest.mark.filterwarnings("ignore")
def test_a_sparse_product_is_not_counted_and_never_as_dense(kind: str) -> None:
    dense = torch.zeros(8, 6)
    dense[2, 3] = 1
    matrix = SPARSE[kind](dense)
    x, v = torch.rand(6, 4), torch.rand(6)
    for step in (
        lambda: matrix @ x,
        lambda: torch.sparse.mm(matrix, x),
        lambda: torch.addmm(torch.rand(8, 4), matrix, x),
        lambda: torch.mv(matrix, v),
        lambda: F.linear(x.t(), matrix),
    ):
        run = profiled(step)
        assert uncounted(run)
        assert (total(run), total(run, "flops")) == (0, 0)
    for step in (lambda: matrix * 2, lambda: matrix.relu(), lambda: matrix.abs(), lambda: matrix.sin()):
        flops = total(profiled(step), "flops")  # what runs on the values counts
        assert 0 < flops <= 4


def test_a_sparse_product_in_backward_is_not_counted() -> None:
    matrix, x = torch.eye(6).to_sparse_csr(), torch.rand(6, 4, requires_grad=True)
    run = profiled(lambda: torch.sparse.mm(matrix, x).sum().backward())
    assert total(run, "uncounted", "backward") > 0
    assert total(run, "macs", "backward") == 0


def nested(layout: torch.layout, *lengths: int, shape: tuple[int, ...] = (4,)) -> Tensor:
    return torch.nested.nested_tensor([torch.rand(length, *shape) for length in lengths], layout=layout)


_LAYOUTS = pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=["strided", "jagged"])


@_LAYOUTS
@pytest.mark.filterwarnings("ignore")
def test_ops_on_the_dense_values_of_nested_tensors_count(layout: torch.layout) -> None:
    tensor = nested(layout, 3, 5)
    run = counted(lambda: _LINEAR(tensor))
    assert (total(run), total(run, "flops")) == (8 * 24, 2 * 8 * 24 + 8 * 6)
    assert total(profiled(lambda: torch.relu(tensor)), "flops") == 32
    assert total(profiled(lambda: tensor + tensor), "flops") == 32


@_LAYOUTS
@pytest.mark.filterwarnings("ignore")
def test_products_of_nested_tensors_are_exact_or_unknown(layout: torch.layout) -> None:
    q = nested(torch.strided, 3, 5, shape=(2, 4)).transpose(1, 2).contiguous()
    if layout == torch.jagged:
        q = nested(layout, 3, 5, shape=(2, 4)).transpose(1, 2)
    run = profiled(lambda: F.scaled_dot_product_attention(q, q, q))
    assert uncounted(run) or total(run) == attention_macs(1, 2, 3, 3, 4) + attention_macs(1, 2, 5, 5, 4)


@pytest.mark.filterwarnings("ignore")
def test_the_fused_encoder_on_padded_sequences_has_its_products_with_weights() -> None:
    """With a padding mask, it packs the sequences into a nested tensor, of 11 tokens. Its products with weights run on
    these values. Its attention runs on padded tensors: no shape contains the lengths."""
    model, mask = encoder().eval(), torch.tensor([[False] * 7, [False] * 4 + [True] * 3])
    with torch.no_grad():
        run = profiled(lambda: model(torch.rand(2, 7, 8), src_key_padding_mask=mask), model)
    assert [line.split()[2] for line in uncounted(run)] == ["aten::_transformer_encoder_layer_fwd"]
    weights = sum(param.numel() for name, param in model.named_parameters() if param.dim() == 2)
    assert total(run) == (7 + 4) * weights


# Functions, ops and formulas of the user


class Product(torch.autograd.Function):
    """x·w, with both gradients computed by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return given @ w.t(), x.t() @ given


class Elsewhere(torch.autograd.Function):
    """Its result comes from a kernel of its own: torch only records new tensors, and views around it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.empty_like(x.view(-1)).view(x.shape)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor:
        return torch.empty_like(given.reshape(-1)).view(given.shape)


class Reverse(torch.autograd.Function):
    """The identity, whose gradient has the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor:
        return given.neg()


class InNumpy(torch.autograd.Function):
    """Twice its input, computed with NumPy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy() * 2)

    @staticmethod
    def backward(ctx: Any, given: Tensor) -> Tensor:
        return torch.from_numpy(given.numpy() * 2)


def test_the_ops_of_a_users_function_count() -> None:
    run = counted(
        lambda: Product.apply(torch.rand(2, 3, requires_grad=True), torch.rand(3, 4).requires_grad_()).sum().backward()
    )
    assert (total(run), total(run, "macs", "backward")) == (24, 48)
    run = counted(lambda: Reverse.apply(torch.rand(6, requires_grad=True)).sum().backward())
    assert (total(run, "flops"), total(run, "flops", "backward")) == (6, 6)


def test_a_users_function_without_ops_is_not_counted() -> None:
    run = profiled(lambda: Elsewhere.apply(torch.rand(6, requires_grad=True)).sum().backward())
    assert (total(run, "uncounted"), total(run, "uncounted", "backward")) == (1, 1)
    assert {line.split()[2] for line in uncounted(run)} == {"Elsewhere", "ElsewhereBackward"}
    with torch.no_grad():
        assert uncounted(profiled(lambda: Elsewhere.apply(torch.rand(6))))


@pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="numpy is missing")
def test_a_function_that_works_in_numpy_is_not_counted() -> None:
    run = profiled(lambda: InNumpy.apply(torch.rand(6, requires_grad=True)).sum().backward())
    assert (total(run, "uncounted"), total(run, "uncounted", "backward")) == (1, 1)


@torch.library.custom_op("torchprof_test::twice", mutates_args=(), schema="(Tensor x, int times) -> Tensor")
def twice(x: Tensor, times: int) -> Tensor:
    return torch.empty_like(x)


@twice.register_fake
def _(x: Tensor, times: int) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("torchprof_test::gram", mutates_args=(), schema="(Tensor x) -> Tensor")
def gram(x: Tensor) -> Tensor:
    return x @ x.t()


@torch.library.custom_op("torchprof_test::unknown", mutates_args=(), schema="(Tensor x) -> Tensor")
def unknown(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_users_op_is_counted_by_its_formula() -> None:
    op, x = torch.ops.torchprof_test.twice, torch.rand(2, 3)
    before = dict(flop_registry)
    assert uncounted(profiled(lambda: op(x, 3)))
    with formula(op, lambda shape, times, *rest, out_shape=None, **named: 2 * times * shape[0] * out_shape[1]):
        run = counted(lambda: [op(x, 3), op(x, 5)])
        assert (total(run), total(run, "flops")) == (8 * 6, 2 * 8 * 6)
        if RELEASE >= (2, 5):  # before, torch's counter does not see ops of users
            assert torchs(lambda: [op(x, 3), op(x, 5)]).get_total_flops() == 2 * 8 * 6
    assert uncounted(profiled(lambda: op(x, 3)))
    assert flop_registry == before


def test_a_users_op_made_of_ops_counts_as_these() -> None:
    run = counted(lambda: torch.ops.torchprof_test.gram(torch.rand(2, 3)))
    assert total(run) == 12


@pytest.mark.parametrize(
    ("op", "step"),
    [
        (torch.ops.aten.mm, lambda: torch.rand(2, 3) @ torch.rand(3, 4)),
        (torch.ops.aten.relu, lambda: torch.rand(6).relu()),
        (torch.ops.aten.add, lambda: torch.rand(6) + 1.5),
        (torch.ops.aten._softmax, lambda: torch.rand(6).softmax(0)),
        (torch.ops.aten.linear, lambda: _LINEAR(torch.rand(3, 4))),
        (torch.ops.aten.convolution, lambda: F.conv1d(torch.rand(1, 2, 9), torch.rand(3, 2, 3))),
        (torch.ops.aten.gelu, lambda: F.gelu(torch.rand(6))),  # the text of an argument is not recorded
        (torch.ops.aten.embedding, lambda: F.embedding(torch.tensor([1]), torch.rand(2, 3))),  # counts 0 else
        (torch.ops.torchprof_test.unknown, lambda: torch.ops.torchprof_test.unknown(torch.rand(6))),  # not replayed
    ],
    ids=lambda value: None if inspect.isfunction(value) else str(value),
)
def test_a_users_formula_replaces_ours(op: Any, step: Callable[[], Any]) -> None:
    before = profiled(step)
    with formula(op, lambda *shapes, **named: 1000):
        run = profiled(step)
    assert (total(run), total(run, "flops")) == (500, 1000)
    after = profiled(step)
    assert total(after, "flops") == total(before, "flops") != 1000


def test_a_call_whose_formula_raises_is_not_counted() -> None:
    def broken(*shapes: Any, **named: Any) -> int:
        raise ValueError("no")

    with formula(torch.ops.aten.tanh, broken):
        run = profiled(lambda: torch.rand(6).tanh())
    assert [line.split()[2] for line in uncounted(run)] == ["aten::tanh"]
    assert total(run, "flops") == 0


# Models that are compiled, scripted, traced


@pytest.mark.parametrize("how", ["script", "trace"])
@pytest.mark.filterwarnings("ignore")
def test_a_script_module_counts(how: str) -> None:
    model, x = two_layers(), torch.rand(ROWS, 3)
    scripted = torch.jit.script(model) if how == "script" else torch.jit.trace(model, x)
    for _ in range(3):  # from the second call on it runs what it has optimized
        run = counted(lambda: back(scripted(x)), scripted)
        assert total(run) == ROWS * (FIRST + LAST)
        assert total(run, "macs", "backward") == ROWS * (FIRST + 2 * LAST)


@pytest.mark.filterwarnings("ignore")
def test_a_frozen_script_module_counts() -> None:
    frozen = torch.jit.freeze(torch.jit.script(two_layers().eval()))
    run = profiled(lambda: frozen(torch.rand(ROWS, 3)), frozen)
    assert total(run) == ROWS * (FIRST + LAST)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
@pytest.mark.filterwarnings("ignore")
def test_a_convolution_that_torchscript_gives_to_onednn_is_counted_or_gives_a_warning() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval()
    fast = torch.jit.optimize_for_inference(torch.jit.script(model))
    with torch.no_grad():
        run = profiled(lambda: fast(torch.rand(1, 3, 8, 8)), fast)
    assert uncounted(run) or total(run) == 4 * 36 * 27


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_model_whose_ops_run_counts(backend: str) -> None:
    model, x = two_layers(), torch.rand(ROWS, 3)
    compiled = torch.compile(model, backend=backend)
    back(compiled(x))
    run = counted(lambda: back(compiled(x)), compiled)
    assert total(run) == ROWS * (FIRST + LAST)
    assert total(run, "macs", "backward") == ROWS * (FIRST + 2 * LAST)


class Generated(nn.Module):
    """Like a region that Inductor compiled, in a profile: a range, in it the range of a graph, and in that kernels and
    calls of a library."""

    def forward(self, x: Tensor) -> Tensor:
        graph = torch.profiler.record_function("## Call CompiledFxGraph fabcdef ##")
        with torch.profiler.record_function("Torch-Compiled Region: 0/0"), graph:
            return torch.mm(x, torch.rand(3, 4), out=torch.empty(ROWS, 4))


def test_a_region_that_inductor_compiled_is_a_lower_bound() -> None:
    model = nn.Sequential(Generated(), nn.ReLU())
    with torchprof.Profile(model, with_flops=True) as prof:
        model(torch.rand(ROWS, 3))
    assert uncounted(prof.run) == ["Not counted: at least 1 operator in compiled graphs (in Sequential.0)."]
    assert uncounted(prof.run)[0] in prof.display().splitlines()
    region, relu = prof.run.tree("forward").children
    assert (region.total.macs, region.total.uncounted) == (ROWS * 12, 1)
    assert (relu.total.flops, relu.total.uncounted) == (ROWS * 4, 0)
    lines = prof.display().splitlines()
    assert "≥ 84" in lines[3] and "≥ 84" in lines[4] and "≥" not in lines[5]
    assert "(region 0/0)" in lines[4]


# Shapes alone


# Counting does not change the user's model


def test_counting_changes_nothing() -> None:
    model, x = ARCHITECTURES["MobileNetV2"].make(), torch.rand(2, 3, 16, 16)
    registry, before = dict(flop_registry), snapshot(model)
    random = torch.get_rng_state()
    run = profiled(lambda: None, model)
    assert total(run) == 0
    assert torch.equal(torch.get_rng_state(), random)
    profiled(lambda: model(x), model)
    assert flop_registry == registry
    assert snapshot(model) == before


def test_an_op_that_raises_counts_nothing() -> None:
    model = two_layers()
    prof = torchprof.Profile(model, with_flops=True)
    with pytest.raises(RuntimeError, match="shapes"), prof:
        model[2](model[0](torch.rand(ROWS, 3))[:, :2])
    assert total(prof.run) == ROWS * FIRST


@pytest.mark.parametrize("layouts", ["csc csr", "csr csr", "coo coo"])
@pytest.mark.filterwarnings("ignore")
def test_a_product_of_two_sparse_tensors_is_not_counted(layouts: str) -> None:
    first, second = (SPARSE[layout](torch.eye(6)) for layout in layouts.split())
    run = profiled(lambda: torch.sparse.mm(first, second))
    assert uncounted(run)
    assert total(run) == 0


def test_a_hook_on_a_tensor_does_not_change_the_layer_of_backward() -> None:
    """torch omits the number from a node's range if a hook runs an op before the node."""

    class Hooked(Layers):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            y.register_hook(lambda grad: grad * 1.0)
            return self.second(y)

    net = Hooked(first=nn.Linear(8, 16), second=nn.Linear(16, 4))
    with torchprof.Profile(net, with_flops=True) as prof:
        net(torch.rand(3, 8)).sum().backward()
    macs = {node.layer.name: node.total.macs for node in prof.run.tree("backward").walk()}
    assert macs == {"Hooked": 3 * 8 * 16 + 2 * 3 * 16 * 4, "Hooked.first": 3 * 8 * 16, "Hooked.second": 2 * 3 * 16 * 4}


@pytest.mark.parametrize("marks", [1, 2])
def test_only_the_op_that_a_recompute_stopped_in_is_not_counted(marks: int) -> None:
    """Every module around the op has a mark: the work of an op around it that was executed stays."""
    signatures = [Signature((), ()), Signature(((16,), (4, 8), (8, 16)), ("float", "float", "float"))]
    events = [
        op("mine::attention", 0, 100),
        op("aten::addmm", 10, 50, signature=1),
        op("aten::mul", 60, 90),
        *(Event(Kind.STOPPED, STOPPED, 110 + mark, 110 + mark, MAIN) for mark in range(marks)),
        op("aten::relu", 200, 210),
    ]
    attribution, estimate = Attribution({}, []), Estimate(signatures)
    for _ in estimate.observe(walk_of(attribution, events)):
        pass
    names = {place.index: place.frame.name for place in attribution.places.all if place.frame}
    assert {names[index]: count.macs for index, count in estimate.counts.items()} == {
        "aten::addmm": 4 * 8 * 16,
        "aten::relu": 0,
    }


# Fake tensors: torch runs ops on them to learn the shapes of results


class Loops(nn.Module):
    """A higher-order operator of torch over a product of 4 × 32 and 32 × 32."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.rand(32, 32))
        self.large = nn.Parameter(torch.rand(32, 512))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if self.name == "cond":
            return torch.cond(x.sum() > 1e9, lambda x: (x @ self.large).sum(), lambda x: (x @ weight).sum(), (x[0],))
        if self.name == "map":
            from torch._higher_order_ops.map import map as torch_map

            return torch_map(lambda row, weight: row @ weight, x, weight)
        if self.name == "scan":
            from torch._higher_order_ops.scan import scan

            def step(carry: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
                carry = (carry + row) @ weight
                return carry, carry.clone()

            result: Tensor = scan(step, torch.zeros(4, 32), x)[1]
            return result
        from torch._higher_order_ops.while_loop import while_loop

        zero = torch.tensor(0)
        last: Tensor = while_loop(lambda i, _: i < 5, lambda i, row: (i + 1, row @ weight), (zero, x[0]))[1]
        return last


PRODUCT = 4 * 32 * 32


@pytest.mark.skipif(RELEASE < (2, 13), reason="what these operators run differs between releases")
@pytest.mark.parametrize("with_gradients", [False, True])
@pytest.mark.parametrize(("name", "products"), [("cond", 1), ("map", 6), ("scan", 6), ("while_loop", 5)])
def test_what_a_higher_order_operator_runs_on_fake_tensors_is_no_work(
    name: str, products: int, with_gradients: bool
) -> None:
    model, x = Loops(name), torch.rand(6, 4, 32)
    with torch.set_grad_enabled(with_gradients):
        model(x)  # compiles
        run = counted(lambda: model(x), model)
    assert total(run) == products * PRODUCT


def test_backward_of_cond_is_that_of_the_branch_that_ran() -> None:
    model, x = Loops("cond"), torch.rand(6, 4, 32)
    model(x).backward()
    run = counted(lambda: model(x).backward(), model)
    assert total(run, phase="backward") == 2 * PRODUCT  # the branch again, and the gradient of the weight


class Detaches(TorchDispatchMode):
    """A user's mode that runs each op on data, and changes the result."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.detach() if isinstance(result, Tensor) else result


def test_only_modes_without_data_do_no_work() -> None:
    model, x = nn.Linear(32, 8), torch.rand(4, 32)
    with torch.no_grad(), Detaches():
        assert total(counted(lambda: model(x), model)) == 4 * 32 * 8
    with FakeTensorMode():
        model, x = nn.Linear(32, 8), torch.rand(4, 32)
        assert total(counted(lambda: model(x), model)) == 0
