"""Ranks as forked processes over gloo, so that they start in a moment and share what the test made before."""

import os
import queue
import threading

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context


def run_ranks(world_size, worker, *args):
    """worker(rank, *args) in forked processes, a gloo rank each; their results by rank."""
    context = get_context("fork")
    results = context.Queue()
    path = f"{os.environ.get('TMPDIR', '/tmp')}/gloo_{os.getpid()}_{threading.get_ident()}_{worker.__name__}"
    processes = [
        context.Process(target=_rank, args=(rank, world_size, path, worker, args, results))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    found = {}
    try:
        for _ in processes:
            rank, result = results.get(timeout=60)
            found[rank] = result
    except queue.Empty:
        raise AssertionError(f"only ranks {sorted(found)} of {world_size} came to an end") from None
    finally:
        for process in processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        if os.path.exists(path):
            os.remove(path)
    for rank, result in sorted(found.items()):
        assert not isinstance(result, str), f"rank {rank}: {result}"
    return [found[rank] for rank in range(world_size)]


def _rank(rank, world_size, path, worker, args, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    try:
        results.put((rank, worker(rank, *args)))
    except BaseException as e:
        results.put((rank, f"{type(e).__name__}: {e}"))
    finally:
        dist.destroy_process_group()
