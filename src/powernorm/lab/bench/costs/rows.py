"""Costs of norms as data."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from powernorm.lab.bench.costs.cases import BASELINE, RIVALS, CostCase, Rival
from powernorm.runs import placement_words


@dataclass(frozen=True)
class CostRow:
    """One rival in one setting on one case.

    Attributes:
        rival: what stands in the places of the norms.
        setting: of onnxruntime, whether it puts a sum and the norm behind it into one operator:
            `fused` or `unfused`; else empty.
        engine: of the case, as the next nine.
        precision: what is computed in.
        threads: of the engine.
        layers: of the encoder.
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
        ratio: median over that of LayerNorm in its best setting in the same rounds.
        error: root mean square of the difference from the rival's own float32 outputs in torch,
            over that of those.
        peak_bytes: in torch what one call takes at most beyond what is there before, in onnxruntime
            and OpenVINO what a fresh process grows by with model and calls; None with inductor, and
            on more threads than one.
    """

    rival: str
    setting: str
    engine: str
    precision: str
    threads: int
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
    error: float
    peak_bytes: int | None

    @property
    def encoder(self) -> tuple[int, int, str]:
        """Which encoder: layers, features, placement."""
        return (self.layers, self.features, self.placement)

    @property
    def case(self) -> tuple[object, ...]:
        """What was run: rows with the same case belong together."""
        way = (self.engine, self.precision, self.threads)
        return (*self.encoder, self.batch, self.tokens, *way)

    @property
    def title(self) -> str:
        """The encoder in words."""
        return f"{self.layers} layers × {self.features} features, {placement_words(self.placement)}"

    @property
    def way(self) -> str:
        """Engine, precision and threads in words."""
        return f"{self.engine} {self.precision}, {self.threads} thread{'s' * (self.threads > 1)}"


def case_of(case: CostCase) -> tuple[object, ...]:
    """Return what rows of a case have as `CostRow.case`."""
    size = case.size
    encoder = (size.layers, size.features, size.placement)
    return (*encoder, case.batch, case.tokens, case.engine, case.precision, case.threads)


def make_cost_rows(
    case: CostCase,
    samples: Mapping[tuple[Rival, str], Sequence[float]],
    errors: Mapping[tuple[Rival, str], float],
    peaks: Mapping[tuple[Rival, str], int],
) -> list[CostRow]:
    """Return a row for each rival and setting.

    Args:
        case: what was run.
        samples: seconds a call, by rival and setting.
        errors: of the outputs.
        peaks: bytes; those that were not measured are left out.
    """
    medians = {key: statistics.median(seconds) for key, seconds in samples.items()}
    baseline = min(median for (rival, _), median in medians.items() if rival == BASELINE)
    rows = []
    for key, seconds in samples.items():
        lower, _, upper = statistics.quantiles(seconds, n=4)
        rows.append(
            CostRow(
                rival=key[0],
                setting=key[1],
                engine=case.engine,
                precision=case.precision,
                threads=case.threads,
                layers=case.size.layers,
                features=case.size.features,
                heads=case.size.heads,
                hidden=case.size.hidden,
                placement=case.size.placement,
                batch=case.batch,
                tokens=case.tokens,
                median_us=round(medians[key] * 1e6, 1),
                lower_us=round(lower * 1e6, 1),
                upper_us=round(upper * 1e6, 1),
                num_samples=len(seconds),
                ratio=round(medians[key] / baseline, 4),
                error=float(f"{errors[key]:.3g}"),
                peak_bytes=peaks.get(key),
            )
        )
    return rows


def best_rows(rows: Sequence[CostRow]) -> list[CostRow]:
    """Return of each case and rival the row of its fastest setting, in the order of the rivals."""
    order: dict[str, int] = {rival: number for number, rival in enumerate(RIVALS)}
    found = []
    for _, group in groupby(rows, key=lambda row: row.case):
        by_rival: dict[str, CostRow] = {}
        for row in sorted(group, key=lambda row: row.median_us):
            by_rival.setdefault(row.rival, row)
        found += sorted(by_rival.values(), key=lambda row: order[row.rival])
    return found
