"""int4: the layout to the bit, the rounding, and the product over groups."""

import subprocess
import sys

import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from kimi_k25.layers.int4 import (
    dequantize_int4,
    int4_grouped_mm,
    pack_int4,
    unpack_int4,
)

VALUES = st.lists(st.lists(st.integers(-8, 7), min_size=16, max_size=16), min_size=1, max_size=4)


def make_weights(groups=3, out_size=10, in_size=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-8, 8, (groups, out_size, in_size), generator=generator)
    scale = (torch.rand(groups, out_size, in_size // 32, generator=generator) + 0.1).bfloat16()
    return pack_int4(q), scale


@pytest.mark.parametrize(
    ("word", "values"),
    [
        (0, [-8] * 8),
        (-1, [7] * 8),
        (0x76543210, [-8, -7, -6, -5, -4, -3, -2, -1]),  # The lowest four bits are the first value.
        (0x88888888 - 2**32, [0] * 8),
        (0x80000000 - 2**32, [-8] * 7 + [0]),
        (0xF0000007 - 2**32, [-1, *[-8] * 6, 7]),
    ],
)
def test_nibbles_of_a_word(word, values):
    words = torch.tensor([word], dtype=torch.int32)

    assert unpack_int4(words).tolist() == values
    assert pack_int4(torch.tensor(values)).tolist() == [word]


@given(VALUES)
def test_packing_and_unpacking_are_inverse_and_equal_the_bytes(rows):
    q = torch.tensor(rows, dtype=torch.int8)

    packed = pack_int4(q)

    assert packed.dtype == torch.int32 and packed.shape == (len(rows), 2)
    assert unpack_int4(packed).dtype == torch.int8
    assert torch.equal(unpack_int4(packed), q)
    assert [reference.unpack_row(words, 16) for words in packed.tolist()] == rows


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=4))
def test_unpacking_and_packing_are_inverse_for_any_word(words):
    packed = torch.tensor(words, dtype=torch.int32)

    assert torch.equal(pack_int4(unpack_int4(packed)), packed)


def test_a_weight_is_rounded_to_bfloat16():
    packed, scale = make_weights(1)

    found = dequantize_int4(packed[0], scale[0])

    assert found.dtype == torch.bfloat16
    assert torch.equal(found.double(), reference.int4_matrix(packed[0], scale[0]))
    exact = unpack_int4(packed[0]).double() * scale[0].double().repeat_interleave(32, -1)
    assert not torch.equal(found.double(), exact)  # Products of 4 and 8 bits have up to 11; bfloat16 holds 8.


def test_each_scale_covers_its_own_32_columns():
    packed = pack_int4(torch.ones(1, 64, dtype=torch.int8))

    found = dequantize_int4(packed, torch.tensor([[2.0, 3.0]]).bfloat16())

    assert found.tolist() == [[2.0] * 32 + [3.0] * 32]


OFFSETS = {
    "spread": [4, 9, 17],
    "idle": [4, 4, 17],
    "first idle": [0, 9, 17],
    "all on one": [0, 0, 17],
    "padding": [3, 5, 12],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", OFFSETS.values(), ids=OFFSETS)
def test_product_equals_dense_matrices(ends, dtype):
    packed, scale = make_weights()
    x = torch.randn(17, 64, generator=torch.Generator().manual_seed(1)).to(dtype)

    out = int4_grouped_mm(x, packed, scale, torch.tensor(ends, dtype=torch.int32))

    assert out.dtype == dtype and out.shape == (17, 10)
    expected = torch.zeros(17, 10, dtype=torch.float64)
    for group, (a, b) in enumerate(zip([0, *ends], ends, strict=False)):
        expected[a:b] = x[a:b].double() @ reference.int4_matrix(packed[group], scale[group]).T
    tolerance = {"rtol": 1e-5, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 0.1}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    assert not out[ends[-1] :].any()


@pytest.mark.parametrize("ends", OFFSETS.values(), ids=OFFSETS)
def test_gradient_is_that_of_dense_matrices(ends):
    packed, scale = make_weights()
    x = torch.randn(17, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    direction = torch.randn(10, 17, generator=torch.Generator().manual_seed(2)).T  # Not contiguous.

    (grad,) = torch.autograd.grad(
        int4_grouped_mm(x, packed, scale, torch.tensor(ends, dtype=torch.int32)), x, direction
    )

    expected = torch.zeros(17, 64)
    for group, (a, b) in enumerate(zip([0, *ends], ends, strict=False)):
        expected[a:b] = direction[a:b] @ dequantize_int4(packed[group], scale[group]).float()
    torch.testing.assert_close(grad, expected)


def test_the_gradients_gradient_is_the_product_again():
    packed, scale = make_weights()
    offsets = torch.tensor([4, 9, 15], dtype=torch.int32)
    x, direction = torch.randn(17, 64, requires_grad=True), torch.randn(17, 10, requires_grad=True)
    (grad,) = torch.autograd.grad(int4_grouped_mm(x, packed, scale, offsets), x, direction, create_graph=True)

    (twice,) = torch.autograd.grad(grad, direction, torch.ones_like(grad))

    assert torch.equal(twice, int4_grouped_mm(torch.ones_like(x), packed, scale, offsets))


def test_the_first_product_of_a_process_imports_no_compiler():
    code = (
        "import sys, torch\nfrom kimi_k25.layers.int4 import int4_grouped_mm\n"
        "words, ends = torch.zeros(1, 8, 4, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)\n"
        "int4_grouped_mm(torch.ones(3, 32), words, torch.ones(1, 8, 1).bfloat16(), ends)\n"
        "assert 'torch._dynamo' not in sys.modules"  # 1.2 s of the first token's time.
    )

    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_operators_keep_torch_librarys_rules():
    packed, scale = make_weights()
    offsets = torch.tensor([4, 4, 15], dtype=torch.int32)
    x = torch.randn(17, 64, requires_grad=True)

    rules = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.kimi_k25.int4_grouped_mm.default, (x, packed, scale, offsets), test_utils=rules)
    grad = torch.randn(17, 10)
    torch.library.opcheck(
        torch.ops.kimi_k25.int4_grouped_mm_backward.default, (grad, packed, scale, offsets), test_utils=rules
    )


def test_shapes_without_data():
    packed, scale = (t.to("meta") for t in make_weights())
    offsets = torch.empty(3, dtype=torch.int32, device="meta")

    out = int4_grouped_mm(torch.empty(5, 64, dtype=torch.bfloat16, device="meta"), packed, scale, offsets)

    assert out.is_meta and out.shape == (5, 10) and out.dtype == torch.bfloat16
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = int4_grouped_mm(torch.empty(5, 64), *make_weights(), torch.zeros(3, dtype=torch.int32))
    assert fake.shape == (5, 10)


def test_a_product_that_float32_would_not_round():
    packed, scale = pack_int4(torch.full((1, 32), 7)), torch.tensor([[1.0078125]]).bfloat16()

    found = dequantize_int4(packed, scale)

    assert 7 * scale.double().item() == 7.0546875  # Ten bits; bfloat16's neighbours are 7.03125 and 7.0625.
    assert found.tolist() == [[7.0625] * 32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_passes_every_check_of_torch_library(dtype):
    packed, scale = make_weights()
    x = torch.randn(17, 64, dtype=dtype, requires_grad=True)

    arguments = (x, packed, scale, torch.tensor([4, 4, 15], dtype=torch.int32))
    torch.library.opcheck(torch.ops.kimi_k25.int4_grouped_mm.default, arguments)
