"""Carries remedies of findings out, on copies of a model, and times them in turn with a copy as it is."""

from __future__ import annotations

import copy
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from threading import Event, Thread, get_ident
from typing import Any

import torch
from torch import Tensor, nn

from torchprof.errors import TorchprofError
from torchprof.profile.benchmark import loss_of, shown_progress, tensors_in
from torchprof.profile.passes import FIRST, CycleKind, PassKind
from torchprof.profile.program import Program
from torchprof.profile.remedies import REMEDIES, Remedy
from torchprof.record.modules import first_line, instances_of
from torchprof.record.peak import clock_that_waits, with_ordinary_times
from torchprof.record.plan import Plan
from torchprof.record.ranges import OptimizerMarks
from torchprof.record.session import refuse_if_profiled
from torchprof.record.torch_internals import needed
from torchprof.run.formats import format_memory
from torchprof.run.measures import COMBINED, FEWEST_PAIRS, Trial, median_interval
from torchprof.run.meta import RunWarning
from torchprof.run.run import Run, output
from torchprof.run.words import BACKWARD, OPTIMIZER_RANGE, FrameKind

_pytree = needed("torch.utils._pytree")
_SECONDS = 2.0  # for one remedy, if its interval is not narrow before
_NARROW = 0.02  # of the time, the whole interval
_MOST_BYTES = 2**31  # of a model that is copied
_AUTOCASTS = ("cpu", "cuda")
_PLAIN = (Tensor, int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
"""Inputs that are copied, or cannot be changed."""


_OF_OPTIMIZERS = "optimizer_step_per_tensor"


class NotTried(Exception):
    """Why a remedy cannot be tried."""


def verified(run: Run, plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], seconds: float) -> Run:
    """The run with the trials of its first findings, see ``Profile.verify``."""
    if len(plan.models) != 1:
        raise TorchprofError(f"verify() tries one model, and this Profile has {len(plan.models)}: profile it alone.")
    if run.meta.world_size > 1:
        raise TorchprofError("verify() tries a model in one process: in a job, ranks would wait for each other.")
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise TorchprofError(f"seconds must be a number above 0, not {seconds!r:.80}.")
    if not args and not kwargs:
        raise TorchprofError("verify() calls copies of the model: give it the inputs of a call, as in prof.verify(x).")
    refuse_if_profiled()
    wanted = output("findings_to_try")(replace(run, trials=()))
    with shown_progress() as show:
        trials = Trials(run, plan.models[0], plan.modules_by_name, args, kwargs, seconds, show).of(wanted)
    return replace(run, trials=trials)


class TryingProgram(Program):
    """A program that is recorded, in which the remedies of the first findings are tried once: between two passes, after
    some of their kind were recorded, when the next one is not. In a training, these are passes with gradients.

    ``seconds``: for all trials. What the program computes stays the same: everything runs on copies. Other arguments
    are as for ``Program``. In a job of several ranks nothing is tried, since ranks would wait for each other.
    """

    def __init__(self, *, seconds: float = 20.0, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds
        self._trials: tuple[Trial, ...] = ()
        self._tried_kind: PassKind | None = None
        self._is_trying = False
        self._module: nn.Module | None = None  # that is called

    @property
    def run(self) -> Run:
        """The result. A gain in passes of one kind is a share of the time of all."""
        run, kind = super().run, self._tried_kind
        spent = [
            passes.recorded_ns + (passes.ns.sum if passes.ns is not None else 0)
            for passes in run.passes
            if kind == (passes.layer, passes.training, passes.gradients)
        ]
        share = min(sum(spent) / run.meta.wall_ns, 1.0) if run.meta.wall_ns else 0.0
        scaled = (
            replace(each, gain=each.gain * share, low=each.low * share, high=each.high * share) for each in self._trials
        )
        return replace(run, trials=tuple(scaled))

    def _before_call(self, module: nn.Module) -> bool:
        if self._is_trying:  # a copy is called
            return False
        self._module = module
        try:
            return super()._before_call(module)
        finally:
            self._module = None

    def _after_step(self, optimizer: Any, *others: Any) -> None:
        if not self._is_trying:
            super()._after_step(optimizer, *others)

    def _count_elsewhere(self, module: nn.Module) -> bool:
        return not self._is_trying and super()._count_elsewhere(module)

    def _begin_pass(self, kind: PassKind) -> None:
        super()._begin_pass(kind)
        run = None if self._cycles.is_recording else self._passes.runs.get(CycleKind(kind))
        is_training_without = not kind.gradients and OptimizerMarks.steps > 0
        if run is not None and self._tried_kind is None and run.meta.world_size == 1 and not is_training_without:
            self._tried_kind = kind
            self._try(run)

    def _try(self, run: Run) -> None:
        """Try what is found in the passes of a kind, with the inputs of the call that follows."""
        modules, model = self._plan.modules_by_name, self._module
        if model is None or all(modules.get(run.layers[root].name) is not model for root in run.layers.roots):
            return
        self._is_trying = True
        self._passes.lines.off()
        try:
            args, kwargs = self._outermost.arguments
            with suppress(Exception), shown_progress() as show:  # what is tried must not end the program
                run = with_ordinary_times(run, self._plan.products)
                wanted = output("findings_to_try")(run)
                self._trials = Trials(run, model, modules, args, kwargs, self._seconds, show).of(wanted)
        finally:
            self._is_trying = False
            self._passes.lines.on(get_ident(), self._plan.layer_with_id)

    def _add_warnings(self, why: RunWarning | None) -> None:
        super()._add_warnings(why)
        if self._tried_kind is None:
            self._cycles.observations.warnings.append(RunWarning.of("nothing_tried", passes=FIRST))


@dataclass
class Trials:
    """Tries the remedies of findings on copies of a ``model``, called with copies of ``args`` and ``kwargs``.

    ``run``: with the findings; ``modules``: by the names of its layers. ``seconds``: for all trials. ``show``: shows
    the progress, a line at a time. The user's model, optimizer, inputs, gradients, and the random states of torch,
    Python and NumPy are as before. The copies have the hooks of torch, but not those of the user. They run in a thread
    of their own, which has none of the user's modes but autocast. Ctrl-C ends the trials; a second one is raised.
    """

    run: Run
    model: nn.Module
    modules: Mapping[str, nn.Module]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    seconds: float = 20.0
    show: Callable[[str], None] = lambda line: None
    _end: float = field(default=0.0, init=False)

    def of(self, findings: Iterable[tuple[str, tuple[str, ...]]]) -> tuple[Trial, ...]:
        """The trials of these findings, each a rule and the names of its layers; and of all that gained, together."""
        self._end = time.perf_counter() + self.seconds
        trials: list[Trial] = []
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return ()  # waiting for the device would end the capture
        casts = [(kind, torch.get_autocast_dtype(kind)) for kind in _AUTOCASTS if torch.is_autocast_enabled(kind)]
        done = Event()  # Thread.join() would take the thread for ended after Ctrl-C
        thread = Thread(target=self._try_all, args=([*findings], casts, trials, done), daemon=True)
        with _as_before(self._cuda_devices):
            thread.start()
            while not done.is_set():
                try:
                    done.wait()
                except KeyboardInterrupt:
                    if not self._end:
                        raise
                    self._end = 0.0
        return tuple(trials)

    def _try_all(
        self,
        findings: Sequence[tuple[str, tuple[str, ...]]],
        casts: Sequence[tuple[str, Any]],
        trials: list[Trial],
        done: Event,
    ) -> None:
        with ExitStack() as stack:
            stack.callback(done.set)
            for kind, dtype in casts:
                stack.enter_context(torch.autocast(kind, dtype=dtype))
            for rule, layers in findings:
                if self._end:
                    trials.append(self._tried(rule, layers))
            gained = [trial for trial in trials if trial.has_gained]
            if len(gained) > 1:
                trials.append(self._combined(gained))

    @property
    def _cuda_devices(self) -> list[int]:
        tensors = (*self.model.parameters(), *self.model.buffers())
        return sorted({tensor.device.index or 0 for tensor in tensors if tensor.device.type == "cuda"})

    def _tried(self, rule: str, layers: tuple[str, ...]) -> Trial:
        trial = Trial(self.run.meta.rank, rule, layers)
        try:
            if rule == _OF_OPTIMIZERS:
                return self._of_optimizer(trial)
            if rule not in REMEDIES:
                raise NotTried("it changes your code")
            return self._of_model(trial, {rule: layers})
        except NotTried as why:
            return replace(trial, why_not=str(why))
        except Exception as error:  # a copy may lack what the model had, and code of the user may raise anything
            return replace(trial, why_not=f"{type(error).__name__}: {first_line(error)}")

    def _combined(self, gained: Sequence[Trial]) -> Trial:
        """All remedies that gained, together. An optimizer's step is in no call of the model: its gain adds."""
        names = tuple(dict.fromkeys(name for trial in gained for name in trial.layers))
        of_model: dict[str, tuple[str, ...]] = {}
        for trial in gained:
            if trial.rule in REMEDIES:  # of one rule there may be several findings
                of_model[trial.rule] = (*of_model.get(trial.rule, ()), *trial.layers)
        together = Trial(self.run.meta.rank, COMBINED, names)
        others = [trial for trial in gained if trial.rule not in REMEDIES]
        try:
            if len(gained) - len(others) > 1:
                together = self._of_model(together, of_model)
            else:
                others = [*gained]
        except Exception as error:
            return replace(together, why_not=f"{type(error).__name__}: {first_line(error)}")
        how = "\n".join(filter(None, [together.how, *(trial.how for trial in others)]))
        sums = {name: sum(getattr(trial, name) for trial in (together, *others)) for name in ("gain", "low", "high")}
        return replace(together, how=how, pairs=together.pairs or min(trial.pairs for trial in others), **sums)

    # A call of the model

    def _of_model(self, trial: Trial, layers_of: Mapping[str, tuple[str, ...]]) -> Trial:
        """Remedies, by their rules, with their layers."""
        remedies = [REMEDIES[rule] for rule in layers_of]
        before, after = _copy_of(self.model), _copy_of(self.model)
        in_copy = dict(zip(self.model.modules(), after.modules()))
        for remedy, names in zip(remedies, layers_of.values()):
            layers = [in_copy[module] for name in names if (module := self.modules.get(name)) in in_copy]
            if not remedy.change(after, layers):
                raise NotTried("what it changes is not in the model")
        cast = next((remedy.cast for remedy in remedies if remedy.cast), None)
        old, new = self._call(before), self._call(after, cast, remedies)
        is_of_model = {number for number in range(len(self.run.layers)) if self._is_in_model(number)}
        part_ns = sum(ns for layer, ns in self.run.rows.summed("layer", self._field).items() if layer in is_of_model)
        return self._compared(trial, "\n".join(remedy.how for remedy in remedies), old, new, part_ns)

    def _is_in_model(self, number: int) -> bool:
        root = self.run.layers.lineage(number)[0]
        return self.modules.get(self.run.layers[root].name) is self.model

    @property
    def _with_gradients(self) -> bool:
        """Whether the model was called with gradients enabled."""
        roots = (self.run.layers[root] for root in self.run.layers.roots if self._is_in_model(root))
        return any(layer.grad_calls for layer in roots)

    @property
    def _field(self) -> str:
        return "device_ns" if "device_ns" in self.run.meta.measured else "cpu_ns"

    def _call(
        self,
        model: nn.Module,
        cast: torch.dtype | None = None,
        remedies: Sequence[Remedy] = (),
    ) -> Callable[[], Any]:
        """A function that calls the model, in training with backward, and returns the output."""
        for value in _pytree.tree_leaves((tuple(self.args), dict(self.kwargs))):
            if not isinstance(value, _PLAIN):  # a cache, a generator, another module: a call may change it
                raise NotTried(f"an input is of the class {type(value).__name__}, which is not copied")

        def copied(tensor: Tensor) -> Tensor:
            dtype = cast if cast and tensor.is_floating_point() else tensor.dtype
            return tensor.detach().clone().to(dtype).requires_grad_(tensor.requires_grad)

        args, kwargs = _pytree.tree_map_only(Tensor, copied, (tuple(self.args), dict(self.kwargs)))
        tensors = [*model.parameters(), *tensors_in((args, kwargs))]

        def call() -> Any:
            for tensor in tensors:
                tensor.grad = None
            with ExitStack() as around_all:
                for remedy in remedies:
                    around_all.enter_context(remedy.around() if remedy.spans_backward else nullcontext())
                with ExitStack() as stack:
                    stack.enter_context(torch.set_grad_enabled(self._with_gradients))
                    for remedy in remedies:
                        stack.enter_context(nullcontext() if remedy.spans_backward else remedy.around())
                    output = model(*args, **kwargs)
                    loss = loss_of(output, None) if BACKWARD in self.run.phases() else None
                if loss is not None:
                    loss.backward()
            return output

        return call

    # A step of the optimizer

    def _of_optimizer(self, trial: Trial) -> Trial:
        """``fused=True``: on copies of the model, its gradients and the state of its optimizer."""
        own = {*self.model.parameters()}
        optimizers = [
            optimizer
            for optimizer in instances_of(torch.optim.Optimizer)
            if any(parameter in own for group in optimizer.param_groups for parameter in group["params"])
        ]
        if len(optimizers) != 1:
            raise NotTried(f"the model has {len(optimizers)} optimizers")
        if any(parameter.device.type != "cpu" for parameter in own):
            raise NotTried("it is tried on the CPU only")
        pairs = [_copy_of(self.model, optimizers[0]) for _ in range(2)]
        for model, _ in pairs:
            for parameter in model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.full_like(parameter, 1e-3)
        for group in pairs[1][1].param_groups:
            group.update(fused=True, foreach=None)
        old, new = (partial(_stepped, *pair) for pair in pairs)
        part_ns = self.run.rows.total("cpu_ns", frames=_is_optimizer)
        how = f"torch.optim.{type(optimizers[0]).__name__}(…, fused=True)"
        return self._compared(trial, how, old, new, part_ns)

    # The times of both

    def _compared(self, trial: Trial, how: str, old: Callable[[], Any], new: Callable[[], Any], part_ns: int) -> Trial:
        """Run both in turn, until the interval of the gain is narrow or the time is spent. ``part_ns``: the part of the
        recorded time that is like what is run."""
        whole_ns = sum(meta.wall_ns for meta in self.run.metas)
        share = min(part_ns / whole_ns, 1.0) if whole_ns else 0.0
        self.show(f"trying {how.splitlines()[0]}")
        devices = {tensor.device for tensor in (*self.model.parameters(), *self.model.buffers())}
        now = clock_that_waits(devices, time.perf_counter)
        difference, firsts = self._first_calls(old, new, now, may_be_random=trial.rule != _OF_OPTIMIZERS)
        times: list[tuple[float, float]] = []
        if FEWEST_PAIRS * 2 * firsts[0] > self._end - time.perf_counter() + _SECONDS:
            raise NotTried(f"{2 * FEWEST_PAIRS} calls take longer than the time for trials")
        end = min(time.perf_counter() + _SECONDS, self._end)
        while len(times) < FEWEST_PAIRS or time.perf_counter() < end:
            if not self._end or time.perf_counter() > self._end + _SECONDS:  # calls are longer than was to be expected
                raise NotTried("the time for trials is spent")
            pair = {}
            for run in (old, new) if len(times) % 2 else (new, old):
                start = now()
                run()
                pair[run] = now() - start
            times.append((pair[old], pair[new]))
            if len(times) >= FEWEST_PAIRS:
                low, high = median_interval([1 - after / before for before, after in times])
                if high - low <= _NARROW:
                    break
        gains = [1 - after / before for before, after in times]
        low, high = median_interval(gains)
        before, after = (median(each) for each in zip(*times))
        return replace(
            trial,
            how=how,
            pairs=len(times),
            before_ns=round(before * 1e9),
            after_ns=round(after * 1e9),
            gain=median(gains) * share,
            low=low * share,
            high=high * share,
            difference=difference,
            compile_ns=max(round((firsts[1] - firsts[0]) * 1e9), 0) if "compile" in how else 0,
        )

    def _first_calls(
        self, old: Callable[[], Any], new: Callable[[], Any], now: Callable[[], float], may_be_random: bool
    ) -> tuple[float | None, list[float]]:
        """The difference of the outputs of both, and the times of their first calls. None if outputs are random: then
        those of the model as it is differ with the seed."""
        if time.perf_counter() > self._end:
            raise NotTried("the time for trials is spent")
        outputs, firsts = [], []
        for run, seed in ((old, 0), (new, 0), (old, 1))[: 3 if may_be_random else 2]:
            torch.default_generator.manual_seed(seed)
            for index in self._cuda_devices:
                torch.cuda.default_generators[index].manual_seed(seed)
            start = now()
            found = tensors_in(run())
            outputs.append([tensor.detach().double().cpu() for tensor in found if tensor.is_floating_point()])
            firsts.append(now() - start)
        before, after, again = outputs[0], outputs[1], outputs[-1] if may_be_random else outputs[0]
        largest = max((tensor.abs().max().item() for tensor in before if tensor.numel()), default=0.0)
        if len(before) != len(after) or not 0 < largest < float("inf") or not all(map(torch.equal, before, again)):
            return None, firsts
        apart = max((one - other).abs().max().item() for one, other in zip(before, after) if one.numel())
        return (apart / largest if apart < float("inf") else None), firsts


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Make a step; returns the parameters."""
    optimizer.step()
    return [*model.parameters()]


def _is_optimizer(chain: Sequence[Any]) -> bool:
    return any(frame.kind == FrameKind.LABEL and frame.name.startswith(OPTIMIZER_RANGE) for frame in chain)


def _copy_of(model: nn.Module, *with_it: Any) -> Any:
    """A copy of a model, and of an optimizer that updates it, without the hooks of the user."""
    size = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    if size > _MOST_BYTES:
        raise NotTried(f"a copy of the model takes {format_memory(size)}")
    for module in model.modules():  # a closure in it would call the user's own model
        if "forward" in vars(module) or getattr(module, "_compiled_call_impl", None) is not None:
            raise NotTried(f"a forward of {type(module).__name__} is replaced")
    copies = copy.deepcopy((model, *with_it))
    for module in copies[0].modules():
        for name, hooks in vars(module).items():
            if name.endswith("_hooks") and isinstance(hooks, dict):
                for key, hook in [*hooks.items()]:
                    if not str(getattr(hook, "__module__", "")).startswith("torch."):
                        del hooks[key]
    return copies if with_it else copies[0]


@contextmanager
def _as_before(cuda_devices: Sequence[int]) -> Iterator[None]:
    """Afterwards the random states are as before."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=cuda_devices):
            yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.random.set_state(states[1])
