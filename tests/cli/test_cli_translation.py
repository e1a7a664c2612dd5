"""`powernorm translate`, and comparisons of translation in several processes."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner, Result

from lab.training.tiny_training import tiny_config
from lab.training.tiny_translation import tiny_translation, write_pairs
from powernorm.cli import launching
from powernorm.cli import translate as translating
from powernorm.cli.commands import app
from powernorm.errors import InputError
from powernorm.lab.data.subwords import Subwords
from powernorm.lab.engine.stopping import EXIT_CODE
from powernorm.lab.tasks.builtin import compare

SECONDS = 240
"""After which a subprocess counts as hung; far more than it needs."""


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POWERNORM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def trained(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run whose average of checkpoints was scored."""
    out = tmp_path_factory.mktemp("trained")
    compare(
        tiny_translation(
            pairs, norms=("bn",), training={"average_checkpoints": 2, "max_steps": 40}
        ),
        out,
    )
    return out / "bn-pre-seed0"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it that may be damaged."""
    copy = tmp_path / "comparison" / trained.name
    shutil.copytree(trained, copy)
    return copy


def translate(text: str | bytes, *arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["translate", *map(str, arguments)], input=text)


def lines(text: str | bytes, *arguments: str | Path) -> list[str]:
    result = translate(text, *arguments)
    assert result.exception is None, result.exception
    return result.stdout.split("\n")[:-1]


def refusal(text: str | bytes, *arguments: str | Path) -> str:
    result = translate(text, *arguments)
    assert isinstance(result.exception, InputError), result.output
    message = str(result.exception)
    assert len(message) < 400
    return message


def test_a_run_translates_as_it_was_scored(trained: Path, pairs: Path) -> None:
    source = (pairs / "test.de").read_text()
    rows = [row.split("\t") for row in (trained / "translations.tsv").read_text().splitlines()[1:]]
    got = lines(source, trained)
    assert got == [row[2] for row in rows]
    assert any(got)
    assert lines(source, trained / "checkpoints" / "average.safetensors") == got
    assert lines(source, trained, "--beam", "2", "--device", "cpu") == got
    snapshot = trained / "checkpoints" / "step-36.safetensors"
    for part in (trained / "checkpoints" / "best.ckpt", snapshot):
        assert len(lines(source, part)) == len(got)


def test_a_folded_model_translates_wherever_it_is(
    trained: Path, pairs: Path, tmp_path: Path
) -> None:
    source = (pairs / "test.de").read_text()
    for folder in (tmp_path / "folded", tmp_path / "checkpoints" / "folded"):
        done = CliRunner().invoke(app, ["fold", str(trained), "--out", str(folder)])
        assert done.exception is None, done.exception
        assert lines(source, folder) == lines(source, trained)


def test_lines_keep_their_order_over_portions(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("null", "eins", "zwei", "drei vier neun", "", "neun eins zwei null drei vier", " \t")
    whole = lines("\n".join(words), trained)
    assert [bool(line) for line in whole] == [bool(line.strip()) for line in words]
    assert whole == [lines(f"{line}\n", trained)[0] for line in words]
    monkeypatch.setattr(translating, "PORTION", 3)
    assert lines("\r\n".join(words), trained) == whole
    assert lines("", trained) == []


def test_scores_and_several_translations(trained: Path) -> None:
    best = lines("eins zwei\n\n", trained)
    scored = lines("eins zwei\n\n", trained, "--scores", "--n-best", "3")
    assert len(scored) == 6
    cells = [line.split("\t") for line in scored]
    scores = [float(score) for score, _ in cells]
    assert scores[:3] == sorted(scores[:3], reverse=True)
    assert scores[0] < 0
    assert len({text for _, text in cells[:3]}) == 3
    assert [text for _, text in cells[3:]] == ["", "", ""]
    assert lines("eins zwei\n\n", trained, "--beam", "3") == [cells[0][1], ""] != best[:0]
    message = refusal("eins\n", trained, "--n-best", "3", "--beam", "2")
    assert message == "--n-best 3 is more than the beam of 2: give a larger --beam"


def test_a_translation_is_one_line(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A subword may be any byte."""
    monkeypatch.setattr(Subwords, "decode", lambda _, rows: ["a\nb\u2028c\td\r"] * len(rows))
    assert lines("eins\nzwei\n", trained) == ["a b c d", "a b c d"]


def test_a_line_that_is_too_long_is_cut_and_said(trained: Path) -> None:
    result = translate("eins\n" + "null " * 50_000 + "\nzwei\n", trained)
    assert result.exception is None
    assert result.stdout.count("\n") == 3
    assert re.fullmatch(
        r"standard input, line 2: \d{5,} subwords, of which the first 31 are translated\n",
        result.stderr,
    )


def test_bytes_that_are_no_text_are_named(trained: Path) -> None:
    message = refusal(b"eins\nzwei\ndr\xffei\n", trained)
    assert "standard input, line 3: byte 0xff is not UTF-8 text" in message


def test_what_is_not_a_translation_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"The number {n} comes before {n + 1}." for n in range(600)))
    compare(tiny_config(str(text)), tmp_path / "lm")
    message = refusal("eins\n", tmp_path / "lm" / "ln-pre-seed0")
    assert message.endswith("is a run of the task lm, which does not translate")
    assert "is no run of `powernorm compare`" in refusal("eins\n", tmp_path)
    assert "is no run of `powernorm compare`" in refusal("eins\n", text)


def test_damaged_files_are_named(run: Path) -> None:
    average = run / "checkpoints" / "average.safetensors"
    content = average.read_bytes()
    for damaged in (content[:-100], b"garbage", b""):
        average.write_bytes(damaged)
        assert "average.safetensors is damaged" in refusal("eins\n", run)
    average.write_bytes(content)
    subwords = run / "subwords.json"
    record = subwords.read_text()
    for damaged in (record[: len(record) // 2], "", "[]"):
        subwords.write_text(damaged)
        assert str(subwords) in refusal("eins\n", run)
    changed = json.loads(record)
    changed["source"] = changed["source"][:1000]
    for wrong in ({}, changed):
        subwords.write_text(json.dumps(wrong))
        assert f"{subwords} holds no subwords" in refusal("eins\n", run)
    subwords.unlink()
    assert f"{subwords} is missing" in refusal("eins\n", run)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(trained: Path) -> None:
    assert "finds no CUDA device" in refusal("eins\n", trained, "--device", "cuda")
    assert "--device 'tpu' is not known" in refusal("eins\n", trained, "--device", "tpu")


def arguments(*parts: str | Path) -> list[str]:
    return [sys.executable, "-m", "powernorm", *map(str, parts)]


def test_a_reader_that_has_enough_ends_it_quietly(trained: Path, tmp_path: Path) -> None:
    """And what is printed is UTF-8, whatever the machine's encoding."""
    (tmp_path / "source").write_text("eins zwei\n" * 5000)
    with (
        (tmp_path / "source").open() as source,
        subprocess.Popen(
            arguments("translate", trained),
            stdin=source,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONIOENCODING": "ascii"},
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        error = process.stderr.read().decode()
        code = process.wait(SECONDS)
    assert (code, error) == (141, "")


# Several processes -------------------------------------------------------------------------------

FAULT = """
import os, signal
if os.environ.get("RANK") == "1" and os.environ.get("FAULT"):
    import powernorm.lab.training.losses as losses
    real = losses.TrainingLoss.forward
    number = 0

    def forward(self, batch):
        global number
        number += 1
        if number == 10:
            exec(os.environ["FAULT"])
        return real(self, batch)

    losses.TrainingLoss.forward = forward
"""


def comparison(pairs: Path, *more: str | Path) -> list[str]:
    settings = {
        "data.languages": "de-en",
        "data.vocabulary_size": "290",
        "data.batch_tokens": "48",
        "model.num_features": "16",
        "training.max_steps": "12",
        "training.log_every": "2",
        "training.validate_every": "4",
        "training.tid_batches": "2",
        "training.accelerator": "cpu",
    }
    chosen = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    preset = ("compare", "translation", "--preset", "smoke", "--norms", "pn", "--data", pairs)
    return arguments(*preset, *chosen, "--out", "runs", *more)


def start(folder: Path, command: list[str], fault: str = "") -> subprocess.Popen[str]:
    (folder / "sitecustomize.py").write_text(FAULT)
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(folder), "FAULT": fault, "COLUMNS": "80"},
    )


@pytest.mark.distributed
def test_a_lost_process_ends_all(pairs: Path, tmp_path: Path) -> None:
    command = comparison(pairs, "--devices", "2")
    fault = "os.kill(os.getpid(), signal.SIGKILL)"
    process = start(tmp_path, [*command, "--force"], fault)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, err
    assert "Traceback" not in err
    said = err.splitlines()[-1]
    assert said.startswith(
        "error: process 1 of 2 was lost (SIGKILL), and the others were stopped; go on with: "
        "powernorm compare translation"
    )
    assert said.endswith("--out runs --devices 2 --resume")
    assert len([line for line in err.splitlines() if line.startswith("error")]) == 1
    content = tmp_path / "runs" / "pn-pre-seed0" / "checkpoints" / "last.ckpt"
    assert torch.load(content, weights_only=True)["step"] == 8


@pytest.mark.parametrize(
    ("ends", "first"),
    [
        # (exit code, second) of each process.
        ([(-signal.SIGTERM, 5), (-signal.SIGKILL, 5)], 1),
        ([(-signal.SIGTERM, 4), (-signal.SIGKILL, 5)], 1),
        ([(launching.LOST_ANOTHER, 4), (7, 5)], 1),
        ([(launching.LOST_ANOTHER, 4), (-signal.SIGTERM, 5)], 1),
        ([(EXIT_CODE, 4), (-signal.SIGKILL, 5)], 1),
        ([(launching.LOST_ANOTHER, 4), (EXIT_CODE, 5)], 1),
        ([(EXIT_CODE, 5), (EXIT_CODE, 5)], 0),
        ([(7, 6), (9, 5)], 1),
        ([(7, 5), (9, 5)], 0),
        ([(-signal.SIGTERM, 5), (-signal.SIGTERM, 5)], 0),
    ],
)
def test_the_process_that_the_others_ended_with(ends: list[tuple[int, int]], first: int) -> None:
    failures = {
        rank: SimpleNamespace(exitcode=exitcode, timestamp=timestamp)
        for rank, (exitcode, timestamp) in enumerate(ends)
    }
    assert launching.first_to_fail(failures) == first  # type: ignore[arg-type]


@pytest.mark.distributed
@pytest.mark.slow
def test_two_processes_go_on_to_the_report(pairs: Path, tmp_path: Path) -> None:
    command = comparison(pairs, "--devices", "2")
    process = start(tmp_path, command, "os.kill(os.getpid(), signal.SIGKILL)")
    process.communicate(timeout=SECONDS)
    process = start(tmp_path, [*command, "--resume"])
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    assert "12 steps, from step 8" in err
    assert "report: runs/report.html" in out
    results = json.loads((tmp_path / "runs" / "results.json").read_text())
    (run,) = results["runs"]
    assert run["status"] == "finished"
    assert results["settings"]["machine"]["num_processes"] == 2
    assert run["metrics"]["test_bleu"] is not None


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "code", "message"),
    [
        ('raise RuntimeError("boom")', 1, r"error: process 1 of 2 failed \(exit code 1\), and"),
        ("os._exit(7)", 1, r"error: process 1 of 2 failed \(exit code 7\), and"),
        (
            'from powernorm.errors import InputError; raise InputError("odd input")',
            2,
            "error in process 1: odd input",
        ),
    ],
    ids=["exception", "exit", "bad input"],
)
def test_a_process_that_fails_ends_all(
    pairs: Path, tmp_path: Path, fault: str, code: int, message: str
) -> None:
    process = start(tmp_path, comparison(pairs, "--devices", "2"), fault)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == code, err
    assert re.match(message, err.splitlines()[-1]), err
    assert ("boom" in err) == ("boom" in fault)


@pytest.mark.distributed
@pytest.mark.slow
def test_interrupted_processes_end_with_one_message(pairs: Path, tmp_path: Path) -> None:
    command = comparison(pairs, "--devices", "2", "--set", "training.max_steps=4000")
    process = start(tmp_path, command)
    assert process.stderr is not None
    for line in process.stderr:
        if "step 12," in line:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    lines = [line for line in err.splitlines() if not line.startswith("pn seed 0: step")]
    assert len(lines) == 1, err
    assert lines[0].startswith("interrupted; go on with: powernorm compare translation")
    assert lines[0].endswith("--resume")
    assert torch.load(tmp_path / "runs/pn-pre-seed0/checkpoints/last.ckpt", weights_only=True)


def test_bad_settings_are_said_once_before_processes_start(
    pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    monkeypatch.setattr(launching, "launch", lambda *_: started.append(1))
    base = ["compare", "translation", "--preset", "smoke", "--data", str(pairs), "--devices", "2"]
    for parts, message in (
        (["--norms", "ln,pm"], "unknown norm 'pm'"),
        (["--set", "model.decoder_norm=pm"], "unknown norm 'pm'"),
    ):
        result = CliRunner().invoke(app, [*base, *parts])
        assert isinstance(result.exception, InputError)
        assert message in str(result.exception)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    result = CliRunner().invoke(app, base)
    assert "--devices and torchrun both start processes" in str(result.exception)
    assert not started
