"""Every class of mistake that graphs have cost others: each is planted in a model, and seen to be caught."""

import pytest
import torch
from torch import nn
from toy_decoder import HEAD_DIM, HIDDEN, NUM_HEADS, Attention, Decoder, Toy, attend

from kimi_k25.graphs import BucketPolicy, CaptureError, PointerMovedError, VerificationError, break_point


class Wrapped(nn.Module):
    """A decoder with a planted mistake behind it."""

    def __init__(self, mistake):
        super().__init__()
        self.model = Decoder()
        self.mistake = mistake

    def forward(self, inputs, step):
        return self.mistake(self, self.model(inputs, step))


def planted(mistake):
    return Toy(Wrapped(mistake))


# -- what stops a capture


@pytest.mark.parametrize(
    "mistake",
    [
        lambda self, x: x / x.abs().max().item(),
        lambda self, x: x[x.sum(-1) > -1e9],
        lambda self, x: x * len(x.nonzero()),
        lambda self, x: x * x.tolist()[0][0],
        lambda self, x: x if bool((x > 0).any()) else -x,
    ],
    ids=["item", "mask", "nonzero", "tolist", "branch on a value"],
)
def test_host_sync_stops_the_capture_at_its_module(mistake):
    with pytest.raises(CaptureError, match=r"at Wrapped \(.*test_graphs_mistakes.py:\d+\)"):
        planted(mistake).runner()


def test_a_data_dependent_loop_over_experts_stops_the_capture():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(4))

        def forward(self, x):
            chosen = x[:, :4].argmax(-1)
            out = torch.zeros_like(x)
            for expert in chosen.unique().tolist():
                rows = (chosen == expert).nonzero()[:, 0]
                out.index_add_(0, rows, self.experts[expert](x[rows]))
            return out

    toy = Toy()
    toy.decoder.layers[1].mlp = Experts()

    with pytest.raises(CaptureError, match=r"aten._unique2.default\) at Decoder.layers.1.mlp \("):
        toy.runner()


# -- what a replay gets wrong


def test_a_frozen_branch_is_caught_when_the_branch_would_turn():
    toy = planted(lambda self, x: -x if self.negate else x)
    toy.decoder.negate = False
    runner = toy.runner()
    assert runner.verify(1)

    toy.decoder.negate = True

    with pytest.raises(VerificationError, match=r"L1 prefill 3 tokens in bucket 4: replay != eager, first in row 0"):
        runner.verify(1)


def test_a_baked_number_is_caught():
    toy = planted(lambda self, x: x * self.scale)
    toy.decoder.scale = 1.0
    runner = toy.runner()

    toy.decoder.scale = 1.5

    with pytest.raises(VerificationError, match="replay != eager"):
        runner.verify(1)


def test_a_number_counted_at_each_call_is_caught():
    def count(self, x):
        self.calls = getattr(self, "calls", 0) + 1
        return x + self.calls

    with pytest.raises(VerificationError, match="replay != eager"):
        planted(count).runner().verify(1)


def test_a_rebound_tensor_is_caught():
    def rebind(self, x):
        self.state = self.state + 1  # a new tensor each time: the graph goes on reading the first
        return x + self.state

    toy = planted(rebind)
    toy.decoder.state = torch.zeros(1)

    with pytest.raises(CaptureError, match="state was made inside the capture and kept on its module"):
        toy.runner(prefill=BucketPolicy.of((4,)))


def test_a_tensor_that_the_caller_rebinds_is_caught():
    toy = planted(lambda self, x: x + self.bias_of_step)
    toy.decoder.bias_of_step = torch.zeros(1)
    runner = toy.runner()

    toy.decoder.bias_of_step = torch.ones(1)

    with pytest.raises(VerificationError, match="replay != eager"):
        runner.verify(1)


def test_a_tensor_cached_on_a_module_during_capture_is_caught():
    def cached_by_size(self, x):
        if self.cached is None or self.cached.shape != x.shape:
            self.cached = torch.arange(x.shape[0])[:, None] + torch.zeros_like(x)
        return x + self.cached

    toy = planted(cached_by_size)
    toy.decoder.cached = None

    with pytest.raises(CaptureError, match="cached was made inside the capture and kept on its module"):
        toy.runner()


def test_a_tensor_cached_elsewhere_and_read_by_a_later_capture_is_caught():
    cache = []

    def cached(self, x):
        if len(cache) < 4:  # three warm-ups, then the first capture
            cache.append(x.mean() * 0 + 1)
        return x * cache[-1]

    with pytest.raises(CaptureError, match="reads a tensor that an earlier capture made"):
        planted(cached).runner()


def test_a_stale_buffer_is_caught_by_poison():
    def half_written(self, x):
        y = torch.empty_like(x)
        y[: max(1, x.shape[0] - 1)].copy_(x[: max(1, x.shape[0] - 1)])
        return y  # the last row keeps what the memory held

    toy = planted(half_written)

    with pytest.raises(VerificationError, match="replay != eager"):
        toy.runner().verify(1)


def test_text_and_image_branches_inside_the_forward_are_caught():
    """The bug class that 'embeddings in' ends: captured with text, the image is ignored."""
    toy = planted(lambda self, x: x if self.image is None else x + self.image)
    toy.decoder.image = None
    runner = toy.runner()
    batches = {"prefill": [lambda: set_image(toy, None), lambda: set_image(toy, torch.ones(HIDDEN))]}

    with pytest.raises(VerificationError, match="replay != eager"):
        runner.verify(1, batches=batches)


def set_image(toy, image):
    toy.decoder.image = image
    return toy.prefill(6)


def test_text_and_image_in_the_embeddings_alternate():
    toy = Toy()
    runner = toy.runner()

    for turn in range(4):
        inputs = toy.prefill(6, seed=turn)
        if turn % 2:
            inputs["inputs_embeds"][1:4] += 3.0  # image features, scattered in before the forward
        assert torch.equal(runner.run(inputs), runner.run_eager(inputs))


# -- break points


def test_an_undecorated_attention_is_caught_by_the_number_of_breaks():
    class Plain(Attention):
        def forward(self, x, inputs, step):
            q, k, v = (t.view(-1, NUM_HEADS, HEAD_DIM) for t in self.qkv_proj(x).chunk(3, -1))
            return self.o_proj((q * k.softmax(-1) + v).flatten(1))

    toy = Toy()
    toy.decoder.layers[1].attn = Plain()

    with pytest.raises(CaptureError, match="met 2 break points, expected 3, one a layer; an attention without"):
        toy.runner()


def test_a_break_that_writes_into_another_argument_is_caught():
    @break_point
    def attend_in_place(q, out):
        q.mul_(2)
        out.copy_(q)

    class InPlace(Attention):
        def forward(self, x, inputs, step):
            q, out = self.o_proj(x), torch.empty_like(x)
            attend_in_place(q, out)
            return q + out  # of q, the graph sees what it made itself

    toy = Toy()
    for layer in toy.decoder.layers:
        layer.attn = InPlace()

    with pytest.raises(VerificationError, match="replay != eager"):
        toy.runner().verify(1)


def test_dirty_pad_rows_of_a_break_are_zeroed():
    seen = {}

    def look(self, x):
        seen["rows"] = x
        return x

    toy = planted(look)
    runner = toy.runner(poison=False)
    full, short = toy.prefill(12, seed=3), None
    runner.run(full)
    short = toy.prefill(9, seed=4)

    hidden_states = runner.run(short)

    # The toy's attention leaves pad rows as they were, and the bridge still holds the full step's rows there.
    assert torch.equal(hidden_states, toy.eager(short))
    bridge = runner.graphs.bridges._buffers["attend.out[0]", torch.float32].view(12, NUM_HEADS, HEAD_DIM)
    assert bridge[9:].eq(0).all()
    assert bridge[:9].ne(0).any()


def test_pad_rows_write_their_keys_into_the_dummy_slot_only():
    toy = Toy()
    runner = toy.runner()
    cache = toy.decoder.layers[0].attn.keys
    toy.prefill(9, seed=5)
    cache.zero_()

    runner.run(toy.prefill(9, seed=5))

    assert cache[1:10].ne(0).any(-1).all()
    assert cache[10:].eq(0).all()


def test_pad_rows_that_reach_real_slots_are_caught():
    class WrongSlots(Attention):
        def forward(self, x, inputs, step):
            # Computes slots from the padded size instead of taking the static mapping.
            slots = torch.arange(x.shape[0]) + 1
            keep = torch.arange(x.shape[0]) // x.shape[0] + slots % 9 + 1
            return super().forward(x, {**inputs, "slot_mapping": keep}, step)

    toy = Toy()
    toy.decoder.layers[0].attn = WrongSlots()
    runner = toy.runner()

    with pytest.raises(VerificationError, match="L3 prefill 11 tokens in bucket 12"):
        runner.verify(3, batches={"prefill": [lambda: toy.prefill(11)]})


# -- weights and pointers


def test_a_moved_parameter_raises_with_its_name_and_withholds_the_result():
    toy = Toy()
    runner = toy.runner()
    weight = toy.decoder.layers[1].attn.o_proj.weight
    weight.data = weight.data.clone()

    with pytest.raises(PointerMovedError, match=r"^layers.1.attn.o_proj.weight moved after freeze\(\)") as error:
        runner.run(toy.prefill(4))

    assert error.value.names == ("layers.1.attn.o_proj.weight",)


@pytest.mark.parametrize(
    ("move", "name"),
    [
        (lambda d: setattr(d.layers[0].attn, "keys", d.layers[0].attn.keys.clone()), "layers.0.attn.keys"),
        (lambda d: d.load_state_dict({k: v.clone() for k, v in d.state_dict().items()}, assign=True), "layers.0.attn"),
        (lambda d: setattr(d, "norm", nn.RMSNorm(HIDDEN)), "norm"),
        (lambda d: setattr(d.norm, "weight", None), "norm.weight"),
    ],
    ids=["buffer replaced", "load_state_dict(assign=True)", "module replaced", "parameter removed"],
)
def test_a_replaced_tensor_or_module_raises_with_its_name(move, name):
    toy = Toy()
    runner = toy.runner()
    inputs = toy.prefill(4)
    move(toy.decoder)

    with pytest.raises(PointerMovedError, match=rf"^{name}"):
        runner.run(inputs)


def test_a_workspace_that_grew_raises_with_its_name():
    toy = Toy()
    workspace = [torch.zeros(4)]
    runner = toy.runner(capture=False)
    runner._watch["attention workspace"] = lambda: workspace[0]
    runner.capture()
    runner.freeze()
    runner.run(toy.prefill(4))

    workspace[0] = torch.zeros(8)

    with pytest.raises(PointerMovedError, match=r"^attention workspace moved"):
        runner.run(toy.prefill(4))


def test_weights_loaded_in_place_take_effect():
    toy = Toy()
    runner = toy.runner()
    before = runner.run(toy.prefill(6))
    torch.manual_seed(9)
    toy.decoder.load_state_dict(Decoder().state_dict())

    after = runner.run(toy.prefill(6))

    assert not torch.equal(after, before)
    assert torch.equal(after, toy.eager(toy.prefill(6)))
    assert runner.verify(2)


def test_a_late_capture_is_refused():
    runner = Toy().runner()

    with pytest.raises(CaptureError, match=r"capture\(\) on a frozen runner; make a new one"):
        runner.capture()


def test_attend_outside_graphs_is_a_plain_function():
    q = torch.ones(1, NUM_HEADS, HEAD_DIM)
    toy, out = Toy(), torch.zeros_like(q)
    toy.step.sequences = [(0, 1, [0])]

    attend(q, q, 2 * q, toy.step, out=out)

    assert torch.equal(out, 2 * q)
