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
    write_result,
)
from rank_share_report import plot_layer, plot_times, print_report, ttft_savings
from share import (
    BALANCING_STEPS,
    EXPERTS,
    HIDDEN,
    TOPK,
    Steps,
    balance_routers,
    build,
    floor_ms,
    require_room,
    set_fast,
    share_config,
    share_sizes,
)
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from kimi_k25.decoder_graphs import GraphedDecoder
from kimi_k25.graphs import BucketPolicy, GraphPlan
from kimi_k25.layers.kv_cache import CachedSequence, PagedKVCache

CONTEXT = 2048  # Tokens of each sequence of a decode step.


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
