"""Japanese Vowels, and a small Conformer whose convolution norm depends on the arm.

The data are a file in powernorm-data: 270 utterances to train on, 370 to test, 7 to 29 frames of 12
features, of 9 speakers. Every fifth utterance of the training is held out for the tuning.
"""

import lzma
from collections.abc import Iterator
from importlib.resources import files
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import powernorm

NUM_FEATURES, NUM_SPEAKERS = 12, 9
WIDTH, LAYERS, HEADS, KERNEL = 32, 2, 2, 7


class Arm(NamedTuple):
    """Norm of the convolution module, and its treatment of padding."""

    norm: str
    """Short name; `torch` is torch's BatchNorm1d."""
    masked: bool
    """Whether the norm leaves out padding and the convolution reads zeros there."""


ARMS = {
    "ln": Arm("ln", masked=False),
    "bn": Arm("torch", masked=False),
    "bn-masked": Arm("torch", masked=True),
    "rbn": Arm("rbn", masked=True),
    "pn": Arm("pn", masked=True),
    "brn": Arm("brn", masked=True),
    "mabn": Arm("mabn", masked=True),
}
"""`ln` and `bn` are the usual code; `bn-masked` is `bn` after `mask_batch_norms`."""


class Layer(nn.Module):
    """A layer of a Conformer: self-attention, convolution over time, feed-forward network."""

    def __init__(self, conv_norm: nn.Module, *, erases: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(4))
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.gate = nn.Linear(WIDTH, 2 * WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, KERNEL, padding=KERNEL // 2, groups=WIDTH)
        self.conv_norm = conv_norm
        self.out = nn.Linear(WIDTH, WIDTH)
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH)
        )
        self.erases = erases

    def forward(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        """Return the layer's output for x (batch, time, width); the mask is True at padding."""
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, padding_mask, need_weights=False)[0]
        y = F.glu(self.gate(self.norms[1](x))).transpose(1, 2)
        if self.erases:
            y = self.conv_norm(self.conv(y.masked_fill(padding_mask[:, None], 0)), padding_mask)
        else:
            y = self.conv_norm(self.conv(y))
        x = x + self.out(F.silu(y).transpose(1, 2))
        return self.norms[3](x + self.feed_forward(self.norms[2](x)))


class Conformer(nn.Module):
    """Conformer that classifies the speaker of an utterance."""

    def __init__(self, arm: Arm, num_steps: int) -> None:
        super().__init__()
        erases = arm.masked and arm.norm != "torch"
        self.up = nn.Linear(NUM_FEATURES, WIDTH)
        self.layers = nn.ModuleList(
            Layer(_conv_norm(arm.norm, num_steps), erases=erases) for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, NUM_SPEAKERS)

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        """Return the scores (batch, speakers) of padded utterances with `lengths` frames."""
        padding = torch.arange(features.shape[1]) >= lengths[:, None]
        x = self.up(features)
        for layer in self.layers:
            x = layer(x, padding)
        return self.head(x.masked_fill(padding[..., None], 0).sum(1) / lengths[:, None])


def build(arm: Arm, seed: int, num_steps: int) -> Conformer:
    """Return the model of a run; equal seeds give equal weights to all arms."""
    torch.manual_seed(seed)
    model = Conformer(arm, num_steps)
    if arm.masked and arm.norm == "torch":
        powernorm.mask_batch_norms(model)
    return model


def _conv_norm(name: str, num_steps: int) -> nn.Module:
    if name == "torch":
        return nn.BatchNorm1d(WIDTH)
    if name == "ln":
        return powernorm.build_norm("ln", WIDTH, feature_dim=1)
    steps = num_steps // 10  # as in `powernorm compare`: a tenth of the run
    options = {
        "rbn": {"mean_penalty": 0.1, "var_penalty": 0.1},
        "pn": {"warmup_steps": steps},
        "brn": {"warmup_steps": steps, "ramp_steps": steps},
        "mabn": {"warmup_steps": steps, "ratio_start": steps},
    }[name]
    return powernorm.build_norm(name, WIDTH, feature_dim=1, **options)


class Utterances(NamedTuple):
    """Utterances (frames, features), each with its speaker."""

    frames: list[Tensor]
    speakers: Tensor
    length: int | None = None
    """Length to which every batch is padded; None pads to the longest of the batch."""

    @property
    def lengths(self) -> Tensor:
        """Return the number of frames of each."""
        return torch.tensor([len(one) for one in self.frames])

    def chosen(self, rows: Tensor) -> "Utterances":
        """Return the utterances of some rows."""
        return self._replace(
            frames=[self.frames[i] for i in rows.tolist()], speakers=self.speakers[rows]
        )

    def batch(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return features (batch, time, features), padded, lengths and speakers."""
        part = self.chosen(rows)
        features = nn.utils.rnn.pad_sequence(part.frames, True)
        missing = max(0, (self.length or 0) - features.shape[1])
        return F.pad(features, (0, 0, 0, missing)), part.lengths, part.speakers


def read(split: str) -> Utterances:
    """Return the utterances of `train` or `test`."""
    path = files("powernorm_data") / f"asr_japanese-vowels_{split}.ts.xz"
    lines = lzma.decompress(path.read_bytes()).decode().splitlines()
    rows = [line.split(":") for line in lines if line and line[0] not in "#@"]
    frames = [
        torch.tensor([[float(v) for v in one.split(",")] for one in row[:-1]]) for row in rows
    ]
    return Utterances([one.T for one in frames], torch.tensor([int(row[-1]) - 1 for row in rows]))


def batches(
    data: Utterances, size: int, *, is_sorted: bool, generator: torch.Generator
) -> Iterator[Tensor]:
    """Yield the rows of an epoch's batches; sorted batches have utterances of similar length."""
    order = torch.randperm(len(data.frames), generator=generator)
    if is_sorted:
        order = order[data.lengths[order].argsort(stable=True)]
    parts = order[: len(order) // size * size].split(size)
    for number in torch.randperm(len(parts), generator=generator).tolist():
        yield parts[number]
