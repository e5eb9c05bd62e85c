"""One tensor-parallel rank's share of Kimi-K2.5 on one GPU: prefill and decode, eagerly and in graphs, and the floor.

    python bench/rank_share.py [--tp 8] [--layers 61] [--tokens 64,256] [--profile]
                               [--json bench/results/NAME.json] [--plot bench/results/NAME.png]

The share is built from the package's own classes with heads, expert width and vocabulary divided by --tp. Real shapes,
random weights of real scale, a router that spreads the tokens; no collectives, so this is a rank's own work only. One
layer's rearranged experts are copied to all the others. A step is timed from token ids to the last tokens' logits, on
an idle GPU, without the engine's bookkeeping and without sampling. Before anything is timed a model of two layers is
compared with plain PyTorch. Afterwards decode is timed beside prefill graphs and without them, in turns, and a few
layers of transformers' model of the same sizes, experts in bfloat16, their times scaled to all layers. --plot draws
the times; with --profile also where they go, to a second file, NAME_layer.png. Needs the `gpu` extra; exit 2 says what
is missing.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import peers
import published
import torch
from harness import (
    Ceilings,
    apart,
    free_memory,
    measure,
    measure_in_turns,
    profile_kernels,
    provenance,
    refuse,
    relative,
    require_extras,
    require_hopper,
    write_result,
)
from published import INT4_BYTES, TEXT
from rank_share_report import plot_layer, plot_times, print_report, ttft_savings
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kimi_k25.backend import set_fast_decoder, why_not_flashinfer
from kimi_k25.config import KimiK25Config, TextConfig
from kimi_k25.decoder_graphs import GraphedDecoder
from kimi_k25.graphs import BucketPolicy, GraphPlan
from kimi_k25.layers.kv_cache import AttentionBatch, CachedSequence, PagedKVCache
from kimi_k25.layers.moe import Int4RoutedExperts
from kimi_k25.model import KimiK25ForConditionalGeneration

HIDDEN, EXPERTS, TOPK = (TEXT[key] for key in ("hidden_size", "n_routed_experts", "num_experts_per_tok"))
CONTEXT = 2048  # Tokens of each sequence of a decode step.
INT4_STD = 4.18  # Of random_int4_'s values.
BALANCING_STEPS = 4


def share_sizes(tp: int) -> dict[str, int]:
    """What of text_config is divided over ranks."""
    if tp < 1 or 64 % tp:
        refuse(f"--tp {tp} does not divide 64 heads; choose 1, 2, 4, 8, 16, 32 or 64")
    divided = ("vocab_size", "intermediate_size", "moe_intermediate_size", "num_attention_heads")
    return {key: TEXT[key] // tp for key in divided}


def share_config(tp: int, layers: int) -> KimiK25Config:
    """config.json of one rank's share; the vision tower is not measured here and as small as it can be."""
    vision = {
        "init_pos_emb_height": 1, "init_pos_emb_width": 1, "init_pos_emb_time": 1, "vt_hidden_size": 16,
        "vt_num_hidden_layers": 1, "vt_num_attention_heads": 1, "vt_intermediate_size": 16, "mm_hidden_size": 16,
    }  # fmt: skip
    return KimiK25Config.from_dict(published.config(share_sizes(tp) | {"num_hidden_layers": layers}, vision))


def random_int4_(packed: Tensor) -> None:
    """Random words of values from -7 to 7 whose mean is zero, as a trained matrix's is.

    Plain random words have -8 too, and a mean of -0.5: layers that share their experts then add up one direction, until
    all tokens choose the same ones (60 layers on a CPU: shares differ by 330% in the last, by 23% with these).
    """
    packed.random_(-(2**31), 2**31 - 1)
    some = packed | packed >> 1
    some |= some >> 2
    packed |= (~some & 0x11111111) << 3  # A value's four bits, where they are zero, become 8, which stands for zero.


@torch.no_grad()
def build(config: KimiK25Config, device: torch.device, *, expert_layers: int) -> KimiK25ForConditionalGeneration:
    """The share on the GPU. Only the first `expert_layers` MoE layers get experts' values; the others' are empty."""
    with torch.device("meta"):
        model = KimiK25ForConditionalGeneration(config)
    model.to(torch.bfloat16).to_empty(device=device)
    # What is added to the residual is small beside the embedding, as in a trained model: otherwise the layers' common
    # part outgrows what tells tokens apart, and all tokens go to the same experts.
    added = (2 * config.text_config.num_hidden_layers) ** -0.5
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 1:
                parameter.fill_(0.0 if name == "bias" else 1.0)
            else:
                std = 1.0 if isinstance(module, nn.Embedding) else parameter.shape[-1] ** -0.5
                parameter.normal_(std=std * (added if path.endswith(("o_proj", "down_proj")) else 1.0))
        if hasattr(module, "e_score_correction_bias"):
            module.e_score_correction_bias.zero_()
        if (refresh := getattr(module, "refresh_derived", None)) is not None:
            refresh()
        if isinstance(module, Int4RoutedExperts) and expert_layers:
            expert_layers -= 1
            for name in ("gate_up_proj", "down_proj"):
                packed, scale = getattr(module, f"{name}_packed"), getattr(module, f"{name}_scale")
                random_int4_(packed)
                std = (packed.shape[-1] * 8) ** -0.5 * (added if name == "down_proj" else 1.0)
                scale.normal_(1.0, 0.1).mul_(std / INT4_STD)
    return model.eval()


def set_fast(model: KimiK25ForConditionalGeneration, *, deterministic: bool = False) -> Any:
    """use_backend(model, "flashinfer"), but for one layer's rearranged experts, which all others copy."""
    from kimi_k25.layers.humming_experts import HummingExperts

    if trouble := why_not_flashinfer(model):
        refuse(trouble)
    first: list[HummingExperts] = []

    class CopiedExperts(HummingExperts):
        def repack(self) -> None:
            if first:
                self.adopt(first[0])
            else:
                super().repack()
                first.append(self)

    return set_fast_decoder(model, lambda experts: CopiedExperts(experts, deterministic=deterministic))


@torch.no_grad()
def check(tp: int, device: torch.device, *, deterministic: bool) -> dict[str, float]:
    """Two layers, plain against fused, on the same weights: relative distances of module outputs and hidden states.

    bfloat16 alone makes the plain path differ from float32 by about 1e-2; a token whose eighth and ninth expert
    score alike may choose another one, so hidden states are compared by the median token.
    """
    torch.manual_seed(0)
    model = build(share_config(tp, 2), device, expert_layers=1)
    decoder = model.language_model.model
    cache = PagedKVCache(model.config.text_config, max_seqs=12, max_seq_len=512, dtype=torch.bfloat16, device=device)
    attention, moe = decoder.layers[1].self_attn, decoder.layers[1].mlp
    xs = {n: torch.randn(n, HIDDEN, device=device, dtype=torch.bfloat16) for n in (1, 3, 8, 9, 64, 300)}
    real = torch.tensor([200], dtype=torch.int32, device=device)

    def run() -> dict[str, Tensor]:
        fast = decoder.fast
        one_attention = fast.attention[1] if fast else attention
        one_moe = fast.experts[0] if fast else moe
        if fast:
            fast.attention[1].plans = True
        outputs = {f"moe {n}": one_moe(x) for n, x in xs.items()}
        outputs["moe 300, 200 real"] = one_moe(xs[300], real)
        sequences = [CachedSequence() for _ in range(12)]
        cache.layers.zero_()
        for name, chosen, lengths in (
            ("prefill 300", [0], [300]),
            ("prefill with prefix", [0], [64]),
            ("prefill 3 sequences", [1, 2, 3], [5, 50, 245]),
            ("prefill 2, one with prefix", [1, 4], [20, 44]),
            ("rest", [5, 6, 7, 8, 9, 10, 11], [1, 3, 60, 64, 65, 100, 7]),
        ):
            batch = cache.step([sequences[i] for i in chosen], lengths)
            x = torch.cat([xs[300], xs[64]])[: sum(lengths)]
            rope = decoder.rope(batch.positions, torch.bfloat16)
            outputs[f"attention, {name}"] = one_attention(x, rope, batch)
            outputs[f"hidden, {name}"] = model.language_model(x, batch)
        for n in (1, 8, 12):
            batch = cache.step(sequences[:n], [1] * n)
            x = xs[64][:n]
            rope = decoder.rope(batch.positions, torch.bfloat16)
            outputs[f"attention, decode {n}"] = one_attention(x, rope, batch)
            outputs[f"hidden, decode {n}"] = model.language_model(x, batch)
        if fast:
            fast.attention[1].plans = False
        for sequence in sequences:
            cache.release(sequence)
        return outputs

    expected = run()
    set_fast(model, deterministic=deterministic)
    actual = run()
    distances: dict[str, float] = {}
    for name, reference in expected.items():
        if name.startswith(("hidden", "moe")):
            a, b = actual[name].float(), reference.float()
            distances[name] = ((a - b).norm(dim=1) / b.norm(dim=1)).median().item()
        else:
            distances[name] = relative(actual[name], reference)
    wrong = {name: value for name, value in distances.items() if not value < 2e-2}
    for name, value in distances.items():
        print(f"  {value:.2e}  {name}{'  WRONG' if name in wrong else ''}")
    if wrong:
        print(f"the fused path differs from plain PyTorch: {wrong}", file=sys.stderr)
        raise SystemExit(1)
    return {name: round(value, 5) for name, value in distances.items()}


def floor_ms(c: TextConfig, ceilings: Ceilings, *, tokens: int, seqs: int, context: int) -> float:
    """Weights of the experts hit once and everything else once, or all operations, whichever takes longer."""
    layers, heads = c.num_hidden_layers, c.num_attention_heads
    attention = HIDDEN * (c.q_lora_rank + c.kv_cache_dim) + c.q_lora_rank * heads * c.qk_head_dim
    attention += heads * (c.kv_lora_rank * (c.qk_nope_head_dim + c.v_head_dim) + HIDDEN * c.v_head_dim)
    expert = 3 * HIDDEN * c.moe_intermediate_size
    dense = 3 * HIDDEN * c.intermediate_size
    head = HIDDEN * c.vocab_size
    hit = EXPERTS * (1 - (1 - TOPK / EXPERTS) ** tokens)
    moe_layer = 2 * (attention + HIDDEN * EXPERTS + expert) + hit * expert * INT4_BYTES
    num_bytes = (layers - 1) * moe_layer + 2 * (attention + dense + head)
    num_bytes += layers * seqs * context * c.kv_cache_dim * 2
    per_token = layers * attention + (layers - 1) * (HIDDEN * EXPERTS + (TOPK + 1) * expert) + dense
    operations = 2 * tokens * per_token + 2 * seqs * head
    if context:
        operations += 2 * layers * seqs * context * heads * (c.kv_cache_dim + c.kv_lora_rank)
    else:
        operations += layers * tokens * tokens * heads * (c.qk_head_dim + c.v_head_dim)
    return ceilings.floor_ms(num_bytes, operations)


def balanced_bias(scores: Tensor, topk: int, *, rounds: int = 30) -> Tensor:
    """A correction bias under which every expert gets its share of these tokens.

    Each expert's threshold is what it exceeds as often as it should be chosen; then the busy ones step down and the
    idle ones up, as in training. Equal mean scores would not do: who varies most would be chosen most.

    Args:
        scores: Sigmoids, (num_tokens, num_experts).
    """
    share = topk / scores.shape[1]
    bias = -scores.float().quantile(1 - share, dim=0)
    for i in range(rounds):
        biased = scores + bias
        least_chosen = biased.topk(topk, -1, sorted=False).values.amin(-1, keepdim=True)
        load = (biased >= least_chosen).float().mean(0) / share  # No count of indices: that would wait for the GPU.
        bias = bias - 0.02 * (1 - i / rounds) * (load - 1).clamp(-1, 1)
    return bias - bias.mean()


def balance_routers(*calls: Callable[[], object]) -> None:
    """Sets every router's correction bias so that the experts share the tokens, as training leaves it.

    Random layers give all tokens a common part, which random routers turn into favourites. Each step, layer by layer
    as it goes, moves a router's bias to the mean of what balances the tokens of the steps so far. The bias of one step
    of 4,096 tokens fits the chance in it, 85 tokens an expert: on other tokens shares differ by 11%, with the mean of
    four steps by 6%. The same steps give the same biases.

    Args:
        calls: Steps of different random tokens, too many for route_to_pair_blocks.
    """
    from kimi_k25.layers import fused_moe

    route = fused_moe.route
    try:
        for i, call in enumerate(calls, 1):

            def balanced(logits: Tensor, bias: Tensor, *args: Any, weight: float = 1 / i) -> Any:
                bias.lerp_(balanced_bias(logits[:, : bias.shape[0]].sigmoid(), TOPK), weight)
                return route(logits, bias, *args)

            fused_moe.route = balanced  # type: ignore[assignment]
            call()
    finally:
        fused_moe.route = route


def experts_met(fast: Any, call: Callable[[], object]) -> tuple[float, float]:
    """How many experts a layer of this step reaches, and the standard deviation of their shares over an even share.

    Both are means over all layers. Tokens that choose at random among 384 experts have shares that differ by 15% at
    2,048 tokens.
    """
    met: list[tuple[float, float]] = []
    products = [experts.products for experts in fast.experts]

    def counted(product: Any) -> Callable[..., Tensor]:
        def gate_up(x: Tensor, blocks: tuple[Tensor, Tensor, Tensor], topk: int) -> Tensor:
            size = product.block_sizes(x.shape[0] * topk)[0]
            num_blocks = int(blocks[2]) // size
            rows = (blocks[0][: num_blocks * size].view(-1, size) < x.shape[0] * topk).sum(1)
            load = torch.bincount(blocks[1][:num_blocks], rows.double(), minlength=EXPERTS)
            met.append(((load > 0).sum().item(), (load.std() / load.mean()).item()))
            return type(product).gate_up(product, x, blocks, topk)

        return gate_up

    for product in products:
        product.gate_up = counted(product)
    call()
    for product in products:
        del product.gate_up
    hit, spread = zip(*met, strict=True) if met else ((0.0,), (0.0,))
    return sum(hit) / len(hit), sum(spread) / len(spread)


class Steps:
    """Prefill and decode steps of the share, by size, each ready to be run again and again."""

    def __init__(self, model: KimiK25ForConditionalGeneration, cache: PagedKVCache, decoder: GraphedDecoder) -> None:
        self.model, self.cache, self.graphed = model, cache, decoder
        self.device = cache.layers.device

    def prefill(self, tokens: int) -> tuple[Tensor, AttentionBatch]:
        """One new sequence: (tokens,) ids and the step that describes them."""
        sequence = CachedSequence()
        batch = self.cache.step([sequence], [tokens])
        self.cache.release(sequence)
        return torch.randint(2, self.model.config.text_config.vocab_size, (tokens,), device=self.device), batch

    def decode(self, seqs: int, context: int) -> tuple[Tensor, AttentionBatch]:
        """One token of each of `seqs` sequences that are `context` long after it."""
        sequences = [CachedSequence() for _ in range(seqs)]
        self.cache.step(sequences, [context - 1] * seqs)
        batch = self.cache.step(sequences, [1] * seqs)
        for sequence in sequences:
            self.cache.release(sequence)
        return torch.randint(2, self.model.config.text_config.vocab_size, (seqs,), device=self.device), batch

    def run(self, step: tuple[Tensor, AttentionBatch], *, graphs: bool) -> Callable[[], Tensor]:
        """From token ids to the logits of the last tokens."""
        ids, batch = step
        language_model = self.model.language_model
        last = batch.cu_seqlens[1:].long() - 1

        @torch.inference_mode()
        def call() -> Tensor:
            embeds = language_model.model.embed_tokens(ids)
            hidden = self.graphed(embeds, batch) if graphs else language_model(embeds, batch)
            return language_model.compute_logits(hidden.index_select(0, last))

        return call


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=8, help="ranks that the model is divided by")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--tokens", default="64,256,512,1024,2048,4096", help="sizes of prefill steps")
    parser.add_argument("--batch", default="1,8,64", help="sequences of decode steps")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--deterministic", action="store_true", help="kernels that give the same bits every run")
    parser.add_argument("--profile", action="store_true", help="where the time of each size goes, kernel by kernel")
    parser.add_argument("--skip-check", action="store_true", help="do not compare with plain PyTorch first")
    parser.add_argument("--peer-layers", type=int, default=4, help="of transformers' model; 0 leaves it out")
    parser.add_argument("--json", type=Path, help="where the result goes")
    parser.add_argument("--plot", type=Path, help="where the plot of times goes, a PNG")
    args = parser.parse_args(argv)
    for name in ("tokens", "batch"):
        try:
            sizes = [int(n) for n in getattr(args, name).split(",") if n]
        except ValueError:
            refuse(f"--{name} is {getattr(args, name)!r}; expected sizes, as 64,256")
        setattr(args, name, sizes)
    share_sizes(args.tp)
    if args.layers < 2:
        refuse(f"--layers {args.layers} is too few; one dense layer and one of experts are needed")
    return args


def share_gib(tp: int, layers: int) -> float:
    """GPU memory of a share: int4 experts, and a third of a GiB a layer for the rest."""
    experts = (layers - 1) * EXPERTS * 3 * HIDDEN * (TEXT["moe_intermediate_size"] / tp) * INT4_BYTES / 2**30
    return experts * 1.05 + 0.33 * layers


def what_fits(tp: int, layers: int, free_gib: float) -> str:
    """Which options make the share fit in so much."""
    fewer = max((n for n in range(2, layers) if share_gib(tp, n) <= free_gib), default=0)
    larger = next((n for n in (2, 4, 8, 16, 32) if n > tp and share_gib(n, layers) <= free_gib), 0)
    ways = [f"--layers {fewer}"] * bool(fewer) + [f"--tp {larger}"] * bool(larger)
    return f"{' or '.join(ways)} fits" if ways else "no --layers fits at any --tp"


def require_room(tp: int, layers: int, *, spare_gib: float) -> torch.device:
    """The GPU, if the share fits on it beside `spare_gib` of caches, graphs and ceilings; else exit 2."""
    needed_gib = share_gib(tp, layers) + spare_gib
    device = require_hopper(needed_gib, lambda free: what_fits(tp, layers, free - spare_gib))
    require_extras(("flashinfer-python", "flashinfer"), ("triton", "triton"), ("humming-kernels", "humming.layer"))
    return device


def measure_sizes(
    steps: Steps, fast: Any, ceilings: Ceilings, tokens: Sequence[int], batches: Sequence[int], *, rounds: int,
    profile: bool,
) -> tuple[list[dict[str, Any]], dict[str, list[dict[str, Any]]]]:  # fmt: skip
    """A row for each size and mode, and with `profile` the kernels of each size."""
    rows: list[dict[str, Any]] = []
    profiles: dict[str, list[dict[str, Any]]] = {}
    sizes = [("prefill", n, 1) for n in tokens] + [("decode", n, n) for n in batches]
    for phase, num_tokens, seqs in sizes:
        context = CONTEXT if phase == "decode" else 0
        step = steps.decode(seqs, CONTEXT) if context else steps.prefill(num_tokens)
        text = steps.model.config.text_config
        floor = floor_ms(text, ceilings, tokens=num_tokens, seqs=seqs, context=context)
        hit, spread = experts_met(fast, steps.run(step, graphs=False))
        for mode in ("eager", "full" if context else "piecewise"):
            call = steps.run(step, graphs=mode != "eager")
            timing = measure(call, rounds=rounds if mode != "eager" else max(5, rounds // 3))
            row = {"phase": phase, "tokens": num_tokens, "batch": seqs, "mode": mode, **asdict(timing)}
            same_bits = torch.equal(call(), call())
            row |= {"floor_ms": round(floor, 3), "experts_hit": round(hit, 1), "load_spread": round(spread, 3)}
            rows.append(row | {"repeats_bitwise": same_bits})
            if profile and mode != "eager":
                profiles[f"{phase} {num_tokens}"] = profile_kernels(call, calls=3)
    return rows, profiles


def decode_beside_prefill(
    steps: Steps, batches: Sequence[int], *, rounds: int
) -> list[dict[str, Any]]:
    """Decode with prefill graphs captured beside its own, as `steps` has them, and with decode graphs alone."""
    plan = GraphPlan(backend="cuda", strict=True, prefill=None, decode=BucketPolicy.of(batches))
    alone = GraphedDecoder(steps.model, steps.cache, plan)
    alone.runner.capture()
    without, rows = Steps(steps.model, steps.cache, alone), []
    for batch in batches:
        step = steps.decode(batch, CONTEXT)
        calls = {"off": without.run(step, graphs=True), "on": steps.run(step, graphs=True)}
        timings = measure_in_turns(calls, rounds=rounds)
        for prefill_graphs, timing in timings.items():
            delta = timing.median_ms / timings["off"].median_ms - 1
            row = {"phase": "decode", "tokens": batch, "batch": batch, "mode": "full", "prefill_graphs": prefill_graphs}
            rows.append(row | asdict(timing) | {"delta": round(delta, 4)})
    alone.runner.close()
    return rows


def captured_share(args: argparse.Namespace, device: torch.device) -> tuple[Steps, Any, dict[str, Any]]:
    """The share with its graphs and even routers, its fast decoder, and what building it took."""
    began = time.perf_counter()
    config = share_config(args.tp, args.layers)
    model = build(config, device, expert_layers=1)
    fast = set_fast(model, deterministic=args.deterministic)
    longest = max([*args.tokens, CONTEXT]) + 64
    cache = PagedKVCache(
        config.text_config, max_seqs=max([*args.batch, 1]), max_seq_len=longest, dtype=torch.bfloat16, device=device
    )
    cache.layers[:, 1:].normal_()
    plan = GraphPlan(
        backend="cuda", strict=True, prefill=BucketPolicy.of(args.tokens) if args.tokens else None,
        decode=BucketPolicy.of(args.batch) if args.batch else None,
    )  # fmt: skip
    graphed = GraphedDecoder(model, cache, plan)
    torch.cuda.synchronize()
    took = {"build_seconds": round(time.perf_counter() - began, 2)}
    began = time.perf_counter()
    if fast.experts:
        fast.experts[0].products.prepare([n * TOPK for n in (*args.tokens, *args.batch)])
    took["compile_seconds"] = round(time.perf_counter() - began, 2)
    print(f"built in {took['build_seconds']} s, expert kernels ready in {took['compile_seconds']} s more", flush=True)
    graphed.runner.capture()
    print(graphed.runner.describe(), flush=True)
    steps = Steps(model, cache, graphed)
    most = max([*args.tokens, CONTEXT])
    balance_routers(*(steps.run(steps.prefill(most), graphs=False) for _ in range(BALANCING_STEPS)))
    return steps, fast, took | {"graphs": graphed.runner.describe()}


def main(argv: Sequence[str] | None = None) -> None:
    """Checks, builds, captures, measures; writes JSON and plots where they are asked for, prints the tables."""
    args = parse_args(argv)
    device = require_room(args.tp, args.layers, spare_gib=12)
    warnings.filterwarnings("ignore", message=".*cuda capability.*")
    started = time.perf_counter()
    ceilings = Ceilings.measure()
    print(f"ceilings: {ceilings.tb_per_s:.2f} TB/s copied, {ceilings.tflop_per_s:.0f} TFLOP/s bfloat16", flush=True)
    distances = {}
    if not args.skip_check:
        distances = check(args.tp, device, deterministic=args.deterministic)
        print(f"checked against plain PyTorch after {time.perf_counter() - started:.1f} s", flush=True)
        free_memory()

    steps, fast, took = captured_share(args, device)
    rows, profiles = measure_sizes(
        steps, fast, ceilings, args.tokens, args.batch, rounds=args.rounds, profile=args.profile
    )
    failures: dict[str, str] = {}
    result = {
        **provenance(),
        "ceilings": asdict(ceilings),
        "tp": args.tp,
        "layers": args.layers,
        "context": CONTEXT,
        "deterministic": args.deterministic,
        "collectives": "none: one rank's own work",
        "experts": "one layer's rearranged experts, copied to the others",
        **took,
        "distance_to_plain": distances,
        "rows": rows,
        "ttft": ttft_savings(rows),
        "failures": failures,
    }
    if profiles:
        result["profiles"] = {
            name: [
                {"kernel": k["kernel"][:90], "launches": round(k["launches"], 2), "us": round(k["us"], 1)}
                for k in kernels[:40]
            ]
            for name, kernels in profiles.items()
        }
    with apart("decode beside prefill graphs", failures):
        if args.tokens and args.batch:
            result["decode_with_prefill_graphs"] = decode_beside_prefill(
                steps, [n for n in args.batch if n <= 8] or args.batch, rounds=3 * args.rounds
            )
    if args.json:  # What follows may need more memory than there is.
        write_result(args.json, result)
    with apart("transformers", failures):
        if args.peer_layers:
            sizes = {key: value for key, value in share_sizes(args.tp).items() if key != "vocab_size"}
            result["transformers"] = peers.transformers_rows(
                sizes, args.peer_layers, args.layers, args.tokens, [n for n in args.batch if n <= 8], CONTEXT, device,
                rounds=max(5, args.rounds // 3),
            )  # fmt: skip
    if args.json:
        write_result(args.json, result)
    with apart("plots", failures):
        if args.plot:
            plot_times(result, args.plot)
        if args.plot and profiles:
            plot_layer(result, args.plot.with_stem(args.plot.stem + "_layer"))
    print_report(result, profiles)
    steps.graphed.runner.close()
    if failures:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
