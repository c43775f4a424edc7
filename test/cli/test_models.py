"""SPEC of the command line: models of libraries, by the names that people know them by."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from build.libraries import usable_transformers
from torch import nn

from torchprof.cli.models import make_model, make_without_data
from torchprof.errors import TorchprofError

LIBRARY = """
from types import SimpleNamespace
from torch import nn

def create_model(name, pretrained, **kwargs):
    if name != "vit_tiny.augreg" or pretrained:
        raise RuntimeError(f"Unknown model ({name})")
    return nn.Linear(4, kwargs.get("num_classes", 2))

def get_model(name, weights, **kwargs):
    assert weights is None
    return create_model(name, False, **kwargs)

models = SimpleNamespace(get_model=get_model, Net=lambda: nn.ReLU())
"""


@pytest.fixture
def libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages with the calls of timm and torchvision that are used here."""
    for name in ("timm", "torchvision"):
        (tmp_path / f"{name}.py").write_text(LIBRARY, encoding="utf-8")
        monkeypatch.setitem(sys.modules, name, None)  # the test ends without the package
        del sys.modules[name]
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.parametrize("library", ["timm", "torchvision"])
@pytest.mark.usefixtures("libraries")
def test_models_of_timm_and_torchvision_have_their_names(library: str) -> None:
    model = make_model(f"{library}:vit_tiny.augreg", '{"num_classes": 7}')
    assert isinstance(model, nn.Linear) and model.out_features == 7
    assert isinstance(make_model(f"{library}:models.Net", "{}"), nn.ReLU)
    with pytest.raises(TorchprofError, match=rf"{library}:vit failed .* Unknown model \(vit\)"):
        make_model(f"{library}:vit", "{}")


def test_a_library_that_is_not_installed_is_named_with_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(TorchprofError, match="Install it: pip install timm"):
        make_model("timm:resnet50", "{}")


def test_a_configuration_of_transformers_makes_its_model(tmp_path: Path) -> None:
    transformers = usable_transformers()
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=50)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    for place in (tmp_path, tmp_path / "config.json"):
        model = make_model(f"transformers:{place}", '{"n_layer": 3}')
        assert type(model).__name__ == "GPT2LMHeadModel"
        assert len(model.transformer.h) == 3  # type: ignore[union-attr, arg-type]
    config.architectures = None
    config.save_pretrained(tmp_path)
    assert type(make_model(f"transformers:{tmp_path}", "{}")).__name__ == "GPT2Model"
    with pytest.raises(TorchprofError, match=r"no 'Nothing', and there is no file Nothing: write transformers:Llama"):
        make_model("transformers:Nothing", "{}")


def test_the_model_of_a_trace_has_data_only_if_it_cannot_be_made_without(tmp_path: Path) -> None:
    (tmp_path / "net_without_data.py").write_text(
        "import torch\nfrom torch import nn\n\n"
        "class Net(nn.Linear):\n    def __init__(self, read):\n        super().__init__(2, 2)\n"
        "        self.rate = torch.linspace(0, 1, 3)[1].item() if read else 0\n",
        encoding="utf-8",
    )
    spec = f"{tmp_path / 'net_without_data.py'}:Net"
    device = {read: make_without_data(spec, f'{{"read": {read}}}').weight.device for read in ("true", "false")}
    assert device == {"true": torch.device("cpu"), "false": torch.device("meta")}
