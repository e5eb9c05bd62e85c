"""Asks a model the held-out questions and counts exact answers: `python -m kimi_k25.tiny.evaluate`. Knows no training.

Answers are generated greedily by the model's plain modules, a batch at a time, without a cache: slow for one question,
fast for two thousand on a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import load_model
from ..layers.attention_batch import AttentionBatch
from ..model import KimiK25ForConditionalGeneration
from ..tokenizer import Tokenizer, load_tokenizer
from . import architecture
from .exam import exam
from .lessons import Lesson
from .packing import Batch, Packer
from .questions import UNKNOWN

MAX_NEW_TOKENS = 64  # The longest reasoning with its answer, a list of six shapes, has 48.


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
    model: KimiK25ForConditionalGeneration, tokenizer: Tokenizer, lessons: Sequence[Lesson], *, batch_size: int = 250
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


def examine(folder: Path, tokenizer: Tokenizer, num_questions: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Asks both variants in `folder`, prints what they got right, and returns it as a result's fields.

    "bfloat16" and "int4" there say how a variant's experts are stored; both compute in `dtype`.
    """
    questions = list(exam(num_questions))
    results = {}
    for name, checkpoint in (("bfloat16", folder), ("int4", folder / "int4")):
        model = load_model(checkpoint, device=device, dtype=dtype)
        results[name] = score(questions, answer_greedily(model, tokenizer, questions))
    main = results["bfloat16"]
    print(confusion_table(main))
    for name, r in results.items():
        print(name, "  ".join(f"{kind} {100 * value:.2f}%" for kind, value in r.accuracy.items()))
        print(name, "  ".join(f"{kind} {100 * value:.2f}%" for kind, value in r.promised.items()))
    return {
        "questions": main.counts,
        "accuracy": {name: r.accuracy for name, r in results.items()},
        "promised": {name: r.promised for name, r in results.items()},
        "digits_confusion": main.digits,
        "mistakes": main.mistakes,
    }


def require_digits(parser: argparse.ArgumentParser) -> None:
    """Ends with a line that says how to get scikit-learn, if it is not there."""
    if importlib.util.find_spec("sklearn") is None:
        parser.exit(2, f"{parser.prog}: error: the digits are scikit-learn's: `pip install scikit-learn`\n")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kimi_k25.tiny.evaluate", description=(__doc__ or "").split(":")[0])
    parser.add_argument("--checkpoint", type=Path, default=architecture.FOLDER, help="its int4 variant is in int4/")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--questions", type=int, default=2000)
    parser.add_argument("--result", type=Path, help="a training's tiny_training.json, whose answers are replaced")
    args = parser.parse_args(argv)
    require_digits(parser)
    if args.result and not args.result.is_file():
        parser.error(f"--result {args.result} is not a file; training writes it")
    dtype = torch.bfloat16 if args.device.startswith("cuda") else torch.float32
    fields = examine(args.checkpoint, load_tokenizer(args.checkpoint), args.questions, args.device, dtype)
    if args.result:
        result = json.loads(args.result.read_text(encoding="utf-8")) | fields
        result["examined"] = f"{datetime.date.today()}, python -m kimi_k25.tiny.evaluate --device {args.device}"
        args.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
