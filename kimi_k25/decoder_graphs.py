"""The decoder run through graphs over one cache, and called as the decoder itself is. Knows no prompt and no text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from .engine import Engine
from .graphs import GraphPlan, GraphRunner, InputSpec, resolve_decoder
from .layers.attention_batch import AttentionBatch, CacheStep
from .layers.kv_cache import CachedSequence, PagedKVCache
from .model import KimiK25ForConditionalGeneration

__all__ = ["GraphedDecoder", "graphed_engine"]


class GraphedDecoder:
    """A decoder whose prefill runs in pieces around attention, and whose decode runs in full graphs.

    The graphs hold the addresses of the cache and of every weight, so one of these lives as long as its cache.

    Args:
        model: The wrapper or anything in it that leads to the decoder.
        cache: What all steps append to. `capture` needs it empty.
        plan: What to capture.
    """

    def __init__(self, model: nn.Module, cache: PagedKVCache, plan: GraphPlan | None = None) -> None:
        self.cache = cache
        self.decoder = resolve_decoder(model)
        self._hidden_size, self._dtype = self.decoder.norm.weight.shape[0], cache.layers.dtype
        empty = torch.zeros(0, dtype=torch.int32, device=cache.layers.device)
        # The one step object that captured attention calls hold: `__call__` rewrites its fields, never itself.
        self._cache_step = CacheStep(
            layers=cache.layers,
            slot_mapping=empty,
            block_table=empty,
            seq_lens=empty,
            kv_lens=(),
            has_prefix=False,
            is_decode=False,
        )
        self._batch = AttentionBatch(positions=empty, cu_seqlens=empty, lengths=(), cache=self._cache_step)
        self.runner = GraphRunner(
            self._forward,
            model,
            inputs={
                "inputs_embeds": InputSpec((self._hidden_size,), self._dtype),
                "positions": InputSpec((), torch.int64),
                "slot_mapping": InputSpec((), torch.int64, pad=0),  # page 0 takes what padding rows write
            },
            decode_inputs={
                "block_table": InputSpec((cache.max_pages_per_seq,), torch.int32),
                "seq_lens": InputSpec((), torch.int32, pad=1),  # never an empty row: its softmax would be NaN
            },
            dummy=self._dummy,
            plan=plan,
            watch={"kv_cache": lambda: self.cache.layers},
        )
        if self.decoder.fast is not None and (prefill := self.runner.plan.prefill) is not None:
            self.decoder.fast.reserve(prefill.maximum)

    def __call__(self, inputs_embeds: Tensor, batch: AttentionBatch) -> Tensor:
        """Hidden states after the final norm, (num_tokens, hidden_size); arguments as DeepseekV3Model.forward has them.

        Raises:
            ValueError: The step is of another cache.
        """
        decode = batch.cache is not None and batch.cache.is_decode
        return self.runner.run(self.begin_step(inputs_embeds, batch), decode=decode)

    def run_eager(self, inputs_embeds: Tensor, batch: AttentionBatch) -> Tensor:
        """The same eagerly, at the same padded size: what a replay must equal bitwise."""
        decode = batch.cache is not None and batch.cache.is_decode
        return self.runner.run_eager(self.begin_step(inputs_embeds, batch), decode=decode)

    def begin_step(self, inputs_embeds: Tensor, batch: AttentionBatch) -> dict[str, Tensor]:
        """Makes this the step that attention between graphs attends to.

        Returns:
            The inputs for `runner.run`.

        Raises:
            ValueError: The step is of another cache.
        """
        if batch.cache is None or batch.cache.layers is not self.cache.layers:
            raise ValueError("the step is not one of this decoder's cache; make it with its cache.step(...)")
        held, cache, step = self._batch, self._cache_step, batch.cache
        held.cu_seqlens, held.lengths = batch.cu_seqlens, batch.lengths
        cache.block_table, cache.seq_lens, cache.kv_lens = step.block_table, step.seq_lens, step.kv_lens
        cache.has_prefix = step.has_prefix
        inputs = {
            "inputs_embeds": inputs_embeds,
            "positions": batch.positions,
            "slot_mapping": step.slot_mapping,
        }
        if step.is_decode:
            inputs |= {"block_table": step.block_table, "seq_lens": step.seq_lens}
        return inputs

    def _forward(self, inputs: Mapping[str, Tensor]) -> Tensor:
        self._batch.positions, self._batch.num_tokens = inputs["positions"], inputs["num_tokens"]
        self._cache_step.slot_mapping = inputs["slot_mapping"]
        self._cache_step.is_decode = "seq_lens" in inputs
        if self._cache_step.is_decode:
            self._cache_step.block_table, self._cache_step.seq_lens = inputs["block_table"], inputs["seq_lens"]
        return self.decoder(inputs["inputs_embeds"], self._batch)

    def _dummy(self, phase: Literal["prefill", "decode"], num_tokens: int) -> dict[str, Tensor]:
        """A step of sequences that are gone afterwards; decode steps have three tokens behind them."""
        longest = self.cache.max_pages_per_seq * self.cache.page_size
        lengths = [1] * num_tokens
        if phase == "prefill":
            lengths = [longest] * (num_tokens // longest) + [num_tokens % longest] * bool(num_tokens % longest)
        sequences = [CachedSequence() for _ in lengths]
        try:
            if phase == "decode":
                self.cache.step(sequences, [3] * num_tokens)
            batch = self.cache.step(sequences, lengths)
        finally:
            for sequence in sequences:
                self.cache.release(sequence)
        generator = torch.Generator(self.cache.layers.device).manual_seed(num_tokens)
        embeds = torch.randn(
            num_tokens, self._hidden_size, generator=generator, device=self.cache.layers.device, dtype=self._dtype
        )
        return self.begin_step(embeds, batch)


def graphed_engine(
    model: KimiK25ForConditionalGeneration, *, plan: GraphPlan, max_seq_len: int, max_seqs: int = 1
) -> tuple[Engine, GraphRunner]:
    """An engine that runs its steps through graphs, all captured and checked to stay in place, and their runner.

    Args:
        max_seq_len: Most tokens of a sequence, the answer's too: the cache is made for that many, once.
        max_seqs: Most sequences of a generate().

    Raises:
        ValueError: The plan has decode graphs for more sequences than the cache is to hold.
    """
    if plan.decode is not None and plan.decode.maximum > max_seqs:
        most = plan.decode.maximum
        raise ValueError(f"the plan has decode graphs for {most} sequences, but max_seqs is {max_seqs}; make it {most}")
    weight = model.language_model.lm_head.weight
    cache = PagedKVCache(
        model.config.text_config, max_seqs=max_seqs, max_seq_len=max_seq_len, dtype=weight.dtype, device=weight.device
    )
    decoder = GraphedDecoder(model, cache, plan)
    decoder.runner.capture()
    decoder.runner.freeze()
    return Engine(model, cache=cache, decoder=decoder), decoder.runner
