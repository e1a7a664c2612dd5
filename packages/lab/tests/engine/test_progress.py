from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from powernorm_lab.engine.events import (
    DataPrepared,
    Event,
    Measured,
    RunEnded,
    RunStarted,
    StepsDone,
    logged,
)
from powernorm_lab.engine.progress import ComparisonProgress
from powernorm_lab.runs import Baseline, RunResult, Status


def result(status: Status, perplexity: float | None) -> RunResult:
    return RunResult(
        norm="pn",
        seed=1,
        placement="pre",
        status=status,
        metrics={"test_perplexity": perplexity},
        tid=None,
        seconds=12.3,
        tokens_per_second=None if perplexity is None else 25000.4,
        parameters=5,
        folder="pn-pre-seed1",
    )


def shown(*events: Event, terminal: bool) -> str:
    text = StringIO()
    console = Console(file=text, force_terminal=terminal, width=120, color_system=None)
    with ComparisonProgress(console) as progress:
        for event in events:
            progress(event)
    return text.getvalue()


def test_a_row_of_the_log_is_the_same_event_for_a_run_here_and_of_a_worker() -> None:
    row = {"train_loss": 2.0, "learning_rate": 0.1, "accuracy": 0.5, "valid_loss": None}
    assert list(logged("bn", 1, 7, row, "accuracy")) == [
        StepsDone("bn", 1, 7, 2.0),
        Measured("bn", 1, 7, {"accuracy": 0.5}, "accuracy"),
    ]
    assert list(logged("bn", 1, 7, {"learning_rate": 0.1, "seconds": 2.0}, None)) == []


BASELINES = (Baseline(name="unigram", metrics={"valid_perplexity": 31996.5}),)
EVENTS = (
    DataPrepared("lm_sotu", 1_619_562, "words", 2000, baselines=BASELINES),
    RunStarted("pn", 1, 2, 5, 400, 100),
    StepsDone("pn", 1, 110, 4.25),
    Measured("pn", 1, 200, {"valid_loss": 4.0, "valid_perplexity": 1234.5}),
    RunEnded(result("finished", 1100.25), skipped=False),
)


def test_without_a_terminal_every_event_that_matters_is_a_plain_line() -> None:
    assert shown(*EVENTS, terminal=False).splitlines() == [
        "lm_sotu: 1,619,562 words to train on, 2,000 subwords; "
        "valid perplexity of unigram 31,996.5",
        "[2/5] pn seed 1: 400 steps, from step 100",
        "pn seed 1: step 200, valid loss 4.000, perplexity 1,234.5",
        "pn seed 1: finished, test perplexity 1,100.2, 12 s, 25,000 tokens/s",
    ]


def test_a_terminal_shows_a_bar_and_keeps_the_summary() -> None:
    text = shown(*EVENTS, terminal=True)
    assert "[2/5] pn seed 1" in text
    assert "200/400" in text
    assert "valid perplexity 1,234.5" in text
    assert "25,000 tokens/s" in text


@pytest.mark.parametrize("status", ["nonfinite", "diverged", "failed", "interrupted"])
def test_runs_that_went_wrong_say_so(status: Status) -> None:
    ended = replace(result(status, None), message="RuntimeError: [bold]brackets[/bold]")
    text = shown(RunEnded(ended, skipped=True), terminal=False).strip()
    assert text == f"pn seed 1: {status}, 12 s (RuntimeError: [bold]brackets[/bold]), from before"
