"""will_it_capture: every op that would stop a capture, with module path and line."""

import doctest
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from toy_decoder import Toy

from kimi_k25.graphs import report as report_module
from kimi_k25.graphs import will_it_capture

X = torch.arange(6.0)
MASK = X > 2


@pytest.mark.parametrize(
    ("function", "op", "reason"),
    [
        (lambda: X[0].item(), "Tensor.item (aten._local_scalar_dense.default)", "reads a value"),
        (lambda: 1 if X[1] else 0, "Tensor.__bool__ (aten._local_scalar_dense.default)", "reads a value"),
        (lambda: int(X[1]), "Tensor.__int__", "reads a value"),
        (lambda: f"{X[1]}", "Tensor.__format__", "reads a value"),
        (lambda: f"{X}", "Tensor.__format__", "prints values"),
        (lambda: repr(X), "Tensor.__repr__", "prints values"),
        (lambda: X.tolist(), "Tensor.tolist", "copies the tensor to the host"),
        (lambda: X.cpu(), "Tensor.cpu", "copies the tensor to the host"),
        (lambda: X.to("cpu"), "Tensor.to", "copies the tensor to the host"),
        (lambda: X.to(device="cpu"), "Tensor.to", "copies the tensor to the host"),
        (lambda: X.numpy(), "Tensor.numpy", "copies the tensor to the host"),
        (lambda: np.asarray(X), "Tensor.__array__", "copies the tensor to the host"),
        (lambda: torch.tensor([1.0], device=X.device), "tensor", "copies from host memory"),
        (lambda: X.new_tensor([1.0]), "Tensor.new_tensor", "copies from host memory"),
        (lambda: X[[0, 2]], "Tensor.__getitem__", "index list from host memory"),
        (lambda: X.nonzero(), "Tensor.nonzero (aten.nonzero.default)", "a shape that values decide"),
        (lambda: X[MASK], "Tensor.__getitem__ (aten.index.Tensor)", "a boolean mask"),
        (lambda: X.clone().__setitem__(MASK, X[3:]), "aten.index_put_.default", "a boolean mask"),
        (lambda: X.masked_select(MASK), "aten.masked_select", "a shape that values decide"),
        (lambda: X.unique(), "aten._unique2", "a shape that values decide"),
        (lambda: X.long().bincount(), "aten.bincount", "a shape that values decide"),
        (lambda: X.repeat_interleave(X.long()), "aten.repeat_interleave", "a shape that values decide"),
        (lambda: X.histc(4), "aten.histc", "give min and max"),
        (lambda: torch.equal(X, X), "aten.equal", "reads a value"),
        (lambda: X.softmax(0).multinomial(1), "aten.multinomial", "checks values"),
    ],
)
def test_a_host_wait_is_reported_once_with_its_line(function, op, reason):
    report = will_it_capture(function)

    assert not report
    assert [op in issue.op for issue in report.issues] == [True]
    assert reason in report.issues[0].reason
    assert report.issues[0].location.startswith(f"{__file__}:{function.__code__.co_firstlineno}")


@pytest.mark.parametrize(
    "function",
    [
        lambda: X.to(X.device, torch.float64),
        lambda: X.clone().__setitem__(MASK, 0.0),
        lambda: X[torch.arange(2)],
        lambda: X[1:4:2, None],
        lambda: torch.where(MASK, X, 0.0),
        lambda: X.repeat_interleave(2),
        lambda: X.repeat_interleave(X.long(), output_size=15),
        lambda: X.histc(4, 0, 6),
        lambda: X * torch.tensor(2.0),
        lambda: X.shape[0] + len(X),
        lambda: torch.full((2,), 3.0, device=X.device),
        lambda: nn.functional.one_hot(X.long(), 6),
    ],
)
def test_what_a_capture_takes_is_not_reported(function):
    report = will_it_capture(function)

    assert report, str(report)
    assert str(report).startswith("captures; waits for the device: 0")


class Leaf(nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            x = x[x > 0]
        return x.tolist()


class Tree(nn.Module):
    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([nn.Identity(), Leaf()])

    def forward(self, x):
        for branch in self.branches:
            x = branch(x)
        return x


def test_all_waits_are_reported_not_the_first_only_with_their_module_path():
    report = will_it_capture(Tree(), X)

    assert [(issue.op, issue.module_path) for issue in report.issues] == [
        ("Tensor.__bool__ (aten._local_scalar_dense.default)", "Tree.branches.1"),
        ("Tensor.__getitem__ (aten.index.Tensor)", "Tree.branches.1"),
        ("Tensor.tolist", "Tree.branches.1"),
    ]
    lines = [int(issue.location.rpartition(":")[2]) for issue in report.issues]
    assert lines == [lines[0], lines[0] + 1, lines[0] + 2]
    assert str(report).splitlines()[0].startswith("does not capture; waits for the device: 3 ")
    assert f"Tensor.tolist at Tree.branches.1 ({__file__}:" in str(report)


def test_break_points_are_counted_and_not_looked_into():
    toy = Toy()
    inputs = toy.prefill(5) | {"num_tokens": torch.tensor([5], dtype=torch.int32)}

    report = will_it_capture(toy.forward, inputs)

    assert report, str(report)
    assert report.num_breaks == 3


@torch.library.custom_op("kimi_graph_tests::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x[i] * 2 for i, keep in enumerate((x > 1).tolist()) if keep])


def test_a_library_op_is_opaque():
    report = will_it_capture(opaque, X)

    assert report, str(report)
    assert report.num_ops == 1


def test_what_is_cached_at_the_first_call_may_wait():
    cache = {}

    def forward(x):
        if "scale" not in cache:
            cache["scale"] = x.max().item()
        return x * cache["scale"]

    assert will_it_capture(forward, X)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_wait_inside_a_composite_operator_is_seen_in_inference_mode_too(mode):
    with mode():
        report = will_it_capture(lambda: nn.functional.one_hot(X.long()).view(-1).reshape(6, 6))

    assert {issue.op for issue in report.issues} == {"nn.functional.one_hot (aten._local_scalar_dense.default)"}


PAGE = (Path(__file__).parent.parent / "docs" / "will-it-capture.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n(?:.*\n)*?```text\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("code", "printed"), EXAMPLES, ids=["report", "tape"])
def test_the_page_prints_what_it_says(code, printed, capsys):
    exec(compile(code, "moe.py", "exec"), {"__name__": "moe"})

    assert capsys.readouterr().out == printed


def test_the_docstring_example_is_true():
    results = doctest.testmod(report_module)

    assert results.attempted == 1
    assert results.failed == 0
