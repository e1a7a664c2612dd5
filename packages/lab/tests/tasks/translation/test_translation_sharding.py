import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lab.tests.tiny_models import padding, tokens, translation_model
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """Yield a mesh of a single process, which tests only that the model can be sharded."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_layers_and_shared_tables_can_be_sharded(mesh: DeviceMesh) -> None:
    whole = translation_model("bn", "pn")
    model = copy.deepcopy(whole)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert model.head.weight is model.source_embedding.weight
    arguments = (tokens(2, 4), tokens(2, 3), padding(4, 2), padding(3, 1))
    for _ in range(2):  # the second time with the state of the first
        expected, got = whole(*arguments), model(*arguments)
        torch.testing.assert_close(got, expected)
        expected.square().mean().backward()
        got.square().mean().backward()
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
    gathered: dict[str, Tensor] = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True)
    )
    loaded = translation_model("bn", "pn", seed=1)
    loaded.load_state_dict(gathered)
    assert torch.equal(loaded.eval()(*arguments), whole.eval()(*arguments))
