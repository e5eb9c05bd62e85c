"""AllReduceAddRMSNorm on one rank and on gloo ranks, with a library that stands in for flashinfer.comm.

Paths agree to the order of sums in float32, and to one rounding (2**-7 of the largest value) in bfloat16.
"""

import inspect
import logging

import pytest
import torch
import torch.distributed as dist
from gloo_ranks import run_ranks

from kimi_k25.layers import allreduce_norm
from kimi_k25.layers.allreduce_norm import MIN_WORKSPACE_TOKENS, AllReduceAddRMSNorm, why_not_fused
from kimi_k25.layers.norm import rms_norm

HIDDEN = 64
TOKEN_COUNTS = (1, 2048, 7, 900, 2048, 4096, 3)


class FakeComm:
    """flashinfer.comm as far as it is called, with its checks: capacity, shapes, and a collective creation."""

    def __init__(self, *, fails_on=None):
        self.workspaces, self.fused, self.fails_on = [], [], fails_on

    def create_allreduce_fusion_workspace(self, *, backend, world_size, rank, max_token_num, hidden_dim, dtype, group):
        assert backend == "trtllm", "auto picks NVLink multicast on an H200"
        assert world_size == dist.get_world_size(group) and rank == dist.get_rank(group)
        if rank == self.fails_on:
            raise RuntimeError("out of memory")
        self.workspaces.append(max_token_num)
        return ("workspace", max_token_num, hidden_dim, dtype, group)

    def allreduce_fusion(
        self, *, input, workspace, pattern, residual_in, residual_out, norm_out, rms_gamma, rms_eps, fp32_acc,
        launch_with_pdl, trigger_completion_at_end,
    ):  # fmt: skip
        _, capacity, hidden, dtype, group = workspace
        if input.shape[0] * input.shape[1] > capacity * hidden:
            raise ValueError("workspace too small")
        assert pattern == 1 and trigger_completion_at_end and input.dtype == dtype and input.is_contiguous()
        self.fused.append(input.shape[0])
        total = input.clone()
        dist.all_reduce(total, group=group)
        residual_out.copy_(total + residual_in)
        norm_out.copy_(rms_norm(residual_out, rms_gamma, rms_eps))


def tensors(num_tokens, rank, dtype):
    generator = torch.Generator().manual_seed(7)
    parts = torch.randn(8, num_tokens, HIDDEN, generator=generator).to(dtype)
    residual, weight = torch.randn(num_tokens, HIDDEN, generator=generator), torch.rand(HIDDEN, generator=generator)
    return parts[rank].clone(), residual.to(dtype), weight.to(dtype), parts


def expected(num_tokens, world_size, dtype):
    _, residual, weight, parts = tensors(num_tokens, 0, dtype)
    total = parts[:world_size].float().sum(0).to(dtype) + residual
    return rms_norm(total, weight, 1e-5), total


def close(actual, wanted):
    scale = wanted.abs().max().item() * (2**-6 if wanted.dtype == torch.bfloat16 else 1e-5)
    torch.testing.assert_close(actual.float(), wanted.float(), rtol=0, atol=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_adds_and_norms_and_consumes_its_inputs(dtype):
    layer = AllReduceAddRMSNorm(None)
    x, residual, weight, _ = tensors(5, 0, dtype)
    wanted = expected(5, 1, dtype)

    normed, total = layer(x, residual, weight, 1e-5)
    x.fill_(float("nan"))  # Consumed: on a CPU nothing that was returned lies in it.

    close(normed, wanted[0])
    close(total, wanted[1])


def drive(rank, dtype, announced):
    comm = FakeComm()
    layer = AllReduceAddRMSNorm(dist.group.WORLD, comm=comm)
    layer.reserve(announced)
    layer.prepare(torch.ones(HIDDEN, dtype=dtype))
    layer.reserve(8192)  # Too late: the workspace stays as it is, and larger steps go unfused.
    for num_tokens in TOKEN_COUNTS:
        x, residual, weight, _ = tensors(num_tokens, rank, dtype)
        normed, total = layer(x, residual, weight, 1e-5)
        x.fill_(float("nan"))  # Consumed, and free to be written over.
        wanted = expected(num_tokens, 2, dtype)
        close(normed, wanted[0])
        close(total, wanted[1])
    return comm.workspaces, comm.fused


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fluctuating_sizes_make_one_workspace_and_larger_ones_go_unfused(dtype):
    for workspaces, fused in run_ranks(2, drive, dtype, 100):
        assert workspaces == [2048]
        assert fused == [1, 2048, 7, 900, 2048, 3]


def test_the_workspace_is_made_for_the_largest_step_that_was_announced():
    for workspaces, fused in run_ranks(2, drive, torch.bfloat16, 4096):
        assert workspaces == [4096]
        assert fused == list(TOKEN_COUNTS)


def test_float32_is_never_fused_and_makes_no_workspace():
    for workspaces, fused in run_ranks(2, drive, torch.float32, 4096):
        assert workspaces == [] and fused == []


def drive_without_the_layer(rank):
    """What engines do first: a workspace for the tokens at hand, made anew when the library finds it too small."""
    comm, workspace = FakeComm(), None
    for num_tokens in TOKEN_COUNTS:
        x, residual, weight, _ = tensors(num_tokens, rank, torch.bfloat16)
        call = {
            "input": x, "pattern": 1, "residual_in": residual, "residual_out": torch.empty_like(x),
            "norm_out": torch.empty_like(x), "rms_gamma": weight, "rms_eps": 1e-5, "fp32_acc": True,
            "launch_with_pdl": False, "trigger_completion_at_end": True,
        }  # fmt: skip
        try:
            comm.allreduce_fusion(workspace=workspace or ("none", 0, HIDDEN, x.dtype, None), **call)
        except ValueError:
            workspace = comm.create_allreduce_fusion_workspace(
                backend="trtllm", world_size=2, rank=rank, max_token_num=x.shape[0], hidden_dim=HIDDEN, dtype=x.dtype,
                group=dist.group.WORLD,
            )  # fmt: skip
            comm.allreduce_fusion(workspace=workspace, **call)
    return comm.workspaces


def test_a_workspace_for_the_tokens_at_hand_would_be_made_anew_whenever_they_grow():
    """Each is a collective call, leaks the one before, and pulls memory from under captured graphs."""
    assert run_ranks(2, drive_without_the_layer) == [[1, 2048, 4096]] * 2


def one_fails(rank):
    comm = FakeComm(fails_on=1)
    layer = AllReduceAddRMSNorm(dist.group.WORLD, comm=comm)
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("kimi_k25.layers.allreduce_norm").addHandler(handler)
    attempts = []
    make = layer._make_workspace
    layer._make_workspace = lambda weight: (attempts.append(1), make(weight))
    for _ in range(3):
        x, residual, weight, _ = tensors(5, rank, torch.bfloat16)
        close(layer(x, residual, weight, 1e-5)[0], expected(5, 2, torch.bfloat16)[0])
    return comm.fused, layer.why_unfused, len(attempts), len(records)


def test_one_ranks_failure_turns_fusion_off_on_all_and_is_not_tried_again():
    for fused, why, attempts, warnings in run_ranks(2, one_fails):
        assert fused == [] and why == "rank 1: RuntimeError: out of memory"
        assert attempts == 1 and warnings == 1


def two_hosts(rank):
    allreduce_norm._host = lambda: f"machine {rank}"
    comm = FakeComm()
    layer = AllReduceAddRMSNorm(dist.group.WORLD, comm=comm)
    x, residual, weight, _ = tensors(5, rank, torch.bfloat16)
    close(layer(x, residual, weight, 1e-5)[0], expected(5, 2, torch.bfloat16)[0])
    return comm.workspaces, layer.why_unfused


def test_ranks_of_two_machines_never_begin_to_make_a_workspace():
    why = "ranks on 2 hosts; the fused kernel serves those of one"

    assert run_ranks(2, two_hosts) == [([], why)] * 2


def no_library(rank):
    layer = AllReduceAddRMSNorm(dist.group.WORLD)
    x, residual, weight, _ = tensors(5, rank, torch.bfloat16)
    close(layer(x, residual, weight, 1e-5)[0], expected(5, 2, torch.bfloat16)[0])
    return (layer.why_unfused,)


def test_without_cuda_the_reason_is_kept_and_the_answer_right():
    for (why,) in run_ranks(2, no_library):
        assert why == "rank 0: RuntimeError: the fused kernel needs CUDA, the tensors are on cpu"


def two_groups(rank):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    comm = FakeComm()
    layer = AllReduceAddRMSNorm(groups[rank // 2], comm=comm)
    x, residual, weight, parts = tensors(5, rank, torch.bfloat16)
    normed, total = layer(x, residual.clone(), weight, 1e-5)
    wanted = parts[rank // 2 * 2 : rank // 2 * 2 + 2].float().sum(0).to(torch.bfloat16) + residual
    close(total, wanted)
    close(normed, rms_norm(wanted, weight, 1e-5))
    return comm.fused


def test_two_groups_of_two_ranks_meet_only_their_own():
    assert run_ranks(4, two_groups) == [[5], [5], [5], [5]]


@pytest.mark.parametrize(
    ("num_tokens", "world_size", "dtype", "why"),
    [
        (1, 2, torch.bfloat16, ""),
        (2048, 8, torch.float16, ""),
        (2049, 8, torch.bfloat16, "2049 tokens; the workspace holds 2048"),
        (5, 3, torch.bfloat16, "3 ranks; the fused kernel serves 2, 4, 8"),
        (5, 16, torch.bfloat16, "16 ranks; the fused kernel serves 2, 4, 8"),
        (5, 8, torch.float32, "torch.float32; the fused kernel serves bfloat16 and float16"),
    ],
)
def test_what_is_fused_depends_on_what_all_ranks_share(num_tokens, world_size, dtype, why):
    capacity = MIN_WORKSPACE_TOKENS

    assert why_not_fused(num_tokens, capacity=capacity, hidden_size=7168, dtype=dtype, world_size=world_size) == why


def test_a_step_being_captured_never_starts_a_collective_creation(monkeypatch):
    made = []
    layer = AllReduceAddRMSNorm(None)
    layer.world_size = 2
    monkeypatch.setattr("kimi_k25.layers.allreduce_norm._is_capturing", lambda x: True)
    monkeypatch.setattr(layer, "prepare", lambda weight: made.append(1))
    monkeypatch.setattr(dist, "all_reduce", lambda x, group: None)
    x, residual, weight, _ = tensors(5, 0, torch.bfloat16)

    layer(x, residual, weight, 1e-5)

    assert not made


def test_the_stand_in_takes_what_flashinfer_takes():
    comm = pytest.importorskip("flashinfer.comm", reason="the light install of flashinfer-python is missing")
    for name in ("create_allreduce_fusion_workspace", "allreduce_fusion"):
        taken = set(inspect.signature(getattr(FakeComm, name)).parameters) - {"self"}
        assert taken <= set(inspect.signature(getattr(comm, name)).parameters)
