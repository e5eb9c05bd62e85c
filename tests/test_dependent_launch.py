"""The rule that makes programmatic dependent launches safe: every kernel waits before it touches memory.

Held against the source of all kernels, and against the code that Triton makes of them for Hopper, which needs no GPU.
"""

import ast
import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from kimi_k25.layers import dependent_launch
from kimi_k25.layers.dependent_launch import launch_options
from kimi_k25.layers.mla_kernels import norm_rope_append
from kimi_k25.layers.skinny_linear import one_row_linear

ROOT = Path(__file__).parent.parent
FILES = ("int4_down", "mla_decode", "mla_kernels", "moe_kernels", "skinny_linear")

# Runs every launcher on CPU tensors with its kernel replaced, and compiles what would have been launched.
COMPILE = '''
import re, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kimi_k25.layers import int4_down, mla_decode, mla_kernels, moe_kernels, skinny_linear

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}
TOUCHES_MEMORY = re.compile(r"(ld|st|atom|red)\\.(\\w+\\.)*global|cp\\.async|tensormap|\\bbra\\b")

class Compiled:
    def __init__(self, name, fn):
        self.name, self.fn = name, fn
    def __getitem__(self, grid):
        return self
    def __call__(self, *args, num_warps=4, num_stages=3, **constants):
        constants |= {"PDL": True} | {k: v for k, v in {"PTX": True, "WIDEN": False}.items() if k in constants}
        signature, attributes = {}, {}
        for i, name in enumerate(self.fn.arg_names):
            value = args[i] if i < len(args) else None
            kind = "constexpr" if name in constants else "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, torch.Tensor):
                kind, attributes[(i,)] = TYPES[value.dtype], [["tt.divisibility", 16]]
            signature[name] = kind
        source = ASTSource(fn=self.fn, signature=signature, constexprs=constants, attrs=attributes)
        options = {"num_warps": num_warps, "num_stages": num_stages, "launch_pdl": True}
        made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        ptx = made.asm["ptx"]
        body = ptx[ptx.index(".entry"):]
        wait, launch = body.index("griddepcontrol.wait"), body.index("griddepcontrol.launch_dependents")
        first = TOUCHES_MEMORY.search(body)
        print(self.name, bool(made.metadata.launch_pdl), wait < launch < first.start())

for module in (int4_down, mla_decode, mla_kernels, moe_kernels, skinny_linear):
    for name, fn in vars(module).items():
        if name.endswith("_kernel") and hasattr(fn, "arg_names"):
            setattr(module, name, Compiled(f"{module.__name__.rpartition('.')[2]}.{name}", fn))

def bf16(*shape):
    return torch.zeros(*shape, dtype=torch.bfloat16)

def int32(*shape):
    return torch.zeros(*shape, dtype=torch.int32)

norm, bias = bf16(64), torch.zeros(16)
skinny_linear.one_row_linear(bf16(1, 512), bf16(64, 512), False)
q, kv = mla_kernels.norm_rope_append(
    bf16(2, 144), norm, norm, bf16(2, 8), bf16(2, 8), 1e-6, bf16(2, 4, 80), torch.zeros(2, dtype=torch.int64)
)
mla_kernels.assemble_prefill(bf16(2, 2, 80), bf16(2, 2, 128), kv, bf16(2, 8), bf16(2, 8), bf16(2, 2, 80))
q_latent = mla_decode.absorb_queries(bf16(2, 16, 80), bf16(16 * 128, 64), 64)
parts = mla_decode.attend_parts(
    q_latent, bf16(2, 16, 80), bf16(2, 8), bf16(2, 8), bf16(2, 16, 80), int32(2, 2), int32(2), 0.1
)
mla_decode.merge_parts(*parts, q)
mla_decode.merge_and_project(*parts, bf16(16 * 128, 64), 64)
weights, ids, ranks, counts = moe_kernels.route(torch.zeros(2, 16), bias, int32(1), 4, True, 1.0)
moe_kernels.route_to_pair_blocks(torch.zeros(2, 16), bias, None, 4, True, 1.0, 8)
moe_kernels.route_to_pair_blocks(torch.zeros(2, 16), bias, int32(1), 4, True, 1.0, 8, 12, 4)
blocks = moe_kernels.align_blocks(ids, ranks, counts, 16)
moe_kernels.swiglu_rows(bf16(8, 128), torch.bfloat16)
rows = int4_down.down_rows(bf16(8, 512), int32(16, 256, 32), int32(16, 4, 256), *blocks)
moe_kernels.combine_rows(rows, weights, ids, rows[:2], 16)
moe_kernels.add_norm_rows(rows, weights, ids, rows[:2], rows[2:4], rows[0], 1e-6, 16)
'''


def kernels(file):
    """Names and bodies of a file's kernels: functions of Triton that are launched, not called by others."""
    for node in ast.parse((ROOT / f"kimi_k25/layers/{file}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
            assert [ast.unparse(d) for d in node.decorator_list] == ["triton.jit"]
            yield node.name, node


@pytest.mark.parametrize("file", FILES)
def test_every_kernel_begins_with_the_wait(file):
    firsts = {name: ast.unparse(node.body[0]) for name, node in kernels(file)}

    assert firsts
    assert set(firsts.values()) == {"begin(PDL)"}


@pytest.mark.parametrize("file", FILES)
def test_every_launch_takes_launch_options(file):
    names = {name for name, _ in kernels(file)}
    tree = ast.parse((ROOT / f"kimi_k25/layers/{file}.py").read_text())
    launches = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript) and ast.unparse(node.func.value) in names
    ]  # fmt: skip

    assert {ast.unparse(launch.func.value) for launch in launches} == names
    for launch in launches:
        assert any(k.arg is None and ast.unparse(k.value).startswith("launch_options(") for k in launch.keywords)


def test_compiled_kernels_wait_before_they_touch_memory():
    home = Path(importlib.util.find_spec("triton").origin).parent
    if not (home / "backends/nvidia/bin/ptxas").is_file():
        pytest.skip("this Triton brings no assembler for NVIDIA's GPUs")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}

    done = subprocess.run([sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, *_ in lines} == {f"{file}.{name}" for file in FILES for name, _ in kernels(file)}
    assert {tuple(facts) for _, *facts in lines} == {("True", "True")}


def test_launches_on_a_cpu_are_ordinary():
    assert launch_options(torch.zeros(1)) == {"PDL": False}


def test_only_a_kernel_where_streams_never_meet_is_launched_early(monkeypatch):
    monkeypatch.setattr(dependent_launch, "_is_supported", lambda device: True)
    like = SimpleNamespace(is_cuda=True, device=None)

    early, ordered = launch_options(like), launch_options(like, joins=True)
    monkeypatch.setattr(dependent_launch, "ENABLED", False)
    off = launch_options(like)

    assert (early, ordered, off) == ({"PDL": True, "launch_pdl": True}, {"PDL": True}, {"PDL": False})


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_a_long_chain_of_early_launches_gives_the_bits_of_ordinary_ones(captured, monkeypatch):
    generator = torch.Generator("cuda").manual_seed(0)
    weights = torch.randn(64, 1024, 1024, device="cuda", generator=generator).bfloat16() / 32
    start = torch.randn(1, 1024, device="cuda", generator=generator).bfloat16()
    norm, angle = torch.ones(512, device="cuda").bfloat16(), torch.ones(1, 32, device="cuda").bfloat16()

    def chain():
        x = start
        for weight in weights:
            x = one_row_linear(x, weight, False)
            x = torch.cat(norm_rope_append(x, norm, norm[:448], angle, angle, 1e-6, None, None), 1)
        return x

    monkeypatch.setattr(dependent_launch, "ENABLED", False)
    expected = chain()
    monkeypatch.setattr(dependent_launch, "ENABLED", True)
    actual = chain()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            actual = chain()

    for _ in range(20):
        if captured:
            actual.zero_()
            graph.replay()
        else:
            actual = chain()
        assert torch.equal(actual, expected)
