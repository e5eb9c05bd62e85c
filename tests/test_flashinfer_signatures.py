"""Every call of FlashInfer that this package makes, against the signatures of the installed release.

FlashInfer needs no GPU to be imported, so this runs in CI on a light install (see the Makefile); it is skipped where
there is none.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "kimi_k25"

# What stands before the call in our source -> what it is in FlashInfer.
TARGETS = {
    "import_flashinfer().fused_add_rmsnorm": ("flashinfer", "fused_add_rmsnorm"),
    "import_flashinfer().rmsnorm": ("flashinfer", "rmsnorm"),
    "library.BatchPrefillWithRaggedKVCacheWrapper": ("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper"),
    "self._wrapper.plan": ("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper.plan"),
    "self._wrapper.run": ("flashinfer", "BatchPrefillWithRaggedKVCacheWrapper.run"),
    "self._comm.create_allreduce_fusion_workspace": ("flashinfer.comm", "create_allreduce_fusion_workspace"),
    "self._comm.allreduce_fusion": ("flashinfer.comm", "allreduce_fusion"),
}


def calls():
    """(file, line, call) of every call in the package whose text is a key of TARGETS."""
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in TARGETS:
                yield file, node


def planned_keywords():
    """Keywords of RaggedPrefill._shape, which plan gets as **."""
    tree = ast.parse((PACKAGE / "layers" / "flashinfer_ops.py").read_text())
    shapes = [
        node.value for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "self._shape"
    ]  # fmt: skip
    assert len(shapes) == 1
    return [key.value for key in shapes[0].keys]


def test_every_known_call_is_found():
    assert {ast.unparse(call.func) for _, call in calls()} == set(TARGETS)


def test_no_other_file_calls_flashinfer():
    users = {
        file.relative_to(PACKAGE).as_posix()
        for file in PACKAGE.rglob("*.py")
        if "import_flashinfer" in file.read_text()
    }
    assert users == {"backend.py", "layers/allreduce_norm.py", "layers/flashinfer_ops.py"}


def test_calls_bind_to_the_installed_signatures():
    pytest.importorskip("flashinfer", reason="the light install of flashinfer-python is missing", exc_type=Exception)
    import importlib

    for file, call in calls():
        module, path = TARGETS[ast.unparse(call.func)]
        target = importlib.import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
        keywords = {k.arg: None for k in call.keywords if k.arg}
        if any(k.arg is None for k in call.keywords):
            keywords |= dict.fromkeys(planned_keywords())
        signature = inspect.signature(target)
        positional = [None] * (len(call.args) + (path.count(".") > 0))  # A method's self.
        where = f"{file.name}:{call.lineno}"
        try:
            signature.bind(*positional, **keywords)
        except TypeError as e:
            raise AssertionError(f"{where}: {module}.{path}{signature}: {e}") from None


def test_the_kernel_for_hopper_reads_a_steps_lengths_from_its_plan_only():
    flashinfer = pytest.importorskip("flashinfer", reason="no flashinfer-python here", exc_type=Exception)
    source = (Path(flashinfer.__file__).parent / "data" / "csrc" / "batch_prefill_sm90.cu").read_text()

    launcher = source.split("void BatchPrefillWithRaggedKVCacheSM90Run(")[1].split("\nvoid ")[0]

    # So a step of RaggedPrefill hands over those of the first one, which are on the device already.
    uses = re.findall(r"[\w.]*\b(?:qo|kv)_indptr\b", launcher)
    assert uses == ["qo_indptr", "kv_indptr", "params.qo_indptr", "params.kv_indptr"], uses
