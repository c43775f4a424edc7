"""Advice about work that is done twice or for nothing: each rule with a real planted fault, and near misses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from build.findings import of
from build.hand_made import op, row
from build.hand_made import run_of as made_run_of
from build.models import Layers
from torch import Tensor, nn

import torchprof.advise.layers
from torchprof import Profile
from torchprof.advise import advise
from torchprof.profile.program import Program
from torchprof.record.modules import padding_of
from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, FORWARD

STEPS = 6
NEEDED = {"calls_repeated", "items_again", "gradients_cleared", "backward_repeated", "equal_layers_one_by_one"}


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128))


def trained(model: nn.Module, step: Callable[[], object], *others: nn.Module, steps: int = STEPS) -> Run:
    """A loop of steps, the first of which is not recorded."""
    step()
    with Profile([model, *others]) as prof:
        for _ in range(steps):
            step()
    return prof.run


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=1e-3)


# The same input twice


@pytest.mark.parametrize(
    ("second", "share"),
    [
        (lambda x: x, "50%"),
        (lambda x: x.view(64, 128), "50%"),  # a view of the same values
        (lambda x: x.clone(), None),
    ],
)
def test_a_second_forward_of_the_same_tensors_is_reported(
    second: Callable[[Tensor], Tensor], share: str | None
) -> None:
    model = mlp()
    optimizer = sgd(model)

    def step() -> None:
        x = torch.rand(64, 128)
        (model(x).sum() + model(second(x)).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    found = of(trained(model, step), "calls_repeated")
    assert [one.finding.startswith(f"{share} of its forward calls") for one in found] == [True] * (share is not None)


def test_a_call_without_gradients_saves_its_forward_only() -> None:
    model = mlp()
    optimizer = sgd(model)

    def step() -> None:
        x = torch.rand(64, 128)
        model(x).sum().backward()
        with torch.no_grad():
            model(x)
        optimizer.step()
        optimizer.zero_grad()

    run = trained(model, step)
    [one] = of(run, "calls_repeated")
    [spread] = [spread for key, spread in run.samples.items() if key.measure == "no_grad_ns" and key.layer == 0]
    assert spread.count == STEPS and one.gain_ns == spread.sum


@pytest.mark.parametrize("state", ["dropout", "mode"])
def test_a_call_in_another_state_is_another_computation(state: str) -> None:
    model, x = nn.Sequential(nn.Linear(128, 128), nn.Dropout(0.5 * (state == "dropout"))), torch.rand(64, 128)
    optimizer = sgd(model)

    def step() -> None:
        model.train(state != "mode")
        with torch.no_grad():
            target = model(x)
        (model.train()(x) - target).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    assert of(trained(model, step), "calls_repeated") == []


def test_a_call_whose_input_requires_a_gradient_is_another_computation() -> None:
    """A penalty on gradients: the output of the first call has no graph to the input."""
    model, x = mlp(), torch.rand(64, 128)
    optimizer = sgd(model)

    def step() -> None:
        batch = x * 1
        loss = model(batch).sum()
        [gradient] = torch.autograd.grad(model(batch.requires_grad_()).sum(), batch, create_graph=True)
        (loss + gradient.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    run = trained(model, step)
    assert (run.layers[0].noted_calls, run.layers[0].repeated_calls) == (2 * STEPS, 0)
    assert of(run, "calls_repeated") == []


def test_the_same_batch_after_a_step_is_another_computation() -> None:
    model, x = mlp(), torch.rand(64, 128)
    optimizer = sgd(model)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = trained(model, step)
    assert (run.layers[0].noted_calls, run.layers[0].repeated_calls) == (STEPS, 0)
    assert of(run, "calls_repeated") == []


def test_a_loop_that_measures_a_model_repeats_its_calls_on_purpose() -> None:
    model, x = mlp(), torch.rand(64, 128)
    run = trained(model, lambda: model(x))
    assert run.layers[0].repeated_calls == STEPS - 1 and of(run, "calls_repeated") == []


def test_a_call_with_other_options_is_no_repetition() -> None:
    class WithMode(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(128, 128)

        def forward(self, x: Tensor, mode: str) -> Tensor:
            return self.fc(x).relu() if mode == "a" else self.fc(x)

    model, x = WithMode(), torch.rand(64, 128)
    with Profile(model) as prof:
        model(x, "a")
        model(x, mode="b")
        model(x, mode="b")
    assert prof.run.layers[0].repeated_calls == 1


def test_a_tensor_that_was_changed_in_place_is_another_input() -> None:
    model, x = mlp(), torch.rand(64, 128)
    with torch.no_grad(), Profile(model) as prof:
        model(x)
        model(x.mul_(1))
    assert prof.run.layers[0].repeated_calls == 0


def test_nothing_of_a_call_is_kept_alive() -> None:
    import weakref

    model = mlp()
    with Profile(model):
        model(x := torch.rand(64, 128))
        alive = weakref.ref(x)
        del x
        assert alive() is None


# Sequences that grow by one


@pytest.mark.parametrize(("grows", "count"), [(1, 1), (2, 0)])
def test_a_sequence_that_is_longer_by_one_in_each_call_is_reported(grows: int, count: int) -> None:
    model, x = mlp(), torch.rand(1, 64, 128)
    with torch.no_grad(), Profile(model) as prof:
        for _ in range(24):
            model(x)
            x = torch.cat([x, torch.rand(1, grows, 128)], dim=1)
    found = of(prof.run, "items_again")
    assert len(found) == count and prof.run.layers[0].longer_calls == 23 * count
    for one in found:
        spreads = [spread for key, spread in prof.run.samples.items() if key.layer == 0 and key.measure == "cpu_ns"]
        assert one.gain_ns == sum(spread.sum - spread.min * spread.count for spread in spreads)
        assert "longer by one in 23 of 24 calls" in one.finding and "use_cache" in one.remedy


@pytest.mark.parametrize(("shape", "grows"), [((1, 64, 128), (0, 1, 0)), ((64, 128), (1, 0))])
def test_other_sequences_and_batches_that_grow_are_not_computed_again(
    shape: tuple[int, ...], grows: tuple[int, ...]
) -> None:
    model = mlp()
    with torch.no_grad(), Profile(model) as prof:
        for number in range(24):
            model(torch.rand([size + number * step for size, step in zip(shape, grows)]))
    assert of(prof.run, "items_again") == []


# Equal layers


class Gated(nn.Module):
    def __init__(self, chained: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(8, 16) for _ in range(24))
        self.chained = chained

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.chained:
            return sum(part(x[:, 8 * n : 8 * n + 8]) for n, part in enumerate(self.parts))
        x = x[:, :8]
        for part in self.parts:
            x = nn.functional.glu(part(x))
        return x


@pytest.mark.parametrize("chained", [False, True])
def test_equal_layers_on_parts_of_one_tensor_are_reported_a_chain_is_not(
    chained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torchprof.advise.layers, "_LONGEST_ITEM_NS", 10**9)  # however slow this machine is
    model, x = Gated(chained), torch.rand(32, 8 * 24)
    with torch.no_grad(), Profile(model) as prof:
        for _ in range(5):
            model(x)
    found = of(prof.run, "equal_layers_one_by_one")
    assert len(found) == (not chained)
    assert all("24 equal small layers (Linear)" in one.finding and one.layers for one in found)
    numbers = {layer.input_number for layer in prof.run.layers[1:] if layer.kind == "Linear"}
    assert len(numbers) == (24 if chained else 1)


# Gradients that are computed and cleared


def gan(detached: bool) -> Run:
    generator, critic = mlp(), mlp()
    of_generator, of_critic = sgd(generator), sgd(critic)

    def step() -> None:
        fake = generator(torch.rand(64, 128))
        of_critic.zero_grad()
        critic(fake.detach() if detached else fake).sum().backward(retain_graph=True)
        of_critic.step()
        of_generator.zero_grad()
        critic(fake).sum().backward()
        of_generator.step()

    return trained(generator, step, critic)


def test_gradients_of_a_generator_that_is_not_detached_are_cleared() -> None:
    found = {one.layer: one for one in of(gan(detached=False), "gradients_cleared")}
    assert "2.0 times as often" in found["Sequential"].finding and "detach()" in found["Sequential"].remedy
    assert "Sequential" not in {one.layer for one in of(gan(detached=True), "gradients_cleared")}


def test_a_critic_passes_on_gradients_though_its_own_are_cleared() -> None:
    [one] = of(gan(detached=True), "gradients_cleared")
    assert one.layer == "Sequential#2" and "requires_grad_(False)" in one.remedy


@pytest.mark.parametrize("optimizer_of", [sgd, lambda model: torch.optim.AdamW(model.parameters(), fused=True)])
def test_gradients_that_are_added_up_are_used(optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    model = mlp()
    other = nn.Linear(4, 4)
    optimizer, of_other = optimizer_of(model), sgd(other)

    def step() -> None:
        for _ in range(4):
            model(torch.rand(64, 128)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        of_other.step()

    run = trained(model, step, other)
    assert (run.layers[1].optimizer_steps, run.layers[1].used_gradients) == (STEPS, 4 * STEPS)
    assert of(run, "gradients_cleared") == []


# Backward that goes through a graph again


def chunks(detached: bool) -> Run:
    """Five chunks a step: without ``detach``, the graph of the first runs five times, that of the second four times."""
    cell = nn.RNNCell(64, 64)

    def step() -> None:
        state = torch.zeros(32, 64)
        for _ in range(5):
            state = cell(torch.rand(32, 64), state.detach() if detached else state)
            state.sum().backward(retain_graph=not detached)
        cell.zero_grad()

    return trained(cell, step)


def test_nodes_that_run_more_than_once_are_reported() -> None:
    [one] = of(chunks(detached=False), "backward_repeated")
    assert "a node runs 3.0 times" in one.finding  # (5 + 4 + 3 + 2 + 1) / 5
    assert "detach()" in one.remedy and of(chunks(detached=True), "backward_repeated") == []


def test_a_penalty_on_gradients_needs_backward_twice() -> None:
    model = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, 1))

    def step() -> None:
        x = torch.rand(64, 128, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        model.zero_grad()

    assert of(trained(model, step), "backward_repeated") == []


def test_checkpoints_are_no_repetition() -> None:
    model = mlp()

    def step() -> None:
        x = torch.rand(64, 128, requires_grad=True)
        torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
        model.zero_grad()

    assert of(trained(model, step), "backward_repeated") == []


# Slices in a loop


class Scan(nn.Module):
    def __init__(self, unbinds: bool) -> None:
        super().__init__()
        self.fc, self.unbinds = nn.Linear(64, 64), unbinds

    def forward(self, x: Tensor) -> Tensor:
        x, state = self.fc(x), torch.zeros(8, 64)
        for item in x.unbind(1) if self.unbinds else (x[:, number] for number in range(x.shape[1])):
            state = state * 0.9 + item
        return state


@pytest.mark.parametrize("unbinds", [False, True])
def test_slices_in_a_loop_are_reported_if_backward_fills_the_whole_tensor(unbinds: bool) -> None:
    model = Scan(unbinds)
    run = trained(model, lambda: model(torch.rand(8, 256, 64)).sum().backward(), steps=2)
    found = of(run, "indexing_in_a_loop")
    assert [one.layer for one in found] == ["Scan"] * (not unbinds)
    assert all("(256 a call)" in one.finding and "unbind" in one.remedy for one in found)


# Layers of one kind


class Columns(nn.Module):
    def __init__(self, count: int, size: int) -> None:
        super().__init__()
        self.columns = nn.ModuleList(nn.Linear(1, size) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([column(x[:, at : at + 1]) for at, column in enumerate(self.columns)])


@pytest.mark.parametrize(("count", "size", "found"), [(40, 16, 1), (12, 16, 0)])
def test_a_layer_for_each_column_is_reported(count: int, size: int, found: int) -> None:
    model = Columns(count, size)
    run = trained(model, lambda: model(torch.rand(32, count)).sum().backward())
    assert len(of(run, "equal_layers_one_by_one")) == found


def test_a_layer_that_is_slow_for_its_values_is_reported() -> None:
    torch.set_flush_denormal(False)
    model = Layers(a=nn.Linear(256, 256, bias=False), b=nn.Linear(256, 256, bias=False))
    with torch.no_grad():
        model.b.weight.fill_(1e-39)  # type: ignore[union-attr, operator]
    x = torch.full((256, 256), 1e-3)
    model.forward = lambda x: (model.a(x), model.b(x))  # type: ignore[method-assign, operator]
    run = trained(model, lambda: model(x))
    without = {key: spread for key, spread in run.samples.items() if key.measure != "ordinary_ns"}
    usual, slow = (spread.median for key, spread in without.items() if key.layer in (1, 2) and key.measure == "cpu_ns")
    for known in (run, replace(run, samples=without)):  # compared with ordinary values, and with its equal
        found = of(known, "slower_than_usual")
        assert [one.layer for one in found] == ["Layers.b"] * (slow >= 5 * max(usual, 100_000))
        assert all(("ordinary values" in one.cause) == (known is run) for one in found)


@pytest.mark.parametrize(
    ("of_call", "ordinary", "calls", "gain"),
    [(6_000, 1_000, 10, 65_000), (4_900, 1_000, 10, None), (6_000, 1_000, 2, None)],
)
def test_a_layer_that_is_slow_for_its_values_needs_no_equal(
    of_call: int, ordinary: int, calls: int, gain: int | None
) -> None:
    """In microseconds. Its backward takes 3 ms a call, on ordinary values 1.5 ms."""
    us = 1_000
    rows = [row(0, op("aten::addmm"), calls=calls, cpu_ns=of_call * calls * us)]
    rows = [row(0, calls=calls), *rows, row(0, op("aten::mm"), phase=BACKWARD, cpu_ns=3_000 * calls * us)]
    run = made_run_of(rows, layers=[Layer(("Net",), "Linear")], wall_ns=100_000 * us)
    key = SampleKey(0, FORWARD, 0, "cpu", "ordinary_ns")
    samples = {key: Spread.of([(0, ordinary * us)]), key._replace(phase=BACKWARD): Spread.of([(0, 1_500 * us)])}
    samples[key._replace(measure="cpu_ns")] = Spread.of([(start, of_call * us) for start in range(calls)])
    found = of(replace(run, samples=samples), "slower_than_usual")
    assert [one.gain_ns for one in found] == [gain * us] * (gain is not None) if gain else not found


# Padding


@pytest.mark.parametrize(
    ("lengths", "size", "says"),
    [
        ([5, 8, 3], 32, "75% of the positions in its first batch are padding in all sequences."),
        ([32, 4, 4, 4], 32, "66% of the positions in its first batch are padding: its sequences differ in length."),
        ([32, 20, 25], 32, None),
        ([30, 24], 32, None),
    ],
)
@pytest.mark.parametrize("form", ["indices", "time first", "mask", "attention_mask"])
def test_padding_is_reported(form: str, lengths: list[int], size: int, says: str | None) -> None:
    ids = torch.zeros(len(lengths), size, dtype=torch.long)
    for sequence, length in zip(ids, lengths):
        sequence[:length] = 1

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(8, 16, padding_idx=0 if form in ("indices", "time first") else None)
            self.out = nn.Linear(16, 16)

        def forward(self, ids: Tensor, key_padding_mask: Tensor = ids, attention_mask: Tensor = ids) -> Tensor:
            return self.out(self.words(ids))

    model = Reader()
    given = {"mask": {"key_padding_mask": ids == 0}, "attention_mask": {"attention_mask": ids.clone()}}.get(form, {})
    ids = ids.T.contiguous() if form == "time first" else ids
    run = trained(model, lambda: model(ids, **given).sum().backward())
    found = of(run, "padded_batches")
    assert [one.cause for one in found] == ([says] if says else [])
    padded = [layer.padding for layer in run.layers if layer.padding]
    assert [counts[:2] for counts in padded] == [(ids.numel(), ids.numel() - sum(lengths))]
    if found:
        share = (padded[0][2] if "all" in found[0].cause else padded[0][1]) / ids.numel()
        in_layers = sum(ns for layer, ns in run.rows.summed("layer", "cpu_ns").items() if layer >= 0)
        assert found[0].gain_ns == pytest.approx(share * in_layers, abs=1)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(16, 16).tril().long(),  # causal, for sixteen sequences of sixteen
        torch.ones(16, 16).triu(1).bool(),
        torch.ones(16, 16).tril(2).triu(-2).long(),  # a sliding window
        torch.tensor([[1, 1, 0, 1] * 4] * 16),  # holes
    ],
    ids=["causal", "masked", "window", "holes"],
)
def test_masks_that_are_no_padding_are_none(mask: Tensor) -> None:
    ids = torch.ones(16, 16, dtype=torch.long)
    assert padding_of(nn.Linear(2, 2), (ids,), {"attention_mask": mask}) == ()
    assert padding_of(nn.Linear(2, 2), (ids[:3],), {"attention_mask": mask}) == ()  # of no sequences of the input


def test_columns_of_a_table_and_sequences_of_one_are_no_padding() -> None:
    words = nn.Embedding(4, 2, padding_idx=0)
    table = torch.randint(0, 4, (512, 8), generator=torch.Generator().manual_seed(0))
    assert padding_of(words, (table,), {}) == ()
    assert padding_of(words, (torch.zeros(64, 1, dtype=torch.long),), {}) == ()
    left = torch.tensor([[0] * 6 + [1] * 4, [0] * 3 + [1] * 7])  # as for generation
    assert padding_of(words, (left,), {}) == (20, 9, 6)


def test_of_a_large_batch_the_first_sequences_are_read() -> None:
    ids = torch.ones(1000, 100, dtype=torch.long)
    ids[:, 50:] = 0
    assert padding_of(nn.Embedding(4, 2, padding_idx=0), (ids,), {}) == (16_300, 8_150, 8_150)


def test_padding_is_counted_without_an_operator_and_of_usual_tensors_only() -> None:
    ids, words = torch.tensor([[1] * 6 + [0] * 4, [1] * 10]), nn.Embedding(4, 2, padding_idx=0)
    with torch.profiler.profile() as prof:
        assert padding_of(words, (ids,), {}) == (20, 4, 0)
    assert not prof.events()
    assert padding_of(nn.Embedding(4, 2, padding_idx=-1), (ids,), {}) == (20, 0, 0)  # torch stores it as 3
    freed = torch.ones(200, 300, dtype=torch.long)
    freed.untyped_storage().resize_(0)  # as FSDP does: reading at its address would end the process
    without_memory = (freed, torch._efficientzerotensor((200, 300), dtype=torch.long), ids.to_sparse())
    usual = (ids.T, ids.float(), ids[0], ids.to("meta"), torch.zeros(0, 4, dtype=torch.long), [1, 0], None)
    torch.func.functionalize(lambda inputs: padding_of(words, (inputs,), {}) == () or inputs / 0)(ids)
    for other in (*without_memory, *usual):
        assert padding_of(words, (other,), {}) == ()
    assert padding_of(nn.Linear(2, 2), (ids,), {"key_padding_mask": None}) == ()


# Operators for which there is a cheaper one


def test_an_inverse_outside_of_layers_is_reported_with_its_line() -> None:
    model = nn.Linear(4, 4)

    def step() -> None:
        torch.linalg.inv(torch.eye(300)).sum()
        model(torch.rand(4, 4))

    run = trained(model, step, steps=20)
    [one] = of(run, "costly_operators")
    assert one.finding.startswith("Matrices are inverted at ") and "torch.linalg.solve" in one.remedy
    took = sum(
        row.cost.cpu_ns for row in run.rows if any(frame.name.startswith("aten::linalg_inv") for frame in row.frames)
    )
    assert one.gain_ns == round(took * 0.7)


@pytest.mark.parametrize(("times", "found"), [(1, 0), (4, 1)])
def test_exponentials_of_a_weight_are_needed_once_a_step(times: int, found: int) -> None:
    """A weight changes between two steps, and not between four uses in one."""

    class Rotation(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(48, 48) / 48)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(times):
                x = x @ torch.linalg.matrix_exp(self.weight - self.weight.T)
            return x

    model = Rotation()
    optimizer = sgd(model)

    def step() -> None:
        model(torch.rand(8, 48)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = trained(model, step, steps=6)
    names = ("aten::linalg_matrix_exp", "LinalgMatrixExpBackward0")
    took = sum(row.cost.cpu_ns for row in run.rows if any(frame.name.endswith(names) for frame in row.frames))
    advice = [one for one in of(run, "costly_operators") if "Exponentials" in one.finding]
    assert [one.gain_ns for one in advice] == [round(took * 3 / 4)] * found


def test_casts_of_weights_are_reported_but_not_those_of_autocast() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(512, 512, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.float()

    model = Casts()

    def call() -> None:
        model(torch.rand(4, 512))

    def says() -> list[bool]:
        return ["cast to another type" in one.finding for one in of(trained(model, call), "costly_operators")]

    assert says() == [True]
    with torch.autocast("cpu", torch.bfloat16):
        assert says() == []


def test_one_hot_rows_that_are_multiplied_are_reported() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(2000, 32))

        def forward(self, ids: Tensor) -> Tensor:
            return nn.functional.one_hot(ids, 2000).float() @ self.weight

    model = Words()
    [one] = of(trained(model, lambda: model(torch.randint(2000, (64,))).sum().backward()), "one_hot_products")
    assert one.layer == "Words" and "embedding" in one.remedy


def test_one_hot_rows_that_are_a_mask_beside_a_product_are_not_reported() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(256, 256))

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            mask = nn.functional.one_hot(ids, 2000).float()
            return nn.functional.linear(x, self.weight) * mask.sum(-1, keepdim=True)

    model, x = Masked(), torch.rand(64, 256)
    run = trained(model, lambda: model(x, torch.randint(2000, (64,))).sum().backward())
    assert of(run, "one_hot_products") == []


def test_a_call_of_a_part_has_the_time_of_the_part() -> None:
    """Whether calls of a part ran with gradients is known of the first one only."""

    class Container(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = mlp()

    model = Container()
    optimizer = sgd(model)

    def step() -> None:
        x = torch.rand(64, 128)
        (model.encoder(x).sum() + model.encoder(x).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()

    run = trained(model, step)
    [one] = of(run, "calls_repeated")
    whole = sum(
        row.cost.cpu_ns for row in run.rows if row.layer is not None and row.layer.path[:2] == ("Container", "encoder")
    )
    assert one.layer == "Container.encoder" and one.gain_ns == whole // 2


@pytest.mark.parametrize("name", ["first", "closure"])
def test_gradients_of_inference_mode_are_no_error_in_a_step(name: str) -> None:
    model = nn.Linear(4, 4)
    optimizer = sgd(model)
    before = model.weight.clone()
    with Profile(model) as prof, torch.inference_mode():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step((lambda: 0.0) if name == "closure" else None)
    assert not torch.equal(before, model.weight)
    assert prof.run.layers[0].optimizer_steps is None


# Threads


@pytest.mark.parametrize("spins", [True, False])
def test_a_thread_that_spins_is_reported_with_its_line(spins: bool) -> None:
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(None if not spins else 0):
            pass

    model, thread = mlp(), threading.Thread(target=poll)
    thread.start()
    try:
        run = trained(model, lambda: model(torch.rand(64, 128)), steps=4000)
    finally:
        ended.set()
        thread.join(60)
    found = of(run, "threads_that_run")
    assert len(found) == spins and all("poll" in one.finding and "Event.wait()" in one.remedy for one in found)


# What must not be said, and what must not fail


@pytest.mark.parametrize("steps", [20, 200])
def test_of_a_plain_loop_each_step_uses_its_gradients(steps: int) -> None:
    """Most passes of the longer one are not recorded; cycles begin anew."""
    model = mlp()
    optimizers = [torch.optim.Adam(layer.parameters()) for layer in (model[0], model[2])]
    with Program(warmup_calls=None) as program:
        for _ in range(steps):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(torch.rand(64, 128)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    first, second = (layer for layer in program.run.layers if layer.optimizer_steps)
    assert first.optimizer_steps == first.used_gradients == second.optimizer_steps
    assert first.optimizer_steps is not None
    assert abs(first.optimizer_steps - (program.run.layers[0].noted_calls or 0)) <= 1
    assert not {one.rule for one in advise(program.run)} & NEEDED


def steps_with_closure() -> Run:
    """LBFGS calls the model several times in a step, which changes the weights in between."""
    model, x = mlp(), torch.rand(64, 128)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return trained(model, lambda: optimizer.step(closure))


def sharpness_aware() -> Run:
    """SAM: two backward passes a step, of weights that were moved in between."""
    model = mlp()
    optimizer = sgd(model)

    def step() -> None:
        x = torch.rand(64, 128)
        model(x).sum().backward()
        moved = [parameter.grad * 0.1 for parameter in model.parameters() if parameter.grad is not None]
        with torch.no_grad():
            torch._foreach_add_([*model.parameters()], moved)
        optimizer.zero_grad()
        model(x).sum().backward()
        with torch.no_grad():
            torch._foreach_sub_([*model.parameters()], moved)
        optimizer.step()
        optimizer.zero_grad()

    return trained(model, step)


def two_losses() -> Run:
    """Two heads with backward passes of their own."""
    heads, body = nn.ModuleList([nn.Linear(128, 4), nn.Linear(128, 4)]), mlp()
    optimizer = sgd(heads, body)

    def step() -> None:
        hidden = body(torch.rand(64, 128))
        heads[0](hidden).sum().backward(retain_graph=True)
        heads[1](hidden).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(body, step, *heads)


def test_two_backward_passes_through_one_body_can_be_one() -> None:
    [one] = of(two_losses(), "backward_repeated")
    assert "a node runs 2.0 times" in one.finding and "add up losses before one `backward()`" in one.remedy


def physics_informed() -> Run:
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = sgd(model)

    def step() -> None:
        x = torch.rand(256, 1, requires_grad=True)
        u = model(x)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        (second + u).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(model, step)


def transposed_images() -> Run:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    optimizer = sgd(model)

    def step() -> None:
        x = torch.rand(8, 3, 24, 24)
        (model(x) + model(x.transpose(2, 3)).transpose(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(model, step)


def numpy_buffer() -> Run:
    model = mlp()
    optimizer, buffer = sgd(model), np.zeros((64, 128), np.float32)
    x = torch.from_numpy(buffer)

    def step() -> None:
        for _ in range(3):
            buffer[:] = np.random.default_rng().random((64, 128))
            with torch.no_grad():
                model(x)
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trained(model, step)


def flat_residual_blocks() -> Run:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ModuleList(nn.Linear(16, 32) for _ in range(20))
            self.down = nn.ModuleList(nn.Linear(32, 16) for _ in range(20))

        def forward(self, x: Tensor) -> Tensor:
            for up, down in zip(self.up, self.down):
                x = x + down(up(x).relu())
            return x

    model = Flat()
    return trained(model, lambda: model(torch.rand(32, 16)).sum().backward())


def with_a_cache() -> Run:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(64, 64)

        def forward(self, cache: Tensor, x: Tensor) -> Tensor:
            return self.fc(x) + cache.mean(1, keepdim=True)

    model = Decoder()
    with torch.no_grad(), Profile(model) as prof:
        for number in range(30):
            model(torch.rand(1, 200 + number, 64), torch.rand(1, 1, 64))
    return prof.run


@pytest.mark.parametrize(
    "program",
    [
        steps_with_closure,
        sharpness_aware,
        physics_informed,
        transposed_images,
        numpy_buffer,
        flat_residual_blocks,
        with_a_cache,
    ],
)
def test_of_programs_that_need_what_they_do_nothing_is_said(program: Callable[[], Run]) -> None:
    assert not {one.rule for one in advise(program())} & NEEDED


def test_tensors_of_any_kind_are_no_error() -> None:
    model = mlp()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    x = torch.rand(4, 128)

    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,)).sum()

    with Profile(model) as prof:
        torch.func.grad(loss)(weights, x)
        torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
        torch.func.vmap(model)(x)
        torch.func.jacrev(model)(x[0])
        model(torch.nested.nested_tensor([x[:2], x[:3]]))
        with torch.inference_mode():
            model(x)
    assert prof.run.tree().calls >= 6


def test_a_tensor_that_lies_otherwise_is_another_input() -> None:
    model, x = nn.Linear(24, 24), torch.rand(24, 24)
    with Profile(model) as prof:
        model(x)
        model(x.T)
        model(x.T)
    assert prof.run.layers[0].repeated_calls == 1


def test_calls_that_record_an_unused_graph_are_counted_in_passes_that_were_not_recorded() -> None:
    """A hand count: 120 steps, of which the first is start-up, and 200 calls of an evaluation that forgets no_grad."""
    model = nn.Sequential(nn.Linear(64, 256), nn.Linear(256, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Program(warmup_calls=None) as program:
        for _ in range(2):
            model.train()
            for _ in range(60):
                optimizer.zero_grad()
                model(torch.rand(32, 64)).sum().backward()
                optimizer.step()
            model.eval()
            for _ in range(100):
                model(torch.rand(32, 64))
    run = program.run
    assert run.grad_calls(0) == run.rows.forward_calls(0) == 319
    assert run.passes[0].recorded < run.passes[0].count
    [found] = [one for one in run.findings if one.rule == "graphs_never_used"]
    assert found.cause == "200 of 319 forward calls record a graph for a backward that never runs."
    with torch.no_grad(), Program(warmup_calls=None) as program:
        for number in range(100):
            with torch.set_grad_enabled(number < 50):
                model(torch.rand(32, 64))
    assert 40 <= program.run.grad_calls(0) <= 50
