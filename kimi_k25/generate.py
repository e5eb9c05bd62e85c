"""`python -m kimi_k25.generate`: a prompt and pictures in, an answer on stdout. Knows no model internals.

stdout carries the answer alone; reasoning, progress and statistics go to stderr. Nothing heavy is imported before
the arguments are parsed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import io
import json
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aliasmix import __version__

if TYPE_CHECKING:
    from PIL import Image

    from .engine import Engine, SamplingParams
    from .graphs import GraphPlan
    from .layers.parallel import ParallelPlan
    from .model import KimiK25ForConditionalGeneration
    from .processor import Processor
    from .ranks import Ranks
    from .streaming import GenerationStats, GenerationStep, Video

PROG = "kimi_k25.generate"
EMBEDDED_DEFAULT = Path(__file__).parent / "tiny"
RAN_AND_FAILED, UNUSABLE_INPUT, INTERRUPTED = 1, 2, 130
MAX_SEQ_LEN = 16384  # By default, in and out.
LONG_PROMPT = 2000  # Tokens; a CPU reads for seconds or minutes from here on.
NOTHING_ASKED = "nothing is asked; give a prompt with -p TEXT, or --chat"
# By the names that are imported: torch and what the extra `kimi` installs.
REQUIRED = ("torch", "safetensors", "tiktoken", "jinja2", "PIL", "numpy", "tqdm")
PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")
MAX_STDIN_CHARS = 2**24  # a full context of the published model, 64 characters a token


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROG}", description="Answer a prompt about pictures with Kimi-K2.5.", allow_abbrev=False
    )
    add = parser.add_argument
    add("checkpoint", nargs="?", type=Path, help="checkpoint folder in the original layout; default: the embedded one")
    add("-p", "--prompt", metavar="TEXT", help="what to ask; - reads it from stdin")
    add("-i", "--image", metavar="FILE", type=Path, action="append", default=[], help="a picture; may be repeated")
    add("--video", metavar="FILE", type=Path, action="append", default=[], help="a video (needs PyAV); may be repeated")
    add("--chat", action="store_true", help="go on asking; /image FILE adds a picture, /exit ends")
    add("--system", metavar="TEXT", help="system message")
    add("--thinking", action=argparse.BooleanOptionalAction, default=True, help="reason before the answer")
    add("-n", "--max-new-tokens", metavar="N", type=int, default=512, help="most tokens to generate (default 512)")
    add("--temperature", metavar="T", type=float, help="0: the likeliest token (default 1.0; 0.6 without thinking)")
    add("--top-p", metavar="P", type=float, default=0.95, help="draw among tokens of this total probability (0.95)")
    add("--seed", metavar="S", type=int, default=0, help="same seed, same answer (default 0)")
    add("--device", metavar="D", help="cpu, cuda, cuda:1 (default: cuda if there is one)")
    add("--dtype", choices=["float32", "bfloat16"], help="default: float32 on the CPU, the checkpoint's on a GPU")
    backends = ["auto", "torch", "flashinfer"]
    add("--backend", choices=backends, default="auto", help="the decoder's kernels (default: the fastest that runs)")
    graphs = ["auto", "off", "strict"]
    add("--graphs", choices=graphs, default="auto", help="CUDA graphs: on with a GPU; strict: end where a step cannot")
    add("--max-seq-len", metavar="N", type=int, help="with graphs: tokens in and out (default 16384)")
    add("--tp", metavar="N", type=int, help="ranks that share the model (default: all that torchrun started)")
    add("--ep", metavar="M", type=int, default=1, help="divide experts by number over M groups of ranks (default 1)")
    add("--json", action="store_true", help="print one object: text, reasoning, token_ids, finish_reason, timings")
    add("--debug", action="store_true", help="show the traceback of an error")
    add("--version", action="version", version=f"{PROG} of aliasmix {__version__}", help="print it and end")
    return parser


class _Terminal:
    """stderr, dim where it is a terminal. An answer does not fail because nobody can be told about it.

    Attributes:
        ranks: Of several, the first speaks for all, and the first that fails for itself.
    """

    def __init__(self) -> None:
        self.is_tty = sys.stderr is not None and sys.stderr.isatty()
        self.ranks: Ranks | None = None

    def say(self, line: str) -> None:
        if self.ranks is None or self.ranks.rank == 0:
            self._write(f"{PROG}: {line}\n")

    def dim(self, text: str) -> None:
        if self.ranks is None or self.ranks.rank == 0:
            self._write(f"\x1b[2m{text}\x1b[0m" if self.is_tty and text else text)

    def fail(self, reason: str, error: BaseException) -> None:
        if self.ranks is None or self.ranks.size == 1:
            self.end(reason)
        elif self.ranks.claim_failure(error):
            self.end(f"rank {self.ranks.rank}: {reason}")

    def end(self, reason: str) -> None:
        self._write(f"{PROG}: error: {reason}\n")

    def _write(self, text: str) -> None:
        if sys.stderr is not None:  # print() would take None for stdout
            with suppress(OSError):
                print(text, end="", file=sys.stderr, flush=True)


@contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C ends the process at once: while modules are imported, some swallow KeyboardInterrupt and work goes on."""
    if threading.current_thread() is not threading.main_thread():  # The only one that may set handlers.
        yield
        return
    previous = signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def _write_answer(text: str) -> None:
    try:
        print(text, end="", flush=True)
    except BrokenPipeError:
        raise
    except OSError as e:
        raise OSError(f"stdout cannot be written: {e.strerror}") from e


def _read_stdin(read: Callable[[int], str]) -> str:
    if sys.stdin is None:
        raise ValueError("stdin is closed; a prompt is expected there")
    try:
        text = read(MAX_STDIN_CHARS + 1)
    except UnicodeDecodeError as e:
        raise ValueError(f"stdin is not {e.encoding} text: {e.reason} at byte {e.start}") from None
    if len(text) > MAX_STDIN_CHARS:
        raise ValueError(f"stdin has more than {MAX_STDIN_CHARS} characters; no prompt is that long")
    return _unicode(text, "stdin")


def _unicode(text: str, source: str) -> str:
    """Returns `text`; refuses the surrogates that Python makes of arguments and input that are not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise ValueError(f"{source} is not UTF-8 text (character {e.start})") from None
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # an old terminal shows \u597d, and the answer goes on
    terminal = _Terminal()
    stage = [UNUSABLE_INPUT]  # What an error means now: until generation starts, it is the input's.
    code = _exit_code(args, terminal, stage)
    if terminal.ranks is not None and terminal.ranks.size > 1:
        os._exit(code)  # The interpreter's own end would wait for collectives that never come.
    return code


def _exit_code(args: argparse.Namespace, terminal: _Terminal, stage: list[int]) -> int:
    """Runs the command; says why it failed, if it did."""
    try:
        return _run(args, terminal, stage)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError as e:  # The reader of stdout has gone, as `| head` does; no more can be said to it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if terminal.ranks is not None:
            terminal.ranks.claim_failure(e)  # Nor need others say that this rank is gone.
        return RAN_AND_FAILED
    except Exception as e:
        if args.debug:
            traceback.print_exc()
        reason = " ".join(str(e).split())
        if isinstance(e, ModuleNotFoundError) and e.name in REQUIRED:
            reason = (
                f"{e.name} is not installed for {sys.executable}; in the repository's folder, "
                "`pip install -e '.[kimi]'`, or run .venv/bin/python, which `make demo` sets up"
            )
        is_foreseen = reason and isinstance(e, ValueError | OSError | RuntimeError | ImportError)
        terminal.fail(reason if is_foreseen else f"{type(e).__name__}: {reason}", e)
        return stage[0]


def _run(args: argparse.Namespace, terminal: _Terminal, stage: list[int]) -> int:
    if not (args.prompt or "").strip() and not args.chat:
        raise ValueError(NOTHING_ASKED)
    if args.json and args.chat:
        raise ValueError("--json prints one answer; it does not go with --chat")
    if args.max_seq_len is not None and args.max_seq_len < 1:
        raise ValueError(f"--max-seq-len is {args.max_seq_len}; expected at least 1")
    if sys.stdout is None:
        raise ValueError("stdout is closed; the answer goes there")
    for option, text in (("--prompt", args.prompt), ("--system", args.system)):
        _unicode(text or "", option)
    if args.temperature is None:
        args.temperature = 1.0 if args.thinking else 0.6  # What the model's makers recommend.

    with _ended_by_ctrl_c():
        from .engine import SamplingParams
        from .video import open_video

        ranks, plan = _meet(args, terminal)
        prompt = args.prompt
        if prompt == "-":
            prompt = ranks.share(lambda: _read_stdin(lambda size: sys.stdin.read(size)).strip())
            if not prompt and not args.chat:
                raise ValueError(NOTHING_ASKED)
        sampling = SamplingParams(
            max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p, seed=args.seed
        )
        _agree_on_files(ranks, [*args.image, *args.video])
        images = [_open_picture(path) for path in args.image]
        videos = [open_video(_local(path)) for path in args.video]
        model, processor = _load(args, ranks, plan, terminal)
        engine = _engine(model, args, ranks, terminal)
        chat = _Chat(engine, processor, sampling, args, ranks, terminal)
        ranks.ready()
    if args.system:
        chat.messages.append({"role": "system", "content": args.system})
    code = 0
    if prompt and prompt.strip():
        stage[0] = RAN_AND_FAILED
        code = chat.ask(prompt, images, videos)
        images, videos = [], []
    if args.chat and chat.goes_on_after(code):
        code = _converse(chat, images, videos, stage)
    ranks.leave()
    return code


def _converse(chat: _Chat, images: list[Image.Image], videos: Sequence[Video], stage: list[int]) -> int:
    """Asks what is typed until /exit or the end of stdin; returns the exit code."""
    missing: Path | None = None  # A picture that the next question is likely about.
    while True:
        stage[0] = UNUSABLE_INPUT
        line = chat.ranks.share(lambda: _read_line(chat.terminal))
        if line is None or line.strip() == "/exit":
            return 0
        command, *rest = line.split(maxsplit=1) or [""]
        if command == "/image" and rest:
            path = Path(rest[0].strip())
            _agree_on_files(chat.ranks, [path])
            try:
                images.append(_open_picture(path))
                missing = None
            except (ValueError, OSError) as e:
                chat.terminal.say(f"error: {e}")
                missing = path
        elif re.fullmatch(r"/\w*", command):  # A question may begin with a path.
            chat.terminal.say("commands: /image FILE, /exit")
        elif command and missing:
            chat.terminal.say(f"not asked: the picture {missing} is not there. Give another, or ask again without it")
            missing = None
        elif command:
            stage[0] = RAN_AND_FAILED
            code = chat.ask(line, images, videos)
            if not chat.goes_on_after(code):
                return code
            images, videos = [], []


def _local(path: Path) -> Path:
    if re.match("https?:/", str(path)):
        raise ValueError(f"{path.name}: URLs are not fetched; save it first and give the file")
    return path


def _open_picture(path: Path) -> Image.Image:
    from .image_processor import open_image

    return open_image(_local(path))


def _meet(args: argparse.Namespace, terminal: _Terminal) -> tuple[Ranks, ParallelPlan]:
    """The ranks that torchrun started, agreed on all that a step depends on. Only the first one's stdout is heard."""
    import torch

    from .checkpoint import fingerprint
    from .ranks import Ranks

    terminal.ranks = ranks = Ranks(terminal.end)
    if args.tp not in (None, ranks.size):
        raise ValueError(
            f"--tp is {args.tp} but there {'is' if ranks.size == 1 else 'are'} {_counted(ranks.size, 'rank')}; "
            f"start as many: torchrun --nproc-per-node {args.tp} -m {PROG} ..., or leave --tp out"
        )
    if args.device is None:
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if ranks.size == 1:
        return ranks, ranks.plan(args.device, ep=args.ep)
    if ranks.rank:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    per_rank = ("checkpoint", "image", "video", "json", "debug")  # Paths may differ from machine to machine.
    facts = {name: value for name, value in vars(args).items() if name not in per_rank}
    facts["checkpoint"] = fingerprint(args.checkpoint or EMBEDDED_DEFAULT)
    facts["the sizes of graphs"] = _graph_plan(args)
    ranks.agree({**facts, "torch's version": torch.__version__})
    if args.device.startswith("cuda"):
        if args.device != "cuda":
            raise ValueError(f"--device is {args.device}; of several ranks each takes its own: --device cuda")
        if ranks.local_rank >= (count := torch.cuda.device_count()):
            raise ValueError(f"no CUDA device is left for it, torch sees {count}; start at most as many ranks here")
        args.device = f"cuda:{ranks.local_rank}"
        torch.cuda.set_device(args.device)
    return ranks, ranks.plan(args.device, ep=args.ep)


def _agree_on_files(ranks: Ranks, paths: Sequence[Path]) -> None:
    """Each rank opens its own; one that alone cannot would leave the others waiting for its part."""
    if ranks.size == 1:
        return
    digests = {}
    for number, path in enumerate(paths, 1):
        try:
            with open(path, "rb") as f:
                digests[f"the content of file {number}"] = hashlib.file_digest(f, "sha256").hexdigest()[:12]
        except (ValueError, OSError):
            digests[f"the content of file {number}"] = "unreadable"
    ranks.agree(digests)


def _load(
    args: argparse.Namespace, ranks: Ranks, plan: ParallelPlan, terminal: _Terminal
) -> tuple[KimiK25ForConditionalGeneration, Processor]:
    import torch

    from .backend import use_backend
    from .checkpoint import load_model
    from .processor import load_processor

    ranks.enter("loading")
    checkpoint = args.checkpoint
    if checkpoint is None:
        checkpoint = EMBEDDED_DEFAULT
        terminal.say("no checkpoint given; using the embedded default, a tiny model that knows little of the world")
    elif not checkpoint.is_dir() and checkpoint.suffix.lower() in PICTURES:
        raise ValueError(f"{checkpoint} is no checkpoint, which is a local folder; did you mean -i {checkpoint}?")
    if args.backend == "flashinfer" and args.device.startswith("cpu"):
        raise ValueError("--backend flashinfer needs a CUDA device; give --device cuda, or leave --backend out")
    if args.backend == "flashinfer" and args.dtype == "float32":
        raise ValueError("--backend flashinfer computes in bfloat16; leave --dtype out")
    dtype = getattr(torch, args.dtype) if args.dtype else None
    processor = load_processor(checkpoint)
    model = load_model(checkpoint, args.device, dtype, plan)
    line = use_backend(model, args.backend)
    ranks.agree({"the backend": line.split(" (")[0]})
    if args.backend != "torch" and model.language_model.lm_head.weight.is_cuda:
        terminal.say(line)
    return model, processor


def _graph_plan(args: argparse.Namespace) -> GraphPlan:
    """The sizes that --max-seq-len asks for."""
    from .graphs import BucketPolicy, GraphPlan

    return GraphPlan(
        prefill=BucketPolicy.prefill(min(2048, args.max_seq_len or MAX_SEQ_LEN)),
        decode=BucketPolicy.decode(1),
        strict=args.graphs == "strict",
    )


def _engine(
    model: KimiK25ForConditionalGeneration, args: argparse.Namespace, ranks: Ranks, terminal: _Terminal
) -> Engine:
    """An engine with graphs on a GPU; says what was captured, or why nothing was."""
    from .decoder_graphs import graphed_engine
    from .engine import Engine

    is_cuda = model.language_model.lm_head.weight.is_cuda
    if args.graphs == "strict" and not is_cuda:
        raise ValueError("--graphs strict needs a CUDA device; the model is on the CPU")
    engine = Engine(model)
    if ranks.size > 1 and model.language_model.model.fast is not None:
        ranks.enter("compiling kernels")
        _compile_kernels(engine)
    if args.graphs == "off" or not is_cuda:
        terminal.say(f"graphs: eager ({'--graphs off' if args.graphs == 'off' else 'no CUDA graphs on cpu'})")
        if args.max_seq_len is not None:
            terminal.say("--max-seq-len sizes the graphs' cache; without graphs it does nothing")
    else:
        ranks.enter("capturing graphs")
        max_seq_len = min(args.max_seq_len or MAX_SEQ_LEN, model.config.text_config.max_position_embeddings)
        engine, runner = graphed_engine(model, plan=_graph_plan(args), max_seq_len=max_seq_len)
        terminal.say(runner.describe())
    engine.decoder = ranks.watched(engine.decoder)
    return engine


def _compile_kernels(engine: Engine) -> None:
    """Runs prompts of 1, 2, 4 tokens to a whole chunk: what is compiled at its first call must not be in a step."""
    import torch

    from .engine import Prompt, SamplingParams

    sampling = SamplingParams(max_new_tokens=2, temperature=1e6, top_p=1.0)  # Any token; hardly ever one that stops.
    for exponent in range(engine.prefill_chunk.bit_length()):
        for _ in engine.generate([Prompt(input_ids=torch.zeros(2**exponent, dtype=torch.int64))], sampling):
            pass


def _read_line(terminal: _Terminal) -> str | None:
    line = ""
    try:
        terminal.dim("> ")
        line = _read_stdin(lambda size: sys.stdin.readline(size))
    finally:
        if not line:  # The end of stdin, or Ctrl-C: what comes next begins a line.
            terminal.dim("\n")
    return line.rstrip("\n") if line else None


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


class _Chat:
    """Asks, shows the answer, and remembers both."""

    def __init__(
        self,
        engine: Engine,
        processor: Processor,
        sampling: SamplingParams,
        args: argparse.Namespace,
        ranks: Ranks,
        terminal: _Terminal,
    ) -> None:
        self.engine, self.processor, self.sampling, self.ranks = engine, processor, sampling, ranks
        self.as_json, self.thinking, self.terminal = args.json, args.thinking, terminal
        self.goes_on_interrupted = args.chat and ranks.size == 1  # Several would stop at different tokens.
        self.messages: list[dict[str, Any]] = []
        self.images: list[Image.Image] = []
        self.videos: list[Video] = []

    def goes_on_after(self, code: int) -> bool:
        return code == 0 or (code == INTERRUPTED and self.goes_on_interrupted)

    def ask(self, text: str, images: Sequence[Image.Image], videos: Sequence[Video]) -> int:
        """Streams one answer; its exit code."""
        from .streaming import stream_generate

        self.ranks.enter("reading the prompt")
        media = [{"type": "image"} for _ in images] + [{"type": "video"} for _ in videos]
        self.messages.append({"role": "user", "content": [*media, {"type": "text", "text": text}]})
        self.images += images
        self.videos += videos
        answer, reasoning = "", ""
        token_ids: list[int] = []
        last, code = None, 0
        try:
            for step in stream_generate(
                self.engine.model,
                self.processor,
                self.messages,
                images=self.images,
                videos=self.videos,
                thinking=self.thinking,
                sampling=self.sampling,
                engine=self.engine,
                on_prompt=self._announce,
            ):
                last = step
                token_ids.append(step.token_id)
                answer += step.text
                reasoning += step.reasoning
                self.terminal.dim(step.reasoning)
                if step.text and reasoning and answer == step.text:
                    self.terminal.dim("\n")
                if step.text and not self.as_json:
                    _write_answer(step.text)
        except KeyboardInterrupt:
            code = INTERRUPTED
        if reasoning and not answer:
            self.terminal.dim("\n")
        if self.as_json:
            # In ASCII, so that a terminal or file of any encoding takes it.
            _write_answer(json.dumps(_as_object(answer, reasoning, token_ids, last)) + "\n")
        elif answer:
            _write_answer("\n")
        if code == INTERRUPTED and self.goes_on_interrupted:
            self.terminal.say("the answer was stopped; Ctrl-C once more ends")
        if last is not None and last.finish_reason == "length":
            self.terminal.say(self._cut_off(answer, len(token_ids)))
        if last is not None and last.stats is not None:
            self.terminal.say(_summary(last.stats))
        self.messages.append({"role": "assistant", "content": answer})
        return code

    def _announce(self, num_tokens: int) -> None:
        if num_tokens > LONG_PROMPT and not self.engine.model.language_model.lm_head.weight.is_cuda:
            self.terminal.say(f"reading {num_tokens:,} tokens")

    def _cut_off(self, answer: str, num_tokens: int) -> str:
        is_limit = num_tokens == self.sampling.max_new_tokens
        return (
            f"stopped after {_counted(num_tokens, 'token')}{' (-n)' if is_limit else ''}, "
            f"{'within' if answer else 'before'} the answer; "
            + ("a larger -n goes on" if is_limit else "the context is full, or with graphs --max-seq-len")
        )


def _as_object(answer: str, reasoning: str, token_ids: list[int], last: GenerationStep | None) -> dict[str, Any]:
    stats = last.stats if last else None
    return {
        "text": answer,
        "reasoning": reasoning,
        "token_ids": token_ids,
        "finish_reason": last.finish_reason if last and last.finish_reason else "interrupted",
        "prompt_tokens": stats.prompt_tokens if stats else None,
        "timings": dataclasses.asdict(stats) if stats else None,
    }


def _summary(stats: GenerationStats) -> str:
    tpot = "" if stats.tpot_ms is None else f", TPOT {stats.tpot_ms:.1f} ms ({1000 / stats.tpot_ms:.1f} tok/s)"
    return (
        f"{stats.prompt_tokens} tokens in, {stats.generated_tokens} out, TTFT {stats.ttft_ms:.0f} ms{tpot}, "
        f"peak memory {stats.peak_gib:.2f} GiB"
    )


if __name__ == "__main__":
    sys.exit(main())
