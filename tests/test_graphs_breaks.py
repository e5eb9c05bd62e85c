import threading

import pytest
import torch
from toy_decoder import Attention, Toy

from kimi_k25.graphs import BreakPointError, break_point
from kimi_k25.graphs.breaks import crossing_scope
from kimi_k25.graphs.capture import Step


class Recorder:
    def __init__(self):
        self.names = []

    def cross(self, fn, bound):
        self.names.append(fn.__name__)


@break_point
def double(x, *, out):
    """Twice x."""
    out.copy_(2 * x)


def test_outside_a_capture_a_break_point_is_the_function():
    out = torch.zeros(2)

    double(torch.ones(2), out=out)

    assert out.tolist() == [2, 2]
    assert (double.__name__, double.__doc__) == ("double", "Twice x.")


def test_inside_a_scope_the_crossing_gets_the_call_and_the_body_waits():
    recorder, out = Recorder(), torch.zeros(2)

    with crossing_scope(recorder):
        double(torch.ones(2), out=out)

    assert recorder.names == ["double"]
    assert out.tolist() == [0, 0]


def test_another_thread_does_not_join_the_capture():
    recorder, out = Recorder(), torch.zeros(2)

    with crossing_scope(recorder):
        thread = threading.Thread(target=double, args=(torch.ones(2),), kwargs={"out": out})
        thread.start()
        thread.join()

    assert recorder.names == []
    assert out.tolist() == [2, 2]


def test_a_break_point_without_out_is_refused_at_decoration():
    with pytest.raises(BreakPointError, match=r"attend\(q, k\) has no parameter 'out'"):

        @break_point
        def attend(q, k):
            return q + k


def attention_that(function):
    """A toy whose attention calls `function(q, out)` as its break point."""
    point = break_point(function)

    class Odd(Attention):
        def forward(self, x, inputs, step):
            out = torch.empty_like(x)
            point(x, out=out)
            return out

    toy = Toy()
    for layer in toy.decoder.layers:
        layer.attn = Odd()
    return toy


def test_a_break_point_that_returns_a_tensor_is_refused():
    def attend(q, out):
        return q * 2

    with pytest.raises(BreakPointError, match=r"attend returned a Tensor; it must write into 'out'"):
        attention_that(attend).runner()


def test_an_out_of_another_number_of_rows_is_refused():
    @break_point
    def attend(q, out):
        out.copy_(q)

    class Transposed(Attention):
        def forward(self, x, inputs, step):
            out = torch.empty_like(x.T)
            attend(x.T, out=out)
            return out.T

    toy = Toy()
    toy.decoder.layers[0].attn = Transposed()

    with pytest.raises(BreakPointError, match=r"given out=\(16, 12\), expected a tensor of \(12, ...\)"):
        toy.runner()


def test_tensors_in_nested_arguments_cross_too():
    @break_point
    def attend(pair, scale, *, out):
        out.copy_(pair["a"] * scale + pair["rest"][0])

    class Nested(Attention):
        def forward(self, x, inputs, step):
            out = torch.empty_like(x)
            # A broadcast, a gapped slice and a transpose: strides that the bridge must keep.
            pair = {"a": (x + 1)[:1].expand_as(x), "rest": [torch.cat([x, 2 * x], -1)[:, 16:]]}
            attend(pair, 0.5, out=out)
            return self.o_proj(out)

    toy = Toy()
    for layer in toy.decoder.layers:
        layer.attn = Nested()
    runner = toy.runner()
    inputs = toy.prefill(7)

    assert torch.equal(runner.run(inputs), toy.eager(inputs))
    assert runner.verify(2)["L1"] == 6


@pytest.mark.parametrize("bridges", ["shared", "per_layer"])
def test_shared_bridges_take_the_memory_of_one_layer(bridges):
    toy = Toy()
    runner = toy.runner(bridges=bridges)

    assert runner.verify(2)["L1"] == 6
    # q and out at the largest bucket, 12 rows of 16 floats, q with the gaps of qkv.
    expected = {"shared": 4 * ((11 * 48 + 16) + 12 * 16), "per_layer": 0}
    assert runner.memory_report().bridge_bytes == expected[bridges]


def test_padding_is_zeroed_from_the_current_step_on_in_whichever_output():
    shared, other = torch.ones(4, 2), torch.ones(4, 2)
    step = Step(3)

    step.zero_padding(shared)
    shared.fill_(1)
    step.num_tokens = 1
    step.zero_padding(shared)
    step.zero_padding(other)

    assert shared[:, 0].tolist() == other[:, 0].tolist() == [1, 0, 0, 0]
