"""The Lightning callback, in Trainers of both packages of Lightning."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from build.warm import run_warm
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerAction
from torch.utils.data import DataLoader

import torchprof
from torchprof import Profile, TorchprofError
from torchprof.integrations.training_loop import LoopCallback

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
BATCHES = 8
OWN_FORWARDS = {cls: cls.forward for cls in (nn.Linear, nn.ReLU, nn.Sequential)}

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about workers and loggers


def always(step: int) -> ProfilerAction:
    return ProfilerAction.RECORD


def rows_of(batch: int) -> int:
    """Every batch has a different size, so that sums show which batches were recorded."""
    return 2**batch


def loader(batches: int = BATCHES) -> DataLoader[Any]:
    torch.manual_seed(1)
    data = [(torch.rand(rows_of(at), 4), torch.zeros(rows_of(at), dtype=torch.int64)) for at in range(batches)]
    return DataLoader(data, batch_size=None)


@pytest.fixture
def pl(request: pytest.FixtureRequest) -> Any:
    for name in PACKAGES:  # so that the callback is a subclass of both Callbacks
        pytest.importorskip(name)
    return import_module(getattr(request, "param", PACKAGES[0]))


of_both_packages = pytest.mark.parametrize("pl", PACKAGES, indirect=True)


@pytest.fixture
def callback_class(pl: Any) -> Any:
    return import_module("torchprof.integrations.lightning").ProfileCallback


@pytest.fixture
def net(pl: Any) -> Callable[..., Any]:
    """A LightningModule: in a batch, ``body`` runs once and ``head`` twice; without training, ``judge`` once."""

    class Net(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, through_forward: bool = True, fail_at: int = -1, error: type = ValueError) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
            self.head = nn.Linear(8, 8)
            self.judge = nn.Linear(8, 2)
            self.through_forward = through_forward
            self.fail_at = fail_at
            self.error = error
            self.validated = 0

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.head(self.body(x)))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, target = batch
            out = self(x) if self.through_forward else self.head(self.head(self.body(x)))
            if batch_idx == self.fail_at:
                raise self.error("no more")
            return functional.cross_entropy(out, target)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.validated += 1
            self.judge(self(batch[0]))

        def test_step(self, batch: Any, batch_idx: int) -> None:
            self.judge(self(batch[0]))

        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.judge(self(batch[0]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Net


@pytest.fixture
def trainer(pl: Any, tmp_path: Path) -> Callable[..., Any]:
    def make(*callbacks: Any, **options: Any) -> Any:
        quiet = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "barebones"), False
        )
        defaults = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path, **quiet}
        given = callbacks[0] if len(callbacks) == 1 else list(callbacks)
        return pl.Trainer(callbacks=given, **{**defaults, **options})

    return make


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    yield
    assert Profile._open is None
    assert {cls: cls.forward for cls in OWN_FORWARDS} == OWN_FORWARDS


def calls(run: torchprof.Run) -> dict[str, int]:
    return {".".join(node.layer.path[1:]): node.calls for node in run.tree().walk()}


def outside(run: torchprof.Run) -> dict[str, int]:
    """The number of calls of each range outside of layers, by name."""
    found = {}
    waiting = list(run.ops().get(("(outside)",), []))
    while waiting:
        op = waiting.pop()
        if op.kind == "label":
            found[op.name.partition("#")[0]] = op.calls
        waiting.extend(op.inside)
    return found


@of_both_packages
@pytest.mark.parametrize("through_forward", [True, False], ids=["self(x)", "self.body(x)"])
def test_by_default_the_third_to_fifth_batch_are_recorded(
    net: Any, trainer: Any, callback_class: Any, through_forward: bool
) -> None:
    callback = callback_class(with_flops=True)
    trainer(callback).fit(net(through_forward), loader())
    run = callback.run
    assert run.meta.model == ("Net",)
    assert run.meta.steps == 3
    assert calls(run) == {"": 3 * through_forward, "body": 3, "body.0": 3, "body.1": 3, "head": 6, "judge": 0}
    rows = rows_of(2) + rows_of(3) + rows_of(4)
    macs = {".".join(node.layer.path[1:]): node.self.macs for node in run.tree("forward").walk()}
    assert (macs["body.0"], macs["head"]) == (rows * 4 * 8, 2 * rows * 8 * 8)
    backward = {".".join(node.layer.path[1:]): node.self.macs for node in run.tree("backward").walk()}
    assert (backward["body.0"], backward["head"]) == (rows * 4 * 8, 2 * 2 * rows * 8 * 8)
    found = outside(run)
    assert found["Optimizer.step"] == found["enumerate(DataLoader)"] == 3
    assert callback.profile.run is run


def test_training_gives_the_same_weights_and_the_model_is_restored(net: Any, trainer: Any, callback_class: Any) -> None:
    trained = []
    for callbacks in ([], [callback_class(schedule=always, profile_memory=True, record_shapes=True)]):
        model = net()
        trainer(*callbacks).fit(model, loader(), loader(2))
        assert not any("forward" in vars(module) for module in model.modules())
        assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
        trained.append(model.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
    assert not torch.equal(trained[0]["head.weight"], net().head.weight)


def test_after_the_default_schedule_the_model_has_no_labels(
    pl: Any, net: Any, trainer: Any, callback_class: Any
) -> None:
    bare: list[bool] = []

    class Spy(pl.Callback):  # type: ignore[misc, name-defined]
        def on_train_batch_start(self, *args: Any) -> None:
            bare.append(nn.Linear.forward is OWN_FORWARDS[nn.Linear])
            if all(bare[-1:]):
                assert callback.run.meta.steps == 3  # there already

    callback = callback_class()
    trainer(callback, Spy()).fit(net(), loader())
    assert bare == [False] * 5 + [True] * (BATCHES - 5)


@of_both_packages
@pytest.mark.parametrize(
    ("interval", "cycles"), [(2, 4), (BATCHES, 1), (3, 3)], ids=["every second", "at the end", "every third"]
)
def test_validation_inside_fit_is_not_recorded(
    net: Any, trainer: Any, callback_class: Any, interval: int, cycles: int
) -> None:
    seen, ended = [], []

    def note(prof: torchprof.Profile) -> None:
        seen.append(prof.run)
        ended.append(prof.step_num)

    callback = callback_class(schedule=always, with_flops=True, on_trace_ready=note)
    model = net()
    trainer(callback, val_check_interval=interval).fit(model, loader(), loader(3))
    assert model.validated == 2 + BATCHES // interval * 3  # two in the sanity check
    run = callback.run
    assert (run.meta.steps, run.meta.cycles) == (BATCHES, cycles)
    assert calls(run) == {**dict.fromkeys(("", "body", "body.0", "body.1"), BATCHES), "head": 2 * BATCHES, "judge": 0}
    assert run.tree("forward").total.macs == sum(map(rows_of, range(BATCHES))) * (4 * 8 + 2 * 8 * 8)
    whole = [min(interval, BATCHES - start) for start in range(0, BATCHES, interval)]
    assert [one.meta.steps for one in seen] == whole
    assert ended == list(accumulate(whole))
    assert run.no_layer("forward").macs == 0


def test_the_schedule_gets_the_number_of_the_batch(net: Any, trainer: Any, callback_class: Any) -> None:
    asked = []
    profiler_schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2)

    def schedule(step: int) -> ProfilerAction:
        asked.append(step)
        return profiler_schedule(step)

    rows = []
    callback = callback_class(
        schedule=schedule, with_flops=True, on_trace_ready=lambda prof: rows.append(prof.run.tree("forward").total.macs)
    )
    trainer(callback, max_epochs=2, val_check_interval=4).fit(net(), loader(), loader(1))
    assert asked == [*range(2 * BATCHES)]
    assert rows == [rows_of(at) * (4 * 8 + 2 * 8 * 8) for at in (2, 5)]
    assert (callback.run.meta.steps, callback.run.meta.cycles) == (2, 2)


def test_with_accumulated_gradients_each_batch_is_a_step(net: Any, trainer: Any, callback_class: Any) -> None:
    callback = callback_class(schedule=always)
    trainer(callback, accumulate_grad_batches=4).fit(net(), loader())
    assert callback.run.meta.steps == BATCHES
    assert calls(callback.run)["body"] == BATCHES
    assert outside(callback.run)["Optimizer.step"] == BATCHES // 4


@of_both_packages
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_other_stages_are_recorded(net: Any, trainer: Any, callback_class: Any, stage: str) -> None:
    callback = callback_class(stage, schedule=always, with_flops=True)
    own = trainer(callback)
    getattr(own, stage)(net(), loader(5), **({} if stage == "predict" else {"verbose": False}))
    run = callback.run
    assert run.meta.steps == 5
    assert calls(run) == {"": 5, "body": 5, "body.0": 5, "body.1": 5, "head": 10, "judge": 5}
    assert run.tree("forward").total.macs == sum(map(rows_of, range(5))) * (4 * 8 + 2 * 8 * 8 + 8 * 2)
    assert run.phases() == ("forward",)

    other = callback_class()
    trainer(other).validate(net(), loader(5), verbose=False)
    with pytest.raises(TorchprofError, match="no step of 'fit'"):
        _ = other.run


def test_validation_of_fit_as_a_stage_of_its_own(net: Any, trainer: Any, callback_class: Any, tmp_path: Path) -> None:
    seen = []
    callback = callback_class("validate", schedule=always, on_trace_ready=lambda prof: seen.append(prof))
    trainer(callback, val_check_interval=4).fit(net(), loader(), loader(3))
    assert [prof.run.meta.steps for prof in seen] == [3, 3]  # twice in fit, without the sanity check
    assert seen[0] is not seen[1] is callback.profile
    assert calls(callback.run)["judge"] == calls(callback.run)["body"] == 3
    assert "Optimizer.step" not in outside(callback.run)


def test_a_second_fit_is_a_second_profile(net: Any, trainer: Any, callback_class: Any) -> None:
    callback = callback_class(schedule=always)
    first = None
    for batches in (2, 3):
        trainer(callback).fit(net(), loader(batches))
        assert callback.run.meta.steps == batches
        assert callback.profile is not first
        first = callback.profile


@of_both_packages
def test_an_error_passes_through_and_the_run_has_what_was_recorded(
    net: Any, trainer: Any, callback_class: Any, tmp_path: Path
) -> None:
    callback = callback_class(schedule=always, dirpath=tmp_path)
    with pytest.raises(ValueError, match="no more"):
        trainer(callback).fit(net(fail_at=3), loader())
    assert callback.run.meta.steps == 3  # the fourth batch did not end
    assert calls(callback.run)["body"] == 4
    assert torchprof.load(tmp_path / "fit-rank0.json") == callback.run


def test_after_an_interrupt_the_run_has_what_was_recorded(net: Any, trainer: Any, callback_class: Any) -> None:
    callback = callback_class()
    with pytest.raises((SystemExit, KeyboardInterrupt)):
        trainer(callback).fit(net(fail_at=3, error=KeyboardInterrupt), loader())
    assert callback.run.meta.steps == 1
    assert calls(callback.run)["body"] == 2


def test_an_error_of_on_trace_ready_ends_the_training_and_the_profile(
    net: Any, trainer: Any, callback_class: Any
) -> None:
    def refuse(prof: Profile) -> None:
        raise KeyError("refused")

    callback = callback_class(on_trace_ready=refuse)
    with pytest.raises(KeyError, match="refused"):
        trainer(callback).fit(net(), loader())
    assert callback.run.meta.steps == 3


def test_a_skipped_batch_is_not_a_step(net: Any, trainer: Any, callback_class: Any) -> None:
    class Skips(net):  # type: ignore[misc]
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 3 else None  # the rest of the epoch

    callback = callback_class(schedule=always)
    trainer(callback, max_epochs=2).fit(Skips(), loader())
    assert callback.run.meta.steps == calls(callback.run)["body"] == 6


def test_two_models_and_two_optimizers_in_one_lightningmodule(pl: Any, trainer: Any, callback_class: Any) -> None:
    class Gan(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator = nn.Linear(4, 4)
            self.critic = nn.Linear(4, 1)

        def training_step(self, batch: Any, batch_idx: int) -> None:
            of_generator, of_critic = self.optimizers()
            for optimizer, images in ((of_critic, batch[0]), (of_generator, self.generator(batch[0]))):
                optimizer.zero_grad()
                self.manual_backward(self.critic(images).sum())
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.generator.parameters(), 0.1), torch.optim.Adam(self.critic.parameters(), 0.1)

    seen: dict[str, int] = {}
    callback = callback_class(paths=["generator", "critic"])
    trainer(callback).fit(Gan(), loader())
    assert calls(callback.run) == {"": 0, "generator": 3, "critic": 6}
    for op in callback.run.ops()[("(outside)",)]:
        seen[op.name] = op.calls
    assert (seen["Optimizer.step#SGD.step"], seen["Optimizer.step#Adam.step"]) == (3, 3)


def test_a_loss_computed_inside_the_optimizers_step_is_not_optimizer_time(
    net: Any, trainer: Any, callback_class: Any
) -> None:
    class Sleeps(net):  # type: ignore[misc]
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            time.sleep(0.1)
            return loss

    callback = callback_class()
    trainer(callback).fit(Sleeps(), loader(5))
    spreads = {key.measure: spread for key, spread in callback.run.samples.items() if key.layer < 0}
    assert spreads["step_ns"].sum > 300_000_000
    assert spreads["step_optimizer_ns"].sum < 300_000_000


def test_options_are_passed_to_profile(net: Any, trainer: Any, callback_class: Any, tmp_path: Path) -> None:
    callback = callback_class(profile_memory=True, paths=["head"])
    trainer(callback).fit(net(), loader())
    assert callback.run.meta.paths == (("Net", "head"),)
    assert {memory.device for memory in callback.run.memory} == {"cpu"}
    assert calls(callback.run)["head"] == 6
    assert calls(callback.run)["body"] == 0

    nothing = callback_class(enabled=False, dirpath=tmp_path / "nowhere")
    trainer(nothing).fit(net(), loader())
    assert not (tmp_path / "nowhere").exists()
    with pytest.raises(TorchprofError, match="enabled=False"):
        _ = nothing.run


def test_bad_options_raise_before_training(callback_class: Any) -> None:
    with pytest.raises(TypeError, match="profile_memmory"):
        callback_class(profile_memmory=True)
    with pytest.raises(TorchprofError, match=r"warmup= counts calls.*use schedule="):
        callback_class(warmup=2)
    with pytest.raises(TorchprofError, match=r"schedule=3 is not a schedule"):
        callback_class(schedule=3)
    with pytest.raises(TorchprofError, match=r"stage='train'.*'fit', 'validate', 'test', 'predict'"):
        callback_class("train")


@pytest.mark.parametrize("options", [{}, {"use_cuda": False}, {"device": "cpu"}], ids=["not said", "said", "named"])
def test_the_default_device_is_that_of_the_model(options: dict[str, Any]) -> None:
    class OnCuda(nn.Parameter):
        device = torch.device("cuda")
        is_cpu = False

    class Loop(LoopCallback):
        STAGES = ("fit",)

    there = nn.Linear(2, 2)
    there.weight = OnCuda(there.weight.detach())
    for model, on_cuda in ((there, True), (nn.Linear(2, 2), False)):
        loop = Loop("fit", schedule=always, **options)
        loop._begin_step(model)
        model(torch.rand(1, 2))
        loop._end_step()
        loop._end_loop()
        assert dict(loop.run.meta.flags)["use_cuda"] is (on_cuda and not options)
        assert loop.run.meta.steps == 1


SPAWNED = """
import sys, warnings
import torch
from torch import nn
from torchprof.integrations.lightning import ProfileCallback  # before Lightning: it imports that itself
from lightning import pytorch as pl

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 2)
    def forward(self, x):
        return self.body(x)
    def training_step(self, x, batch_idx):
        return self(x).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    callback = ProfileCallback(dirpath=sys.argv[1])
    trainer = pl.Trainer(
        strategy="ddp_fork", devices=2, accelerator="cpu", max_epochs=1, callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )
    trainer.fit(Net(), torch.utils.data.DataLoader(torch.rand(32, 4), batch_size=2))
"""


@pytest.mark.jobs
def test_each_rank_saves_its_run_with_paths_without_wrappers(tmp_path: Path) -> None:
    pytest.importorskip("lightning.pytorch")
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")
    (tmp_path / "train.py").write_text(SPAWNED)
    subprocess.run(
        [sys.executable, tmp_path / "train.py", tmp_path / "runs"], check=True, capture_output=True, timeout=300
    )
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["fit-rank0.json", "fit-rank1.json"]
    for rank in (0, 1):
        run = torchprof.load(tmp_path / "runs" / f"fit-rank{rank}.json")
        assert (run.meta.rank, run.meta.steps) == (rank, 3)
        assert calls(run) == {"": 3, "body": 3}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (
            "sys.modules.update(dict.fromkeys(['lightning', 'pytorch_lightning']))\n"
            "try:\n    import torchprof.integrations.lightning\nexcept ImportError as error:\n    print(error)",
            "torchprof.integrations.lightning needs Lightning: pip install lightning",
        ),
        (
            "sys.modules['lightning'] = None\nimport pytorch_lightning\n"
            "from torchprof.integrations.lightning import ProfileCallback\n"
            "print(isinstance(ProfileCallback(), pytorch_lightning.Callback))",
            "True",
        ),
    ],
    ids=["neither", "the old name alone"],
)
def test_the_base_class_comes_from_the_imported_packages(code: str, expected: str, tmp_path: Path) -> None:
    if expected == "True":
        for name in PACKAGES:
            pytest.importorskip(name)
    (tmp_path / "script.py").write_text(f"import sys\nimport torchprof\n{code}", encoding="utf-8")
    result = run_warm(["script.py"], tmp_path)
    assert result.stdout.strip() == expected, result.stderr
