"""Muon for the hidden matrices of a model, and AdamW for the rest, as one optimizer."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms import BatchNorm
from powernorm_lab.engine.distribution import optimized
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.settings.training import OptimizerSettings
from powernorm_lab.tasks.lm.model import AdaptiveLanguageModel, LanguageModel
from powernorm_lab.training.optimization import build_optimizer

MUON = OptimizerSettings(name="muon", learning_rate=0.02, weight_decay=0.1)


def model_of() -> LanguageModel:
    shape = TransformerShape(
        num_features=8, num_layers=1, num_heads=2, feedforward_features=12, placement="normformer"
    )
    return LanguageModel(11, BatchNorm, shape, max_length=6)


def names_of(model: nn.Module) -> list[set[str]]:
    """Return the names of the parameters of each group."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optimizer(model, MUON).param_groups
    return [{names[id(one)] for one in group["params"]} for group in groups]


def test_matrices_inside_the_model_are_muons() -> None:
    """AdamW trains embeddings, output and positions with weight decay, and vectors without."""
    model = model_of()
    muon, tables, vectors = names_of(model)
    maps = {"attention.query", "attention.key_value", "attention.output", "feedforward.0"}
    maps.add("feedforward.3")
    assert muon == {f"layers.0.{one}.weight" for one in maps}
    assert tables == {"embedding.weight", "positions.weight"}
    assert vectors == {name for name, one in model.named_parameters() if one.ndim == 1}


def test_the_clusters_of_an_adaptive_softmax_are_adams() -> None:
    model = AdaptiveLanguageModel(model_of(), 11, [5])
    muon, tables, _ = names_of(model)
    assert not [name for name in muon if "adaptive" in name]
    assert [name for name in tables if "adaptive" in name]


def losses(model: LanguageModel, optimizer: torch.optim.Optimizer, steps: int) -> list[Tensor]:
    found = []
    for step in range(steps):
        x = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(x[:, :-1]).flatten(0, 1).logsumexp(1).mean() - model(x).square().mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return found


def test_a_step_is_torchs_own() -> None:
    ours = model_of()
    theirs = copy.deepcopy(ours)
    optimizer = build_optimizer(ours, MUON)
    groups = [[*group["params"]] for group in build_optimizer(theirs, MUON).param_groups]
    muon = torch.optim.Muon(
        groups[0], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(
        [{"params": groups[1], "weight_decay": 0.1}, {"params": groups[2], "weight_decay": 0.0}],
        lr=0.02,
        betas=(0.9, 0.98),
        eps=1e-8,
    )
    losses(ours, optimizer, 3)
    for step in range(3):
        # The same batches as above, one step at a time.
        x = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(step))
        theirs.zero_grad()
        logits = theirs(x[:, :-1]).flatten(0, 1).logsumexp(1).mean()
        (logits - theirs(x).square().mean()).backward()
        muon.step()
        adam.step()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_it_goes_on_from_its_state() -> None:
    """After saving and loading, also a second time, the steps are the same to the bit."""
    whole = model_of()
    optimizer = build_optimizer(whole, MUON)
    losses(whole, optimizer, 2)
    parts = copy.deepcopy(whole)
    resumed = build_optimizer(parts, MUON)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    for _ in range(2):
        file.seek(0)
        resumed.load_state_dict(torch.load(file, weights_only=True))
    for group in (*optimizer.param_groups, *resumed.param_groups):
        group["lr"] = 0.01
    assert losses(whole, optimizer, 3) == losses(parts, resumed, 3)
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(one, other)
    assert len(resumed.state) == len(optimized(resumed))


def test_a_model_without_matrices_is_refused() -> None:
    model = nn.Sequential(nn.Conv1d(3, 3, 1), nn.Embedding(3, 3))
    with pytest.raises(InputError, match=r"optimizer\.name=muon"):
        build_optimizer(model, MUON)
