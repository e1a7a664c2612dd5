"""Small models of all tasks with their inputs, and checks that their tests share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.norms import build_norm
from powernorm_lab.models.choices import TransformerShape
from powernorm_lab.models.normed import NormFactory
from powernorm_lab.recipes import recipe
from powernorm_lab.runs import PLACEMENTS
from powernorm_lab.settings.overrides import override
from powernorm_lab.tasks.classify.model import TextClassifier
from powernorm_lab.tasks.image.model import ConvNet, ResNet
from powernorm_lab.tasks.lm.model import LanguageModel, TensorizedAttention
from powernorm_lab.tasks.lm_char.model import TransformerXL
from powernorm_lab.tasks.ner.model import EntityTagger, TagSequences
from powernorm_lab.tasks.parse.model import IdColumns, TransitionParser
from powernorm_lab.tasks.registry import task_of
from powernorm_lab.tasks.translation.model import NormPlaces, TranslationModel

Model = TypeVar("Model", bound=nn.Module)

FEATURES, HIDDEN, HEADS = 8, 12, 2
VOCABULARY, CHARACTERS, CLASSES = 11, 7, 3
LENGTH = 9
"""Greatest length of a text, where a model has one."""
FREE = ((True,) * CLASSES, ((True,) * CLASSES,) * CLASSES, (True,) * CLASSES)
"""Tags that may all begin, follow each other, and end."""
STATES = [IdColumns(40, 5), IdColumns(7, 5), IdColumns(4, 3)]
"""Ids of a parser's states: words outnumber the rows of a batch, tags and labels do not."""


def factory(norm: str, **options: Any) -> NormFactory:
    return partial(build_norm, norm, **options)


def shaped(changes: dict[str, Any]) -> tuple[TransformerShape, dict[str, Any]]:
    """Return the shape with these changes, and the changes that are not of the shape."""
    known = {item.name for item in fields(TransformerShape)}
    sizes = {"num_features": FEATURES, "num_heads": HEADS, "feedforward_features": HIDDEN}
    own = {name: value for name, value in changes.items() if name in known}
    rest = {name: value for name, value in changes.items() if name not in known}
    return TransformerShape(**{**sizes, "activation": "relu", **own}), rest


def language_model(norm: str = "ln", **changes: Any) -> LanguageModel:
    shape, rest = shaped(changes)
    return LanguageModel(VOCABULARY, factory(norm), shape, max_length=LENGTH, **rest)


def tensorized_model(
    norm: str = "ln", *, sees_future: bool = False, **changes: Any
) -> LanguageModel:
    # With x itself beside BN(x) nothing bounds the input of this attention, which is cubic in it:
    # the model diverges within three steps. The authors' language model starts like this too.
    options = {"eta": 0.0} if norm == "repbn" else {}
    attention = partial(TensorizedAttention, FEATURES, 5, LENGTH, sees_future=sees_future)
    shape, rest = shaped(changes)
    return LanguageModel(
        VOCABULARY,
        factory(norm, **options),
        shape,
        max_length=LENGTH,
        attention=attention,
        **rest,
    )


def transformer_xl(norm: str = "ln", *, memory_length: int = 4, **changes: Any) -> TransformerXL:
    shape, rest = shaped({"placement": "post", **changes})
    return TransformerXL(VOCABULARY, factory(norm), shape, memory_length=memory_length, **rest)


def text_classifier(norm: str = "ln", **changes: Any) -> TextClassifier:
    shape, rest = shaped(changes)
    return TextClassifier(
        VOCABULARY,
        CLASSES,
        factory(norm),
        shape,
        max_length=LENGTH,
        upper_norm=factory("ln"),
        **rest,
    )


def entity_tagger(norm: str = "ln", **changes: Any) -> EntityTagger:
    shape, rest = shaped({"placement": "post", "num_layers": 2, **changes})
    given = {"embedding_features": 5, "num_characters": CHARACTERS, "character_features": 4}
    return EntityTagger(VOCABULARY, TagSequences(*FREE), factory(norm), shape, **{**given, **rest})


def translation_model(
    encoder_norm: str = "ln",
    decoder_norm: str = "ln",
    *,
    vocabulary: int = VOCABULARY,
    **changes: Any,
) -> TranslationModel:
    shape, rest = shaped(changes)
    places = NormPlaces.everywhere(factory(encoder_norm))
    return TranslationModel(vocabulary, vocabulary, places, factory(decoder_norm), shape, **rest)


def transition_parser(norm: str = "ln", **changes: Any) -> TransitionParser:
    sizes = {"num_features": FEATURES, "num_layers": 2, "embedding_features": 6, "dropout": 0.0}
    return TransitionParser(STATES, 9, factory(norm), **{**sizes, **changes})


def convnet(norm: str = "ln", **options: Any) -> ConvNet:
    return ConvNet(factory(norm, feature_dim=1), **options)


def resnet(norm: str | NormFactory = "ln", **options: Any) -> ResNet:
    made = factory(norm, feature_dim=1) if isinstance(norm, str) else norm
    narrow = {"stages": ((4, 1), (8, 2), (12, 1)), "num_channels": 1, "projects": False}
    return ResNet(made, **{**narrow, **options})


def series_model(architecture: str, norm: str = "ln", *, seed: int = 0, **changes: Any) -> Any:
    assignments = [f"model.{name}={value}" for name, value in changes.items()]
    config = override(
        recipe("sequences", "smoke"), [f"model.architecture={architecture}", *assignments]
    )
    return task_of(config).build(config, norm, (12, 9), seed)


# Inputs ------------------------------------------------------------------------------------------


def tokens(
    rows: int = 3, length: int = LENGTH, seed: int = 0, vocabulary: int = VOCABULARY
) -> Tensor:
    """Return tokens that are not 0, which ends a sentence."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocabulary, (rows, length), generator=generator)


def padding(*lengths: int, length: int | None = None) -> Tensor:
    """Return the mask of rows of these lengths."""
    return torch.arange(length or max(lengths)) >= torch.tensor(lengths)[:, None]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def states(rows: int = 16, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(n, (rows, number), generator=generator) for n, number in STATES]
    return torch.cat(columns, dim=1)


class TinyModel(NamedTuple):
    """A model of a task, and how to call it."""

    build: Callable[..., Any]
    """Function of the norm, `seed`, `placement` and `dropout`, as far as the model has them."""
    inputs: Callable[[int], dict[str, Tensor]]
    """Function that makes a batch without padding by seed."""
    num_weights: int
    """Number of parameters outside the norms."""
    masks: Mapping[str, str] = {}
    """Names of masks by the names of the inputs that have padding."""
    outputs_of: str | None = None
    """Input whose positions have an output each; None for one output a row."""
    variants: tuple[dict[str, str], ...] = ({},)
    """Changes of the shape; where there are placements, the first two are pre- and post-norm."""


def _text(seed: int) -> dict[str, Tensor]:
    return {"tokens": tokens(seed=seed)}


def _tagged(seed: int) -> dict[str, Tensor]:
    characters = tokens(3, 4 * LENGTH, seed + 1, CHARACTERS).view(3, LENGTH, 4)
    return {"tokens": tokens(seed=seed), "characters": characters}


def _pairs(seed: int) -> dict[str, Tensor]:
    return {"source": tokens(3, 6, seed), "target": tokens(3, 5, seed + 100)}


def _twice(norm: str = "ln", **changes: Any) -> TranslationModel:
    return translation_model(norm, norm, **{"shared_embeddings": "none", **changes})


def paired(seed: int, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """Return sentences of different lengths and the beginnings of their translations."""
    return {
        "source": tokens(4, 6, seed, vocabulary),
        "target": tokens(4, 5, seed + 100, vocabulary),
        "source_padding_mask": padding(6, 6, 4, 3),
    }


TEXT = {"tokens": "padding_mask"}
SIDES = {"source": "source_padding_mask", "target": "target_padding_mask"}
TAGGED = {**TEXT, "characters": "padding_mask"}
PLACED = tuple({"placement": one} for one in PLACEMENTS)
NORMED = (*PLACED, {"qk_norm": "whole"}, {"qk_norm": "per_head"})
UNNORMED = tuple(one for one in PLACED if one["placement"] not in ("bn-linear", "hybrid"))
"""Variants of an attention that has no place for norms of queries, keys and values."""

MODELS = {
    "lm": TinyModel(language_model, _text, 22, TEXT, "tokens", NORMED),
    "translation": TinyModel(_twice, _pairs, 55, SIDES, "target", NORMED),
    "tagger": TinyModel(entity_tagger, _tagged, 27, TAGGED, "tokens", UNNORMED),
    **{
        f"classifier, {pooling}": TinyModel(
            partial(text_classifier, pooling=pooling, embedding_features=5),
            _text,
            26 + (pooling == "cls"),
            TEXT,
            variants=PLACED,
        )
        for pooling in ("mean", "max", "cls")
    },
    "tensorized": TinyModel(tensorized_model, _text, 21, variants=PLACED[:2]),
    "transformer-xl": TinyModel(transformer_xl, _text, 22, variants=UNNORMED),
    "parser": TinyModel(transition_parser, lambda seed: {"states": states(seed=seed)}, 9),
    "convnet": TinyModel(convnet, lambda seed: {"pixels": drawn(6, 1, 28, 28, seed=seed)}, 8),
    "resnet": TinyModel(resnet, lambda seed: {"pixels": drawn(6, 1, 28, 28, seed=seed)}, 11),
    "projecting": TinyModel(
        partial(resnet, projects=True),
        lambda seed: {"pixels": drawn(6, 1, 28, 28, seed=seed)},
        13,
    ),
    **{
        name: TinyModel(
            partial(series_model, name),
            lambda seed: {"series": drawn(3, 16, 12, seed=seed)},
            number,
            {"series": "padding_mask"},
        )
        for name, number in (("conformer", 28), ("patch", 14), ("encoder", 14))
    },
}


# Checks ------------------------------------------------------------------------------------------


def trained(
    model: Model, inputs: Callable[[int], Mapping[str, Tensor]], steps: int = 3, rate: float = 0.1
) -> Model:
    """Return the model in evaluation mode, with trained weights and running statistics."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * (torch.rand(parameter.shape, generator=generator) - 0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for step in range(steps):
        outputs = model.train()(**inputs(step))
        outputs = outputs.flatten(0, -2)
        optimizer.zero_grad()
        F.cross_entropy(outputs, torch.arange(len(outputs)) % CLASSES).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # `none` diverges without it
        optimizer.step()
    return model.eval()


def outside_norms(model: nn.Module) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if "norm" not in name}


@torch.no_grad()
def check_causal(predict: Callable[[Tensor], Tensor], text: Tensor) -> None:
    """Check that a token changes outputs from its position on, and none before it."""
    expected = predict(text)
    for position in range(text.shape[1]):
        changed = text.clone()
        changed[:, position] = changed[:, position] % (VOCABULARY - 1) + 1
        got = predict(changed)
        assert torch.equal(got[:, :position], expected[:, :position])
        assert not torch.allclose(got[:, position:], expected[:, position:])
