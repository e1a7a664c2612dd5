"""Writing of folded models into Hugging Face folders."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

from torch import Tensor, nn

from powernorm.errors import InputError
from powernorm.files import check_own
from powernorm.inspection.modules import listed
from powernorm.integrations.saved_models import save
from powernorm.json_reading import read_json
from powernorm.surgery import FoldReport

_OF_TORCH: Final = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
_WEIGHTS: Final = (*_OF_TORCH, ".h5", ".msgpack", ".onnx", ".gguf", ".ot", ".tflite", ".mlmodel")
_PARTS: Final = "modules.json"
"""List of sentence-transformers' modules after the model, such as a pooling, one folder each."""
_CONFIGS: Final = ("config.json", "generation_config.json")


def write_folded(report: FoldReport, source: Path, out: Path, *, flash_norm: bool = False) -> str:
    """Write a folded model, with the tokenizer and other small files of its folder.

    Args:
        report: report of a fold.
        source: the folder that the model was loaded from.
        out: an empty folder.
        flash_norm: write the keys by which loaders skip the weights of RMSNorms; see
            `flash_norm_keys`.

    Returns:
        Name of the function that loads it.

    Raises:
        InputError: the folder cannot be written, or the keys would not be true.
    """
    if flash_norm:
        for key in flash_norm_keys(report.model):
            setattr(report.model.config, key, True)
    save(report.model, out, stock=report.is_stock)
    copy_companions(source, out)
    kind = type(report.model).__name__
    return f"{kind}.from_pretrained" if report.is_stock else "powernorm.load"


def flash_norm_keys(model: nn.Module) -> list[str]:
    """Return the configuration keys that declare which RMSNorms have no weights.

    With FlashNorm (Graef et al., 2407.09577) an RMSNorm's weights go into the linear maps behind
    it. The checkpoints of the paper's authors and nano-vllm's loader have `flash_norm`: the norms
    of all layers have weights of 1, except those of queries and keys. The proposed loaders of
    vLLM and transformers read `flashnorm_folded`: the last norm has, too.

    Args:
        model: a model of transformers, folded with `keep="statistics"`.

    Raises:
        InputError: there is no RMSNorm, or one in a layer has other weights than 1.
    """
    norms = {
        name: module.weight
        for name, module in model.named_modules()
        if "RMSNorm" in type(module).__name__ and isinstance(module.weight, Tensor)
        if not name.endswith(("q_norm", "k_norm"))
    }
    left = [name for name, weight in norms.items() if not bool((weight == 1).all())]
    in_layers = [name for name in left if ".layers." in f".{name}"]
    if not norms or in_layers:
        why = f"{listed(in_layers, 3)} has weights other than 1" if norms else "no norm is one"
        raise InputError(
            f"flash_norm is for models whose RMSNorms have weights of 1, and {why}: leave it "
            'out, or fold with keep="statistics"'
        )
    return ["flash_norm"] if left else ["flash_norm", "flashnorm_folded"]


def copy_companions(source: Path, out: Path) -> None:
    """Copy the tokenizer and other small files of a model's folder into another one.

    The modules that sentence-transformers adds after the model are copied, too.

    Raises:
        InputError: the list of these modules cannot be read, or a link is in a file's place.
    """
    files = list(filter(_goes_along, source.iterdir()))
    check_own(*(out / file.name for file in files))
    for file in files:
        shutil.copy2(file, out / file.name)
    for name in _following_parts(source):
        shutil.copytree(source / name, out / name, dirs_exist_ok=True)


def _following_parts(source: Path) -> list[str]:
    """Return the folder names of the modules in a model's folder, from their list."""
    if not (source / _PARTS).is_file():
        return []
    listed = read_json(source / _PARTS, "take it from the model's own folder")
    entries = listed if isinstance(listed, list) else []
    paths = [one.get("path") for one in entries if isinstance(one, dict)]
    folders = {part.name for part in source.iterdir() if part.is_dir()}
    return [path for path in paths if path in folders]


def _goes_along(file: Path) -> bool:
    """Return whether a file of a model's folder holds no weights and is not rewritten."""
    others = file.name in _CONFIGS or file.name.endswith(".index.json")
    return file.is_file() and file.suffix not in _WEIGHTS and not others
