from pathlib import Path

import pytest
import torch
from torch import distributed

from benchmarks.weights.trainer_group import TrainerGroup, buckets_of
from tests.support.preloaded import Preloaded

RECEIVER = """
import sys
import torch
from torch import distributed
from torch.distributed import distributed_c10d as c10d

# The way of SGLang's ranks: a group beside the default one, which is made with another store.
port, name, size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
store, _, _ = next(distributed.rendezvous(f"tcp://127.0.0.1:{port}", 1, 2))
group, _ = c10d._new_process_group_helper(
    2, 1, [], "gloo", distributed.PrefixStore(name, store), group_name=name, timeout=c10d.default_pg_timeout
)
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
flat = torch.empty(size, dtype=torch.uint8)
distributed.broadcast(flat, src=0, group=group)
print(flat.sum().item())
distributed.destroy_process_group(group)
"""


@pytest.mark.process
def test_torch_distributed_on_the_other_side_gets_the_bytes(preloaded: Preloaded, tmp_path: Path):
    tensors = [torch.arange(12, dtype=torch.float32).reshape(3, 4), torch.ones(5, dtype=torch.bfloat16)]
    wanted = sum(int(tensor.flatten().view(torch.uint8).sum()) for tensor in tensors)
    group = TrainerGroup(torch.device("cpu"), ranks=1, name="test")
    _, port = group.address
    with (tmp_path / "out").open("wb") as out:
        size = str(sum(tensor.nbytes for tensor in tensors))
        other = preloaded.start("-c", RECEIVER, str(port), "test", size, out=out.fileno())
        group.join()
        group.send(tensors)
        assert other.wait(timeout=60) == 0
    assert (tmp_path / "out").read_text().strip() == str(wanted)
    group.close()
    assert not distributed.is_initialized()


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [(100, [["a", "b", "c"]]), (40, [["a", "b"], ["c"]]), (16, [["a"], ["b"], ["c"]]), (1, [["a"], ["b"], ["c"]])],
)
def test_buckets_hold_neighbours_up_to_a_size(nbytes, expected):
    tensors = {"a": torch.zeros(4), "b": torch.zeros(6), "c": torch.zeros(5)}
    assert list(buckets_of(tensors, nbytes)) == expected
    assert list(buckets_of({}, nbytes)) == []
