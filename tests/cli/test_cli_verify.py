"""`powernorm verify`: what is damaged is named, with what to do, and nothing else is."""

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

import powernorm as library
from commands import powernorm
from lab.report.synthetic import write_comparison
from powernorm.cli.verify import Findings, check_files
from powernorm.errors import InputError
from powernorm.lab.data.cache import write_cached
from powernorm.lab.engine.averaging import Snapshots, write_weights
from powernorm.lab.tasks.translation.store import found_or_made
from powernorm.lab.training.checkpoints import CONTENT, Checkpoints

RUN = "bn-pre-seed0"
CHECKPOINTS = f"demo/{RUN}/checkpoints"
SEALED = (
    f"{CHECKPOINTS}/last.ckpt",
    f"{CHECKPOINTS}/average.safetensors",
    "folded/powernorm.safetensors",
    f"cache/{'a' * 32}.tokens.pt",
    f"cache/{'a' * 32}.tokenizer.json",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison, folded models and a cache."""
    folder = tmp_path_factory.mktemp("verify")
    write_comparison(folder / "demo")
    checkpoints = folder / CHECKPOINTS
    checkpoints.mkdir()
    weights = {"weight": torch.linspace(0, 1, 20)}
    content = {**dict.fromkeys(CONTENT), "weights": weights, "step": 3}
    Checkpoints(checkpoints, Snapshots(checkpoints, 0), None).save(content)
    write_weights(checkpoints / "average.safetensors", weights)
    (checkpoints / ".last.ckpt").write_bytes(b"half of a chec")
    model = nn.Sequential(library.BatchNorm(4), nn.Linear(4, 3, bias=False))
    model(torch.randn(8, 4))
    library.fold(model.eval(), torch.randn(2, 4))
    library.save(model, folder / "folded")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POWERNORM_CACHE", str(folder / "cache"))
        write_cached(f"{'a' * 32}.tokens.pt", b"PK\x03\x04 not read, for it has a checksum")
        write_cached(f"{'a' * 32}.tokenizer.json", b"{}")
        found_or_made("mine", lambda store: {"made": str((store / "x").write_text("ids"))})
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "files")


def damaged_in(folder: Path) -> list[str]:
    findings: Findings = check_files([folder])
    for path, problem in findings.damaged.items():
        assert path in problem
    return [str(Path(path).relative_to(folder)) for path in findings.damaged]


def test_whole_files(folder: Path) -> None:
    whole = powernorm(folder, "verify", "demo", "cache", "folded", fresh=True)
    assert (whole.code, whole.err) == (0, "")
    assert whole.out.endswith(" files checked, 0 damaged\n")
    assert damaged_in(folder) == []


def test_damaged_files_have_a_line_each(folder: Path) -> None:
    for name in SEALED[:3]:
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 16
        (folder / name).write_bytes(content)
    (folder / "demo" / "results.json").write_text("[" * 5000)
    outcome = powernorm(folder, "verify", "demo", "folded")
    assert (outcome.code, outcome.err) == (1, "")
    *lines, last = outcome.out.splitlines()
    assert [line.split(" is ")[0].split(": nested")[0] for line in lines] == [
        f"damaged: {name}" for name in ("demo/results.json", SEALED[1], SEALED[0], SEALED[2])
    ]
    assert "remove the run's folder" in lines[1]
    assert last.endswith(" files checked, 4 damaged")
    as_json = powernorm(folder, "verify", "--json", "demo", "folded")
    found = json.loads(as_json.out)
    assert (as_json.code, set(found)) == (1, {"checked", "without_checksum", "damaged"})
    assert len(found["damaged"]) == 4


@pytest.mark.parametrize("name", SEALED)
def test_no_flipped_bit_and_no_lost_end_is_missed(name: str, folder: Path) -> None:
    path = folder / name
    content = path.read_bytes()
    random_numbers = random.Random(0)
    for number in range(60):
        changed = bytearray(content)
        if number % 4 == 0:
            del changed[random_numbers.randrange(len(changed)) :]
        else:
            changed[random_numbers.randrange(len(changed))] ^= 1 << random_numbers.randrange(8)
        path.write_bytes(changed)
        assert list(check_files([path]).damaged) == [str(path)], number


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def lose_a_cell(path: Path) -> None:
    lines = path.read_text().splitlines(keepends=True)
    lines[3] = lines[3].partition(",")[2]
    path.write_text("".join(lines))


def nest(path: Path) -> None:
    path.write_text("[" * 50_000)


def lose_a_key(path: Path) -> None:
    content = json.loads(path.read_text())
    del content["status"]
    path.write_text(json.dumps(content))


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        *((f"demo/{RUN}/{name}", cut_off) for name in ("metrics.csv", "norms.csv", "result.json")),
        *((f"demo/{RUN}/{name}", empty) for name in ("metrics.csv", "norms.csv", "result.json")),
        (f"demo/{RUN}/metrics.csv", lose_a_cell),
        (f"demo/{RUN}/result.json", lose_a_key),
        (f"demo/{RUN}/result.json", nest),
        ("demo/results.json", nest),
    ],
)
def test_files_without_a_checksum_are_read(name: str, damage: object, folder: Path) -> None:
    assert callable(damage)
    damage(folder / name)
    assert damaged_in(folder) == [name]


def test_what_only_the_report_would_notice(folder: Path) -> None:
    path = folder / "demo" / "results.json"
    content = json.loads(path.read_text())
    content["runs"][0]["status"] = "over"
    path.write_text(json.dumps(content))
    assert damaged_in(folder) == ["demo/results.json"]


@pytest.mark.parametrize("name", ["x", "manifest.json"])
def test_a_store_of_pairs(name: str, folder: Path) -> None:
    (folder / "cache" / "mine.pairs" / name).write_text("idz")
    (problem,) = check_files([folder]).damaged.values()
    assert f"mine.pairs/{name}" in problem
    assert "remove the folder" in problem
    assert (folder / "cache" / "mine.pairs").exists()


def test_a_fetched_data_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POWERNORM_CACHE", str(folder / "cache"))
    mine = folder / "cache" / "data" / "mnist"
    mine.mkdir(parents=True)
    (mine / "t10k-labels-idx1-ubyte.gz").write_bytes(b"no labels")
    for asked in (folder / "cache", mine):
        (problem,) = check_files([asked]).damaged.values()
        assert "run `powernorm data get mnist`" in problem
    assert not check_files([folder / "demo"]).damaged


def test_files_from_before_there_were_checksums(folder: Path) -> None:
    content = {"state_dict": {}, "global_step": 3, "loops": {}}
    torch.save(content, folder / CHECKPOINTS / "last.ckpt")
    outcome = powernorm(folder, "verify", "demo")
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.out.endswith("0 damaged, 1 without a checksum, from before files had one\n")
    whole = (folder / CHECKPOINTS / "last.ckpt").read_bytes()
    (folder / CHECKPOINTS / "last.ckpt").write_bytes(whole[:-1])
    assert damaged_in(folder) == [f"{CHECKPOINTS}/last.ckpt"]


def test_nothing_to_verify(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "note.txt").write_text("mine")
    for name in ("empty", "note.txt"):
        refused = powernorm(tmp_path, "verify", name).refused()
        assert f"{name} holds nothing to verify" in refused
    with pytest.raises(InputError, match="none does not exist"):
        check_files([tmp_path / "none"])
