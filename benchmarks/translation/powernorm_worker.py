"""Runs this library on one job of `joeynmt_speed.py`.

python powernorm_worker.py JOB.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from clocks import Reading, elapsed, read_clocks
from pairs import TRAINING_SEED, open_pairs, test_batch, training_pairs
from shapes import SHAPES, Search, Shape

from powernorm.norms import build_norm
from powernorm_lab.data.batch import TrainingBatches
from powernorm_lab.data.subwords import END_ID
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.settings.training import OptimizerSettings
from powernorm_lab.tasks.translation.model import NormPlaces, TranslationModel
from powernorm_lab.tasks.translation.search import BeamSearch, beam_search
from powernorm_lab.training.losses import smoothed_cross_entropy
from powernorm_lab.training.optimization import build_optimizer


def build_model(shape: Shape, vocabulary_size: int) -> TranslationModel:
    def norm(num_features: int) -> torch.nn.Module:
        return build_norm("ln", num_features)

    return TranslationModel(
        vocabulary_size,
        vocabulary_size,
        NormPlaces.everywhere(norm),
        norm,
        TransformerShape(
            num_features=shape.num_features,
            num_layers=shape.num_layers,
            num_heads=shape.num_heads,
            feedforward_features=shape.feedforward_features,
            dropout=shape.dropout,
            attention_dropout=shape.dropout,
            activation="relu",
        ),
    )


def train(job: dict[str, Any]) -> dict[str, Any]:
    return {"loop": train_loop, "trainer": train_by_command}[job["by"]](job)


def train_loop(job: dict[str, Any]) -> dict[str, Any]:
    """Model, batches, loss and optimizer of this library, without its trainer."""
    shape = SHAPES[job["shape"]]
    encoded = open_pairs(Path(job["data"]), shape)
    batches = training_pairs(encoded, shape)
    model = build_model(shape, encoded.vocabulary_size).train()
    options = OptimizerSettings(learning_rate=shape.learning_rate)
    optimizer = build_optimizer(model, options, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4000)
    readings: list[Reading] = []
    num_targets = 0
    for position in range(job["skipped"] + job["updates"]):
        if position == job["skipped"]:
            readings.append(read_clocks())
        batch = batches.batch(position)
        logits = model(**batch.inputs())
        loss, plain = smoothed_cross_entropy(
            logits.flatten(0, 1), batch.targets.flatten(), shape.label_smoothing
        )
        (loss / batch.num_targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        # Joey NMT reads the loss of every update.
        plain.item()
        num_targets += batch.num_targets * bool(readings)
    readings.append(read_clocks())
    return {
        **elapsed(*readings),
        "tokens": num_targets,
        "parameters": count_parameters(model),
    }


def train_by_command(job: dict[str, Any]) -> dict[str, Any]:
    """A run of `powernorm compare translation`, timed from one batch to the next."""
    from powernorm.cli import main

    shape = SHAPES[job["shape"]]
    first, last = job["skipped"], job["skipped"] + job["updates"]
    # The update after the last timed one is there to end its time.
    sys.argv = ["powernorm", *compare_arguments(job, shape, last + 1)]
    with clocked_batches() as readings, suppress(SystemExit):
        main()
    assert len(readings) > last, "the run did not come to its end"
    encoded = open_pairs(Path(job["data"]), shape)
    (config,) = Path(job["folder"]).glob("*/config.json")
    fingerprint = json.loads(config.read_text())["data_fingerprint"]
    assert fingerprint == encoded.fingerprint, "the run had other subwords"
    batches = training_pairs(encoded, shape)
    return {
        **elapsed(readings[first], readings[last]),
        "tokens": sum(batches.batch(position).num_targets for position in range(first, last)),
        "parameters": count_parameters(build_model(shape, encoded.vocabulary_size)),
    }


@contextmanager
def clocked_batches() -> Iterator[dict[int, Reading]]:
    """Reads the clocks when a training batch is asked for the first time."""
    readings: dict[int, Reading] = {}
    make = TrainingBatches.batch

    def clocked(self: TrainingBatches, position: int) -> Any:
        readings.setdefault(position, read_clocks())
        return make(self, position)

    TrainingBatches.batch = clocked  # type: ignore[method-assign]
    try:
        yield readings
    finally:
        TrainingBatches.batch = make  # type: ignore[method-assign]


def compare_arguments(job: dict[str, Any], shape: Shape, num_updates: int) -> list[str]:
    settings = {
        "data.languages": "de-en",
        "data.vocabulary_size": shape.vocabulary_size,
        "data.sequence_length": shape.max_length,
        "data.batch_tokens": shape.batch_tokens,
        "data.max_length_ratio": None,
        "data.max_pairs": None,
        "model.num_features": shape.num_features,
        "model.num_layers": shape.num_layers,
        "model.num_heads": shape.num_heads,
        "model.feedforward_features": shape.feedforward_features,
        "model.dropout": shape.dropout,
        "model.attention_dropout": shape.dropout,
        "model.activation": "relu",
        "model.placement": "pre",
        "optimizer.learning_rate": shape.learning_rate,
        "optimizer.clip_norm": 1.0,
        "optimizer.weight_decay": 0.0,
        "optimizer.accumulation": 1,
        "schedule.name": "inverse_sqrt",
        "schedule.warmup_steps": 4000,
        "training.max_steps": num_updates,
        "training.label_smoothing": shape.label_smoothing,
        "training.precision": "float32",
        "training.accelerator": "cpu",
        "training.num_threads": job["threads"],
        "training.log_every": 10,
        # Only updates are timed, so what comes after them is made small.
        "training.validate_every": num_updates,
        "training.monitor_every": 0,
        "training.tid_batches": 0,
        "training.average_checkpoints": 0,
        "decoding.beam_size": 1,
        "decoding.max_length_factor": 0.0,
        "decoding.max_length_offset": 1,
    }
    arguments = ["compare", "translation", "--preset", job["preset"], "--norms", "ln"]
    arguments += ["--seeds", str(TRAINING_SEED + 1), "--data", job["data"], "--out", job["folder"]]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={_written(value)}"]
    return [*arguments, "--force"]


def _written(value: object) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Times the search of one batch, encoder included, after a short one of the same sentences."""
    shape, search = SHAPES[job["shape"]], Search(**job["search"])
    encoded = open_pairs(Path(job["data"]), shape)
    model = build_model(shape, encoded.vocabulary_size).eval()
    model.load_state_dict(torch.load(job["weights"], weights_only=True))
    batch = test_batch(encoded, search)

    def translate(length: int) -> list[list[int]]:
        options = BeamSearch(
            beam_size=search.beam_size,
            length_normalization="wu2016",
            length_penalty=search.length_penalty,
            max_length_factor=0.0,
            max_length_offset=length,
        )
        found = beam_search(
            model, batch.named["source"], batch.named.get("source_padding_mask"), options
        )
        return [list(hypotheses[0].tokens) for hypotheses in found]

    translate(job["warmup_length"])
    start = read_clocks()
    outputs = translate(search.length)
    return {
        **elapsed(start, read_clocks()),
        "tokens": sum(map(len, outputs)),
        "outputs": outputs,
        "parameters": count_parameters(model),
    }


def score(job: dict[str, Any]) -> dict[str, Any]:
    """Draws the weights that both sides have, and returns the log-probability of every target."""
    from joeynmt_weights import NUM_MARKS, joeynmt_weights

    shape = SHAPES[job["shape"]]
    encoded = open_pairs(Path(job["data"]), shape)
    model = build_model(shape, encoded.vocabulary_size).eval()
    # An end mark with the logit 0 is never among the best, so that no search ends early.
    model.source_embedding.weight.data[END_ID] = 0
    weights = model.state_dict()
    torch.save(weights, job["weights"])
    torch.save(joeynmt_weights(weights, shape.num_layers), job["joeynmt_weights"])
    batch = test_batch(encoded, Search(**job["search"]))
    with torch.no_grad():
        logits = model(**batch.inputs())
        # Joey NMT has more marks, with the same row of the table.
        marks = logits[..., :1].expand(-1, -1, NUM_MARKS - 1)
        log_probabilities = torch.cat([logits, marks], dim=-1).log_softmax(-1)
    kept = batch.targets >= 0
    chosen = log_probabilities.gather(2, batch.targets.clamp_min(0)[..., None])[..., 0]
    return {"scores": chosen[kept].tolist()}


def count_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(job["threads"])
    result = {"train": train, "decode": decode, "score": score}[job["kind"]](job)
    Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
