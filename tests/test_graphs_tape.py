"""The tape by itself: CUDA-graph semantics on the CPU."""

import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from kimi_k25.graphs import CaptureError, Tape


def record(function, *, tape=None):
    """One segment of `function`'s operators, and what it returned while it was recorded."""
    tape = tape or Tape()
    with tape.recording():
        tape.begin()
        result = function()
        segment = tape.end()
    return segment, result


def test_replay_computes_new_inputs_into_the_captured_output():
    x = torch.ones(3)
    replay, y = record(lambda: (x * 2).relu_() + 1)

    x.copy_(torch.tensor([-1.0, 0.0, 5.0]))
    replay()

    assert y.tolist() == [1, 1, 11]


def test_replay_runs_no_host_code():
    calls = []
    replay, _ = record(lambda: calls.append(1))

    replay()

    assert calls == [1]


def test_views_and_in_place_writes_reach_the_same_storages():
    x, cache = torch.arange(4.0), torch.zeros(2, 2)
    replay, view = record(lambda: cache.view(4).copy_(x).view(2, 2).t())

    x.neg_()
    replay()

    assert cache.tolist() == [[0, -1], [-2, -3]]
    assert view.data_ptr() == cache.data_ptr()


def test_operators_with_out_and_with_several_outputs():
    x, out = torch.tensor([3.0, 1.0, 2.0]), torch.empty(3)
    replay, (values, order) = record(lambda: (torch.mul(x, 2, out=out), torch.sort(out))[1])

    x.copy_(torch.tensor([1.0, 2.0, 0.0]))
    replay()

    assert values.tolist() == [0, 2, 4]
    assert order.tolist() == [2, 0, 1]


def test_a_number_read_from_the_host_is_baked_in():
    x, scale = torch.ones(2), [2.0]
    replay, y = record(lambda: x * scale[0])

    scale[0] = 3.0
    replay()

    assert y.tolist() == [2, 2]


def test_data_of_a_replaced_storage_is_not_followed():
    p = nn.Parameter(torch.ones(2), requires_grad=False)
    replay, y = record(lambda: p * 2)

    p.data = torch.full((2,), 7.0)
    replay()

    assert y.tolist() == [2, 2]


def test_poison_fills_what_a_replay_does_not_recompute():
    kept = []

    def function():
        kept.append(torch.empty(2))
        kept[0].copy_(torch.ones(2))
        return torch.empty(2)

    replay, never_written = record(function, tape=Tape(poison=True))
    assert never_written.isnan().all()
    never_written.zero_()
    replay()

    assert never_written.isnan().all()
    assert kept[0].tolist() == [1, 1]


def test_tape_counts_the_bytes_it_made():
    tape, x = Tape(), torch.ones(4)
    record(lambda: (x + 1).view(2, 2).mul_(2), tape=tape)

    assert tape.nbytes == 16


class Gate(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: x.sum().item(), r"Tensor.item \(aten._local_scalar_dense.default\) at .*: reads a value"),
        (lambda x: x.nonzero(), r"Tensor.nonzero \(aten.nonzero.default\) at .*: makes a shape"),
        (lambda x: x[x > 0], r"Tensor.__getitem__ \(aten.index.Tensor\) at .*: a boolean mask"),
        (lambda x: x.tolist(), r"Tensor.tolist at .*: copies the tensor to the host"),
        (Gate(), r"Tensor.__bool__ .* at Gate \(.*test_graphs_tape.py:\d+\)"),
    ],
)
def test_a_host_wait_raises_naming_the_op_and_the_way_out(function, message):
    tape, x = Tape(), torch.ones(2)

    with pytest.raises(CaptureError, match=message) as error:
        record(lambda: function(x), tape=tape)

    assert "or move it into a break point" in str(error.value)


def test_after_an_error_the_tape_records_again():
    tape, x = Tape(), torch.ones(2)
    with pytest.raises(CaptureError):
        record(lambda: x.tolist(), tape=tape)
    tape.abort()

    replay, y = record(lambda: x + 1, tape=tape)
    x.zero_()
    replay()

    assert y.tolist() == [1, 1]
    assert x.tolist() == [0, 0]


def test_a_tensor_of_an_earlier_recording_is_refused():
    tape, x = Tape(), torch.ones(2)
    _, y = record(lambda: x + 1, tape=tape)

    with pytest.raises(CaptureError, match=r"aten.mul.Tensor at .* reads a tensor that an earlier capture made"):
        record(lambda: y * 2, tape=tape)


COLLECTIVES = """
import sys
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce
from kimi_k25.graphs import CaptureError, Tape

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
x = torch.full((1 << 18,), rank + 1.0)

def waited():
    y = x * 2
    dist.all_reduce(y)
    return y + 1

def waited_later():
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    z = x * 3
    work.wait()
    return y + 1

def functional():
    return all_reduce(x * 2, "sum", dist.group.WORLD) + 1

def forgotten():
    y = x * 2
    dist.all_reduce(y, async_op=True)
    return y + 1

for case in (waited, waited_later, functional, forgotten):
    tape = Tape(poison=True)
    try:
        with tape.recording():
            tape.begin()
            y = case()
            replay = tape.end()
    except CaptureError as e:
        print(f"{case.__name__}: {e}")
        continue
    right = []
    for scale in (1.0, 10.0, 100.0):
        x.fill_((rank + 1) * scale)
        replay()
        right.append(bool((y == 6 * scale + 1).all()))
    print(f"{case.__name__}: {right}")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def collectives(tmp_path_factory):
    """What each rank of two printed, by case."""
    folder = tmp_path_factory.mktemp("collectives")
    script = folder / "ranks.py"
    script.write_text(COLLECTIVES)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    return [dict(line.split(": ", 1) for line in out.splitlines()) for out, _ in outputs]


@pytest.mark.parametrize("case", ["waited", "waited_later", "functional"])
def test_a_replayed_collective_is_waited_for(collectives, case):
    assert [rank[case] for rank in collectives] == ["[True, True, True]"] * 2


def test_a_collective_that_nobody_waits_for_is_refused(collectives):
    for rank in collectives:
        assert rank["forgotten"].startswith("c10d.allreduce_.default was started and nobody waited for it")


def test_memory_that_a_recording_freed_is_not_taken_for_its_own():
    tape = Tape()
    record(lambda: [torch.empty(7) for _ in range(50)] and None, tape=tape)
    record(lambda: None, tape=tape)

    others = [torch.empty(7) for _ in range(50)]

    assert not any(tape.owns(other) for other in others)
