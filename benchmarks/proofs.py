"""Size of the circuit of a proof, and proving times, by the kind of norm.

    pip install ezkl==23.0.5
    python benchmarks/proofs.py --out benchmarks/results/proofs.jsonl       # circuits
    python benchmarks/proofs.py --out benchmarks/results/proven.jsonl --prove \
        --tokens 14 --placements pre --rivals LayerNorm folded              # and proofs

A proof of zero knowledge shows that a model gave an output, without the input. EZKL makes a circuit
of an ONNX file whose rows the proof pays for. Small encoders are trained here to tell the next
character from those before it; without norms is the one with LayerNorm after `remove`.
Rows do not depend on what else the machine does; times do.
"""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import powernorm
import powernorm_lab
from powernorm.integrations.onnx import export
from powernorm_lab.data.embedded import embedded_corpus
from speed.encoders import Layer, NormFactory, Placement, Size

FEATURES, LAYERS, HEADS, HIDDEN = 32, 2, 2, 64
TOKENS = 16
STEPS, BATCH, RATE = 1500, 128, 3e-3
REMOVAL_STEPS = 300
NUM_HELD_OUT = 8192
LETTERS = " abcdefghijklmnopqrstuvwxyz"
NORMS: dict[str, NormFactory] = {
    "LayerNorm": powernorm.LayerNorm,
    "RMSNorm": powernorm.RMSNorm,
    "DyT": powernorm.DynamicTanh,
}
FOLDED = "folded"
RIVALS = ("LayerNorm", FOLDED, "RMSNorm", "DyT")
PLACEMENTS: tuple[Placement, ...] = ("pre", "post")


class Reader(nn.Module):
    """Characters to the logits of the next one."""

    def __init__(self, norm: NormFactory, placement: Placement, num_tokens: int) -> None:
        super().__init__()
        size = Size(FEATURES, HEADS, HIDDEN, placement, LAYERS)
        self.characters = nn.Embedding(len(LETTERS), FEATURES)
        self.positions = nn.Parameter(0.1 * torch.randn(num_tokens, FEATURES))
        self.layers = nn.Sequential(*(Layer(size, norm, F.relu) for _ in range(LAYERS)))
        self.norm = norm(FEATURES) if placement == "pre" else nn.Identity()
        self.head = nn.Linear(FEATURES, len(LETTERS))

    def embed(self, ids: Tensor) -> Tensor:
        vectors: Tensor = self.characters(ids) + self.positions
        return vectors

    def encode(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.layers(x))[:, -1])
        return logits

    def forward(self, ids: Tensor) -> Tensor:
        return self.encode(self.embed(ids))


def windows(split: str, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return all positions of a text: the characters before each, and itself."""
    text = " ".join(embedded_corpus().documents[split]).lower()
    known = {letter: number for number, letter in enumerate(LETTERS)}
    ids = torch.tensor([known.get(letter, 0) for letter in " ".join(text.split())])
    cut = ids.unfold(0, num_tokens + 1, 1)
    return cut[:, :-1], cut[:, -1]


def draw(data: tuple[Tensor, Tensor], number: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return a number of random windows."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(data[1]), (number,), generator=generator)
    return data[0][chosen], data[1][chosen]


def trained(rival: str, placement: Placement, data: tuple[Tensor, Tensor]) -> nn.Module:
    """Return a trained model; all see the same batches and begin with the same weights."""
    torch.manual_seed(0)
    model = Reader(NORMS[rival], placement, data[0].shape[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=STEPS)
    for step in range(STEPS):
        ids, targets = draw(data, BATCH, step)
        optimizer.zero_grad()
        F.cross_entropy(model(ids), targets).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def removed(model: nn.Module, data: tuple[Tensor, Tensor]) -> nn.Module:
    """Return the model without norms."""
    batches = [draw(data, BATCH, 10_000 + step)[0] for step in range(REMOVAL_STEPS)]
    with tempfile.TemporaryDirectory() as folder:
        settings = [f"training.steps={REMOVAL_STEPS}", "optimizer.learning_rate=1e-3"]
        found = powernorm_lab.remove(
            (model, batches), f"{folder}/out", settings=settings, quiet=True
        )
    return found.model.eval()


@torch.no_grad()
def nats(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    """Return the loss on held-out text."""
    ids, targets = draw(data, NUM_HELD_OUT, 1)
    return float(F.cross_entropy(model(ids), targets))


class Circuit(nn.Module):
    """The proven part of a model: from the embedded characters to the logits."""

    def __init__(self, reader: nn.Module) -> None:
        super().__init__()
        self.reader = reader

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.reader.encode(x)  # type: ignore[operator]
        return logits


class Ezkl:
    """EZKL's functions on the files of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, function: str, *arguments: Any, **options: Any) -> Any:
        """Call a function, some of which need a running loop; names with a dot are files."""
        import ezkl

        given = [
            str(self.folder / one) if isinstance(one, str) and "." in one else one
            for one in arguments
        ]

        async def call() -> Any:
            value = getattr(ezkl, function)(*given, **options)
            return await value if inspect.isawaitable(value) else value

        found = asyncio.run(call())
        if found is False:
            raise RuntimeError(f"ezkl.{function} failed")
        return found

    def write(self, name: str, inputs: Tensor) -> None:
        """Write inputs, a list for each tensor."""
        content = {"input_data": [inputs.flatten().tolist()]}
        (self.folder / name).write_text(json.dumps(content), encoding="utf-8")

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        return (self.folder / name).stat().st_size


def circuit(model: nn.Module, data: tuple[Tensor, Tensor], *, prove: bool) -> dict[str, Any]:
    """Return the sizes of the circuit, and of the proof."""
    import ezkl

    ids, _ = draw(data, 1, 2)
    with torch.no_grad():
        inputs = model.embed(ids)  # type: ignore[operator]
        wanted = model(ids)[0]
    arguments = ezkl.PyRunArgs()
    arguments.input_visibility = "private"
    arguments.param_visibility = "fixed"
    arguments.output_visibility = "public"
    with tempfile.TemporaryDirectory() as name:
        run = Ezkl(Path(name))
        export(Circuit(model).eval(), inputs).save(Path(name) / "model.onnx")
        # At EZKL's own scales, which are equal for all.
        run("gen_settings", "model.onnx", "settings.json", py_run_args=arguments)
        settings = json.loads((Path(name) / "settings.json").read_text())
        found = {
            "rows": settings["num_rows"],
            "assignments": settings["total_assignments"],
            "lookups": sorted({next(iter(one)) for one in settings["required_lookups"]}),
            "scales": [settings["run_args"][f"{one}_scale"] for one in ("input", "param")],
        }
        if not prove:
            return found
        run.write("input.json", inputs)
        return found | proof(run, wanted)


def proof(run: Ezkl, wanted: Tensor) -> dict[str, Any]:
    """Return error, time and size of a proof, with parameters that are made for this test only.

    Scales and tables are first fitted to the data, which changes the number of rows.
    """
    run("calibrate_settings", "input.json", "model.onnx", "settings.json", "resources")
    settings = json.loads((run.folder / "settings.json").read_text())
    run("compile_circuit", "model.onnx", "model.ezkl", "settings.json")
    run("gen_witness", "input.json", "model.ezkl", "witness.json")
    witness = json.loads((run.folder / "witness.json").read_text())
    values = witness["pretty_elements"]["rescaled_outputs"][0]
    outputs = torch.tensor([float(value) for value in values])
    log_rows = settings["run_args"]["logrows"]
    found: dict[str, Any] = {
        "error": float((outputs - wanted).norm() / wanted.norm()),
        "fitted_rows": settings["num_rows"],
        "log_rows": log_rows,
    }
    run("gen_srs", "parameters.srs", log_rows)
    steps: dict[str, tuple[str, ...]] = {
        "setup": ("model.ezkl", "key.vk", "key.pk", "parameters.srs"),
        "prove": ("witness.json", "model.ezkl", "key.pk", "proof.json", "parameters.srs"),
        "verify": ("proof.json", "settings.json", "key.vk", "parameters.srs"),
    }
    for step, files in steps.items():
        start = time.perf_counter()
        run(step, *files)
        found[f"{step}_s"] = round(time.perf_counter() - start, 2)
    return found | {"key_bytes": run.size("key.pk"), "proof_bytes": run.size("proof.json")}


def build(rival: str, placement: Placement, data: tuple[Tensor, Tensor]) -> nn.Module:
    """Return the trained model; without norms it is the one with LayerNorm, trained further."""
    if rival == FOLDED:
        return removed(trained("LayerNorm", placement, data), data)
    return trained(rival, placement, data)


def main() -> None:
    """Train, count, prove if asked, and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines")
    parser.add_argument("--prove", action="store_true", help="prove and verify, too: minutes each")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="characters that are read")
    parser.add_argument("--rivals", nargs="+", choices=RIVALS, default=RIVALS)
    parser.add_argument("--placements", nargs="+", choices=PLACEMENTS, default=PLACEMENTS)
    given = parser.parse_args()
    train, valid = (windows(split, given.tokens) for split in ("train", "valid"))
    found = []
    for placement in given.placements:
        for rival in given.rivals:
            model = build(rival, placement, train)
            row = {
                "placement": placement,
                "rival": rival,
                "tokens": given.tokens,
                "nats": round(nats(model, valid), 4),
                **circuit(model, valid, prove=given.prove),
            }
            print(row, flush=True)
            found.append(row)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


if __name__ == "__main__":
    main()
