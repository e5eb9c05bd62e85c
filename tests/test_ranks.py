"""Runs under torchrun: one answer, the first rank's, or one error, that of the rank whose fault it is; and all end."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import golden
import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks
from safetensors.torch import load_file, save_file

from kimi_k25 import generate
from kimi_k25.checkpoint import fingerprint
from kimi_k25.engine import Engine
from kimi_k25.generate import main
from kimi_k25.rank_watch import ANSWER_SECONDS, GRACE_SECONDS, POLL_SECONDS, TIMEOUTS
from kimi_k25.ranks import Ranks

REPOSITORY = Path(__file__).parent.parent
TEXT_PROMPT = "What is the answer? 你好世界"

# What each rank runs: generate, after a line that may differ from rank to rank.
SCRIPT = """
import os, signal, sys, time
import torch, torch.distributed as dist
from kimi_k25 import checkpoint, engine, generate, rank_watch
from kimi_k25.ranks import Ranks
rank = int(os.environ["RANK"])
with open(f"{os.environ['PIDS']}/{os.getpid()}", "w") as f:
    f.write(str(rank))
args = sys.argv[1:]
"""
IMPATIENT = "rank_watch.GRACE_SECONDS = 0.5"
GENERATE = "sys.exit(generate.main(args))"


def launch(tmp_path, command, *args, setup="", last=GENERATE, **environment):
    """A process that runs SCRIPT."""
    (tmp_path / "script.py").write_text(f"{SCRIPT}\n{setup}\n{last}\n")
    (tmp_path / "pids").mkdir(exist_ok=True)
    paths = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PIDS": str(tmp_path / "pids")}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(
        [*command, str(tmp_path / "script.py"), *map(str, args)], env=os.environ | paths | environment, cwd=tmp_path,
        text=True, **pipes,
    )  # fmt: skip


def start(tmp_path, *args, options=("--standalone", "--nproc-per-node", "2"), **script):
    """torchrun with its ranks."""
    return launch(tmp_path, [sys.executable, "-m", "torch.distributed.run", *options], *args, **script)


def run(tmp_path, *args, **script):
    """stdout, stderr and the exit code, once all ranks are gone."""
    process = start(tmp_path, *args, **script)
    out, err = process.communicate(TEXT_PROMPT, timeout=60)
    assert running(tmp_path) == []
    return out, err, process.returncode


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def start_by_hand(tmp_path, last):
    """Two ranks without torchrun, which end no sooner than they do so themselves."""
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [launch(tmp_path, [sys.executable], last=last, RANK=str(rank), **address) for rank in range(2)]


def errors(err):
    return re.findall(r"kimi_k25\.generate: error: (.*)", err)


def running(tmp_path):
    return [p.name for p in (tmp_path / "pids").iterdir() if Path(f"/proc/{p.name}").exists()]


GREEDY_TEXT = [golden.FOLDERS["base"], "-p", "-", "-n", "16", "--temperature", "0"]


def test_the_first_rank_alone_reads_stdin_and_prints_the_golden_answer(tmp_path):
    out, err, code = run(tmp_path, *GREEDY_TEXT, "--json", "--tp", "2", "--ep", "2")

    assert code == 0, err
    assert json.loads(out)["token_ids"] == golden.GOLDENS["greedy"]["base.fp32.text"]["ids"]
    assert len(re.findall("17 tokens in, 16 out", err)) == len(re.findall("graphs: eager", err)) == 1


IN_STEP_3 = """
steps, plain = [], engine.Engine._sample
def sample(*args):
    steps.append(1)
    if rank == 1 and len(steps) == 3:
        {fault}
    return plain(*args)
engine.Engine._sample = sample
rank_watch.TIMEOUTS["a step"] = 3
dist.distributed_c10d._set_pg_timeout = lambda timeout: None
"""
STUCK = r"rank 1: nothing moved for 3 s: a step, at engine.py:\d+ \(generate\); rank 0: a step, at parallel.py:\d+ \(al"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise torch.OutOfMemoryError('CUDA out of memory')", "kimi_k25.generate: error: rank 1: CUDA out of memory"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"rank +: 1 .*\n +exitcode +: -9"),  # torchrun says it.
        ("time.sleep(1000)", STUCK),  # The other rank is in gloo's C++, and would be for half an hour.
    ],
)
def test_a_fault_of_one_rank_in_a_step_ends_all(tmp_path, fault, message):
    started = time.monotonic()

    _, err, code = run(tmp_path, *GREEDY_TEXT, setup=IN_STEP_3.format(fault=fault))

    assert code == 1 and time.monotonic() - started < 30
    assert len(errors(err)) <= 1 and re.search(message, err), err


def test_a_rank_that_no_longer_runs_is_named_by_the_others_when_its_phase_is_over(tmp_path):
    setup = "rank_watch.TIMEOUTS['loading'], rank_watch.ANSWER_SECONDS = 2, 1\nranks = Ranks()\nranks.plan('cpu')\n"
    stop = "ranks.enter('loading')\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\nranks.agree({})"
    processes = start_by_hand(tmp_path, setup + stop)
    try:
        out, _ = processes[0].communicate(timeout=60)

        assert processes[0].returncode == 1
        place = r"its place is not known, it does not answer; rank 0: loading, at ranks.py:\d+ \(_say_and_wait\)"
        assert re.fullmatch(f"rank 1: nothing moved for 2 s: {place}\n", out)
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_every_phase_has_its_limit_and_a_step_the_shortest():
    assert TIMEOUTS["a step"] + POLL_SECONDS + ANSWER_SECONDS + GRACE_SECONDS < 30
    assert all(limit >= TIMEOUTS["a step"] for limit in TIMEOUTS.values())
    assert TIMEOUTS["loading"] > TIMEOUTS["compiling kernels"] > TIMEOUTS["capturing graphs"] > 60


def test_a_shard_that_one_rank_finds_corrupt_ends_all(tmp_path):
    shutil.copytree(golden.FOLDERS["int4"], tmp_path / "c")
    name = "language_model.model.layers.2.mlp.experts.7.up_proj.weight_shape"
    for path in (tmp_path / "c").glob("*.safetensors"):
        tensors = load_file(path)
        if name in tensors:  # With two groups of experts, the second one's.
            tensors[name] = torch.tensor([96, 65], dtype=torch.int32)
            save_file(tensors, path, metadata={"format": "pt"})

    out, err, code = run(tmp_path, tmp_path / "c", "-p", "Hello", "--ep", "2")

    assert code == 1 and out == ""
    assert len(errors(err)) == 1 and errors(err)[0].startswith("rank 1: ") and f"{name} is [96, 65]" in err


NO_COLLECTIVE = "dist.init_process_group = lambda *args, **kwargs: sys.exit('too late')\n"


def test_ranks_of_two_checkpoints_say_so_before_any_collective(tmp_path):
    differs = "if rank == 1: args[0] = args[0].replace('bf16', 'int4')"

    _, err, code = run(tmp_path, *GREEDY_TEXT, setup=NO_COLLECTIVE + differs)

    assert code == 1 and len(errors(err)) == 1
    assert re.match(r"rank [01]: ranks disagree on checkpoint: \w{12} on 0; \w{12} on 1. Start", errors(err)[0])


class Recorder:
    """Ranks as far as _meet calls them."""

    rank, size, local_rank = 0, 2, 0

    def __init__(self, say):
        self.facts = {}

    def agree(self, facts):
        self.facts |= facts

    def plan(self, device, *, ep):
        return None


def compared(monkeypatch, *argv):
    monkeypatch.setattr("kimi_k25.ranks.Ranks", Recorder)
    recorder, _ = generate._meet(generate.build_parser().parse_args([*argv, "-p", "x"]), generate._Terminal())
    return {name: str(value) for name, value in recorder.facts.items()}


@pytest.mark.parametrize(
    ("argv", "differing"),
    [
        ((str(golden.FOLDERS["int4"]),), {"checkpoint"}),
        (("--ep", "2"), {"ep", "checkpoint"}),
        (("--max-seq-len", "1000"), {"max_seq_len", "the sizes of graphs", "checkpoint"}),
        (("--device", "cpu", "--backend", "torch"), {"backend", "checkpoint"}),
    ],
)
def test_ranks_compare_checkpoint_plan_and_sizes(argv, differing, monkeypatch):
    one, other = compared(monkeypatch, str(golden.FOLDERS["base"])), compared(monkeypatch, *argv)

    assert {name for name in one if one[name] != other[name]} == differing
    assert "1984, 2048" not in one["the sizes of graphs"] and "2048)" in one["the sizes of graphs"]


def test_a_checkpoint_trained_further_is_another_and_a_copy_is_not(tmp_path):
    for name in ("copy", "trained"):
        shutil.copytree(golden.FOLDERS["base"], tmp_path / name)
    last = max((tmp_path / "trained").glob("*.safetensors"))
    last.write_bytes(last.read_bytes()[:-2] + b"\0\1")

    assert fingerprint(tmp_path / "copy") == fingerprint(golden.FOLDERS["base"]) != fingerprint(tmp_path / "trained")
    assert fingerprint(tmp_path / "none") == "unreadable"


def meet(rank, size, port, facts):
    environment = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in environment.items()}
    ranks = Ranks()
    try:
        ranks.agree({})
        return ranks.agree(facts[rank])
    except ValueError as e:
        return [str(e)]
    finally:
        dist.barrier()  # The store lives in the first rank.


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("ep", [1, 1, 1], None),
        ("ep", [1, 3, 1], "ep: 1 on 0, 2; 3 on 1"),
        ("max_seq_len", [16384, 99, 98], "max_seq_len: 16384 on 0; 99 on 1; 98 on 2"),
    ],
)
def test_every_rank_learns_who_disagrees_on_what(field, values, message):
    facts = [{"seed": 0, field: value} for value in values]

    answers = run_ranks(3, meet, 3, free_port(), facts)

    assert answers == [message and [f"ranks disagree on {message}. Start all of them alike"]] * 3


def test_ranks_compare_the_content_of_pictures(tmp_path):
    picture = shutil.copy(REPOSITORY / "kimi_k25/tiny/demo.png", tmp_path / "copy.png")
    ranks = [Recorder(print) for _ in range(3)]

    generate._agree_on_files(ranks[0], [REPOSITORY / "kimi_k25/tiny/demo.png"])
    generate._agree_on_files(ranks[1], [picture])
    generate._agree_on_files(ranks[2], [tmp_path / "none.png"])

    assert ranks[0].facts == ranks[1].facts != ranks[2].facts == {"the content of file 1": "unreadable"}


def test_kernels_are_compiled_by_prompts_of_all_sizes_and_their_decode_steps():
    engine, sizes = Engine(golden.new_model("base.fp32"), prefill_chunk=8), []
    step = engine.decoder
    engine.decoder = lambda embeds, batch: (sizes.append(embeds.shape[0]), step(embeds, batch))[1]

    generate._compile_kernels(engine)

    assert sizes == [1, 1, 2, 1, 4, 1, 8, 1]


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 1), (signal.SIGKILL, -9)])  # torchrun's own codes.
def test_torchrun_leaves_no_process_behind(tmp_path, signum, code):
    process = start(tmp_path, golden.FOLDERS["base"], "--chat", setup=IMPATIENT)
    try:
        while not re.search("graphs: eager", process.stderr.readline()):
            assert process.poll() is None
        started = time.monotonic()

        process.send_signal(signum)  # Standard input stays open: the first rank would go on reading.

        assert process.wait(60) == code
        while running(tmp_path) and time.monotonic() - started < 30:
            time.sleep(0.1)
        assert running(tmp_path) == []
    finally:
        process.kill()
        process.communicate()


IN_A_COLLECTIVE = """
ranks = Ranks()
ranks.plan('cpu')
try:
    print('waits', flush=True)
    dist.recv(torch.empty(1), 1 - rank)
except (RuntimeError, KeyboardInterrupt):  # The other one was first.
    time.sleep(60)
"""


def test_ctrl_c_ends_ranks_that_wait_in_a_collective(tmp_path):
    processes = start_by_hand(tmp_path, IN_A_COLLECTIVE)
    try:
        assert [process.stdout.readline() for process in processes] == ["waits\n"] * 2
        time.sleep(0.5)
        for process in processes:
            process.send_signal(signal.SIGINT)

        assert [process.wait(30) for process in processes] == [130, 130]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def start_machines(tmp_path, *args, setup=""):
    """Two machines of one rank each, as torchrun sees it."""
    port, processes = free_port(), []
    for node in range(2):
        options = ("--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--master-port", port)
        processes.append(start(tmp_path, *args, setup=setup, options=("--master-addr", "127.0.0.1", *options)))
    return processes


def test_two_machines_answer_as_one_rank_and_one_ends_when_the_others_rank_dies(tmp_path, capsys):
    asked = [golden.FOLDERS["base"], "-p", "Hello", "-n", "8", "--temperature", "0", "--no-thinking"]
    main([str(arg) for arg in asked])
    answer = capsys.readouterr().out
    first, second = processes = start_machines(tmp_path, *asked, "--chat", setup=IMPATIENT)
    try:
        assert answer and first.stdout.read(len(answer)) == answer
        (victim,) = (int(path.name) for path in (tmp_path / "pids").iterdir() if path.read_text() == "1")
        started = time.monotonic()

        os.kill(victim, signal.SIGKILL)  # The first rank waits for what is typed, its standard input is open.

        out, _ = second.communicate(timeout=60)
        first.wait(60)
        assert time.monotonic() - started < 30 and running(tmp_path) == []
        assert (first.returncode, second.returncode, out) == (1, 1, "")
        assert errors(first.stderr.read()) == ["rank 1: is gone; its process ended without a word"]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_one_rank_needs_no_torchrun_and_refuses_more(capsys):
    assert main(["-p", "Hello", "--tp", "2"]) == 2
    assert main([str(golden.FOLDERS["base"]), "-p", "Hello", "--ep", "2"]) == 2

    err = capsys.readouterr().err
    assert "--tp is 2 but there is 1 rank; start as many: torchrun --nproc-per-node 2 -m kimi_k25.generate" in err
    assert "..., or leave --tp out" in err
    assert "--ep 2 does not divide 1 rank; numbers of ranks that divide this model: 1, 2, 4" in err
