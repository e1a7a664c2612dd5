"""Every command as a subprocess, as a user starts it."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from lab.tests.report.synthetic import write_comparison

from commands import SECONDS, SMALL, Outcome, arguments, environment, powernorm, refusal
from covering import some_default
from powernorm.integrations.extras import LABORATORY, install_command

NORM_NAMES = (
    *("ln", "ln-simple", "detach", "adanorm", "rms", "gs", "gn", "dyt"),
    *("derf", "dyisru", "seednorm", "scalenorm", "biasnorm", "gatednorm", "none"),
    *(
        "bn",
        "rbn",
        "brn",
        "mabn",
        "un",
        "repbn",
        "prepbn",
        "taper",
        "pnv",
        "pn",
        "pn-only",
        "pn-static",
    ),
)


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> tuple[Path, Outcome]:
    """The folder of a comparison that ran to its end, and what it printed."""
    home = tmp_path_factory.mktemp("compared")
    outcome = powernorm(
        home, "compare", "lm", "--preset", "smoke", "--norms", "ln,pn",
        "--data", text_file, *SMALL, fresh=True,
    )  # fmt: skip
    return home / "runs" / "lm-smoke", outcome


def test_help_needs_no_heavy_import() -> None:
    code = (
        "import sys\n"
        "from powernorm.cli import main\n"
        "sys.argv = ['powernorm', *{parts!r}]\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    assert end.code == 0\n"
        "heavy = {{'torch', 'lightning', 'matplotlib', 'tokenizers', 'numpy'}} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    for parts in (
        *(["--help"], ["compare", "--help"], ["report", "--help"], ["doctor", "--help"]),
        *(["doctor", "--help"], ["--version"]),
    ):
        subprocess.run(
            [sys.executable, "-c", code.format(parts=parts)],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=SECONDS,
        )


def test_verbs_do_not_import_the_compiler() -> None:
    """Its import takes a second of every start."""
    code = (
        "import sys, torch, powernorm\n"
        "from torch import nn\n"
        "model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2))\n"
        "batches = [torch.randn(9, 4), torch.randn(8, 4)]\n"
        "powernorm.swap(model, 'bn')\n"
        "powernorm.calibrate(model, batches)\n"
        "powernorm.diagnose(model, batches, batch_sizes=(2,))\n"
        "heavy = {'torch._dynamo', 'sympy', 'torch.distributed.tensor'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SECONDS)


def test_version(tmp_path: Path) -> None:
    outcome = powernorm(tmp_path, "--version")
    assert (outcome.code, outcome.err) == (0, "")
    assert re.fullmatch(r"powernorm \d+\.\d+\.\d+\S*\n", outcome.out)


def test_installed_command() -> None:
    script = Path(sys.executable).with_name("powernorm")
    done = subprocess.run(
        [script, "--version"], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert done.stdout.startswith("powernorm ")


def test_table_of_norms(tmp_path: Path) -> None:
    outcome = powernorm(tmp_path, "norms", fresh=True)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= 80
    names = [line.split()[0] for line in lines if line[:1].strip()]
    assert names == ["name", *NORM_NAMES, "static:"]
    assert "MovingAverageBatchNorm" in outcome.out
    for heading in ("layer", "averages over", "static", "paper"):
        assert heading in lines[0]


def test_compare(compared: tuple[Path, Outcome]) -> None:
    folder, outcome = compared
    assert outcome.code == 0, outcome.err
    for text in (
        "ln",
        "pn",
        "unigram",
        "bigram",
        "perplexity",
        "gap to ln",
        "TID",
        "tokens/s",
    ):
        assert text in outcome.out
    assert outcome.out.endswith(f"report: {Path('runs/lm-smoke/report.html')}\n")
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert [(run["norm"], run["status"]) for run in results["runs"]] == [
        ("ln", "finished"),
        ("pn", "finished"),
    ]
    assert results["runs"][1]["tid"]["var_last"] > 0
    assert "<svg" in (folder / "report.html").read_text(encoding="utf-8")


def test_output_without_a_terminal_has_no_control_characters(
    compared: tuple[Path, Outcome],
) -> None:
    _, outcome = compared
    for text in (outcome.out, outcome.err):
        assert all(character.isprintable() or character == "\n" for character in text)
    assert max(map(len, outcome.out.splitlines())) <= 80


def test_report_again(tmp_path: Path, compared: tuple[Path, Outcome]) -> None:
    folder, _ = compared
    page = folder / "report.html"
    before = page.read_bytes()
    page.unlink()
    outcome = powernorm(tmp_path, "report", folder, fresh=True)
    assert (outcome.code, outcome.out, outcome.err) == (0, f"report: {page}\n", "")
    assert page.read_bytes() == before


def test_folder_with_other_runs(text_file: Path, compared: tuple[Path, Outcome]) -> None:
    folder, _ = compared
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    options = (
        "--preset",
        "smoke",
        "--norms",
        "ln,pn",
        "--data",
        text_file,
        *SMALL,
        "--out",
        folder,
    )
    refused = refusal(folder.parent, "compare", "lm", *options)
    assert str(folder) in refused
    assert "--force" in refused
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--norms", "ln,pm"], "unknown norm 'pm', known are ln, ln-simple"),
        (["--preset", "huge"], "no preset 'huge': choose one of smoke, demo, full"),
        (["--set", "optimizer.learning_rat=1"], "did you mean optimizer.learning_rate"),
        (
            ["--set", "training.max_steps=few"],
            "max_steps='few' .* expected a whole number",
        ),
        (["--set", "dropout"], "'dropout' is not of the form key=value"),
        (["--placement", "middle"], "model.placement=middle .* pre, post"),
        (["--data", "missing.txt"], "missing.txt does not exist"),
        (["--data", "empty.txt"], "empty.txt"),
        (["--out", "empty.txt", "--data", "text.txt", *SMALL], "empty.txt is a file"),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_bad_input_of_compare(
    tmp_path: Path, text_file: Path, options: list[str], message: str
) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "text.txt").write_bytes(text_file.read_bytes())
    preset = [] if "--preset" in options else ["--preset", "smoke"]
    refused = refusal(tmp_path, "compare", "lm", *preset, *options)
    assert re.search(message, refused), refused
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("compare", "lm", "--norm", "ln"), "no such option: --norm.*--norms.*compare --help"),
        (("compare", "lm", "--jobs", "0"), "--jobs 0: .*greater than or equal to 1"),
        (("compare", "lm", "--jobs=many"), "--jobs=many: .*valid integer"),
        (("remove", "model"), "missing option '--out'; see `powernorm remove --help`"),
        (("frobnicate",), "no such command 'frobnicate'; see `powernorm --help`"),
    ],
)
def test_wrong_command_line(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    assert re.search(said, refusal(tmp_path, *arguments))


def test_no_command_is_the_help(tmp_path: Path) -> None:
    found = powernorm(tmp_path)
    assert found.code == 2
    assert "Commands:" in found.out + found.err


def test_bad_input_of_report(tmp_path: Path) -> None:
    assert "is not a folder" in refusal(tmp_path, "report", "missing")
    folder = write_comparison(tmp_path / "demo", norms=("bn",), seeds=(0,))
    with (folder / "bn-pre-seed0" / "metrics.csv").open("a", encoding="utf-8") as stream:
        stream.write("oops\n")
    refused = refusal(tmp_path, "report", folder)
    assert "metrics.csv, line 102: 1 cells, expected " in refused


@pytest.mark.parametrize(
    "package", some_default(["pydantic", "matplotlib", "rich"], "pydantic", "matplotlib")
)
def test_missing_extra_is_named(tmp_path: Path, package: str) -> None:
    code = (
        "import sys\n"
        f"sys.modules[{package!r}] = None\n"
        "sys.argv = ['powernorm', 'compare', 'lm', '--preset', 'smoke']\n"
        "from powernorm.cli import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path),
        timeout=SECONDS,
        check=False,
    )
    refused = Outcome(done.returncode, done.stdout, done.stderr).refused()
    assert package in refused
    assert install_command(LABORATORY) in refused


def test_interrupted_comparison_goes_on(tmp_path: Path, text_file: Path) -> None:
    options = (
        *("compare", "lm", "--preset", "smoke", "--norms", "ln", "--data", text_file, *SMALL),
        *("--set", "training.max_steps=400", "--set", "training.validate_every=50"),
        *("--out", "my runs"),
    )
    process = subprocess.Popen(
        arguments(*options, "--force"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(tmp_path),
    )
    assert process.stderr is not None
    for line in process.stderr:
        # The checkpoint of step 50 is written after its line.
        if "step 100," in line:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    (said,) = [line for line in err.splitlines() if line.startswith("interrupted: ")]
    assert "my runs has the finished runs" in said
    command = said.partition("resume with: powernorm ")[2]
    assert command.endswith("--out 'my runs' --resume")
    assert "--force" not in command
    folder = tmp_path / "my runs"
    (run,) = json.loads((folder / "results.json").read_text(encoding="utf-8"))["runs"]
    assert run["status"] == "interrupted"
    outcome = powernorm(tmp_path, *options, "--resume")
    assert outcome.code == 0, outcome.err
    assert re.search(r"400 steps, from step \d*[1-9]\d*\n", outcome.err)
    (run,) = json.loads((folder / "results.json").read_text(encoding="utf-8"))["runs"]
    assert run["status"] == "finished"
    assert (folder / "report.html").exists()
