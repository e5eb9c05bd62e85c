"""RaggedPrefill over the installed FlashInfer's own wrapper, its compiled module stood in for: what it launches."""

import functools
import sys
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kimi_k25.layers.attention_batch import AttentionBatch
from kimi_k25.layers.flashinfer_ops import RaggedPrefill
from kimi_k25.layers.fused_mla import ragged_attention
from kimi_k25.layers.kv_cache import CachedSequence, PagedKVCache

HEADS, QK, V = 2, 24, 16


class Module:
    """Compiled kernels: notes what it is launched with."""

    def __init__(self):
        self.launches, self.plans = [], []

    def plan(self, *args):
        self.plans.append(args)
        return [len(self.launches)]

    def ragged_run(self, *args):
        self.launches.append(args)


@pytest.fixture
def module(monkeypatch):
    library = pytest.importorskip("flashinfer.prefill", reason="no flashinfer-python here", exc_type=Exception)
    module = Module()
    monkeypatch.setattr(library, "get_batch_prefill_module", lambda *args: module)
    pinned = torch.empty

    @functools.wraps(pinned)
    def empty(*args, pin_memory=False, **kwargs):
        return pinned(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", empty)
    return module


@pytest.fixture
def prefill(module):
    return RaggedPrefill(
        num_heads=HEADS, qk_head_dim=QK, v_head_dim=V, scale=0.5, dtype=torch.bfloat16, device=torch.device("cpu")
    )


def rows(num_tokens):
    return [torch.zeros(num_tokens, HEADS, width, dtype=torch.bfloat16) for width in (QK, QK, V, V)]


def same(launch, other):
    """Equal arguments; tensors are the same memory, but for the plan's lengths on the host, which are equal."""
    return all(
        (a.shape == b.shape and a.stride() == b.stride() and (a.data_ptr() == b.data_ptr() or torch.equal(a, b)))
        if isinstance(a, torch.Tensor)
        else a == b and type(a) is type(b)
        for a, b in zip(launch, other, strict=True)
    )


def cached_steps(*steps):
    """One batch for each list of new tokens of two sequences, over one cache."""
    config = SimpleNamespace(num_hidden_layers=1, kv_cache_dim=4)
    cache = PagedKVCache(config, max_seqs=2, max_seq_len=16, page_size=4, dtype=torch.float32, device="cpu")
    sequences = [CachedSequence(), CachedSequence()]
    return [cache.step(sequences[: len(lengths)], lengths) for lengths in steps]


def whole(*lengths):
    return AttentionBatch.without_cache(list(lengths), device=torch.device("cpu"))


def test_every_layer_launches_what_the_library_would(module, prefill):
    q, k, v, out = rows(8)
    prefill.plan(whole(5))
    prefill._wrapper.run(q[:5], k[:5], v[:5], out=out[:5])

    for _ in range(3):
        prefill.run(q, k, v, out)

    expected, *launches = module.launches
    assert len(launches) == 3
    assert all(same(launch, expected) for launch in launches)


def test_the_next_step_and_other_tensors_are_launched_as_they_are(module, prefill):
    first, second = rows(8), rows(8)
    prefill.plan(whole(5))
    prefill.run(*first)
    prefill.run(*second)
    prefill.plan(whole(2, 4))
    prefill.run(*second)

    queries = [launch[3] for launch in module.launches]
    assert [q.data_ptr() for q in queries] == [first[0].data_ptr(), second[0].data_ptr(), second[0].data_ptr()]
    assert [q.shape[0] for q in queries] == [5, 5, 6]
    assert module.launches[2][2] == [2]  # The new plan.


@pytest.mark.parametrize("changed", range(4))
def test_a_layer_with_one_tensor_of_its_own_is_launched_with_it(module, prefill, changed):
    tensors, others = rows(8), rows(8)
    prefill.plan(whole(5))
    prefill.run(*tensors)
    tensors[changed] = others[changed]

    prefill.run(*tensors)

    pointers = [{x.data_ptr() for x in launch if isinstance(x, torch.Tensor)} for launch in module.launches]
    assert others[changed].data_ptr() in pointers[1] - pointers[0]


def test_later_steps_are_planned_and_launched_as_the_library_would(module, prefill):
    q, k, v, out = rows(16)
    prefill.plan(whole(5))
    prefill.run(q, k, v, out)

    for batch in (whole(7), whole(2, 1, 5), *cached_steps([6, 2], [3, 1], [1, 1])):
        prefill.plan(batch)
        prefill.run(q, k, v, out)
        plan, launch, n = module.plans.pop(), module.launches.pop(), batch.num_query_tokens

        ends = torch.tensor([0, *batch.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        prefix = batch.cache is not None and batch.cache.has_prefix
        kv_ends = torch.tensor([0, *batch.cache.kv_lens]).cumsum(0, dtype=torch.int32) if prefix else ends
        prefill._wrapper.plan(ends, kv_ends, **prefill._shape)
        prefill._wrapper.run(q[:n], *((k, v) if prefix else (k[:n], v[:n])), out=out[:n])
        assert same(plan, module.plans.pop())
        lengths_on_the_device = slice(6, 8)  # Unread by the kernel: see test_flashinfer_signatures.
        expected = list(module.launches.pop())
        expected[lengths_on_the_device] = launch[lengths_on_the_device]
        assert same(launch, expected)


def test_keys_of_a_prefix_belong_to_each_layer(module, prefill):
    q, _, _, out = rows(4)
    prefill.plan(cached_steps([6], [3])[1])

    keys = [rows(9)[1:3] for _ in range(2)]
    for k, v in keys:
        prefill.run(q, k, v, out)

    assert [launch[4].data_ptr() for launch in module.launches] == [k.data_ptr() for k, _ in keys]
    assert [(launch[3].shape[0], launch[4].shape[0]) for launch in module.launches] == [(3, 9), (3, 9)]


def test_a_plan_reads_no_tensor_of_the_step(module, prefill):
    batches = cached_steps([6, 2], [3, 1])

    for batch, planned in zip(batches, ([[0, 6, 8]] * 2 + [[6, 2]], [[0, 3, 4], [0, 9, 12], [9, 3]]), strict=True):
        batch.cu_seqlens = batch.cache.seq_lens = None
        prefill.plan(batch)
        assert [x.tolist() for x in module.plans[-1][3:6]] == planned  # Queries and keys from 0 up, keys of each.
        prefill.run(*rows(12))


@pytest.mark.parametrize("is_first", [True, False])
def test_what_a_step_was_not_planned_for_is_refused(module, prefill, is_first):
    q, k, v, out = rows(8)
    prefill.plan(whole(5))
    if not is_first:
        prefill.run(q, k, v, out)
        prefill.plan(whole(5))
        module.launches.clear()

    with pytest.raises(ValueError, match=r"q is torch\.float32 of 8 rows, the plan is for 5 of torch\.bfloat16"):
        prefill.run(q.float(), k, v, out)
    with pytest.raises(ValueError, match=r"out is torch\.bfloat16 of 4 rows, the plan is for 5"):
        prefill.run(q, k, v, out[:4])

    prefill.run(q, k, v, out)
    assert len(module.launches) == 1


def test_a_step_that_the_library_refuses_leaves_its_kernels_as_they_were(module, prefill):
    q, k, v, out = rows(8)
    prefill.plan(whole(5))

    with pytest.raises(ValueError, match="out"):
        prefill.run(q, k, v, out[..., :1])

    prefill.run(q, k, v, out)
    assert len(module.launches) == 1


def test_attention_of_a_later_layer_is_a_handful_of_calls(module, prefill):
    q, k, v, out = rows(8)
    batch = whole(5)
    first, later = (SimpleNamespace(prefill=prefill, plans=plans) for plans in (True, False))
    ragged_attention(first, q, k, v, batch, out)
    called = []

    sys.setprofile(lambda frame, event, arg: called.append(event) if event in ("call", "c_call") else None)
    try:
        ragged_attention(later, q, k, v, batch, out)
    finally:
        sys.setprofile(None)

    assert len(module.launches) == 2
    assert len(called) <= 8, called  # Through the library, its checks included, it is 35 and four slices.
