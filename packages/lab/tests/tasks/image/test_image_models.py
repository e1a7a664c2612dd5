from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.norms import NORMS, BatchNorm, BatchStatisticsNorm, Norm, build_norm
from powernorm.surgery import fold, swap
from powernorm_lab.tasks.image.models import RESNET18, RESNET20, ConvNet, ResidualBlock, ResNet

NARROW = ((4, 1), (8, 2), (12, 1))
Build = Callable[..., nn.Module]


def _norm(name: str, **options: Any) -> Callable[[int], nn.Module]:
    return lambda num_features: build_norm(name, num_features, feature_dim=1, **options)


def _convnet(norm: str, **options: int) -> nn.Module:
    return ConvNet(_norm(norm), **options)  # type: ignore[arg-type]


def _resnet(norm: str, *, projects: bool = False, **options: int) -> nn.Module:
    return ResNet(_norm(norm), stages=NARROW, projects=projects, **{"num_channels": 1, **options})


MODELS: dict[str, Build] = {
    "convnet": _convnet,
    "resnet": _resnet,
    "projecting": partial(_resnet, projects=True),
}


def _pixels(num_images: int = 6, channels: int = 1, side: int = 28, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_images, channels, side, side, generator=generator)


def _trained(model: nn.Module) -> nn.Module:
    """Return the model in evaluation mode, with trained weights and running statistics."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for step in range(4):
        loss = F.cross_entropy(model(_pixels(seed=step)), torch.arange(6))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


@pytest.mark.parametrize("side", [28, 32])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_shapes(name: str, channels: int, side: int) -> None:
    options = {"num_channels": channels, "num_classes": 7}
    if name == "convnet":
        options["side"] = side
    model = MODELS[name]("bn", **options)
    pixels = _pixels(channels=channels, side=side)
    features = model.features(pixels)  # type: ignore[operator]
    assert features.shape == (6, 500 if name == "convnet" else 12)
    assert model(pixels).shape == (6, 7)
    # Another forward with the same batch statistics: only the head follows the features.
    assert torch.allclose(model.head(features), model(pixels), atol=1e-5)  # type: ignore[operator]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", MODELS)
def test_every_norm_learns_and_predicts_each_image_by_itself(name: str, norm: str) -> None:
    model = _trained(MODELS[name](norm))
    pixels = _pixels(seed=9)
    with torch.no_grad():
        alone = torch.cat([model(image[None]) for image in pixels])
        together = model(pixels)
    assert together.isfinite().all()
    assert torch.allclose(alone, together, atol=1e-4)
    for parameter in model.parameters():
        assert parameter.grad is not None


@pytest.mark.parametrize("name", MODELS)
def test_equal_seeds_give_equal_weights_to_all_norms(name: str) -> None:
    def weights(norm: str, seed: int) -> dict[str, Tensor]:
        model = MODELS[name](norm, seed=seed)
        return {key: value for key, value in model.state_dict().items() if "norm" not in key}

    torch.manual_seed(1)
    reference = weights("ln", 0)
    assert len(reference) >= 6
    for norm in ("bn", "pn", "none"):
        torch.manual_seed(2)
        for key, value in weights(norm, 0).items():
            assert torch.equal(value, reference[key]), key
    other = weights("ln", 1)
    assert all(
        not torch.equal(value, reference[key])
        for key, value in other.items()
        if key != "head.bias" or name == "convnet"
    )


def test_the_network_of_xu_et_al() -> None:
    model = ConvNet(_norm("ln"))
    shapes = {key: tuple(value.shape) for key, value in model.named_parameters()}
    assert shapes == {
        "first.weight": (20, 1, 5, 5),
        "first.bias": (20,),
        "second.weight": (50, 20, 5, 5),
        "second.bias": (50,),
        "hidden.weight": (500, 800),
        "hidden.bias": (500,),
        "norm.weight": (500,),
        "norm.bias": (500,),
        "head.weight": (10, 500),
        "head.bias": (10,),
    }


def test_the_norm_stands_before_the_activation() -> None:
    model = ConvNet(_norm("ln-simple"))
    pixels = _pixels()
    x = F.max_pool2d(F.relu(F.conv2d(pixels, model.first.weight, model.first.bias)), 2)
    x = F.max_pool2d(F.relu(F.conv2d(x, model.second.weight, model.second.bias)), 2)
    hidden = F.linear(x.flatten(1), model.hidden.weight, model.hidden.bias)
    expected = F.relu(F.layer_norm(hidden, (500,)))
    assert torch.allclose(model.features(pixels), expected, atol=1e-5)


def test_sizes_of_the_published_networks() -> None:
    """He et al. 2016: 0.27M parameters and 20 layers with weights; ResNet-18 has 11.2M."""
    small = ResNet(_norm("bn"))
    assert sum(p.numel() for p in small.parameters()) == 269_722
    layers = [m for m in small.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 20
    assert sum(isinstance(m, Norm) for m in small.modules()) == 19
    big = ResNet(_norm("bn"), stages=RESNET18, projects=True)
    assert sum(p.numel() for p in big.parameters()) == 11_173_962
    main = [m for m in big.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len([m for m in main if getattr(m, "kernel_size", None) != (1, 1)]) == 18


def test_stages_halve_the_images() -> None:
    model = ResNet(_norm("bn"), stages=RESNET20)
    shapes: list[tuple[int, ...]] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape[1:])))
    model(_pixels(2, 3, 32))
    assert shapes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3


def test_a_shortcut_without_weights() -> None:
    """The shortcut takes every other pixel, and zeros for new channels."""
    block = ResidualBlock(2, 5, _norm("none"), stride=2, projects=False)
    nn.init.zeros_(block.second.weight)
    x = _pixels(3, 2).abs()
    out = block(x)
    assert torch.equal(out[:, :2], x[:, :, ::2, ::2])
    assert not out[:, 2:].any()
    assert out.shape == (3, 5, 14, 14)


@pytest.mark.parametrize("norm", ["bn", "pn", "ln"])
def test_memory_layout_makes_no_difference(norm: str) -> None:
    model = _trained(_resnet(norm))
    pixels = _pixels(seed=3)
    packed = pixels.to(memory_format=torch.channels_last)
    assert torch.allclose(model(pixels), model(packed), atol=1e-5)


def test_batch_norm_is_torch_s() -> None:
    def make(num_features: int) -> nn.Module:
        return _Torch(num_features)

    ours = ResNet(_norm("bn", start="torch"), stages=NARROW, projects=True, num_channels=1)
    theirs = ResNet(make, stages=NARROW, projects=True, num_channels=1)
    pixels = _pixels()
    for model in (ours, theirs):
        F.cross_entropy(model(pixels), torch.arange(6)).backward()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.allclose(one.grad, other.grad, atol=1e-4)
    assert torch.allclose(ours.eval()(pixels), theirs.eval()(pixels), atol=1e-4)


class _Torch(nn.BatchNorm2d):
    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        assert padding_mask is None
        return super().forward(x)


@pytest.mark.parametrize("name", MODELS)
def test_static_norms_fold_to_none(name: str) -> None:
    model = _trained(MODELS[name]("bn")).double()
    pixels = _pixels(seed=5).double()
    expected = model(pixels)
    fold(model, (pixels,))
    assert not [m for m in model.modules() if isinstance(m, BatchStatisticsNorm)]
    assert torch.allclose(model(pixels), expected, atol=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_norms_can_be_swapped(name: str) -> None:
    model = MODELS[name]("ln")
    count = sum(isinstance(m, Norm) for m in model.modules())
    swap(model, "bn")
    found = [m for m in model.modules() if isinstance(m, BatchNorm)]
    assert len(found) == count
    assert torch.equal(found[0].running_mean, torch.zeros_like(found[0].running_mean))
    _trained(model)
    assert all(bool(norm.running_mean.any()) for norm in found)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: _convnet("ln", num_channels=2), "num_channels=2: give 1"),
        (lambda: _resnet("ln", num_channels=4), "num_channels=4: give 1"),
        (lambda: _convnet("ln", side=30), r"side=30: give 28 \(MNIST\) or 32"),
        (
            lambda: _convnet("ln")(_pixels(side=32)),
            r"shape \(6, 1, 32, 32\): the model takes \(images, 1, 28, 28\)",
        ),
        (
            lambda: _resnet("ln")(_pixels(channels=3)),
            r"takes \(images, 1, 28, 28\) or \(images, 1, 32, 32\)",
        ),
        (lambda: _resnet("ln")(_pixels()[0]), r"shape \(1, 28, 28\)"),
        (lambda: _resnet("ln")(_pixels()[:, :, :27]), r"shape \(6, 1, 27, 28\)"),
    ],
)
def test_input_of_another_shape(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
