"""A tiny token classifier with RBN, and an update with the penalty, written out by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.norms import RegularizedBatchNorm, build_norm

FEATURES, CLASSES = 6, 5
MEAN_PENALTY, VAR_PENALTY = 3.0, 2.0
"""Large enough that a wrong scale cannot hide."""

LEARNING_RATE = 0.05

RBN = {"mean_penalty": MEAN_PENALTY, "var_penalty": VAR_PENALTY, "start": "torch"}
"""With statistics that do not begin as those of the first batch, where nothing is penalized."""

Batch = Mapping[str, Tensor]


class Classifier(nn.Module):
    """Two norms over the tokens that have a label."""

    def __init__(self, norm: str = "rbn") -> None:
        super().__init__()
        torch.manual_seed(0)
        options = RBN if norm == "rbn" else {}
        self.lower = build_norm(norm, FEATURES, dtype=torch.float64, **options)
        self.between = nn.Linear(FEATURES, FEATURES, dtype=torch.float64)
        self.upper = build_norm(norm, FEATURES, dtype=torch.float64, **options)
        self.head = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)

    def logits(self, x: Tensor, padding_mask: Tensor) -> Tensor:
        hidden = self.between(self.lower(x, padding_mask)).tanh() * 2
        return self.head(self.upper(hidden, padding_mask))


def batches(number: int, *, seed: int = 0) -> list[dict[str, Tensor]]:
    """Micro-batches of equal shape with very unequal numbers of labels."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for index in range(number):
        x = torch.randn(4, 7, FEATURES, generator=generator, dtype=torch.float64) * (1 + index % 3)
        labels = torch.randint(CLASSES, (4, 7), generator=generator)
        labels[0, 2:] = -100
        if index % 2:
            labels[1:3] = -100
        made.append({"x": x, "labels": labels})
    return made


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def num_labels(batch: Batch) -> int:
    return int((batch["labels"] != -100).sum())


class PenaltiesByHand:
    """SPEC 4 written out, for copies of the layers that have no penalty of their own."""

    def __init__(self, model: nn.Module, masked_by: Callable[[], Tensor | None]) -> None:
        self.total: list[Tensor] = []
        self._masked_by = masked_by
        for layer in model.modules():
            if isinstance(layer, RegularizedBatchNorm):
                layer.mean_penalty = layer.var_penalty = 0.0
                layer.register_forward_pre_hook(self._add)

    def _add(self, layer: RegularizedBatchNorm, args: tuple[Tensor, ...]) -> None:
        mask = self._masked_by()
        tokens = args[0].flatten(0, -2) if mask is None else args[0][~mask]
        mean, var = tokens.mean(0), tokens.var(0, correction=0)
        new_mean = torch.lerp(layer.running_mean, mean.detach(), layer.momentum)
        new_var = torch.lerp(layer.running_var, tokens.detach().var(0), layer.momentum)
        self.total.append(
            MEAN_PENALTY * (new_mean - mean).square().sum()
            + VAR_PENALTY * (new_var - var).abs().sum()
        )

    def take(self) -> Tensor:
        total, self.total = torch.stack(self.total).sum(), []
        return total


def by_hand(
    model: Classifier,
    updates: Sequence[Sequence[Batch]],
    weight: Callable[[Sequence[Batch], Batch], float],
) -> Classifier:
    """SGD on Σ_i weight_i (token sum_i + penalty_i) over the micro-batches i of each update."""
    reference = copy.deepcopy(model).train()
    current: list[Tensor] = []
    penalties = PenaltiesByHand(reference, lambda: current[-1])
    optimizer = torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE)
    for update in updates:
        optimizer.zero_grad()
        for batch in update:
            mask = batch["labels"] == -100
            current[:] = [mask]
            loss = cross_entropy_sum(reference.logits(batch["x"], mask), batch["labels"])
            ((loss + penalties.take()) * weight(update, batch)).backward()
        optimizer.step()
    return reference


def library_model(
    name: str,
) -> tuple[nn.Module, Callable[[nn.Module, Batch], Tensor], list[dict[str, Tensor]]]:
    """A tiny model of transformers with RBN, its loss as a sum, and four micro-batches."""
    import transformers as hf  # slow, and not for processes that need none of it

    sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 0}
    no = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    torch.manual_seed(0)
    if name == "llama":
        config = hf.LlamaConfig(**sizes, num_hidden_layers=1, max_position_embeddings=16)
        return with_rbn(hf.LlamaForCausalLM(config)), causal_sum, token_batches()
    if name == "bert":
        config = hf.BertConfig(**sizes, **no, num_hidden_layers=1, num_labels=3)
        return with_rbn(hf.BertForSequenceClassification(config)), class_sum, token_batches(3)
    if name == "t5":
        sizes = {"vocab_size": 20, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2}
        config = hf.T5Config(**sizes, **tokens, num_layers=1, dropout_rate=0.0)
        return with_rbn(hf.T5ForConditionalGeneration(config)), translation_sum, token_batches()
    sizes = {"vocab_size": 20, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 16}
    no = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    config = hf.GPT2Config(**sizes, **no, bos_token_id=1, eos_token_id=2)
    return with_rbn(hf.GPT2LMHeadModel(config)), causal_sum, token_batches()


def token_batches(classes: int | None = None) -> list[dict[str, Tensor]]:
    """Four micro-batches of unequal numbers of labels, one a token or one a row."""
    generator = torch.Generator().manual_seed(1)
    data = []
    for index in range(4):
        tokens = torch.randint(3, 20, (3 + index, 6), generator=generator)
        labels = tokens.clone()
        labels[:2, 2 + index :] = -100
        if classes is not None:
            labels = tokens[:, 0] % classes
        data.append({"input_ids": tokens, "labels": labels})
    return data


def class_sum(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits
    return F.cross_entropy(logits, batch["labels"], reduction="sum")


def translation_sum(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy_sum(model(**batch).logits, batch["labels"])


def causal_sum(model: nn.Module, batch: Batch) -> Tensor:
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    return cross_entropy_sum(logits, batch["labels"][:, 1:])


def with_rbn(model: nn.Module) -> nn.Module:
    """A model of another library in float64, with all of its norms replaced."""
    for module in list(model.double().modules()):
        for name, child in module.named_children():
            if type(child).__name__.endswith("Norm"):
                setattr(
                    module,
                    name,
                    build_norm("rbn", child.weight.numel(), dtype=torch.float64, **RBN),
                )
    return model


def library_by_hand(
    model: nn.Module,
    updates: Sequence[Sequence[Batch]],
    loss_sum: Callable[[nn.Module, Batch], Tensor],
    weight: Callable[[Sequence[Batch], Batch], float],
) -> nn.Module:
    """Like `by_hand`, with its own token sum and no padding in the norms."""
    reference = copy.deepcopy(model).train()
    penalties = PenaltiesByHand(reference, lambda: None)
    optimizer = torch.optim.SGD(reference.parameters(), lr=LEARNING_RATE)
    for update in updates:
        optimizer.zero_grad()
        for batch in update:
            total = loss_sum(reference, batch) + penalties.take()
            (total * weight(update, batch)).backward()
        optimizer.step()
    return reference


def undivided_mean(update: Sequence[Batch], batch: Batch) -> float:
    """Means over micro-batches, added up."""
    del update
    return 1 / num_labels(batch)


def mean_of_means(update: Sequence[Batch], batch: Batch) -> float:
    """Means over micro-batches, averaged."""
    return 1 / (len(update) * num_labels(batch))


def over_all_tokens(update: Sequence[Batch], batch: Batch) -> float:
    """One mean over the tokens of the update."""
    del batch
    return 1 / sum(num_labels(micro) for micro in update)


def assert_same_state(
    found: nn.Module, expected: nn.Module, *, rtol: float = 1e-9, atol: float = 1e-11
) -> None:
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(
            found.state_dict()[name], tensor, rtol=rtol, atol=atol, msg=lambda m, n=name: f"{n} {m}"
        )


def mean_tid_by_hand(layer: nn.Module, micro_batches: list[dict[str, Tensor]]) -> float:
    """Online TID of the mean at a model's first norm, after an update by these micro-batches."""
    parts = []
    for batch in micro_batches:
        tokens = batch["x"][batch["labels"] != -100]
        parts.append((tokens.mean(0), tokens.std(0, correction=0)))
        layer(tokens).sum().backward()
    found = [((mean - layer.running_mean).abs() / std).mean().item() for mean, std in parts]
    return sum(found) / len(found)
