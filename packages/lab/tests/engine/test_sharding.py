"""The rows of a training function's batches that each of several processes gets."""

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from norms.processes import run_processes
from powernorm.errors import InputError
from powernorm_lab.engine import processes
from powernorm_lab.engine.processes import rank
from powernorm_lab.engine.run_training import forget_comparison
from powernorm_lab.engine.sharding import check_equal_weights, is_sharded, shard, shards

Pair = namedtuple("Pair", ["x", "y"])
ROWS = torch.arange(5)


def test_the_parts_are_the_batch() -> None:
    parts = [shard(ROWS, index, 2) for index in range(2)]
    assert torch.equal(torch.cat(parts), ROWS)
    micro = shard([(ROWS, ROWS), (ROWS[:3], ROWS[:3])], 0, 2)
    assert [[len(one) for one in batch] for batch in micro] == [[3, 3], [2, 2]]
    pair = shard(Pair(ROWS, None), 1, 2)
    assert isinstance(pair, Pair)
    assert torch.equal(pair.x, torch.tensor([3, 4]))
    named = shard(OrderedDict(x=ROWS), 0, 5)
    assert isinstance(named, OrderedDict)
    assert torch.equal(named["x"], torch.tensor([0]))


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (7, "cannot divide 7 among 2 processes: give tensors"),
        (None, "cannot divide None"),
        ({"x": ROWS, "names": ["a", "b"]}, "cannot divide 'a' among 2"),
        ({"x": ROWS, "loss": torch.tensor(1.0)}, "cannot divide a tensor without rows"),
        ((ROWS, ROWS[:3]), r"tensors of \[3, 5\] rows .*shard=False"),
        (ROWS[:1], "batch of 1 rows .*drop_last=True"),
    ],
)
def test_what_cannot_be_divided(batch: object, said: str) -> None:
    with pytest.raises(InputError, match=said):
        shard(batch, 0, 2)


def test_a_loader_that_divides_by_itself() -> None:
    data = TensorDataset(ROWS)
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    assert is_sharded(DataLoader(data, sampler=sampler))
    assert not is_sharded(DataLoader(data, shuffle=True))
    assert not is_sharded([ROWS])


def different_batches(number: int) -> None:
    with pytest.raises(InputError, match=r"different batches.*shard=False"):
        list(shards(iter([ROWS + number])))
    (found,) = shards(iter([ROWS]))
    assert torch.equal(found, ROWS.tensor_split(2)[rank()])


def different_weights(number: int) -> None:
    model = torch.nn.Linear(2, 2)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    check_equal_weights([model, model])
    torch.nn.init.constant_(model.bias, number)
    with pytest.raises(InputError, match=r"bias differs between the 2 processes.*run\.wrap"):
        check_equal_weights([model])


@pytest.mark.distributed
@pytest.mark.parametrize("what", [different_batches, different_weights])
def test_processes_that_differ(what: Callable[[int], None], tmp_path: Path) -> None:
    run_processes(what, 2, tmp_path)


def test_each_process_trains_on_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grid has cuda:0, because it is made before the processes join."""
    first = torch.device("cuda", 0)
    assert processes.own_device(first) == first
    monkeypatch.setattr(processes, "num_processes", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert processes.own_device(first) == torch.device("cuda", 3)
    assert processes.own_device(torch.device("cpu")) == torch.device("cpu")


def test_a_comparison_without_runs_leaves_nothing(tmp_path: Path) -> None:
    for name in ("results.json", "comparison.json", "work.json", "report.html"):
        (tmp_path / name).touch()
    forget_comparison(tmp_path)
    assert not list(tmp_path.iterdir())
