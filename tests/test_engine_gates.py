"""What SGLang and vLLM do to a wrapper, and the pages that show how to be ready for it, run as they are written."""

import importlib
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from aliased import Backbone, Duplicate, Guarded, HandWritten, LanguageModel, Plain, PropertyOnly, assert_text, keys
from torch import nn

from aliasmix import GuardedSetattrMixin, ReadOnlyAlias
from aliasmix.testing import assert_self_assignment_keeps_keys, assert_sglang_gate, assert_vllm_gate

DOCS = Path(__file__).parent.parent / "docs"


class Decoder(LanguageModel):
    def embed_input_ids(self, input_ids):
        return self.model.embed_tokens(input_ids)


class Served(Guarded):
    def __init__(self):
        super().__init__()
        self.language_model = Decoder()

    def get_language_model(self):
        return self.model


def failure(check, *args):
    with pytest.raises(AssertionError) as caught:
        check(*args)
    return str(caught.value)


@pytest.mark.parametrize("cls", [Guarded, HandWritten, Plain])
def test_sglang_gate_returns_the_owner_of_the_layers_and_keeps_the_keys(cls):
    wrapper = cls()

    owner = assert_sglang_gate(wrapper)

    assert owner is wrapper.language_model.model  # down one `.model` from the language model
    assert keys(wrapper) == keys(Plain())


def test_sglang_gate_takes_a_text_model_as_it_is():
    wrapper = LanguageModel()

    assert assert_sglang_gate(wrapper) is wrapper.model


def test_sglang_gate_finds_the_second_registration():
    assert_text(
        failure(assert_sglang_gate, PropertyOnly()),
        """\
PropertyOnly.model = PropertyOnly.model registers the module a second time: 15 more names, the first is 'model'; \
declare `model = ReadOnlyAlias(...)` in a class with GuardedSetattrMixin""",
    )


def test_sglang_gate_finds_an_assignment_that_is_refused():
    class Strict(Plain):
        @property
        def model(self):
            return self.language_model

        def __setattr__(self, name, value):
            if name == "model":
                raise KeyError("attribute 'model' already exists")
            super().__setattr__(name, value)

    assert_text(
        failure(assert_sglang_gate, Strict()),
        """Strict.model = Strict.model raises KeyError: "attribute 'model' already exists\"""",
    )


def test_sglang_gate_names_what_is_missing():
    class NoLayers(GuardedSetattrMixin, nn.Module):
        model = ReadOnlyAlias("decoder")

        def __init__(self):
            super().__init__()
            self.decoder = nn.Linear(1, 1)

    assert_text(
        failure(assert_sglang_gate, nn.Linear(1, 1)),
        """Linear has neither .model nor .language_model: SGLang runs it without prefill graphs""",
    )
    assert_text(
        failure(assert_sglang_gate, NoLayers()),
        """\
NoLayers.model is a Linear without .layers and without .model to go down: SGLang runs it without prefill graphs""",
    )


def test_vllm_gate_returns_the_language_model():
    wrapper = Served()

    assert assert_vllm_gate(wrapper) is wrapper.language_model


def test_vllm_gate_names_what_is_wrong():
    class NoMethod(Guarded): ...

    class Loose(Guarded):
        def get_language_model(self):
            return Decoder()

    class NoEmbedding(Guarded):
        def get_language_model(self):
            return self.layers

    class Twice(Duplicate):
        def get_language_model(self):
            return self.model

    class Changing(Served):
        def get_language_model(self):
            self.cache = Backbone()
            return self.model

    messages = [failure(assert_vllm_gate, cls()) for cls in (NoMethod, Loose, NoEmbedding, Twice, Changing)]

    assert_text(
        "\n".join(messages),
        """\
NoMethod has no get_language_model(); vLLM asks every multimodal wrapper for it
Loose.get_language_model() returns a Decoder that is registered nowhere in it
NoEmbedding.get_language_model() returns a ModuleList without embed_input_ids; vLLM needs it to tell a language model
Twice.get_language_model() returns a LanguageModel that is registered 2 times: language_model, model
Changing.get_language_model() changes what is registered in the wrapper""",
    )


def test_self_assignment_of_every_alias_keeps_the_keys():
    wrapper = Guarded()

    for name in ("model", "layers"):
        assert_self_assignment_keeps_keys(wrapper, name)


# -- the pages ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["sglang", "vllm"])
def project(request, tmp_path, monkeypatch):
    """The files of a page, written where their first lines say."""
    text = (DOCS / f"with-{request.param}.md").read_text()
    for name, body in re.findall(r"```(?:python|toml)\n# (\S+)\n(.*?)```", text, re.DOTALL):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(body)
    (tmp_path / "my_models" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield request.param, tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "my_models"]:
        del sys.modules[name]


def test_the_test_of_the_page_passes(project):
    _, folder = project

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"]
    result = subprocess.run(
        command,
        cwd=folder,
        env={"PYTHONPATH": f"{folder}:{DOCS.parent}", "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 passed" in result.stdout


def test_the_package_of_the_page_is_found_as_the_engine_finds_it(project, monkeypatch):
    engine, folder = project
    registered = {}
    package = importlib.import_module("my_models")

    if engine == "sglang":  # imports every module of the package and takes its EntryClass, by the class's name
        for _, name, is_package in pkgutil.iter_modules(package.__path__, "my_models."):
            entry = getattr(importlib.import_module(name), "EntryClass", None)
            if entry is not None and not is_package:
                registered[entry.__name__] = entry
    else:  # loads the entry point and calls it; the class is imported later, by its path
        vllm = ModuleType("vllm")
        vllm.ModelRegistry = ModuleType("ModelRegistry")
        vllm.ModelRegistry.get_supported_archs = lambda: ["LlamaForCausalLM"]
        vllm.ModelRegistry.register_model = registered.__setitem__
        monkeypatch.setitem(sys.modules, "vllm", vllm)
        points = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]
        module, _, function = points["vllm.general_plugins"]["my_models"].partition(":")
        getattr(importlib.import_module(module), function)()
        for arch, path in registered.items():
            module, _, cls = path.partition(":")
            registered[arch] = getattr(importlib.import_module(module), cls)

    assert list(registered) == ["CaptionerForConditionalGeneration"]
    wrapper = registered["CaptionerForConditionalGeneration"]()
    assert_self_assignment_keeps_keys(wrapper)
    assert assert_sglang_gate(wrapper) is wrapper.language_model
