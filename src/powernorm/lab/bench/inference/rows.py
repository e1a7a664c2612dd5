"""Results of encoders as data, and what the project promises of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from powernorm.lab.bench.inference.cases import InferenceCase
from powernorm.runs import placement_words


@dataclass(frozen=True)
class InferenceRow:
    """One provider on one case.

    Attributes:
        provider: `folded`, `identity`, `LayerNorm`, `RMSNorm` or `BatchNorm`.
        engine: `torch` or `onnxruntime`.
        dtype: name of the type.
        layers: of the encoder, as the next four.
        features: size of the features.
        heads: of each attention.
        hidden: size inside the feed-forward networks.
        placement: where the norms stand.
        batch: sequences at a time.
        tokens: of each sequence.
        median_us: microseconds a call, median over the rounds.
        lower_us: first quartile.
        upper_us: third quartile.
        num_samples: timed calls.
        ratio: median over that of torch's LayerNorm in the same rounds.
        ratio_to_identity: median over that of the encoder without norms in the same rounds.
    """

    provider: str
    engine: str
    dtype: str
    layers: int
    features: int
    heads: int
    hidden: int
    placement: str
    batch: int
    tokens: int
    median_us: float
    lower_us: float
    upper_us: float
    num_samples: int
    ratio: float
    ratio_to_identity: float

    @property
    def encoder(self) -> tuple[int, int, str]:
        """Which encoder: layers, features, placement."""
        return (self.layers, self.features, self.placement)

    @property
    def case(self) -> tuple[object, ...]:
        """What was run: rows with the same case belong together."""
        return (*self.encoder, self.batch, self.tokens, self.engine, self.dtype)

    @property
    def title(self) -> str:
        """The encoder in words."""
        return f"{self.layers} layers × {self.features} features, {placement_words(self.placement)}"

    @property
    def way(self) -> str:
        """Input, engine and type in words."""
        return f"{self.batch}×{self.tokens}, {self.engine} {self.dtype}"


def make_rows(case: InferenceCase, samples: Mapping[str, Sequence[float]]) -> list[InferenceRow]:
    """A row for each provider, from seconds a call."""
    medians = {name: statistics.median(seconds) for name, seconds in samples.items()}
    rows = []
    for name, seconds in samples.items():
        lower, _, upper = statistics.quantiles(seconds, n=4)
        rows.append(
            InferenceRow(
                provider=name,
                engine=case.engine,
                dtype=case.dtype,
                layers=case.size.layers,
                features=case.size.features,
                heads=case.size.heads,
                hidden=case.size.hidden,
                placement=case.size.placement,
                batch=case.batch,
                tokens=case.tokens,
                median_us=round(medians[name] * 1e6, 1),
                lower_us=round(lower * 1e6, 1),
                upper_us=round(upper * 1e6, 1),
                num_samples=len(seconds),
                ratio=round(medians[name] / medians["LayerNorm"], 4),
                ratio_to_identity=round(medians[name] / medians["identity"], 4),
            )
        )
    return rows


@dataclass(frozen=True)
class InferenceTarget:
    """The folded encoder takes between `least` and `most` times what a rival takes."""

    rival: str
    most: float
    least: float = 0.0
    batch_of_one: bool = False

    @property
    def label(self) -> str:
        """In words."""
        bounds = f"≤ {self.most:.2f}" if not self.least else f"{self.least:.2f} to {self.most:.2f}"
        return bounds + (" at batch 1" if self.batch_of_one else "")


TARGETS: Final = (
    InferenceTarget("identity", 1.02, 0.98),
    InferenceTarget("LayerNorm", 0.95, batch_of_one=True),
    InferenceTarget("RMSNorm", 0.90),
)


@dataclass(frozen=True)
class InferenceOutcome:
    """The folded encoder against a rival on one case.

    Attributes:
        target: what was promised.
        row: of the folded encoder.
        ratio: its time over the rival's.
    """

    target: InferenceTarget
    row: InferenceRow
    ratio: float

    @property
    def is_promised(self) -> bool:
        """Is there a target for this case?"""
        return self.row.batch == 1 or not self.target.batch_of_one

    @property
    def met(self) -> bool:
        """Is the ratio within the bounds?"""
        return self.target.least <= self.ratio <= self.target.most


def inference_outcomes(rows: Sequence[InferenceRow]) -> list[InferenceOutcome]:
    """Every target on every case, also on those for which it was not promised."""
    found = []
    for _, case in groupby(rows, key=lambda row: row.case):
        by_provider = {row.provider: row for row in case}
        folded = by_provider.get("folded")
        for target in TARGETS:
            rival = by_provider.get(target.rival)
            if folded is not None and rival is not None:
                # To three digits: what is printed is what is judged.
                ratio = round(folded.median_us / rival.median_us, 3)
                found.append(InferenceOutcome(target, folded, ratio))
    return found
