"""Each asyncio task and each thread has its own scopes of padding masks, compiled models too."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._dynamo.testing
from torch import Tensor, nn

import powernorm
from powernorm.norms import current_padding_mask, masks
from powernorm.norms.masks import ScopedMask, close_scope, open_scope
from refusals import refuses

NOTHING = torch.zeros(2, 3, dtype=torch.bool)


def mask_of(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(2, 3, generator=generator) < 0.5
    mask[0, 0] = False
    return mask


MASKS = [mask_of(seed) for seed in range(4)]


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    assert current_padding_mask() is None


class Plain(nn.Module):
    """A model that calls its norm without a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = powernorm.BatchNorm(4, momentum=1.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y


def check(model: Plain, call: Callable[[Tensor], Tensor], mask: Tensor, seed: int = 0) -> None:
    """The norm averages over the tokens that this mask leaves."""
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed))
    call(x)
    torch.testing.assert_close(model.norm.running_mean, x[~mask].mean(0))


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(main)
    assert current_padding_mask() is None


class Turns:
    """Lets the steps of several tasks run in a given order."""

    def __init__(self) -> None:
        self.now = 0
        self.changed = asyncio.Condition()

    async def take(self, number: int) -> None:
        async with self.changed:
            await self.changed.wait_for(lambda: self.now == number)

    async def end(self) -> None:
        async with self.changed:
            self.now += 1
            self.changed.notify_all()


ORDERS = ((0, 1, 0, 1), (0, 1, 1, 0))
"""Sequences of openers: closed in the order of opening, and nested."""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("compiled", [False, True])
def test_tasks_have_masks_of_their_own(order: tuple[int, ...], compiled: bool) -> None:
    """The first to open may close last or not: each sees its mask between, and none after."""
    model = Plain()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = torch.compile(model, fullgraph=True, backend=counter) if compiled else model

    async def task(number: int, turns: Turns) -> None:
        first, last = [turn for turn, who in enumerate(order) if who == number]
        await turns.take(first)
        check(model, call, NOTHING)
        with powernorm.padding_mask(MASKS[number]):
            check(model, call, MASKS[number])
            await turns.end()
            await turns.take(last)
            # The first thing that the task does: nothing eager comes before a compiled call.
            check(model, call, MASKS[number])
        check(model, call, NOTHING)
        await turns.end()

    async def main() -> None:
        turns = Turns()
        await asyncio.gather(task(0, turns), task(1, turns))
        check(model, call, NOTHING)

    run(main())
    assert counter.frame_count == (2 if compiled else 0)  # with a mask and without


def test_tasks_begin_with_the_scope_of_their_creator() -> None:
    model = Plain()

    async def child(number: int) -> None:
        await asyncio.sleep(0)
        check(model, model, MASKS[3])
        with powernorm.padding_mask(MASKS[number]):
            await asyncio.sleep(0)
            check(model, model, MASKS[number])
        await asyncio.sleep(0)
        check(model, model, MASKS[3])

    async def main() -> None:
        with powernorm.padding_mask(MASKS[3]):
            await asyncio.gather(*(child(number) for number in range(3)))
            check(model, model, MASKS[3])
            late = asyncio.create_task(child(0))
        check(model, model, NOTHING)
        await late
        check(model, model, NOTHING)

    run(main())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_thread_of_a_task_begins_with_its_scope(compiled: bool) -> None:
    model = Plain()
    call = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model

    async def main() -> None:
        with powernorm.padding_mask(MASKS[0]):
            await asyncio.to_thread(check, model, call, MASKS[0])
        await asyncio.to_thread(check, model, call, NOTHING)  # the same thread again

    run(main())


def test_a_thread_of_its_own_begins_without_a_mask() -> None:
    model, failed = Plain(), []

    def work() -> None:
        try:
            check(model, model, NOTHING)
        except AssertionError as error:
            failed.append(error)

    with powernorm.padding_mask(MASKS[0]):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert not failed


def test_what_ends_a_task_closes_its_scopes_and_no_others() -> None:
    model = Plain()

    async def fails(number: int, forever: bool) -> None:
        with powernorm.padding_mask(MASKS[number]), powernorm.padding_mask(None):
            await asyncio.sleep(0)
            if forever:
                await asyncio.Event().wait()
            raise RuntimeError("inside")

    async def main() -> None:
        with powernorm.padding_mask(MASKS[3]):
            waiting = asyncio.create_task(fails(0, True))
            with pytest.raises(RuntimeError, match="inside"):
                await fails(1, False)
            check(model, model, MASKS[3])
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            check(model, model, MASKS[3])
        check(model, model, NOTHING)

    run(main())


def test_generators_may_close_in_any_order() -> None:
    def scope(number: int) -> Iterator[None]:
        with powernorm.padding_mask(MASKS[number]):
            yield

    first, second = scope(0), scope(1)
    next(first)
    next(second)
    assert current_padding_mask() is MASKS[1]
    first.close()
    assert current_padding_mask() is MASKS[1]
    second.close()
    assert current_padding_mask() is None


class Opener:
    """Hooks as a swapped model has them, which open a scope around a module's forward."""

    label = "mask"

    def __init__(self, module: nn.Module, mask: Tensor) -> None:
        self.mask = mask
        module.register_forward_pre_hook(self.open)
        module.register_forward_hook(self.close, always_call=True)

    def open(self, *_: object) -> None:
        open_scope((ScopedMask(self.mask),), self)

    def close(self, *_: object) -> None:
        close_scope(self)


class Seeing(nn.Module):
    """A model that notes the mask in plain Python, which is a graph break where it is compiled."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.inner = Plain()
        self.breaks = breaks
        self.seen: list[Tensor | None] = []

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        if self.breaks:
            torch._dynamo.graph_break()
            note(self.seen)
        y: Tensor = self.inner(x - 1)
        return y


@torch._dynamo.disable
def note(seen: list[Tensor | None]) -> None:
    seen.append(current_padding_mask())
    with powernorm.padding_mask(MASKS[2]):
        seen.append(current_padding_mask())


@pytest.mark.parametrize("breaks", [False, True])
def test_hooks_in_compiled_tasks(breaks: bool) -> None:
    """Scopes that compiled code opens belong to the call, with its graph breaks, and to no task."""
    model = Seeing(breaks)
    Opener(model, MASKS[0])
    call = torch.compile(model, fullgraph=not breaks, backend="aot_eager")

    async def task(number: int) -> None:
        await asyncio.sleep(0)
        with powernorm.padding_mask(MASKS[number]):
            for _ in range(3):
                check(model.inner, call, MASKS[0])
                await asyncio.sleep(0)
                check(model.inner, model.inner, MASKS[number])
                assert current_padding_mask() is MASKS[number]
                await asyncio.sleep(0)

    async def main() -> None:
        await asyncio.gather(task(1), task(3))
        check(model.inner, model.inner, NOTHING)

    run(main())
    if breaks:
        assert all(mask is MASKS[0] for mask in model.seen[::2])
        assert all(mask is MASKS[2] for mask in model.seen[1::2])


def test_a_failed_compiled_call_leaves_no_mask() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError(f"inside, {x.ndim}")

    model = Failing()
    Opener(model, MASKS[0])
    with pytest.raises(RuntimeError, match="inside"):
        torch.compile(model, backend="aot_eager")(torch.randn(2, 3, 4))
    assert current_padding_mask() is None


def test_a_mask_of_an_asynchronous_generator_ends_with_it() -> None:
    @contextlib.asynccontextmanager
    async def batch(number: int) -> Any:
        with powernorm.padding_mask(MASKS[number]):
            await asyncio.sleep(0)
            yield

    async def task(number: int) -> None:
        async with batch(number):
            await asyncio.sleep(0)
            assert current_padding_mask() is MASKS[number]
        assert current_padding_mask() is None

    async def main() -> None:
        await asyncio.gather(task(0), task(1))

    run(main())


@pytest.mark.parametrize("name", ["ln", "bn", "pn", "dyt"])
@pytest.mark.parametrize("scoped", [False, True])
def test_a_mask_or_residual_on_another_device(name: str, scoped: bool) -> None:
    norm, x = powernorm.build_norm(name, 4), torch.randn(2, 3, 4)
    mask = MASKS[0].to("meta")
    both = r"on meta, the input is on cpu: pass `padding_mask\.to\(x\.device\)`"
    if not scoped:
        refuses(both, norm, x, mask)
        refuses(r"residual is on meta, the input is on cpu", norm, x, None, x.to("meta"))
    elif norm.reads_mask:
        with powernorm.padding_mask(mask), pytest.raises(powernorm.InputError, match=both):
            norm(x)


def test_a_models_own_mask_on_another_device() -> None:
    model = Plain()
    Opener(model, MASKS[0].to("meta"))
    refuses("padding_mask is on meta, the input is on cpu", model, torch.randn(2, 3, 4))


def interrupted(at: int) -> bool:
    """Open and close a scope; the given one of the instructions for it raises an interrupt.

    Returns:
        Whether there were as many instructions.
    """
    left = at

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        del argument
        if frame.f_code.co_filename not in (masks.__file__, contextlib.__file__):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    # Python 3.12 traces instructions only if a frame asks for it before settrace.
    sys._getframe().f_trace_opcodes = True
    sys.settrace(trace)
    try:
        with powernorm.padding_mask(MASKS[0]):
            pass
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left < 0


# Python 3.12 traces the end of a generator expression, too, where an interrupt reaches nobody.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_leaves_no_mask() -> None:
    at = 0
    while interrupted(at):
        assert current_padding_mask() is None, at
        at += 1
    assert at > 100
