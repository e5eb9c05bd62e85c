"""What the piecewise graph runner costs and gives on one GPU, on one rank's share of Kimi-K2.5.

    python bench/graphs.py [--tp 8] [--layers 61] [--json bench/results/graphs_NAME.json] [--plot NAME.png]

Bitwise equality in every order of three buckets, with the allocator churned in between; seconds and GiB of the
42-size ladder, with bridge buffers and with strong per-layer buffers; replay in pieces against one full graph of the
same forward over the same static buffers; decode with and without prefill graphs beside it; what a replay costs the
host, and how much of that the GPU waits for; and the library breakable-cuda-graphs on the same model, if it is
installed. What is compared runs in turns, so that a drift of the clocks meets all alike. The share is share.py's:
no collectives, one layer's rearranged experts copied to the others, routers balanced.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from harness import apart, free_memory, measure, measure_in_turns, print_table, provenance, pyplot, refuse, write_result
from rank_share import CONTEXT
from share import (
    BALANCING_STEPS,
    TOPK,
    Steps,
    balance_routers,
    build,
    require_room,
    set_fast,
    share_config,
)
from torch import Tensor

from kimi_k25.decoder_graphs import GraphedDecoder
from kimi_k25.graphs import BucketPolicy, GraphPlan
from kimi_k25.graphs.breaks import crossing_scope
from kimi_k25.layers.kv_cache import PagedKVCache

TOKENS = (64, 256, 1024, 2048, 4096)
ORDERED = (64, 256, 1024)
LADDER = BucketPolicy.prefill(2048)
DECODE = BucketPolicy.of([1, 8])
BALANCED = 2048  # Tokens among which the routers share the experts out, as rank_share.py does.
CHURNED = (1 << 12, 1 << 16, 1 << 20, 1 << 24)  # Elements.
SPIN_CYCLES = 20_000_000  # About 10 ms: longer than the host takes to launch a step.


def queued_ms(calls: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, float]:
    """Median milliseconds of each call, in turns, all its launches queued behind a busy GPU before it begins.

    So no host time is in it, and what is left is the device's own.
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(SPIN_CYCLES)
            start.record()
            call()
            end.record()
            end.synchronize()
            samples[name].append(start.elapsed_time(end))
    return {name: round(statistics.median(of_one), 4) for name, of_one in samples.items()}


def churn(device: torch.device) -> None:
    """Takes and frees memory of many sizes, filled, so that a pointer kept to freed memory reads something else."""
    for size in CHURNED:
        kept = [torch.full((size,), float("nan"), device=device) for _ in range(8)]
        del kept


class Share:
    """The model on its fast kernels, its cache, and graphs captured over them."""

    def __init__(
        self, tp: int, layers: int, device: torch.device, *, deterministic: bool, sizes: Sequence[int]
    ) -> None:
        self.config, self.device, self.deterministic = share_config(tp, layers), device, deterministic
        self.model = build(self.config, device, expert_layers=1)
        self.fast = set_fast(self.model, deterministic=deterministic)
        if self.fast.experts:
            self.fast.experts[0].products.prepare([n * TOPK for n in sizes])
        self.cache = PagedKVCache(
            self.config.text_config, max_seqs=8, max_seq_len=4096 + 64, dtype=torch.bfloat16, device=device
        )
        self.cache.layers[:, 1:].normal_()
        if not deterministic:
            steps = Steps(self.model, self.cache, GraphedDecoder(self.model, self.cache, GraphPlan(backend="eager")))
            balance_routers(*(steps.run(steps.prefill(BALANCED), graphs=False) for _ in range(BALANCING_STEPS)))

    @contextmanager
    def captured(self, **plan: Any) -> Iterator[tuple[GraphedDecoder, Steps]]:
        """Graphs of a GraphPlan with these fields, frozen as in use; dropped at the end of the block."""
        decoder = GraphedDecoder(self.model, self.cache, GraphPlan(backend="cuda", strict=True, **plan))
        decoder.runner.capture()
        decoder.runner.freeze()
        print(decoder.runner.describe(), flush=True)
        try:
            yield decoder, Steps(self.model, self.cache, decoder)
        finally:
            decoder.runner.close()
            free_memory()


def bitwise_by_order(share: Share) -> dict[str, bool]:
    """Whether every replay equals eager on the same padded inputs, bit for bit, for each order of the buckets."""
    generator = torch.Generator(share.device).manual_seed(1)
    hidden_size = share.config.text_config.hidden_size
    result = {}
    with share.captured(prefill=BucketPolicy.of(ORDERED)) as (decoder, steps), torch.inference_mode():
        cases = {}
        for bucket in ORDERED:
            tokens = bucket - 3  # With padding rows.
            embeds = torch.randn(tokens, hidden_size, device=share.device, dtype=torch.bfloat16, generator=generator)
            batch = steps.prefill(tokens)[1]
            cases[bucket] = (embeds, batch, decoder.run_eager(embeds, batch))
        for order in itertools.permutations(ORDERED):
            equal = True
            for bucket in (*order, *reversed(order)):
                embeds, batch, expected = cases[bucket]
                churn(share.device)
                equal &= torch.equal(decoder(embeds, batch), expected)
            result[" ".join(map(str, order))] = equal
    return result


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


class PrefillStep:
    """One prefill step by each way of running it: eagerly, in pieces, and in one graph.

    The one graph is of the same forward over the same static buffers, attention included: its lengths are baked in,
    so it serves this step only.
    """

    def __init__(self, share: Share, decoder: GraphedDecoder, steps: Steps, tokens: int, bucket: int) -> None:
        torch.manual_seed(tokens)  # Steps of one size have the same tokens, which reach the same experts.
        ids, batch = steps.prefill(tokens)
        embeds = share.model.language_model.model.embed_tokens(ids)
        self._decoder, self._tokens, self._bucket = decoder, tokens, bucket
        self._inputs = decoder.begin_step(embeds, batch)
        self._graphs = decoder.runner.graphs
        assert self._graphs is not None
        self._ladder = self._graphs.ladders["prefill"]
        self._full = self._capture(share)

    def _capture(self, share: Share) -> torch.cuda.CUDAGraph:
        self.eager()  # Plans the attention.
        first = share.fast.attention[0]
        first.plans = False
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            out = self._ladder.run_padded(self._bucket)
            self._ladder.captured[self._bucket].output.copy_(out)
        first.plans = True
        return graph

    def eager(self) -> Tensor:
        return self._decoder.runner.run_eager(self._inputs)

    def pieces(self) -> Tensor:
        return self._decoder.runner.run(self._inputs, clone=False)

    def full(self) -> None:
        self._ladder.load(self._inputs, self._tokens, self._bucket)
        self._full.replay()

    def close(self) -> None:
        """Drops the one graph."""
        self._full.reset()

    def host_split(self, layers: int, rounds: int = 31) -> dict[str, float]:
        """Microseconds of host time of one replay in pieces, the GPU idle before it.

        In all, the median; then where they go, by clocks around each call, which add a little: until the first launch
        of a graph; launches of graphs; eager attention, whose first call plans for all; and after the last launch, when
        the runner looks for moved pointers. These are of one round, the median one, and add up to its `parts_us`. The
        look alone, again and again, finds all it reads in the CPU's caches.
        """
        captured = self._ladder.captured[self._bucket]
        calls, stamps = captured.calls, []

        def stamped(call: Callable[[], object]) -> Callable[[], None]:
            def run() -> None:
                started = time.perf_counter()
                call()
                stamps.append((started, time.perf_counter()))

            return run

        def timed(call: Callable[[], object]) -> tuple[float, float]:
            torch.cuda.synchronize()
            started = time.perf_counter()
            call()
            return started, time.perf_counter()

        def us(*spans: tuple[float, float]) -> float:
            return 1e6 * sum(end - start for start, end in spans)

        def median_us(call: Callable[[], object]) -> float:
            return statistics.median(us(timed(call)) for _ in range(rounds))

        total = median_us(self.pieces)
        captured.calls = [stamped(call) for call in calls]
        parts: list[tuple[float, ...]] = []
        for _ in range(rounds):
            stamps.clear()
            began, ended = timed(self.pieces)
            before, after = us((began, stamps[0][0])), us((stamps[-1][1], ended))
            attention = stamps[1::2]
            parts.append((us((began, ended)), before, us(*stamps[::2]), us(attention[0]), us(*attention[1:]), after))
        captured.calls = calls
        in_parts, before, launches, planning, others, after = sorted(parts)[rounds // 2]
        fingerprint = self._decoder.runner._fingerprint
        assert fingerprint is not None
        figures = {
            "us": total, "us_per_layer": total / layers, "parts_us": in_parts, "before_first_launch_us": before,
            "graph_launches_us": launches, "graph_launch_us_per_layer": launches / layers,
            "first_attention_us": planning, "other_attention_us": others,
            "attention_us_per_layer": others / (layers - 1), "after_last_launch_us": after,
            "pointer_check_alone_us": median_us(fingerprint.check),
        }  # fmt: skip
        return {name: round(value, 1) for name, value in figures.items()}


@torch.inference_mode()
def peer(share: Share, steps: Steps) -> dict[str, Any]:
    """breakable-cuda-graphs on the same forward: seconds, GiB, replay time in turns with ours of the same tokens.

    On a deterministic share also whether its answers survive the churn: elsewhere no two runs agree bit for bit.

    Raises:
        ImportError: The library is not installed.
    """
    from breakable_cuda_graphs import BreakableCUDAGraph, breakable_graph, no_graph

    class Break:
        def cross(self, fn: Callable[..., None], bound: Any) -> None:
            with crossing_scope(None):
                no_graph(fn)(*bound.args, **bound.kwargs)

    model, graphed = share.model.language_model.model, steps.graphed
    stream = torch.cuda.Stream()
    graphs: dict[int, tuple[Any, Tensor, Tensor]] = {}
    ours: dict[int, Callable[[], object]] = {}
    started, pool = time.perf_counter(), None
    for tokens in sorted(ORDERED, reverse=True):
        ids, batch = steps.prefill(tokens)
        embeds = model.embed_tokens(ids)
        expected = model(embeds, batch).clone()
        graph = BreakableCUDAGraph(pool=pool)
        pool = graph.pool()
        torch.cuda.synchronize()
        with breakable_graph(graph, stream=stream), crossing_scope(Break()):
            out = model(embeds, batch)
        graphs[tokens] = graph, out, expected
        ours[tokens] = lambda step=(embeds, batch): graphed.runner.run(graphed.begin_step(*step), clone=False)
    torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    used = sum(segment["total_size"] for segment in torch.cuda.memory_snapshot(pool))
    survives = True if share.deterministic else None
    for order in itertools.permutations(ORDERED) if share.deterministic else ():
        for tokens in order:
            graph, out, expected = graphs[tokens]
            churn(share.device)
            graph.replay()
            survives = survives and torch.equal(out, expected)
    replay_ms = {}
    for tokens in ORDERED:
        timings = measure_in_turns({"theirs": graphs[tokens][0].replay, "ours": ours[tokens]}, rounds=10)
        replay_ms[str(tokens)] = {name: timing.median_ms for name, timing in timings.items()}
    for graph, *_ in graphs.values():
        graph.reset()
    return {
        "buckets": list(ORDERED), "capture_seconds": round(seconds, 2),
        "capture_gib": round(used / 2**30, 3), "replay_ms": replay_ms, "survives_churn": survives,
    }  # fmt: skip


def plot(result: dict[str, Any], path: Path) -> None:
    """What pieces cost over one full graph, and the ladders' memory."""
    figure, (left, right) = pyplot().subplots(1, 2, figsize=(8, 3))
    ratios = result["piecewise_over_full"]
    left.plot(list(ratios), [100 * (r - 1) for r in ratios.values()], "o-")
    left.axhline(3, ls=":", c="gray")
    left.set(xlabel="tokens", ylabel="% over one full graph", title="replay in pieces")
    ladders = result["ladders"]
    right.bar(list(ladders), [ladder["capture_gib"] for ladder in ladders.values()])
    right.set(ylabel="GiB", title=f"{ladders['shared']['buckets']} sizes, {result['layers']} layers")
    figure.savefig(path)


@contextmanager
def one_stream() -> Iterator[None]:
    """Forwards inside the block keep the shared expert of short steps on the one stream: graphs without branches."""
    from kimi_k25.layers import fused_moe

    kept, fused_moe.MAX_TOKENS_BESIDE = fused_moe.MAX_TOKENS_BESIDE, 0
    try:
        yield
    finally:
        fused_moe.MAX_TOKENS_BESIDE = kept


def without_branches(share: Share, step: PrefillStep, tokens: int, rounds: int) -> dict[str, Any]:
    """The same step in graphs that are chains, in turns with `step`: what a branch in every piece costs or gives."""
    with one_stream(), share.captured(prefill=BucketPolicy.of([tokens])) as (decoder, steps):
        chain = PrefillStep(share, decoder, steps, tokens, tokens)
        calls = {"pieces": chain.pieces, "full": chain.full, "branched pieces": step.pieces, "branched full": step.full}
        timings = measure_in_turns(calls, rounds=rounds)
        split = chain.host_split(share.config.text_config.num_hidden_layers)
        chain.close()
    return {"ms": {name: timing.median_ms for name, timing in timings.items()}, **split}


def prefill_rows(
    share: Share, decoder: GraphedDecoder, steps: Steps, rounds: int
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Milliseconds of each size, in pieces, in one graph, and eagerly; and where the smallest one's time goes."""
    rows: dict[str, dict[str, float]] = {}
    split: dict[str, Any] = {}
    for tokens in TOKENS:
        step = PrefillStep(share, decoder, steps, tokens, tokens)
        calls = {"pieces": step.pieces, "full": step.full}
        timings = measure_in_turns(calls, rounds=rounds)
        eager = measure(step.eager, rounds=max(5, rounds // 3), warmup=1)
        rows[str(tokens)] = {name: timing.median_ms for name, timing in {**timings, "eager": eager}.items()}
        if tokens == TOKENS[0]:
            split["queued_ms"] = queued_ms(calls, rounds=rounds)
            split["whole_bucket"] = step.host_split(share.config.text_config.num_hidden_layers)
            split["without_branches"] = without_branches(share, step, tokens, rounds)
        step.close()
    step = PrefillStep(share, decoder, steps, TOKENS[0] - 3, TOKENS[0])
    split["with_padding"] = step.host_split(share.config.text_config.num_hidden_layers)
    step.close()
    return rows, split


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
    warnings.filterwarnings("ignore", message=".*cuda capability.*")
    started = time.perf_counter()

    failures: dict[str, str] = {}
    library: dict[str, Any] = {}
    small = Share(args.tp, min(args.layers, 4), device, deterministic=True, sizes=ORDERED)
    bitwise = bitwise_by_order(small)
    print("bitwise equal to eager:", bitwise, flush=True)
    survives = None
    with (
        apart("breakable-cuda-graphs, deterministic", failures),
        small.captured(prefill=BucketPolicy.of(ORDERED)) as (_, steps),
    ):
        survives = peer(small, steps)["survives_churn"]
    del small
    free_memory()

    sizes = [*LADDER.sizes, *TOKENS, *DECODE.sizes]
    share = Share(args.tp, args.layers, device, deterministic=False, sizes=sizes)
    ladders = {"shared": ladder_figures(share, "shared"), "per layer": ladder_figures(share, "per_layer")}
    buckets = BucketPolicy.of({*TOKENS, *ORDERED})
    with ExitStack() as stack:
        _, lone_steps = stack.enter_context(share.captured(prefill=None, decode=DECODE))
        decoder, steps = stack.enter_context(share.captured(prefill=buckets, decode=DECODE))
        stack.enter_context(torch.inference_mode())
        decode = steps.decode(1, CONTEXT)
        by_runner = {"alone": lone_steps.run(decode, graphs=True), "beside": steps.run(decode, graphs=True)}
        timings = measure_in_turns(by_runner, rounds=5 * args.rounds)
        decodes = {name: timing.median_ms for name, timing in timings.items()}
        eager = measure(steps.run(decode, graphs=False), rounds=5)
        rows, split = prefill_rows(share, decoder, steps, args.rounds)
        with apart("breakable-cuda-graphs", failures):
            library = peer(share, steps)
    ratios = {tokens: round(row["pieces"] / row["full"], 4) for tokens, row in rows.items()}
    result = {
        **provenance(),
        "tp": args.tp,
        "layers": args.layers,
        "capture_seconds": ladders["shared"]["capture_seconds"],
        "capture_gib": ladders["shared"]["capture_gib"],
        "ladders": ladders,
        "piecewise_over_full": ratios,
        "prefill_ms": rows,
        "decode_alone_ms": decodes["alone"],
        "decode_beside_prefill_graphs_ms": decodes["beside"],
        "decode_eager_ms": eager.median_ms,
        "decode_delta": round(decodes["beside"] / decodes["alone"] - 1, 4),
        "decode_speedup": round(eager.median_ms / decodes["beside"], 2),
        "host_us_per_layer": split["whole_bucket"]["us_per_layer"],
        "host_us_per_layer_padded": split["with_padding"]["us_per_layer"],
        f"host_at_{TOKENS[0]}": split,
        "bitwise": bitwise,
        "bitwise_layers": min(args.layers, 4),
        "breakable_cuda_graphs": library | {"survives_churn": survives},
        "failures": failures,
        "seconds": round(time.perf_counter() - started, 1),
    }
    if args.json:
        write_result(args.json, result)
    if args.plot:
        with apart("plot", failures):
            plot(result, args.plot)
    print_table(
        ["tokens", "eager ms", "full ms", "pieces ms", "pieces/full"],
        [[tokens, row["eager"], row["full"], row["pieces"], f"{ratios[tokens]:.4f}"] for tokens, row in rows.items()],
    )
    printed = {"tp", "layers", "prefill_ms", "piecewise_over_full", *provenance()}
    for name, value in result.items():
        if name not in printed:
            print(f"{name}: {value}")


if __name__ == "__main__":
    main()
