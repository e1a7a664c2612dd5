"""Settings of all tasks, and the optimizers and schedules that they choose."""

import pytest
import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm_lab.data.batch import IGNORED
from powernorm_lab.recipes import paths_of, recipe
from powernorm_lab.runs import TASKS as NAMES
from powernorm_lab.settings.overrides import known_keys, override
from powernorm_lab.settings.training import OptimizerSettings, ScheduleSettings
from powernorm_lab.tasks.builtin import check_norms
from powernorm_lab.tasks.registry import CLASSES, settings_of
from powernorm_lab.training.losses import outputs_nll, training_losses
from powernorm_lab.training.optimization import build_optimizer, rate_factor

OTHERS = {
    "data.batch_size": "8",
    "data.batch_tokens": "9",
    "data.evaluation_batch_size": "8",
    "data.languages": "de-en",
    "data.sequence_length": "8",
    "data.vocabulary_size": "300",
    "data.max_examples": "10",
    "data.vectors": "vectors.txt",
    "data.augmentation": "true",
    "model.adaptive_cutoffs": "280",
    "model.architecture": "tensorized",
    "model.memory_length": "8",
    "model.num_features": "64",
    "model.num_heads": "2",
    "model.num_norm_layers": "1",
    "model.placement": "post",
    "model.sees_future": "true",
    "model.character_features": "4",
    "model.pooling": "max",
    "decoding.beam_size": "2",
    "training.score_every": "1",
    "training.select_by": "score",
}
"""Settings that some tasks lack."""


def test_every_task_has_settings_and_recipes() -> None:
    assert list(CLASSES) == list(NAMES)
    assert all(paths_of(task) for task in CLASSES)


@pytest.mark.parametrize("task", CLASSES)
def test_settings_of_other_tasks_are_refused(task: str) -> None:
    config = recipe(task, "demo")
    known = known_keys(settings_of(task))
    foreign = {key: value for key, value in OTHERS.items() if key not in known}
    assert foreign
    for key, value in foreign.items():
        with pytest.raises(InputError, match=f"'{key}' is not a setting of the task {task}"):
            override(config, [f"{key}={value}"])


@pytest.mark.parametrize(
    ("task", "least"),
    [
        *(("lm", 257), ("translation", 257)),
        *(("ner", 3), ("classify", 3), ("parse", 4)),
    ],
)
def test_a_vocabulary_is_as_large_as_its_kind_needs(task: str, least: int) -> None:
    """Subwords need all bytes; words need only marks and one word."""
    config = recipe(task, "smoke")
    override(config, [f"data.vocabulary_size={least}"])
    message = f"data.vocabulary_size={least - 1} is too small: give at least {least}"
    with pytest.raises(InputError, match=message):
        override(config, [f"data.vocabulary_size={least - 1}"])


TENSORIZED = ("model.architecture=tensorized", "model.num_heads=1")
PLAIN = ("model.architecture=plain", "model.head_features=none")
SPLIT = ("data.subwords=split", "data.vocabulary_size=none", "data.joint_vocabulary=false")
PIECES = ("data.subwords=a.model", *SPLIT[1:], "model.shared_embeddings=none")

REFUSED: list[tuple[str, tuple[str, ...], str]] = [
    ("lm", ("schedule.warmup_fraction=1.5",), "schedule.warmup_fraction"),
    ("lm", ("optimizer.name=lion",), "optimizer.name"),
    ("lm", ("model.activation=sum",), "model.activation"),
    (
        "image",
        ("optimizer.momentum=0.5",),
        "momentum=0.5 has no effect with .*: set opt",
    ),
    ("lm", ("optimizer.name=muon", "optimizer.momentum=0.8"), "set optimizer.name=sgd"),
    ("lm", ("optimizer.name=muon", "training.strategy=fsdp2"), "needs whole matrices"),
    # Scores
    ("translation", ("training.select_by=score",), "training.select_by=score needs scores"),
    ("classify", ("training.score_every=0",), "training.select_by=score needs scores"),
    ("image", ("training.select_by=bleu",), "training.select_by=bleu is not known"),
    # Diagnoses
    ("lm", ("training.diagnose_every=epochs",), "diagnose_every=epochs is not an interval: give a"),
    ("lm", ("training.diagnose_every=-1",), "diagnose_every=-1 is not an interval"),
    ("lm", ("training.diagnose_every=2.5",), "diagnose_every=2.5 is not an interval"),
    ("lm", ("training.diagnose_every=true",), "diagnose_every=true is not an interval"),
    ("lm", ("training.diagnose_every=5", "training.strategy=fsdp2"), "needs the whole model in ev"),
    ("lm", ("training.tid_batches=1",), "tid_batches=1 compares one batch with itself"),
    ("lm", ("training.tid_batches=0", "training.record_scales=true"), "true needs batches"),
    ("image", ("training.tid_batches=1",), "tid_batches=1 compares one batch with itself"),
    ("image", ("training.tid_batches=0", "training.record_scales=true"), "true needs batches"),
    ("image", ("training.diagnose_every=2", "training.strategy=fsdp2"), "fsdp2 divides it"),
    # Placements
    ("lm", ("model.placement=peri-ln",), "choose one of pre, post, sandwich, peri, out, mix"),
    ("lm", (*PLAIN, "model.qk_norm=rms"), "choose one of per_head, whole"),
    ("lm", (*PLAIN, "model.qk_norm_type=bn"), r"set model\.qk_norm to per_head or whole"),
    ("lm", (*TENSORIZED, "model.placement=normformer"), "tensorized attention"),
    ("lm", (*TENSORIZED, "model.placement=bn-linear"), "tensorized attention"),
    ("lm", (*TENSORIZED, "model.qk_norm=whole"), r"set model\.qk_norm=none"),
    ("lm-char", ("model.placement=bn-linear",), "attention to a memory"),
    ("ner", ("model.qk_norm=per_head",), "directional attention"),
    # Models
    ("lm", (*TENSORIZED[:1], "model.num_heads=2"), "model.num_heads=2 does not fit the tensorized"),
    (
        "lm",
        (PLAIN[0], "model.head_features=5"),
        "model.head_features=5 does not apply to the plain",
    ),
    ("lm", (*PLAIN, "model.sees_future=true"), "sees_future=true does not apply to the plain .*=t"),
    ("lm", ("model.architecture=resnet20",), "resnet20 is not known: choose one of plain, t"),
    (
        "lm",
        ("model.adaptive_cutoffs=40,150", "training.label_smoothing=0.1"),
        "label_smoothing=0.1 needs the probabilities .* set it to 0, or",
    ),
    (
        "lm",
        ("model.adaptive_cutoffs=40", "training.strategy=fsdp2"),
        "process runs only those clusters of an adaptive softmax .* use ddp",
    ),
    ("lm-char", ("model.memory_length=-1",), "model.memory_length=-1 is too small"),
    ("lm-char", ("model.num_heads=7",), "num_heads=7 does not divide"),
    ("image", ("model.architecture=tensorized",), "tensorized is not known: choose one of convnet"),
    ("sequences", ("model.kernel_size=4",), "kernel_size=4 has no middle frame: give an odd numb"),
    ("sequences", ("model.placement=post",), "=post does not apply to model.architecture=conform"),
    (
        "sequences",
        ("model.patch_length=8",),
        "not apply to model.architecture=conformer: .* patch",
    ),
    (
        "sequences",
        ("model.architecture=encoder", "model.mask_padding=false"),
        "mask_padding=false does not apply to model.architecture=encoder: .* conformer",
    ),
    # Data
    (
        "translation",
        ("data.batch_tokens=none",),
        "='none' has the wrong type: expected a whole numb",
    ),
    (
        "translation",
        ("model.final_norm=bn", "model.placement=post"),
        "=bn does not apply",
    ),
    ("translation", ("data.target_vocabulary_size=290",), "data.target_vocabulary_size=290"),
    ("translation", SPLIT[:1], "vocabulary_size=500 is the number of learned subwords, but"),
    ("translation", SPLIT[1:2], "vocabulary_size=none is the number of learned subwords:"),
    ("translation", SPLIT[2:], "is for subwords that are not learned: give"),
    ("translation", SPLIT, r"cannot share a table .*: set model\.shared_embeddings"),
    ("translation", PIECES, "does not fit one model of SentencePiece"),
    (
        "classify",
        ("data.batch_tokens=128", "data.batch_size=8"),
        r"data\.batch_size=8 does not apply with .*batch_tokens=128",
    ),
    (
        "classify",
        ("data.batch_tokens=128", "data.evaluation_batch_size=8"),
        r"data\.evaluation_batch_size=8 does not apply with .*batch_tokens=128",
    ),
    # Norms of every width in the model
    ("translation", ("model.decoder_norm=batch",), "unknown norm 'batch'"),
    ("translation", ("norms=bn", "norm_options.bn.speed=3"), "speed"),
    ("translation", ("model.decoder_norm=bn", "norm_options.bn.groups=3"), "3"),
    ("image", ("norms=bn", "norm_options.bn.groups=3"), "expected a divisor of the 500 features"),
    ("image", ("norms=bn", "norm_options.bn.feature_dim=2"), "the model defines .* leave it out"),
    (
        "image",
        ("model.architecture=resnet20", "norms=pn", "norm_options.pn.groups=32"),
        "groups",
    ),
    ("parse", ("norms=bn", "norm_options.bn.groups=5"), "groups is 5, expected a divisor of the"),
    ("parse", ("norms=bn", "norm_options.bn.alpha=1"), "has no option 'alpha'"),
    ("lm", (*PLAIN, "model.qk_norm=whole", "model.qk_norm_type=rsm"), "rsm"),
    (
        "lm",
        (
            *PLAIN,
            *("model.num_heads=4", "norms=bn", "model.qk_norm=per_head"),
            *("model.qk_norm_type=same", "norm_options.bn.groups=64"),
        ),
        "groups",
    ),
]


@pytest.mark.parametrize(("task", "assignments", "message"), REFUSED, ids=str)
def test_settings_that_mean_nothing_or_do_not_fit_are_refused(
    task: str, assignments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_norms(override(recipe(task, "smoke"), assignments))


@pytest.mark.parametrize(
    ("task", "assignments"),
    [
        ("image", ("optimizer.momentum=0.5", "optimizer.name=sgd")),
        (
            "classify",
            ("data.batch_tokens=none", "data.batch_size=8", "data.evaluation_batch_size=8"),
        ),
        # The network has 500 features, not those of other tasks' models.
        ("image", ("norms=pn", "norm_options.pn.groups=5")),
        ("image", ("model.architecture=resnet20", "norms=pn", "norm_options.pn.groups=16")),
    ],
)
def test_settings_that_fit_are_taken(task: str, assignments: tuple[str, ...]) -> None:
    check_norms(override(recipe(task, "smoke"), assignments))


@pytest.mark.parametrize("name", ["adam", "sgd", "adagrad"])
def test_optimisers_go_downhill_and_decay_matrices_only(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    config = OptimizerSettings(name=name, learning_rate=0.05, weight_decay=0.1, clip_norm=None)  # type: ignore[arg-type]
    optimizer = build_optimizer(model, config)
    assert sorted(group["weight_decay"] for group in optimizer.param_groups) == [0.0, 0.1]
    x, y = torch.randn(32, 4), torch.randn(32, 4)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_sgd_has_the_momentum_that_is_set() -> None:
    config = OptimizerSettings(name="sgd", momentum=0.5)
    assert build_optimizer(nn.Linear(2, 2), config).param_groups[0]["momentum"] == 0.5


def test_a_rate_that_falls_in_steps() -> None:
    schedule = ScheduleSettings(name="steps", warmup_fraction=0.0)
    factors = [rate_factor(schedule, step, 8) for step in range(8)]
    assert factors == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])


class Halved(nn.Module):
    """A model with its own likelihood."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs[targets != IGNORED].sum() / 2


def test_a_model_may_have_a_likelihood_of_its_own() -> None:
    outputs = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    targets = torch.tensor([0, IGNORED, 1])
    minimized, plain = training_losses(Halved(), outputs, targets, 0.0)
    assert float(minimized.detach()) == float(plain) == 2.5
    assert minimized.requires_grad
    assert not plain.requires_grad
    assert float(outputs_nll(Halved(), outputs, targets).detach()) == 2.5


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_classes_are_in_the_last_dimension(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(*shape, 4)
    targets = torch.randint(4, shape)
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None]).sum()
    minimized, plain = training_losses(nn.Identity(), logits, targets, 0.0)
    for found in (minimized, plain, outputs_nll(nn.Identity(), logits, targets)):
        torch.testing.assert_close(found, expected)
