import copy
import math
from collections import Counter
from pathlib import Path

import pytest
import safetensors.torch
import torch
from lab.tests.tiny_models import (
    FEATURES,
    VOCABULARY,
    factory,
    padding,
    paired,
    tokens,
    trained,
    translation_model,
)
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms import BatchNorm, LayerNorm, Norm, PowerNorm, RMSNorm
from powernorm_lab.models.choices import Placement, TransformerShape
from powernorm_lab.models.positions import sinusoidal_positions
from powernorm_lab.tasks.translation.model import NormPlaces, TranslationModel
from powernorm_lab.tasks.translation.settings import SharedEmbeddings


def test_outputs_depend_on_every_source_token() -> None:
    model, target = trained(translation_model("bn"), paired), tokens(2, 3)
    for position in range(4):
        source = tokens(2, 4)
        expected = model(source, target)
        source[:, position] = source[:, position] % (VOCABULARY - 1) + 1
        assert not torch.isclose(model(source, target), expected).all(-1).any()


def wide(initialization: str, shared: SharedEmbeddings = "none") -> TranslationModel:
    norms = NormPlaces.everywhere(factory("ln"))
    return TranslationModel(
        300,
        300,
        norms,
        factory("ln"),
        TransformerShape(
            num_features=64,
            feedforward_features=200,
            initialization=initialization,
            activation="relu",
        ),
        shared_embeddings=shared,
    )


@pytest.mark.parametrize("initialization", ["xavier", "kaiming"])
def test_initial_weights_have_their_distributions(initialization: str) -> None:
    model = wide(initialization)
    for module in model.modules():
        if isinstance(module, nn.Embedding) or module is model.head:
            assert isinstance(module.weight, Tensor)
            assert float(module.weight.detach().std()) == pytest.approx(1 / 8, rel=0.05)
        elif isinstance(module, nn.Linear):
            inputs, outputs = module.in_features, module.out_features
            xavier = initialization == "xavier"
            bound = math.sqrt(6 / (inputs + outputs)) if xavier else 1 / math.sqrt(inputs)
            largest = float(module.weight.detach().abs().max())
            assert 0.97 * bound < largest <= bound
            assert 0 <= float(module.bias.detach().abs().max()) <= (0 if xavier else bound)
            assert xavier or float(module.bias.detach().abs().max()) > 0.8 * bound


def places_of(model: TranslationModel) -> dict[str, str]:
    return {name: type(m).__name__ for name, m in model.named_modules() if isinstance(m, Norm)}


@pytest.mark.parametrize("placement", ["pre", "post"])
def test_placement_decides_where_norms_stand(placement: Placement) -> None:
    found = Counter(
        ".".join(name.split(".")[:2])
        for name in places_of(translation_model("bn", placement=placement))
    )
    finals = {"encoder.norm": 1, "decoder.norm": 1} if placement == "pre" else {}
    assert found == {"encoder.layers": 2 * 2, "decoder.layers": 2 * 3, **finals}


def test_every_place_has_its_own_norm() -> None:
    model = TranslationModel(
        VOCABULARY,
        VOCABULARY,
        NormPlaces(layers=BatchNorm, final=RMSNorm),
        LayerNorm,
        TransformerShape(num_features=FEATURES, activation="relu"),
        num_decoder_layers=3,
    )
    found = places_of(model)
    assert {found.pop(f"encoder.layers.{i}.attention_frame.norm") for i in (0, 1)} == {"BatchNorm"}
    assert {found.pop(f"encoder.layers.{i}.feedforward_frame.norm") for i in (0, 1)} == {
        "BatchNorm"
    }
    assert found.pop("encoder.norm") == "RMSNorm"
    assert Counter(found.values()) == {"LayerNorm": 3 * 3 + 1}


@pytest.mark.parametrize("lowest", [0, 1, 2])
def test_norms_of_the_lowest_layers_only(lowest: int) -> None:
    model = TranslationModel(
        VOCABULARY,
        VOCABULARY,
        NormPlaces(layers=BatchNorm, final=PowerNorm),
        LayerNorm,
        TransformerShape(num_features=FEATURES, num_norm_layers=lowest, activation="relu"),
        upper_norm=RMSNorm,
    )
    found = places_of(model)
    assert found["encoder.norm"] == ("PowerNorm" if lowest == 2 else "RMSNorm")
    assert found["encoder.layers.0.attention_frame.norm"] == ("BatchNorm" if lowest else "RMSNorm")
    assert found["encoder.layers.1.feedforward_frame.norm"] == (
        "BatchNorm" if lowest == 2 else "RMSNorm"
    )


@pytest.mark.parametrize(("shared", "num_tables"), [("all", 1), ("target", 2), ("none", 3)])
def test_shared_embeddings(shared: SharedEmbeddings, num_tables: int, tmp_path: Path) -> None:
    model = translation_model("bn", shared_embeddings=shared)
    file = tmp_path / "model.safetensors"
    safetensors.torch.save_model(model, str(file))
    loaded = translation_model("bn", shared_embeddings=shared, seed=1)
    safetensors.torch.load_model(loaded, file)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    again = translation_model("bn", shared_embeddings=shared, seed=1)
    again.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    expected = model.eval()(tokens(2, 4), tokens(2, 3))
    for other in (model, loaded, again, copy.deepcopy(model)):
        source, target = other.source_embedding.weight, other.target_embedding.weight
        assert (source is target) == (shared == "all")
        assert (target is other.head.weight) == (shared != "none")
        assert sum(p.shape == (VOCABULARY, FEATURES) for p in other.parameters()) == num_tables
        assert torch.equal(other.eval()(tokens(2, 4), tokens(2, 3)), expected)


def test_vocabularies_of_different_sizes() -> None:
    norms = NormPlaces.everywhere(LayerNorm)
    with pytest.raises(InputError, match=r"one vocabulary, got 9 tokens .* and 7 of the"):
        TranslationModel(
            9, 7, norms, LayerNorm, TransformerShape(num_features=FEATURES, activation="relu")
        )
    model = TranslationModel(
        9,
        7,
        norms,
        LayerNorm,
        TransformerShape(num_features=8, activation="relu"),
        shared_embeddings="target",
    )
    assert model(torch.full((1, 2), 8), torch.full((1, 3), 6)).shape == (1, 3, 7)


def naive_attention(attention: nn.Module, x: Tensor, memory: Tensor, causal: bool) -> Tensor:
    """Compute the attention of one sentence, position by position and head by head."""
    size = FEATURES // 2
    queries = attention.query(x)  # type: ignore[operator]
    keys, values = attention.key_value(memory).split(FEATURES, dim=-1)  # type: ignore[operator]
    rows = []
    for position in range(len(x)):
        seen = slice(0, position + 1 if causal else None)
        heads = []
        for part in (slice(0, size), slice(size, None)):
            scores = keys[seen, part] @ queries[position, part] / math.sqrt(size)
            heads.append(scores.softmax(0) @ values[seen, part])
        rows.append(torch.cat(heads))
    mixed: Tensor = attention.output(torch.stack(rows))  # type: ignore[operator]
    return mixed


def naive_forward(model: TranslationModel, source: Tensor, target: Tensor) -> Tensor:
    """Compute the equations of Vaswani et al. 2017 for one sentence, with the model's modules."""
    pre = model.encoder.norm is not None

    def framed(frame, x, sublayer):  # type: ignore[no-untyped-def]
        return x + sublayer(frame.norm(x)) if pre else frame.norm(x + sublayer(x))

    def feedforward(layer, x):  # type: ignore[no-untyped-def]
        return layer.feedforward[3](layer.feedforward[0](x).relu())

    def embedded(embedding, ids):  # type: ignore[no-untyped-def]
        scaled = embedding.weight[ids] * math.sqrt(FEATURES)
        return scaled + sinusoidal_positions(len(ids), FEATURES).double()

    memory = embedded(model.source_embedding, source)
    for layer in model.encoder.layers:
        attention = layer.attention
        memory = framed(
            layer.attention_frame, memory, lambda y, a=attention: naive_attention(a, y, y, False)
        )
        memory = framed(layer.feedforward_frame, memory, lambda y, e=layer: feedforward(e, y))
    memory = model.encoder.norm(memory) if pre else memory
    x = embedded(model.target_embedding, target)
    for layer in model.decoder.layers:
        attention, cross = layer.attention, layer.memory_attention
        x = framed(layer.attention_frame, x, lambda y, a=attention: naive_attention(a, y, y, True))
        x = framed(layer.memory_frame, x, lambda y, a=cross: naive_attention(a, y, memory, False))
        x = framed(layer.feedforward_frame, x, lambda y, e=layer: feedforward(e, y))
    x = model.decoder.norm(x) if pre else x
    return x @ model.head.weight.T


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("norm", ["ln", "bn"])
def test_forward_against_its_equations(norm: str, placement: Placement) -> None:
    model = trained(
        translation_model(norm, placement=placement, shared_embeddings="none"), paired
    ).double()
    source, target = tokens(1, 5), tokens(1, 4, seed=1)
    expected = naive_forward(model, source[0], target[0])
    got = model(source, target)
    torch.testing.assert_close(got[0], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(got, model.head(model.features(source, target)))


@pytest.mark.parametrize("where", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_acts_in_training_only(where: str) -> None:
    rates = {"activation_dropout": 0.0, where: 0.5}
    model = translation_model(**rates)  # type: ignore[arg-type]
    source, target = tokens(2, 4), tokens(2, 3)
    assert not torch.equal(model(source, target), model(source, target))
    model.eval()
    assert torch.equal(model(source, target), model(source, target))


def test_dropout_of_activations_is_that_of_the_rest_where_not_given() -> None:
    rates = {m.p for m in translation_model(dropout=0.3).modules() if isinstance(m, nn.Dropout)}
    assert rates == {0.3}
    model = translation_model(dropout=0.3, activation_dropout=0.1)
    found = Counter(m.p for m in model.modules() if isinstance(m, nn.Dropout))
    assert found == {0.1: 4, 0.3: 1 + 2 * 2 + 2 * 3}


@pytest.mark.slow
def test_compiled_model_equals_the_eager_one() -> None:
    model = translation_model("bn", num_layers=1)
    compiled = torch.compile(
        copy.deepcopy(model), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for length in (4, 6):
        mask = padding(length, 3)
        args = (tokens(2, length), tokens(2, length + 1), mask, padding(length + 1, 2))
        expected, got = model(*args), compiled(*args)
        torch.testing.assert_close(got, expected)
        expected.square().mean().backward()
        got.square().mean().backward()
    for ours, theirs in zip(compiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
