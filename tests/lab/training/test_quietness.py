import logging
import signal
import warnings

import pytest

from powernorm.lab.training.quietness import quiet_lightning, raised_interrupts


def test_lightning_is_quiet_inside_and_as_before_outside() -> None:
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    with quiet_lightning():
        assert not logging.getLogger("lightning.pytorch.trainer").isEnabledFor(logging.INFO)
        assert logger.isEnabledFor(logging.ERROR)
    assert logger.level == before


def test_only_expected_warnings_are_silenced() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with quiet_lightning():
            warnings.warn("GPU available but not used. Set it.", UserWarning, stacklevel=1)
        with quiet_lightning(), pytest.warns(UserWarning, match="matters"):
            warnings.warn("this one matters", UserWarning, stacklevel=1)
    assert not [str(warning.message) for warning in seen]


def test_interrupt_in_lightning_comes_out_as_an_interrupt() -> None:
    def fit() -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:  # what Lightning does
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise SystemExit(1)  # noqa: B904

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), raised_interrupts():
        fit()
    assert signal.getsignal(signal.SIGINT) is handler


def test_other_exits_and_errors_pass() -> None:
    with pytest.raises(SystemExit), raised_interrupts():
        raise SystemExit(3)
    with pytest.raises(ValueError, match="x"), raised_interrupts():
        raise ValueError("x")
