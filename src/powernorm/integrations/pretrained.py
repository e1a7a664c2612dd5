"""Models in Hugging Face folders: build, load, and diagnose them on texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from powernorm.diagnosis import Diagnosis, diagnose
from powernorm.errors import InputError
from powernorm.inspection.devices import Device
from powernorm.inspection.modules import listed
from powernorm.integrations.architectures import MODEL_TYPE, build, load_from, model_class
from powernorm.integrations.saved_models import load, place_modules
from powernorm.records import CONFIG_FILE, MODEL_FILE
from powernorm.surgery.saving.records import KEY
from powernorm.surgery.saving.storage import read_config

_FIX: Final = "give a folder with a Hugging Face model"
_LENGTH: Final = 8
_IMAGE_SIZE: Final = 224


@dataclass(frozen=True)
class Pretrained:
    """Model of a folder.

    Attributes:
        path: the folder.
        model: a `transformers.PreTrainedModel`, in evaluation mode.
        missing: names of weights that the folder does not have; they are random.
    """

    path: Path
    model: Any
    missing: tuple[str, ...] = ()

    @cached_property
    def tokenizer(self) -> Any:
        """Tokenizer of the folder, with a padding token.

        Raises:
            InputError: the model takes sounds, images or series, or there is no tokenizer that can
                be loaded.
        """
        takes = getattr(self.model, "main_input_name", "input_ids")
        if takes != "input_ids":
            raise InputError(
                f"{self.path} holds a {type(self.model).__name__}, which takes {takes}, not text: "
                "give module:name of (model, batches), with batches like those of its training"
            )
        return load_tokenizer(self.path)

    def batches(
        self, texts: Sequence[str], batch_size: int, length: int
    ) -> list[dict[str, Tensor]]:
        """Return texts as keyword arguments of the model's forward, in whole batches only.

        Args:
            texts: one per row.
            batch_size: number of rows in a batch.
            length: largest number of tokens in a row, unless the model takes fewer.
        """
        length = min(length, self.longest())
        starts = range(0, len(texts) - batch_size + 1, batch_size)
        return [self._batch(texts[start : start + batch_size], length) for start in starts]

    def _batch(self, texts: Sequence[str], length: int) -> dict[str, Tensor]:
        encoded = self.tokenizer(
            list(texts), padding=True, truncation=True, max_length=length, return_tensors="pt"
        )
        ids, mask = encoded["input_ids"], encoded["attention_mask"].to(torch.long)
        batch = {"input_ids": ids, "attention_mask": mask}
        if self.model.config.is_encoder_decoder:
            batch |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        return batch

    def longest(self) -> int:
        """Return the largest number of tokens that model and tokenizer declare to accept."""
        config = self.model.config
        limits = [self.tokenizer.model_max_length]
        positions = getattr(config, "max_position_embeddings", None)
        if isinstance(positions, int) and positions > 0:
            # In RoBERTa and related models the first positions belong to padding.
            offset = (config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0
            limits.append(positions - offset)
        return int(min(limits))

    def example_inputs(self) -> dict[str, Tensor]:
        """Return random inputs that a model of texts or of images takes.

        Raises:
            InputError: the model takes other inputs.
        """
        config, name = self.model.config, getattr(self.model, "main_input_name", "")
        generator = torch.Generator().manual_seed(0)
        if name == "input_ids":
            size = config.get_text_config().vocab_size
            ids = torch.randint(size, (2, _LENGTH), generator=generator, device="cpu")
            more = {"decoder_input_ids": ids} if config.is_encoder_decoder else {}
            return {"input_ids": ids, **more}
        if name == "pixel_values":
            given = getattr(config, "image_size", None) or _IMAGE_SIZE
            height, width = (given, given) if isinstance(given, int) else given
            shape = (2, getattr(config, "num_channels", 3), height, width)
            dtype = torch.float32
            return {name: torch.randn(shape, generator=generator, dtype=dtype, device="cpu")}
        raise InputError(
            f"{type(self.model).__name__} takes {name or 'other inputs'}, and examples can be made "
            "of texts and images only: fold it in Python, powernorm.fold(model, example_inputs)"
        )


def is_pretrained(path: Path) -> bool:
    """Return whether a folder has a Hugging Face configuration."""
    try:
        return MODEL_TYPE in read_config(path)
    except InputError:
        return False


def is_configuration(path: Path) -> bool:
    """Return whether a path is a Hugging Face configuration, or a folder with one."""
    return path.name == CONFIG_FILE or (path / CONFIG_FILE).is_file()


def build_from_config(path: Path) -> nn.Module:
    """Build the architecture of a configuration on the meta device, without memory for weights.

    Changes of the model by powernorm, under the key `powernorm`, are applied too.

    Args:
        path: a config.json, or the folder that holds it.

    Raises:
        InputError: the configuration cannot be read or gives no model.
        ModuleNotFoundError: transformers is missing.
    """
    folder = path.parent if path.name == CONFIG_FILE else path
    config = read_config(folder, "give the config.json of a Hugging Face model")
    if MODEL_TYPE not in config:
        raise InputError(
            f"{folder / CONFIG_FILE} has no model_type, so it is not a Hugging Face configuration: "
            "give module:name of the model"
        )
    with torch.device("meta"):
        built = build(folder, model_class(config))
    place_modules(built, folder, config)
    return built


def load_pretrained(path: Path, *, with_head: bool = False, complete: bool = False) -> Pretrained:
    """Load the model of a folder; nothing is downloaded.

    If the folder's configuration has the key `powernorm`, this is the swapped or folded model,
    always with its head, through which the padding mask may reach the norms.

    Args:
        path: folder that `save_pretrained` or `powernorm.save` wrote.
        with_head: build the class that the configuration names, with its head; else the model below
            it.
        complete: require all weights.

    Raises:
        InputError: it cannot be loaded, or is not complete.
        ModuleNotFoundError: transformers is missing.
    """
    if _is_changed(path):
        return Pretrained(path, load(path))
    kind = model_class(read_config(path, _FIX)) if with_head else None
    found = Pretrained(path, *load_from(path, kind))
    if complete and found.missing:
        raise InputError(
            f"{path} has no weights for {listed(found.missing, 3)}: they would be random in the "
            "result"
        )
    return found


def _is_changed(path: Path) -> bool:
    """Return whether a folder holds a model whose norms powernorm has changed."""
    if (path / MODEL_FILE).is_file():
        return True
    try:
        return bool(read_config(path).get(KEY))
    except InputError:  # transformers reports what is wrong with it
        return False


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a folder and make it able to pad; nothing is downloaded.

    Raises:
        InputError: there is none, or it cannot be loaded.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        # Without its files transformers creates one that knows only special tokens.
        files = {"tokenizer.json", *tokenizer.vocab_files_names.values()}
        words = tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens}
    except Exception as error:  # a damaged folder may raise anything
        raise InputError(
            f"{path} holds no tokenizer that can be loaded: {type(error).__name__}: {error}"
        ) from error
    if len(words) <= 1 and not any((path / name).exists() for name in files):
        raise InputError(
            f"{path} holds no tokenizer: copy that of the original model into it "
            f"({', '.join(sorted(files))})"
        )
    if tokenizer.pad_token is None:
        # GPT-2 and similar models have no padding token; any token works, as the mask hides it.
        anything = tokenizer.eos_token or tokenizer.unk_token
        tokenizer.pad_token = anything or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def diagnose_pretrained(
    path: Path,
    texts: Sequence[str],
    *,
    num_batches: int = 50,
    batch_size: int = 32,
    length: int = 128,
    device: Device | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Diagnosis:
    """Diagnose a pretrained model on texts.

    Args:
        path: a folder with config.json, weights and tokenizer.
        texts: sentences or documents; the first ones are used.
        num_batches: largest number of batches in each pass, ≥ 2.
        batch_size: number of texts in a batch.
        length: largest number of tokens of a text.
        device: device to run on; see `powernorm.diagnose`.
        on_progress: see `powernorm.diagnose`.

    Raises:
        InputError: model or tokenizer cannot be loaded, there are too few texts, or no such
            device.
        ModuleNotFoundError: transformers is missing.
    """
    if num_batches < 2:
        raise InputError(f"num_batches is {num_batches}, expected at least 2: TID compares batches")
    if len(texts) < 2 * batch_size:
        raise InputError(
            f"there are {len(texts)} texts, fewer than two batches of {batch_size}: give more or "
            "a smaller batch_size (--sequences)"
        )
    found = load_pretrained(path)
    batches = found.batches(texts[: num_batches * batch_size], batch_size, length)
    report = diagnose(found.model, batches, device=device, on_progress=on_progress)
    notes = list(report.notes)
    if found.missing:
        notes.append(
            f"the folder has no weights for {listed(found.missing, 3)}: random ones replace them"
        )
    name = f"{type(found.model).__name__} in {path.resolve().name}"
    return replace(report, model=name, notes=tuple(notes))
