"""Trains the embedded default: `python -m kimi_k25.tiny.train`. One seed, the model's own forward, no second model.

Lessons are drawn by worker processes while the model learns, in packed batches, answers only. Routers are balanced by
their biases. In the last part the routed experts are held on the int4 grid, so that the packed variant holds the very
weights of the other. A run can be ended and started again: it continues from its last saved state.

Writes to --out: the checkpoint, its packed variant in int4/, tiny_training.json, tiny_training.png, tiny_router.png.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..checkpoint import save_checkpoint
from ..config import KimiK25Config
from ..model import KimiK25ForConditionalGeneration
from ..tokenizer import Tokenizer, load_tokenizer
from . import architecture, captured, evaluate, plots
from .exam import exam
from .lessons import Lesson
from .master_weights import MasterWeights
from .packing import NO_TARGET, Batch, BatchShape, LessonBatches, Packer
from .quantize import quantize_checkpoint
from .router_balance import RouterBalance

SEED = 0
MINUTES = 7.3
PACE_EVERY = 500  # Steps after which their number is set anew from their pace, until the learning rate falls.
MAX_STEPS = 100_000
LESSONS_A_STEP = 256
PEAK_LEARNING_RATE = 1e-3
WARMUP_STEPS = 200
BRANCH_SCALE = 0.3  # Of fresh weights that add to a residual stream, beside 1 / sqrt(number of blocks).
DECAY_FROM = 0.5  # Share of the steps after which the learning rate falls.
FINAL_SHARE = 0.01  # Of the peak, at the last step.
BIAS_RATE = 1e-3
GRID_FROM = 0.8  # Share of the steps after which the experts are held on the int4 grid.
LOG_EVERY, EVALUATE_EVERY, SAVE_EVERY = 200, 1000, 5000
CURVE_QUESTIONS = 500


def build_model(seed: int, dtype: torch.dtype, device: torch.device) -> KimiK25ForConditionalGeneration:
    """A fresh model of the embedded default's sizes."""
    torch.manual_seed(seed)
    model = KimiK25ForConditionalGeneration(KimiK25Config.from_dict(architecture.config()))
    initialize(model)
    return model.to(device, dtype)


@torch.no_grad()
def initialize(model: nn.Module) -> None:
    """Random weights that keep activations near one; what is added to a residual stream starts small."""
    num_blocks = sum(name.endswith(("o_proj.weight", ".wo.weight")) for name, _ in model.named_parameters())
    for name, p in model.named_parameters():
        if p.dim() == 1:
            nn.init.constant_(p, 1.0 if "norm" in name and name.endswith("weight") else 0.0)
        elif name.endswith(("embed_tokens.weight", "pos_emb.weight")):
            nn.init.normal_(p, std=0.3)
        else:
            fan_in = p[0].numel() if ".experts." not in name else p.shape[-1]
            ends_block = name.endswith(("o_proj.weight", "down_proj.weight", ".down_proj", ".wo.weight", "fc1.weight"))
            nn.init.normal_(p, std=fan_in**-0.5 * (BRANCH_SCALE * num_blocks**-0.5 if ends_block else 1.0))


def batch_logits(model: KimiK25ForConditionalGeneration, batch: Batch) -> Tensor:
    """(num_tokens, vocab_size) float32, from the model's own forward."""
    has_media = batch.grid_thws.shape[0] > 0
    return model(
        batch.input_ids,
        batch.positions,
        batch.pixel_values(model.language_model.lm_head.weight.dtype) if has_media else None,
        batch.grid_thws if has_media else None,
        batch.cu_seqlens,
    )


def answer_loss(model: KimiK25ForConditionalGeneration, batch: Batch) -> Tensor:
    """Mean cross entropy over the tokens to be learned, 0-d."""
    return F.cross_entropy(batch_logits(model, batch), batch.targets, ignore_index=NO_TARGET)


def learning_rate(step: int, steps: int) -> float:
    """Linear warm-up, a plateau, then a straight line down to FINAL_SHARE of the peak."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    decayed = max(0.0, step / steps - DECAY_FROM) / (1 - DECAY_FROM)
    return PEAK_LEARNING_RATE * min(warm, 1 - (1 - FINAL_SHARE) * decayed)


class Training:
    """The state of one run, and its steps.

    Args:
        steps: How many the run is to have.
    """

    def __init__(self, device: torch.device, shape: BatchShape, *, steps: int, seed: int = SEED) -> None:
        self.steps, self.device, self.step, self.seconds = steps, device, 0, 0.0
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = build_model(seed, dtype, device)
        self.masters = MasterWeights(self.model)
        self.balance = RouterBalance(self.model)
        if device.type == "cuda":
            captured.capture(self.model, shape)
            self.balance.reset()
        self.history: dict[str, Any] = {"steps": [], "loss": [], "load": [], "eval_steps": [], "accuracy": {}}
        self._loss = torch.zeros((), device=device)

    def learn(self, batch: Batch) -> None:
        """One step. Never waits for the device."""
        on_grid = self.step >= GRID_FROM * self.steps
        if on_grid and not self.masters.experts_on_grid:
            self.masters.experts_on_grid = True
            self.masters.write_back()
        loss = answer_loss(self.model, batch.to(self.device))
        loss.backward()
        rate = learning_rate(self.step, self.steps)
        self.masters.step(rate)
        self.balance.update(BIAS_RATE * min(1.0, 2 * rate / PEAK_LEARNING_RATE))
        self._loss += loss.detach()
        self.step += 1

    def log(self, every: int) -> None:
        """Adds the mean loss and the experts' load of the last `every` steps to the history. Syncs with the device."""
        loss = self._loss.item() / every
        self._loss.zero_()
        self.history["steps"].append(self.step)
        self.history["loss"].append(round(loss, 5))
        self.history["load"].append(self.balance.take_load())

    @torch.no_grad()
    def evaluate(self, lessons: list[Lesson], batch: Batch) -> dict[str, float]:
        """Share of the lessons whose every learned token is the likeliest one, by kind; added to the history.

        Args:
            batch: The lessons, packed.
        """
        self.model.eval()
        right: dict[str, list[bool]] = defaultdict(list)
        batch = batch.to(self.device)
        best = batch_logits(self.model, batch).argmax(-1)
        wrong = ((best != batch.targets) & (batch.targets != NO_TARGET)).tolist()
        bounds = batch.cu_seqlens.tolist()
        for k, lesson in enumerate(lessons):
            right[lesson.turns[-1].question.kind].append(not any(wrong[bounds[k] : bounds[k + 1]]))
        self.model.train()
        accuracy = {kind: sum(flags) / len(flags) for kind, flags in right.items()}
        self.history["eval_steps"].append(self.step)
        for kind, value in accuracy.items():
            self.history["accuracy"].setdefault(kind, []).append(round(value, 4))
        return accuracy

    def save(self, path: Path) -> None:
        """Everything a later process needs to continue; the old file stays until the new one is complete."""
        from safetensors.torch import save_file

        tensors = self.masters.state()
        for k, router in enumerate(self.balance.routers):
            tensors[f"bias.{k}"] = router.e_score_correction_bias
        about = {"step": self.step, "steps": self.steps, "seconds": self.seconds, "history": self.history}
        partial = path.with_suffix(".partial")
        cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(cpu, partial, metadata={"training": json.dumps(about)})
        partial.replace(path)

    def load(self, path: Path) -> None:
        """Continues from a saved state.

        Raises:
            ValueError: The state is of a run with another number of steps.
        """
        from safetensors import safe_open

        with safe_open(path, "pt") as file:
            about = json.loads(file.metadata()["training"])
            state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        has_decayed = about["step"] > DECAY_FROM * min(about["steps"], self.steps)
        if has_decayed and self.steps not in (about["steps"], MAX_STEPS):
            raise ValueError(
                f"{path} is of a run with {about['steps']} steps whose learning rate has begun to fall; "
                f"it cannot continue as one with {self.steps}: give the same --steps"
            )
        self.step, self.seconds, self.history = about["step"], about["seconds"], about["history"]
        self.steps = about["steps"] if self.steps == MAX_STEPS else self.steps
        self.masters.experts_on_grid = self.step > GRID_FROM * self.steps
        self.masters.load_state(state)
        for k, router in enumerate(self.balance.routers):
            router.e_score_correction_bias.copy_(state[f"bias.{k}"])


def run(training: Training, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Learns until the last step; logs to stderr, saves to args.out."""
    packer, state_path = Packer(tokenizer), args.out / "state.safetensors"
    questions = list(exam(CURVE_QUESTIONS))
    packed_questions = packer.pack(questions)
    batches = LessonBatches(packer, BatchShape.of(args.lessons), seed=SEED, num_batches=MAX_STEPS)
    loader = torch.utils.data.DataLoader(
        batches,
        batch_size=None,
        sampler=range(training.step, MAX_STEPS),
        num_workers=args.workers,
        prefetch_factor=4 if args.workers else None,
        pin_memory=training.device.type == "cuda",
    )
    clock = time.monotonic() - training.seconds
    first_step, paced, waited = training.step, training.seconds, 0.0
    source = iter(loader)
    while training.step < training.steps:
        asked = time.monotonic()
        batch = next(source)
        waited += time.monotonic() - asked
        training.learn(batch)
        training.seconds = time.monotonic() - clock
        if training.step % PACE_EVERY == 0 and args.steps is None:
            pace, paced = (training.seconds - paced) / PACE_EVERY, training.seconds
            # Up to there the number of steps changes nothing. The first pace has the workers' start in it.
            if training.step > max(first_step + PACE_EVERY, 0) and training.step < DECAY_FROM * training.steps:
                left = int((60 * args.minutes - training.seconds) / pace)
                training.steps = min(MAX_STEPS, max(training.step + left, int(training.step / DECAY_FROM)))
        is_last = training.step == training.steps
        if training.step % LOG_EVERY == 0 or is_last:
            training.log((training.step - 1) % LOG_EVERY + 1)
        if training.step % EVALUATE_EVERY == 0 or is_last:
            accuracy = training.evaluate(questions, packed_questions)
            exact = "  ".join(f"{kind} {100 * value:.1f}" for kind, value in accuracy.items())
            loss = training.history["loss"][-1]
            say(
                f"step {training.step}/{training.steps}  loss {loss:.4f}  {exact}  {training.seconds:.0f} s, "
                f"{waited:.0f} s of them waiting for lessons"
            )
        if training.step % SAVE_EVERY == 0 or is_last:
            training.save(state_path)


def finish(training: Training, tokenizer: Tokenizer, args: argparse.Namespace) -> None:
    """Writes both checkpoints, asks each the held-out questions, and writes the result."""
    training.model.eval()
    save_checkpoint(training.model.to(torch.bfloat16), args.out)
    quantize_checkpoint(args.out, args.out / "int4")
    dtype = next(training.model.parameters()).dtype
    examined = evaluate.examine(args.out, tokenizer, args.questions, str(training.device), dtype)
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python -m kimi_k25.tiny.train "
        + (f"--steps {args.steps}" if args.steps else f"--minutes {args.minutes:g}"),
        "repeat": f"python -m kimi_k25.tiny.train --steps {training.steps} --lessons {args.lessons}",
        "commit": args.commit or _commit(),
        "machine": _machine(training.device),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "parameters": sum(p.numel() for p in training.model.parameters()),
        "steps": training.steps,
        "lessons_a_step": args.lessons,
        "training_seconds": round(training.seconds, 1),
        **examined,
        "last_load": training.history["load"][-1],
        "history": training.history,
    }
    (args.out / "tiny_training.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib"):
        plots.plot_training(training.history, args.out / "tiny_training.png")
        plots.plot_router(training.history, args.out / "tiny_router.png")
    else:
        say("no plots: matplotlib is not installed")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _commit() -> str:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def _machine(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, {os.cpu_count()} CPU cores"
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} CPU cores"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m kimi_k25.tiny.train", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=architecture.FOLDER, help="folder to write (this package's)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="so many; a result's number repeats its run")
    parser.add_argument("--lessons", type=int, default=LESSONS_A_STEP, help="conversations a step, at most")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 1) - 1), help="that draw pictures")
    parser.add_argument("--questions", type=int, default=2000, help="held-out questions asked at the end")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="without --steps: about how long it may learn")
    parser.add_argument("--commit", default="", help="for the result, where there is no git")
    args = parser.parse_args(argv)
    evaluate.require_digits(parser)
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    architecture.write_side_files(args.out)
    # cuDNN's attention would be planned anew for every batch: each has its own shape.
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        training = Training(torch.device(args.device), BatchShape.of(args.lessons), steps=args.steps or MAX_STEPS)
        tokenizer = load_tokenizer(args.out)
        if (args.out / "state.safetensors").exists():
            training.load(args.out / "state.safetensors")
            say(f"continuing from step {training.step}")
        run(training, tokenizer, args)
        finish(training, tokenizer, args)
    (args.out / "state.safetensors").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
