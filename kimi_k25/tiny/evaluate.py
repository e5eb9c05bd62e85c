"""Asks a model the held-out questions and counts exact answers. Knows no training.

Answers are generated greedily by the model's plain modules, a batch at a time, without a cache: slow for one question,
fast for two thousand on a GPU.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..layers.kv_cache import AttentionBatch
from ..model import KimiK25ForConditionalGeneration
from ..tokenizer import Tokenizer
from .lessons import Lesson
from .packing import Batch, Packer
from .questions import UNKNOWN

MAX_NEW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Result:
    """Answers against what was right.

    Attributes:
        accuracy: Share of exact answers of each kind.
        counts: Questions of each kind.
        digits: digits[right][answered] is a number of questions; answers that are no digit are under the answer itself.
        mistakes: (kind, question, right, answered), at most 100.
    """

    accuracy: dict[str, float]
    counts: dict[str, int]
    digits: dict[str, dict[str, int]]
    mistakes: list[tuple[str, str, str, str]]

    @property
    def promised(self) -> dict[str, float]:
        """The three figures that are promised: digits, "I don't know", and everything else together."""
        rest = [kind for kind in self.counts if kind not in ("digit", "unknown")]
        exact = sum(self.accuracy[kind] * self.counts[kind] for kind in rest)
        return {
            "digit": self.accuracy.get("digit", 0.0),
            "unknown": self.accuracy.get("unknown", 0.0),
            "rest": exact / max(1, sum(self.counts[kind] for kind in rest)),
        }


def score(lessons: Sequence[Lesson], answers: Sequence[str]) -> Result:
    """Compares answers with the last turns' right ones."""
    exact: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    digits: dict[str, Counter[str]] = defaultdict(Counter)
    mistakes = []
    for lesson, answer in zip(lessons, answers, strict=True):
        question = lesson.turns[-1].question
        counts[question.kind] += 1
        exact[question.kind] += answer == question.answer
        if question.kind == "digit":
            digits[question.answer][answer] += 1
        if answer != question.answer:
            mistakes.append((question.kind, question.text, question.answer, answer))
    accuracy = {kind: exact[kind] / counts[kind] for kind in counts}
    table = {right: dict(sorted(digits[right].items())) for right in sorted(digits)}
    return Result(accuracy, dict(counts), table, mistakes[:100])


@torch.no_grad()
def answer_greedily(
    model: KimiK25ForConditionalGeneration, tokenizer: Tokenizer, lessons: Sequence[Lesson], *, batch_size: int = 500
) -> list[str]:
    """The model's answers to the lessons' last questions, what it thinks before them left out."""
    packer = Packer(tokenizer)
    stop, end_of_thought = tokenizer.special_ids["<|im_end|>"], tokenizer.special_ids["</think>"]
    answers = []
    for start in range(0, len(lessons), batch_size):
        some = lessons[start : start + batch_size]
        prompts = packer.join([packer.pack_one(lesson, with_last_answer=False) for lesson in some])
        for new in _continuations(model, prompts, stop):
            if end_of_thought in new:
                new = new[new.index(end_of_thought) + 1 :]
            answers.append(tokenizer.decode(token for token in new if token != stop))
    return answers


def _continuations(model: KimiK25ForConditionalGeneration, prompts: Batch, stop: int) -> list[list[int]]:
    """What comes after each prompt, up to `stop`. Pictures are encoded once; everything else, at every token."""
    weight = model.language_model.lm_head.weight
    batch = prompts.to(weight.device)
    media = (batch.pixel_values(weight.dtype), batch.grid_thws) if batch.grid_thws.shape[0] else ()
    sequences = list(model.embed(batch.input_ids, *media).split(prompts.cu_seqlens.diff().tolist()))
    new: list[list[int]] = [[] for _ in sequences]
    running = list(range(len(sequences)))
    for _ in range(MAX_NEW_TOKENS):
        lengths = [len(sequences[k]) for k in running]
        step = AttentionBatch.without_cache(lengths, device=weight.device)
        hidden = model.language_model(torch.cat([sequences[k] for k in running]), step)
        logits = model.language_model.compute_logits(hidden[step.cu_seqlens[1:].long() - 1])
        # A placeholder would ask for a picture: the engine never writes one either.
        logits[:, model.config.media_placeholder_token_id] = -torch.inf
        tokens = logits.argmax(-1)
        rows = model.language_model.model.embed_tokens(tokens).split(1)
        for k, token, row in zip(running, tokens.tolist(), rows, strict=True):
            new[k].append(token)
            sequences[k] = torch.cat((sequences[k], row))
        running = [k for k in running if new[k][-1] != stop]
        if not running:
            break
    return new


def confusion_table(result: Result) -> str:
    """The digits' confusion table as text: a row for each right digit, a column for each answer."""
    columns = [*"0123456789", UNKNOWN]
    lines = ["right " + "".join(f"{name:>6}" for name in [*columns[:-1], "?", "other"])]
    for right, answered in result.digits.items():
        other = sum(number for answer, number in answered.items() if answer not in columns)
        cells = [*(answered.get(name, 0) for name in columns), other]
        lines.append(f"{right:>5} " + "".join(f"{number or '.':>6}" for number in cells))
    return "\n".join(lines)
