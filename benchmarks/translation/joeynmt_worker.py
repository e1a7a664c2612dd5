"""Runs Joey NMT 2.3.0, by its Python, on one job of `joeynmt_speed.py`.

    python joeynmt_worker.py JOB.json

Training and search are Joey NMT's own. What is added are clocks, and, where the job names batches,
these in place of those that its sampler would make.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from clocks import Reading, elapsed, read_clocks
from joeynmt import datasets, prediction
from joeynmt.config import BaseConfig, load_config, parse_global_args
from joeynmt.data import load_data
from joeynmt.helpers import make_model_dir
from joeynmt.model import Model, build_model
from joeynmt.training import TrainManager

NUM_MARKS = 3
"""Its ids are those of the pairs and this: it has four marks of its own, the pairs have one."""


def train(job: dict[str, Any]) -> dict[str, Any]:
    """Times the updates after the first `skipped`, from the making of a batch to the next one."""
    taken: list[list[int]] = []
    readings: list[Reading] = []
    sizes: list[int] | None = job["batch_sizes"]

    class ClockedSampler(datasets.TokenBatchSampler):  # type: ignore[misc]
        def __iter__(self) -> Iterator[list[int]]:
            batches = super().__iter__() if sizes is None else consecutive(sizes)
            while True:
                readings.append(read_clocks())
                batch = next(batches, None)
                if batch is None:
                    return
                taken.append(batch)
                yield batch

    datasets.TokenBatchSampler = ClockedSampler
    arguments = read_arguments(job, "train")
    make_model_dir(arguments.model_dir, overwrite=True)
    model, data, valid, _ = prediction.prepare(arguments, rank=0, mode="train")
    manager = TrainManager(
        rank=0,
        model=model,
        model_dir=arguments.model_dir,
        device=arguments.device,
        autocast=arguments.autocast,
        seed=arguments.seed,
        train_args=arguments.train,
        dev_args=arguments.test,
    )
    manager.train_and_validate(train_data=data, valid_data=valid)
    # The update after the last timed one is there to end its time.
    first, last = job["skipped"], job["skipped"] + job["updates"]
    lengths = [
        [len(data.get_item(index, data.trg_lang)) + 1 for index in batch]
        for batch in taken[first:last]
    ]
    return {
        **elapsed(readings[first], readings[last]),
        "tokens": sum(map(sum, lengths)),
        "positions": sum(len(batch) * max(batch) for batch in lengths),
        "parameters": count_parameters(model),
    }


def consecutive(sizes: list[int]) -> Iterator[list[int]]:
    """Numbers from 0 in lists of these sizes."""
    start = 0
    for size in sizes:
        yield list(range(start, start + size))
        start += size


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Times the search of one batch, encoder included, after a short one of the same sentences."""
    arguments = read_arguments(job, "translate")
    model, data = load_model(arguments, job["weights"])
    readings: list[Reading] = []
    outputs: list[list[int]] = []
    search = prediction.search

    def clocked_search(**options: Any) -> Any:
        # `predict` does not hand on the least length, which keeps hypotheses from ending.
        options["min_output_length"] = arguments.test.min_output_length
        search(**options | {"max_output_length": job["warmup_length"]})
        readings.append(read_clocks())
        output = search(**options)
        readings.append(read_clocks())
        return output

    def keep(arrays: Any, **options: Any) -> Any:
        outputs.extend([int(token) - NUM_MARKS for token in row] for row in arrays)
        return sentences(arrays=arrays, **options)

    prediction.search = clocked_search
    sentences, model.trg_vocab.arrays_to_sentences = model.trg_vocab.arrays_to_sentences, keep
    prediction.predict(
        model=model,
        data=data,
        device=arguments.device,
        n_gpu=0,
        args=arguments.test,
        autocast=arguments.autocast,
    )
    assert len(readings) == 2, "the sentences are one batch"
    outputs = [[token for token in row if token > 0] for row in outputs]
    return {
        **elapsed(*readings),
        "tokens": sum(map(len, outputs)),
        "outputs": outputs,
        "parameters": count_parameters(model),
    }


def score(job: dict[str, Any]) -> dict[str, Any]:
    """Log-probability of every target token, sentence after sentence."""
    arguments = read_arguments(job, "translate")
    model, data = load_model(arguments, job["weights"])
    batches = data.make_iter(
        batch_size=arguments.test.batch_size,
        pad_index=model.pad_index,
        eos_index=model.eos_index,
        device=arguments.device,
    )
    scores: list[float] = []
    with torch.no_grad():
        for batch in batches:
            model.loss_function = (arguments.train.loss, 0.0)
            _, log_probabilities, _, _ = model(return_type="loss", **vars(batch))
            chosen = log_probabilities.gather(2, batch.trg[..., None])[..., 0]
            scores += chosen[batch.trg_mask[:, 0]].tolist()
    return {"scores": scores}


def read_arguments(job: dict[str, Any], mode: str) -> BaseConfig:
    return parse_global_args(load_config(Path(job["config"])), rank=0, mode=mode)


def load_model(arguments: BaseConfig, weights: str) -> tuple[Model, datasets.BaseDataset]:
    """The model with given weights, and the sentences that are translated."""
    source, target, _, _, data = load_data(arguments.data, datasets=["test"])
    model = build_model(arguments.model, src_vocab=source, trg_vocab=target)
    unknown = model.load_state_dict(torch.load(weights, weights_only=True), strict=False)
    assert set(unknown.missing_keys) == {"encoder.pe.pe", "decoder.pe.pe"}, unknown
    assert not unknown.unexpected_keys, unknown
    return model.eval(), data


def count_parameters(model: Model) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text())
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(job["threads"])
    result = {"train": train, "decode": decode, "score": score}[job["kind"]](job)
    Path(job["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
