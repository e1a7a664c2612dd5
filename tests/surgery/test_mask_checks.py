"""A look at the first masks of a swapped model: missing, unreadable, inverted."""

from __future__ import annotations

import warnings

import pytest
import torch

import powernorm
from powernorm.inspection.mask_checks import MaskWarning
from powernorm.norms.masks import current_padding_mask
from powernorm.surgery.swapping import swap
from refusals import refuses
from surgery.foreign_models import (
    FAMILIES,
    PAD,
    PADDED,
    VOCABULARY,
    keep,
    padding,
    plain_tokens,
    run,
    tokens,
    transformers,
    vectors,
)
from surgery.test_mask_owners import Tower, bert
from surgery.test_masking import swapped


def test_a_missing_mask_is_warned_of_once() -> None:
    model = swapped("bert")
    with pytest.warns(MaskWarning, match="attention_mask"):
        model(input_ids=tokens(2))
    model(input_ids=tokens(2))  # warnings are errors
    swapped("bert")(input_ids=plain_tokens())
    swapped("bert").eval()(input_ids=tokens(2))
    encoder = swapped("torch-encoder")
    silent = vectors(2).masked_fill(padding(2).unsqueeze(-1), 0.0)
    with pytest.warns(MaskWarning, match="src_key_padding_mask"):
        encoder(silent)


def test_a_decoders_first_token_is_no_padding() -> None:
    model, inputs = swapped("marian"), PADDED["marian"](0)
    target = plain_tokens()
    target[:, 0] = PAD
    run(model, {**inputs, "decoder_input_ids": target, "decoder_attention_mask": None})


def test_a_mask_the_wrong_way_round_is_refused() -> None:
    inputs = PADDED["bert"](2)
    refuses("is inverted", swapped("bert"), inputs["input_ids"], 1 - inputs["attention_mask"])
    assert current_padding_mask() is None
    silent = vectors(2).masked_fill(padding(2).unsqueeze(-1), 0.0)
    refuses("is inverted", swapped("torch-encoder"), silent, src_key_padding_mask=~padding(2))


def test_padding_tokens_by_chance_are_no_evidence() -> None:
    ids = plain_tokens()
    ids[:, 1] = PAD
    swapped("bert")(ids)
    swapped("bert")(ids, keep(0))


def test_rows_of_nothing_but_padding_are_warned_of() -> None:
    mask = keep(0)
    mask[0] = 0
    with pytest.warns(MaskWarning, match="1 of 2 rows"):
        swapped("bert")(plain_tokens(), mask)


def test_a_mask_that_cannot_be_read_is_warned_of_in_these_words() -> None:
    model = Tower().train()
    swap(model, "bn")
    with pytest.warns(MaskWarning, match=r"was given attention_mask as a str.*cannot be read"):
        model(vectors(), "a block mask")
    model(vectors(), "a block mask")  # once; warnings are errors
    with powernorm.padding_mask(padding()):
        model(vectors(), "a block mask")


def test_a_wrong_way_round_is_found_after_batches_without_padding() -> None:
    model = bert()
    swap(model, "bn")
    ids = plain_tokens()
    with pytest.warns(MaskWarning, match="marks all rows as nothing but padding"):
        model(ids, attention_mask=torch.zeros_like(ids))
    inputs = PADDED["bert"](2)
    refuses("is inverted", model, inputs["input_ids"], 1 - inputs["attention_mask"])
    right = bert()
    swap(right, "bn")
    for _ in range(3):
        right(ids, attention_mask=torch.ones_like(ids))
    refuses("is inverted", right, inputs["input_ids"], 1 - inputs["attention_mask"])


def test_a_batch_of_nothing_but_padding_is_marked_rightly() -> None:
    model = bert()
    swap(model, "bn")
    ids = torch.full((2, 4), PAD)
    model(ids, attention_mask=torch.zeros_like(ids))


def test_a_token_that_ends_and_pads_still_tells_the_direction() -> None:
    hf = transformers()
    config = hf.GPT2Config(
        vocab_size=VOCABULARY, n_embd=8, n_layer=1, n_head=2, pad_token_id=PAD, eos_token_id=PAD,
        bos_token_id=2,
    )  # fmt: skip
    model = hf.GPT2LMHeadModel(config).train()
    swap(model, "bn")
    model(tokens(2))  # may be the ends of sentences
    model(tokens(2), attention_mask=keep(2))
    wrong = hf.GPT2LMHeadModel(config).train()
    swap(wrong, "bn")
    refuses("is inverted", wrong, tokens(6), attention_mask=1 - keep(6))


def test_calibration_does_not_speak_of_training() -> None:
    model, _ = FAMILIES["bert"]()
    swap(model, "bn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        powernorm.calibrate(model, [{"input_ids": tokens(3)}])
    (message,) = {str(one.message) for one in caught if one.category is MaskWarning}
    assert "called without attention_mask" in message
    assert "training" not in message
