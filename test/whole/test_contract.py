"""What programs written for torchprof 1.4.0 rely on, and what people's loops around it do."""

from __future__ import annotations

import inspect
import json
import pickle
from collections import defaultdict

import pytest
import torch
from build.calls import calls_of
from build.hand_made import names
from build.models import Checkpointed, Layers, profiled, trained
from build.processes import run_fresh
from torch import nn
from torch.autograd.profiler_util import EventList
from torch.utils.checkpoint import set_checkpoint_early_stop

import torchprof
from torchprof import Profile, TorchprofError
from torchprof.record.modules import Trace, walk_modules

UNFINISHED = "<unfinished torchprof.profile>"


class AlexNet(nn.Module):
    """AlexNet's shape and names, a hundred times smaller."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU()
        )
        self.avgpool = nn.AdaptiveAvgPool2d((2, 2))
        self.classifier = nn.Sequential(nn.Dropout(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


# Depth first, written down by hand.
ALEXNET_NAMES = (
    "AlexNet AlexNet.features AlexNet.features.0 AlexNet.features.1 AlexNet.features.2 AlexNet.features.3 "
    "AlexNet.features.4 AlexNet.avgpool AlexNet.classifier AlexNet.classifier.0 AlexNet.classifier.1 "
    "AlexNet.classifier.2 AlexNet.classifier.3"
)
ALEXNET_PATHS = [tuple(name.split(".")) for name in ALEXNET_NAMES.split()]
CONTAINERS = {("AlexNet",), ("AlexNet", "features"), ("AlexNet", "classifier")}
LEAVES = [path for path in ALEXNET_PATHS if path not in CONTAINERS]


def images(batch: int = 1) -> torch.Tensor:
    return torch.rand(batch, 3, 8, 8)


# Names and signatures


def test_the_public_names_of_the_old_torchprof_are_there() -> None:
    assert torchprof.Profile is torchprof.profile.Profile
    assert isinstance(torchprof.__version__, str)
    assert torchprof.profile.Trace is Trace
    assert torchprof.profile.walk_modules is walk_modules
    assert Trace._fields == ("path", "leaf", "module")
    assert issubclass(TorchprofError, RuntimeError)


def test_the_positional_order_is_the_old_one_and_what_is_new_is_keyword_only() -> None:
    parameters = list(inspect.signature(Profile).parameters.values())
    old = parameters[:5]
    assert [(p.name, p.default) for p in old] == [
        ("model", inspect.Parameter.empty),
        ("enabled", True),
        ("use_cuda", None),  # as False, but for a model on a CUDA device: see test_device.py
        ("profile_memory", False),
        ("paths", None),
    ]
    assert all(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in old)
    *new, unknown = parameters[5:]
    assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in new)
    assert unknown.kind is inspect.Parameter.VAR_KEYWORD  # for an error that names the option that is meant
    assert {"use_device", "warmup", "with_stack"} <= {p.name for p in parameters[5:]}


def test_positional_arguments_arrive_where_they_did() -> None:
    model = AlexNet()
    paths = [("AlexNet", "avgpool")]
    with Profile(model, True, False, True, paths) as prof:
        model(images())
    assert (prof.enabled, prof.use_cuda, prof.profile_memory) == (True, False, True)
    assert prof.paths is paths
    headings = [cell.strip() for cell in prof.display(False).splitlines()[0].split("|")]
    assert headings == ["Module", "Self CPU total", "CPU total", "Self CPU Mem", "CPU Mem", "Number of Calls"]


def test_display_takes_show_events_as_its_first_argument() -> None:
    prof = profiled(nn.Linear(2, 2), torch.rand(1, 2))
    assert "aten::linear" in prof.display(True)
    assert "aten::linear" not in prof.display(False)
    assert prof.display() == prof.display(show_events=False)


def test_print_shows_the_overview() -> None:
    prof = profiled(nn.Linear(2, 2), torch.rand(1, 2))
    assert str(prof) == f"{prof}" and prof.run.report("headline") in str(prof).splitlines()[:3]
    assert all(line in str(prof) for line in prof.display().splitlines()[2:])


# walk_modules


def test_walk_modules_goes_depth_first_and_names_the_root_by_its_class() -> None:
    model = AlexNet()
    traces = list(walk_modules(model))
    assert [trace.path for trace in traces] == ALEXNET_PATHS
    assert {trace.path for trace in traces if not trace.leaf} == CONTAINERS
    assert traces[0].module is model
    assert traces[3] == Trace(("AlexNet", "features", "1"), True, model.features[1])


def test_walk_modules_takes_a_name_and_a_path_to_start_from() -> None:
    traces = list(walk_modules(nn.Sequential(nn.ReLU()), "net", ("outer",)))
    assert [trace.path for trace in traces] == [("outer", "net"), ("outer", "net", "0")]
    assert [trace.path for trace in walk_modules(nn.ReLU(), name="act")] == [("act",)]


def test_walk_modules_is_lazy_as_before() -> None:
    assert next(iter(walk_modules(nn.ReLU()))).path == ("ReLU",)
    assert inspect.isgenerator(walk_modules(nn.ReLU()))


# Before, during and after


def test_attributes_before_inside_and_after_the_block() -> None:
    model = AlexNet()
    prof = Profile(model)
    assert (prof.enabled, prof.use_cuda, prof.profile_memory, prof.paths) == (True, False, False, None)
    assert (prof.entered, prof.exited, prof.traces) == (False, False, ())
    assert prof.trace_profile_events == {}
    assert prof.raw() is None
    assert str(prof) == prof.display() == prof.display(show_events=True) == UNFINISHED

    with prof as entered:
        assert entered is prof
        assert (prof.entered, prof.exited) == (True, False)
        assert [trace.path for trace in prof.traces] == ALEXNET_PATHS
        model(images())
        assert prof.raw() is None
        assert str(prof) == prof.display() == UNFINISHED

    assert (prof.entered, prof.exited) == (True, True)
    raw = prof.raw()
    assert type(raw) is tuple and len(raw) == 2
    traces, event_lists = raw
    assert type(traces) is tuple and traces == prof.traces
    assert all(type(trace) is Trace for trace in traces)
    assert [trace.path for trace in traces] == ALEXNET_PATHS
    assert [trace.leaf for trace in traces] == [path in LEAVES for path in ALEXNET_PATHS]
    assert traces[0].module is model
    assert event_lists is prof.trace_profile_events
    assert str(prof) != UNFINISHED


def test_reading_before_the_end_does_not_change_the_later_result() -> None:
    """A defaultdict makes an entry when it is read: that must not pass for the answer."""
    model = nn.Sequential(nn.ReLU())
    with Profile(model) as prof:
        model(torch.rand(2))
        assert prof.trace_profile_events["Sequential", "0"] == []
    assert len(prof.trace_profile_events["Sequential", "0"]) == 1
    assert len(prof.raw()[1]["Sequential", "0"]) == 1


def test_a_second_block_on_one_profile_raises_as_before() -> None:
    model = nn.ReLU()
    prof = profiled(model, torch.rand(2))
    before = str(prof)
    with pytest.raises(RuntimeError, match=r"^torchprof profiler is not reentrant$"), prof:
        pass
    assert str(prof) == before
    with Profile(model) as nested:
        with pytest.raises(RuntimeError, match=r"^torchprof profiler is not reentrant$"), nested:
            pass
        model(torch.rand(2))
    assert calls_of(nested) == {"ReLU": 1}


def test_disabled_records_nothing_and_may_be_entered_again() -> None:
    model = AlexNet()
    forwards = {cls: cls.forward for cls in (AlexNet, nn.Sequential, nn.Conv2d, nn.Linear)}
    prof = Profile(model, enabled=False)
    for _ in range(2):
        with prof as entered:
            assert entered is prof
            assert {cls: cls.forward for cls in forwards} == forwards
            assert not torch.autograd.profiler._is_profiler_enabled
            model(images())
    assert (prof.entered, prof.exited, prof.traces) == (False, False, ())
    assert prof.raw() is None
    assert prof.trace_profile_events == {}
    assert str(prof) == prof.display(show_events=True) == UNFINISHED


def test_disabled_profiles_may_be_nested_in_an_enabled_one() -> None:
    model = nn.ReLU()
    with Profile(model) as outer, Profile(model, enabled=False):
        model(torch.rand(2))
    assert calls_of(outer) == {"ReLU": 1}


def test_calling_the_profile_calls_the_model() -> None:
    class Scale(nn.Module):
        def forward(self, x: torch.Tensor, *, by: float) -> torch.Tensor:
            return x * by

    model = Scale()
    with Profile(model) as prof:
        assert torch.equal(prof(torch.ones(2), by=3.0), torch.full((2,), 3.0))
    assert calls_of(prof) == {"Scale": 1}
    assert torch.equal(Profile(model, enabled=False)(torch.ones(2), by=2.0), torch.full((2,), 2.0))


def test_a_profile_of_several_models_does_not_guess_which_one_to_call() -> None:
    with pytest.raises(TorchprofError, match="several models"):
        Profile([nn.ReLU(), nn.ReLU()])(torch.rand(2))


def test_an_empty_block_prints_a_tree_without_calls() -> None:
    model = AlexNet()
    with Profile(model) as prof:
        pass
    traces, event_lists = prof.raw()
    assert [len(event_lists[trace.path]) for trace in traces] == [0] * len(traces)
    assert set(calls_of(prof).values()) == {0}
    assert "features" in str(prof)


# event_lists_dict


def test_the_mapping_is_a_defaultdict_of_lists_and_not_seeded() -> None:
    prof = profiled(AlexNet(), images())
    _, event_lists = prof.raw()
    assert type(event_lists) is defaultdict and event_lists.default_factory is list
    assert list(event_lists) == LEAVES
    assert ("AlexNet",) not in event_lists
    assert event_lists["AlexNet",] == []
    assert event_lists["no such path"] == []


def test_without_paths_the_mapping_holds_leaves_only_and_len_works_on_every_path() -> None:
    model = AlexNet()
    with Profile(model) as prof:
        model(images())
        model(images(2))
    traces, event_lists = prof.raw()
    assert [len(event_lists[traces[i].path]) for i in range(len(traces))] == [
        2 if path in LEAVES else 0 for path in ALEXNET_PATHS
    ]


def test_with_paths_the_mapping_holds_exactly_the_selected() -> None:
    paths = [("AlexNet", "features", "3"), ("AlexNet", "classifier"), ("AlexNet", "classifier", "1")]
    _, event_lists = profiled(AlexNet(), images(), paths=paths).raw()
    assert set(event_lists) == set(paths)
    assert {path: len(lists) for path, lists in event_lists.items()} == dict.fromkeys(paths, 1)


def test_keys_come_in_the_order_of_first_completed_calls() -> None:
    class Backwards(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(self.second(self.third(self.third(x))))

    model = Backwards(first=nn.ReLU(), second=nn.Sequential(nn.Tanh()), third=nn.Sigmoid())
    _, leaves = profiled(model, torch.rand(2)).raw()
    assert list(leaves) == [("Backwards", "third"), ("Backwards", "second", "0"), ("Backwards", "first")]
    # A container's call is complete after those of what is in it.
    _, chosen = profiled(model, torch.rand(2), paths=["Backwards", "second", "second.0", "third"]).raw()
    assert list(chosen) == [
        ("Backwards", "third"),
        ("Backwards", "second", "0"),
        ("Backwards", "second"),
        ("Backwards",),
    ]


def test_each_call_has_a_list_of_torchs_own_with_the_events_of_that_call() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    with Profile(model) as prof:
        model(torch.rand(2, 3))
        torch.cos(torch.rand(3))
        model(torch.rand(2, 3))
    _, event_lists = prof.raw()
    linear, relu = event_lists["Sequential", "0"], event_lists["Sequential", "1"]
    assert [type(events) for events in linear + relu] == [EventList] * 4
    for events in linear:
        assert [event.name for event in events if event.cpu_parent is None] == ["aten::linear"]
        assert "aten::addmm" in {event.name for event in events}
        assert not {"aten::relu", "aten::cos", "aten::rand"} & {event.name for event in events}
    for events in relu:
        assert [event.name for event in events if event.cpu_parent is None] == ["aten::relu"]
    starts = [events[0].time_range.start for events in (linear[0], relu[0], linear[1], relu[1])]
    assert starts == sorted(starts)


def test_the_lists_of_a_container_hold_what_ran_in_its_children_and_no_label_of_ours() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
    _, event_lists = profiled(model, torch.rand(2, 3), paths=["Sequential", "0"]).raw()
    (whole,) = event_lists["Sequential",]
    assert [event.name for event in whole if event.cpu_parent is None] == ["aten::linear", "aten::relu"]
    (part,) = event_lists["Sequential", "0"]
    linear = next(event for event in whole if event.name == "aten::linear")
    assert part.self_cpu_time_total == pytest.approx(linear.cpu_time_total)
    for events in (whole, part):
        assert not [event.name for event in events if "torchprof" in event.name]


def test_torchs_own_sums_and_walks_work_on_the_lists() -> None:
    _, event_lists = profiled(nn.Sequential(nn.Linear(3, 4)), torch.rand(2, 3)).raw()
    events = event_lists["Sequential", "0"][0]
    outer = [event for event in events if event.cpu_parent is None]
    assert events.self_cpu_time_total == pytest.approx(sum(event.cpu_time_total for event in outer))
    assert sum(event.self_cpu_time_total for event in events) == pytest.approx(events.self_cpu_time_total)
    assert sum(event.cpu_time_total for event in events) > events.self_cpu_time_total  # nested ops twice, as in torch

    def below(event: torch.autograd.profiler_util.FunctionEvent) -> list[str]:
        return [event.name] + [name for child in event.cpu_children for name in below(child)]

    assert sorted(below(outer[0])) == sorted(event.name for event in events)


def test_torchs_own_tables_and_trace_work_on_the_lists(tmp_path) -> None:
    prof = profiled(nn.Sequential(nn.Linear(3, 4)), torch.rand(2, 3))
    traces, event_lists = prof.raw()
    events = event_lists[traces[1].path][0]
    printed = str(events)
    assert "Self CPU time total" in printed and "aten::linear" in printed and "torchprof" not in printed
    averages = {row.key: row.count for row in events.key_averages()}
    assert averages["aten::linear"] == 1
    table = events.table(sort_by="self_cpu_time_total")
    assert "aten::addmm" in table
    for _ in range(2):  # as often as one likes
        events.export_chrome_trace(str(tmp_path / "trace.json"))
    written = json.loads((tmp_path / "trace.json").read_text())
    entries = written if isinstance(written, list) else written["traceEvents"]
    assert "aten::linear" in {entry["name"] for entry in entries}


def test_memory_in_the_lists_is_that_of_the_call() -> None:
    model = nn.Sequential(nn.Linear(16, 64, bias=False), nn.ReLU())
    with torch.no_grad():
        _, event_lists = profiled(model, torch.rand(8, 16), profile_memory=True).raw()
    size = 8 * 64 * 4
    for path in (("Sequential", "0"), ("Sequential", "1")):
        outer = [event for event in event_lists[path][0] if event.cpu_parent is None]
        assert [event.cpu_memory_usage for event in outer] == [size], path


def test_the_mapping_can_be_pickled() -> None:
    prof = profiled(AlexNet(), images())
    _, event_lists = prof.raw()
    again = pickle.loads(pickle.dumps(event_lists))
    assert type(again) is defaultdict and again["nothing"] == []
    del again["nothing"]
    assert list(again) == list(event_lists)
    for path in event_lists:
        assert [[event.name for event in events] for events in again[path]] == [
            [event.name for event in events] for events in event_lists[path]
        ]


def test_raw_gives_the_same_objects_each_time() -> None:
    prof = profiled(AlexNet(), images())
    first = prof.raw()
    lists = {path: list(map(id, events)) for path, events in first[1].items()}
    second = prof.raw()
    assert second[1] is first[1] and second[0] is first[0]
    assert {path: list(map(id, events)) for path, events in second[1].items()} == lists


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("early_stop", [True, False])
def test_recompute_calls_have_lists_and_calls_that_did_not_finish_have_none(use_reentrant, early_stop) -> None:
    """Forward hooks fire after a forward that finished: they say how many lists there must be."""
    model = Checkpointed(use_reentrant)
    finished: dict[tuple[str, ...], int] = {}
    for path, _, module in walk_modules(model):
        if path[1:2] in ((), ("block",)):
            module.register_forward_hook(
                lambda *_, path=path: finished.__setitem__(path, finished.get(path, 0) + 1)  # returns None
            )
    paths = ["Checkpointed", "block", "block.0", "block.1"]
    with set_checkpoint_early_stop(early_stop), Profile(model, paths=paths) as prof:
        model(torch.rand(2, 4, requires_grad=True)).sum().backward()
    _, event_lists = prof.raw()
    assert finished["Checkpointed", "block", "0"] == 2, "the segment was not computed again"
    assert {path: len(lists) for path, lists in event_lists.items()} == finished
    # The plain column counts forward calls, recompute not among them.
    assert {name: calls for name, calls in calls_of(prof).items() if calls} == {".".join(path): 1 for path in finished}


def test_a_call_that_raised_has_no_list_but_those_inside_it_that_finished_do() -> None:
    class Fussy(Layers):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.picky(self.fine(x))

    model = Fussy(fine=nn.Linear(2, 2), picky=nn.Linear(3, 3))
    with Profile(model, paths=["Fussy", "fine", "picky"]) as prof:
        for _ in range(2):
            with pytest.raises(RuntimeError):
                model(torch.rand(1, 2))
        model.picky(torch.rand(1, 3))
    _, event_lists = prof.raw()
    assert {path[-1]: len(lists) for path, lists in event_lists.items()} == {"fine": 2, "picky": 1}
    assert calls_of(prof) == {"Fussy": 2, "Fussy.fine": 2, "Fussy.picky": 3}


def test_a_recursive_module_has_one_list_for_each_call() -> None:
    class Recursive(nn.Module):
        def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
            return self(torch.cos(x), times - 1) if times else x

    prof = profiled(Recursive(), torch.rand(2), 3)
    lists = prof.raw()[1]["Recursive",]
    # In the order in which they ended: the innermost did nothing, the outermost holds all three cosines.
    assert [[event.name for event in events] for events in lists] == [["aten::cos"] * times for times in range(4)]
    assert calls_of(prof) == {"Recursive": 4}


def test_parent_and_child_may_both_be_selected() -> None:
    prof = profiled(AlexNet(), images(), paths=["classifier", "classifier.*"])
    _, event_lists = prof.raw()
    names = lambda path: [e.name for events in event_lists[path] for e in events if e.cpu_parent is None]  # noqa: E731
    children = [name for step in "0123" for name in names(("AlexNet", "classifier", step))]
    assert "aten::linear" in children
    assert names(("AlexNet", "classifier")) == children


# paths


@pytest.mark.parametrize(
    "path",
    [("AlexNet", "features", "3"), ["AlexNet", "features", "3"], ("features", "3"), "AlexNet.features.3", "features.3"],
)
def test_a_path_in_any_spelling_names_the_same_layer(path) -> None:
    prof = profiled(AlexNet(), images(), paths=[path])
    assert prof.run.meta.paths == (("AlexNet", "features", "3"),)
    assert list(prof.raw()[1]) == [("AlexNet", "features", "3")]
    called = {name for name, count in calls_of(prof).items() if count}
    assert called == {"AlexNet.features.3"}


@pytest.mark.parametrize(
    ("path", "chosen"),
    [
        ("features.*", ["features.0", "features.1", "features.2", "features.3", "features.4"]),
        (("AlexNet", "*", "3"), ["features.3", "classifier.3"]),
        ("*.*.3", ["features.3", "classifier.3"]),
        (("AlexNet", "*"), ["features", "avgpool", "classifier"]),
    ],
)
def test_a_star_matches_one_step(path, chosen) -> None:
    prof = profiled(AlexNet(), images(), paths=[path])
    assert [".".join(path[1:]) for path in prof.run.meta.paths] == chosen


def test_paths_may_be_any_iterable_and_may_overlap() -> None:
    chosen = (("AlexNet", "avgpool"), ("AlexNet", "features", "0"))
    for paths in ({"avgpool", "features.0"}, iter(["features.0", "avgpool", "*.avgpool"]), chosen):
        prof = profiled(AlexNet(), images(), paths=paths)
        assert set(prof.run.meta.paths) == set(chosen)
        assert set(prof.raw()[1]) == set(chosen)


def test_rows_that_were_not_selected_stay_in_the_tree_and_are_blank() -> None:
    prof = profiled(AlexNet(), images(), paths=[("AlexNet", "features", "3"), ("AlexNet", "classifier")])
    lines = prof.display().split("\n\n")[0].splitlines()
    rows = [(line.split(" | ")[0].rstrip(), [cell.strip() for cell in line.split("|")[1:]]) for line in lines[2:]]
    assert [len(rows), rows[-2][0], rows[-1][0]] == [len(ALEXNET_PATHS) + 2, "(not selected)", "(outside)"]
    filled = [ALEXNET_PATHS[at] for at, (_, cells) in enumerate(rows[:-2]) if any("│" not in c and c for c in cells)]
    assert filled == [("AlexNet", "features", "3"), ("AlexNet", "classifier")]


def test_the_error_about_a_path_stays_short_for_a_large_model() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.ReLU()) for _ in range(500)])
    with pytest.raises(TorchprofError) as caught, Profile(model, paths=["transformer"]):
        pass
    assert "'transformer'" in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_paths_of_several_models() -> None:
    models = [AlexNet(), AlexNet(), nn.Linear(2, 2)]
    with Profile(models, paths=["AlexNet#2.features.0", ("Linear",)]) as prof:
        models[0](images())
        models[1](images())
        models[2](torch.rand(1, 2))
    assert list(prof.raw()[1]) == [("AlexNet#2", "features", "0"), ("Linear",)]
    assert [layer.name for layer in prof.run.roots] == ["AlexNet", "AlexNet#2", "Linear"]


# Wrappers


def test_a_model_wrapped_in_ddp_is_shown_as_itself_and_found_by_both_paths(world_of_one) -> None:
    inner = AlexNet()
    model = nn.parallel.DistributedDataParallel(inner)
    real = ("DistributedDataParallel", "module", "features", "3")
    for path in (real, ("AlexNet", "features", "3"), "features.3"):
        prof = trained(model, images(), paths=[path])
        assert [layer.name for layer in prof.run.roots] == ["AlexNet"]
        assert prof.run.meta.paths == (("AlexNet", "features", "3"),)
        assert [trace.path for trace in prof.traces][:2] == [("DistributedDataParallel",), real[:2]]
        assert {path: len(lists) for path, lists in prof.raw()[1].items()} == {real: 1}

    prof = trained(model, images())
    assert calls_of(prof) == {".".join(path): 1 for path in ALEXNET_PATHS}
    assert "├── features" in names(prof.display())
    assert prof.run.tree("backward").total.cpu_ns > 0


def test_wrapping_in_ddp_inside_the_block_works(world_of_one) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    x = torch.rand(1, 2)
    right = model(x)
    with Profile(model) as prof:
        wrapped = nn.parallel.DistributedDataParallel(model)
        assert torch.equal(wrapped(x), right)
    assert calls_of(prof) == {"Sequential": 1, "Sequential.0": 1}
    assert torch.equal(wrapped(x), right)


def test_a_checkpoint_wrapper_is_shown_as_the_module_it_wraps() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2)), nn.ReLU())
    real = ("Sequential", "0", "_checkpoint_wrapped_module")
    for path in (real, ("Sequential", "0")):
        prof = trained(model, torch.rand(1, 2), paths=[path])
        assert prof.run.meta.paths == (("Sequential", "0"),)
        assert calls_of(prof)["Sequential.0"] == 1
    prof = trained(model, torch.rand(1, 2))
    assert list(calls_of(prof).items()) == [("Sequential", 1), ("Sequential.0", 1), ("Sequential.1", 1)]
    assert [trace.path for trace in prof.traces] == [("Sequential",), ("Sequential", "0"), real, ("Sequential", "1")]


# The loops that people write


def test_key_averages_take_torchs_arguments_and_leave_our_labels_out() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    with Profile(model, record_shapes=True) as prof:
        for _ in range(2):
            model(torch.rand(2, 3))
    plain = {row.key: row.count for row in prof.key_averages()}
    assert plain["aten::linear"] == 4
    assert not [name for name in plain if "torchprof" in name]
    by_shape = [row for row in prof.key_averages(group_by_input_shapes=True) if row.key == "aten::linear"]
    assert sorted((row.count, row.input_shapes[1]) for row in by_shape) == [(2, [4, 3]), (2, [5, 4])]
    again = [row for row in prof.key_averages(True) if row.key == "aten::linear"]
    assert len(again) == 2
    with pytest.raises(TypeError):
        prof.key_averages(no_such_argument=True)


def test_key_averages_of_a_disabled_profile_are_empty_and_before_the_end_an_error() -> None:
    assert len(Profile(nn.ReLU(), enabled=False).key_averages()) == 0
    assert isinstance(Profile(nn.ReLU(), enabled=False).key_averages().table(), str)
    with pytest.raises(TorchprofError, match="not ended"):
        Profile(nn.ReLU()).key_averages()


def test_direct_calls_of_forward_are_recorded_as_in_1_4() -> None:
    model = AlexNet()
    with Profile(model) as prof:
        model.forward(images())
        model.avgpool.forward(images())
    calls = calls_of(prof)
    assert calls["AlexNet"] == 1
    assert calls["AlexNet.avgpool"] == 2
    assert len(prof.raw()[1]["AlexNet", "avgpool"]) == 2


def test_the_program_in_the_readme_of_1_4_runs() -> None:
    model = AlexNet()
    paths = [("AlexNet", "features", "3"), ("AlexNet", "classifier")]
    prof = profiled(model, images(), use_cuda=False, profile_memory=True, paths=paths)
    trace, event_lists_dict = prof.raw()
    assert str(trace[2]) == (
        "Trace(path=('AlexNet', 'features', '0'), leaf=True, "
        "module=Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1), padding=(1, 1)))"
    )
    assert event_lists_dict[trace[2].path] == []
    assert "aten::conv2d" in str(event_lists_dict[trace[5].path][0])
    total = 0.0
    for i in range(len(trace)):
        for call in event_lists_dict[trace[i].path]:
            total += call.self_cpu_time_total
    assert total > 0


def test_a_process_that_never_leaves_the_block_does_not_crash_at_its_end() -> None:
    code = """
import torch, torchprof
model = torch.nn.Linear(2, 2)
torchprof.Profile(model).__enter__()
model(torch.rand(1, 2))
print("done")
"""
    assert run_fresh(code) == "done"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_frozen_script_module_has_no_mode() -> None:
    frozen = torch.jit.freeze(torch.jit.script(nn.Sequential(nn.Linear(2, 2)).eval()))
    prof = profiled(frozen, torch.rand(1, 2))
    assert prof.run.tree().calls == 1
    assert not prof.run.layers[0].training
