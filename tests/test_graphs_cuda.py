"""The CUDA backend: its order of calls on a stand-in for torch.cuda here, its answers where there is a GPU."""

from contextlib import contextmanager

import pytest
import torch
from toy_decoder import Toy

from kimi_k25.graphs import BucketPolicy, CaptureError
from kimi_k25.graphs.bridges import BridgeBuffers
from kimi_k25.graphs.capture import Step, capture_forward
from kimi_k25.graphs.cuda import CudaGraphs

X = torch.ones(4, 2)


class FakeGraph:
    def __init__(self, cuda):
        self.cuda = cuda
        self.name = f"graph{len(cuda.graphs)}"
        cuda.graphs.append(self)

    def capture_begin(self, pool, capture_error_mode):
        assert self.cuda.streams[-1:] == ["stream0"], "a capture needs the capture stream to be current"
        self.cuda.log.append(f"{self.name} begin {pool} {capture_error_mode}")

    def capture_end(self):
        self.cuda.log.append(f"{self.name} end")
        if self.cuda.end_error:
            raise RuntimeError(self.cuda.end_error)

    def replay(self):
        self.cuda.log.append(f"{self.name} replay")

    def reset(self):
        self.cuda.log.append(f"{self.name} reset")


class FakeStream:
    def __init__(self, name):
        self.name = name

    def wait_stream(self, other):
        pass


class FakeCuda:
    """Records what a backend asks of torch.cuda. `pool_storages` are the tensors that lie in the pool."""

    def __init__(self):
        self.log, self.graphs, self.streams, self.pool_tensors = [], [], [], []
        self.end_error, self.num_streams, self.num_snapshots, self.num_pools = "", 0, 0, 0

    def Stream(self, device):
        self.num_streams += 1
        return FakeStream(f"stream{self.num_streams - 1}")

    def CUDAGraph(self):
        return FakeGraph(self)

    def graph_pool_handle(self):
        self.num_pools += 1
        return f"pool{self.num_pools - 1}"

    @contextmanager
    def stream(self, stream):
        self.streams.append(stream.name)
        yield
        self.streams.pop()

    def synchronize(self, device):
        self.log.append("synchronize")

    def empty_cache(self):
        pass

    def memory_snapshot(self, pool):
        self.num_snapshots += 1
        return [{"address": t.data_ptr(), "total_size": t.nbytes} for t in self.pool_tensors]


@pytest.fixture
def cuda():
    return FakeCuda()


@pytest.fixture
def backend(cuda):
    return CudaGraphs(torch.device("cuda"), cuda=cuda)


def test_segments_share_one_pool_and_one_stream(cuda, backend):
    with backend.recording():
        backend.begin()
        first = backend.end()
        backend.begin()
        second = backend.end()
    first()
    second()

    assert cuda.log == [
        "synchronize",
        "graph0 begin pool0 relaxed",
        "graph0 end",
        "graph1 begin pool0 relaxed",
        "graph1 end",
        "synchronize",
        "graph0 replay",
        "graph1 replay",
    ]


def test_pieces_and_breaks_replay_in_order(cuda, backend):
    toy = Toy()
    inputs = toy.prefill(4) | {"num_tokens": torch.tensor([4], dtype=torch.int32)}
    captured = capture_forward(
        backend, toy.forward, inputs, torch.zeros(4, 16), Step(4), pieces=True, bridges=BridgeBuffers(backend)
    )
    cuda.log.clear()

    for call in captured.calls:
        call()

    assert captured.num_breaks == 3
    assert cuda.log == [f"graph{i} replay" for i in range(4)]


def test_close_drops_all_graphs_together_after_a_synchronisation(cuda, backend):
    with backend.recording():
        for _ in range(2):
            backend.begin()
            backend.end()
    cuda.log.clear()

    backend.close()

    assert cuda.log == ["synchronize", "graph0 reset", "graph1 reset"]
    with backend.recording():
        backend.begin()
    assert "graph2 begin pool1 relaxed" in cuda.log


def test_an_error_inside_a_capture_ends_and_drops_it(cuda, backend):
    def forward(inputs):
        raise torch.OutOfMemoryError("Tried to allocate 1.00 GiB")

    with pytest.raises(torch.OutOfMemoryError):
        capture_forward(backend, forward, {}, X, Step(4), pieces=True, bridges=None)

    assert cuda.log == [
        "synchronize",
        "graph0 begin pool0 relaxed",
        "graph0 end",
        "graph0 reset",
    ]


def test_an_invalidated_capture_does_not_hide_its_cause(cuda, backend):
    cuda.end_error = "operation failed due to a previous error during capture"

    def forward(inputs):
        raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        capture_forward(backend, forward, {}, X, Step(4), pieces=True, bridges=None)


def test_a_side_stream_that_was_not_joined_says_what_to_do(cuda, backend):
    cuda.end_error = "CUDA error: capturing stream has unjoined work"

    with (
        backend.recording(),
        pytest.raises(CaptureError, match="Make the current stream wait for it before the break"),
    ):
        backend.begin()
        backend.end()


def test_a_tensor_is_owned_by_address_and_strangers_cost_one_look(cuda, backend):
    made, cache = torch.ones(8), torch.ones(8)
    cuda.pool_tensors.append(made)

    assert [backend.owns(made), backend.owns(made[4:]), backend.owns(cache), backend.owns(cache[1:])] == [
        True,
        True,
        False,
        False,
    ]
    assert cuda.num_snapshots == 1  # no capture has begun since, so the pool can't have grown
    assert backend.nbytes == 32


def test_a_pool_that_grows_during_a_capture_is_looked_at_again(cuda, backend):
    first, second = torch.ones(8), torch.ones(8)
    with backend.recording():
        backend.begin()
        cuda.pool_tensors.append(first)
        assert backend.owns(first)
        cuda.pool_tensors.append(second)
        assert backend.owns(second)


def test_bridges_are_allocated_outside_the_capture(cuda, backend):
    seen = []
    cuda.stream = contextmanager(lambda stream: (seen.append(stream.name), (yield))[1])

    BridgeBuffers(backend).like("q", X)

    assert seen == ["stream1"]


# -- on a GPU


@pytest.fixture
def cuda_toy():
    torch.set_default_device("cuda")
    yield Toy()
    torch.set_default_device(None)


@pytest.mark.gpu
@pytest.mark.parametrize("bridges", ["shared", "per_layer"])
def test_replays_on_a_gpu_equal_eager_in_every_bucket_order(cuda_toy, bridges):
    runner = cuda_toy.runner(backend="cuda", decode=BucketPolicy.decode(4), bridges=bridges)

    assert runner.verify(3) == {"L0": 6, "L1": 10, "L2": 72, "L3": 10}
    assert runner.memory_report().graph_bytes > 0
    runner.close()


@pytest.mark.gpu
def test_a_second_runner_on_a_gpu_works_after_the_first_is_closed(cuda_toy):
    for _ in range(2):
        with cuda_toy.runner(backend="cuda") as runner:
            inputs = cuda_toy.prefill(7)
            assert torch.equal(runner.run(inputs), runner.run_eager(inputs))
