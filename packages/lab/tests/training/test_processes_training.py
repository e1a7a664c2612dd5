"""Two processes train as one does, stop together, and resume each other's checkpoints."""

import csv
import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from lab.tests.tasks.lm_char.tiny_characters import tiny_characters, write_stream
from lab.tests.tasks.ner.tiny_entities import tiny_entities, write_entities
from tiny_training import compare, of_task, tiny_config
from tiny_translation import tiny_translation

from norms.processes import run_processes
from powernorm.errors import InputError
from powernorm_lab.engine.processes import RepeatedInputError, gather, on_main, summed
from powernorm_lab.runs import DIAGNOSES_FILE
from powernorm_lab.settings.comparison import ComparisonSettings
from powernorm_lab.tasks.trained_models import load_trained, run_config
from powernorm_lab.tasks.translation.model import TranslationModel
from powernorm_lab.tasks.translation.search import translate_ids
from powernorm_lab.training.losses import Losses, TrainingLoss
from sharing import made_once

pytestmark = pytest.mark.distributed

STOPPED_AT = 9
"""Micro-batch, counted from 0, at which a run is interrupted: after the checkpoint of step 3."""


@dataclass(frozen=True)
class Job:
    """A comparison with one run, trained by two processes."""

    name: str
    config: ComparisonSettings
    stop: int | None = None
    """Micro-batch before which every process raises."""
    resumes: bool = False
    poison: int | None = None
    """Micro-batch from which the loss of the second process is NaN."""
    poisons_once: bool = False


class StoppedError(Exception):
    """Error that the test raises during a run."""


def run_job(job: Job, out: Path) -> dict[str, Any]:
    real = TrainingLoss.forward
    num_batches = 0
    second = dist.is_initialized() and dist.get_rank() == 1

    def forward(self: TrainingLoss, batch: Any) -> Losses:
        nonlocal num_batches
        batch_idx, num_batches = num_batches, num_batches + 1
        if job.stop is not None and batch_idx >= job.stop:
            raise StoppedError
        losses = real(self, batch)
        is_poisoned = job.poison is not None and (
            batch_idx == job.poison if job.poisons_once else batch_idx >= job.poison
        )
        if is_poisoned and second:
            return Losses(*(loss * float("nan") for loss in losses))
        return losses

    with patch.object(TrainingLoss, "forward", forward):
        try:
            (run,) = compare(job.config, out / job.name, resume=job.resumes).runs
        except StoppedError:
            return {"status": "stopped"}
    return vars(run)


def run_jobs(rank: int, jobs: list[Job], out: Path) -> dict[str, Any]:
    results: dict[str, Any] = {f"{job.name} {job.resumes}": run_job(job, out) for job in jobs}
    return {**results, "talk": talk(rank, the_run(out / "ln-ddp"))}


def even(config: ComparisonSettings) -> ComparisonSettings:
    """Return settings without dropout, whose masks depend on the process, and with a larger eps.

    With its small eps Adam makes large steps from rounding errors in gradients that should be zero,
    such as those of the bias before a BatchNorm.
    """
    random = {"dropout": 0.0, "attention_dropout": 0.0}
    chosen = {name: rate for name, rate in random.items() if hasattr(config.model, name)}
    return replace(
        config,
        model=replace(config.model, **chosen),
        optimizer=replace(config.optimizer, eps=1e-3),
    )


def translation(pairs: Path, norm: str, **changes: Any) -> ComparisonSettings:
    """Return settings whose first batch has one row, so that a process has none; others are odd."""
    training = {"max_steps": 6, "log_every": 1, "validate_every": 3, "tid_batches": 3}
    training |= changes.pop("training", {})
    return tiny_translation(
        pairs,
        norms=(norm,),
        data={"batch_tokens": 24},
        training=training,
        norm_options={"rbn": {"mean_penalty": 3.0, "var_penalty": 2.0}},
        **changes,
    )


def language(text: Path, task: str) -> ComparisonSettings:
    config = of_task(task, tiny_config(str(text), norms=("bn",), dropout=0.0))
    data = replace(config.data, batch_size=7)
    if task == "classify":
        data = replace(data, path="rt")
    training = replace(config.training, max_steps=6, log_every=1, validate_every=3)
    training = replace(training, accelerator="cpu")
    return even(replace(config, data=data, training=training))


def entities(names: Path, strategy: str) -> ComparisonSettings:
    """Return settings with 7 sentences a batch; the last validation batch has one."""
    config = tiny_entities(
        names,
        norms=("rbn",),
        data={"batch_size": 7, "evaluation_batch_size": 13},
        norm_options={"rbn": {"mean_penalty": 3.0}},
    )
    steps = replace(config.training, max_steps=6, validate_every=3, log_every=1)
    return even(replace(config, training=replace(steps, strategy=strategy, accelerator="cpu")))


def characters(stream: Path, norm: str) -> ComparisonSettings:
    """Return settings with three rows for two processes, each row with its memory."""
    config = tiny_characters(stream, norms=(norm,), training={"log_every": 1, "max_steps": 8})
    return even(replace(config, training=replace(config.training, accelerator="cpu")))


DEFAULT = ("ln-ddp", "early", "diagnosed", "poison", "overflow-fsdp2", "whole-fsdp2", "parts-fsdp2")
"""Jobs of the default suite; jobs of slow tests run separately."""
SAME = ("ln-ddp", "pn-ddp", "rbn-fsdp2")
EQUAL = (*SAME, "lm", "classify", "average", "average-fsdp2", "diagnosed")
EQUAL += ("ner-ddp", "ner-fsdp2", "characters-ln", "characters-bn")
ONE_TO_TWO = ("pn-ddp", "characters-ln")
MORE = ("bn-ddp", "rbn-ddp", "mabn-ddp", "ln-fsdp2", "bn-fsdp2", "pn-fsdp2")


def plain_job(name: str, pairs: Path) -> Job:
    norm, _, strategy = name.partition("-")
    return Job(name, even(translation(pairs, norm, training={"strategy": strategy})))


@pytest.fixture(scope="module")
def jobs(pairs: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    made = [plain_job(name, pairs) for name in SAME]
    made += [Job(task, language(text, task)) for task in ("lm", "classify")]
    folder = tmp_path_factory.mktemp("tasks")
    names, stream = write_entities(folder / "names"), write_stream(folder / "stream")
    made += [Job(f"ner-{one}", entities(names, one)) for one in ("ddp", "fsdp2")]
    made += [Job(f"characters-{norm}", characters(stream, norm)) for norm in ("ln", "bn")]
    average = {"average_checkpoints": 2, "recalibration_batches": 2}
    diagnosed = {"diagnose_every": 3}
    made += [
        Job("average", even(translation(pairs, "bn", training=average))),
        Job(
            "average-fsdp2",
            even(translation(pairs, "bn", training=average | {"strategy": "fsdp2"})),
        ),
        # Noisy enough to stop early.
        Job(
            "early",
            translation(
                pairs,
                "ln",
                optimizer={"learning_rate": 0.5},
                training={"max_steps": 60, "patience": 2},
            ),
        ),
        Job("diagnosed", even(translation(pairs, "rbn", training=diagnosed))),
        Job("poison", translation(pairs, "ln", training={"max_steps": 20}), poison=5),
        *(
            Job(
                f"overflow-{strategy}",
                translation(
                    pairs,
                    "pn",
                    training={"precision": "float16", "strategy": strategy, "score_every": 1},
                ),
                poison=5,
                poisons_once=True,
            )
            for strategy in ("ddp", "fsdp2")
        ),
    ]
    for strategy in ("ddp", "fsdp2"):
        scored = {"score_every": 1, "select_by": "score"}
        training = {"strategy": strategy, "log_every": 2, **scored}
        dropped = translation(pairs, "pn", training=training)
        made.append(Job(f"whole-{strategy}", dropped))
        made.append(Job(f"parts-{strategy}", dropped, stop=STOPPED_AT))
        plain = plain_job(f"pn-{strategy}", pairs)
        made.append(replace(plain, name=f"two-to-one-{strategy}", stop=STOPPED_AT))
    return {job.name: job for job in made}


Ranks = tuple[Path, list[dict[str, Any]]]
"""The output folder of two processes, and the results of each process."""


@pytest.fixture(scope="module")
def two(jobs: dict[str, Job], tmp_path_factory: pytest.TempPathFactory) -> Ranks:
    """Run the jobs of the default suite in two processes."""
    ranks = tmp_path_factory.mktemp("ranks")
    every = [jobs[name] for name in DEFAULT]
    every.append(replace(jobs["parts-fsdp2"], stop=None, resumes=True))
    return made_once(
        tmp_path_factory, "two-processes", lambda out: run_processes(run_jobs, 2, ranks, every, out)
    )


@pytest.fixture(scope="module")
def more_of_two(
    jobs: dict[str, Job], pairs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Ranks:
    """Run the slow jobs in two processes."""
    ranks = tmp_path_factory.mktemp("ranks")

    def make(out: Path) -> list[dict[str, Any]]:
        # They talk about a translation of LayerNorm.
        every = [job for name, job in jobs.items() if name not in DEFAULT[1:]]
        every += [plain_job(name, pairs) for name in MORE]
        # Two processes resume runs of one.
        begun = [
            Job(f"one-to-two-{name}", jobs[name].config, stop=STOPPED_AT) for name in ONE_TO_TWO
        ]
        assert [run_job(job, out)["status"] for job in begun] == ["failed"] * len(begun)
        every += [replace(one, stop=None, resumes=True) for one in (*begun, jobs["parts-ddp"])]
        return run_processes(run_jobs, 2, ranks, every, out)

    return made_once(tmp_path_factory, "more-of-two", make)


@pytest.fixture
def made(strategy: str, request: pytest.FixtureRequest) -> Ranks:
    """Return the output of two processes with a strategy."""
    found: Ranks = request.getfixturevalue("two" if strategy == "fsdp2" else "more_of_two")
    return found


STRATEGIES = pytest.mark.parametrize(
    "strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"]
)


def rows(folder: Path, name: str = "metrics.csv") -> list[dict[str, str]]:
    with (folder / name).open(newline="") as file:
        return list(csv.DictReader(file))


def the_run(folder: Path) -> Path:
    (config,) = folder.glob("*/config.json")
    return config.parent


FIRST_ONLY = ("input_scale", "token_gradient_mean", "token_gradient_var")
"""Columns of the first process only; so is gradient_norm of a norm without shared statistics."""


def assert_close_runs(one: Path, other: Path, *, rtol: float = 1e-4) -> None:
    for name in ("metrics.csv", "norms.csv"):
        first, second = rows(one, name), rows(other, name)
        assert len(first) == len(second), name
        for row, twin in zip(first, second, strict=True):
            for column, cell in row.items():
                where = f"{one.name} {name} step {row['step']} {column}"
                if column in ("layer", "norm"):
                    assert cell == twin[column], where
                elif column in FIRST_ONLY or (column, row.get("norm")) == ("gradient_norm", "ln"):
                    assert bool(cell) == bool(twin[column]), where
                elif column != "seconds":
                    assert bool(cell) == bool(twin[column]), where
                    if cell:
                        close = pytest.approx(float(twin[column]), rel=rtol, abs=1e-6)
                        assert float(cell) == close, where
    last = [part / "checkpoints/last.ckpt" for part in (one, other)]
    lanes = [
        torch.load(path, weights_only=True)["states"].get("memory", {}).get("lanes")
        for path in last
    ]
    assert (lanes[0] is not None) == ("characters" in one.parent.name)
    torch.testing.assert_close(lanes[0], lanes[1], rtol=1e-3, atol=1e-4)
    weights = [load_trained(path).model.state_dict() for path in last]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(
            tensor, weights[1][name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n} {m}"
        )


def measured(run: Mapping[str, Any]) -> dict[str, float]:
    numbers = {k: v for k, v in run["metrics"].items() if not k.endswith("per_second")}
    numbers |= {f"tid {name}": value for name, value in (run["tid"] or {}).items()}
    return {name: value for name, value in numbers.items() if value is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", EQUAL)
def test_two_processes_equal_one(
    name: str, jobs: dict[str, Job], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    made = request.getfixturevalue("two" if name in DEFAULT else "more_of_two")
    assert_equals_one_process(jobs[name], made, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_more_norms_and_strategies(
    name: str, pairs: Path, more_of_two: Ranks, tmp_path: Path
) -> None:
    assert_equals_one_process(plain_job(name, pairs), more_of_two, tmp_path)


def assert_equals_one_process(job: Job, two: Ranks, tmp_path: Path) -> None:
    name = job.name
    out, (first, second) = two
    expected = run_job(job, tmp_path)
    got = first[f"{name} False"]
    assert got["status"] == expected["status"] == "finished"
    assert got["scored"] == expected["scored"]
    assert measured(got) == pytest.approx(measured(expected), rel=1e-4)
    assert measured(second[f"{name} False"]) == measured(got)
    assert_close_runs(the_run(tmp_path / name), the_run(out / name))
    texts = [the_run(part / name) / "translations.tsv" for part in (out, tmp_path)]
    assert texts[0].exists() == texts[1].exists() == (job.config.task == "translation")
    if texts[0].exists():
        assert texts[0].read_text() == texts[1].read_text()


def test_two_processes_diagnose_whole_batches_once(
    jobs: dict[str, Job], two: Ranks, tmp_path: Path
) -> None:
    out, _ = two
    run_job(jobs["diagnosed"], tmp_path)
    of_one, of_two = (
        [json.loads(line) for line in (the_run(part) / DIAGNOSES_FILE).read_text().splitlines()]
        for part in (tmp_path / "diagnosed", out / "diagnosed")
    )
    assert [row["step"] for row in of_two] == [0, 3, 6]
    for row, twin in zip(of_one, of_two, strict=True):
        assert row["num_tokens"] == twin["num_tokens"]
        for layer, other in zip(row["layers"], twin["layers"], strict=True):
            for name in ("mean_tid", "var_tid", "kappa_50", "lambda_1"):
                assert other[name] == pytest.approx(layer[name], rel=1e-3)


def test_a_process_had_no_rows(jobs: dict[str, Job]) -> None:
    from powernorm_lab.tasks.registry import task_of

    config = jobs["ln-ddp"].config
    task = task_of(config)
    pairs = task.data(task.encode(config), config, 0).batches
    sizes = [len(pairs.batch(position).targets) for position in range(12)]
    assert sizes[0] == 1
    assert any(size > 1 and size % 2 for size in sizes)


def test_all_processes_stop_at_the_same_step(two: Ranks) -> None:
    out, (first, second) = two
    assert first["early False"]["message"] == second["early False"]["message"]
    assert "stopped early after step" in first["early False"]["message"]
    assert int(rows(the_run(out / "early"))[-1]["step"]) < 60
    assert first["poison False"]["status"] == second["poison False"]["status"] == "nonfinite"
    assert first["poison False"]["message"] == second["poison False"]["message"]
    assert int(rows(the_run(out / "poison"))[-1]["step"]) < 20


@STRATEGIES
def test_an_overflow_in_one_process_is_skipped_by_all(made: Ranks, strategy: str) -> None:
    out, (first, second) = made
    name = f"overflow-{strategy}"
    assert first[f"{name} False"]["status"] == second[f"{name} False"]["status"] == "finished"
    folder = the_run(out / name)
    content = torch.load(folder / "checkpoints/last.ckpt", weights_only=True)
    states = content["states"]
    assert states["scaler"]["scale"] == 2.0**15
    assert all(tensor.isfinite().all() for tensor in states["model"].values())
    losses = [float(row["train_loss"]) for row in rows(folder)]
    assert [math.isfinite(loss) for loss in losses] == [step != 2 for step in range(6)]
    assert losses[-1] < losses[0]


@STRATEGIES
def test_two_processes_go_on_exactly(made: Ranks, strategy: str) -> None:
    """This includes the dropout of each process."""
    out, (first, _) = made
    assert first[f"parts-{strategy} False"]["status"] == "stopped"
    assert first[f"parts-{strategy} True"]["status"] == "finished"
    whole, parts = (the_run(out / f"{name}-{strategy}") for name in ("whole", "parts"))
    for name in ("metrics.csv", "norms.csv"):
        cells = [[{**row, "seconds": ""} for row in rows(part, name)] for part in (whole, parts)]
        assert cells[0] == cells[1], name
        if name == "metrics.csv":
            assert [row["step"] for row in cells[0] if row["valid_score"]] == ["3", "6"]
    states = [
        torch.load(part / "checkpoints/last.ckpt", weights_only=True)["states"]
        for part in (whole, parts)
    ]
    for part in ("model", "optimizer"):
        torch.testing.assert_close(states[0][part], states[1][part], rtol=0, atol=0)
    assert rows(parts)[-1]["step"] == "6"


@pytest.mark.slow
def test_another_number_of_processes_goes_on(
    jobs: dict[str, Job], more_of_two: Ranks, tmp_path: Path
) -> None:
    """Without dropout the result is that of an uninterrupted run; ν has the unit of the loss."""
    out, (first, _) = more_of_two
    whole = the_run(out / "pn-ddp")
    for name in ("two-to-one-ddp", "two-to-one-fsdp2"):
        assert first[f"{name} False"]["status"] == "stopped"
        shutil.copytree(out / name, tmp_path / name)
        job = replace(jobs[name], stop=None, resumes=True)
        assert run_job(job, tmp_path)["status"] == "finished"
        assert_close_runs(the_run(tmp_path / name), whole)
    for name in ONE_TO_TWO:
        assert first[f"one-to-two-{name} True"]["status"] == "finished"
        assert_close_runs(the_run(out / f"one-to-two-{name}"), the_run(out / name))


def search(folder: Path) -> dict[str, Any]:
    """Translate sentences of several lengths, some of them empty, a few at a time."""
    trained = load_trained(folder)
    assert isinstance(trained.model, TranslationModel)
    decoding = replace(run_config(trained.settings).decoding, batch_tokens=12)
    sources = [[(7 * i + j) % 280 + 1 for j in range(i % 6)] for i in range(15)]
    device = torch.device("cpu")
    found = translate_ids(trained.model, sources, decoding, device, num_best=2)
    return {
        "tokens": [[list(best.tokens) for best in row] for row in found.hypotheses],
        "scores": [[best.score for best in row] for row in found.hypotheses],
        "number": found.num_tokens,
    }


def talk(rank: int, folder: Path) -> dict[str, Any]:
    def fail() -> None:
        raise InputError("the first has something to say")

    with pytest.raises(InputError, match="something to say") as caught:
        on_main(fail)
    return {
        "repeated": isinstance(caught.value, RepeatedInputError),
        "gathered": gather(rank + 1),
        "summed": summed([1.0, float(rank)]),
        "first": on_main(lambda: rank),
        **search(folder),
    }


def test_what_processes_tell_each_other(two: Ranks) -> None:
    out, ranks = two
    first, second = (dict(rank["talk"]) for rank in ranks)
    assert (first.pop("repeated"), second.pop("repeated")) == (False, True)
    assert first == second
    assert first.pop("gathered") == [1, 2]
    assert first.pop("summed") == [2.0, 1.0]
    assert first.pop("first") == 0
    assert first == search(the_run(out / "ln-ddp"))
