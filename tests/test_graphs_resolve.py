import os
import subprocess
import sys

import pytest
from torch import nn

from aliasmix import GuardedSetattrMixin, ReadOnlyAlias
from kimi_k25.graphs import DecoderNotFoundError, resolve_decoder


class Stack(nn.Module):
    def __init__(self, num_layers=2):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(num_layers))


class Holder(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


class AliasedWrapper(GuardedSetattrMixin, nn.Module):
    model = ReadOnlyAlias("language_model")

    def __init__(self, language_model):
        super().__init__()
        self.language_model = language_model


class PropertyWrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    @property
    def model(self):
        return self.inner


@pytest.mark.parametrize(
    "wrap",
    [
        lambda stack: stack,
        lambda stack: Holder(model=stack),
        lambda stack: Holder(model=Holder(language_model=stack)),
        lambda stack: Holder(language_model=Holder(model=stack)),
        lambda stack: AliasedWrapper(Holder(model=stack)),
        PropertyWrapper,
    ],
    ids=["itself", "model", "model.language_model", "language_model.model", "alias", "property"],
)
def test_decoder_is_found_and_nothing_is_assigned(wrap):
    stack = Stack()
    wrapper = wrap(stack)
    before = list(wrapper.state_dict())

    decoder = resolve_decoder(wrapper)

    assert decoder is stack
    assert list(wrapper.state_dict()) == before


def test_decoder_is_found_after_a_foreign_runner_assigned_the_alias_to_itself():
    wrapper = AliasedWrapper(Holder(model=Stack()))
    wrapper.model = wrapper.model

    assert resolve_decoder(wrapper) is wrapper.language_model.model
    assert all(name.startswith("language_model.") for name in wrapper.state_dict())


def test_empty_layers_are_passed_over():
    wrapper = Holder(layers=nn.ModuleList(), model=Stack())

    assert resolve_decoder(wrapper) is wrapper.model


def test_a_cycle_ends_and_every_path_is_named():
    wrapper = Holder(language_model=Holder())
    object.__setattr__(wrapper.language_model, "model", wrapper)

    with pytest.raises(DecoderNotFoundError) as error:
        resolve_decoder(wrapper)

    assert error.value.paths == (
        "Holder.layers (missing)",
        "Holder.model (missing)",
        "Holder.language_model.layers (missing)",
        "Holder.language_model.model (leads back)",
        "Holder.language_model.language_model (missing)",
    )
    assert "Pass the module that owns `.layers`" in str(error.value)
    assert "takes num_layers= instead" in str(error.value)


def test_a_model_without_layers_is_an_attribute_error_too():
    with pytest.raises(AttributeError, match="Linear has no decoder stack"):
        resolve_decoder(nn.Linear(1, 1))


def test_an_attribute_that_is_no_module_is_named():
    wrapper = Holder()
    wrapper.model = "llama"

    with pytest.raises(DecoderNotFoundError, match=r"Holder.model \(str, not a module\)"):
        resolve_decoder(wrapper)


def test_importing_the_package_imports_no_torch_and_every_name_is_there():
    code = (
        "import sys, kimi_k25.graphs as graphs; assert 'torch' not in sys.modules; "
        "assert all(getattr(graphs, name) for name in graphs.__all__)"
    )

    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
