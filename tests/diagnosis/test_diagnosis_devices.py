"""`powernorm.diagnose` on another device: which tensors move when, and the operators it needs."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import powernorm
from powernorm.diagnosis import survey
from powernorm.errors import InputError
from powernorm.inspection.devices import moved, placed
from speed.timing import measure_memory

CPU = torch.device("cpu")


class Moving(nn.Sequential):
    """A model that writes down where it is put."""

    def __init__(self, features: int = 6) -> None:
        super().__init__(nn.Linear(features, features), nn.LayerNorm(features))
        self.places: list[str] = []

    def to(self, *args: Any, **kwargs: Any) -> "Moving":
        self.places.append(str(args[0]))
        return super().to(*args, **kwargs)


class MovingBatch:
    """A batch that writes down that it is put somewhere."""

    def __init__(self, x: Tensor, events: list[str]) -> None:
        self.x = x
        self.events = events

    def to(self, device: torch.device) -> "MovingBatch":
        self.events.append(f"to {device}")
        self.x = self.x.to(device)
        return self


def test_a_batch_is_moved_when_its_turn_comes_and_the_model_back_afterwards() -> None:
    model, events = Moving(), list[str]()
    given = [MovingBatch(torch.randn(8, 6), events) for _ in range(3)]
    before = [batch.x for batch in given]

    def forward(model: nn.Module, batch: MovingBatch) -> object:
        events.append("forward")
        return model(batch.x)

    powernorm.diagnose(model, given, forward, device="cpu")
    assert events == ["to cpu", "forward"] * 6
    assert model.places == ["cpu", "cpu"]
    # Hugging Face's `to` changes the batch itself: the user's stays where it was.
    assert all(batch.x is x for batch, x in zip(given, before, strict=True))


def test_the_model_is_put_back_after_an_error() -> None:
    model = Moving()
    with pytest.raises(InputError, match="holds NaN or infinite values in batch 1"):
        powernorm.diagnose(model, [torch.randn(4, 6), torch.full((4, 6), torch.nan)], device="cpu")
    assert model.places == ["cpu", "cpu"]


class Named(NamedTuple):
    x: Tensor
    name: str


def test_batches_keep_their_structure() -> None:
    x = torch.randn(2)
    found = moved([{"a": x, "b": (x, None)}, Named(x, "first")], torch.device("meta"))
    assert isinstance(found, list)
    assert found[0]["a"].is_meta
    assert found[0]["b"][0].is_meta
    assert found[0]["b"][1] is None
    assert isinstance(found[1], Named)
    assert found[1].x.is_meta
    assert found[1].name == "first"
    assert not x.is_meta


@pytest.mark.parametrize(
    ("device", "words"),
    [
        ("cuda:93", "'cuda:93', which this machine does not have"),
        ("meta", "'meta', which this machine does not have"),
        ("gpu", "'gpu', expected auto, cpu, cuda or cuda:1"),
        (-5, "-5, expected auto"),
    ],
)
def test_a_device_that_is_not_there(device: Any, words: str) -> None:
    model = Moving()
    with pytest.raises(InputError, match=words) as caught:
        powernorm.diagnose(model, [torch.randn(4, 6)] * 2, device=device)
    assert "\n" not in str(caught.value)
    assert model.places == []


def test_a_model_on_several_devices_stays_there() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    with (
        pytest.raises(InputError, match="is on cpu and meta: leave out device"),
        placed(model, CPU),
    ):
        pass


def test_a_device_without_float64_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS has none: what the norms see is brought to the CPU."""
    torch.manual_seed(0)
    model = powernorm.BatchNorm(6)
    given = [torch.randn(40, 6) for _ in range(3)]
    expected = powernorm.diagnose(model, given, batch_sizes=(8, 16))
    monkeypatch.setattr(survey, "has_float64", lambda _: False)
    assert powernorm.diagnose(model, given, batch_sizes=(8, 16)) == expected


class Drawn:
    """Batches that are made when they are asked for, so that none stays."""

    def __init__(self, number: int, features: int) -> None:
        self.number = number
        self.features = features

    def __iter__(self) -> Iterator[Tensor]:
        for seed in range(self.number):
            yield torch.randn(512, self.features, generator=torch.Generator().manual_seed(seed))


def peak(number: int, features: int, num_norms: int) -> int:
    model = nn.Sequential(*(nn.LayerNorm(features) for _ in range(num_norms)))

    def step(between: object = None) -> None:
        del between
        powernorm.diagnose(model, Drawn(number, features), batch_sizes=())

    return measure_memory({"it": step})["it"].peak


def test_memory_does_not_grow_with_the_number_of_batches() -> None:
    few, many = (peak(number, 32, 2) for number in (3, 24))
    assert many <= few + 20_000


def test_a_norm_takes_the_memory_of_its_covariance() -> None:
    """C² float64, as the documentation says; the rest is of one norm at a time."""
    features = 256
    one, nine = (peak(3, features, num_norms) for num_norms in (1, 9))
    covariance = 8 * features**2
    assert 8 * covariance <= nine - one <= 8 * covariance * 1.3


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["ln", "bn", "pn"])
def test_a_gpu_finds_what_the_cpu_finds(norm: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(50, 32), nn.Linear(32, 32), powernorm.build_norm(norm, 32), nn.Linear(32, 4)
    )
    given = [torch.randint(50, (8, 40)) for _ in range(6)]
    expected = powernorm.diagnose(model, given, device="cpu")
    torch.cuda.reset_peak_memory_stats()
    found = powernorm.diagnose(model, given, device="cuda")
    assert torch.cuda.max_memory_allocated() > 0
    assert all(parameter.device == CPU for parameter in model.parameters())
    assert all(x.device == CPU for x in given)
    for row, twin in zip(expected.rows, found.rows, strict=True):
        assert (row.name, row.verdict) == (twin.name, twin.verdict)
        for name in ("mean_tid", "var_tid", "pn_tid", "kappa_50", "lambda_1", "outlier_ratio"):
            wanted: float | None = getattr(row, name)
            assert getattr(twin, name) == (
                None if wanted is None else pytest.approx(wanted, rel=1e-3)
            )
    for spectrum, twin_spectrum in zip(expected.spectra, found.spectra, strict=True):
        assert twin_spectrum["values"] == pytest.approx(spectrum["values"], abs=1e-6)
