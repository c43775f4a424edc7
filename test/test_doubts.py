"""The sentences under the table: each said when it is due, with the right figures, and only then."""

import pytest

from torchprof.attribute import NOT_SELECTED, OUTSIDE
from torchprof.doubts import about_calls, about_cost, about_labels, about_modules, about_start, some
from torchprof.run import Layer, SampleKey, Spread

NET, A, B = (Layer(path, "Module") for path in [("Net",), ("Net", "a"), ("Net", "b")])


def forward(layer: int, *durations: int) -> dict[SampleKey, Spread]:
    return {SampleKey(layer, "forward", 0, "cpu", "cpu_ns"): Spread.of(list(enumerate(durations)))}


def test_a_few_names() -> None:
    assert some(["a", "b", "c"]) == "a, b, c"
    assert some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


LAYERS = [NET, A, B]
ALL = {0, 1, 2}


def test_nothing_to_doubt() -> None:
    assert list(about_modules([], [])) == []
    assert list(about_labels(LAYERS, {}, [])) == []
    samples = {**forward(0, 100, 90, 80), **forward(1, 50), **forward(2, 40)}
    assert list(about_calls(LAYERS, ALL, {0, 1, 2}, set(), {(OUTSIDE, 0), (0, 1), (0, 2), (1, 1)})) == []
    assert list(about_start(LAYERS, samples)) == []
    assert list(about_cost(1000, 1_000.0, 10**9)) == []


def test_a_layer_that_was_never_called() -> None:
    (sentence,) = about_calls(LAYERS, ALL, {0, 1}, {2}, set())
    assert sentence.startswith("Never called: Net.b. ")


def test_a_layer_whose_children_are_called_is_not_said_to_be_idle() -> None:
    (sentence,) = about_calls(LAYERS, ALL, {1}, {0, 2}, {(NOT_SELECTED, 1)})
    assert sentence.startswith("Never called: Net.b. ")


def test_a_module_that_is_called_at_another_of_its_paths_is_not_idle() -> None:
    twice = [NET, Layer(("Net", "a"), "ReLU", shared_with=(("Net", "b"),)), Layer(("Net", "b"), "ReLU")]
    assert list(about_calls(twice, ALL, {0, 1}, {2}, set())) == []


@pytest.mark.parametrize(
    ("caller", "said"), [((1, 2), "Net.b by Net.a"), ((OUTSIDE, 2), "Net.b by code outside the model")]
)
def test_a_layer_that_is_called_by_other_than_the_layer_above(caller: tuple[int, int], said: str) -> None:
    (sentence,) = about_calls(LAYERS, ALL, {0, 1, 2}, set(), {(0, 1), caller, (NOT_SELECTED, 1)})
    assert sentence.startswith(f"Called by other than the layer above them: {said}. ")


def test_a_container_without_a_forward_is_no_layer_to_be_called_by() -> None:
    layers = [NET, Layer(("Net", "blocks"), "ModuleList"), Layer(("Net", "blocks", "0"), "Linear")]
    assert list(about_calls(layers, {0, 2}, {0, 2}, set(), {(OUTSIDE, 0), (0, 2)})) == []


@pytest.mark.parametrize(("durations", "said"), [((300, 100, 140), True), ((200, 100, 100), False), ((900,), False)])
def test_a_slow_first_call_of_the_model(durations: tuple[int, ...], said: bool) -> None:
    sentences = list(about_start([NET], forward(0, *durations)))
    assert bool(sentences) == said
    if said:
        assert "first call of Net took 0.300us, the later ones 0.120us on average" in sentences[0]


def test_calls_on_another_thread_and_what_could_not_be_labelled() -> None:
    once, often, bare = about_labels(LAYERS, {1: 1, 2: 3}, [2])
    assert "1 call of Net.a" in once and "3 calls of Net.b" in often and "labelled" in bare and "Net.b" in bare


def test_the_cost_of_the_labels() -> None:
    (sentence,) = about_cost(500, 2_000.0, 10_000_000)
    assert "about 1.000ms of 10.000ms (10%): 500 calls of 2.000us" in sentence


def test_modules_that_changed() -> None:
    added, removed = about_modules(["Net.new"], ["Net.old"])
    assert "Net.new" in added and "Net.old" in removed
