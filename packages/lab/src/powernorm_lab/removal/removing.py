"""`powernorm_lab.remove`: remove the norms of a trained model and save the result."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor, nn

import powernorm
from powernorm.errors import InputError
from powernorm.files import remove as remove_files
from powernorm.files import write
from powernorm.inspection.devices import Device, checked_device
from powernorm.inspection.examples import as_call
from powernorm.integrations.folded_pretrained import copy_companions
from powernorm.integrations.pretrained import load_pretrained
from powernorm.integrations.stock_models import compare_stock
from powernorm.surgery.folding.api import plan_fold
from powernorm.surgery.folding.verify import Errors
from powernorm.surgery.saving.records import is_pretrained
from powernorm_lab.comparing import shown
from powernorm_lab.data.corpus import EVALUATED_SPLITS
from powernorm_lab.engine.environment import environment
from powernorm_lab.engine.events import Listener, Notice, ignore
from powernorm_lab.engine.folders import (
    check_same_settings,
    last_checkpoint,
    read_json,
    remove_unfinished,
    write_json,
)
from powernorm_lab.engine.isolation import own_generators, own_modes, threads
from powernorm_lab.engine.leases import Lease
from powernorm_lab.engine.run import Run
from powernorm_lab.engine.state import seed_everything
from powernorm_lab.engine.stopping import Stop, Stopped
from powernorm_lab.model_outputs import floats_in
from powernorm_lab.removal.originals import Original, open_original
from powernorm_lab.removal.report import write_removal_page
from powernorm_lab.removal.settings import DEFAULT_SHARE, DEFAULT_STEPS, RemovalSettings
from powernorm_lab.removal.training import RemovalTraining, Values, on_split
from powernorm_lab.runs import (
    CHECKPOINTS_FOLDER,
    METRICS_FILE,
    NORMS_FILE,
    REMOVAL_FILE,
    REPORT_FILE,
    RESULT_FILE,
)
from powernorm_lab.settings.comparison import plain
from powernorm_lab.settings.overrides import override

MODEL_FOLDER: Final = "model"
"""Subfolder of a removal that `powernorm.load` reads."""
STOCK_FOLDER: Final = "stock"
"""Subfolder that transformers reads without powernorm."""
_OWN: Final = (
    REMOVAL_FILE,
    RESULT_FILE,
    METRICS_FILE,
    NORMS_FILE,
    REPORT_FILE,
    CHECKPOINTS_FOLDER,
    MODEL_FOLDER,
    STOCK_FOLDER,
)
_PACKAGES: Final = ("powernorm", "torch", "transformers", "tokenizers")
_AGREES: Final = 1e-4
"""Largest difference, relative to the largest output, after saving and loading a model."""


@dataclass(frozen=True)
class Removed:
    """Result of a removal.

    Attributes:
        model: model without norms, in evaluation mode, on the CPU.
        folder: folder of the removal; the model is in its subfolder `model`, and with `stock` in
            `stock`.
        metrics: metrics by name; `valid_loss`, `original_valid_loss`, … as far as they are known.
        report: path of the page.
    """

    model: nn.Module
    folder: Path
    metrics: Mapping[str, float | None]
    report: Path
    stock: Path | None = None
    """Folder that transformers loads without powernorm."""
    is_folded: bool = True
    """Whether the norms were folded into the weights; otherwise the model is the one in `stock`,
    and there is no subfolder `model`."""


def remove(
    model: str | Path | tuple[nn.Module, Sequence[Any]],
    out: str | Path,
    *,
    data: str | None = None,
    settings: RemovalSettings | Mapping[str, Any] | Sequence[str] = (),
    device: Device = "auto",
    resume: bool = False,
    force: bool = False,
    stock: bool = False,
    quiet: bool = False,
    on_event: Listener | None = None,
) -> Removed:
    """Remove LayerNorm or RMSNorm from a trained model by a short training, and fold the rest.

    Static layers replace the norms in a copy of the model, which continues training, by default by
    distillation from the original. The static layers are then folded into the weights, so that the
    result has no norms. The fold is verified against the trained model, and the saved model against
    the fold.

    `out` receives `removal.json` (settings and arguments), `metrics.csv`, `checkpoints/`,
    `result.json`, `report.html` and `model/`, which `powernorm.load` reads.

    Args:
        model: folder of a run of `powernorm compare`, or one of its checkpoints; a folder in
            Hugging Face's layout; `module:name` of (model, batches) or of a function that returns
            them; or (model, batches) itself.
        out: folder of the removal.
        data: text to train on: for a run, one that replaces its own; for a Hugging Face model a
            file, a folder or an embedded corpus.
        settings: settings of the removal, or changes of the defaults as strings
            `"section.key=value"` or by dotted key.
        device: device of the training; `auto` is a GPU if there is one.
        resume: continue from the last checkpoint, exactly as if it had not been interrupted, or
            start without one.
        force: delete an existing removal in `out` first.
        stock: also write `stock/`, for a model of transformers: a folder that the original class
            loads without powernorm. Its norms have an eps so large that they divide by a constant.
            The method has to fit the class: `match-centered`, `freeze` or `taper` for LayerNorm,
            `freeze` or `taper` for RMSNorm. This also works for norms that cannot fold, such as
            those that center in a post-norm model; there is no `model/` then.
        quiet: show no progress.
        on_event: function that receives events; it replaces the progress display.

    Returns:
        The model and its metrics.

    Raises:
        InputError: an argument cannot be used: the model does not exist, has no data or no norms,
            the method does not fit it, or the folder has another removal.
        KeyboardInterrupt: after the last checkpoint, from which `resume` continues.
        SystemExit: after SIGTERM or SIGUSR1, with a checkpoint and the exit code 75.
    """
    wanted = _settings(settings, data)
    folder = Path(out).absolute()
    on_device = checked_device(device)
    _check_folder(folder, resume=resume, force=force)
    stop = Stop()
    with (
        stop.watching(),
        own_generators(),
        threads(wanted.training.num_threads),
    ):
        original = open_original(model, wanted.data, wanted.seed)
        _check_stock(original, stock=stock)
        lease = Lease(folder)
        try:
            _begin(folder, wanted, original, resume=resume, force=force)
            with shown(folder, on_event or not quiet) as listener:
                run = Run(
                    norm="none",
                    label=wanted.label,
                    seed=wanted.seed,
                    folder=folder,
                    device=on_device,
                    settings=wanted,
                    data=None,
                    num_steps=_number_of_steps(wanted, original),
                    norm_options={},
                    lease=lease,
                    stop=stop,
                    listener=listener or ignore,
                )
                return _Job(run, original, lease, stock=stock).run()
        except InputError:
            # Settings that did not fit the model must not count as an earlier removal.
            if not last_checkpoint(folder).exists():
                _delete(folder)
            raise
        finally:
            lease.release(forget=True)


def _settings(
    given: RemovalSettings | Mapping[str, Any] | Sequence[str], data: str | None
) -> RemovalSettings:
    if isinstance(given, RemovalSettings):
        chosen, changes = given, []
    elif isinstance(given, Mapping):
        chosen, changes = RemovalSettings(), [f"{key}={value}" for key, value in given.items()]
    else:
        chosen, changes = RemovalSettings(), list(given)
    return override(chosen, [*changes, *([] if data is None else [f"data.path={data}"])])


class _Job:
    """One removal in its folder."""

    def __init__(self, run: Run, original: Original, lease: Lease, *, stock: bool) -> None:
        self._run = run
        self._original = original
        self._lease = lease
        self._stock = stock
        self._folder = run.folder

    def run(self) -> Removed:
        """Train, fold, save and report."""
        try:
            with self._run.stop.never_hidden(), own_modes():
                seed_everything(self._run.seed)
                training = RemovalTraining(self._run, self._original, stock=self._stock)
                training.train()
                if self._run.is_nonfinite:
                    raise InputError(
                        f"the loss is no longer finite at step {self._run.step}: choose a smaller "
                        "optimizer.learning_rate, and restart with --force"
                    )
                return self._finish(training)
        except (KeyboardInterrupt, Stopped) as end:
            if isinstance(end, Stopped):
                self._run.stop.ignore()
            self._run.close()
            self._write_result("interrupted", {})
            with suppress(InputError):
                write_removal_page(self._folder)
            raise
        finally:
            self._run.close()

    def _finish(self, training: RemovalTraining) -> Removed:
        self._run.listener(Notice("folding the result"))
        trained = copy.deepcopy(training.model).cpu().eval()
        example, found = self._original.example_inputs(), dict[str, Any]()
        result: nn.Module | None = None
        report = plan_fold(trained, example).apply(inplace=False)
        kept = [row for row in report.rows if row.action == "keep"]
        if kept and not self._stock:
            raise InputError(f"{kept[0].name} could not be folded: {kept[0].reason}")
        if self._stock:
            result, errors = self._save_stock(trained)
            found["stock_errors"] = [_as_json(error) for error in errors]
        if not kept:
            result = report.model
            self._save(result)
            found["fold"] = [row.to_dict() for row in report.rows]
            found["fold_errors"] = [_as_json(error) for error in report.errors]
        assert result is not None
        metrics = self._measured(training, result)
        self._run.close()
        found["norms"] = [row.to_dict() for row in training.removal.rows]
        self._write_result("finished", metrics, found)
        page = write_removal_page(self._folder)
        stock = self._folder / STOCK_FOLDER if self._stock else None
        return Removed(result, self._folder, metrics, page, stock, not kept)

    def _save_stock(self, trained: nn.Module) -> tuple[nn.Module, tuple[Errors, ...]]:
        """Save the model for transformers; return it as loaded, and its errors."""
        folder = self._folder / STOCK_FOLDER
        with self._lease.writing():
            powernorm.save(trained, folder, stock=True)
            self._copy_others(folder)
        errors = compare_stock(trained, folder, self._original.example_inputs())
        return load_pretrained(folder, with_head=True, complete=True).model, errors

    @torch.no_grad()
    def _measured(self, training: RemovalTraining, folded: nn.Module) -> Values:
        """Measure the original and the result on whole splits and on another text."""
        device, found = self._run.device, dict[str, float | None]()
        moved = copy.deepcopy(folded).to(device)
        texts: dict[str, Iterable[Any]] = {
            split: self._original.evaluation(split) for split in EVALUATED_SPLITS
        }
        texts["other"] = self._original.elsewhere()
        for split, those in texts.items():
            batches = list(those)
            if batches:
                text = f"measuring both models: {split}, {len(batches)} batches"
                self._run.listener(Notice(text))
            found |= on_split(training.measure(moved, batches), split)
        return found

    def _save(self, model: nn.Module) -> None:
        folder = self._folder / MODEL_FOLDER
        with self._lease.writing():
            powernorm.save(model, folder, config=self._original.saved_config())
            self._copy_others(folder)
        example = self._original.example_inputs()
        blank = copy.deepcopy(self._original.model)
        check_agreement(model, powernorm.load(folder, blank), example, folder)

    def _copy_others(self, folder: Path) -> None:
        """Copy the original's tokenizer and removal.json into a model's folder."""
        if self._original.folder is not None:
            copy_companions(self._original.folder, folder)
        write(folder / REMOVAL_FILE, (self._folder / REMOVAL_FILE).read_bytes())

    def _write_result(
        self,
        status: str,
        metrics: Mapping[str, float | None],
        more: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        result: dict[str, Any] = {
            "status": status,
            "label": self._run.label,
            "seed": self._run.seed,
            "step": self._run.step,
            "num_steps": self._run.num_steps,
            "metrics": dict(metrics),
            "seconds": round(self._run.seconds, 3),
            "norms": [],
            **more,
        }
        write_json(self._folder / RESULT_FILE, result)


def _number_of_steps(settings: RemovalSettings, original: Original) -> int:
    """Return the number of updates of a removal.

    Raises:
        InputError: `share` is set, but the length of the original's training is not known.
    """
    training = settings.training
    if training.steps is not None:
        return training.steps
    if original.num_steps is None:
        if training.share is not None:
            raise InputError(
                f"training.share={training.share}: the length of {original.name}'s training is not "
                "known, because it is not a run of `powernorm compare`: give training.steps"
            )
        return DEFAULT_STEPS
    share = DEFAULT_SHARE if training.share is None else training.share
    return max(1, round(share * original.num_steps / settings.optimizer.accumulation))


def _as_json(error: Errors) -> dict[str, Any]:
    return {
        "dtype": str(error.dtype),
        "absolute": error.absolute,
        "relative": error.relative,
    }


@torch.no_grad()
def check_agreement(model: nn.Module, loaded: nn.Module, example: Any, folder: Path) -> None:
    """Raise an InputError unless a loaded model has the same outputs as the saved one."""
    call = as_call(example, model)
    ours, theirs = (_flat(call.call(one)) for one in (model, loaded))
    difference = float((ours - theirs).abs().max())
    if not difference <= _AGREES * float(ours.abs().max().clamp(min=1e-30)):
        raise InputError(
            f"the model saved in {folder} has other outputs after loading (largest difference "
            f"{difference:.1e}): it cannot be used"
        )


def _flat(outputs: Any) -> Tensor:
    return torch.cat([tensor.flatten().double() for tensor in floats_in(outputs)])


# The folder


def _check_stock(original: Original, *, stock: bool) -> None:
    if stock and not is_pretrained(original.model):
        raise InputError(
            f"{original.name} is not a model of transformers, so that no class there could load "
            "the result: leave out --stock (stock=True)"
        )


def _check_folder(folder: Path, *, resume: bool, force: bool) -> None:
    """Refuse a folder that cannot be used for a removal, without changing it."""
    if resume and force:
        raise InputError(
            "--resume continues the existing removal and --force deletes it: choose one"
        )
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: give a folder with --out")
    is_there = (folder / REMOVAL_FILE).is_file()
    if is_there and not (resume or force):
        raise InputError(
            f"{folder} has another removal: give another --out, --resume to continue it or --force "
            "to delete it"
        )
    others = [] if is_there or not folder.is_dir() else [p.name for p in folder.iterdir()]
    taken = sorted({*others} & {*_OWN, "config.json", "results.json"})
    if taken:
        raise InputError(f"{folder} has other files ({taken[0]}): give another --out")


def _begin(
    folder: Path, settings: RemovalSettings, original: Original, *, resume: bool, force: bool
) -> None:
    """Write settings and original to removal.json, or check that a resumed removal has the same."""
    steps = _number_of_steps(settings, original)
    made_of = {"settings": plain(settings), "original": original.facts(), "num_steps": steps}
    path = folder / REMOVAL_FILE
    if resume and path.exists():  # else it was stopped before this file was written
        old = read_json(path)
        check_same_settings(folder, {key: old.get(key, {}) for key in made_of}, made_of)
        remove_unfinished(folder)
        return
    if force:
        _delete(folder)
    write_json(path, {"format": 1, **made_of, **environment(_PACKAGES)})


def _delete(folder: Path) -> None:
    """Delete only the files that a removal wrote into its folder."""
    remove_files(*(folder / name for name in _OWN))
