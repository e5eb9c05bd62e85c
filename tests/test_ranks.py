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

from kimi_k25.generate import main
from kimi_k25.ranks import Ranks

REPOSITORY = Path(__file__).parent.parent
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TEXT_PROMPT = "What is the answer? 你好世界"

# What each rank runs: generate, after a line that may differ from rank to rank.
SCRIPT = """
import os, signal, sys, time
from datetime import timedelta
import torch
from kimi_k25 import engine, generate, ranks
rank = int(os.environ["RANK"])
open(f"{{os.environ['PIDS']}}/{{os.getpid()}}", "w").close()
args = sys.argv[1:]
{setup}
sys.exit(generate.main(args))
"""


def start(tmp_path, *args, setup="", size=2, **options):
    """torchrun with `size` ranks that run SCRIPT."""
    (tmp_path / "script.py").write_text(SCRIPT.format(setup=setup))
    (tmp_path / "pids").mkdir(exist_ok=True)
    env = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PIDS": str(tmp_path / "pids")}
    command = [*TORCHRUN, "--nproc-per-node", str(size), str(tmp_path / "script.py"), *map(str, args)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, env=env, cwd=tmp_path, text=True, **pipes, **options)


def run(tmp_path, *args, **options):
    """stdout, stderr and the exit code, once all ranks are gone."""
    process = start(tmp_path, *args, **options)
    out, err = process.communicate(TEXT_PROMPT, timeout=60)
    assert running(tmp_path) == []
    return out, err, process.returncode


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
ranks.STEP_TIMEOUT = timedelta(seconds=2)
"""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise torch.OutOfMemoryError('CUDA out of memory')", "kimi_k25.generate: error: rank 1: CUDA out of memory"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"rank +: 1 .*\n +exitcode +: -9"),  # torchrun says it.
        ("time.sleep(1000)", "kimi_k25.generate: error: rank 0: .*Timed out"),
    ],
)
def test_a_fault_of_one_rank_in_a_step_ends_all(tmp_path, fault, message):
    started = time.monotonic()

    _, err, code = run(tmp_path, *GREEDY_TEXT, setup=IN_STEP_3.format(fault=fault))

    assert code == 1 and time.monotonic() - started < 30
    assert len(errors(err)) <= 1 and re.search(message, err)


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


NO_COLLECTIVE = "torch.distributed.init_process_group = lambda *args, **kwargs: sys.exit('too late')\n"


def test_ranks_of_two_checkpoints_say_so_before_any_collective(tmp_path):
    differs = "if rank == 1: args[0] = args[0].replace('bf16', 'int4')"

    _, err, code = run(tmp_path, *GREEDY_TEXT, setup=NO_COLLECTIVE + differs)

    assert code == 1 and len(errors(err)) == 1
    assert re.match(r"rank [01]: ranks disagree on checkpoint: \w{12} on 0; \w{12} on 1. Start", errors(err)[0])


def meet(rank, size, port, facts):
    environment = {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in environment.items()}
    ranks = Ranks()
    try:
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
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    facts = [{"seed": 0, field: value} for value in values]

    answers = run_ranks(3, meet, 3, port, facts)

    assert answers == [message and [f"ranks disagree on {message}. Start all of them alike"]] * 3


def test_ctrl_c_leaves_no_process_behind(tmp_path):
    process = start(tmp_path, golden.FOLDERS["base"], "--chat")
    try:
        while not re.search("graphs: eager", process.stderr.readline()):
            assert process.poll() is None

        process.send_signal(signal.SIGINT)

        process.communicate(timeout=60)  # torchrun itself gives its ranks 30 s before it kills them.
        assert process.returncode != 0 and running(tmp_path) == []
    finally:
        process.kill()
        process.communicate()


def test_one_rank_needs_no_torchrun_and_refuses_more(capsys):
    assert main(["-p", "Hello", "--tp", "2"]) == 2
    assert main([str(golden.FOLDERS["base"]), "-p", "Hello", "--ep", "2"]) == 2

    err = capsys.readouterr().err
    assert "--tp is 2 but there are 1 ranks; start as many: torchrun --nproc-per-node 2 -m kimi_k25.generate" in err
    assert "--ep 2 does not divide 1 ranks; numbers of ranks that divide this model: 1, 2, 4" in err
