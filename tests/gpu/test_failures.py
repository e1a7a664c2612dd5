"""Errors of Triton reach no user: after one warning with the reason eager torch computes."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import powernorm
from gpu.kernel_cases import DEVICE, kernels
from powernorm.cli.health import print_health
from powernorm.ops import dispatch, eager, explain, use_backend
from powernorm.ops.kernels.errors import KernelError
from powernorm.ops.kernels.triton import launch as launching
from powernorm.ops.running_stats import CenteredUpdate, PowerUpdate, UncenteredUpdate, Update

# The package's functions have the names of the modules that they are in.
power, running, static = (
    importlib.import_module(f"powernorm.ops.kernels.triton.{name}")
    for name in ("power_norm", "running_stats", "static_norm")
)
pytestmark = pytest.mark.usefixtures("triton_by_nature")
from triton.compiler.errors import CompilationError  # noqa: E402
from triton.runtime import build as building  # noqa: E402
from triton.runtime.errors import OutOfResources, PTXASError  # noqa: E402

CACHES = ("_triton_functions", "_triton_absence", "_module", "_or_eager", "_warn_of_eager")


@pytest.fixture
def triton_by_nature(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The interpreter serves CPU tensors as Triton does a GPU's; nothing has failed yet."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        monkeypatch.setattr(dispatch, "_natural", lambda _: "triton")
        monkeypatch.setattr(dispatch, "_CPU_TYPES", frozenset())
    monkeypatch.setattr(dispatch, "_triton_failure", "")
    for name in CACHES:
        getattr(dispatch, name).cache_clear()
    yield
    for name in CACHES:
        getattr(dispatch, name).cache_clear()


class FailingKernel:
    """A program that Triton cannot start."""

    def __init__(self, name: str, error: Exception) -> None:
        self.__name__, self.error = name, error
        self.launches = 0

    def __getitem__(self, _: object) -> Callable[..., None]:
        def start(*_args: Any, **_constants: Any) -> None:
            self.launches += 1
            raise self.error

        return start


def no_c_compiler(monkeypatch: pytest.MonkeyPatch) -> Exception:
    """Return Triton's own error, in versions that have a function for it."""
    find_compiler = getattr(building, "_find_compiler", None)
    if find_compiler is None:
        return RuntimeError(
            "Failed to find C compiler. Please specify via CC environment variable."
        )
    with monkeypatch.context() as context:
        context.setenv("PATH", "")
        context.delenv("CC", raising=False)
        find_compiler.cache_clear()
        with pytest.raises(RuntimeError) as raised:
            find_compiler("c")
        find_compiler.cache_clear()
    return raised.value


SOURCE = "def kernel(x):\n    return x.to(tl.bfloat16)"
GENERAL = {
    "compiler": ("install gcc or clang", no_c_compiler),
    "compilation": (
        "CompilationError: no such type here",
        lambda _: CompilationError(SOURCE, ast.parse(SOURCE).body[0], "no such type here"),
    ),
    "ptxas": ("ptxas fatal : unknown arch", lambda _: PTXASError("\nptxas fatal : unknown arch\n")),
    "header": ("CalledProcessError", lambda _: subprocess.CalledProcessError(1, ["gcc", "main.c"])),
    "driver": ("libcuda.so cannot found", lambda _: AssertionError("libcuda.so cannot found!\n")),
    "bare": ("(KeyError)", lambda _: KeyError()),
}


def train(norm: torch.nn.Module, steps: int = 2) -> list[Tensor]:
    """Outputs and gradients of some steps."""
    torch.manual_seed(0)
    found = []
    for _ in range(steps):
        x = torch.randn(5, 8, device=DEVICE, requires_grad=True)
        y = norm(x)
        y.backward(torch.randn(5, 8, device=DEVICE))
        found += [y.detach(), x.grad]
    return found


def warnings_of(caught: pytest.WarningsRecorder) -> list[str]:
    """Warnings of this library; an interpreter of Triton before 3.8 gives others with numpy 2."""
    return [str(one.message) for one in caught if issubclass(one.category, UserWarning)]


def check_like_eager(build: Callable[[], torch.nn.Module], norm: torch.nn.Module) -> None:
    """Trains as eager torch does, and its buffers move as often."""
    expected = build().to(DEVICE)
    with use_backend("eager"):
        theirs = train(expected)
    torch.testing.assert_close(train(norm), theirs)
    torch.testing.assert_close(norm.state_dict(), expected.state_dict())


@pytest.mark.parametrize("cause", GENERAL)
def test_a_general_failure_is_said_once(cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said, error = GENERAL[cause]
    failing = FailingKernel("power_gradient_kernel", error(monkeypatch))
    monkeypatch.setattr(power, "power_gradient_kernel", failing)
    norm = powernorm.PowerNorm(8, warmup_steps=1).to(DEVICE)
    with pytest.warns(UserWarning, match="eager torch serves the norms") as caught:
        check_like_eager(lambda: powernorm.PowerNorm(8, warmup_steps=1), norm)
    (warning,) = warnings_of(caught)
    assert said in warning
    assert "\n" not in warning
    assert failing.launches == 1
    # Nothing is tried again, at no width, and all can be seen.
    powernorm.AdaNorm(7).to(DEVICE)(torch.randn(2, 7, device=DEVICE))
    x = torch.randn(2, 3, device=DEVICE)
    assert dispatch.functions_for(x) is eager
    assert said in explain(x, "batch_norm")[0].others["triton"]
    with (
        pytest.raises(powernorm.InputError, match=r"'triton' is not available"),
        use_backend("triton"),
    ):
        pass


def out_of_resources(name: str) -> FailingKernel:
    return FailingKernel(name, OutOfResources(200_000, 101_376, "shared memory"))


def test_out_of_resources_concerns_one_op_type_and_width(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = out_of_resources("static_gradient_kernel")
    monkeypatch.setattr(static, "static_gradient_kernel", failing)
    norm = powernorm.BatchNorm(8).to(DEVICE).eval()
    with pytest.warns(UserWarning, match=r"static_norm of float32 with 8 features.*101376") as one:
        check_like_eager(lambda: powernorm.BatchNorm(8).eval(), norm)
    assert len(warnings_of(one)) == 1
    assert failing.launches == 1
    x = torch.randn(2, 8, device=DEVICE)
    static_choice, token_choice = explain(x, "static_norm")[0], explain(x, "token_norm")[0]
    assert (static_choice.backend, token_choice.backend) == ("eager", "triton")
    assert "101376" in static_choice.others["triton"]
    # The other ops, and this one at another width, are still tried.
    with pytest.warns(UserWarning, match="9 features"):
        powernorm.BatchNorm(9).to(DEVICE).eval()(torch.randn(2, 9, device=DEVICE)).sum().backward()
    assert failing.launches == 2


@pytest.mark.parametrize("error", [OutOfResources(9, 8, "threads"), RuntimeError("no\nlaunch")])
def test_a_forced_backend_raises_the_reason(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = FailingKernel("power_gradient_kernel", error)
    monkeypatch.setattr(power, "power_gradient_kernel", failing)
    norm = powernorm.PowerNorm(8, warmup_steps=1).to(DEVICE)
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    with use_backend("triton"):
        for _ in range(2):
            with pytest.raises(powernorm.InputError, match=r"^backend 'triton' was .*power_grad"):
                norm(torch.randn(3, 8, device=DEVICE)).sum().backward()
    torch.testing.assert_close(norm.state_dict(), before)
    assert failing.launches == 1


@pytest.mark.parametrize("error", [OutOfResources(9, 8, "threads"), RuntimeError("no launch")])
@pytest.mark.parametrize(
    ("kernel", "build"),
    [
        ("power_kernel", lambda: powernorm.PowerNorm(8, warmup_steps=1)),
        ("centered_kernel", lambda: powernorm.RegularizedBatchNorm(8)),
        ("centered_kernel", lambda: powernorm.BatchNorm(8)),
        ("uncentered_kernel", lambda: powernorm.PowerNormV(8)),
    ],
)
def test_an_update_that_failed_is_made_once(
    kernel: str,
    build: Callable[[], torch.nn.Module],
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failing = FailingKernel(kernel, error)
    monkeypatch.setattr(running, kernel, failing)
    with pytest.warns(UserWarning, match="eager torch serves") as caught:
        check_like_eager(build, build().to(DEVICE))
    assert len(warnings_of(caught)) == 1
    assert failing.launches == 1


def test_memory_that_is_used_up_is_no_failure_of_a_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eager torch would need more of it: the caller is told, and Triton is tried again."""
    failing = FailingKernel("static_kernel", torch.OutOfMemoryError("CUDA out of memory"))
    monkeypatch.setattr(static, "static_kernel", failing)
    norm, x = powernorm.BatchNorm(8).to(DEVICE).eval(), torch.randn(2, 8, device=DEVICE)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            norm(x)
    assert failing.launches == 2


def test_rows_too_wide_for_a_program_go_to_eager() -> None:
    """Rows that are owned whole; without groups any width is served."""
    x = torch.randn(2, 33_000, device=DEVICE)
    norm = powernorm.AdaNorm(33_000).to(DEVICE)
    with pytest.warns(UserWarning, match=r"a row of 33000 features in 1 group.*at most 32768"):
        y = norm(x)
    with use_backend("eager"):
        torch.testing.assert_close(y, norm(x))
    with use_backend("triton"), pytest.raises(powernorm.InputError, match="at most 32768"):
        norm(x)
    powernorm.BatchNorm(33_000).to(DEVICE).eval()(x)


def test_doctor_tries_a_launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = RuntimeError("Triton Error [CUDA]: device kernel image is invalid")
    monkeypatch.setattr(static, "static_kernel", FailingKernel("static_kernel", error))
    print_health()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("triton:")]
    assert "not available: " in line
    assert "device kernel image is invalid" in line
    assert "backend" not in line


def test_a_triton_that_cannot_be_imported_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "powernorm.ops.kernels.triton", None)
    with pytest.warns(UserWarning, match="triton cannot be imported"):
        powernorm.AdaNorm(7).to(DEVICE)(torch.randn(2, 7, device=DEVICE))


def properties(**others: Any) -> SimpleNamespace:
    common = {"multi_processor_count": 20, "warp_size": 32, "shared_memory_per_block": 49152}
    return SimpleNamespace(**(common | others))


def test_limits_are_those_that_the_device_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, SimpleNamespace] = {}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found["device"])
    ask = launching.limits.__wrapped__
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.version, "hip", None)
    found["device"] = properties(
        major=8, minor=6, shared_memory_per_block_optin=101_376, max_threads_per_block=1024
    )
    assert ask(device) == launching.DeviceLimits(20, 101_376, 32, 1024, True)
    found["device"] = properties(major=7, minor=5, shared_memory_per_block_optin=65_536)
    assert ask(device) == launching.DeviceLimits(20, 65_536, 32, 1024, False)
    # torch for ROCm knows no opt-in.
    monkeypatch.setattr(torch.version, "hip", "7.1")
    found["device"] = properties(major=9, minor=4, warp_size=64, shared_memory_per_block=65_536)
    assert ask(device) == launching.DeviceLimits(20, 65_536, 64, 1024, False)


def test_plans_leave_no_processor_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest rows take one program per processor, and all of them."""
    device = launching.DeviceLimits(132, 232_448, 32, 1024, True)
    monkeypatch.setattr(launching, "limits", lambda _: device)
    x = torch.empty(4096, 16384, device="meta")
    plan = launching.plan(x, 4096, 1, 3, 4)
    assert plan.constants["num_warps"] == 32
    # 4,096 tiles, of which no program has more than 32.
    assert plan.programs == 128
    with pytest.raises(KernelError, match="float64"):
        launching.plan(x.double(), 4096, 3, 3, 4)


class CountingKernel:
    """A kernel that Triton has compiled: remembers what it and its program were started with."""

    def __init__(self) -> None:
        self.compiled: list[dict[str, Any]] = []
        self.started: list[tuple[Any, ...]] = []

    @staticmethod
    def fn(x: Any, rows: Any, wide: Any, size: Any) -> None:
        """The signature of the kernel."""

    def __getitem__(self, _: tuple[int, int, int]) -> Callable[..., Any]:
        def start(*_: Any, **constants: Any) -> Any:
            self.compiled.append(constants)
            return self.Program(self)

        return start

    class Program:
        def __init__(self, kernel: CountingKernel) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            return lambda *args: self.kernel.started.append((grid, *args))


def test_a_compiled_program_is_started_again_for_the_same_specialization_only() -> None:
    kernel, x = CountingKernel(), torch.zeros(64)
    device = torch.device("cpu")

    def launch(tensor: Tensor, rows: int, size: int = 8, wide: bool = True) -> None:
        plan = launching.make_plan((2, 3), {"size": size, "num_warps": 4})
        launching.launch(kernel, plan, device, tensor, rows, wide=wide)

    launch(x, 32)
    launch(x[16:], 48)  # the same type, alignment, divisibility and constants
    assert kernel.compiled == [{"wide": True, "size": 8, "num_warps": 4}]
    ((grid, started, rows, *constants),) = kernel.started
    assert (grid, rows, constants) == ((2, 3, 1), 48, [True, 8])
    assert started.data_ptr() == x[16:].data_ptr()
    others: tuple[tuple[Any, ...], ...] = (
        (x.double(), 32), (x[1:], 32), (None, 32), (x, 33), (x, 1), (x, 2**40), (x, 32, 16),
        (x, 32, 8, False),
    )  # fmt: skip
    for number, other in enumerate(others, 2):
        launch(*other)
        assert len(kernel.compiled) == number, other
    assert len(kernel.started) == 1


COUNTED = {
    "PowerNorm": lambda: powernorm.PowerNorm(8, warmup_steps=10),
    "released": lambda: powernorm.PowerNorm(8, warmup_steps=10, variant="released"),
    "RegularizedBatchNorm": lambda: powernorm.RegularizedBatchNorm(8),
    "MovingAverageBatchNorm": lambda: powernorm.MovingAverageBatchNorm(8, warmup_steps=10),
    "BatchRenorm": lambda: powernorm.BatchRenorm(8),
}


@pytest.mark.parametrize("name", COUNTED)
def test_no_step_reads_the_counter_back(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read would make the host wait for the GPU, at every step of the warm-up."""
    norm = COUNTED[name]().to(DEVICE)
    read = []
    for method in ("__int__", "__bool__", "__index__", "item", "tolist"):
        original = getattr(Tensor, method)

        def counting(tensor: Tensor, *args: Any, original: Any = original) -> Any:
            if tensor is norm.num_batches_tracked:
                read.append(original)
            return original(tensor, *args)

        monkeypatch.setattr(Tensor, method, counting)
    with use_backend("triton"):
        train(norm, steps=4)
    assert not read
    monkeypatch.undo()
    assert int(norm.num_batches_tracked) == 4


@pytest.mark.parametrize(
    ("make_update", "num_buffers", "rows"),
    [
        (lambda *buffers: CenteredUpdate(buffers, 0.1, True), 2, 4),
        (lambda *buffers: UncenteredUpdate(buffers, 0.1), 1, 2),
        (lambda *buffers: PowerUpdate(buffers, 0.1, 0.1, False), 2, 5),
    ],
    ids=["centered", "uncentered", "power"],
)
def test_updates_count_as_writes(
    make_update: Callable[..., Update], num_buffers: int, rows: int
) -> None:
    """Autograd, and who else compares versions, sees that the buffers are others now."""
    state = [torch.ones(8, device=DEVICE) for _ in range(num_buffers)]
    state += [torch.tensor(3, device=DEVICE) for _ in range(2)]
    sums = torch.ones(rows, 8, dtype=torch.float64, device=DEVICE)
    kernels.update_running_stats(make_update(*state), sums)
    assert [buffer._version for buffer in state] == [1] * len(state)
