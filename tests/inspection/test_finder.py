"""Norms in models of every family are found and read by their computation, not by their name."""

from __future__ import annotations

import contextlib
import re

import pytest
import torch
from torch import Tensor, nn

import powernorm
from powernorm.diagnosis.targets import find_targets
from powernorm.inspection.finder import FoundNorm, find_norms
from powernorm.inspection.reading import Reading, read_norm
from powernorm.inspection.selection import Site, place
from refusals import refuses
from surgery.foreign_models import FAMILIES, WIDTH, timm


def found(model: nn.Module) -> dict[str, FoundNorm]:
    return {norm.names[0]: norm for norm in find_norms(model)}


def sites(name: str) -> dict[str, Site]:
    model, _ = FAMILIES[name]()
    return {site.name: site for site in place(model, find_norms(model))}


class GammaPlusOne(nn.Module):
    """Some library's RMSNorm, as Gemma's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt() * (1 + self.weight)


class GatedRMSNorm(GammaPlusOne):
    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x) * gate


class RMSNormGated(GammaPlusOne):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        y = super().forward(x)
        return y if gate is None else y * gate


class OddNorm(GammaPlusOne):
    def forward(self, x: Tensor) -> Tensor:
        return x / x.abs().amax(-1, keepdim=True) * self.weight


class ChannelLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class PlusOneRMSNorm(GammaPlusOne):
    pass


class PlainLayerNorm(nn.LayerNorm):
    pass


@pytest.mark.parametrize(
    ("name", "kind", "offset"),
    [
        ("bert", "layer", 0.0),
        ("llama", "rms", 0.0),
        ("t5", "rms", 0.0),
        ("gemma", "rms", 1.0),
        ("x-transformers", "layer", 1.0),
        ("x-transformers-rms", "rms", 1.0),
        ("patchtst", "batch", 0.0),
        ("language-model", "own", 0.0),
    ],
)
def test_what_norms_of_libraries_compute(name: str, kind: str, offset: float) -> None:
    for site in sites(name).values():
        assert site.norm.reading is not None
        assert (site.norm.reading.kind, site.norm.reading.offset) == (kind, offset)


def test_reading_leaves_the_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    sites("gemma")
    FAMILIES["gemma"]()
    before = torch.get_rng_state()
    read_norm(PlusOneRMSNorm())
    assert torch.equal(torch.get_rng_state(), before)
    torch.set_rng_state(state)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_an_unknown_class_is_tried_out(device: str) -> None:
    reading = read_norm(PlusOneRMSNorm().to(device))
    assert isinstance(reading, Reading)
    assert (reading.kind, reading.offset) == ("rms", 1.0)
    reading = read_norm(PlainLayerNorm(WIDTH, bias=False).to(device))
    assert isinstance(reading, Reading)
    assert (reading.kind, reading.bias, reading.eps) == ("layer", None, 1e-5)


@pytest.mark.parametrize(
    ("norm", "reason"),
    [
        (GatedRMSNorm(), "alone"),
        (RMSNormGated(), "also takes gate"),
        (OddNorm(), "neither LayerNorm nor RMSNorm"),
        (nn.LayerNorm((3, WIDTH)), "2 dimensions"),
        (nn.LocalResponseNorm(2), "neighboring channels"),
        (nn.LazyBatchNorm2d(), "has not seen an input yet"),
    ],
)
def test_what_cannot_be_swapped_says_why(norm: nn.Module, reason: str) -> None:
    (only,) = find_norms(nn.Sequential(norm))
    assert only.reading is None
    assert reason in only.reason


@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (ChannelLayerNorm(WIDTH), "layer"),
        (nn.BatchNorm1d(WIDTH), "batch"),
        (nn.BatchNorm2d(WIDTH), "batch"),
        (nn.SyncBatchNorm(WIDTH), "batch"),
        (nn.GroupNorm(2, WIDTH), "channel"),
        (nn.InstanceNorm2d(WIDTH, affine=True), "channel"),
        (powernorm.BatchNorm(WIDTH, feature_dim=1), "own"),
    ],
)
def test_norms_over_channels(norm: nn.Module, kind: str) -> None:
    reading = read_norm(norm)
    assert isinstance(reading, Reading)
    assert (reading.kind, reading.feature_dim, reading.num_features) == (kind, 1, WIDTH)
    assert reading.weight is norm.weight


def test_norms_over_channels_in_timm() -> None:
    library = timm()
    reading = read_norm(library.layers.LayerNorm2d(WIDTH))
    assert isinstance(reading, Reading)
    assert (reading.kind, reading.feature_dim) == ("layer", 1)
    for norm in (library.layers.LayerNorm(WIDTH), library.layers.LayerNormFp32(WIDTH)):
        reading = read_norm(norm)
        assert isinstance(reading, Reading)
        assert reading.kind == "layer"
    reading = read_norm(library.layers.RmsNorm(WIDTH))
    assert isinstance(reading, Reading)
    assert reading.kind == "rms"


def test_norms_of_queries_and_keys_stay() -> None:
    library = timm()
    model = library.models.vision_transformer.VisionTransformer(
        img_size=8, patch_size=4, embed_dim=WIDTH, depth=1, num_heads=2, qk_norm=True
    )
    norms = found(model)
    for name in ("blocks.0.attn.q_norm", "blocks.0.attn.k_norm"):
        assert "queries, keys or values" in norms[name].reason
    assert norms["blocks.0.norm1"].reading is not None


def test_shared_norms_are_one_with_several_names() -> None:
    norm = nn.LayerNorm(WIDTH)
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm)
    model = nn.Sequential(layer, norm, layer)
    (only,) = find_norms(model)
    assert only.names == ("0.1", "1", "2.1")
    assert [(slot.parent, slot.attribute) for slot in only.slots] == [(layer, "1"), (model, "1")]


def test_what_is_inside_a_norm_is_none_of_its_own() -> None:
    assert not any(name.endswith("batchnorm") for name in sites("patchtst"))
    assert not any(name.endswith(".ln") for name in sites("x-transformers"))
    assert find_norms(nn.Linear(2, 2)) == ()


ROLES = {
    "torch-encoder": ("layers.0.norm1 attention", "layers.1.norm2 feed-forward", "norm final"),
    "torch-layer": ("norm1 attention", "norm2 feed-forward"),
    "torch-transformer": (
        "decoder.layers.0.norm2 attention",
        "decoder.layers.0.norm3 feed-forward",
        "decoder.norm final",
    ),
    "bert": (
        "embeddings.LayerNorm embedding",
        "encoder.layer.0.attention.output.LayerNorm attention",
        "encoder.layer.0.output.LayerNorm feed-forward",
    ),
    "roberta": ("lm_head.layer_norm other",),
    "distilbert": (
        "transformer.layer.0.sa_layer_norm attention",
        "transformer.layer.0.output_layer_norm feed-forward",
    ),
    "gpt2": (
        "transformer.h.1.ln_1 attention",
        "transformer.h.1.ln_2 feed-forward",
        "transformer.ln_f final",
    ),
    "llama": (
        "model.layers.0.input_layernorm attention",
        "model.layers.0.post_attention_layernorm feed-forward",
        "model.norm final",
    ),
    "t5": (
        "encoder.block.0.layer.0.layer_norm attention",
        "encoder.block.0.layer.1.layer_norm feed-forward",
        "encoder.final_layer_norm final",
        "decoder.block.0.layer.1.layer_norm attention",
        "decoder.block.0.layer.2.layer_norm feed-forward",
    ),
    "bart": (
        "model.encoder.layernorm_embedding embedding",
        "model.encoder.layers.0.self_attn_layer_norm attention",
        "model.encoder.layers.0.final_layer_norm feed-forward",
        "model.decoder.layers.0.encoder_attn_layer_norm attention",
    ),
    "vit": (
        "layers.0.layernorm_before attention",
        "layers.0.layernorm_after feed-forward",
        "layernorm final",
    ),
    "whisper-encoder": ("layers.0.final_layer_norm feed-forward", "layer_norm final"),
    "patchtst": (
        "model.encoder.layers.0.norm_sublayer1 attention",
        "model.encoder.layers.0.norm_sublayer3 feed-forward",
    ),
    "timm-vit": ("blocks.0.norm1 attention", "blocks.0.norm2 feed-forward", "norm final"),
    "x-transformers": (
        "attn_layers.layers.0.0.0 attention",
        "attn_layers.layers.3.0.0 feed-forward",
        "attn_layers.final_norm final",
    ),
    "language-model": (
        "layers.0.attention_frame.norm attention",
        "layers.0.feedforward_frame.norm feed-forward",
        "final_norm final",
    ),
}


@pytest.mark.parametrize("name", ROLES)
def test_roles(name: str) -> None:
    roles = {site.name: site.role for site in sites(name).values()}
    for line in ROLES[name]:
        norm, role = line.split()
        assert roles[norm] == role, line


@pytest.mark.parametrize("name", FAMILIES)
def test_sides_and_layers(name: str) -> None:
    both = name in ("t5", "bart", "marian") or name.startswith("torch-transformer")
    for site in sites(name).values():
        assert (site.side is not None) == both
        if site.side is not None:
            assert site.side in site.name
        inside = site.role in ("attention", "feed-forward") and not name.startswith("torch-layer")
        assert (site.layer in (0, 1)) == inside


def test_a_linear_called_decoder_makes_no_encoder_decoder() -> None:
    from transformers import BertForMaskedLM

    bert, _ = FAMILIES["bert"]()
    model = BertForMaskedLM(bert.config)
    places = place(model, find_norms(model))
    assert {site.side for site in places} == {None}
    assert places[-1].name == "cls.predictions.transform.LayerNorm"
    assert places[-1].role == "other"


def test_a_parametrization_is_no_norm() -> None:
    linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
    assert find_norms(nn.Sequential(linear)) == ()


def test_an_own_norm_without_parameters() -> None:
    reading = read_norm(powernorm.SimpleLayerNorm(WIDTH))
    assert isinstance(reading, Reading)
    assert reading.weight is None


class Scaled(nn.Module):
    """Computes RMSNorm; neither its name nor that of γ says so."""

    def __init__(self, size: int = WIDTH) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x * x.square().mean(-1, keepdim=True).add(1e-6).rsqrt()


class LayerScale(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("name", ["LayerNormalization", "LN", "RMS", "RMSN", "RMSNormFP32"])
def test_names_that_people_give(name: str) -> None:
    kind = "layer" if name.startswith("L") else "rms"
    parent = nn.LayerNorm if kind == "layer" else nn.RMSNorm
    model = nn.Sequential(type(name, (parent,), {})(WIDTH), nn.Linear(WIDTH, 3))
    assert found(model)["0"].reading.kind == kind


def test_a_class_that_does_not_say_it_is_found_by_what_it_computes() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Scaled(), LayerScale(), nn.PReLU(WIDTH)).train()
    state = torch.random.get_rng_state()
    norms = found(model)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert list(norms) == ["1"]
    assert norms["1"].reading.kind == "rms"
    assert norms["1"].reading.weight is model[1].scale
    assert model.training
    powernorm.swap(model, "rbn")
    assert isinstance(model[1], powernorm.RegularizedBatchNorm)


class Functional(nn.Module):
    """Calls the functions themselves; `layer_norm` of the second is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(self.norm(self.into(x)), (WIDTH,))


class Attribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(x)


def test_functions_that_are_called_are_named_in_every_table() -> None:
    model = nn.Sequential(Functional(), Attribute())
    assert [norm.names for norm in find_norms(model)] == [
        ("0.forward",),
        ("0.norm",),
        ("1.layer_norm",),
    ]
    rows = {row.name: row for row in powernorm.plan_swap(model, "bn", where="*").rows}
    assert rows["0.forward"].action == "keep"
    assert "calls torch.nn.functional.layer_norm" in rows["0.forward"].reason
    with torch.no_grad():
        model[0](torch.randn(8, WIDTH))
    report = powernorm.fold(model.eval(), torch.randn(2, WIDTH))
    actions = {row.name: row.action for row in report.rows}
    assert actions == {"0.norm_call0": "keep", "0.norm": "fold", "1.layer_norm": "keep"}


def test_a_model_that_calls_a_function_itself() -> None:
    model = Functional()
    assert list(found(model)) == ["forward", "norm"]
    assert [row.action for row in powernorm.plan_swap(model, "bn").rows] == ["keep", "swap"]


def test_what_fold_does_not_take_is_in_its_table() -> None:
    """Else the README's check, that every row says `fold`, would be true while a norm stays."""

    class RMSNormFP32(GammaPlusOne):
        pass

    layers = (nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), RMSNormFP32(), nn.Linear(WIDTH, 2))
    model = nn.Sequential(*layers)
    with torch.no_grad():
        model(torch.randn(8, WIDTH))
    report = powernorm.fold(model.eval(), torch.randn(2, WIDTH))
    assert [(row.name, row.action) for row in report.rows] == [("1", "fold"), ("2", "keep")]
    assert report.rows[1].reason.startswith("it depends on each token in evaluation: swap it")


def test_a_declared_class_is_a_norm() -> None:
    class Conditioned(Scaled):
        def forward(self, x: Tensor, speed: Tensor) -> Tensor:
            return super().forward(x) * speed.cos()

    class Faster(Conditioned):
        pass

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Faster(), nn.Linear(WIDTH, 2))
    assert not found(model)
    powernorm.declare_norm(Conditioned, kind="rms")
    reading = found(model)["1"].reading
    assert (reading.kind, reading.num_features, reading.weight) == ("rms", WIDTH, model[1].scale)
    powernorm.swap(model, "bn")
    assert isinstance(model[1], powernorm.BatchNorm)


@pytest.mark.parametrize(
    ("cls", "kind", "message"),
    [
        (Scaled(), "rms", "expected a class"),
        (int, "rms", "expected a class"),
        (Scaled, "RMS", "kind is 'RMS', expected one of layer, rms, batch, channel"),
    ],
)
def test_declarations_that_say_nothing(cls: object, kind: str, message: str) -> None:
    refuses(message, powernorm.declare_norm, cls, kind=kind)


MORE = (
    *("albert", "electra", "deberta-v2", "mpnet", "roformer", "mamba2", "gpt_neo", "gpt_neox"),
    *("opt", "bloom", "falcon", "phi", "qwen3", "mixtral", "olmo2", "gemma3_text", "cohere"),
    *("stablelm", "rwkv", "dinov2", "convnext", "wav2vec2", "mbart", "longformer", "fsmt"),
)
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "hidden_dim", "vocab_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "encoder_layers", "decoder_layers", "n_layer"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "decoder_ffn_dim"), 48),
    "head_dim": 8,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("model_type", MORE)
def test_more_architectures(model_type: str) -> None:
    """Swap and diagnosis name the same norms, and none is missed that calls itself one."""
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(model_type)
    for key, value in SIZES.items():
        # Some are derived from others, and cannot be set.
        with contextlib.suppress(AttributeError):
            if isinstance(getattr(config, key, None), int):
                setattr(config, key, value)
    model = transformers.AutoModel.from_config(config)
    assert_one_set_of_norms(model)


TIMM = (
    *("vit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224", "mixer_s32_224"),
    *("regnetx_002", "poolformer_s12", "cait_xxs24_224", "efficientformerv2_s0", "resnet18"),
    *("gmlp_ti16_224", "xcit_nano_12_p16_224", "levit_128s", "beit_base_patch16_224"),
)


@pytest.mark.parametrize("architecture", TIMM)
def test_more_architectures_of_timm(architecture: str) -> None:
    model = timm().create_model(architecture, pretrained=False, num_classes=2)
    assert_one_set_of_norms(model)


def test_what_does_more_than_torchs_norm_stays() -> None:
    """Else a swap would drop timm's activation, which is inside its BatchNorm."""
    layers = timm().layers
    model = nn.Sequential(
        *(nn.Conv2d(3, 4, 3), layers.BatchNormAct2d(4)),
        *(nn.Conv2d(4, 4, 3), layers.BatchNormAct2d(4, apply_act=False)),
    )
    with torch.no_grad():
        model(torch.randn(8, 3, 9, 9))
    first, second = powernorm.plan_swap(model, "bn").rows
    assert (first.kind, first.action, second.kind, second.action) == (
        *("unknown", "keep"),
        *("batch", "swap"),
    )
    assert "BatchNormAct2d does more than BatchNorm2d of torch" in first.reason
    rows = powernorm.fold(model.eval(), torch.randn(2, 3, 9, 9)).rows
    assert [row.action for row in rows] == ["keep", "fold"]
    assert rows[0].reason == first.reason


def assert_one_set_of_norms(model: nn.Module) -> None:
    norms = {name: norm for norm in find_norms(model) for name in norm.names}
    named = {
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if re.search("(?<!Conv)(?<!Linear)(?<!With)Norm(1d|2d|Gated)?$", type(module).__name__)
        and not type(module).__module__.startswith("torch.nn.utils")
        and not any(name.startswith(f"{outer}.") for outer in norms)
    }
    # Some are called otherwise: a BatchNorm with an activation in it, a GroupNorm of one group.
    assert named <= set(norms)
    assert named == set(norms) or not type(model).__module__.startswith("transformers")
    first = {norm.names[0] for norm in norms.values()}
    assert {row.name for row in powernorm.plan_swap(model, "bn", where="*").rows} == first
    readable = {norm.names[0] for norm in norms.values() if norm.reading is not None}
    assert {target.name for target in find_targets(model, "*")} == readable
