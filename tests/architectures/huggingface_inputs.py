"""Inputs of Hugging Face models, by kind: padded with loud values, masked or not."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from architectures.shrinking import BOS, EOS, FIRST_WORD, IMAGE_SIZE, LAST_WORD, PAD
from architectures.survey import Inputs, Request

LOUD = 50.0
TARGETS = 2
"""Number of positions by which the decoder's rows are shorter than the encoder's."""


def seeded(model: nn.Module) -> nn.Module:
    """Move one-dimensional parameters off their start, and make the padding token loud."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "A_log" not in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for module in model.modules():
            if isinstance(module, nn.Embedding) and module.num_embeddings > 50:
                module.weight[PAD] = 3 * torch.randn_like(module.weight[PAD])
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
                # As if trained: a fresh one is no norm that could be folded.
                module.num_batches_tracked.fill_(1)
                module.running_mean.add_(0.1 * torch.randn_like(module.running_mean))
                module.running_var.add_(0.1 * torch.rand_like(module.running_var))
            if hasattr(module, "p") and "Drop" in type(module).__name__:
                module.p = 0.0
    return model.eval()


def generator(request: Request) -> torch.Generator:
    return torch.Generator().manual_seed(100 + request.seed)


def keep(request: Request, stride: int = 1) -> Tensor:
    """Hugging Face's attention mask, 1 = keep."""
    length = (max(request.lengths) + request.extra) * stride
    kept = (torch.arange(length) < stride * torch.tensor(request.lengths)[:, None]).long()
    return kept.flip(1) if request.left else kept


def tokens(request: Request) -> Tensor:
    size = (len(request.lengths), max(request.lengths))
    ids = torch.randint(FIRST_WORD, LAST_WORD, size, generator=generator(request))
    ids[:, 0] = BOS
    for row, length in enumerate(request.lengths):
        ids[row, length - 1] = EOS
        ids[row, length:] = PAD
    ids = torch.cat([ids, ids.new_full((len(ids), request.extra), PAD)], dim=1)
    if request.left:
        pads = (ids == PAD).sum(dim=1)
        ids = torch.stack([row.roll(int(shift)) for row, shift in zip(ids, pads, strict=True)])
    return ids


def text(request: Request) -> Inputs:
    mask = {"attention_mask": keep(request)} if request.masked else {}
    return {"input_ids": tokens(request), **mask}


def target_of(request: Request) -> Request:
    """Return the request for the decoder's side, of other lengths than the encoder's."""
    lengths = tuple(length - TARGETS for length in request.lengths)
    return replace(request, lengths=lengths, seed=request.seed + 50)


def translation(request: Request) -> Inputs:
    target = target_of(request)
    mask = {"decoder_attention_mask": keep(target)} if request.masked else {}
    ids = tokens(target)
    return {**text(request), "decoder_input_ids": ids, **mask}


def image(request: Request, size: int = IMAGE_SIZE) -> Inputs:
    shape = (len(request.lengths), 3, size, size)
    return {"pixel_values": torch.randn(shape, generator=generator(request))}


def frames(request: Request, features: int, stride: int) -> Tensor:
    """Features of sounds, (batch, frames, features)."""
    length = stride * max(request.lengths)
    shape = (len(request.lengths), length, features)
    x = torch.randn(shape, generator=generator(request))
    x = torch.cat([x, x.new_zeros(len(x), stride * request.extra, features)], dim=1)
    return x.masked_fill(keep(request, stride)[..., None] == 0, LOUD if request.loud else 0.0)


def samples(request: Request, stride: int) -> Tensor:
    """Sounds, (batch, samples)."""
    return frames(request, 1, stride)[..., 0]


def waveform(request: Request, stride: int = 8) -> Inputs:
    mask = {"attention_mask": keep(request, stride)} if request.masked else {}
    return {"input_values": samples(request, stride), **mask}


def features(
    request: Request,
    size: int,
    stride: int = 1,
    mask_name: str = "attention_mask",
    always_masked: bool = False,
) -> Inputs:
    """Features of sounds with `stride` frames a position."""
    mask = {mask_name: keep(request, stride)} if request.masked or always_masked else {}
    return {"input_features": frames(request, size, stride), **mask}


def with_targets(request: Request, source: Inputs) -> Inputs:
    """Add the decoder's tokens to the encoder's inputs."""
    decoder = translation(request)
    return {**source, **{name: x for name, x in decoder.items() if name.startswith("decoder")}}


def boxes(request: Request, coordinates: int = 4) -> Tensor:
    shape = (len(request.lengths), max(request.lengths), coordinates)
    found = torch.randint(1, 30, shape, generator=generator(request)).sort(dim=-1).values
    found = torch.cat([found, found.new_zeros(len(found), request.extra, coordinates)], dim=1)
    return found.flip(1) if request.left else found


def video(request: Request, frames: int = 2, size: int = IMAGE_SIZE) -> Tensor:
    shape = (len(request.lengths), frames, 3, size, size)
    return torch.randn(shape, generator=generator(request))


def noise(request: Request, *shape: int) -> Tensor:
    """Random numbers, (batch, *shape)."""
    return torch.randn((len(request.lengths), *shape), generator=generator(request))
