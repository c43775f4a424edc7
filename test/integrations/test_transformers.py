"""The Hugging Face callback, in real Trainers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from build.processes import run_fresh
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerAction

import torchprof
from torchprof import Profile, TorchprofError

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")  # the Trainer needs it
if not transformers.is_torch_available():
    pytest.skip("this transformers wants a newer torch", allow_module_level=True)

from torchprof.integrations.transformers import ProfileCallback  # noqa: E402

EXAMPLES = 16
OWN_FORWARD = nn.Linear.forward
MACS_OF_A_ROW = 4 * 8 + 2 * 8 * 8

pytestmark = pytest.mark.filterwarnings("ignore")


def always(step: int) -> ProfilerAction:
    return ProfilerAction.RECORD


def rows_of(batch: int) -> int:
    """Every batch has a different size, so that sums show which batches were recorded."""
    return 2 ** (batch % EXAMPLES)


class Net(nn.Module):
    """In each batch, ``body`` runs once and ``head`` twice."""

    def __init__(self, fail_at: int = -1, error: type[BaseException] = ValueError) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 8)
        self.head = nn.Linear(8, 8)
        self.left = fail_at
        self.error = error
        self.evaluated = 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        self.evaluated += not self.training
        self.left -= 1
        if self.left == -1:
            raise self.error("CUDA out of memory.")
        out = self.head(self.head(self.body(x)))
        return {"loss": functional.cross_entropy(out, labels), "logits": out[:1]}


@pytest.fixture
def trainer(tmp_path: Path) -> Callable[..., Any]:
    """Make a Trainer for one epoch of 16 batches. The k-th batch has 2^k rows."""

    def make(model: nn.Module, *callbacks: Any, **options: Any) -> Any:
        made = iter(range(1000))

        def collate(examples: list[Any]) -> dict[str, Tensor]:
            rows = rows_of(next(made))
            return {"x": examples[0].expand(rows, 4), "labels": torch.zeros(rows, dtype=torch.int64)}

        quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
        one = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 1, "num_train_epochs": 1}
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, remove_unused_columns=False, **{**quiet, **one, **options}
        )
        torch.manual_seed(1)
        data = [*torch.rand(EXAMPLES, 4)]
        return transformers.Trainer(
            model,
            arguments,
            train_dataset=data,  # type: ignore[arg-type]
            eval_dataset=data[:4],  # type: ignore[arg-type]
            data_collator=collate,
            callbacks=list(callbacks),
        )

    return make


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert Profile._open is None
    assert nn.Linear.forward is OWN_FORWARD


def calls(run: torchprof.Run) -> dict[str, int]:
    return {".".join(node.layer.path[1:]): node.calls for node in run.tree().walk()}


def outside(run: torchprof.Run) -> dict[str, int]:
    """The number of calls of each range outside of layers, by name."""
    return {op.name.partition("#")[0]: op.calls for op in run.ops().get(("(outside)",), []) if op.kind == "label"}


def test_by_default_the_third_to_fifth_step_are_recorded(trainer: Any) -> None:
    callback = ProfileCallback(with_flops=True)
    trainer(Net(), callback).train()
    run = callback.run
    assert run.meta.model == ("Net",)
    assert run.meta.steps == 3
    assert calls(run) == {"": 3, "body": 3, "head": 6}
    rows = rows_of(2) + rows_of(3) + rows_of(4)
    assert run.tree("forward").total.macs == rows * MACS_OF_A_ROW
    assert run.tree("backward").total.macs == rows * (4 * 8 + 2 * 2 * 8 * 8)
    found = outside(run)
    assert found["Optimizer.step"] == found["enumerate(DataLoader)"] == 3
    assert callback.profile.run is run


def test_training_gives_the_same_weights_and_the_model_is_restored(trainer: Any) -> None:
    trained = []
    for callbacks in ([], [ProfileCallback(schedule=always, profile_memory=True, record_shapes=True)]):
        model = Net()
        trainer(model, *callbacks).train()
        assert not any("forward" in vars(module) for module in model.modules())
        assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
        trained.append(model.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
    assert not torch.equal(trained[0]["head.weight"], Net().head.weight)


def test_after_the_default_schedule_the_model_has_no_labels(trainer: Any) -> None:
    bare = []

    class Spy(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            bare.append(nn.Linear.forward is OWN_FORWARD)

    trainer(Net(), ProfileCallback(), Spy()).train()
    assert bare == [False] * 5 + [True] * (EXAMPLES - 5)


def test_a_step_is_an_update_with_all_its_batches(trainer: Any) -> None:
    callback = ProfileCallback(with_flops=True)
    trainer(Net(), callback, gradient_accumulation_steps=2).train()
    assert callback.run.meta.steps == 3
    assert calls(callback.run) == {"": 6, "body": 6, "head": 12}
    assert callback.run.tree("forward").total.macs == sum(map(rows_of, range(4, 10))) * MACS_OF_A_ROW
    assert outside(callback.run)["Optimizer.step"] == 3


@pytest.mark.parametrize(
    ("options", "cycles", "evaluations"),
    [
        ({"eval_strategy": "steps", "eval_steps": 5}, 4, 3),  # newer Trainers add one at the end
        ({"eval_strategy": "epoch"}, 1, 1),
        ({"eval_strategy": "steps", "eval_steps": 8, "eval_on_start": True}, 2, 3),
    ],
    ids=["every fifth step", "each epoch", "at the start too"],
)
def test_evaluation_inside_training_is_not_recorded(
    trainer: Any, options: dict[str, Any], cycles: int, evaluations: int
) -> None:
    model = Net()
    callback = ProfileCallback(schedule=always)
    trainer(model, callback, **options).train()
    assert model.evaluated >= 4 * evaluations
    assert (callback.run.meta.steps, callback.run.meta.cycles) == (EXAMPLES, cycles)
    assert calls(callback.run) == {"": EXAMPLES, "body": EXAMPLES, "head": 2 * EXAMPLES}


def test_an_unannounced_evaluation_has_one_recorded_batch(trainer: Any) -> None:
    class Evaluates(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_step_end(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                own.evaluate()

    callback = ProfileCallback(schedule=always)
    own = trainer(Net(), callback, Evaluates())
    own.train()
    assert callback.run.meta.steps == EXAMPLES
    assert calls(callback.run)["body"] == EXAMPLES + 1


def test_a_subclass_hears_of_an_epochs_end_once(trainer: Any) -> None:
    ended: list[int] = []

    class Counting(ProfileCallback):
        def on_epoch_end(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
            ended.append(state.global_step)
            super().on_epoch_end(args, state, *rest, **kwargs)

    trainer(Net(), Counting(), num_train_epochs=2).train()
    assert ended == [EXAMPLES, 2 * EXAMPLES]


def test_the_schedule_gets_the_number_of_the_step(trainer: Any) -> None:
    asked = []
    profiler_schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2)

    def schedule(step: int) -> ProfilerAction:
        asked.append(step)
        return profiler_schedule(step)

    macs = []
    callback = ProfileCallback(
        schedule=schedule, with_flops=True, on_trace_ready=lambda prof: macs.append(prof.run.tree("forward").total.macs)
    )
    trainer(Net(), callback, eval_strategy="steps", eval_steps=4).train()
    assert asked == [*range(EXAMPLES)]
    # There were four batches of evaluation in between.
    assert macs == [rows_of(at) * MACS_OF_A_ROW for at in (2, 5 + 4)]
    assert (callback.run.meta.steps, callback.run.meta.cycles) == (2, 2)


@pytest.mark.parametrize("name", ["evaluate", "predict"])
def test_evaluation_as_a_stage_of_its_own(trainer: Any, name: str) -> None:
    callback = ProfileCallback("evaluate", schedule=always, with_flops=True)
    own = trainer(Net(), callback)
    for _ in range(2):  # each evaluation has its own Profile
        getattr(own, name)(*([own.eval_dataset] if name == "predict" else []))
        assert callback.run.meta.steps == 3  # of four batches, the first is never recorded
        assert calls(callback.run) == {"": 3, "body": 3, "head": 6}
        assert callback.run.phases() == ("forward",)
        first = callback.profile
    getattr(own, name)(*([own.eval_dataset] if name == "predict" else []))
    assert callback.profile is not first


def test_the_first_batch_of_an_evaluation_counts_but_is_not_recorded(trainer: Any) -> None:
    callback = ProfileCallback("evaluate", with_flops=True)
    trainer(Net(), callback).evaluate()
    assert callback.run.meta.steps == 2
    assert callback.run.tree("forward").total.macs == (rows_of(2) + rows_of(3)) * MACS_OF_A_ROW


def test_evaluation_of_training_as_a_stage_of_its_own(trainer: Any) -> None:
    seen: list[Profile] = []
    callback = ProfileCallback("evaluate", schedule=always, on_trace_ready=seen.append)
    trainer(Net(), callback, eval_strategy="steps", eval_steps=8).train()
    assert [prof.run.meta.steps for prof in seen] == [3, 3]
    assert seen[0] is not seen[1] is callback.profile
    assert "Optimizer.step" not in outside(callback.run)


def test_after_an_error_in_a_block_the_run_has_what_was_recorded(trainer: Any, tmp_path: Path) -> None:
    for error in (ValueError, KeyboardInterrupt):
        callback = ProfileCallback(schedule=always, dirpath=tmp_path / "runs")
        with pytest.raises(error), callback as entered:
            assert entered is callback
            trainer(Net(fail_at=3, error=error), callback).train()
        assert callback.run.meta.steps == 3  # the fourth step did not end
        assert calls(callback.run) == {"": 4, "body": 3, "head": 6}
        assert torchprof.load(tmp_path / "runs" / "train-rank0.json") == callback.run


def test_after_an_error_without_a_block_the_next_training_ends_the_profile(trainer: Any) -> None:
    stale = ProfileCallback(schedule=always)
    for end in (stale.stop, trainer(Net(), ProfileCallback(enabled=False)).train):
        with pytest.raises(ValueError, match="memory"):
            trainer(Net(fail_at=2), stale).train()
        assert Profile._open is stale.profile
        with pytest.raises(TorchprofError, match="has not ended"):
            _ = stale.run
        end()
        assert Profile._open is None
        assert stale.run.meta.steps == 2


@pytest.mark.parametrize("schedule", [None, always], ids=["within training", "at its end"])
def test_an_error_of_on_trace_ready_passes_through(trainer: Any, schedule: Any) -> None:
    def refuse(prof: Profile) -> None:
        raise KeyError("refused")

    callback = ProfileCallback(schedule=schedule, on_trace_ready=refuse)
    with pytest.raises(KeyError, match="refused"):
        trainer(Net(), callback).train()
    if schedule is None:
        assert Profile._open is callback.profile
        callback.stop()
    assert callback.run.meta.steps == (3 if schedule is None else EXAMPLES)


def test_a_training_that_restarts_with_smaller_batches_is_profiled_again(trainer: Any) -> None:
    callback = ProfileCallback(with_flops=True)
    model = Net(fail_at=2, error=RuntimeError)
    trainer(model, callback, auto_find_batch_size=True, per_device_train_batch_size=2).train()
    assert callback.run.meta.steps == 3
    assert calls(callback.run) == {"": 3, "body": 3, "head": 6}


@pytest.mark.compiler
def test_the_callback_causes_no_recompilation(trainer: Any) -> None:
    graphs = []
    for callbacks in ([], [ProfileCallback()]):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        trainer(Net(), *callbacks, torch_compile=True, torch_compile_backend="eager").train()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        if callbacks:
            assert calls(callbacks[0].run)[""] == callbacks[0].run.meta.steps == 3
    assert graphs[0] == graphs[1] > 0


def test_options_are_passed_to_profile(trainer: Any, tmp_path: Path) -> None:
    callback = ProfileCallback(profile_memory=True, paths=["head"], dirpath=tmp_path / "runs")
    trainer(Net(), callback).train()
    assert callback.run.meta.paths == (("Net", "head"),)
    assert {memory.device for memory in callback.run.memory} == {"cpu"}
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["train-rank0.json"]

    nothing = ProfileCallback(enabled=False, dirpath=tmp_path / "nowhere")
    trainer(Net(), nothing).train()
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(TorchprofError, match="enabled=False"):
        _ = nothing.run


def test_bad_options_raise_before_training() -> None:
    with pytest.raises(TorchprofError, match=r"stage='fit'.*'train' or 'evaluate'"):
        ProfileCallback("fit")
    with pytest.raises(TorchprofError, match="no step of 'train'"):
        _ = ProfileCallback().run


def test_without_transformers_the_error_says_what_to_install() -> None:
    code = (
        "import sys\nimport torchprof\nsys.modules['transformers'] = None\n"
        "try:\n    import torchprof.integrations.transformers\nexcept ImportError as error:\n    print(error)"
    )
    assert run_fresh(code).endswith("pip install 'transformers[torch]'")
