"""Choosing kernels: on a CPU always plain PyTorch, and never in silence."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kimi_k25 import backend
from kimi_k25.backend import BackendError, use_backend
from kimi_k25.checkpoint import load_model
from kimi_k25.layers import gpu_libraries
from kimi_k25.layers.flashinfer_ops import fused_add_rmsnorm, import_flashinfer
from kimi_k25.layers.gpu_libraries import MissingLibraryError
from kimi_k25.layers.parallel import ParallelPlan

ORACLE = Path(__file__).parent / "data" / "oracle"


@pytest.fixture(scope="module")
def model():
    return load_model(ORACLE / "tiny_int4")


def test_auto_on_a_cpu_is_torch_and_says_why(model):
    line = use_backend(model, "auto")

    assert line.startswith("backend: torch (the model is on cpu; the fast kernels need a CUDA device")
    assert model.language_model.model.fast is None


def test_flashinfer_by_name_never_falls_back(model):
    with pytest.raises(BackendError, match="the model is on cpu"):
        use_backend(model, "flashinfer")


def test_an_unknown_backend_is_refused_with_the_known_ones(model):
    with pytest.raises(ValueError, match="'triton'; expected 'auto', 'torch' or 'flashinfer'"):
        use_backend(model, "triton")


def test_torch_after_flashinfer_needs_a_new_load(model, monkeypatch):
    monkeypatch.setattr(model.language_model.model, "fast", lambda embeds, batch: embeds)

    with pytest.raises(BackendError, match="load the model again"):
        use_backend(model, "torch")


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch):
    def broken(module):
        raise AssertionError("Torch not compiled with CUDA enabled")  # What some releases raise at import.

    monkeypatch.setattr(gpu_libraries.importlib, "import_module", broken)

    with pytest.raises(MissingLibraryError, match=r"flashinfer-python .* \(AssertionError: .*pip install") as e:
        import_flashinfer()
    assert e.value.name == "flashinfer-python"


def test_on_a_gpu_without_the_extra_the_line_names_it(monkeypatch):
    def missing(*_):
        raise MissingLibraryError("flashinfer-python is not usable; install it with: pip", name="flashinfer-python")

    weight = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16, device=torch.device("cuda"))
    text = SimpleNamespace(kv_lora_rank=512, qk_head_dim=192, v_head_dim=128)
    fake = SimpleNamespace(
        config=SimpleNamespace(text_config=text),
        language_model=SimpleNamespace(lm_head=SimpleNamespace(weight=weight), model=None),
    )
    monkeypatch.setattr(backend, "import_flashinfer", missing)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    assert use_backend(fake, "auto") == "backend: torch (flashinfer-python is not usable; install it with: pip)"


def test_products_know_over_how_many_groups_experts_are_divided(model, monkeypatch):
    pytest.importorskip("triton")
    from kimi_k25 import fast_vision
    from kimi_k25.layers import humming_experts

    found = []
    monkeypatch.setattr(backend, "why_not_flashinfer", lambda model: "")
    monkeypatch.setattr(backend, "set_fast_decoder", lambda model, products: found.append(products("experts")))
    monkeypatch.setattr(humming_experts, "HummingExperts", lambda experts, **kwargs: kwargs)
    monkeypatch.setattr(fast_vision, "FastVisionEncoder", lambda encoder: None)
    monkeypatch.setattr(model, "plan", ParallelPlan(tp=4, ep=2))

    assert use_backend(model, "flashinfer", deterministic=True) == "backend: flashinfer, deterministic"
    assert found == [{"deterministic": True, "ep": 2}]


def test_the_fast_decoder_gets_the_models_sizes_and_its_int4_experts(monkeypatch):
    pytest.importorskip("triton")
    model = load_model(ORACLE / "tiny_int4")
    text, sizes, seen = model.config.text_config, {}, []
    monkeypatch.setattr(backend, "RaggedPrefill", lambda **kwargs: sizes.update(kwargs))

    def products(experts):
        seen.append(experts)
        return SimpleNamespace(repack=lambda: None)

    fast = backend.set_fast_decoder(model, products)

    assert model.language_model.model.fast is fast
    assert sizes["num_heads"] == text.num_attention_heads and sizes["scale"] == text.softmax_scale
    assert (sizes["qk_head_dim"], sizes["v_head_dim"]) == (text.qk_head_dim, text.v_head_dim)
    assert seen == [layer.mlp.experts for layer in model.language_model.model.layers if hasattr(layer.mlp, "experts")]


def test_norms_refuse_mixed_dtypes_which_flashinfer_would_reinterpret():
    x = torch.zeros(2, 8, dtype=torch.bfloat16)

    with pytest.raises(TypeError, match=r"one 16-bit dtype throughout, not torch\.bfloat16, .*, torch\.float32"):
        fused_add_rmsnorm(x, x.clone(), torch.zeros(8), 1e-5)
