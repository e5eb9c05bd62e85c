"""The experts' down product in Triton against dequantised weights; on a CPU in Triton's interpreter.

Scales have four significant bits, so that a value times its scale is exact: the interpreter cuts bits off where a GPU
rounds to bfloat16. Tolerances as in test_fused_kernels.py.
"""

import pytest
import torch

pytest.importorskip("triton")

from kimi_k25.layers.int4 import dequantize_int4, pack_int4
from kimi_k25.layers.int4_down import INPUTS, down_rows, rearrange
from kimi_k25.layers.moe_kernels import align_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.bfloat16] if DEVICE == "cuda" else [torch.float32, torch.bfloat16]
NUM_EXPERTS, HIDDEN = 5, 192


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def close(actual, expected, dtype):
    atol = expected.abs().max().item() * (2**-6 if dtype == torch.bfloat16 else 1e-5)
    torch.testing.assert_close(actual.float(), expected.float(), rtol=0, atol=atol)


def make_weights():
    packed = pack_int4(torch.randint(-8, 8, (NUM_EXPERTS, HIDDEN, INPUTS)))
    scale = (torch.randint(8, 16, (NUM_EXPERTS, HIDDEN, INPUTS // 32)) / 1024).bfloat16()
    return packed.to(DEVICE), scale.to(DEVICE)


def blocks_of(ids, size):
    flat = ids.flatten()
    counts = torch.bincount(flat[flat < NUM_EXPERTS], minlength=NUM_EXPERTS).int()
    ranks = torch.stack([(flat[:p] == flat[p]).sum() for p in range(flat.numel())]).int()
    return align_blocks(ids, ranks.view(ids.shape), counts, size)


def plain_rows(gate_up, packed, scale, ids):
    gate, up = gate_up.float().chunk(2, -1)
    x = (torch.nn.functional.silu(gate) * up).to(gate_up.dtype).float()
    weight = dequantize_int4(packed, scale).float()
    return torch.stack([weight[e] @ row for e, row in zip(ids.flatten().tolist(), x, strict=True)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 8), (17, 8), (33, 24), (40, 96)])
def test_down_rows_are_the_dequantized_product(num_tokens, size, dtype):
    packed, scale = make_weights()
    ids = torch.rand(num_tokens, NUM_EXPERTS, device=DEVICE).topk(2, -1).indices.int()
    gate_up = torch.randn(num_tokens * 2, 2 * INPUTS, device=DEVICE).to(dtype)

    out = down_rows(gate_up, *rearrange(packed, scale), *blocks_of(ids, size))

    close(out, plain_rows(gate_up, packed, scale, ids), dtype)


def test_all_rows_on_one_expert():
    packed, scale = make_weights()
    ids = torch.full((70, 1), 3, dtype=torch.int32, device=DEVICE)
    gate_up = torch.randn(70, 2 * INPUTS, device=DEVICE).to(DTYPES[0])

    out = down_rows(gate_up, *rearrange(packed, scale), *blocks_of(ids, 96))

    close(out, plain_rows(gate_up, packed, scale, ids), DTYPES[0])


@pytest.mark.parametrize("num_present", [0, 3])
def test_pairs_of_other_ranks_have_no_row(num_present):
    packed, scale = make_weights()
    ids = torch.full((20, 1), NUM_EXPERTS, dtype=torch.int32, device=DEVICE)
    ids[5 : 5 + num_present] = 4
    gate_up = torch.randn(20, 2 * INPUTS, device=DEVICE).to(DTYPES[0])
    gate_up[ids[:, 0] == NUM_EXPERTS] = float("nan")
    present = slice(5, 5 + num_present)

    out = down_rows(gate_up, *rearrange(packed, scale), *blocks_of(ids, 8))[present]

    if num_present:
        close(out, plain_rows(gate_up[present], packed, scale, ids[present]), DTYPES[0])


def test_rearranged_tensors_take_no_more_memory():
    packed, scale = make_weights()

    words, scales = rearrange(packed, scale)

    assert words.nbytes == packed.nbytes and scales.nbytes == scale.nbytes
