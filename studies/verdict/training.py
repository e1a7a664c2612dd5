"""Training of settings, and data for measuring their early checkpoints.

Language models are runs of the built-in task `lm`; `examples/compare_tag.py` trains taggers.
"""

import json
import lzma
import sys
from collections.abc import Callable, Sequence
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import powernorm
import powernorm_lab as lab
from settings import VOCABULARY, Setting

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import compare_tag

TREEBANKS = {
    "petrogold": ("dep_pt_petrogold.conllu.xz",),
    "turkish": ("dep_tr_twt_web.conllu.xz", "dep_tr_twt_wiki.conllu.xz"),
}
"""Files of powernorm-data."""
NORM_OPTIONS = {"rbn": {"mean_penalty": 0.1, "var_penalty": 1.0}}


class Examples(NamedTuple):
    """Batch of either task."""

    inputs: dict[str, Tensor]
    targets: Tensor
    """Targets, with -100 at ignored positions."""


class Data(NamedTuple):
    """Data for measuring the early checkpoints of a setting."""

    training: list[Examples]
    valid: list[Examples]
    tokens_per_batch: float


def train(
    setting: Setting,
    out: Path,
    norms: Sequence[str],
    seeds: Sequence[int],
    *,
    validations: int = 4,
    early: bool = True,
    on_event: Callable[[Any], None] | None = None,
) -> lab.Comparison:
    """Train the missing runs of a setting on one core.

    Args:
        setting: the setting.
        out: folder of its runs, to which later calls may add norms and seeds.
        norms: short names.
        seeds: seeds of the runs.
        validations: number of evenly spaced validations.
        early: whether the weights at `early_step` are kept as `checkpoints/early.ckpt`.
        on_event: function that receives events.
    """
    how: dict[str, Any] = {"resume": True, "quiet": True, "on_event": on_event}
    if setting.task == "lm":
        config = _lm_settings(setting, norms, seeds, validations, early)
        return lab.compare(config, out, **how)
    return lab.compare(
        train_tagger,
        out,
        norms=norms,
        seeds=seeds,
        goal={"test_loss": "min"},
        settings={
            "data": str(_treebank(setting.corpus, out.parent)),
            "steps": setting.max_steps,
            "learning_rate": setting.learning_rate,
            "batch_size": setting.batch_size,
            "length": setting.length,
            "width": setting.num_features,
            "layers": setting.num_layers,
            "placement": setting.placement,
            "evaluations": validations,
            "early": setting.early_step if early else 0,
        },
        norm_options={name: NORM_OPTIONS[name] for name in norms if name in NORM_OPTIONS},
        device="cpu",
        num_threads=1,
        **how,
    )


def train_tagger(
    run: lab.Run,
    *,
    data: str = "",
    steps: int = 300,
    learning_rate: float = 4e-3,
    batch_size: int = 32,
    length: int = 48,
    width: int = 64,
    layers: int = 2,
    placement: compare_tag.Placement = "pre",
    evaluations: int = 4,
    early: int = 0,
) -> dict[str, float]:
    """Train as in the example, and keep the weights after `early` steps."""

    def keep() -> None:
        if run.step == early:
            run.checkpoint(keep="early")

    if early:
        run.evaluate_every(early, keep)
    return compare_tag.train(
        run,
        data=data,
        steps=steps,
        learning_rate=learning_rate,
        batch_size=batch_size,
        vocabulary=VOCABULARY,
        length=length,
        width=width,
        layers=layers,
        placement=placement,
        evaluations=evaluations,
    )


def early_model(setting: Setting, run: Path) -> nn.Module | None:
    """Return the model of a run at `early_step`; None if the run was lost before."""
    checkpoint = run / "checkpoints" / "early.ckpt"
    if not checkpoint.exists():
        return None
    if setting.task == "lm":
        return lab.load_trained(checkpoint).model
    config = json.loads((run / "config.json").read_text(encoding="utf-8"))
    _, model = _rows_and_tagger(setting, run.parents[1])
    powernorm.swap(model, config["norm"], **config["norm_options"])
    model.load_state_dict(lab.saved_states(checkpoint)["model"])
    return model.eval()


def data_of(setting: Setting, run: Path, num_batches: int) -> Data:
    """Return the first training batches and the valid split of a setting.

    Args:
        setting: setting of the run.
        run: folder of a run with seed 0.
        num_batches: number of training batches.
    """
    if setting.task == "lm":
        data = lab.run_data(json.loads((run / "config.json").read_text(encoding="utf-8")))
        training = [data.batches.batch(index) for index in range(num_batches)]
        found = [
            [Examples(batch.inputs(), batch.targets) for batch in part]
            for part in (training, data.evaluation("valid"))
        ]
        return Data(*found, data.batches.tokens_per_batch)
    rows, _ = _rows_and_tagger(setting, run.parents[1])
    torch.manual_seed(0)
    order = DataLoader(
        rows["train"], setting.batch_size, shuffle=True, collate_fn=_examples, drop_last=True
    )
    valid = DataLoader(rows["valid"], 128, collate_fn=_examples)
    tokens = sum(map(len, rows["train"])) / len(rows["train"]) * setting.batch_size
    return Data(list(islice(order, num_batches)), list(valid), tokens)


def _examples(rows: list[Tensor]) -> Examples:
    words, padding, tags = compare_tag.batch_of(rows)
    return Examples({"words": words, "padding_mask": padding}, tags)


def _rows_and_tagger(setting: Setting, out: Path) -> tuple[Any, nn.Module]:
    parts = compare_tag.read(str(_treebank(setting.corpus, out)))
    rows, *sizes = compare_tag.encode(parts, VOCABULARY, setting.length)
    width, depth = setting.num_features, setting.num_layers
    is_pre = setting.placement == "pre"
    return rows, compare_tag.Tagger(*sizes, setting.length, width, depth, is_pre)


def _treebank(corpus: str, out: Path) -> Path:
    """Return a file with a treebank, joined from the files of powernorm-data."""
    path = out / f"{corpus}.conllu"
    if not path.exists():
        parts = [(files("powernorm_data") / name).read_bytes() for name in TREEBANKS[corpus]]
        out.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\n".join(map(lzma.decompress, parts)))
    return path


def _lm_settings(
    setting: Setting, norms: Sequence[str], seeds: Sequence[int], validations: int, early: bool
) -> lab.ComparisonSettings:
    return lab.settings_from(
        {
            "task": "lm",
            "preset": "verdict",
            "norms": list(norms),
            "seeds": list(seeds),
            "data": {
                "path": setting.corpus,
                "vocabulary_size": VOCABULARY,
                "sequence_length": setting.length,
                "batch_size": setting.batch_size,
                "evaluation_batch_size": 128,
            },
            "model": {
                "num_features": setting.num_features,
                "num_layers": setting.num_layers,
                "num_heads": 4,
                "feedforward_features": 4 * setting.num_features,
                "placement": setting.placement,
            },
            "optimizer": {"learning_rate": setting.learning_rate},
            "training": {
                "max_steps": setting.max_steps,
                "num_threads": 1,
                "log_every": 20,
                "validate_every": max(1, setting.max_steps // validations),
                "validation_tokens": 8192,
                "monitor_every": 0,
                "tid_batches": 0,
                "early_checkpoint": 0.1 if early else None,
            },
            "norm_options": NORM_OPTIONS,
        }
    )
