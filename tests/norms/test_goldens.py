"""Every golden file, step by step: outputs, gradients, penalties and states."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import powernorm
from powernorm.ops.dispatch import use_functions

FOLDER = Path(__file__).parents[1] / "goldens"
TOLERANCE = 1e-10


@pytest.fixture(autouse=True, params=["eager", "cpu", "triton"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every file through every backend; Triton's programs through its interpreter."""
    if request.param == "triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with use_functions(interpreted_kernels()):
            yield
    else:
        with powernorm.ops.use_backend(request.param):
            yield


def interpreted_kernels() -> ModuleType:
    pytest.importorskip("triton")
    from gpu.kernel_cases import DEVICE, kernels

    if DEVICE != "cpu":
        pytest.skip("the kernels of this process are compiled for the GPU")
    return kernels


def batch_first(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array.swapaxes(0, 1)))


class Golden:
    """One file in this library's layout."""

    def __init__(self, name: str) -> None:
        self.arrays = np.load(FOLDER / f"{name}.npz")
        self.meta: dict[str, Any] = ast.literal_eval(str(self.arrays["meta"]))
        self.num_steps = self.arrays["x"].shape[0]

    def __contains__(self, key: str) -> bool:
        return key in self.arrays.files

    def tokens(self, key: str, step: int) -> Tensor:
        return batch_first(self.arrays[key][step])

    def mask(self, step: int) -> Tensor | None:
        return torch.from_numpy(self.arrays["pad_mask"][step]) if "pad_mask" in self else None

    def row(self, key: str, step: int) -> Tensor:
        return torch.from_numpy(np.asarray(self.arrays[key][step]))

    def load_affine(self, norm: torch.nn.Module) -> None:
        """Load all parameters that the file has by name."""
        with torch.no_grad():
            for name, parameter in norm.named_parameters():
                if name in self:
                    parameter.copy_(torch.from_numpy(self.arrays[name]))


def check(what: str, ours: Tensor, expected: Tensor) -> None:
    """Agreement relative to the largest value, where that is above 1."""
    error = float((ours.detach() - expected).abs().max()) / max(1.0, float(expected.abs().max()))
    assert error <= TOLERANCE, f"{what}: {error:.1e}"


def replay(golden: Golden, norm: torch.nn.Module, states: dict[str, Callable[[], Tensor]]) -> None:
    """Run all steps of a file and compare everything in it."""
    for step in range(golden.num_steps):
        x = golden.tokens("x", step).requires_grad_()
        mask = golden.mask(step)
        norm.zero_grad()
        y = norm(x, mask)
        loss = (y * golden.tokens("grad_out", step)).sum()
        if "penalty" in golden and isinstance(norm, powernorm.RegularizedBatchNorm):
            value = powernorm.penalty(norm, reduction="token_sum")
            check(f"penalty {step}", value, golden.row("penalty", step))
            loss = loss + value
        loss.backward()
        check(f"y {step}", y, golden.tokens("y", step))
        check(f"grad_x {step}", x.grad, golden.tokens("grad_x", step))
        for name, parameter in norm.named_parameters():
            if f"grad_{name}" in golden:
                expected = golden.row(f"grad_{name}", step).reshape(parameter.shape)
                check(f"grad_{name} {step}", parameter.grad, expected)
        for key, state in states.items():
            check(f"{key} {step}", state(), golden.row(key, step))
    norm.eval()
    last = golden.num_steps - 1
    y = norm(golden.tokens("x", last), golden.mask(last))
    check("y_eval_last", y, batch_first(golden.arrays["y_eval_last"]))


def names(pattern: str) -> list[str]:
    found = sorted(path.stem for path in FOLDER.glob(pattern))
    assert found
    return found


def replays(pattern: str) -> pytest.MarkDecorator:
    """Give every file to every backend; Triton's interpreter is slow and gets half by default."""
    files = names(pattern)
    grid: list[Any] = [(backend, name) for backend in ("eager", "cpu") for name in files]
    grid += [
        pytest.param("triton", name, marks=[] if name in files[::2] else [pytest.mark.slow])
        for name in files
    ]
    return pytest.mark.parametrize(("backend", "name"), grid, indirect=["backend"])


RUNNING = ("running_mean", "running_var")


def running(norm: torch.nn.Module) -> dict[str, Callable[[], Tensor]]:
    return {f"buf_{name}": lambda name=name: norm.get_buffer(name) for name in RUNNING}


def loaded(
    golden: Golden, kind: type[torch.nn.Module], num_features: int = 12, /, **options: Any
) -> Any:
    """A norm in float64 with the file's eps and parameters."""
    norm = kind(num_features, eps=golden.meta["eps"], dtype=torch.float64, **options)
    golden.load_affine(norm)
    return norm


@replays("powernorm_paper_*.npz")
def test_powernorm_paper(name: str) -> None:
    golden = Golden(name)
    meta = golden.meta
    norm = loaded(
        golden,
        powernorm.PowerNorm,
        momentum=1 - meta["af"],
        backward_momentum=1 - meta["ab"],
        warmup_steps=meta["warm"],
        groups=meta.get("groups"),
    )
    states = {
        "psi2": lambda: norm.running_second_moment,
        "nu": lambda: norm.running_gradient_moment,
    }
    replay(golden, norm, states)


@replays("powernorm_released_*.npz")
def test_powernorm_released(name: str) -> None:
    golden = Golden(name)
    meta = golden.meta
    norm = loaded(
        golden,
        powernorm.PowerNorm,
        momentum=1 - meta["alpha_fwd"],
        backward_momentum=1 - meta["alpha_bkw"],
        warmup_steps=meta["warmup_iters"],
        groups=meta["group_num"] if meta["group_scaling"] else None,
        variant="released",
    )
    states = {
        "buf_running_phi": lambda: norm.running_second_moment,
        "buf_ema_gz": lambda: norm.running_gradient_moment / norm.backward_momentum,
        "buf_iters": lambda: norm.num_batches_tracked.reshape(1),
    }
    replay(golden, norm, states)


def test_power_norm_v() -> None:
    golden = Golden("powernorm_v_masked")
    momentum = golden.meta["momentum"]
    norm = loaded(golden, powernorm.PowerNormV, momentum=momentum, variant="released")
    replay(golden, norm, {"buf_running_var": lambda: norm.running_second_moment})


def test_batch_norm() -> None:
    golden = Golden("batchnorm_masked")
    momentum = golden.meta["momentum"]
    norm = loaded(golden, powernorm.BatchNorm, momentum=momentum, variant="released")
    replay(golden, norm, running(norm))


@replays("rbn_*.npz")
def test_regularized_batch_norm(name: str) -> None:
    golden = Golden(name)
    penalties = {f"{part}_penalty": golden.meta[f"penalty_{part}"] for part in ("mean", "var")}
    options = {"momentum": golden.meta["momentum"], "variant": "released", **penalties}
    norm = loaded(golden, powernorm.RegularizedBatchNorm, **options)
    replay(golden, norm, running(norm))


def test_mabn() -> None:
    golden = Golden("mabn_released")
    norm = loaded(
        golden,
        powernorm.MovingAverageBatchNorm,
        window=golden.meta["buffer_size"],
        momentum=1 - golden.meta["momentum"],
        warmup_steps=golden.meta["warmup_iters"],
        start="torch",
    )
    replay(golden, norm, {"buf_running_var": lambda: norm.running_second_moment})


@pytest.mark.parametrize(
    ("name", "build"),
    [
        (
            "adanorm_released",
            lambda m: powernorm.AdaNorm(12, m["scale"], m["k"], eps=m["eps"], variant="released"),
        ),
        (
            "layernorm_simple_released",
            lambda m: powernorm.SimpleLayerNorm(12, eps=m["eps"], variant="released"),
        ),
        *(
            (
                f"detachnorm_released_{which}",
                lambda m: powernorm.DetachNorm(
                    12,
                    bool(m["mean_detach"]),
                    bool(m["std_detach"]),
                    eps=m["eps"],
                    variant="released",
                ),
            )
            for which in ("both", "mean", "std")
        ),
    ],
)
def test_token_norms(name: str, build: Callable[[dict[str, Any]], torch.nn.Module]) -> None:
    golden = Golden(name)
    replay(golden, build(golden.meta), {})


@pytest.mark.parametrize(
    ("name", "kind", "options"),
    [
        ("seednorm_paper", powernorm.SeeDNorm, {}),
        ("seednorm_paper_heads4", powernorm.SeeDNorm, {"num_heads": 4}),
        ("scalenorm_released", powernorm.ScaleNorm, {}),
    ],
)
def test_later_token_norms(name: str, kind: type[torch.nn.Module], options: dict[str, Any]) -> None:
    golden = Golden(name)
    replay(golden, loaded(golden, kind, 8, **options), {})


def test_derf() -> None:
    golden = Golden("derf_released")
    norm = powernorm.Derf(8, dtype=torch.float64)
    golden.load_affine(norm)
    replay(golden, norm, {})


def test_dyisru() -> None:
    golden = Golden("dyisru_paper")
    norm = powernorm.DyISRU(8, dtype=torch.float64)
    golden.load_affine(norm)
    with torch.no_grad():
        norm.log_spread.copy_(torch.from_numpy(golden.arrays["spread"]).log())
    # The file has the gradient with respect to B itself, of which the logarithm is learned.
    replay(golden, norm, {"grad_spread": lambda: norm.log_spread.grad / norm.spread})


# BatchNorm's own files go through Triton's kernels, and the interpreter is slow.
without_triton = pytest.mark.parametrize("backend", ["eager", "cpu"], indirect=True)


@without_triton
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        ("repbn_released", "paper"),
        ("repbn_released", "released"),
        ("repbn_llama_released_mask", "released"),
    ],
)
def test_rep_batch_norm(name: str, variant: Any) -> None:
    golden = Golden(name)
    options = {"momentum": golden.meta["momentum"], "start": "torch", "variant": variant}
    norm = loaded(golden, powernorm.RepBatchNorm, 6, **options)
    replay(golden, norm, running(norm))
    if "affine_scale" in golden:
        scale, shift = norm.affine()
        check("scale", scale, torch.from_numpy(golden.arrays["affine_scale"]))
        check("shift", shift, torch.from_numpy(golden.arrays["affine_shift"]))


@without_triton
@pytest.mark.parametrize("name", names("prepbn_*.npz"))
def test_progressive_rep_batch_norm(name: str) -> None:
    golden = Golden(name)
    meta = golden.meta
    norm = loaded(
        golden,
        powernorm.ProgressiveRepBatchNorm,
        golden.arrays["x"].shape[-1],
        momentum=meta["momentum"],
        warmup_steps=meta["warm"],
        decay_steps=meta["step"],
        start_ratio=meta["r0"],
        accumulation=meta["micro_batches_per_count"],
        start="torch",
    )
    with torch.no_grad():
        norm.branch_weight.copy_(torch.from_numpy(golden.arrays["ln_weight"]))
        norm.branch_bias.copy_(torch.from_numpy(golden.arrays["ln_bias"]))
    if norm.accumulation > 1:
        # Its warm-up of one step ends with the first micro-batch, ours with the last.
        norm.num_batches_tracked.fill_(norm.accumulation - 1)

    def left() -> Tensor:
        passed = norm.num_batches_tracked // norm.accumulation
        return (meta["step"] - (passed - meta["warm"]).clamp(min=0)).clamp(min=0)

    branch = {
        "grad_ln_weight": lambda: norm.branch_weight.grad,
        "grad_ln_bias": lambda: norm.branch_bias.grad,
    }
    replay(golden, norm, {**running(norm), **branch, "buf_iter": left})


def ring(window: Tensor, steps: int) -> Tensor:
    """A window as the released code keeps it: the entry of step t at `t mod M`."""
    size = window.shape[0]
    return window.roll(steps % size + 1 - size, 0)


@pytest.mark.parametrize("name", names("un_released_*.npz"))
def test_unified_norm(name: str) -> None:
    golden = Golden(name)
    meta = golden.meta
    norm = loaded(
        golden,
        powernorm.UnifiedNorm,
        6,
        momentum=1 - meta["old_weight"],
        window=(meta["fp_window"], meta["bp_window"]),
        warmup_steps=meta["warmup_iters"],
        # The run without a mask sets the counter to 1000 there, which is 0 modulo the window too.
        ratio_start=8 if meta["iters_set"] else 1000,
        filter_outliers=meta["outlier_filtration"],
        variant="released",
    )

    def window(name: str) -> Tensor:
        return ring(norm.get_buffer(name), int(norm.num_batches_tracked))

    replay(
        golden,
        norm,
        {
            "buf_running_var": lambda: norm.running_second_moment,
            "buf_ema_gz": lambda: norm.running_gradient_moment,
            "buf_buffer_x2": lambda: window("window_second_moment"),
            "buf_buffer_gz": lambda: window("window_gradient_moment"),
            "buf_skip_counter": lambda: norm.num_skipped_batches.reshape(1),
        },
    )
    assert int(norm.num_batches_tracked) == golden.num_steps


def test_unified_norm_goes_on_from_a_released_checkpoint() -> None:
    """The second half of a run from the first half's state, by the released keys."""
    golden = Golden("un_released_mask_filter")
    norm = powernorm.UnifiedNorm(
        6, warmup_steps=5, filter_outliers=True, variant="released", dtype=torch.float64
    )
    half = 7
    keys = ("running_var", "ema_gz", "buffer_x2", "buffer_gz", "iters", "skip_counter")
    state = {key: golden.row(f"buf_{key}", half - 1) for key in keys}
    state |= {key: torch.from_numpy(golden.arrays[key]) for key in ("weight", "bias")}
    norm.load_state_dict(state)
    for step in range(half, golden.num_steps):
        x = golden.tokens("x", step).requires_grad_()
        (norm(x, golden.mask(step)) * golden.tokens("grad_out", step)).sum().backward()
        check(f"grad_x {step}", x.grad, golden.tokens("grad_x", step))
        check(f"nu {step}", norm.running_gradient_moment, golden.row("buf_ema_gz", step))


@pytest.mark.parametrize("kind", ["rms", "ln"])
def test_taper_norm(kind: str) -> None:
    golden = Golden(f"tapernorm_paper_{kind}")
    meta = golden.meta
    start = meta["taper_start_index"]
    norm = loaded(
        golden,
        powernorm.TaperNorm,
        6,
        start_step=start,
        end_step=meta["taper_end_index"],
        kind=kind,
        momentum=meta["ema_new_weight"],
    )
    with torch.no_grad():
        norm.tapered_offset.copy_(torch.from_numpy(golden.arrays["tapered_weight_delta"]))
    gates = [norm.gate]
    for step in range(golden.num_steps):
        x, mask = golden.tokens("x", step).requires_grad_(), golden.mask(step)
        # γ̃ has no part before the gate falls, and the file changes it once, at the start.
        loss = norm.scale_loss(x, mask)
        check(f"aux {step}", loss, golden.row("aux", step))
        if step >= start:
            (gradient,) = torch.autograd.grad(loss, x)
            check(f"aux_grad_x {step}", gradient, golden.tokens("aux_grad_x", step))
        y = norm(x, mask)
        (y * golden.tokens("grad_out", step)).sum().backward()
        check(f"y {step}", y, golden.tokens("y", step))
        check(f"grad_x {step}", x.grad, golden.tokens("grad_x", step))
        for name, parameter in norm.named_parameters():
            key = "grad_tapered_weight" if name == "tapered_offset" else f"grad_{name}"
            check(f"{key} {step}", parameter.grad, golden.row(key, step))
            parameter.grad = None
        for key, name in (
            ("buf_c", "branch_scale"),
            ("buf_ema_num", "running_numerator"),
            ("buf_ema_den", "running_denominator"),
            ("buf_scale_ema", "running_scale"),
        ):
            check(f"{key} {step}", norm.get_buffer(name), golden.row(key, step))
        gates.append(norm.gate)
    assert gates[:-1] == pytest.approx(golden.arrays["gate"].tolist(), abs=1e-12)
    check("scale_target", norm.scale_target, torch.from_numpy(golden.arrays["scale_target"]))
    last = golden.num_steps - 1
    y = norm.eval()(golden.tokens("x", last))
    check("y_eval_last", y, batch_first(golden.arrays["y_eval_last"]))


def test_every_file_is_replayed() -> None:
    """A golden file that no test names would be dead weight."""
    replayed = {
        *names("powernorm_paper_*.npz"),
        *names("powernorm_released_*.npz"),
        *names("rbn_*.npz"),
        *names("detachnorm_*.npz"),
        *names("repbn_*.npz"),
        *names("tapernorm_*.npz"),
        *names("un_released_*.npz"),
        *names("prepbn_*.npz"),
        "powernorm_v_masked",
        "batchnorm_masked",
        "mabn_released",
        "adanorm_released",
        "layernorm_simple_released",
        "derf_released",
        "dyisru_paper",
        "seednorm_paper",
        "seednorm_paper_heads4",
        "scalenorm_released",
        *names("fakeln_*.npz"),  # tests/surgery/removal
    }
    assert replayed == set(names("*.npz"))
