"""Carries remedies of findings out, on copies of a model, and times them in turn with a copy as it is."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from torchprof.errors import TorchprofError
from torchprof.profile.benchmark import loss_of, shown_progress, tensors_in
from torchprof.profile.passes import FIRST, CycleKind, PassKind
from torchprof.profile.program import Program
from torchprof.profile.remedies import (
    OF_OPTIMIZERS,
    NotTried,
    Remedy,
    ToTry,
    as_before,
    copy_of,
    in_loop,
    remedy_to_try,
    stop,
)
from torchprof.record.modules import first_line, instances_of
from torchprof.record.peak import clock_that_waits, with_ordinary_times, without_modes
from torchprof.record.plan import Plan
from torchprof.record.ranges import EngineRanges, OptimizerMarks, SplitRanges
from torchprof.record.session import refuse_if_profiled
from torchprof.record.torch_internals import needed
from torchprof.run.measures import COMBINED, FEWEST_PAIRS, Trial, median_interval
from torchprof.run.meta import RunWarning
from torchprof.run.run import Run, output
from torchprof.run.words import BACKWARD, FORWARD, LOADING, OPTIMIZER_STEP, PHASES, FrameKind

_pytree = needed("torch.utils._pytree")
_SECONDS = 2.0, 6.0  # for one remedy, if its interval is not narrow before: at least, and if the time for all allows it
_MOST_COMPARED = 2**30  # bytes of the results of a call, in float64
_NARROW = 0.02  # of the time, the whole interval
_MOST_CALLS = 8  # of the model, before a step of its optimizer
_OTHER_OPTIMIZERS = (torch.optim.LBFGS, torch.optim.Rprop, torch.optim.ASGD)  # not stopped by a learning rate of 0
_PLAIN = (Tensor, int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device)
"""Inputs that are copied, or cannot be changed."""


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
        trials = Trials(run, plan.models[0], plan.modules_by_name, args, kwargs, seconds, show)
        done = trials.of(wanted)
    name = run.layers[run.layers.roots[0]].name
    return replace(run, trials=of_all_time(run, name, trials.calls_per_step, done))


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
        self._calls_per_step = 0
        self._tried_kind: PassKind | None = None
        self._tried_model = ""
        self._is_trying = False
        self._module: nn.Module | None = None  # that is called

    @property
    def run(self) -> Run:
        """The result. A gain is a share of the time of all passes."""
        run = super().run
        return replace(run, trials=of_all_time(run, self._tried_model, self._calls_per_step, self._trials))

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
        entered, told = SplitRanges.entered.copy(), EngineRanges.after.copy()
        EngineRanges.after.clear()  # backward passes of trials are none of the loop
        self._passes.lines.off()
        try:
            args, kwargs = self._outermost.arguments
            # What is tried must not end the program, nor Ctrl-C meanwhile.
            with suppress(Exception, KeyboardInterrupt), shown_progress() as show:
                run = with_ordinary_times(run, self._plan.products)
                self._tried_model = next(
                    run.layers[root].name for root in run.layers.roots if modules.get(run.layers[root].name) is model
                )
                wanted = output("findings_to_try")(run)
                trials = Trials(run, model, modules, args, kwargs, self._seconds, show)
                self._calls_per_step = trials.calls_per_step
                self._trials = trials.of(wanted)
        finally:
            self._is_trying = False
            SplitRanges.entered.clear()
            SplitRanges.entered.update(entered)
            EngineRanges.after.extend(told)
            self._passes.lines.on(get_ident(), self._plan.layer_with_id)

    def _add_warnings(self, why: RunWarning | None) -> None:
        super()._add_warnings(why)
        if self._tried_kind is None:
            self._cycles.observations.warnings.append(RunWarning.of("nothing_tried", passes=FIRST))


@dataclass
class Trials:
    """Tries the remedies of findings on copies of a ``model``, called with copies of ``args`` and ``kwargs``: in
    training with backward, and with a step of its optimizer, if it has one of torch's. What is timed is then as a step
    of the loop, without its loss; with its data, if a remedy is one of a DataLoader: then batches are loaded from
    copies of the data set. The learning rate is 0, so that nothing diverges.

    ``run``: with the findings; ``modules``: by the names of its layers. ``seconds``: for all trials. ``show``: shows
    the progress, a line at a time. The user's model, optimizer, inputs, gradients, and the random states of torch,
    Python and NumPy are as before. The copies have the hooks of torch, but not those of the user. They run in this
    thread, with its autocast and its default device, but none of the user's own modes: another thread would have
    threads of OpenMP of its own, and these and those of this thread would take the processors from each other. Ctrl-C
    ends the trials.
    """

    run: Run
    model: nn.Module
    modules: Mapping[str, nn.Module]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    seconds: float = 20.0
    show: Callable[[str], None] = lambda line: None
    _end: float = field(default=0.0, init=False)
    _parts_left: int = field(default=1, init=False)  # trials for which there must be time
    _zeroes: bool = field(default=False, init=False)  # the program fills gradients with zeros

    def of(self, findings: Iterable[ToTry]) -> tuple[Trial, ...]:
        """The trials of these findings, and of all that gained, together."""
        self._end = time.perf_counter() + self.seconds
        trials: list[Trial] = []
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return ()  # waiting for the device would end the capture
        wanted, gained = [*findings], list[ToTry]()
        self._zeroes = any(rule == "gradients_zeroed" for rule, _, _ in wanted)
        with as_before(self._cuda_devices), without_modes():
            for number, finding in enumerate(wanted):
                self._parts_left = len(wanted) - number + (len(wanted) > 1)
                if self._end:
                    trial = self._tried([finding], Trial(self.run.meta.rank, *finding[:2]))
                    is_new = "DataLoader(" not in trial.how or all(trial.how != other.how for other in trials)
                    gained += [finding] if trial.has_gained and is_new else []
                    trials.append(trial)
            if len(gained) > 1 and self._end:
                self._parts_left = 1
                names = tuple(dict.fromkeys(name for _, layers, _ in gained for name in layers))
                trials.append(self._tried(gained, Trial(self.run.meta.rank, COMBINED, names)))
        return tuple(trials)

    @property
    def _cuda_devices(self) -> list[int]:
        tensors = (*self.model.parameters(), *self.model.buffers())
        return sorted({tensor.device.index or 0 for tensor in tensors if tensor.device.type == "cuda"})

    def _tried(self, findings: Iterable[ToTry], trial: Trial) -> Trial:
        """The trial of the remedies of findings."""
        layers_of: defaultdict[Remedy, tuple[str, ...]] = defaultdict(tuple)
        try:
            for rule, layers, action in findings:  # of one rule there may be several findings
                layers_of[remedy_to_try(rule, action)] += layers
            return self._with_remedies(layers_of, trial)
        except NotTried as why:
            return replace(trial, why_not=str(why))
        except KeyboardInterrupt:
            self._end = 0.0
            return replace(trial, why_not="trials were interrupted")
        except Exception as error:  # a copy may lack what the model had, and code of the user may raise anything
            return replace(trial, why_not=f"{type(error).__name__}: {first_line(error)}")

    def _with_remedies(self, layers_of: Mapping[Remedy, tuple[str, ...]], trial: Trial) -> Trial:
        remedies = [*layers_of]
        (before, old), (after, new) = (copy_of(self.model, self._optimizer) for _ in range(2))
        in_copy = dict(zip(self.model.modules(), after.modules()))
        for remedy, names in zip(remedies, layers_of.values()):
            layers = [in_copy[module] for name in names if (module := self.modules.get(name)) in in_copy]
            if not remedy.change(after, layers, new):
                raise NotTried("what it changes is not in the model")
        how = "\n".join(remedy.how for remedy in remedies).format(optimizer=type(new).__name__)
        self.show(f"trying {how.splitlines()[0]}")
        if trial.rule != OF_OPTIMIZERS:  # else parameters are compared after a step
            stop([old, new])
        steps = self._step(before, old), self._step(after, new, remedies)
        loads_with = [remedy.loading for remedy in remedies if remedy.loading]
        if not loads_with:
            return self._compared(replace(trial, how=how), *steps, [old, new])
        if len(loads_with) > 1:
            raise NotTried("two of these remedies change the same loader")
        loading = loads_with[0]()
        each, loads = (loading.before, loading.after), self._loads_per_step
        count = max(loading.batches // loads, 1)
        with ExitStack() as stack:  # both end, whatever one of them raises
            for batches in each:
                stack.callback(batches.close)
            limit = self._end + _SECONDS[0]
            old_loop, new_loop = (in_loop(step, batches, count, loads, limit) for step, batches in zip(steps, each))
            done = self._compared(replace(trial, how=how), old_loop, new_loop, [old, new])
        return replace(done, before_ns=done.before_ns // count, after_ns=done.after_ns // count)

    @property
    def _loads_per_step(self) -> int:
        """How many batches the program loads for a step, at least one."""
        loads = self.run.rows.total("calls", frames=_is_loading)
        roots = [root for root in self.run.layers.roots if self._is_in_model(root)]
        calls = sum(self.run.grad_calls(root) or self.run.rows.forward_calls(root) for root in roots)
        return max(round(loads / max(calls, 1) * (self.calls_per_step or 1)), 1)

    # A step

    @cached_property
    def _optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the model, if it is one of torch's that made a step in the run; None if it has several, and
        where gradients of many calls add up: then a step takes little of the time."""
        own = {*self.model.parameters()}
        optimizers = [
            optimizer
            for optimizer in instances_of(torch.optim.Optimizer)
            if any(parameter in own for group in optimizer.param_groups for parameter in group["params"])
        ]
        if len(optimizers) != 1 or not 1 <= self._ratio <= _MOST_CALLS:
            return None
        is_known = type(optimizers[0]).__module__.startswith("torch.optim.")
        return optimizers[0] if is_known and not isinstance(optimizers[0], _OTHER_OPTIMIZERS) else None

    @cached_property
    def _ratio(self) -> int:
        """How many calls with backward come before a step of an optimizer; 0 if there is no step."""
        steps = self.run.rows.total("calls", frames=lambda chain: _is_optimizer(chain[-1:]))
        calls = sum(self.run.grad_calls(root) for root in self.run.layers.roots if self._is_in_model(root))
        return max(round(calls / steps), 1) if steps and self._with_backward else 0

    @property
    def calls_per_step(self) -> int:
        """How many calls come before a step of the optimizer; 0 if no step is tried."""
        return 0 if self._optimizer is None else self._ratio

    @property
    def _with_backward(self) -> bool:
        return self._with_gradients and BACKWARD in self.run.phases()

    def _is_in_model(self, number: int) -> bool:
        root = self.run.layers.lineage(number)[0]
        return self.modules.get(self.run.layers[root].name) is self.model

    @property
    def _with_gradients(self) -> bool:
        """Whether the model was called with gradients enabled."""
        roots = (self.run.layers[root] for root in self.run.layers.roots if self._is_in_model(root))
        return any(layer.grad_calls for layer in roots)

    def _step(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, remedies: Sequence[Remedy] = ()
    ) -> Callable[[], Any]:
        """A function that makes a step with copies of the inputs, and returns the last output and the parameters."""
        for value in _pytree.tree_leaves((tuple(self.args), dict(self.kwargs))):
            if not isinstance(value, _PLAIN):  # a cache, a generator, another module: a call may change it
                raise NotTried(f"an input is of the class {type(value).__name__}, which is not copied")
        zeroes = self._zeroes and not any(remedy.frees_gradients for remedy in remedies)
        cast = next((remedy.cast for remedy in remedies if remedy.cast), None)

        def copied(tensor: Tensor) -> Tensor:
            dtype = cast if cast and tensor.is_floating_point() else tensor.dtype
            return tensor.detach().clone().to(dtype).requires_grad_(tensor.requires_grad)

        args, kwargs = _pytree.tree_map_only(Tensor, copied, (tuple(self.args), dict(self.kwargs)))
        tensors = [*model.parameters(), *tensors_in((args, kwargs))]
        of_step = [remedy.around for remedy in remedies if remedy.spans_backward]
        of_call = [remedy.around for remedy in remedies if not remedy.spans_backward]

        def call() -> Any:
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(self._with_gradients))
                for around in of_call:
                    stack.enter_context(around())
                output = model(*args, **kwargs)
                loss = loss_of(output, None) if self._with_backward else None
            if loss is not None:
                loss.backward()
            return output

        def step() -> Any:
            for tensor in tensors:
                if zeroes and tensor.grad is not None:
                    tensor.grad.zero_()
                else:
                    tensor.grad = None
            with ExitStack() as stack:
                for around in of_step:
                    stack.enter_context(around())
                for _ in range(self.calls_per_step or 1):
                    output = call()
                if optimizer is not None:
                    optimizer.step()
            return output, [*model.parameters()]

        return step

    # The times of both

    def _compared(
        self,
        trial: Trial,
        old: Callable[[], Any],
        new: Callable[[], Any],
        optimizers: Sequence[torch.optim.Optimizer | None],
    ) -> Trial:
        """Run both in turn, until the interval of the gain is narrow or the time is spent."""
        devices = {tensor.device for tensor in (*self.model.parameters(), *self.model.buffers())}
        now = clock_that_waits(devices, time.perf_counter)
        difference, firsts = self._first_calls(old, new, now, may_be_random=trial.rule != OF_OPTIMIZERS)
        stop(optimizers)
        times: list[tuple[float, float]] = []
        left = self._end - time.perf_counter()
        least, most = _SECONDS
        if FEWEST_PAIRS * 2 * min(firsts[0], firsts[-1]) > left + least:  # the first one may load and search kernels
            raise NotTried(f"{FEWEST_PAIRS} turns of both take longer than the time for trials")
        end = min(time.perf_counter() + min(max(left / self._parts_left, least), most), self._end)
        while len(times) < FEWEST_PAIRS or time.perf_counter() < end:
            if time.perf_counter() > self._end + least:  # calls are longer than was to be expected
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
            pairs=len(times),
            before_ns=round(before * 1e9),
            after_ns=round(after * 1e9),
            gain=median(gains),
            low=low,
            high=high,
            difference=difference,
            compile_ns=max(round((firsts[1] - firsts[0]) * 1e9), 0) if "compile" in trial.how else 0,
        )

    def _first_calls(
        self, old: Callable[[], Any], new: Callable[[], Any], now: Callable[[], float], may_be_random: bool
    ) -> tuple[float | None, list[float]]:
        """The difference of the results of both, and the times of their first calls. Results are the outputs; with the
        remedy of an optimizer, the parameters after a step. None if outputs are random: then those of the model as it
        is differ with the seed."""
        if time.perf_counter() > self._end:
            raise NotTried("the time for trials is spent")
        outputs, firsts = [], []
        for run, seed in ((old, 0), (new, 0), (old, 1))[: 3 if may_be_random else 2]:
            torch.default_generator.manual_seed(seed)
            for index in self._cuda_devices:
                torch.cuda.default_generators[index].manual_seed(seed)
            start = now()
            output, parameters = run()
            found = tensors_in(output) if may_be_random else parameters
            if sum(tensor.numel() for tensor in found) * 8 > _MOST_COMPARED:
                found = []
            outputs.append([tensor.detach().double().cpu() for tensor in found if tensor.is_floating_point()])
            firsts.append(now() - start)
        before, after, again = outputs[0], outputs[1], outputs[-1] if may_be_random else outputs[0]
        largest = max((tensor.abs().max().item() for tensor in before if tensor.numel()), default=0.0)
        if len(before) != len(after) or not 0 < largest < float("inf") or not all(map(torch.equal, before, again)):
            return None, firsts
        apart = max((one - other).abs().max().item() for one, other in zip(before, after) if one.numel())
        return (apart / largest if apart < float("inf") else None), firsts


# What a gain is of all the time


def of_all_time(run: Run, model: str, calls_per_step: int, trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Trials whose gains are shares of what was tried, with gains that are shares of the time of a run. ``model``: the
    name of the one that was called. ``calls_per_step``: see ``Trials``.

    What was tried is a part of the time that is known in two ways, which are both in the interval: by the rows of the
    run; and by how long a call takes in a trial, and how many there are. They differ as far as a trial differs from
    the loop, and where the profiler makes some work longer than other work.
    """
    root = next((number for number in run.layers.roots if run.layers[number].name == model), None)
    whole_ns = sum(meta.wall_ns for meta in run.metas)
    if root is None or not whole_ns:
        return tuple(trials)
    field = "device_ns" if "device_ns" in run.meta.measured else "cpu_ns"
    times = run.rows.summed(("layer", "phase"), field).items()
    in_model = [(phase, ns) for (layer, phase), ns in times if layer >= 0 and run.layers.lineage(layer)[0] == root]
    calls, with_gradients = run.rows.forward_calls(root), run.grad_calls(root)
    tried = with_gradients or calls
    others_ns = sum(ns for phase, ns in in_model if PHASES[phase] == FORWARD) * (calls - tried) // max(calls, 1)
    step_ns = sum(ns for _, ns in in_model)
    if calls_per_step:
        step_ns += run.rows.total(field, frames=_is_optimizer)
    loading_ns = run.rows.total("cpu_ns", frames=lambda chain: any(map(_is_load, chain)))

    def scaled(trial: Trial) -> Trial:
        part_ns = step_ns + loading_ns * ("DataLoader(" in trial.how)
        tried_ns = trial.before_ns * tried / max(calls_per_step, 1) + others_ns
        has_plain_times = any(passes.ns for passes in run.passes)  # else the profiler made this part longer by so much
        plain_ns = whole_ns if has_plain_times else whole_ns + min(tried_ns - part_ns, 0)
        shares = min(part_ns / whole_ns, 1.0), min(tried_ns / plain_ns, 1.0)
        low, high = (pick(end * share for share in shares) for pick, end in ((min, trial.low), (max, trial.high)))
        return replace(trial, gain=trial.gain * sum(shares) / 2, low=low, high=high)

    return tuple(map(scaled, trials))


def _is_optimizer(chain: Sequence[Any]) -> bool:
    return any(frame.kind == FrameKind.LABEL and frame.name.startswith(OPTIMIZER_STEP) for frame in chain)


def _is_load(frame: Any) -> bool:
    return bool(frame.kind == FrameKind.LABEL and frame.name.startswith(LOADING))


def _is_loading(chain: Sequence[Any]) -> bool:
    return any(map(_is_load, chain[-1:]))
