"""Activation checkpointing: its region identifies the repeated forward, whatever the inputs are."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

import powernorm
from cases import KEEPING_STATE, Case, case_id, states
from covering import some_default
from refusals import refuses

CASES = (
    Case("bn"),
    Case("bn", {"variant": "released"}),
    Case("pnv", {"variant": "released"}),
    Case("rbn"),
    Case("pn", {"warmup_steps": 1}),
    Case("mabn", {"window": 2, "warmup_steps": 1, "ratio_start": 2}),
    Case("brn", {"warmup_steps": 0, "ramp_steps": 3}),
    Case("un", {"window": 2, "warmup_steps": 1, "ratio_start": 2}),
    Case("taper", {"start_step": 1, "end_step": 3}),
    Case("prepbn", {"warmup_steps": 1, "decay_steps": 2}),
)
"""Norms that read the mask alone, and norms that read their statistics besides."""

every_case = pytest.mark.parametrize("case", CASES, ids=case_id)
shape = (2, 7)
"""Size of the masks, unlike that of any other tensor here."""

Run = Callable[..., Tensor]


def run_plainly(call: Run, *args: Any) -> Tensor:
    return call(*args)


def checkpointed(**options: Any) -> Run:
    def run(call: Run, *args: Any) -> Tensor:
        y: Tensor = checkpoint(call, *args, use_reentrant=False, **options)
        return y

    return run


def mask_of(seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.4


def tokens(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, 8, generator=generator).requires_grad_()


def alike(count: int) -> list[Tensor]:
    """Inputs that differ in a token whose values are others in another order, or not at all."""
    inputs = []
    for t in range(count):
        x = tokens().detach().clone()
        if t % 2:
            x[1, 3, [1, 6]] = x[1, 3, [6, 1]]
        inputs.append(x.requires_grad_())
    return inputs


def loss_of(y: Tensor) -> Tensor:
    """A loss that padding takes part in, so that no gradient is 0."""
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(9))
    return (y * weights).sum() + y.square().sum()


def results(norm: nn.Module, inputs: list[Tensor]) -> dict[str, Tensor]:
    values = states(norm)
    values |= {f"gradient of {n}": p.grad for n, p in norm.named_parameters()}  # type: ignore[misc]
    values |= {f"gradient of input {i}": x.grad for i, x in enumerate(inputs)}  # type: ignore[misc]
    return {name: value.clone() for name, value in values.items() if value is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def num_masks() -> int:
    """Number of masks that exist, among them those that a layer has recorded."""
    gc.collect()
    found = [one for one in gc.get_objects() if type(one) is Tensor]
    return sum(one.dtype == torch.bool and one.shape == shape for one in found)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("case", [*CASES, *KEEPING_STATE], ids=case_id)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1)])
def test_alike_inputs_before_their_backwards(case: Case, order: tuple[int, ...]) -> None:
    """Padded batches often differ in little: each gets the mask and the statistics of its own."""

    def train(run: Run) -> dict[str, Tensor]:
        norm, inputs = case.build(), alike(4)
        for _ in range(3):
            losses = []
            for t, x in enumerate(inputs):
                with powernorm.padding_mask(mask_of(t)):
                    y = run(norm, x)
                losses.append(loss_of(y) + powernorm.penalty(norm, "token_sum"))
            for t in order:
                losses[t].backward()
        return results(norm, inputs)

    assert_same(train(checkpointed()), train(run_plainly))


@pytest.mark.parametrize("case", CASES[4:], ids=case_id)
def test_equal_inputs_with_other_statistics(case: Case) -> None:
    """An update between two forwards of one input does not reach the first."""

    def train(run: Run) -> dict[str, Tensor]:
        norm, x = case.build(), tokens()
        losses = []
        for t in range(4):
            losses.append(loss_of(run(norm, x)))
            loss_of(run(norm, tokens(t + 1) * 3)).backward()
        for loss in losses:
            loss.backward()
        return results(norm, [x])

    assert_same(train(checkpointed()), train(run_plainly))


class Nest(nn.Module):
    """Norms before, in and after a region inside the region; some are the same layer."""

    def __init__(self, norms: list[nn.Module], inner: Run) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norms)
        self.inner = inner

    def inside(self, x: Tensor) -> Tensor:
        y: Tensor = self.norms[2](self.norms[1](x).tanh() + x)
        return y

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x) * 2
        y = self.inner(self.inside, y) + x
        y = self.inner(self.inside, y) if self.norms[0] is self.norms[1] else y
        out: Tensor = self.norms[3](y.sigmoid())
        return out


@pytest.mark.parametrize(
    ("case", "shared"), [(CASES[0], True), (CASES[1], True), (CASES[4], False), (CASES[6], False)]
)
def test_regions_in_regions(case: Case, shared: bool) -> None:
    def train(outer: Run, inner: Run) -> dict[str, Tensor]:
        norms = [case.build()] * 4 if shared else [case.build() for _ in range(4)]
        nest, inputs = Nest(norms, inner), alike(3)
        for _ in range(2):
            losses = []
            for t, x in enumerate(inputs):
                with powernorm.padding_mask(mask_of(t)):
                    losses.append(loss_of(outer(nest, x)))
            for t in (1, 2, 0):
                losses[t].backward()
        return results(nest, inputs)

    expected = train(run_plainly, run_plainly)
    found = train(checkpointed(), checkpointed())
    if shared:  # the gradients of its uses are added in another order
        torch.testing.assert_close(found, expected)
    else:
        assert_same(found, expected)


@pytest.mark.parametrize("case", CASES[:3], ids=case_id)
def test_a_layer_used_several_times_with_other_masks(case: Case) -> None:
    """Encoder and decoder share a layer: a region calls it under the mask around and under none."""

    def train(run: Run) -> dict[str, Tensor]:
        norm, x = case.build(), tokens()

        def region(x: Tensor) -> Tensor:
            y: Tensor = norm(x)
            with powernorm.padding_mask(None):
                return y + 2 * norm(x) + 3 * norm(x)

        with powernorm.padding_mask(mask_of(0)):
            y = run(region, x)
        loss_of(y).backward()
        return results(norm, [x])

    assert_same(train(checkpointed()), train(run_plainly))


def test_a_retained_graph_is_repeated_from_its_beginning() -> None:
    def train(run: Run) -> dict[str, Tensor]:
        norm, inputs = Case("bn").build(), alike(2)
        losses = []
        for t, x in enumerate(inputs):
            with powernorm.padding_mask(mask_of(t)):
                losses.append(loss_of(run(lambda x: norm(norm(x).tanh()), x)))
        for _ in range(3):
            for loss in losses:
                loss.backward(retain_graph=True)
        return results(norm, inputs)

    assert_same(train(checkpointed()), train(run_plainly))


@pytest.mark.parametrize("case", CASES[:5:4], ids=case_id)
def test_many_forwards_before_their_backwards(case: Case) -> None:
    """As many as a pipeline or an accumulated loss may need: no record is lost."""

    def train(run: Run) -> dict[str, Tensor]:
        norm, x = case.build(), tokens()
        losses = []
        for t in range(200):
            with powernorm.padding_mask(mask_of(t)):
                losses.append(loss_of(run(norm, x)))
        torch.stack(losses).sum().backward()
        return results(norm, [x])

    torch.testing.assert_close(train(checkpointed()), train(run_plainly))


def test_outputs_that_go_backward_one_by_one() -> None:
    """Without a retained graph: the region is repeated for each."""

    def train(run: Callable[..., tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
        norm, inputs = Case("bn").build(), alike(2)
        outputs = []
        for t, x in enumerate(inputs):
            with powernorm.padding_mask(mask_of(t)):
                outputs.append(run(lambda x: (norm(x), norm(x * 2)), x))
        for i in (0, 1):
            for pair in outputs:
                loss_of(pair[i]).backward()
        return results(norm, inputs)

    assert_same(train(partial(checkpoint, use_reentrant=False)), train(lambda call, x: call(x)))


@contextmanager
def doubled() -> Iterator[None]:
    """Hooks of a user that hold nothing."""
    with saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
        yield


@pytest.mark.parametrize("hooks", [save_on_cpu, doubled])
@pytest.mark.parametrize("where", ["around", "inside", "around the backward"])
def test_other_hooks_on_saved_tensors(
    hooks: Callable[[], AbstractContextManager[Any]], where: str
) -> None:
    """As those that keep what is saved on another device."""

    def train(run: Run) -> dict[str, Tensor]:
        norm, inputs = Case("bn", {"variant": "released"}).build(), alike(2)

        def region(x: Tensor) -> Tensor:
            y: Tensor = norm(x)
            with hooks() if where == "inside" else nullcontext():
                return y + norm(y.tanh())

        losses = []
        for t, x in enumerate(inputs):
            around = hooks() if where == "around" else nullcontext()
            with powernorm.padding_mask(mask_of(t)), around:
                losses.append(loss_of(run(region, x)))
        with hooks() if where == "around the backward" else nullcontext():
            for loss in losses:
                loss.backward()
        return results(norm, inputs)

    assert_same(train(checkpointed()), train(run_plainly))


def test_a_backward_under_the_mask_of_another_batch() -> None:
    def train(run: Run) -> dict[str, Tensor]:
        norm, x = Case("bn").build(), tokens()
        with powernorm.padding_mask(mask_of(0)):
            loss = loss_of(run(norm, x))
        for other in (mask_of(1), torch.zeros(3, 1, dtype=torch.bool)):
            with powernorm.padding_mask(other):
                loss.backward(retain_graph=True)
        return results(norm, [x])

    assert_same(train(checkpointed()), train(run_plainly))


def test_a_mask_that_is_written_to_before_the_backward() -> None:
    """A loader may reuse its buffer."""

    def train(run: Run, writes: bool) -> dict[str, Tensor]:
        norm, x, mask = Case("bn").build(), tokens(), mask_of(0)
        losses = []
        for t in range(2):
            mask = mask if writes else mask.clone()
            mask.copy_(mask_of(t))
            with powernorm.padding_mask(mask):
                losses.append(loss_of(run(norm, x)))
        for loss in losses:
            loss.backward()
        return results(norm, [x])

    assert_same(train(checkpointed(), True), train(run_plainly, False))


@pytest.mark.parametrize("case", CASES[:3], ids=case_id)
def test_a_batch_of_padding_alone(case: Case) -> None:
    """It is normalized by the running statistics, which the next forward moves."""

    def train(run: Run) -> dict[str, Tensor]:
        norm, inputs = case.build(), alike(2)
        losses = []
        for mask, x in zip((torch.ones(shape, dtype=torch.bool), mask_of(0)), inputs, strict=True):
            with powernorm.padding_mask(mask):
                losses.append(loss_of(run(norm, x)))
        for loss in losses:
            loss.backward()
        return results(norm, inputs)

    assert_same(train(checkpointed()), train(run_plainly))


def test_evaluation_of_a_released_variant() -> None:
    """It sets padding to 0, so that padding has no gradient."""
    norm = powernorm.BatchNorm(8, variant="released").eval()
    inputs = alike(2)
    losses = []
    for t, x in enumerate(inputs):
        with powernorm.padding_mask(mask_of(t)):
            losses.append(loss_of(checkpoint(norm, x, use_reentrant=False)))
    for t, x in enumerate(inputs):
        losses[t].backward()
        assert torch.equal(x.grad.abs().sum(-1) == 0, mask_of(t))


@pytest.mark.parametrize("early_stop", [False, True])
def test_a_backward_inside_a_region(early_stop: bool) -> None:
    """As for a penalty on a gradient: the region is repeated before its first run has ended."""

    def train(run: Run) -> dict[str, Tensor]:
        norm, inputs = Case("bn").build(), alike(2)

        def region(x: Tensor) -> Tensor:
            y = norm(x)
            (slope,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
            out: Tensor = norm(y + slope)
            return out

        losses = []
        for t, x in enumerate(inputs):
            with powernorm.padding_mask(mask_of(t)):
                losses.append(loss_of(run(region, x)))
        for loss in losses:
            loss.backward()
        return results(norm, inputs)

    with set_checkpoint_early_stop(early_stop):
        assert_same(train(checkpointed()), train(run_plainly))


def saves_copies(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del context, args, kwargs
    saved = op is torch.ops.aten.clone.default
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def saves_norms(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del context, args, kwargs
    saved = op.namespace == "powernorm"
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("policy", [saves_copies, saves_norms])
@every_case
def test_selective_checkpointing(case: Case, policy: Any) -> None:
    """It counts the operators that a region runs: a record must not add any.

    Where it saves what a norm gave, the repetition sees that and is no second batch.
    """

    def train(run: Run) -> dict[str, Tensor]:
        norm, inputs = case.build(), alike(2)
        for _ in range(2):
            losses = []
            for t, x in enumerate(inputs):
                with powernorm.padding_mask(mask_of(t)):
                    y = run(lambda x: norm(x.sin().clone()).clone().tanh().clone().sin(), x)
                losses.append(loss_of(y))
            for loss in losses:
                loss.backward()
        return results(norm, inputs)

    contexts = partial(create_selective_checkpoint_contexts, policy)
    found, expected = train(checkpointed(context_fn=contexts)), train(run_plainly)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)


def test_replicas_in_threads_share_a_layer() -> None:
    """As those of DataParallel, whose forwards run side by side."""

    def train(run: Run) -> dict[str, Tensor]:
        norm, inputs = Case("bn", {"variant": "released"}).build(), alike(4)
        replicas = [norm._replicate_for_data_parallel() for _ in inputs]
        for replica in replicas:
            for name, buffer in norm.named_buffers():
                setattr(replica, name, buffer.clone())
            for name, parameter in norm.named_parameters():
                setattr(replica, name, parameter)
        losses: list[Tensor | None] = [None] * 4

        def work(t: int) -> None:
            with powernorm.padding_mask(mask_of(t)):
                losses[t] = loss_of(run(replicas[t], inputs[t]))

        threads = [Thread(target=work, args=(t,)) for t in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for loss in losses:
            assert loss is not None
            loss.backward()
        return results(norm, inputs)

    assert_same(train(checkpointed()), train(run_plainly))


@pytest.mark.parametrize("case", some_default(CASES[1:5:3], CASES[1]), ids=case_id)
def test_records_go_with_the_graph(case: Case) -> None:
    """Masks and statistics must not pile up, of a dropped forward or with a loss that is kept."""
    norm, before = case.build(), num_masks()
    kept = []
    for t in range(3):
        x = tokens(t)
        with powernorm.padding_mask(mask_of(t)):
            checkpoint(norm, x, use_reentrant=False)
            kept.append(loss_of(checkpoint(norm, x, use_reentrant=False)))
        kept[-1].backward()
    assert num_masks() == before


def test_a_forward_without_gradients_records_nothing() -> None:
    norm, before = Case("bn").build(), num_masks()
    with torch.no_grad(), powernorm.padding_mask(mask_of(0)):
        norm(tokens())
    assert num_masks() == before


@pytest.mark.slow
def test_hooks_that_are_opened_again_and_again_keep_little() -> None:
    """As those of a trainer that offloads what is saved; regions inside are told apart."""

    def train(run: Run) -> dict[str, Tensor]:
        norm, inputs, hooks = Case("bn").build(), alike(2), save_on_cpu()
        before = num_masks()
        for step in range(150):
            losses = []
            for t, x in enumerate(inputs):
                with powernorm.padding_mask(mask_of(2 * step + t)), hooks:
                    losses.append(loss_of(run(norm, x)))
            for loss in losses:
                loss.backward()
        assert num_masks() == before
        return results(norm, inputs)

    assert_same(train(checkpointed()), train(run_plainly))


def test_copies_of_a_layer_whose_forward_is_pending() -> None:
    norm, x = Case("bn").build(), tokens()
    with powernorm.padding_mask(mask_of(0)):
        loss = loss_of(checkpoint(norm, x, use_reentrant=False))
    for twin in (copy.deepcopy(norm), pickle.loads(pickle.dumps(norm))):
        assert_same(states(twin), states(norm))
        checkpoint(twin, tokens(), use_reentrant=False).sum().backward()
    loss.backward()


def by_own_hooks(call: Run, x: Tensor) -> Tensor:
    """Checkpointing of another make: for each saved tensor it repeats the region from its start."""
    count = 0

    def pack(tensor: Tensor) -> int:
        del tensor
        nonlocal count
        count += 1
        return count - 1

    def unpack(index: int) -> Tensor:
        saved: list[Tensor] = []
        keep = saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()), lambda one: one)
        with torch.enable_grad(), keep:
            call(x.detach().requires_grad_())
        return saved[index]

    with saved_tensors_hooks(pack, unpack):
        return call(x)


def train_two(case: Case, run: Run, *, reads: bool = False) -> dict[str, Tensor]:
    norm, inputs = case.build(), alike(2)
    losses = []
    for t, x in enumerate(inputs):
        with powernorm.padding_mask(mask_of(t)):
            y = run(lambda x: norm(norm(x.sin()).tanh()).sigmoid(), x)
        for _ in range(2 if reads else 0):
            assert y.grad_fn is not None
            _ = y.grad_fn._saved_result
        losses.append(loss_of(y))
    for loss in losses:
        loss.backward()
    return results(norm, inputs)


@pytest.mark.parametrize("case", CASES[:3], ids=case_id)
def test_hooks_that_repeat_a_region_for_each_tensor(case: Case) -> None:
    assert_same(train_two(case, by_own_hooks), train_two(case, run_plainly))


@every_case
def test_saved_tensors_that_are_read_outside_of_a_backward(case: Case) -> None:
    """As by tools that draw graphs: each reading repeats the region."""
    assert_same(train_two(case, checkpointed(), reads=True), train_two(case, run_plainly))


def in_a_tensor_hook(call: Run, x: Tensor) -> Tensor:
    """Checkpointing of which a layer cannot tell the region: a hook on the output repeats it."""

    class Forgetful(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.set_materialize_grads(False)
            return call(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            del ctx, gradient
            return repeated.pop()

    repeated: list[Tensor] = []

    def repeat(gradient: Tensor) -> None:
        with torch.enable_grad():
            again = x.detach().requires_grad_()
            y = call(again)
        repeated.append(torch.autograd.grad(y, again, gradient)[0])

    y: Tensor = Forgetful.apply(x)
    y.register_hook(repeat)
    return y


def reentrant(call: Run, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(call, x, use_reentrant=True)
    return y


def reentrant_around_another(call: Run, x: Tensor) -> Tensor:
    return reentrant(lambda x: run_checkpointed(call, x), x)


def reentrant_twice(call: Run, x: Tensor) -> Tensor:
    return reentrant(lambda x: reentrant(call, x), x)


def reentrant_inside_another(call: Run, x: Tensor) -> Tensor:
    return run_checkpointed(lambda x: reentrant(call, x), x)


run_checkpointed = checkpointed()


# torch 2.11 leaves its open hooks in disorder where a region inside a reentrant one raises.
@pytest.mark.filterwarnings("ignore:Exception ignored in.*_checkpoint_without_reentrant_generator")
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize(
    "run",
    [
        in_a_tensor_hook,
        reentrant,
        reentrant_around_another,
        reentrant_twice,
        reentrant_inside_another,
    ],
)
@every_case
def test_an_unknown_region_is_refused(case: Case, run: Run) -> None:
    """Two uses of a layer would be two steps in one backward, and a mask be missing, in silence."""
    norm, x = case.build(), tokens()
    loss = loss_of(run(norm, x)) + loss_of(run(norm, x))
    tracked = int(norm.num_batches_tracked)
    refuses("use_reentrant=False", loss.backward)
    assert int(norm.num_batches_tracked) == tracked


@pytest.mark.parametrize("change", ["order", "number"])
def test_a_region_that_calls_other_layers_the_second_time(change: str) -> None:
    """Its gradient would be wrong, and nothing else says so."""
    norm, x, runs = Case("bn").build(), tokens(), []

    def region(x: Tensor) -> Tensor:
        runs.append(None)
        parts = [x[:, :3], x]
        if len(runs) > 1:
            parts = parts[::-1] if change == "order" else [x[:, :3], x, x]
        y: Tensor = sum(norm(part).sum() for part in parts)
        return y

    with set_checkpoint_early_stop(False):
        y = checkpoint(region, x, use_reentrant=False)
    refuses("the same layers in the same order", y.backward)


def test_too_many_calls_in_a_region() -> None:
    norm, x = Case("bn").build(), tokens()

    def region(x: Tensor) -> Tensor:
        y: Tensor = sum(norm(x).sum() for _ in range(257))
        return y

    y = checkpoint(region, x, use_reentrant=False)
    refuses("at most 256 calls", y.backward)


@pytest.mark.parametrize("name", ["pn", "brn"])
def test_a_pass_without_gradients_in_between_changes_nothing(name: str) -> None:
    def train(run: Run, *, looks: bool) -> dict[str, Tensor]:
        norm, x = Case(name, {"warmup_steps": 0}).build(), tokens()
        for _ in range(4):
            if looks:
                with torch.no_grad():
                    norm(x)
            loss_of(run(norm, x)).backward()
        return results(norm, [x])

    assert_same(train(checkpointed(), looks=True), train(run_plainly, looks=False))


def test_a_penalty_is_counted_once_where_no_hook_clears_it() -> None:
    def penalties(run: Run) -> list[float]:
        torch.manual_seed(0)
        norm, linear = powernorm.RegularizedBatchNorm(8), nn.Linear(8, 8)
        values = []
        for t in range(4):
            loss = run(nn.Sequential(norm, linear), tokens(t)).sum() + norm.penalty()
            values.append(norm.penalty().item())
            torch.autograd.grad(loss, list(linear.parameters()))
        return values

    assert penalties(checkpointed()) == penalties(run_plainly)


def test_a_shared_layer_that_one_region_hides_has_no_penalty() -> None:
    norm, x = powernorm.RegularizedBatchNorm(8), tokens()
    y = checkpoint(norm, x, use_reentrant=True) + norm(x)
    refuses("penalty would do nothing", norm.penalty)
    refuses("use_reentrant=False", y.sum().backward)
