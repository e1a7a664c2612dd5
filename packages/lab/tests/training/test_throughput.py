import pytest

from powernorm_lab.engine import between_steps
from powernorm_lab.engine.between_steps import NUM_SKIPPED_STEPS, Throughput


def test_only_training_time_after_the_start_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(between_steps, "_now", lambda: now)
    meter = Throughput()

    def train(num_steps: int, seconds: float) -> None:
        nonlocal now
        for _ in range(num_steps):
            meter.begin()
            now += seconds
            meter.count(100)
            meter.end()

    assert not meter.total()
    train(NUM_SKIPPED_STEPS, 50.0)  # slow first steps
    train(4, 2.0)
    meter.pause()
    meter.pause()
    now += 1000.0  # a validation
    train(4, 3.0)
    meter.pause()
    assert meter.tokens == 800
    assert meter.seconds == pytest.approx(4 * 2.0 + 4 * 3.0)
    assert meter.total() == {"tokens_per_second": pytest.approx(40.0)}
