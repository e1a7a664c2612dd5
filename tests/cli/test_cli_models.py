"""`powernorm swap`, `fold` and `diagnose` as a user starts them."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from torch import nn

from commands import SMALL, Outcome, powernorm, refusal
from integrations.tiny_encoder import TEXTS, write_encoder
from powernorm import calibrate
from powernorm import swap as swap_norms
from powernorm.cli.models import fold, swap
from powernorm.errors import InputError
from powernorm.integrations.pretrained import load_pretrained
from powernorm.integrations.saved_models import save
from powernorm.norms import Norm, build_norm
from powernorm_lab import diagnosed_runs
from powernorm_lab.cli.diagnose import diagnose
from powernorm_lab.removal.removing import remove
from powernorm_lab.tasks.trained_models import load_folded_run, load_trained

MODELS = """
from torch import nn
model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
number = 3
def build():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
def fail():
    raise ValueError("no such size")
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "my_models.py").write_text(MODELS)
    return tmp_path


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, text_file: Path) -> Path:
    home = tmp_path_factory.mktemp("runs")
    outcome = powernorm(
        home, "compare", "lm", "--preset", "smoke", "--norms", "ln,bn,pn-static",
        "--data", text_file, *SMALL,
    )  # fmt: skip
    assert outcome.code == 0, outcome.err
    return home / "runs" / "lm-smoke"


def table(outcome: Outcome) -> dict[str, str]:
    assert outcome.code == 0, outcome.err
    return {line.split()[0]: line for line in outcome.out.splitlines()}


def test_swap_shows_a_table_of_a_users_model(home: Path) -> None:
    build = ("my_models:build", "--to", "bn", "--lowest", "1", "--wide")
    rows = table(powernorm(home, "swap", *build, fresh=True))
    assert " bn " in rows["layers.0.norm1"]
    assert "attention" in rows["layers.0.norm1"]
    assert "not selected" in rows["layers.1.norm1"]
    outcome = powernorm(home, "swap", "my_models:model", "--set", "momentum=0.2")
    assert "1 of 1 norms change to rbn" in outcome.out
    rows = table(
        powernorm(home, "swap", "my_models:build", "--where", "*norm2", "--role", "feed-forward")
    )
    assert "not selected" in rows["layers.0.norm1"]
    assert " rbn " in rows["layers.1.norm2"]


def test_swap_of_a_hugging_face_configuration(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    config = tmp_path / "config.json"
    config.write_text(
        '{"model_type": "bert", "architectures": ["BertForMaskedLM"], "hidden_size": 8, '
        '"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}'
    )
    for source in (config, tmp_path):
        rows = table(powernorm(tmp_path, "swap", source, "--to", "pn-static"))
        assert " pn-static " in rows["bert.encoder.layer.0.attention.output.LayerNorm"]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["build"], "neither module:name"),
        (["my_models:nothing"], "cannot be loaded"),
        (["no_such_module:build"], "no_such_module"),
        (["my_models:number"], "is a int, expected a torch.nn.Module"),
        (["my_models:fail"], "ValueError: no such size"),
        (["my_models:build", "--to", "bnn"], "did you mean 'bn'"),
        (["my_models:build", "--set", "momentum"], "write key=value"),
        (["my_models:build", "--set", "speed=1"], "no option 'speed'"),
        (["my_models:build", "--where", "nothing*"], "layers.0.norm1"),
        (["my_models:build", "--role", "head"], "unknown role 'head'"),
        (["my_models:build", "--side", "left"], "expected 'encoder' or 'decoder'"),
    ],
)
def test_bad_input_of_swap(home: Path, arguments: list[str], match: str) -> None:
    assert match in refusal(home, "swap", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["bn", "pn-static"])
def test_fold(runs: Path, tmp_path: Path, norm: str) -> None:
    run = runs / f"{norm}-pre-seed0"
    shown = powernorm(tmp_path, "fold", run)
    assert "nothing was written: give --out FOLDER" in shown.out
    out = tmp_path / "folded"
    outcome = powernorm(tmp_path, "fold", run, "--out", out, "--wide", fresh=norm == "bn")
    rows = table(outcome)
    assert "head.weight" in rows["final_norm"]
    assert "float64: max. absolute error" in outcome.out
    trained, folded = load_trained(run), load_folded_run(out)
    tokens = trained.example_inputs()
    with torch.no_grad():
        expected, found = trained.model(*tokens), folded.model(*tokens)
    assert torch.allclose(found, expected, atol=2e-5)
    assert not [module for module in folded.model.modules() if isinstance(module, Norm)]


def test_bad_input_of_fold(runs: Path, tmp_path: Path) -> None:
    refused = refusal(tmp_path, "fold", runs / "ln-pre-seed0")
    assert "no static norm to fold" in refused
    assert "is no run of" in refusal(tmp_path, "fold", tmp_path)
    assert "does not exist" in refusal(tmp_path, "fold", tmp_path / "nowhere")
    broken = runs / "ln-pre-seed0" / "checkpoints" / "best.ckpt"
    kept = broken.read_bytes()
    try:
        broken.write_bytes(kept[:100])
        assert "is damaged" in refusal(tmp_path, "fold", broken)
    finally:
        broken.write_bytes(kept)
    refused = refusal(tmp_path, "fold", runs / "bn-pre-seed0", "--tied", "both")
    assert "expected 'untie' or 'keep'" in refused


def test_a_place_for_a_folded_model_is_checked_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    # There is no such run, which only a command that began to work would find.
    refused = refusal(tmp_path, "fold", tmp_path / "no-run", "--out", "file")
    assert "file is a file: give the name of a folder" in refused


def test_the_folder_of_a_run_is_no_place_for_a_folded_model(runs: Path, tmp_path: Path) -> None:
    run = runs / "bn-pre-seed0"
    before = (run / "config.json").read_bytes()
    for folder, name in ((run, "config.json"), (runs, "comparison.json")):
        refused = refusal(tmp_path, "fold", run, "--out", folder)
        assert f"{folder} holds something else ({name})" in refused
    assert (run / "config.json").read_bytes() == before
    with pytest.raises(InputError, match="give a folder of its own"):
        save(nn.Sequential(build_norm("bn", 4)), run)


def test_a_folder_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"config\.json"):
        load_folded_run(tmp_path)


def test_a_run(runs: Path) -> None:
    run = runs / "bn-pre-seed0"
    more = ("--batches", "3", "--csv", "layers.csv")
    outcome = powernorm(runs, "diagnose", run, *more, fresh=True)
    assert outcome.code == 0, outcome.err
    assert "verdict: " in outcome.out
    assert "With running statistics the loss is" in outcome.out
    assert (run / "diagnosis.html").stat().st_size > 10_000
    record = json.loads((run / "diagnosis.json").read_text(encoding="utf-8"))
    assert record["model"] == "bn-pre-seed0"
    with (runs / "layers.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["layer"] for row in rows] == [layer["layer"] for layer in record["layers"]]
    # The page of the comparison shows it from the files alone.
    assert powernorm(runs, "report", str(runs)).code == 0
    page = (runs / "report.html").read_text(encoding="utf-8")
    assert record["verdict"]["reasons"][0].split(":")[0] in page


def test_a_checkpoint_leaves_the_runs_folder_alone(runs: Path) -> None:
    run = runs / "ln-pre-seed0"
    checkpoint = run / "checkpoints" / "last.ckpt"
    outcome = powernorm(runs, "diagnose", str(checkpoint), "--batches", "2", "--out", "page.html")
    assert outcome.code == 0, outcome.err
    assert (runs / "page.html").exists()
    assert not (run / "diagnosis.json").exists()
    assert not (run / "diagnosis.html").exists()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"sources": ["missing"]}, "does not exist: give the folder"),
    ({"sources": ["one", "two"]}, "2 models are given: add --overlay"),
    ({"sources": [".."]}, "add --overlay for one page of all, or give one run, such as"),
    ({"device": "cuda:93"}, "device is 'cuda:93', which this machine does not have"),
    ({"device": "gpu"}, "device is 'gpu', expected auto, cpu"),
    ({"out": Path("missing/page.html")}, "is not a folder"),
    ({"csv": Path("checkpoints")}, "is a folder"),
    ({"sources": ["../ln-pre-seed0/checkpoints/last.ckpt"], "figures": Path("f")}, "give --out"),
    ({"formats": "pdf"}, "give --figures DIR, too"),
    ({"sequences": 4}, "leave out --sequences"),
    ({"data": "missing.txt"}, "does not exist"),
    ({"batches": 1}, "num_batches is 1"),
    ({"scores": "test"}, "has no norm with batch statistics"),
    ({"scores": "train"}, "--scores 'train' is not known: give test or valid"),
    ({"sources": [".."], "scores": "test", "data": "rt"}, "contains several runs"),
    ({"sources": ["../.."], "scores": "test", "out": Path("page.html")}, "contains several runs"),
]


@pytest.mark.parametrize(("given", "words"), BAD)
def test_what_cannot_be_diagnosed(
    runs: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], words: str
) -> None:
    run = runs / "ln-pre-seed0"
    monkeypatch.chdir(run)
    with pytest.raises(InputError, match=words):
        diagnose(**{"sources": [str(run)], "batches": 2, **given})


@pytest.mark.slow
def test_scores_of_all_runs_of_a_comparison(runs: Path) -> None:
    more = ("--scores", "valid", "--batches", "2")
    outcome = powernorm(runs.parent, "diagnose", runs.name, *more)
    assert outcome.code == 0, outcome.err
    assert "valid perplexity by running and re-estimated statistics" in outcome.out
    assert "valid perplexity by batch statistics" in outcome.out
    record = json.loads((runs / "bn-pre-seed0" / "diagnosis.json").read_text(encoding="utf-8"))
    result = json.loads((runs / "bn-pre-seed0" / "result.json").read_text(encoding="utf-8"))
    perplexity = result["metrics"]["valid_perplexity"]
    assert record["evaluation"][0]["scores"] == {"valid_perplexity": perplexity}
    assert f"{perplexity:.2f}" in outcome.out
    assert (runs / "bn-pre-seed0" / "diagnosis.html").is_file()
    assert not (runs / "ln-pre-seed0" / "diagnosis.json").exists()
    # What has its scores is left as it is.
    written = (runs / "bn-pre-seed0" / "diagnosis.json").stat().st_mtime_ns
    again = powernorm(runs.parent, "diagnose", ".", *more)
    assert again.code == 0, again.err
    assert again.out.partition("with the diagnosis")[0] == outcome.out.partition("with the")[0]
    assert (runs / "bn-pre-seed0" / "diagnosis.json").stat().st_mtime_ns == written


def test_interrupted_scores(
    runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(diagnosed_runs, "diagnose_run", interrupt)
    with pytest.raises(typer.Exit) as ended:
        diagnose([str(runs)], scores="test", batches=2)
    assert ended.value.exit_code == 130
    assert capsys.readouterr().err == "interrupted: the runs that were scored keep their scores\n"


def test_a_pretrained_model_on_another_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own text is of English words, of which the tiny tokenizer knows none."""
    folder = write_encoder(tmp_path / "encoder")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"{TEXTS[n % 40]} {n}" for n in range(400)) + "\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="not a run of a built-in task"):
        diagnose([str(folder)], batches=2, scores="test")
    diagnose(
        [str(folder)], data=str(text), csv=Path("layers.csv"), batches=2, sequences=4, length=8
    )
    printed = capsys.readouterr().out
    assert "embeddings.LayerNorm" in printed
    assert "verdict: " in printed
    assert len((tmp_path / "layers.csv").read_text().splitlines()) == 1 + 3
    # Its folder is not a run's: nothing is kept there.
    assert not list(folder.glob("diagnosis.*"))


def test_a_swapped_model_in_a_hugging_face_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every command reads what `save_pretrained` noted, where from_pretrained gives LayerNorms."""
    encoder = write_encoder(tmp_path / "encoder")
    found = load_pretrained(encoder)
    swap_norms(found.model, "bn")
    calibrate(found.model, found.batches(TEXTS, 8, 8))
    found.model.save_pretrained(tmp_path / "swapped")
    found.tokenizer.save_pretrained(tmp_path / "swapped")
    text = tmp_path / "text.txt"
    text.write_text("\n".join(TEXTS) + "\n")
    monkeypatch.chdir(tmp_path)
    for command in (
        lambda: diagnose(["swapped"], data=str(text), batches=2, sequences=4, length=8, wide=True),
        lambda: fold(Path("swapped"), out=Path("folded")),
        lambda: swap("swapped", to="rbn"),
    ):
        command()
        rows = [line for line in capsys.readouterr().out.splitlines() if "LayerNorm " in line]
        assert len(rows) >= 3
        assert all(line.split()[1] == "bn" for line in rows[:3])
    with pytest.raises(InputError, match="is a BatchNorm, and only LayerNorm and RMSNorm can be"):
        remove("swapped", "removed", data=str(text))


def test_errors_are_one_line(runs: Path) -> None:
    outcome = powernorm(runs, "diagnose", "missing")
    assert outcome.code == 2
    assert len(outcome.err.strip().splitlines()) == 1


@pytest.mark.slow
def test_several_runs_in_one_picture(runs: Path, tmp_path: Path) -> None:
    """Each is diagnosed once; a page and a table of all of them."""
    (runs / "bn-pre-seed0" / "diagnosis.json").unlink(missing_ok=True)
    names = ("ln-pre-seed0", "bn-pre-seed0")
    more = ("--overlay", "--batches", "4", "--csv", tmp_path / "layers.csv")
    outcome = powernorm(runs, "diagnose", *names, *more)
    assert outcome.code == 0, outcome.err
    assert all(name in outcome.out for name in names)
    assert "report: overlay.html" in outcome.out
    assert all((runs / name / "diagnosis.json").exists() for name in names)
    with (tmp_path / "layers.csv").open(encoding="utf-8") as file:
        assert {row["model"] for row in csv.DictReader(file)} == set(names)
    drawn = ("--figures", tmp_path / "figures", "--format", "svg,pdf")
    again = powernorm(tmp_path, "diagnose", runs, "--overlay", "--batches", "4", *drawn)
    assert again.code == 0, again.err
    assert "1 diagnosed now, 2 before" in again.out
    assert "pn-static-pre-seed0" in again.out
    page = (runs / "overlay.html").read_text(encoding="utf-8")
    assert "λ₁ by layer" in page
    assert 'data-name="pn-static"' in page
    files = [path.suffix for path in (tmp_path / "figures").iterdir()]
    assert files.count(".svg") == files.count(".pdf") == page.count("<svg")


# Folding what stays dynamic


def test_fold_of_a_hugging_face_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=16, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    torch.nn.init.uniform_(model.model.norm.weight, 0.5, 1.5)
    model.save_pretrained(tmp_path / "llama")
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")

    outcome = powernorm(tmp_path, "fold", "llama", "--keep", "statistics", "--out", "folded")
    rows = table(outcome)
    assert " fold " in rows["model.norm"]
    assert "24 weights and biases of norms no longer compute anything" in outcome.out
    assert "for LlamaForCausalLM.from_pretrained" in outcome.out
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "folded")
    ids = torch.arange(5, 11)[None]
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-6)
    assert bool((loaded.model.norm.weight == 1).all())
    assert (tmp_path / "folded" / "tokenizer.json").exists()

    again = powernorm(tmp_path, "fold", "llama", "--keep", "statistics", "--out", "llama")
    assert "holds model.safetensors" in again.refused()
    (tmp_path / "llama" / "model.safetensors").write_bytes(b"no weights")
    assert "holds no model that can be loaded" in refusal(tmp_path, "fold", "llama")


def test_fold_keeps_the_statistics_of_a_run(runs: Path, tmp_path: Path) -> None:
    run, out = runs / "ln-pre-seed0", tmp_path / "folded"
    arguments = ("--keep", "statistics", "--centering", "weights", "--tied", "untie")
    outcome = powernorm(tmp_path, "fold", run, *arguments, "--out", out)
    assert outcome.code == 0, outcome.err
    trained, folded = load_trained(run), load_folded_run(out)
    inputs = trained.example_inputs()
    with torch.no_grad():
        expected, found = trained.model(*inputs), folded.model(*inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("--keep", "all"), "keep is 'all', expected 'nothing' or 'statistics'"),
        (("--centering", "weights"), "give keep=statistics, too"),
    ],
)
def test_bad_options_of_fold(tmp_path: Path, arguments: tuple[str, ...], match: str) -> None:
    assert match in refusal(tmp_path, "fold", "no-run", *arguments)
