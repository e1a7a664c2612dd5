"""Settings of the study, as tables of their differences.

Each asks a practitioner's question: would BatchNorm do better than LayerNorm in a model that was
tuned for LayerNorm? The settings differ in properties that are known to matter: task and text,
placement, depth, tokens in a batch. All norms of a setting share everything else, including the
learning rate.
"""

from dataclasses import dataclass

RUNS = [(("ln", "bn"), (0, 1)), (("rbn", "pn"), (0,))]
"""Norms and seeds of every setting."""

# Task, text, tokens per row, and rows per batch by shape. Batches differ between texts, so that the
# effects of text and batch can be separated. All have 1,000 subwords or words.
TEXTS = {
    "lm-sotu": ("lm", "sotu", 32, {"small": 2, "big": 64, "deep": 8, "wide": 16}),
    "tag-petrogold": ("tag", "petrogold", 48, {"small": 4, "big": 32, "deep": 16, "wide": 8}),
    "lm-verses": ("lm", "verses-de", 32, {"small": 4, "big": 32, "deep": 16, "wide": 8}),
    "tag-turkish": ("tag", "turkish", 48, {"small": 4, "big": 64, "deep": 8, "wide": 16}),
}

# Features, layers, and the learning rate by placement: LayerNorm's best on the valid split of the
# addresses (lm, seed 0, 1,000 subwords). Its loss in nats per token at the rates 1e-3, 2e-3, 4e-3,
# 8e-3, 1.6e-2; a dash where not tried, an asterisk where the run had a third more updates:
#   small  pre   –      4.811  4.580  4.498  –           post  5.174  4.846  4.655  –
#   big    pre   –      –      4.097* 3.939* 3.977       post  –      4.383* 4.255  4.051
#   deep   pre   –      4.510* 4.467  4.355  –           post  5.326  5.331  –      –
#   wide   pre   –      4.303* 4.299  4.241  –           post  4.992  4.793  –      –
# Seven of the eight best rates are at the edge of the tried range (all but big/pre): LayerNorm and
# the other norms may do better at other rates.
SHAPES = {
    "small": (64, 2, {"pre": 8e-3, "post": 4e-3}),
    "big": (64, 2, {"pre": 8e-3, "post": 8e-3}),
    "deep": (64, 6, {"pre": 8e-3, "post": 1e-3}),
    "wide": (128, 3, {"pre": 8e-3, "post": 2e-3}),
}

VOCABULARY = 1000
"""Subwords or words."""

# Updates by rows per batch, so that all runs take about equally long. They are few: the study
# compares the norms after this number of updates, not at convergence.
STEPS = {2: 1200, 4: 1000, 8: 600, 16: 400, 32: 400, 64: 300}


@dataclass(frozen=True)
class Setting:
    """A setting that is trained with each norm."""

    group: str
    """Task and text."""
    task: str
    corpus: str
    length: int
    """Largest number of tokens in a row."""
    batch_size: int
    """Rows per batch."""
    num_features: int
    num_layers: int
    placement: str
    learning_rate: float
    max_steps: int

    @property
    def name(self) -> str:
        """Return the name by which a setting is chosen."""
        shape = f"{self.num_features}x{self.num_layers}"
        return f"{self.group}-{self.placement}-{shape}-{self.batch_size}rows"

    @property
    def early_step(self) -> int:
        """Return the step after which the runs are diagnosed."""
        return max(1, round(0.1 * self.max_steps))


def settings() -> dict[str, Setting]:
    """Return all combinations by name, in an order in which every prefix is mixed."""
    found = [
        _setting(group, list(SHAPES)[(index + turn) % len(SHAPES)], placement)
        for turn in range(len(SHAPES))
        for placement in ("pre", "post")
        for index, group in enumerate(TEXTS)
    ]
    return {setting.name: setting for setting in found}


def _setting(group: str, shape: str, placement: str) -> Setting:
    task, corpus, length, batch_sizes = TEXTS[group]
    width, depth, rates = SHAPES[shape]
    rows = batch_sizes[shape]
    steps, rate = STEPS[rows], rates[placement]
    return Setting(
        group, task, corpus, length, rows, width, depth, placement, rate, max_steps=steps
    )
