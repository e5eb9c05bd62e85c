import logging
import threading
import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy_decoder import HIDDEN, NUM_LAYERS, Decoder, Toy

from kimi_k25.graphs import (
    BucketPolicy,
    CaptureError,
    Choice,
    GraphError,
    GraphFallbackError,
    GraphFallbackWarning,
    GraphPlan,
    GraphRunner,
    InputSpec,
    VerificationError,
)
from kimi_k25.graphs.buffers import StaticInputs


def replayed_equals_eager(runner, toy, inputs, **options):
    """Bitwise at the padded size; to rounding without padding, where a product of another size may differ."""
    hidden_states = runner.run(inputs, **options)
    torch.testing.assert_close(hidden_states, toy.eager(inputs), rtol=1e-5, atol=1e-6)
    return torch.equal(hidden_states, runner.run_eager(inputs, **options))


# -- right answers


@pytest.mark.parametrize("lengths", [(1,), (3,), (4,), (5,), (2, 1), (3, 4, 5), (12,), (1, 1, 1, 1, 1)])
def test_prefill_in_pieces_equals_eager(lengths):
    toy = Toy()
    runner = toy.runner()

    assert replayed_equals_eager(runner, toy, toy.prefill(*lengths))
    assert runner.stats()["runs"] == {"piecewise": 1}


def test_chunked_prefill_over_a_cache_that_is_not_empty():
    toy = Toy()
    runner = toy.runner()

    for past, length in ((0, 5), (5, 7), (12, 1), (13, 3)):
        assert replayed_equals_eager(runner, toy, toy.prefill(length, past=past, seed=past))


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 4])
def test_decode_runs_in_full_graphs_and_equals_eager(num_seqs):
    toy = Toy()
    runner = toy.runner(decode=BucketPolicy.decode(4))

    assert replayed_equals_eager(runner, toy, toy.decode(num_seqs, seed=2), decode=True)
    assert runner.stats()["runs"] == {"full": 1}


@pytest.mark.parametrize("poison", [False, True])
def test_all_levels_of_verification_pass(poison):
    toy = Toy()
    runner = toy.runner(decode=BucketPolicy.decode(4), poison=poison)
    head = nn.Linear(HIDDEN, 50)

    counts = runner.verify(4, head=head)

    assert counts == {"L0": 6, "L1": 10, "L2": 72, "L3": 10, "L4": 10}


def test_decode_answers_are_bitwise_the_same_with_and_without_prefill_graphs():
    toy = Toy()
    alone = toy.runner(prefill=None, decode=BucketPolicy.decode(4))
    beside = toy.runner(decode=BucketPolicy.decode(4))
    beside.run(toy.prefill(9))

    for num_seqs in (1, 2, 4):
        inputs = toy.decode(num_seqs)
        assert torch.equal(alone.run(inputs, decode=True), beside.run(inputs, decode=True))


def test_outputs_are_clones_unless_asked_otherwise():
    toy = Toy()
    runner = toy.runner()
    kept, lent = runner.run(toy.prefill(4, seed=1)), runner.run(toy.prefill(4, seed=1), clone=False)
    before = kept.clone()

    runner.run(toy.prefill(4, seed=2))

    assert torch.equal(kept, before)
    assert not torch.equal(lent, before)


def test_one_break_runs_the_whole_padded_forward_eagerly():
    toy = Toy()
    runner = toy.runner(one_break=True, poison=False)

    assert runner.verify(2)
    assert replayed_equals_eager(runner, toy, toy.prefill(5))
    # A branch that would be frozen in a graph is taken anew here: so the fault is the capture's.
    toy.decoder.layers[0].mlp = nn.Identity()
    runner._fingerprint = None
    assert replayed_equals_eager(runner, toy, toy.prefill(5))


def test_state_dict_is_the_same_after_capture():
    toy = Toy()
    before = {name: tensor.clone() for name, tensor in toy.decoder.state_dict().items()}
    toy.runner(decode=BucketPolicy.decode(4))

    after = toy.decoder.state_dict()

    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_loading_a_step_does_no_more_than_it_must():
    specs = {"x": InputSpec((2,), torch.float32), "slots": InputSpec((), torch.int64, pad=7)}
    statics = StaticInputs(specs, 4, torch.device("cpu"))
    launched = []

    class Launches(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            launched.extend([func._schema.name] if func._schema.is_mutable else [])
            return func(*args, **(kwargs or {}))

    def load(num_tokens):
        launched.clear()
        with Launches():
            statics.load({"x": torch.ones(num_tokens, 2), "slots": torch.arange(num_tokens)}, num_tokens, 4)
        views = statics.views(4)
        assert views["num_tokens"].tolist() == [num_tokens]
        assert views["slots"].tolist() == [*range(num_tokens)] + [7] * (4 - num_tokens)
        assert views["x"].sum() == 2 * num_tokens
        return sorted(launched)

    assert load(4) == ["aten::copy_", "aten::copy_", "aten::fill_"]
    assert load(4) == ["aten::copy_", "aten::copy_"]
    assert load(3) == [*["aten::copy_"] * 2, *["aten::fill_"] * 3]
    assert load(3) == [*["aten::copy_"] * 2, *["aten::fill_"] * 2]
    assert load(4) == ["aten::copy_", "aten::copy_", "aten::fill_"]


# -- dispatch


def test_choice_goes_full_then_piecewise_then_eager():
    runner = Toy().runner(decode=BucketPolicy.decode(4))

    assert runner.can_run(3, decode=True) == Choice("full", 4)
    assert runner.can_run(3) == Choice("piecewise", 4)
    over = "decode: more rows than the largest bucket (4)"
    assert runner.can_run(6, decode=True) == Choice("piecewise", 8, over, is_fallback=True)
    assert runner.can_run(13).reason == "prefill: more rows than the largest bucket (12)"


@pytest.mark.filterwarnings("ignore::kimi_k25.graphs.GraphFallbackWarning")
def test_a_batch_over_the_maximum_runs_eagerly_rightly_and_counted():
    toy = Toy()
    runner = toy.runner()

    for seed in range(2):
        assert replayed_equals_eager(runner, toy, toy.prefill(13, seed=seed))

    assert runner.stats()["runs"] == {"eager": 2}
    assert runner.stats()["fallbacks"] == {"prefill: more rows than the largest bucket (12)": 2}


def test_a_reason_warns_once():
    toy = Toy()
    runner = toy.runner()

    message = r"running eager: prefill: more rows than the largest bucket \(12\)"
    with pytest.warns(GraphFallbackWarning, match=message) as caught:
        runner.run(toy.prefill(13))
    assert caught[0].filename == __file__  # the caller's line, not the runner's
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runner.run(toy.prefill(14))


def test_a_decode_batch_over_its_ladder_runs_in_pieces():
    toy = Toy()
    runner = toy.runner(decode=BucketPolicy.decode(2))

    with pytest.warns(GraphFallbackWarning, match="running piecewise: decode: more rows"):
        assert replayed_equals_eager(runner, toy, toy.decode(4), decode=True)


def test_strict_makes_every_fallback_an_error():
    toy = Toy()
    runner = toy.runner(strict=True)
    assert replayed_equals_eager(runner, toy, toy.prefill(12))

    with pytest.raises(GraphFallbackError, match="would run eager: prefill: more rows"):
        runner.run(toy.prefill(13))


def test_what_the_plan_leaves_out_is_no_fallback():
    toy = Toy()
    runner = toy.runner(prefill=None, decode=BucketPolicy.decode(2), strict=True)

    assert replayed_equals_eager(runner, toy, toy.prefill(5))
    assert runner.can_run(5) == Choice("eager", reason="no prefill graphs are planned")


def test_on_a_cpu_auto_is_eager_and_says_so():
    toy = Toy()
    runner = toy.runner(backend="auto", freeze=False)

    assert replayed_equals_eager(runner, toy, toy.prefill(5))
    assert runner.describe() == "graphs: eager (no CUDA graphs on cpu)"
    assert runner.stats()["backend"] == "eager"
    assert runner.stats()["fallbacks"] == {}


@pytest.mark.parametrize("plan", [{"backend": "cuda"}, {"backend": "auto", "strict": True}])
def test_cuda_graphs_that_must_be_and_cannot_are_refused(plan):
    with pytest.raises(GraphError, match="need a CUDA device, the module is on cpu; use backend='tape' or 'eager'"):
        Toy().runner(**plan)


def test_before_capture_steps_run_eagerly_with_a_warning():
    toy = Toy()
    runner = toy.runner(capture=False)

    with pytest.warns(GraphFallbackWarning, match="nothing is captured yet"):
        assert replayed_equals_eager(runner, toy, toy.prefill(5))


# -- memory


def fails_over(num_rows, toy):
    """The toy's forward on a device that is too small for more than `num_rows`."""

    def forward(inputs):
        if inputs["inputs_embeds"].shape[0] > num_rows and runs["left"] <= 0:
            raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB")
        runs["left"] -= 1
        return toy.forward(inputs)

    runs = {"left": 0}
    return forward, runs


def runner_of(forward, toy, **plan):
    options = {"backend": "tape", "prefill": BucketPolicy.of((4, 8, 12)), **plan}
    inputs = {"inputs_embeds": InputSpec((HIDDEN,), torch.float32), "slot_mapping": InputSpec((), torch.int64)}
    return GraphRunner(forward, toy.decoder, inputs=inputs, dummy=toy.dummy, plan=GraphPlan(**options))


@pytest.mark.parametrize("after_warmup", [False, True])
def test_out_of_memory_names_bucket_bytes_and_option_and_smaller_buckets_stay(after_warmup):
    toy = Toy()
    forward, runs = fails_over(8, toy)
    runs["left"] = 3 if after_warmup else 0
    runner = runner_of(forward, toy)

    with pytest.warns(
        GraphFallbackWarning,
        match=r"out of memory at prefill bucket 12, with \d+ bytes of graphs before it; lower the maximum of "
        r"GraphPlan.prefill, or max_graph_bytes. The other buckets stay in use",
    ):
        runner.capture()

    assert runner.stats()["buckets"] == {"prefill": [4, 8]}
    assert replayed_equals_eager(runner, toy, toy.prefill(7))
    assert runner.can_run(12).reason == (
        "prefill: more rows than the largest bucket (8); bucket 12 was dropped: out of memory"
    )


def test_out_of_memory_in_strict_mode_is_an_error():
    toy = Toy()
    forward, _ = fails_over(8, toy)

    with pytest.raises(CaptureError, match="out of memory at prefill bucket 12"):
        runner_of(forward, toy, strict=True).capture()


def test_no_memory_for_any_bucket_leaves_eager_with_the_reason():
    toy = Toy()
    forward, runs = fails_over(0, toy)
    runner = runner_of(forward, toy)
    with pytest.warns(GraphFallbackWarning):
        runner.capture()
    runs["left"] = 1

    with pytest.warns(GraphFallbackWarning, match="no buckets are left; bucket 4 was dropped: out of memory"):
        runner.run(toy.prefill(4))


def test_max_graph_bytes_drops_buckets_from_the_top_with_a_warning():
    toy = Toy()
    whole = toy.runner().memory_report()
    budget = whole.graph_bytes + whole.bridge_bytes - 1
    runner = toy.runner(capture=False, max_graph_bytes=budget)

    with pytest.warns(GraphFallbackWarning, match=rf"over max_graph_bytes={budget}, with prefill bucket 12"):
        runner.capture()

    assert runner.stats()["buckets"] == {"prefill": [4, 8]}
    assert runner.memory_report().graph_bytes < budget
    assert replayed_equals_eager(runner, toy, toy.prefill(7))


def test_memory_report_adds_up():
    report = Toy().runner(decode=BucketPolicy.decode(2)).memory_report()

    assert sum(report.by_bucket.values()) == report.graph_bytes + report.bridge_bytes
    assert list(report.by_bucket) == [("prefill", 12), ("prefill", 8), ("prefill", 4), ("decode", 2), ("decode", 1)]
    # inputs_embeds and slot_mapping and output at 12 rows, num_tokens; at 2 rows the decode tables too.
    assert report.static_bytes == 12 * (64 + 8 + 64) + 4 + 2 * (64 + 8 + 64 + 8 * 8 + 8) + 4


def test_steady_state_allocates_nothing_outside_the_model():
    """Buffers, calls and views are made at capture; a replay walks them."""
    toy = Toy()
    runner = toy.runner(poison=False)
    captured = runner.graphs.ladders["prefill"].captured[8]
    calls, output = list(captured.calls), captured.output.data_ptr()

    for seed in range(3):
        runner.run(toy.prefill(8, seed=seed), clone=False)

    assert captured.calls == calls
    assert captured.output.data_ptr() == output
    assert len(calls) == 2 * NUM_LAYERS + 1


# -- life


def test_capture_logs_one_line(caplog):
    with caplog.at_level(logging.INFO, logger="kimi_k25.graphs.runner"):
        Toy().runner(decode=BucketPolicy.decode(2))

    (message,) = caplog.messages
    assert message.startswith("graphs: tape, prefill 3 buckets 4..12, decode 2 buckets 1..2, 14 segments, ")
    assert message.endswith(" MiB")


def test_gc_runs_again_after_a_capture_that_failed():
    import gc

    toy = Toy()
    toy.decoder.layers[0].mlp = nn.Sequential(Syncs())
    num_frozen = gc.get_freeze_count()  # Python 3.12 freezes some objects itself.

    with pytest.raises(CaptureError):
        toy.runner()

    assert gc.isenabled()
    assert gc.get_freeze_count() == num_frozen


class Syncs(nn.Module):
    def forward(self, x):
        return x * x.max().item()


def test_a_second_thread_is_an_error():
    toy = Toy()
    entered, leave = threading.Event(), threading.Event()

    def slow_forward(inputs):
        entered.set()
        assert leave.wait(10)
        return toy.forward(inputs)

    runner = runner_of(slow_forward, toy, backend="eager")
    inputs = toy.prefill(4)
    thread = threading.Thread(target=runner.run, args=(inputs,))
    thread.start()
    assert entered.wait(10)

    with pytest.raises(GraphError, match="another thread is inside this runner"):
        runner.run(inputs)

    leave.set()
    thread.join()
    assert replayed_equals_eager(runner, toy, inputs)


def test_a_closed_runner_is_refused_and_a_second_one_works():
    toy = Toy()
    with toy.runner() as first:
        expected = first.run(toy.prefill(5))

    with pytest.raises(GraphError, match="this runner is closed; make a new one"):
        first.run(toy.prefill(5))
    with pytest.raises(CaptureError, match="on a closed runner"):
        first.capture()
    second = toy.runner()
    assert torch.equal(second.run(toy.prefill(5)), expected)


def test_freeze_needs_a_capture():
    with pytest.raises(GraphError, match=r"follows capture\(\), once; this runner is new"):
        Toy().runner(capture=False).freeze()


# -- bad input


def test_a_model_without_layers_is_refused():
    toy = Toy(nn.Linear(1, 1))

    with pytest.raises(GraphError, match="Linear has no decoder stack"):
        toy.runner()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: x.pop("slot_mapping"), r"inputs are \['inputs_embeds'\], expected \['inputs_embeds', 'slot_map"),
        (lambda x: x.update(positions=x["slot_mapping"]), r"'positions', 'slot_mapping'\], expected"),
        (lambda x: x.update(slot_mapping=x["slot_mapping"][:2]), r"'slot_mapping' is torch.int64 \(2,\), expected .*5"),
        (lambda x: x.update(slot_mapping=x["slot_mapping"].int()), r"is torch.int32 \(5,\), expected torch.int64"),
        (lambda x: x.update({k: v[:0] for k, v in x.items()}), "at least one token, got 0"),
    ],
)
def test_inputs_that_differ_from_the_specs_are_refused(change, message):
    toy = Toy()
    runner = toy.runner()
    inputs = toy.prefill(5)
    change(inputs)

    with pytest.raises(ValueError, match=message):
        runner.run(inputs)


def test_num_tokens_is_the_runners_own_name():
    toy = Toy()
    specs = {"num_tokens": InputSpec((), torch.int64)}
    runner = GraphRunner(toy.forward, toy.decoder, inputs=specs, dummy=toy.dummy, plan=GraphPlan(backend="tape"))

    with pytest.raises(ValueError, match="'num_tokens' is the runner's own input"):
        runner.capture()


def test_a_forward_of_another_shape_is_refused():
    toy = Toy()

    with pytest.raises(CaptureError, match=r"returned \(1, 12, 16\) for 12 tokens, expected \(12, hidden\)"):
        runner_of(lambda inputs: toy.forward(inputs)[None], toy).capture()


def test_a_dummy_of_another_size_is_refused():
    toy = Toy()
    toy.dummy = lambda phase, num_tokens: toy.prefill(num_tokens - 1)

    with pytest.raises(ValueError, match=r"dummy\('prefill', 12\) gave 11 tokens, expected 12"):
        toy.runner()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "metal"}, "backend 'metal' is not one of"),
        ({"bridges": "weak"}, "bridges 'weak' is not one of"),
        ({"poison": True}, "poison=True needs backend='tape'"),
    ],
)
def test_a_plan_that_means_nothing_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        GraphPlan(**options)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_number_where_buckets_belong_says_how_they_are_made(phase):
    with pytest.raises(TypeError, match=rf"{phase} is 8, expected a BucketPolicy or None: BucketPolicy\.{phase}\("):
        GraphPlan(**{phase: 8})


def test_level_4_needs_a_head():
    with pytest.raises(ValueError, match="needs head="):
        Toy().runner().verify(4)


def test_a_level_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="level is 5; expected 0 to 4"):
        Toy().runner().verify(5)


@pytest.mark.parametrize(
    ("plan", "capture", "why"),
    [({}, False, "nothing is captured yet"), ({"backend": "auto"}, True, "no CUDA graphs on cpu")],
)
def test_a_verification_of_nothing_does_not_pass(plan, capture, why):
    runner = Toy().runner(capture=capture, **plan)

    with pytest.raises(GraphError, match=f"nothing to verify: {why}. Call capture"):
        runner.verify()


def test_a_second_capture_is_refused():
    runner = Toy().runner(freeze=False)

    with pytest.raises(CaptureError, match=r"capture\(\) on a captured runner; make a new one"):
        runner.capture()


def test_a_closed_runner_says_so():
    runner = Toy().runner()
    runner.close()

    assert runner.can_run(4).reason == "the runner is closed"


def test_verification_sees_a_state_dict_that_grew():
    toy = Toy(Decoder())
    runner = toy.runner()
    toy.decoder.model = toy.decoder.layers[0]

    with pytest.raises(VerificationError, match=r"before the capture \(model\.\w+.*\); make a new runner"):
        runner.verify(0)


def test_inference_mode_changes_nothing():
    toy = Toy()
    with torch.inference_mode():
        runner = toy.runner(decode=BucketPolicy.decode(2))
        assert runner.verify(2)
        assert replayed_equals_eager(runner, toy, toy.prefill(7))


def test_a_capture_that_failed_leaves_no_graphs_behind():
    toy = Toy()
    mlp, toy.decoder.layers[0].mlp = toy.decoder.layers[0].mlp, SyncsBelow(9)
    runner = toy.runner(capture=False)
    with pytest.raises(CaptureError):
        runner.capture()

    assert runner.memory_report().graph_bytes == 0
    assert runner.can_run(12).reason == "nothing is captured yet"
    toy.decoder.layers[0].mlp = mlp
    runner.capture()
    assert replayed_equals_eager(runner, toy, toy.prefill(12))


class SyncsBelow(nn.Module):
    """Captures at large sizes, and not at small ones."""

    def __init__(self, num_rows):
        super().__init__()
        self.num_rows = num_rows

    def forward(self, x):
        return x * x.max().item() if x.shape[0] < self.num_rows else x
