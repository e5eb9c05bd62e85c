"""Generation: token ids in, token ids out. Knows no text, no files and no arguments.

Prompts are prefilled in chunks over a paged cache, then all sequences decode together, a token each a step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from .layers.attention_batch import AttentionBatch
from .layers.kv_cache import CachedSequence, PagedKVCache
from .layers.sampling import NOT_FINITE, sample
from .model import KimiK25ForConditionalGeneration

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn, and when to stop.

    Attributes:
        stop_token_ids: Beside the configuration's own.

    Raises:
        ValueError: A value is out of range.
    """

    max_new_tokens: int = 512
    temperature: float = 1.0
    top_p: float = 0.95
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if not isinstance(self.max_new_tokens, int):  # 2.5 would never be reached
            raise ValueError(f"max_new_tokens is {self.max_new_tokens!r}; expected an integer")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; expected at least 1")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}; expected 0 (the likeliest token) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected more than 0 and at most 1")
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; expected an integer of 64 bits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One sequence to continue.

    Attributes:
        input_ids: (num_tokens,) int64, media placeholders expanded.
        pixel_values, grid_thws: Its media; see KimiK25ForConditionalGeneration.embed.
    """

    input_ids: Tensor
    pixel_values: Tensor | None = None
    grid_thws: Tensor | None = None


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """A token of sequence `index`; the last one of a sequence has a finish_reason, and at "stop" is the stop token."""

    index: int
    token_id: int
    finish_reason: FinishReason | None


@dataclass(slots=True)
class _Sequence:
    """A prompt on its way: what is embedded, what is cached, how much was generated."""

    index: int
    embeds: Tensor
    limit: int
    cached: CachedSequence = field(default_factory=CachedSequence)
    num_generated: int = 0

    @property
    def num_pending(self) -> int:
        return self.embeds.shape[0] - self.cached.length


class Decoder(Protocol):
    """The decoder stack, as DeepseekV3ForCausalLM.forward has it."""

    def __call__(self, inputs_embeds: Tensor, batch: AttentionBatch) -> Tensor: ...


class Engine:
    """Continues prompts with one model.

    Args:
        cache: Kept from call to call, as graphs need it; None makes one of the right size for each call.
        decoder: What runs the stack over that cache, a GraphedDecoder for example; None: the model's own.
        prefill_chunk: Most prompt tokens of one step.

    Raises:
        ValueError: prefill_chunk is less than 1.

    Attributes:
        timings_ms: Of the last generate(): "embed" (the vision tower is in it), "prefill", and "sample" of the first
            tokens.
    """

    def __init__(
        self,
        model: KimiK25ForConditionalGeneration,
        *,
        cache: PagedKVCache | None = None,
        decoder: Decoder | None = None,
        prefill_chunk: int = 2048,
    ) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk is {prefill_chunk}; expected at least 1")
        self.model = model
        self.decoder: Decoder = decoder or model.language_model
        self.prefill_chunk = prefill_chunk
        self.timings_ms: dict[str, float] = {}
        self._cache = cache

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Prompt], sampling: SamplingParams) -> Iterator[GeneratedToken]:
        """Yields tokens as they are drawn, those of one step in the prompts' order.

        Raises:
            ValueError: A prompt is empty, has an id outside the vocabulary, or leaves no room in the model's context
                or in the cache.
            CacheFullError: The prompts together do not fit in the cache.
            RuntimeError: Logits are not finite.
        """
        if not prompts:
            return
        weight = self.model.language_model.lm_head.weight
        stop_token_ids = self.model.config.stop_token_ids | sampling.stop_token_ids
        limits = [min(sampling.max_new_tokens, self._room(prompt)) for prompt in prompts]
        cache = self._cache or PagedKVCache(
            self.model.config.text_config,
            max_seqs=len(prompts),
            max_seq_len=max(p.input_ids.shape[0] + limit for p, limit in zip(prompts, limits, strict=True)),
            dtype=weight.dtype,
            device=weight.device,
        )
        generator = torch.Generator(weight.device).manual_seed(sampling.seed)
        with self._timed("embed"):
            running = [
                _Sequence(i, self._embed(prompt), limit)
                for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
            ]
        try:
            with self._timed("prefill"):
                hidden = self._prefill(running, cache)
            with self._timed("sample"):
                ids = self._sample(hidden, sampling, generator)
            while True:
                alive = []
                for row, (sequence, token_id) in enumerate(zip(running, ids.tolist(), strict=True)):
                    if token_id == NOT_FINITE:
                        raise RuntimeError(
                            f"logits are not finite at token {sequence.num_generated + 1} of prompt {sequence.index}: "
                            f"weights have NaN or infinity, or {weight.dtype} overflows. "
                            "Compare the checkpoint's files with their source, or load it in another dtype"
                        )
                    sequence.num_generated += 1
                    reason: FinishReason | None = None
                    if token_id in stop_token_ids:
                        reason = "stop"
                    elif sequence.num_generated == sequence.limit:
                        reason = "length"
                    yield GeneratedToken(sequence.index, token_id, reason)
                    if reason is None:
                        alive.append(row)
                    else:
                        cache.release(sequence.cached)
                running = [running[row] for row in alive]
                if not running:
                    return
                batch = cache.step([s.cached for s in running], [1] * len(running))
                embeds = self.model.language_model.model.embed_tokens(ids[alive])
                ids = self._sample(self.decoder(embeds, batch), sampling, generator)
        finally:  # The caller may stop listening at any token.
            for sequence in running:
                cache.release(sequence.cached)

    def _room(self, prompt: Prompt) -> int:
        """How many tokens fit behind the prompt."""
        text, ids = self.model.config.text_config, prompt.input_ids
        if ids.dim() != 1 or not ids.shape[0]:
            raise ValueError(f"input_ids has shape {tuple(ids.shape)}; expected (num_tokens,) with at least one")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= text.vocab_size:
            raise ValueError(f"input_ids has ids from {low} to {high}; the vocabulary ends at {text.vocab_size - 1}")
        holds, what, way_out = text.max_position_embeddings, "the model's context", "shorten it"
        if self._cache is not None and self._cache.max_seq_len < holds:
            holds, what, way_out = self._cache.max_seq_len, "the cache", "shorten it, or raise max_seq_len"
        if ids.shape[0] >= holds:
            raise ValueError(
                f"the prompt has {ids.shape[0]} tokens; {what} holds {holds}, one of them for the answer; {way_out}"
            )
        return holds - ids.shape[0]

    def _embed(self, prompt: Prompt) -> Tensor:
        device = self.model.language_model.lm_head.weight.device
        media = (None if t is None else t.to(device) for t in (prompt.pixel_values, prompt.grid_thws))
        return self.model.embed(prompt.input_ids.to(device), *media)

    def _prefill(self, sequences: Sequence[_Sequence], cache: PagedKVCache) -> Tensor:
        """Runs all prompts, at most prefill_chunk tokens a step; their last hidden states, (num_seqs, hidden_size)."""
        last = [sequences[0].embeds[0]] * len(sequences)
        while pending := [s for s in sequences if s.num_pending]:
            step: list[tuple[_Sequence, Tensor]] = []
            budget = self.prefill_chunk
            for sequence in pending:
                if budget:
                    start = sequence.cached.length
                    step.append((sequence, sequence.embeds[start : start + budget]))
                    budget -= step[-1][1].shape[0]
            lengths = [embeds.shape[0] for _, embeds in step]
            batch = cache.step([sequence.cached for sequence, _ in step], lengths)
            hidden = self.decoder(torch.cat([embeds for _, embeds in step]), batch)
            for (sequence, _), rows in zip(step, hidden.split(lengths), strict=True):
                last[sequence.index] = rows[-1]
        return torch.stack(last)

    def _sample(self, hidden: Tensor, sampling: SamplingParams, generator: torch.Generator) -> Tensor:
        logits = self.model.language_model.compute_logits(hidden)
        # A placeholder stands for a picture that was given; the model must not invent one.
        logits[:, self.model.config.media_placeholder_token_id] = float("-inf")
        if self.model.plan.rank:  # Drawing is one decision: rank 0's.
            return self.model.plan.broadcast(logits.new_empty(logits.shape[0], dtype=torch.int64))
        ids = sample(logits, temperature=sampling.temperature, top_p=sampling.top_p, generator=generator)
        return self.model.plan.broadcast(ids)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        if self.model.language_model.lm_head.weight.is_cuda:
            torch.cuda.synchronize()
        self.timings_ms[phase] = (time.perf_counter() - started) * 1000
