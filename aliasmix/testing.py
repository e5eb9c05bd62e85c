"""What serving engines do to a wrapper, as assertions for its author's tests. Needs no engine, and knows no weights.

The behaviour is that of SGLang 0.5.23 and vLLM 0.33.0; both name their functions in the docstrings below.
"""

from __future__ import annotations

from torch import nn

__all__ = ["assert_self_assignment_keeps_keys", "assert_sglang_gate", "assert_vllm_gate"]


def assert_self_assignment_keeps_keys(wrapper: nn.Module, name: str = "model") -> None:
    """Asserts that `wrapper.<name> = wrapper.<name>` changes neither the state dict nor any walk over the modules.

    Raises:
        AssertionError: The assignment is refused, or it registers the module a second time.
    """
    cls = type(wrapper).__name__
    before = _names(wrapper)
    try:
        setattr(wrapper, name, getattr(wrapper, name))
    except (AttributeError, KeyError, TypeError) as e:
        raise AssertionError(f"{cls}.{name} = {cls}.{name} raises {type(e).__name__}: {e}") from e
    added = sorted(_names(wrapper) - before)
    if added:
        raise AssertionError(
            f"{cls}.{name} = {cls}.{name} registers the module a second time: {len(added)} more names, "
            f"the first is {added[0]!r}; declare `{name} = ReadOnlyAlias(...)` in a class with GuardedSetattrMixin"
        )


def assert_sglang_gate(wrapper: nn.Module) -> nn.Module:
    """Does to a wrapper what SGLang does before it captures the prefill graphs, and asserts that nothing went wrong.

    Its runner takes `wrapper.model`, or `wrapper.language_model` where there is none (`resolve_language_model`); it
    assigns what it took to `wrapper.model` where that exists; and it goes down `.model` until a module has `.layers`.

    Returns:
        The module that owns `layers`.

    Raises:
        AssertionError: SGLang would run without graphs, or the wrapper has other keys afterwards.
    """
    cls = type(wrapper).__name__
    found = next((name for name in ("model", "language_model") if hasattr(wrapper, name)), None)
    if found is None:
        raise AssertionError(f"{cls} has neither .model nor .language_model: SGLang runs it without prefill graphs")
    module, path = getattr(wrapper, found), f"{cls}.{found}"
    if found == "model":
        assert_self_assignment_keeps_keys(wrapper)
    while not hasattr(module, "layers") and hasattr(module, "model"):
        module, path = module.model, f"{path}.model"
    if not hasattr(module, "layers"):
        raise AssertionError(
            f"{path} is a {type(module).__name__} without .layers and without .model to go down: "
            "SGLang runs it without prefill graphs"
        )
    return module  # type: ignore[no-any-return]


def assert_vllm_gate(wrapper: nn.Module) -> nn.Module:
    """Asks a wrapper for its language model as vLLM does (`get_language_model`), and checks the answer.

    Returns:
        The language model.

    Raises:
        AssertionError: There is no such method, or it returns something that is no registered module, that is
            registered under several names, or that cannot embed token ids; or asking changes the wrapper's keys.
    """
    cls = type(wrapper).__name__
    before = _names(wrapper)
    if not callable(getattr(wrapper, "get_language_model", None)):
        raise AssertionError(f"{cls} has no get_language_model(); vLLM asks every multimodal wrapper for it")
    module = wrapper.get_language_model()  # type: ignore[operator]
    paths = [path for path, inner in wrapper.named_modules(remove_duplicate=False) if inner is module]
    if len(paths) != 1:
        where = "is registered nowhere in it" if not paths else f"is registered {len(paths)} times: {', '.join(paths)}"
        raise AssertionError(f"{cls}.get_language_model() returns a {type(module).__name__} that {where}")
    if not hasattr(module, "embed_input_ids"):
        raise AssertionError(
            f"{cls}.get_language_model() returns a {type(module).__name__} without embed_input_ids; vLLM needs it "
            "to tell a language model"
        )
    if _names(wrapper) != before:
        raise AssertionError(f"{cls}.get_language_model() changes what is registered in the wrapper")
    return module  # type: ignore[no-any-return]


def _names(module: nn.Module) -> set[str]:
    return {*module.state_dict(keep_vars=True), *(name for name, _ in module.named_modules(remove_duplicate=False))}
