"""Pretrained models in Hugging Face folders: build, load and diagnose them on texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from powernorm.diagnosis import Diagnosis, diagnose
from powernorm.errors import InputError
from powernorm.inspection.devices import Device
from powernorm.integrations.architectures import loading_quietly, model_class
from powernorm.integrations.extras import needed_for
from powernorm.integrations.saved_models import load, place_modules
from powernorm.json_reading import read_json
from powernorm.records import MODEL_FILE
from powernorm.surgery.saving.records import KEY
from powernorm.surgery.saving.storage import read_config

_CONFIG: Final = "config.json"
_TYPE: Final = "model_type"
_WHAT: Final = "a Hugging Face model"


@dataclass(frozen=True, eq=False)
class Pretrained:
    """Model and tokenizer of a folder."""

    model: Any
    """Model: a `transformers.PreTrainedModel`, in evaluation mode."""
    tokenizer: Any
    """Tokenizer with a padding token."""
    missing: tuple[str, ...]
    """Names of weights that the folder does not have; they are random."""

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


def is_pretrained(path: Path) -> bool:
    """Return whether a folder has a Hugging Face configuration (a run's has no model type)."""
    try:
        found = read_json(path / _CONFIG, "")
    except InputError:
        return False
    return isinstance(found, dict) and _TYPE in found


def _is_changed(path: Path) -> bool:
    """Return whether a folder holds a model whose norms powernorm has changed."""
    if (path / MODEL_FILE).is_file():
        return True
    try:
        return bool(read_config(path).get(KEY))
    except InputError:  # transformers reports what is wrong with it
        return False


def is_configuration(path: Path) -> bool:
    """Return whether a path is a Hugging Face configuration, or a folder with one."""
    return path.name == _CONFIG or (path / _CONFIG).is_file()


def build_from_config(path: Path) -> nn.Module:
    """Build the architecture of a configuration on the meta device, without memory for weights.

    Changes of the model by powernorm, under the key `powernorm`, are applied too.

    Args:
        path: a config.json, or the folder that holds it.

    Raises:
        InputError: the configuration cannot be read or gives no model.
        ModuleNotFoundError: transformers is missing.
    """
    folder = path.parent if path.name == _CONFIG else path
    file = folder / _CONFIG
    described = read_json(file, "give the config.json of a Hugging Face model")
    if not isinstance(described, dict) or _TYPE not in described:
        raise InputError(
            f"{file} has no model_type, so it is not a Hugging Face configuration: give "
            "module:name of the model"
        )
    with needed_for(_WHAT):
        import transformers
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
        kind = model_class((config.architectures or [""])[0], config.model_type)
        with torch.device("meta"):
            build: Any = kind or transformers.AutoModel.from_config
            built = build(config)
    except Exception as error:  # a damaged configuration may raise anything
        raise InputError(f"{file} gives no model: {type(error).__name__}: {error}") from error
    assert isinstance(built, nn.Module)
    place_modules(built, folder, described)
    return built


def load_pretrained(path: Path, *, with_head: bool = False) -> Pretrained:
    """Load model and tokenizer; nothing is downloaded.

    Args:
        path: a folder with config.json, weights and tokenizer.
        with_head: build the class that the configuration names, with its head; else the model below
            it.

    Raises:
        InputError: model or tokenizer cannot be loaded.
        ModuleNotFoundError: transformers is missing.
    """
    model, missing = load_model(path, with_head=with_head)
    check_reads_text(model, path)
    return Pretrained(model, load_tokenizer(path), missing)


def load_model(path: Path, *, with_head: bool) -> tuple[Any, tuple[str, ...]]:
    """Load a model as in `load_pretrained`, without a tokenizer.

    If the folder's configuration has the key `powernorm`, this is the swapped or
    folded model, always with its head, through which the padding mask may reach the norms.

    Returns:
        The model in evaluation mode, its weights in their stored type, and the names of
        the missing weights.

    Raises:
        InputError: it cannot be loaded.
        ModuleNotFoundError: transformers is missing.
    """
    with needed_for(_WHAT):
        from transformers import AutoModel
    if _is_changed(path):
        return load(path), ()
    kind: Any = (_class_with_head(path) if with_head else None) or AutoModel
    try:
        with loading_quietly():
            model, info = kind.from_pretrained(
                str(path), local_files_only=True, trust_remote_code=False, output_loading_info=True
            )
    except Exception as error:  # a damaged folder may raise anything
        raise InputError(
            f"{path} holds no model that can be loaded: {type(error).__name__}: {error}"
        ) from error
    return model.eval(), tuple(sorted(info["missing_keys"]))


def check_reads_text(model: Any, path: Path) -> None:
    """Raise an InputError unless a model takes text.

    Raises:
        InputError: it takes sounds, images or series.
    """
    takes = getattr(model, "main_input_name", "input_ids")
    if takes != "input_ids":
        raise InputError(
            f"{path} holds a {type(model).__name__}, which takes {takes}, not text: give "
            "module:name of (model, batches), with batches like those of its training"
        )


def named_first(missing: Sequence[str]) -> str:
    """Return the first names of missing weights as text."""
    return f"{', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}"


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a folder and make it able to pad; nothing is downloaded.

    Raises:
        InputError: there is none, or it cannot be loaded.
        ModuleNotFoundError: transformers is missing.
    """
    with needed_for(_WHAT):
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


def _class_with_head(path: Path) -> Any:
    """Return the known class that a folder's configuration names, else None."""
    described = read_json(path / _CONFIG, "give a folder with a Hugging Face model")
    if not isinstance(described, dict):
        return None
    names = described.get("architectures")
    if not isinstance(names, list) or not names:
        return None
    return model_class(names[0], described.get(_TYPE))


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
            f"the folder has no weights for {named_first(found.missing)}: random ones replace them"
        )
    name = f"{type(found.model).__name__} in {path.resolve().name}"
    return replace(report, model=name, notes=tuple(notes))
