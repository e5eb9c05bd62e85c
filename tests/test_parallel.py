"""One model over several ranks: the answers of one rank, the collectives it takes, the bytes each rank reads.

float32 logits agree to the order of sums; bfloat16 ones as the goldens do, since each rank rounds its part.
"""

import functools
import runpy
import shutil
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import golden
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from random_models import make_config, make_model
from test_tiny_answers import prompt as prompt_of
from torch.utils._python_dispatch import TorchDispatchMode

from kimi_k25 import checkpoint, load_model, save_checkpoint
from kimi_k25.config_json import config_json
from kimi_k25.decoder_graphs import graphed_engine
from kimi_k25.engine import Engine, SamplingParams
from kimi_k25.graphs import BucketPolicy, GraphPlan
from kimi_k25.layers.parallel import ParallelPlan, world_sizes
from kimi_k25.model import KimiK25ForConditionalGeneration
from kimi_k25.tensor_names import EXPERT, expected_tensors
from kimi_k25.tiny import architecture
from kimi_k25.tiny.exam import exam

ATOL = 1.5e-4
PLANS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]  # Ranks, groups of experts.
GREEDY = SamplingParams(max_new_tokens=16, temperature=0)
SHORT = replace(GREEDY, max_new_tokens=6)
TINY_GREEDY = SamplingParams(max_new_tokens=8, temperature=0)
PROMPTS = [golden.golden_prompt(name) for name in golden.PROMPTS]


def plan_of(rank, ep):
    return ParallelPlan(tp=dist.get_world_size(), ep=ep, rank=rank, group=dist.group.WORLD)


@pytest.fixture(scope="module")
def wide_int4(tmp_path_factory):
    """A checkpoint like the oracle's, with experts whose width divides into four on the borders of groups."""
    folder = tmp_path_factory.mktemp("wide_int4")
    others = shutil.ignore_patterns("model*", "config.json")
    shutil.copytree(golden.FOLDERS["int4"], folder, dirs_exist_ok=True, ignore=others)
    model = make_model(make_config(int4=True, moe_intermediate_size=128))
    (folder / "config.json").write_bytes(config_json(model.config))
    save_checkpoint(model.to(torch.bfloat16), folder)
    return folder


def tokens_of(engine, sampling=GREEDY, prompts=PROMPTS):
    """Ids of each prompt, stop tokens ignored."""
    engine.model.config = replace(engine.model.config, stop_token_ids=frozenset())
    found = [[] for _ in prompts]
    for token in engine.generate(prompts, sampling):
        found[token.index].append(token.token_id)
    return found


def answer(rank, folder, dtype, ep, sampling=GREEDY):
    model = load_model(folder, dtype=dtype, plan=plan_of(rank, ep))
    logits = [golden.logits_of(model, name).numpy() for name in golden.PROMPTS]
    return logits, tokens_of(Engine(model), sampling) if dtype == torch.float32 else None


@functools.cache
def whole(folder, dtype):
    return load_model(folder, dtype=dtype)


@pytest.mark.parametrize(
    ("weights", "world_size", "ep"),
    [(weights, *plan) for weights in ("base", "wide int4") for plan in PLANS]
    + [("int4", n, n) for n in (1, 2, 4)],  # Experts of width 96 divide by number alone.
)
def test_every_rank_has_the_logits_and_tokens_of_one(weights, world_size, ep, wide_int4):
    folder = wide_int4 if weights == "wide int4" else golden.FOLDERS[weights]
    model = whole(folder, torch.float32)

    sampling = SHORT if weights == "wide int4" else GREEDY
    answers = run_ranks(world_size, answer, folder, torch.float32, ep, sampling)

    tokens = tokens_of(Engine(model), sampling)
    for logits, found in answers:
        for name, rows in zip(golden.PROMPTS, logits, strict=True):
            torch.testing.assert_close(torch.from_numpy(rows), golden.logits_of(model, name), rtol=0, atol=ATOL)
        assert found == tokens
    if weights != "wide int4":
        assert tokens == [golden.GOLDENS["greedy"][f"{weights}.fp32.{name}"]["ids"] for name in golden.PROMPTS]


@pytest.mark.parametrize(("world_size", "ep"), PLANS[1:])
def test_bfloat16_logits_are_as_near_to_one_ranks_as_the_goldens(world_size, ep):
    model = whole(golden.FOLDERS["base"], torch.bfloat16)

    for logits, _ in run_ranks(world_size, answer, golden.FOLDERS["base"], torch.bfloat16, ep):
        for name, rows in zip(golden.PROMPTS, logits, strict=True):
            error = (torch.from_numpy(rows) - golden.logits_of(model, name)).abs()
            assert error.mean() <= 0.25 and error.max() <= 1.2


class CountCollectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.counts[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))


def count(rank, name, max_new_tokens, ep):
    model = load_model(golden.FOLDERS["base"], plan=plan_of(rank, ep))
    with CountCollectives() as mode:
        tokens_of(Engine(model), replace(GREEDY, max_new_tokens=max_new_tokens), [golden.golden_prompt(name)])
    return dict(mode.counts)


@pytest.mark.parametrize(("name", "media", "ep"), [("text", 0, 1), ("image", 1, 1), ("two_images", 1, 2)])
@pytest.mark.parametrize("steps", [1, 5])
def test_a_step_takes_two_sums_a_layer_and_those_of_its_two_ends(name, media, ep, steps):
    layers = golden.shared_model("base.fp32").config.text_config.num_hidden_layers
    expected = {
        "allreduce_": steps * (2 * layers + 1),  # + 1: the embedding.
        "allgather_": steps + media,  # Logits of each step; all the prompt's pictures at once.
        "broadcast_": steps,  # The token.
    }

    assert run_ranks(2, count, name, steps, ep) == [expected] * 2


class CountingFile:
    """safe_open with a count of the bytes that are asked of it."""

    copied = 0

    def __init__(self, *args):
        self.file = safe_open(*args)

    def __enter__(self):
        self.opened = self.file.__enter__()
        return self

    def __exit__(self, *args):
        return self.file.__exit__(*args)

    def _counted(self, tensor):
        CountingFile.copied += tensor.nbytes
        return tensor

    def get_tensor(self, name):
        return self._counted(self.opened.get_tensor(name))

    def get_slice(self, name):
        file, part = self, self.opened.get_slice(name)

        class Slice:
            def __getitem__(self, index):
                return file._counted(part[index])

        return Slice()


safe_open = checkpoint.safe_open


def bytes_read(rank, folder, ep):
    checkpoint.safe_open = CountingFile
    load_model(folder, plan=plan_of(rank, ep))
    return CountingFile.copied


DIVIDED = ("embed_tokens", "lm_head", "q_b_proj", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("weights", "world_size", "ep"), [(weights, *plan) for weights in ("base", "wide int4") for plan in PLANS]
)
def test_a_rank_copies_its_share_and_what_all_have(weights, world_size, ep, wide_int4):
    folder = wide_int4 if weights == "wide int4" else golden.FOLDERS[weights]
    tensors = expected_tensors(checkpoint.load_config(folder))
    sizes = {name: checkpoint.num_bytes(info) for name, info in tensors.items()}
    divided = sum(n for name, n in sizes.items() if not name.endswith("_shape") and name.split(".")[-2] in DIVIDED)
    assert 0.5 < divided / sum(sizes.values()) < 0.9 and any(map(EXPERT.fullmatch, sizes))

    share = divided / world_size + sum(sizes.values()) - divided
    for copied in run_ranks(world_size, bytes_read, folder, ep):
        assert 0.99 * share <= copied <= 1.01 * share


def peak_and_loaded(rank, load, folder):
    with load["peak_anonymous_bytes"]() as peak:
        model = load_model(folder, plan=plan_of(rank, 1))
    return peak[0], sum(tensor.nbytes for tensor in model.state_dict().values())


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_loading_takes_at_most_200_mb_beside_a_ranks_share(tmp_path):
    load = runpy.run_path(str(Path(__file__).parent.parent / "bench" / "load.py"))
    load["make_checkpoint"](tmp_path / "c", int4=False, num_layers=1)

    for peak, loaded in run_ranks(2, peak_and_loaded, load, tmp_path / "c"):
        assert 300e6 < loaded < 400e6  # Of 700 MB in float32.
        assert peak - loaded < 200e6


def graphed(rank, folder, ep):
    model = load_model(folder, plan=plan_of(rank, ep))
    plan = GraphPlan(
        backend="tape", prefill=BucketPolicy.of([64]), decode=BucketPolicy.decode(2), poison=True, strict=True
    )
    engine, runner = graphed_engine(model, plan=plan, max_seq_len=128, max_seqs=2)
    with CountCollectives() as mode:
        tokens = tokens_of(engine, SHORT, PROMPTS[:2])
    return tokens, runner.stats()["runs"], dict(mode.counts)


@pytest.mark.parametrize(
    ("weights", "world_size", "ep"),
    [("base", *plan) for plan in PLANS[1:]] + [("wide int4", 4, 1), ("int4", 2, 2)],
)
def test_recorded_graphs_hold_their_collectives(weights, world_size, ep, wide_int4):
    folder = wide_int4 if weights == "wide int4" else golden.FOLDERS[weights]
    expected = tokens_of(Engine(whole(folder, torch.float32)), SHORT, PROMPTS[:2])
    steps, layers = SHORT.max_new_tokens, golden.shared_model("base.fp32").config.text_config.num_hidden_layers

    for tokens, runs, counts in run_ranks(world_size, graphed, folder, ep):
        assert tokens == expected
        assert runs == {"piecewise": 1, "full": steps - 1}
        assert counts == {"allreduce_": steps * 2 * layers + steps + 1, "allgather_": steps + 1, "broadcast_": steps}


def drawn(rank, seed):
    torch.manual_seed(rank)  # What other ranks would draw must not matter.
    model = load_model(golden.FOLDERS["base"], plan=plan_of(rank, 1))
    return tokens_of(Engine(model), SamplingParams(max_new_tokens=12, temperature=1.0, seed=seed + 100 * rank))


EXAM = [prompt_of(lesson) for lesson in exam(6)]
TINY = {"bf16": architecture.FOLDER, "int4": architecture.INT4_FOLDER}


def examined(rank, plans):
    return [
        tokens_of(Engine(load_model(TINY[weights], plan=plan_of(rank, ep))), TINY_GREEDY, EXAM) for weights, ep in plans
    ]


@pytest.mark.parametrize(
    ("world_size", "plans"),
    [
        (2, [("bf16", 1), ("bf16", 2), ("int4", 1), ("int4", 2)]),
        (4, [("bf16", 1), ("bf16", 2), ("bf16", 4), ("int4", 4)]),
    ],
)
def test_the_embedded_default_gives_its_answers_over_several_ranks(world_size, plans):
    expected = {name: tokens_of(Engine(load_model(folder)), TINY_GREEDY, EXAM) for name, folder in TINY.items()}

    assert run_ranks(world_size, examined, plans) == [[expected[weights] for weights, _ in plans]] * world_size


@pytest.mark.parametrize("world_size", [2, 4])
def test_tokens_are_drawn_by_the_first_ranks_seed(world_size):
    sampling = SamplingParams(max_new_tokens=12, temperature=1.0, seed=5)
    expected = tokens_of(Engine(golden.new_model("base.fp32")), sampling)

    assert run_ranks(world_size, drawn, 5) == [expected] * world_size


def test_numbers_of_ranks_that_divide_the_published_model():
    text = make_config(
        int4=True, num_attention_heads=64, intermediate_size=18432, moe_intermediate_size=2048, vocab_size=163840,
        n_routed_experts=384,
    ).text_config  # fmt: skip

    assert world_sizes(text, group_size=32) == "1, 2, 4, 8, 16, 32, 64"


@pytest.mark.parametrize(
    ("text", "tp", "ep", "message"),
    [
        ({}, 3, 1, "num_attention_heads is 4; expected to divide over 3 ranks; {}: 1, 2, 4"),
        ({"intermediate_size": 90}, 4, 1, "intermediate_size is 90; expected to divide over 4 ranks; {}: 1, 2"),
        ({"vocab_size": 2050}, 4, 1, "vocab_size is 2050; expected to divide over 4 ranks; {}: 1, 2"),
        (
            {"moe_intermediate_size": 104, "num_attention_heads": 16},
            16,
            16,
            "moe_intermediate_size times n_shared_experts is 104; expected to divide over 16 ranks; "
            "{}: 1, 2 with --ep 2, 4 with --ep 4, 8 with --ep 8",
        ),
        (
            {"moe_intermediate_size": 104},
            4,
            2,
            "moe_intermediate_size is 104; expected to divide over 2 ranks of a group in multiples of 8; "
            "{}: 1, 2 with --ep 2, 4 with --ep 4; with 4 ranks --ep may be 4",
        ),
        (
            {"n_routed_experts": 10},
            4,
            4,
            "n_routed_experts is 10; expected to divide over 4 groups; {}: 1, 2, 4; with 4 ranks --ep may be 1, 2",
        ),
        ({}, 4, 3, "--ep 3 does not divide 4 ranks; {}: 1, 2, 4; with 4 ranks --ep may be 1, 2, 4"),
        ({}, 1, 0, "--ep 0 does not divide 1 rank; {}: 1, 2, 4; with 1 rank --ep may be 1"),
    ],
)
def test_a_plan_that_does_not_divide_lists_those_that_do(text, tp, ep, message):
    with pytest.raises(ValueError) as error:
        ParallelPlan(tp=tp, ep=ep).check(make_config(**text).text_config, None)

    assert str(error.value) == message.format("numbers of ranks that divide this model")


def test_int4_experts_are_cut_on_the_borders_of_groups_alone():
    message = (
        "moe_intermediate_size is 96; expected to divide over 2 ranks of a group in multiples of 32; "
        "numbers of ranks that divide this model: 1, 2 with --ep 2, 4 with --ep 4; with 2 ranks --ep may be 2$"
    )

    with pytest.raises(ValueError, match=message):
        load_model(golden.FOLDERS["int4"], plan=ParallelPlan(tp=2))


def test_a_share_is_not_saved_as_a_checkpoint(tmp_path):
    model = KimiK25ForConditionalGeneration(make_config())
    model.plan = ParallelPlan(tp=2)

    with pytest.raises(ValueError, match="share of one of 2 ranks; load all of it to save it"):
        save_checkpoint(model, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("costs", "owners"),
    [([5], [0]), ([1, 9], [1, 0]), ([4, 4, 4], [0, 1, 0]), ([9, 1, 1, 1], [0, 1, 1, 1])],
)
def test_pictures_go_to_the_rank_with_the_least_to_do(costs, owners):
    assert ParallelPlan(tp=2).owners(costs) == owners
