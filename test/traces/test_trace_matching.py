"""Matching the modules of a trace with those of a model: compared with the calls that hooks record, and by hand."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from build.architectures import ARCHITECTURES
from build.models import Checkpointed, Mlp, Recursive, Several, Tied
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from torchprof.attribute.events import Site
from torchprof.errors import TorchprofError
from torchprof.record.modules import walk_modules
from torchprof.run.layers import Layer
from torchprof.traces.layers import Hierarchy, ModuleCall
from torchprof.traces.matching import match_modules
from torchprof.traces.model import call_order
from torchprof.traces.module_trees import ModelModule, refuse_another_model


def warning_texts(made: Hierarchy) -> tuple[str, ...]:
    return tuple(map(str, made.warnings))


def entries(*models: nn.Module) -> list[ModelModule]:
    """The modules of models, each with a layer of its own."""
    made: list[ModelModule] = []
    first: dict[int, int] = {}
    for model in models:
        for path, _, one in walk_modules(model):
            number = first.setdefault(id(one), len(made))
            shapes = tuple(tuple(param.shape) for param in one._parameters.values() if param is not None)
            has_forward = type(one).forward is not nn.Module.forward
            same_as = None if number == len(made) else number
            kind = type(one).__name__
            made.append(ModelModule(path, kind, len(made), has_forward, shapes, same_as, call_order(type(one))))
    return made


def match(calls: list[ModuleCall], modules: list[ModelModule]) -> Hierarchy:
    return match_modules(calls, modules, [Layer(module.path, module.kind) for module in modules])


def record(
    model: nn.Module, run: Callable[[], Any], file: Path, with_shapes: bool
) -> tuple[list[ModuleCall], dict[str, str]]:
    """The modules in the trace of a run, and the path of each, which the order of all calls gives."""
    called: list[str] = []
    paths = {".".join((type(model).__name__, *name.split("."))).rstrip("."): one for name, one in model.named_modules()}
    hooks = [one.register_forward_pre_hook(lambda *_, path=path: called.append(path)) for path, one in paths.items()]
    with profile(activities=[ProfilerActivity.CPU], with_stack=True, record_shapes=with_shapes) as prof:
        run()
    for hook in hooks:
        hook.remove()
    prof.export_chrome_trace(str(file))
    text = file.read_text(errors="replace")  # torch 2.4 sometimes writes invalid UTF-8
    events = [event for event in json.loads(text, strict=False)["traceEvents"] if event.get("ph") == "X"]
    frames = {event["args"]["Python id"]: event for event in events if event.get("cat") == "python_function"}
    modules = [event for event in frames.values() if event["name"].startswith("nn.Module: ")]
    modules.sort(key=lambda event: (event["ts"], event["args"]["Python id"]))
    parents: dict[str, dict[str, None]] = {}
    for event in modules:
        around = frames.get(event["args"].get("Python parent id"))  # torch 2.15 leaves it out of the outermost one
        while around is not None and not around["name"].startswith("nn.Module: "):
            around = frames.get(around["args"].get("Python parent id"))
        parents.setdefault(event["name"], {})[around["name"] if around else ""] = None
    shapes: dict[str, set[tuple[int, ...]]] = {name: set() for name in parents}
    starts = [event["ts"] for event in modules]
    for event in events:
        if event.get("cat") == "cpu_op" and "Input Dims" in event["args"]:
            # The last one that started is the innermost.
            for at in range(bisect_right(starts, event["ts"]) - 1, -1, -1):
                if event["ts"] < starts[at] + modules[at]["dur"]:
                    dims = event["args"]["Input Dims"]
                    shapes[modules[at]["name"]] |= {tuple(dim) for dim in dims if all(type(x) is int for x in dim)}
                    break
    assert len(modules) == len(called)
    true_paths = dict(zip((event["name"] for event in modules), called))
    return [ModuleCall(name, tuple(parents[name]), frozenset(shapes[name])) for name in parents], true_paths


def wrong_paths(made: Hierarchy, true_paths: dict[str, str]) -> set[str]:
    found = {name: [made.layers[index].name for index in site.layers] for name, site in made.sites.items()}
    return {path for name, path in true_paths.items() if path not in found.get(name, [])}


NOT_FOUND_WITHOUT_SHAPES = {
    # Calls alternate between two lists, or start at the end of a list: only shapes show this.
    "WaveNet": {f"GatedConvolutions.{name}" for name in ("dilated.1", "dilated.2", "mix.0", "mix.1")},
    "feature pyramid": {"Fpn.lateral.0", "Fpn.lateral.1"},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_module_of_an_architecture_is_found(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name].make(), ARCHITECTURES[name].inputs()
    calls, true_paths = record(model, lambda: model(*inputs), tmp_path / "trace.json", with_shapes=True)
    assert wrong_paths(match(calls, entries(model)), true_paths) == set()
    without = match([call._replace(shapes=frozenset()) for call in calls], entries(model))
    assert wrong_paths(without, true_paths) == NOT_FOUND_WITHOUT_SHAPES.get(name, set())
    assert warning_texts(without) or name not in NOT_FOUND_WITHOUT_SHAPES


@pytest.mark.parametrize("make", [Several, Recursive, Tied, lambda: Checkpointed(True), lambda: Checkpointed(False)])
def test_every_call_of_a_module_is_found(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    model, x = make(), torch.rand(2, 4, requires_grad=True)
    calls, true_paths = record(model, lambda: model(x).sum().backward(), tmp_path / "trace.json", with_shapes=True)
    made = match(calls, entries(model))
    assert wrong_paths(made, true_paths) == set()
    if isinstance(model, Tied):
        (shared,) = (site for site in made.sites.values() if len(site.layers) == 2)
        assert [made.layers[index].name for index in shared.layers] == ["Tied.left.inner", "Tied.right.inner"]


def call(name: str, *parents: str, shapes: tuple[tuple[int, ...], ...] = ()) -> ModuleCall:
    around = tuple(parent and f"nn.Module: {parent}" for parent in parents or ("",))
    return ModuleCall(f"nn.Module: {name}", around, frozenset(shapes))


def found(made: Hierarchy) -> dict[str, list[str]]:
    return {
        name.removeprefix("nn.Module: "): [made.layers[index].name for index in site.layers]
        for name, site in made.sites.items()
    }


def net(*children: tuple[str, str, tuple[tuple[int, ...], ...]], kind: str = "Net") -> list[ModelModule]:
    """A model by hand: each child with its dotted path, class, and shapes of parameters."""
    paths = [(kind,), *((kind, *path.split(".")) for path, _, _ in children)]
    kinds = [kind, *(cls for _, cls, _ in children)]
    shapes = [(), *(own for _, _, own in children)]
    return [
        ModelModule(path, cls, index, cls != "ModuleList", own)
        for index, (path, cls, own) in enumerate(zip(paths, kinds, shapes))
    ]


def test_shapes_distinguish_modules_of_one_class() -> None:
    model = net(("fc1", "Linear", ((8, 4), (8,))), ("fc2", "Linear", ((2, 8), (2,))))
    calls = [call("Net_0"), call("Linear_0", "Net_0", shapes=((3, 8), (2, 8), (2,)))]
    made = match([*calls, call("Linear_1", "Net_0", shapes=((3, 4), (8, 4), (8,)))], model)
    assert found(made) == {"Net_0": ["Net"], "Linear_0": ["Net.fc2"], "Linear_1": ["Net.fc1"]}
    assert warning_texts(made) == ()


def test_callees_distinguish_modules_of_one_class() -> None:
    model = net(("a", "Block", ()), ("a.act", "ReLU", ()), ("b", "Block", ()), ("b.act", "GELU", ()))
    calls = [call("Net_0"), call("Block_0", "Net_0"), call("GELU_0", "Block_0"), call("Block_1", "Net_0")]
    made = match([*calls, call("ReLU_0", "Block_1")], model)
    assert found(made)["Block_0"] == ["Net.b"]
    assert found(made)["ReLU_0"] == ["Net.a.act"]
    assert warning_texts(made) == ()


def test_a_match_by_order_gives_a_warning() -> None:
    blocks = [(f"blocks.{number}", "Block", ()) for number in range(12)]
    model = net(("blocks", "ModuleList", ()), *blocks, ("key", "Linear", ()), ("query", "Linear", ()))
    calls = [call("Net_0"), *(call(f"Block_{number}", "Net_0") for number in range(12))]
    made = match([*calls, call("Linear_0", "Net_0"), call("Linear_1", "Net_0")], model)
    assert found(made)["Block_11"] == ["Net.blocks.11"]
    assert warning_texts(made) == (
        "Matched by the order of first calls, which is assumed to be the order in the source code: Net.blocks.0 to "
        ".11 (Block), Net.key, .query (Linear).",
    )


def test_a_match_by_order_uses_the_order_in_the_source() -> None:
    model = net(("key", "Linear", ()), ("query", "Linear", ()))
    model[0] = model[0]._replace(calls={"query": True, "key": True})
    made = match([call("Net_0"), call("Linear_0", "Net_0"), call("Linear_1", "Net_0")], model)
    assert found(made)["Linear_0"] == ["Net.query"]
    assert len(warning_texts(made)) == 1


def test_modules_that_are_always_called_are_preferred_to_those_in_a_branch() -> None:
    model = net(("drop", "Dropout", ()), ("parts", "ModuleList", ()), ("parts.0", "Dropout", ()))
    model[0] = model[0]._replace(calls={"drop": False, "parts": True})
    made = match([call("Net_0"), call("Dropout_0", "Net_0")], model)
    assert found(made)["Dropout_0"] == ["Net.parts.0"]
    assert warning_texts(made) == (
        "The model has more modules of this class that were never called. It is assumed that the first ones were "
        "called: Net.parts.0 (Dropout).",
    )


def test_a_submodule_of_the_traced_model_is_found_by_its_shapes() -> None:
    calls = [call("Sequential_0"), call("Linear_0", "Sequential_0", shapes=((4, 8), (16, 8), (16,)))]
    calls.append(call("Linear_1", "Sequential_0", shapes=((4, 16), (4, 16), (4,))))
    made = match(calls, [ModelModule(("Linear",), "Linear", 0, param_shapes=((4, 16), (4,)))])
    assert found(made) == {"Linear_1": ["Linear"]}
    assert warning_texts(made) == ("Not found in the model, and not shown as layers: Sequential_0, Linear_0.",)
    without = match([one._replace(shapes=frozenset()) for one in calls], [ModelModule(("Linear",), "Linear", 0)])
    assert found(without) == {"Linear_0": ["Linear"]}
    assert warning_texts(without)[0] == (
        "The trace has more modules of this class than the model. It is assumed that the first that fit are these: "
        "Linear (Linear)."
    )


def test_a_model_of_another_size_gives_a_warning() -> None:
    traced = [call("Net_0"), call("Linear_0", "Net_0", shapes=((2, 32), (10, 32), (10,)))]
    assert warning_texts(match(traced, net(("fc", "Linear", ((10, 32), (10,)))))) == ()
    assert warning_texts(match(traced, net(("fc", "ReLU", ()), ("fc2", "Linear", ())))) == ()
    other = match(traced, net(("fc", "Linear", ((10, 64), (10,)))))
    assert warning_texts(other) == (
        "No operator in the trace has an input with the shape of a parameter of the model. Is this the model that was "
        "traced, with the same sizes?",
    )
    unseen = [one._replace(shapes=frozenset()) for one in traced]
    assert warning_texts(match(unseen, net(("fc", "Linear", ((10, 64), (10,)))))) == ()


def test_several_classes_of_one_name_give_a_warning() -> None:
    model = net(("a", "Linear", ((2, 4),)), ("b", "Linear", ((4, 4),)), ("c", "GELU", ()), ("d", "GELU", ()))
    calls = [call("Net_0"), call("Linear_0", "Net_0", shapes=((2, 4),))]
    assert not any("the same name" in warning for warning in warning_texts(match(calls, model)))
    several = [one._replace(cls=number) for number, one in enumerate(model)]
    (warning,) = (warning for warning in warning_texts(match(calls, several)) if "the same name" in warning)
    assert "Several classes of the model have the same name (Linear)" in warning


def test_an_unmatched_module_with_too_many_places_is_no_layer() -> None:
    levels = [[f"{kind}_{number}" for number in range(17)] for kind in ("A", "B", "C")]
    around = ["Net_0"]
    calls = [call("Net_0"), call("Linear_0", "Net_0")]
    for level in levels:
        calls += [call(name, *around) for name in level]
        around = level
    made = match([*calls, call("Hidden_0", *around), call("Linear_1", "Hidden_0")], net(("fc", "Linear", ())))
    assert len(made.layers) == 2 + 17 + 17**2 + 17**3
    assert set(found(made)).isdisjoint({"Hidden_0", "Linear_1"})
    assert "Called in more than 4096 places, and not shown as layers: Hidden_0, Linear_1." in warning_texts(made)[-1]


def test_the_order_of_a_sequential_is_certain() -> None:
    model = net(("0", "ReLU", ()), ("1", "ReLU", ()), kind="Sequential")
    made = match([call("Sequential_0"), call("ReLU_0", "Sequential_0"), call("ReLU_1", "Sequential_0")], model)
    assert found(made)["ReLU_1"] == ["Sequential.1"]
    assert warning_texts(made) == ()
    fewer = match([call("Sequential_0"), call("ReLU_0", "Sequential_0")], model)
    assert warning_texts(fewer) == (
        "The model has more modules of this class that were never called. It is assumed that the first ones were "
        "called: Sequential.0 (ReLU).",
    )


def test_a_module_that_its_owners_caller_calls_is_found() -> None:
    model = net(("block", "Block", ()), ("block.fc", "Linear", ((4, 4),)), ("head", "Linear", ((2, 4),)))
    calls = [call("Net_0"), call("Linear_0", "Net_0", shapes=((4, 4),)), call("Linear_1", "Net_0", shapes=((2, 4),))]
    made = match(calls, model)
    assert found(made) == {"Net_0": ["Net"], "Linear_0": ["Net.block.fc"], "Linear_1": ["Net.head"]}
    assert warning_texts(made) == ()


def test_a_submodule_alone_and_a_wrapped_model_are_found() -> None:
    model = net(("encoder", "Encoder", ()), ("encoder.fc", "Linear", ()), ("fc", "Linear", ()))
    part = match([call("Encoder_0"), call("Linear_0", "Encoder_0")], model)
    assert found(part) == {"Encoder_0": ["Net.encoder"], "Linear_0": ["Net.encoder.fc"]}
    calls = [call("DistributedDataParallel_0"), call("Net_0", "DistributedDataParallel_0"), call("Linear_0", "Net_0")]
    made = match(calls, model)
    assert found(made) == {"DistributedDataParallel_0": ["Net"], "Net_0": ["Net"], "Linear_0": ["Net.fc"]}
    assert made.sites["nn.Module: Net_0"] == Site((0,), "nn.Module: DistributedDataParallel_0")
    assert warning_texts(made) == ()


def test_a_wrapper_in_the_model_has_the_layer_of_the_module_in_it() -> None:
    model = [
        ModelModule(("OptimizedModule",), "OptimizedModule", 0),
        ModelModule(("OptimizedModule", "_orig_mod"), "Net", 0),
    ]
    made = match_modules(
        [call("OptimizedModule_0"), call("Net_0", "OptimizedModule_0")], model, [Layer(("Net",), "Net")]
    )
    assert made.sites == {
        "nn.Module: OptimizedModule_0": Site((0,)),
        "nn.Module: Net_0": Site((0,), "nn.Module: OptimizedModule_0"),
    }


def test_several_models_are_found() -> None:
    calls = [call("Mlp_0"), call("Linear_0", "Mlp_0"), call("Several_0"), call("Linear_1", "Several_0")]
    made = found(match(calls, entries(Several(), Mlp())))
    assert (made["Mlp_0"], made["Linear_0"], made["Several_0"]) == (["Mlp"], ["Mlp.fc1"], ["Several"])


def test_a_module_that_is_not_in_the_model_is_a_layer_below_its_caller_or_none() -> None:
    model = net(("fc", "Linear", ()))
    calls = [call("Net_0"), call("Hidden_0", "Net_0"), call("Linear_0", "Hidden_0"), call("ReLU_0", "Hidden_0")]
    made = match([*calls, call("MSELoss_0")], model)
    assert found(made) == {
        "Net_0": ["Net"],
        "Linear_0": ["Net.fc"],
        "Hidden_0": ["Net.Hidden_0"],
        "ReLU_0": ["Net.Hidden_0.ReLU_0"],
    }
    own = made.layers[2]
    assert (own.kind, own.params, own.training) == ("Hidden", None, None)
    assert warning_texts(made) == (
        "Not found in the model, and shown below their callers: Hidden_0, ReLU_0.",
        "Not found in the model, and not shown as layers: MSELoss_0.",
    )


def test_a_module_without_a_caller_is_not_guessed_among_several() -> None:
    model = net(("body", "Body", ()), ("body.a", "Linear", ()), ("body.b", "Linear", ()), ("act", "ReLU", ()))
    made = match([call("Net_0"), call("ReLU_0", "Net_0"), call("Linear_0")], model)
    assert "Linear_0" not in found(made)
    assert warning_texts(made) == ("Not found in the model, and not shown as layers: Linear_0.",)


def test_the_model_is_accepted_if_the_recording_ends_inside_a_call() -> None:
    """The recording ended in the second of three blocks."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)) for _ in range(3)))
    modules = entries(model)
    called = {("Sequential",), ("Sequential", "0"), ("Sequential", "1"), ("Sequential", "1", "0")}
    refuse_another_model(modules, called | {("Sequential", "0", number) for number in "012"})
    blocks = {("Sequential", block) for block in "012"} | {("Sequential", block, "0") for block in "012"}
    with pytest.raises(TorchprofError, match=r"calls Sequential\.0\.1 \(ReLU\) each time.* of 2 more"):
        refuse_another_model(modules, {("Sequential",)} | blocks)


def test_the_model_is_accepted_if_only_a_selection_has_labels() -> None:
    """Inside a selected module, only modules that are selected themselves have labels."""
    modules = entries(nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), Mlp()) for _ in range(3))))
    root, blocks = ("Sequential",), [("Sequential", block) for block in "012"]
    linears, mlps = ([(*block, number) for block in blocks] for number in "01")
    selected = {at for at, module in enumerate(modules) if module.path in {*blocks, *linears}}
    both = {at for at, module in enumerate(modules) if module.path in {*linears, *mlps}}
    refuse_another_model(modules, {root, *blocks, *linears}, selected)
    with pytest.raises(TorchprofError, match=r"Sequential\.0\.1 \(Mlp\) each time"):
        refuse_another_model(modules, {root, *blocks, *linears})
    with pytest.raises(TorchprofError, match=r"Sequential\.0\.0 \(Linear\) each time"):
        refuse_another_model(modules, {root, *blocks, *mlps, *((*mlp, "fc1") for mlp in mlps)}, selected | both)
    refuse_another_model(modules, {root, *blocks, *mlps})  # no submodule of an Mlp has a label: a selection
    with pytest.raises(TorchprofError, match=r"Sequential\.0\.0 \(Linear\) each time"):
        # The model has no module "new", so this is no selection.
        refuse_another_model(modules, {root, *blocks, *mlps, (*root, "new")})


def test_the_trace_of_another_model_is_refused() -> None:
    with pytest.raises(TorchprofError, match="calls Other, and nothing in Net"):
        match([call("Other_0"), call("Linear_0", "Other_0")], net(("act", "ReLU", ())))


class Shuffled(nn.Module):
    """Calls its layers in another order than it defines them."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.value, self.key, self.query = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.query(x) @ self.key(x).T @ self.value(x))


def test_calls_in_another_order_than_the_definition_are_found(tmp_path: Path) -> None:
    model = Shuffled()
    calls, true_paths = record(model, lambda: model(torch.rand(2, 4)), tmp_path / "trace.json", with_shapes=True)
    made = match(calls, entries(model))
    assert wrong_paths(made, true_paths) == set()
    assert len(warning_texts(made)) == 1
