"""`powernorm_lab.remove` end to end: runs, Hugging Face folders and users' models."""

from __future__ import annotations

import copy
import csv
import json
import shutil
from collections import namedtuple
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lab.tests.training.tiny_training import Configure, compare, tiny_config
from torch import Tensor, nn

import powernorm
import powernorm_lab
from covering import some_default
from integrations.tiny_encoder import TEXTS, WORDS, write_encoder
from powernorm.errors import InputError
from powernorm.integrations.model_sources import open_source
from powernorm_lab.engine.events import Event, Notice, StepsDone
from powernorm_lab.engine.stopping import Stopped
from powernorm_lab.model_sources import batches_of
from powernorm_lab.removal.originals import open_original
from powernorm_lab.removal.removing import Removed, check_agreement
from powernorm_lab.removal.settings import RemovalSettings
from powernorm_lab.settings.overrides import override
from powernorm_lab.tasks.trained_models import load_folded_run
from surgery.removal.small_models import data, stack

SHORT = ("training.steps=6", "training.validations=2", "training.log_every=2", "method.batches=3")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    """Return a run of `compare lm` that learned a little."""
    configure: Configure = partial(tiny_config, str(text))
    out = tmp_path_factory.mktemp("runs")
    compare(override(configure(norms=["ln"]), ["training.max_steps=20"]), out)
    (found,) = (path for path in out.iterdir() if path.is_dir())
    return found


def own() -> tuple[nn.Module, list[Tensor]]:
    return stack(), data(12)


def metrics_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open() as stream:
        return [{k: v for k, v in row.items() if k != "seconds"} for row in csv.DictReader(stream)]


def norms_in(model: nn.Module) -> list[str]:
    return [
        type(m).__name__ for m in model.modules() if isinstance(m, powernorm.Norm | nn.LayerNorm)
    ]


def test_run_becomes_a_folder_without_norms(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "removed"
    removed = powernorm_lab.remove(run, out, settings=SHORT, quiet=True)
    assert norms_in(removed.model) == []
    result = json.loads((out / "result.json").read_text())
    assert result["status"] == "finished"
    assert result["metrics"].keys() >= {"valid_loss", "original_valid_loss", "test_divergence"}
    assert {row["action"] for row in result["fold"]} == {"fold"}
    assert all(0 < row["explained"] <= 1 for row in result["norms"])
    # The laboratory can rebuild it from the settings next to it.
    loaded = load_folded_run(out / "model")
    example = loaded.example_inputs()
    torch.testing.assert_close(loaded.model(*example), removed.model(*example))
    assert json.loads((out / "model" / "removal.json").read_text())["num_steps"] == 6
    page = (out / "report.html").read_text()
    assert "Norms out of" in page
    assert page.count("<svg") >= 3


def stop_at(step: int, error: BaseException) -> Callable[[Event], None]:
    def listen(event: Event) -> None:
        if isinstance(event, StepsDone) and event.step == step:
            raise error

    return listen


@pytest.mark.parametrize("method", some_default(["match", "freeze-in-turn"], "match"))
def test_goes_on_exactly_as_if_it_had_not_been_interrupted(
    run: Path, tmp_path: Path, method: str
) -> None:
    settings = [*SHORT, f"method.name={method}", "anchor.weight=0.1", "distillation.share=0.5"]
    whole = powernorm_lab.remove(run, tmp_path / "whole", settings=settings, quiet=True)
    out = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        powernorm_lab.remove(run, out, settings=settings, on_event=stop_at(4, KeyboardInterrupt()))
    assert json.loads((out / "result.json").read_text())["status"] == "interrupted"
    assert "--resume continues from there" in (out / "report.html").read_text()
    parts = powernorm_lab.remove(run, out, settings=settings, quiet=True, resume=True)
    assert metrics_of(out) == metrics_of(tmp_path / "whole")
    assert parts.metrics == whole.metrics
    for name, value in whole.model.state_dict().items():
        assert torch.equal(parts.model.state_dict()[name], value), name


@pytest.mark.slow
def test_norms_fade_while_the_model_learns(tmp_path: Path) -> None:
    """Step 0 equals the original, and the result has no norms and is close, interrupted or not."""
    settings = [*SHORT, "method.name=prepbn", "training.steps=40", "optimizer.learning_rate=1e-2"]
    whole = powernorm_lab.remove(own(), tmp_path / "whole", settings=settings, quiet=True)
    assert norms_in(whole.model) == []
    rows = metrics_of(tmp_path / "whole")
    assert float(rows[0]["valid_error"]) < 1e-12
    assert whole.metrics["valid_error"] is not None
    assert 0 < whole.metrics["valid_error"] < 0.3
    stop = stop_at(24, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        powernorm_lab.remove(own(), tmp_path / "parts", settings=settings, on_event=stop)
    parts = powernorm_lab.remove(
        own(), tmp_path / "parts", settings=settings, quiet=True, resume=True
    )
    assert parts.metrics == whole.metrics


def test_scheduler_that_stops_it_finds_a_checkpoint(run: Path, tmp_path: Path) -> None:
    with pytest.raises(Stopped):
        powernorm_lab.remove(run, tmp_path, settings=SHORT, on_event=stop_at(2, Stopped("SIGTERM")))
    assert powernorm_lab.remove(run, tmp_path, settings=SHORT, quiet=True, resume=True).metrics


@pytest.mark.slow
def test_users_model_learns_from_itself(tmp_path: Path) -> None:
    """Without a loss, the targets are the outputs and the norms' outputs."""
    settings = [*SHORT, "training.steps=40", "optimizer.learning_rate=3e-3"]
    model = own()[0], [namedtuple("Rows", "x")(x) for x in own()[1]]
    removed = powernorm_lab.remove(model, tmp_path / "out", settings=settings, quiet=True)
    rows = metrics_of(tmp_path / "out")
    assert float(rows[-1]["valid_error"]) < 0.7 * float(rows[0]["valid_error"])
    again = powernorm.load(tmp_path / "out" / "model", own()[0])
    x = data(1)[0]
    torch.testing.assert_close(again(x), removed.model(x))


@pytest.mark.slow
def test_model_of_transformers_with_batches_of_ones_own_is_loaded_by_its_folder(
    tmp_path: Path,
) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=8,
    )
    batches = [{"input_ids": torch.randint(1, 8, (2, 5))} for _ in range(4)]
    model = transformers.BertModel(config).eval()
    removed = powernorm_lab.remove((model, batches), tmp_path / "out", settings=SHORT, quiet=True)
    loaded = powernorm.load(tmp_path / "out" / "model")
    torch.testing.assert_close(loaded(**batches[0])[0], removed.model(**batches[0])[0])


@pytest.mark.parametrize(
    ("settings", "goal"),
    [
        (["training.steps=1"], "the original's logits (1)"),
        (["training.share=0.1"], "the original's logits (0.5) and the task's loss (0.5)"),
        (
            ["training.share=0.1", "distillation.share=0.75"],
            "the original's logits (0.75) and the task's loss (0.25)",
        ),
        (["training.share=0.1", "distillation.name=none"], "the task's loss (1)"),
    ],
)
def test_a_long_removal_of_a_run_learns_its_task_too(
    run: Path, settings: list[str], goal: str, tmp_path: Path
) -> None:
    heard: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Notice):
            heard.append(event.message)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        powernorm_lab.remove(run, tmp_path / "out", settings=settings, on_event=listen)
    assert heard[0].endswith(f"then training with {goal}")


@pytest.mark.slow
def test_a_long_fit_says_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("powernorm_lab.removal.training.NOTICE_SECONDS", 0.0)
    events: list[Event] = []
    powernorm_lab.remove(own(), tmp_path / "out", settings=SHORT, on_event=events.append)
    heard = [event.message for event in events if isinstance(event, Notice)]
    told = [text for text in heard if "fitted" in text]
    assert told == [f"fitted {done} of {1 + len(told)} norms" for done in range(1, 1 + len(told))]
    assert len(told) > 1


@pytest.mark.slow
def test_layers_compute_in_bfloat16_while_they_are_trained_alone(tmp_path: Path) -> None:
    """Weights and measurements stay float32, and the result is close to that of float32."""
    settings = [*SHORT, "training.steps=40", "optimizer.learning_rate=3e-3"]
    errors, computed = dict[str, float | None](), set[tuple[bool, torch.dtype]]()
    for precision in ("float32", "bfloat16"):
        model, batches = stack().float(), [x.float() for x in data(12)]
        watched = next(m for m in model.modules() if type(m) is nn.Linear)
        if precision == "bfloat16":
            watched.register_forward_hook(
                # The original, which is not trained, takes part in the loss.
                lambda m, _, y: computed.add(
                    (torch.is_grad_enabled() or not m.weight.requires_grad, y.dtype)
                )
            )
        removed = powernorm_lab.remove(
            (model, batches),
            tmp_path / precision,
            settings=[*settings, f"training.precision={precision}"],
            quiet=True,
        )
        errors[precision] = removed.metrics["valid_error"]
        assert {p.dtype for p in removed.model.parameters()} == {torch.float32}
    assert (True, torch.bfloat16) in computed
    assert (False, torch.float32) in computed
    assert (False, torch.bfloat16) not in computed
    assert errors["bfloat16"] == pytest.approx(errors["float32"], rel=0.1)
    assert errors["bfloat16"] != errors["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("acts", [False, True])
def test_dropout_acts_where_it_is_asked_for(acts: bool, tmp_path: Path) -> None:
    model, batches = own()
    dropout, modes = nn.Dropout(0.5), set[bool]()
    model = nn.Sequential(dropout, model).eval()

    def watch(module: nn.Module, *_: Any) -> None:
        if torch.is_grad_enabled():
            modes.add(module.training)

    dropout.register_forward_hook(watch)
    settings = [*SHORT, f"training.dropout={acts}"]
    powernorm_lab.remove((model, batches), tmp_path / "out", settings=settings, quiet=True)
    assert modes == {acts}


HEADS = (
    *("BertModel", "BertForMaskedLM", "GPT2LMHeadModel"),
    *("BertForSequenceClassification", "BertForTokenClassification", "BertForQuestionAnswering"),
)


@pytest.mark.parametrize("head", some_default(HEADS, "BertForSequenceClassification"))
def test_hugging_face_folder_becomes_one_that_load_reads(head: str, tmp_path: Path) -> None:
    folder, text = pretrained(tmp_path, head)
    small = ["data.batch_size=4", "data.sequence_length=8", "training.validation_tokens=64"]
    out = tmp_path / "out"
    removed = powernorm_lab.remove(
        folder, out, data=str(text), settings=[*SHORT, *small], quiet=True
    )
    loaded = powernorm.load(out / "model")
    assert type(loaded).__name__ == head
    assert norms_in(loaded) == []
    ids = torch.arange(4).repeat(2, 2)
    ours, theirs = (model(input_ids=ids)[0] for model in (removed.model.eval(), loaded.eval()))
    torch.testing.assert_close(ours, theirs)
    assert ("valid_loss" in removed.metrics) == head.endswith(("MaskedLM", "LMHeadModel"))
    assert ("valid_cosine" in removed.metrics) == (head == "BertModel")
    classifies = head.endswith(("SequenceClassification", "TokenClassification"))
    has_logits = classifies or "valid_loss" in removed.metrics
    assert ("valid_divergence" in removed.metrics) == has_logits


@pytest.mark.slow
@pytest.mark.parametrize("dtype", some_default([torch.bfloat16, torch.float16], torch.bfloat16))
def test_folder_in_half_precision_is_trained_in_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    import transformers

    folder, text = pretrained(tmp_path, "BertModel")
    transformers.BertModel.from_pretrained(folder).to(dtype).save_pretrained(folder)
    out = tmp_path / "out"
    removed = powernorm_lab.remove(folder, out, data=str(text), settings=SHORT, quiet=True)
    loaded = powernorm.load(out / "model")
    for model in (removed.model, loaded):
        assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_model_of_ones_own_in_half_precision_is_refused(tmp_path: Path) -> None:
    model = stack().bfloat16()
    message = refused((model, [x.bfloat16() for x in data(12)]), tmp_path / "out")
    assert "weights in torch.bfloat16" in message
    assert "model.float()" in message


@pytest.mark.slow
def test_divergence_is_a_mean_over_positions(tmp_path: Path) -> None:
    """The batches of the last and the longest rows have other sizes."""
    folder, text = pretrained(tmp_path, "GPT2LMHeadModel")
    small = ["data.batch_size=3", "data.sequence_length=8"]
    out = tmp_path / "out"
    removed = powernorm_lab.remove(
        folder, out, data=str(text), settings=[*SHORT, *small], quiet=True
    )
    import transformers

    original = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()
    opened = open_original(
        folder, override(RemovalSettings(), [f"data.path={text}", *small]).data, 0
    )
    batches = list(opened.evaluation("test"))
    assert len({len(batch["input_ids"]) for batch in batches}) == 2
    total = number = 0.0
    with torch.no_grad():
        for batch in batches:
            ours, theirs = (
                opened.run(model, batch).logits[:, :-1].log_softmax(-1)
                for model in (removed.model, original)
            )
            each = (theirs.exp() * (theirs - ours)).sum(-1)
            total, number = total + float(each.sum()), number + each.numel()
    assert removed.metrics["test_divergence"] == pytest.approx(total / number, rel=1e-4)


@pytest.mark.slow
def test_embeddings_are_compared_on_this_text_and_another(tmp_path: Path) -> None:
    """The embedding is a mean over a row's tokens without padding; both test splits are whole."""
    folder, text = pretrained(tmp_path, "BertModel")
    other = tmp_path / "other"
    other.mkdir()
    rows = [*TEXTS[:3], "war tor", TEXTS[5]]
    for split in ("train", "valid", "test"):
        (other / f"{split}.txt").write_text("\n".join(rows if split == "test" else TEXTS))
    small = ["data.batch_size=4", "training.validation_tokens=64", f"data.other={other}"]
    out = tmp_path / "out"
    removed = powernorm_lab.remove(
        folder, out, data=str(text), settings=[*SHORT, *small], quiet=True
    )
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    original = transformers.BertModel.from_pretrained(folder).eval()
    cosines = []
    for row in rows:
        inputs = tokenizer([row], return_tensors="pt")
        with torch.no_grad():
            ours, theirs = (m(**inputs)[0].mean(1) for m in (removed.model, original))
        cosines.append(float(torch.cosine_similarity(ours, theirs)))
    assert removed.metrics["other_cosine"] == pytest.approx(sum(cosines) / 5, abs=1e-5)
    assert removed.metrics["other_lowest_cosine"] == pytest.approx(min(cosines), abs=1e-5)
    # The folded model comes with its vocabulary.
    ids = batches_of(open_source(str(out / "model")), 1, str(text))[0]["input_ids"]
    assert torch.equal(ids, batches_of(open_source(str(folder)), 1, str(text))[0]["input_ids"])
    assert len(ids.unique()) == len(WORDS)
    assert removed.metrics["valid_cosine"] != removed.metrics["other_cosine"]
    assert "Cosine to the original" in (out / "report.html").read_text()


def pretrained(tmp_path: Path, head: str) -> tuple[Path, Path]:
    folder = write_encoder(tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(8 * TEXTS))
    import transformers

    if head.startswith("BertFor"):
        config = transformers.BertConfig.from_pretrained(folder)
        getattr(transformers, head)(config).save_pretrained(folder)
    if head == "BertForMaskedLM":
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        tokenizer.mask_token = "[UNK]"
        tokenizer.save_pretrained(folder)
    if head == "GPT2LMHeadModel":
        config = transformers.GPT2Config(
            vocab_size=8, n_embd=16, n_layer=1, n_head=2, n_positions=16, eos_token_id=0
        )
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder, text


# Refusals


def refused(*args: Any, **kwargs: Any) -> str:
    with pytest.raises(InputError) as caught:
        powernorm_lab.remove(*args, quiet=True, **kwargs)
    return str(caught.value)


def test_folder_of_another_removal_is_not_touched(tmp_path: Path) -> None:
    first = powernorm_lab.remove(own(), tmp_path, settings=SHORT, quiet=True)
    before = (tmp_path / "result.json").read_text()
    assert "has another removal: give another --out, --resume" in refused(own(), tmp_path)
    other = [*SHORT, "seed=1"]
    message = refused(own(), tmp_path, settings=other, resume=True)
    assert "settings.seed 0 → 1" in message
    changed = copy.deepcopy(own()[0])
    nn.init.zeros_(changed.head.weight)
    assert "original.weights" in refused((changed, data(12)), tmp_path, settings=SHORT, resume=True)
    assert (tmp_path / "result.json").read_text() == before
    assert isinstance(first, Removed)
    assert powernorm_lab.remove(own(), tmp_path, settings=other, quiet=True, force=True).metrics


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["method.name=none"], "method.name=none is not known"),
        (
            ["distillation.name=logits"],
            "whose outputs are not logits: set distillation.name=hidden",
        ),
        (["distillation.name=none"], "is not known, so that it can only learn from the original"),
        (["distillation.share=0.5"], "distillation.share=0.5: the loss of model is not known"),
        (["training.share=0.1"], "training.share=0.1: the length of model's training is not known"),
        (["training.steps=3", "training.share=0.1"], "cannot be combined with training.steps"),
        (["training.stpes=3"], "did you mean training.steps"),
        (["data.path=rt"], "comes with its own batches: leave out --data"),
        (["data.other=rt"], "comes with its own batches: leave out --other"),
    ],
)
def test_settings_that_do_not_fit_leave_no_folder(
    changes: list[str], words: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert words in refused(own(), out, settings=changes)
    assert not out.exists()


def test_method_that_does_not_fit_is_refused_before_the_training(tmp_path: Path) -> None:
    out, model = tmp_path / "out", (stack(post=True), data(12))
    message = refused(model, out, settings=[*SHORT, "method.name=match-centered"])
    assert "does not fit model: blocks.0.norm1 could not be folded afterwards" in message
    assert not out.exists()
    assert norms_in(powernorm_lab.remove(model, out, settings=SHORT, quiet=True).model) == []


def test_what_is_no_model_is_named(tmp_path: Path, run: Path) -> None:
    out = tmp_path / "out"
    assert "does not exist: give a run" in refused(tmp_path / "nothing", out)
    assert "is not a model: give a run" in refused(tmp_path, out)
    assert "expected (model, batches)" in refused((1, 2), out)
    assert "of which one is held out" in refused((stack(), data(1)), out)
    assert "has no norms: there is nothing to remove" in refused(
        (nn.Linear(8, 8).double(), data()), out
    )
    (tmp_path / "file").touch()
    assert "is a file" in refused(own(), tmp_path / "file")
    shutil.copytree(run, tmp_path / "copy")
    assert "has other files (" in refused(own(), tmp_path / "copy")


def test_saved_model_that_differs_is_refused(tmp_path: Path) -> None:
    other = copy.deepcopy(stack())
    nn.init.zeros_(other.head.weight)
    with pytest.raises(InputError, match="has other outputs after loading"):
        check_agreement(stack(), other, data(1)[0], tmp_path)
