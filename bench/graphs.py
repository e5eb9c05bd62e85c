"""What the piecewise graph runner costs and gives on one GPU, on one rank's share of Kimi-K2.5.

    python bench/graphs.py [--tp 8] [--layers 61] [--json bench/results/graphs_NAME.json] [--plot NAME.png]

Bitwise equality in every order of three buckets, with the allocator churned in between; seconds and GiB of the
42-size ladder, with bridge buffers and with strong per-layer buffers; replay in pieces against one full graph of the
same forward; decode with and without prefill graphs beside it; host time of a replay; and the library
breakable-cuda-graphs on the same model, if it is installed. The share is rank_share.py's: no collectives, one layer's
rearranged experts copied to the others.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from harness import measure, print_table, provenance, refuse, write_result
from rank_share import CONTEXT, HIDDEN, TOPK, Steps, build, require_room, set_fast, share_config
from torch import Tensor

from kimi_k25.decoder_graphs import GraphedDecoder
from kimi_k25.graphs import BucketPolicy, GraphPlan
from kimi_k25.graphs.breaks import crossing_scope
from kimi_k25.layers.kv_cache import AttentionBatch, PagedKVCache

TOKENS = (64, 256, 1024, 2048, 4096)
ORDERED = (64, 256, 1024)
LADDER = BucketPolicy.prefill(2048)
DECODE = BucketPolicy.of([1, 8])


def churn() -> None:
    """Takes and frees memory of many sizes, filled, so that a pointer kept to freed memory reads something else."""
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 24):
        kept = [torch.full((size,), float("nan"), device="cuda") for _ in range(8)]
        del kept


class Share:
    """The model on its fast kernels, its cache, and graphs captured over them, one plan at a time."""

    def __init__(
        self, tp: int, layers: int, device: torch.device, *, deterministic: bool, sizes: Sequence[int]
    ) -> None:
        self.config = share_config(tp, layers)
        self.deterministic = deterministic
        self.model = build(self.config, device, expert_layers=1)
        self.fast = set_fast(self.model, deterministic=deterministic)
        if self.fast.experts:
            self.fast.experts[0].products.prepare([n * TOPK for n in sizes])
        self.cache = PagedKVCache(
            self.config.text_config, max_seqs=8, max_seq_len=4096 + 64, dtype=torch.bfloat16, device=device
        )
        self.cache.layers[:, 1:].normal_()

    @contextmanager
    def captured(self, **plan: Any) -> Iterator[tuple[GraphedDecoder, Steps]]:
        """Graphs of a GraphPlan with these fields; dropped at the end of the block."""
        decoder = GraphedDecoder(self.model, self.cache, GraphPlan(backend="cuda", strict=True, **plan))
        decoder.runner.capture()
        print(decoder.runner.describe(), flush=True)
        yield decoder, Steps(self.model, self.cache, decoder)
        decoder.runner.close()
        gc.collect()
        torch.cuda.empty_cache()


def bitwise_by_order(share: Share) -> tuple[dict[str, bool], dict[str, Any]]:
    """Whether every replay equals eager on the same padded inputs, bit for bit, for each order of the buckets.

    The second result is what `peer` says on the same share.
    """
    generator = torch.Generator("cuda").manual_seed(1)
    result = {}
    with share.captured(prefill=BucketPolicy.of(ORDERED)) as (decoder, steps), torch.inference_mode():
        cases = {}
        for bucket in ORDERED:
            tokens = bucket - 3  # With padding rows.
            embeds = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16, generator=generator)
            batch = steps.prefill(tokens)[1]
            cases[bucket] = (embeds, batch, decoder.run_eager(embeds, batch))
        for order in itertools.permutations(ORDERED):
            equal = True
            for bucket in (*order, *reversed(order)):
                embeds, batch, expected = cases[bucket]
                churn()
                equal &= torch.equal(decoder(embeds, batch), expected)
            result[" ".join(map(str, order))] = equal
        library = peer(share, steps)
    return result, library


def ladder_figures(share: Share, bridges: str) -> dict[str, Any]:
    """Seconds and GiB of the 42-size ladder with these bridges."""
    with share.captured(prefill=LADDER, bridges=bridges) as (decoder, _):
        report, stats = decoder.runner.memory_report(), decoder.runner.stats()
    total = report.graph_bytes + report.bridge_bytes + report.static_bytes
    return {
        "buckets": len(stats["buckets"]["prefill"]),
        "capture_seconds": round(stats["capture_seconds"], 2),
        "capture_gib": round(total / 2**30, 3),
        "graph_gib": round(report.graph_bytes / 2**30, 3),
        "driver_gib": round(report.driver_bytes / 2**30, 3),
    }


def full_graph(share: Share, embeds: Tensor, batch: AttentionBatch) -> torch.cuda.CUDAGraph:
    """One graph of a whole prefill step, attention included: its lengths are baked in, so it serves this step only.

    The graph reads `embeds` and `batch`, which the caller keeps alive.
    """
    model = share.model.language_model.model
    first = share.fast.attention[0]
    model(embeds, batch)  # Plans the attention.
    first.plans = False
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        model(embeds, batch)
    first.plans = True
    return graph


def host_us_per_layer(decoder: GraphedDecoder, steps: Steps, layers: int) -> float:
    """CPU time from the call to its return, the GPU idle before: what a step costs the host."""
    ids, batch = steps.prefill(64)
    embeds = steps.model.language_model.model.embed_tokens(ids)
    inputs = decoder._inputs(embeds, batch)
    samples = []
    for _ in range(30):
        torch.cuda.synchronize()
        started = time.perf_counter()
        decoder.runner.run(inputs, clone=False)
        samples.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return statistics.median(samples) * 1e6 / layers


def peer(share: Share, steps: Steps) -> dict[str, Any]:
    """breakable-cuda-graphs on the same forward: seconds, GiB, replay time.

    On a deterministic share also whether its answers survive the churn: elsewhere no two runs agree bit for bit.
    """
    try:
        from breakable_cuda_graphs import BreakableCUDAGraph, breakable_graph, no_graph
    except ImportError as e:
        return {"skipped": str(e)}

    class Break:
        def cross(self, fn: Callable[..., None], bound: Any) -> None:
            with crossing_scope(None):
                no_graph(fn)(*bound.args, **bound.kwargs)

    model = share.model.language_model.model
    stream = torch.cuda.Stream()
    graphs: dict[int, tuple[Any, Tensor, Tensor]] = {}
    before, started, pool = torch.cuda.mem_get_info()[0], time.perf_counter(), None
    batches = {}
    for tokens in sorted(ORDERED, reverse=True):
        ids, batch = steps.prefill(tokens)
        embeds = model.embed_tokens(ids)
        expected = model(embeds, batch).clone()
        graph = BreakableCUDAGraph(pool=pool)
        pool = graph.pool()
        torch.cuda.synchronize()
        with breakable_graph(graph, stream=stream), crossing_scope(Break()):
            out = model(embeds, batch)
        graphs[tokens], batches[tokens] = (graph, out, expected), (embeds, batch)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    used = before - torch.cuda.mem_get_info()[0]
    survives = True if share.deterministic else None
    for order in itertools.permutations(ORDERED) if share.deterministic else ():
        for tokens in order:
            graph, out, expected = graphs[tokens]
            churn()
            graph.replay()
            survives = survives and torch.equal(out, expected)
    replay_ms = {str(tokens): measure(graphs[tokens][0].replay).median_ms for tokens in ORDERED}
    for graph, *_ in graphs.values():
        graph.reset()
    return {
        "version": "0.1.0", "buckets": list(ORDERED), "capture_seconds": round(seconds, 2),
        "capture_gib": round(used / 2**30, 3), "replay_ms": replay_ms, "survives_churn": survives,
    }  # fmt: skip


def plot(result: dict[str, Any], path: Path) -> None:
    """What pieces cost over one full graph, and the ladders' memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), dpi=90)
    ratios = result["piecewise_over_full"]
    left.plot(list(ratios), [100 * (r - 1) for r in ratios.values()], "o-")
    left.axhline(3, ls=":", c="gray")
    left.set(xlabel="tokens", ylabel="% over one full graph", title="replay in pieces")
    ladders = result["ladders"]
    right.bar(list(ladders), [ladder["capture_gib"] for ladder in ladders.values()])
    right.set(ylabel="GiB", title=f"{ladders['shared']['buckets']} sizes, {result['layers']} layers")
    figure.tight_layout()
    figure.savefig(path)


def pieces_over_full(
    share: Share, decoder: GraphedDecoder, steps: Steps, rounds: int
) -> list[tuple[int, float, float]]:
    """Tokens, milliseconds in pieces, milliseconds in one full graph."""
    rows = []
    for tokens in TOKENS:
        ids, batch = steps.prefill(tokens)
        embeds = share.model.language_model.model.embed_tokens(ids)
        inputs = decoder._inputs(embeds, batch)

        def pieces(inputs: dict[str, Tensor] = inputs) -> Tensor:
            return decoder.runner.run(inputs, clone=False)

        graph = full_graph(share, embeds, batch)
        in_pieces, full = measure(pieces, rounds=rounds), measure(graph.replay, rounds=rounds)
        graph.reset()
        rows.append((tokens, in_pieces.median_ms, full.median_ms))
    return rows


def main() -> None:
    """Measures everything; writes the JSON and the plot where they are asked for, prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.layers < 2:
        refuse("--layers must be at least 2: one dense layer and one of experts")
    device = require_room(args.tp, args.layers, spare_gib=16)

    small = Share(args.tp, min(args.layers, 4), device, deterministic=True, sizes=ORDERED)
    bitwise, library_small = bitwise_by_order(small)
    print("bitwise equal to eager:", bitwise, flush=True)
    del small
    gc.collect()
    torch.cuda.empty_cache()

    sizes = [*LADDER.sizes, *TOKENS, *DECODE.sizes]
    share = Share(args.tp, args.layers, device, deterministic=False, sizes=sizes)
    ladders = {"shared": ladder_figures(share, "shared"), "per layer": ladder_figures(share, "per_layer")}
    with share.captured(prefill=None, decode=DECODE) as (_, steps):
        alone = measure(steps.run(steps.decode(1, CONTEXT), graphs=True), rounds=args.rounds * 3)
    with share.captured(prefill=BucketPolicy.of(TOKENS), decode=DECODE) as (decoder, steps):
        beside = measure(steps.run(steps.decode(1, CONTEXT), graphs=True), rounds=args.rounds * 3)
        eager = measure(steps.run(steps.decode(1, CONTEXT), graphs=False), rounds=5)
        host = host_us_per_layer(decoder, steps, args.layers)
        with torch.inference_mode():
            rows = pieces_over_full(share, decoder, steps, args.rounds)
            library = peer(share, steps)
    ratios = {str(tokens): round(in_pieces / full, 4) for tokens, in_pieces, full in rows}
    result = {
        **provenance(),
        "tp": args.tp,
        "layers": args.layers,
        "capture_seconds": ladders["shared"]["capture_seconds"],
        "capture_gib": ladders["shared"]["capture_gib"],
        "ladders": ladders,
        "piecewise_over_full": ratios,
        "decode_alone_ms": alone.median_ms,
        "decode_beside_prefill_graphs_ms": beside.median_ms,
        "decode_delta": round(beside.median_ms / alone.median_ms - 1, 4),
        "decode_speedup": round(eager.median_ms / beside.median_ms, 2),
        "host_us_per_layer": round(host, 1),
        "bitwise": bitwise,
        "bitwise_layers": min(args.layers, 4),
        "breakable_cuda_graphs": library | {"survives_churn": library_small.get("survives_churn")},
    }
    if args.json:
        write_result(args.json, result)
    if args.plot:
        plot(result, args.plot)
    print_table(["tokens", "pieces ms", "full ms", "ratio"], [[*row, ratios[str(row[0])]] for row in rows])
    for name in ("ladders", "decode_delta", "decode_speedup", "host_us_per_layer", "breakable_cuda_graphs"):
        print(f"{name}: {result[name]}")


if __name__ == "__main__":
    main()
