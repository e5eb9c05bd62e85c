"""torch.compile, export and tracing of aliased wrappers: one graph, no recompilation, the keys of the plain wrapper."""

import pytest
import torch
from aliased import Guarded, LanguageModel, Plain, keys
from torch import nn

from aliasmix import GuardedSetattrMixin, ReadOnlyAlias, install_alias

IDS = torch.tensor([[1, 2, 3]])


class Compiler:
    """A backend that counts the graphs it is given."""

    def __init__(self):
        self.num_graphs = 0

    def __call__(self, graph, inputs):
        self.num_graphs += 1
        return graph.forward


@pytest.fixture
def compiler():
    torch._dynamo.reset()
    yield Compiler()
    torch._dynamo.reset()


def compiled(module, compiler):
    return torch.compile(module, fullgraph=True, backend=compiler)


class ReadsAll(Guarded):
    """Reads an alias, a dotted alias, a submodule, a parameter, a buffer and a plain attribute in one forward."""

    bias = ReadOnlyAlias("vision_tower.bias")

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.ones(4))
        self.power = 2

    def forward(self, input_ids):
        hidden_states = self.model.model(input_ids) * self.gain + self.shift + self.bias
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return self.vision_tower(hidden_states) ** self.power


class WritesInForward(Guarded):
    def forward(self, input_ids):
        self.num_calls = 1
        self.model = self.model
        return self.model(input_ids)


class AsksForMissing(Guarded):
    def forward(self, input_ids):
        return input_ids + 1 if hasattr(self, "model") else input_ids + 2


@pytest.mark.parametrize("cls", [Guarded, ReadsAll, WritesInForward])
def test_compiles_to_one_graph_with_the_result_of_eager(cls, compiler):
    module = cls()

    result = compiled(module, compiler)(IDS)

    assert compiler.num_graphs == 1
    assert torch.equal(result, module(IDS))


def test_compiles_to_one_graph_where_the_alias_was_installed(compiler):
    class Wrapper(Plain):
        def forward(self, input_ids):
            return self.model(input_ids)

    install_alias(Wrapper, "model", "language_model")
    module = Wrapper()

    assert torch.equal(compiled(module, compiler)(IDS), module(IDS))
    assert compiler.num_graphs == 1


def test_self_assignment_does_not_recompile(compiler):
    module = Guarded()
    call = compiled(module, compiler)
    call(IDS)

    module.model = module.model
    call(IDS)

    assert compiler.num_graphs == 1


def test_a_new_target_is_used(compiler):
    module = Guarded()
    call = compiled(module, compiler)
    call(IDS)

    module.language_model = LanguageModel()

    assert torch.equal(call(IDS), module(IDS))


def test_hasattr_of_an_alias_without_a_target_is_false_in_a_graph(compiler):
    module = AsksForMissing()
    assert torch.equal(compiled(module, compiler)(IDS), IDS + 1)

    del module.language_model
    torch._dynamo.reset()

    assert torch.equal(compiled(module, compiler)(IDS), IDS + 2)


@pytest.mark.parametrize("strict", [False, True])
def test_export_has_the_signature_of_the_plain_wrapper(strict):
    exported = torch.export.export(Guarded(), (IDS,), strict=strict)
    plain = torch.export.export(Plain(), (IDS,), strict=strict)

    assert sorted(exported.state_dict) == sorted(plain.state_dict) == sorted(keys(Plain()))
    assert sorted(exported.graph_signature.parameters) == sorted(plain.graph_signature.parameters)


def test_symbolic_trace_keeps_the_keys():
    module = Guarded()

    traced = torch.fx.symbolic_trace(module)

    assert torch.equal(traced(IDS), module(IDS))
    assert not [key for key in keys(traced) if key.startswith("model.")]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_jit_trace_keeps_the_keys():
    module = Guarded()

    traced = torch.jit.trace(module, IDS)

    assert torch.equal(traced(IDS), module(IDS))
    assert keys(traced) == keys(torch.jit.trace(Plain(), IDS))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_jit_script_works_where_forward_uses_the_target():
    class Small(GuardedSetattrMixin, nn.Module):
        model = ReadOnlyAlias("linear")

        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x):
            return self.linear(x)

    module, x = Small(), torch.ones(1, 2)

    scripted = torch.jit.script(module)

    assert torch.equal(scripted(x), module(x))
    assert keys(scripted) == ["linear.weight", "linear.bias"]
