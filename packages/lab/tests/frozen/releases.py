"""Saved models and run folders of each release, which later releases must load.

`python packages/lab/tests/frozen/releases.py` writes those of the current version into
packages/lab/tests/frozen/releases/VERSION, once for each release.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import powernorm
import powernorm_lab as lab
from powernorm_lab.runs import REPORT_FILE, WORK_FILE

RELEASES: Final = Path(__file__).with_name("releases")
EXPECTED: Final = "expected/{}.safetensors"
"""File of a saved model's input `x` and output `y`."""
SMALL: Final = (
    *("norms=rbn,pn", "seeds=0", "data.vocabulary_size=300", "data.sequence_length=8"),
    *("data.batch_size=4", "model.num_features=8", "model.feedforward_features=8"),
    *("training.num_threads=1", "training.max_steps=4"),
)
NORMS: Final = ("bn", "rbn", "brn", "mabn", "pnv", "pn", "adanorm", "rms", "dyt", "gs")


def norms_in_a_row() -> nn.Module:
    """Return a model with a LayerNorm for each of `NORMS`, to be swapped."""
    pairs = [module for _ in NORMS for module in (nn.Linear(8, 8), nn.LayerNorm(8))]
    return nn.Sequential(*pairs)


def swapped_row() -> nn.Module:
    model = norms_in_a_row()
    for index, name in enumerate(NORMS):
        powernorm.swap(model, to=name, where=str(2 * index + 1))
    return model


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=40,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertModel(config)


def output(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        y: Any = model(x)
    return y if isinstance(y, Tensor) else y.last_hidden_state


def trained(model: nn.Module, x: Tensor) -> nn.Module:
    """Train a model, so that its running statistics differ from the initial ones."""
    for step in range(3):
        output_of = model(x + step if x.is_floating_point() else x)
        y = output_of if isinstance(output_of, Tensor) else output_of.last_hidden_state
        y.square().mean().backward()
    model.zero_grad()
    return model.eval()


def floats() -> Tensor:
    return torch.randn(3, 5, 8)


def tokens() -> Tensor:
    return torch.randint(0, 40, (3, 5))


def _swapped(build: Callable[[], nn.Module]) -> Callable[[Tensor], nn.Module]:
    def make(x: Tensor) -> nn.Module:
        model = build()
        powernorm.swap(model, to="rbn")
        return trained(model, x)

    return make


def _folded(build: Callable[[], nn.Module]) -> Callable[[Tensor], nn.Module]:
    def make(x: Tensor) -> nn.Module:
        model = _swapped(build)(x)
        powernorm.fold(model, x)
        return model

    return make


MODELS: Final[dict[str, tuple[Any, Any, Any]]] = {
    "all-norms": (norms_in_a_row, floats, lambda x: trained(swapped_row(), x)),
    "encoder-swapped": (encoder, floats, _swapped(encoder)),
    "encoder-folded": (encoder, floats, _folded(encoder)),
    "bert-swapped": (bert, tokens, _swapped(bert)),
    "bert-folded": (bert, tokens, _folded(bert)),
}
"""Original architecture, input, and function that makes the saved model, by name."""


def own_function(run: lab.Run, *, learning_rate: float = 0.1, steps: int = 6) -> dict[str, float]:
    """Train as in a user's function."""
    model = run.swap(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    run.track(model=model, optimizer=optimizer)
    batches = [torch.randn(16, 8) for _ in range(steps)]
    for step, x in run.steps(batches, checkpoint_every=3):
        loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.log(step, train_loss=loss)
    return {"loss": float(loss)}


def write(folder: Path) -> None:
    """Write all files that later releases must load."""
    torch.manual_seed(0)
    (folder / EXPECTED).parent.mkdir(parents=True)
    for name, (_, make_input, make) in MODELS.items():
        x = make_input()
        model = make(x)
        powernorm.save(model, folder / "models" / name)
        save_file({"x": x, "y": output(model, x)}, folder / EXPECTED.format(name))
    lab.compare(lab.override(lab.recipe("lm", "smoke"), list(SMALL)), folder / "runs" / "lm")
    lab.compare(
        own_function,
        folder / "runs" / "own",
        norms=["rbn", "pn"],
        seeds=1,
        goal={"loss": "min"},
    )
    for run in (folder / "runs").glob("*/*/tensorboard"):
        shutil.rmtree(run)
    # Pages are rebuilt, and the settings of workers contain paths of this machine.
    for file in (REPORT_FILE, WORK_FILE):
        for path in (folder / "runs").glob(f"*/{file}"):
            path.unlink()


if __name__ == "__main__":
    target = RELEASES / powernorm.__version__
    if target.exists():
        sys.exit(f"{target} exists: a release is written once")
    write(target)
