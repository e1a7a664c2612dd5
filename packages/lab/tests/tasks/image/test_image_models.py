import pytest
import torch
import torch.nn.functional as F
from lab.tests.tiny_models import MODELS, convnet, drawn, factory, resnet, trained
from torch import Tensor, nn

from powernorm.norms import BatchNorm, Norm
from powernorm.surgery import swap
from powernorm_lab.tasks.image.model import RESNET18, RESNET20, ResidualBlock, ResNet

IMAGES = ("convnet", "resnet", "projecting")
READ = MODELS["convnet"].inputs


@pytest.mark.parametrize("side", [28, 32])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", IMAGES)
def test_shapes(name: str, channels: int, side: int) -> None:
    options = {"num_channels": channels, "num_classes": 7}
    if name == "convnet":
        options["side"] = side
    model = MODELS[name].build("bn", **options)
    pixels = drawn(6, channels, side, side)
    features = model.features(pixels)  # type: ignore[operator]
    assert features.shape == (6, 500 if name == "convnet" else 12)
    assert model(pixels).shape == (6, 7)
    # Another forward with the same batch statistics: only the head follows the features.
    assert torch.allclose(model.head(features), model(pixels), atol=1e-5)  # type: ignore[operator]


def test_the_network_of_xu_et_al() -> None:
    model = convnet()
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
    model = convnet("ln-simple")
    pixels = drawn(6, 1, 28, 28)
    x = F.max_pool2d(F.relu(F.conv2d(pixels, model.first.weight, model.first.bias)), 2)
    x = F.max_pool2d(F.relu(F.conv2d(x, model.second.weight, model.second.bias)), 2)
    hidden = F.linear(x.flatten(1), model.hidden.weight, model.hidden.bias)
    expected = F.relu(F.layer_norm(hidden, (500,)))
    assert torch.allclose(model.features(pixels), expected, atol=1e-5)


def test_sizes_of_the_published_networks() -> None:
    """He et al. 2016: 0.27M parameters and 20 layers with weights; ResNet-18 has 11.2M."""
    small = ResNet(factory("bn", feature_dim=1))
    assert sum(p.numel() for p in small.parameters()) == 269_722
    layers = [m for m in small.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len(layers) == 20
    assert sum(isinstance(m, Norm) for m in small.modules()) == 19
    big = ResNet(factory("bn", feature_dim=1), stages=RESNET18, projects=True)
    assert sum(p.numel() for p in big.parameters()) == 11_173_962
    main = [m for m in big.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
    assert len([m for m in main if getattr(m, "kernel_size", None) != (1, 1)]) == 18


def test_stages_halve_the_images() -> None:
    model = ResNet(factory("bn", feature_dim=1), stages=RESNET20)
    shapes: list[tuple[int, ...]] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape[1:])))
    model(drawn(2, 3, 32, 32))
    assert shapes == [(16, 32, 32)] * 3 + [(32, 16, 16)] * 3 + [(64, 8, 8)] * 3


def test_a_shortcut_without_weights() -> None:
    """The shortcut takes every other pixel, and zeros for new channels."""
    block = ResidualBlock(2, 5, factory("none", feature_dim=1), stride=2, projects=False)
    nn.init.zeros_(block.second.weight)
    x = drawn(3, 2, 28, 28).abs()
    out = block(x)
    assert torch.equal(out[:, :2], x[:, :, ::2, ::2])
    assert not out[:, 2:].any()
    assert out.shape == (3, 5, 14, 14)


@pytest.mark.parametrize("norm", ["bn", "pn", "ln"])
def test_memory_layout_makes_no_difference(norm: str) -> None:
    model = trained(resnet(norm), READ)
    pixels = drawn(6, 1, 28, 28, seed=3)
    packed = pixels.to(memory_format=torch.channels_last)
    assert torch.allclose(model(pixels), model(packed), atol=1e-5)


def test_batch_norm_is_torch_s() -> None:
    ours = resnet(factory("bn", feature_dim=1, start="torch"), projects=True)
    theirs = resnet(_Torch, projects=True)
    pixels = drawn(6, 1, 28, 28)
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


@pytest.mark.parametrize("name", IMAGES)
def test_norms_can_be_swapped(name: str) -> None:
    model = MODELS[name].build("ln")
    count = sum(isinstance(m, Norm) for m in model.modules())
    swap(model, "bn")
    found = [m for m in model.modules() if isinstance(m, BatchNorm)]
    assert len(found) == count
    assert torch.equal(found[0].running_mean, torch.zeros_like(found[0].running_mean))
    trained(model, READ)
    assert all(bool(norm.running_mean.any()) for norm in found)
