"""The sentences under the table: each said when it is due, with the right figures, and only then."""

import pytest

from torchprof.doubts import about_calls, about_cost, about_labels, about_modules, some
from torchprof.run import Layer, SampleKey, Spread

NET, A, B = (Layer(path, "Module") for path in [("Net",), ("Net", "a"), ("Net", "b")])


def forward(layer: int, *durations: int) -> dict[SampleKey, Spread]:
    return {SampleKey(layer, "forward", 0, "cpu", "cpu_ns"): Spread.of(list(enumerate(durations)))}


def test_a_few_names() -> None:
    assert some(["a", "b", "c"]) == "a, b, c"
    assert some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_nothing_to_doubt() -> None:
    assert list(about_modules([], [])) == []
    assert list(about_labels({}, [])) == []
    samples = {**forward(0, 100, 90, 80), **forward(1, 50), **forward(2, 40)}
    assert list(about_calls([NET, A, B], {0, 1, 2}, samples, {(-1, 0), (0, 1), (0, 2), (1, -2)})) == []
    assert list(about_cost(1000, 1_000.0, 10**9)) == []


def test_a_layer_that_was_never_called() -> None:
    (sentence,) = about_calls([NET, A, B], {0, 1, 2}, {**forward(0, 100), **forward(1, 50)}, set())
    assert sentence.startswith("Never called: Net.b. ")


def test_a_layer_that_is_called_from_beside_the_tree() -> None:
    samples = {**forward(0, 100), **forward(1, 50), **forward(2, 40)}
    (sentence,) = about_calls([NET, A, B], {0, 1, 2}, samples, {(0, 1), (1, 2), (2, -2), (-2, 1)})
    assert sentence.startswith("Called from outside the layer above them: Net.b by Net.a. ")


@pytest.mark.parametrize(("durations", "said"), [((300, 100, 140), True), ((200, 100, 100), False), ((900,), False)])
def test_a_slow_first_call_of_the_model(durations: tuple[int, ...], said: bool) -> None:
    sentences = list(about_calls([NET], {0}, forward(0, *durations), set()))
    assert bool(sentences) == said
    if said:
        assert "first call of Net took 0.300us, the later ones 0.120us on average" in sentences[0]


def test_calls_on_another_thread_and_what_could_not_be_labelled() -> None:
    once, often, bare = about_labels({"Net.a": 1, "Net.b": 3}, ["Net.c"])
    assert "1 call of Net.a" in once and "3 calls of Net.b" in often and "Net.c" in bare


def test_the_cost_of_the_labels() -> None:
    (sentence,) = about_cost(500, 2_000.0, 10_000_000)
    assert "about 1.000ms of 10.000ms (10%): 500 calls of 2.000us" in sentence


def test_modules_that_changed() -> None:
    added, removed = about_modules(["Net.new"], ["Net.old"])
    assert "Net.new" in added and "Net.old" in removed
