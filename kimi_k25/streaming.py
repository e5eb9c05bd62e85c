"""Messages in, text out as it is generated. Joins the processor and the engine; knows no files and no arguments."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from .engine import Engine, FinishReason, Prompt, SamplingParams
from .model import KimiK25ForConditionalGeneration
from .processor import Processor

if TYPE_CHECKING:
    from PIL import Image

Messages = str | Sequence[Mapping[str, Any]]
Video = tuple[Sequence["Image.Image"], float]  # frames, frames a second


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStats:
    """What an answer took.

    Attributes:
        ttft_ms: From the messages to the first token.
        phases_ms: Its parts: "process" (template, tokenizer, pictures), "embed" (with the vision tower), "prefill",
            "sample".
        tpot_ms: Mean time of a token after the first; None if there is only one.
        peak_gib: Largest memory so far: of the GPU's allocator, or of the process on the CPU.
    """

    prompt_tokens: int
    generated_tokens: int
    ttft_ms: float
    phases_ms: Mapping[str, float]
    tpot_ms: float | None
    peak_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationStep:
    """One token.

    Attributes:
        text: What it adds to the answer; "" inside a character, while reasoning, and for the token that ends it.
        reasoning: The same for the reasoning before the answer.
        finish_reason: "stop" or "length" on the last step.
        stats: On the last step.
    """

    text: str
    reasoning: str
    token_id: int
    finish_reason: FinishReason | None = None
    stats: GenerationStats | None = None


def stream_generate(
    model: KimiK25ForConditionalGeneration,
    processor: Processor,
    messages: Messages,
    *,
    images: Sequence[Image.Image] = (),
    videos: Sequence[Video] = (),
    thinking: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    sampling: SamplingParams | None = None,
    engine: Engine | None = None,
    on_prompt: Callable[[int], object] | None = None,
) -> Iterator[GenerationStep]:
    """Yields the answer token by token, up to the token that ends a turn of the chat or another that ends generation.

    Args:
        messages: In OpenAI's chat format, or one user message as a string; see Processor.
        thinking: Reason before the answer.
        sampling: None: temperature 1.0 with thinking, else 0.6, the values that the model's makers recommend.
        engine: None makes one for this call.
        on_prompt: Gets the prompt's number of tokens before the model reads them.

    Raises:
        ValueError: The messages and the pictures do not fit together, or the prompt exceeds the model's context.
    """
    started = time.perf_counter()
    if sampling is None:
        sampling = SamplingParams(temperature=1.0 if thinking else 0.6)
    engine = engine or Engine(model)
    batch = processor(messages, images=images, videos=videos, thinking=thinking, tools=tools)
    prompt = Prompt(input_ids=batch.input_ids, pixel_values=batch.pixel_values, grid_thws=batch.grid_thws)
    process_ms = (time.perf_counter() - started) * 1000
    output = processor.output_stream(batch.input_ids.tolist())
    sampling = replace(sampling, stop_token_ids=sampling.stop_token_ids | processor.stop_token_ids)
    if on_prompt:
        on_prompt(batch.input_ids.shape[0])
    first = started
    for count, token in enumerate(engine.generate([prompt], sampling), start=1):
        now = time.perf_counter()
        first = now if count == 1 else first
        pieces = [] if token.finish_reason == "stop" else [output.put(token.token_id)]
        stats = None
        if token.finish_reason:
            pieces.append(output.finish())
            stats = GenerationStats(
                prompt_tokens=batch.input_ids.shape[0],
                generated_tokens=count,
                ttft_ms=(first - started) * 1000,
                phases_ms={"process": process_ms, **engine.timings_ms},
                tpot_ms=(now - first) * 1000 / (count - 1) if count > 1 else None,
                peak_gib=peak_gib(model.language_model.lm_head.weight.device),
            )
        yield GenerationStep(
            reasoning="".join(piece.reasoning for piece in pieces),
            text="".join(piece.answer for piece in pieces),
            token_id=token.token_id,
            finish_reason=token.finish_reason,
            stats=stats,
        )


def generate_text(
    model: KimiK25ForConditionalGeneration, processor: Processor, messages: Messages, **options: Any
) -> str:
    """The answer as a whole, without its reasoning. Options and errors are stream_generate's."""
    steps = stream_generate(model, processor, messages, **options)
    return "".join(step.text for step in steps)


def peak_gib(device: torch.device) -> float:
    """Largest memory so far, in units of 2**30 bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
