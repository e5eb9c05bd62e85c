"""What torch does to modules, done to an aliased wrapper: everything is as for the wrapper without an alias."""

import copy
import io

import pytest
import torch
from aliased import NUM_KEYS, Duplicate, Guarded, LanguageModel, Plain, keys, one_gloo_rank, walk
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper, checkpoint_wrapper
from torch.func import functional_call, stack_module_state

from aliasmix import AliasWriteError, GuardedSetattrMixin, ReadOnlyAlias

IDS = torch.tensor([[1, 2, 3]])


@pytest.fixture
def wrapper():
    torch.manual_seed(0)
    return Guarded()


def test_every_traversal_equals_that_of_the_plain_wrapper(wrapper):
    assert walk(wrapper) == walk(Plain())
    assert [m for m in wrapper.modules() if m is wrapper.model] == [wrapper.language_model]


def test_moves_and_casts_visit_every_module_once(wrapper):
    visited = []

    wrapper.apply(visited.append)
    wrapper.half().float().to("meta").to_empty(device="cpu")

    assert len(visited) == len(list(Plain().modules()))
    assert keys(wrapper) == keys(Plain())


def test_a_copy_keeps_the_link_to_its_own_target(wrapper):
    saved = io.BytesIO()
    torch.save(wrapper, saved)
    saved.seek(0)

    for module in (copy.deepcopy(wrapper), torch.load(saved, weights_only=False)):
        assert module.model is module.language_model is not wrapper.language_model


def test_functional_call_leaves_the_weights_untouched(wrapper):
    before = {name: tensor.clone() for name, tensor in wrapper.state_dict().items()}
    replaced = {name: torch.zeros_like(tensor) for name, tensor in wrapper.state_dict().items()}

    result = functional_call(wrapper, replaced, (IDS,))

    assert not result.any()
    assert all(torch.equal(tensor, before[name]) for name, tensor in wrapper.state_dict().items())
    assert all(isinstance(p, nn.Parameter) for p in wrapper.parameters())


def test_functional_call_on_a_duplicate_overwrites_weights():
    """The damage of a second registration. Should torch repair it, the README has a sentence that is out of date."""
    duplicate = Duplicate()
    before = {name: tensor.clone() for name, tensor in duplicate.state_dict().items()}

    functional_call(duplicate, {name: torch.zeros_like(before[name]) for name in keys(Plain())}, (IDS,))

    changed = [name for name, tensor in duplicate.state_dict().items() if not torch.equal(tensor, before[name])]
    assert changed


def test_hooks_of_a_walk_with_duplicates_run_once_for_each_module(wrapper):
    calls = []
    for _, module in wrapper.named_modules(remove_duplicate=False):
        module.register_forward_hook(lambda module, *_: calls.append(module))

    wrapper(IDS)

    assert len(calls) == len(set(calls)) == 7  # wrapper, language model, backbone, embedding, two layers, head

def test_optimizer_over_a_walk_with_duplicates_does_not_warn(wrapper):
    params = [p for _, p in wrapper.named_parameters(remove_duplicate=False)]

    torch.optim.SGD(params, lr=0.1)  # "duplicate parameters" is a warning, and warnings are errors here

    assert len(params) == len(set(params))


def test_stack_module_state_stacks_every_parameter_once(wrapper):
    params, buffers = stack_module_state([wrapper, copy.deepcopy(wrapper)])

    assert len(params) == len(dict(Plain().named_parameters()))
    assert len(buffers) == 2


def test_alias_follows_a_wrapped_target(wrapper):
    wrapper.language_model = checkpoint_wrapper(wrapper.language_model)

    assert isinstance(wrapper.model, CheckpointWrapper)
    assert isinstance(Duplicate().model, LanguageModel)


def test_alias_follows_a_loop_that_replaces_the_children(wrapper):
    for name, child in wrapper.named_children():
        setattr(wrapper, name, nn.Sequential(child))

    assert isinstance(wrapper.model, nn.Sequential)
    assert len(keys(wrapper)) == NUM_KEYS


def test_safetensors_saves_and_loads_through_either_function(wrapper, tmp_path):
    safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

    safetensors_torch.save_file(wrapper.state_dict(), tmp_path / "file.safetensors")
    safetensors_torch.save_model(wrapper, str(tmp_path / "model.safetensors"))
    with pytest.raises(RuntimeError, match="share memory"):
        safetensors_torch.save_file(Duplicate().state_dict(), tmp_path / "duplicate.safetensors")

    for name in ("file", "model"):
        loaded = Guarded()
        assert safetensors_torch.load_model(loaded, str(tmp_path / f"{name}.safetensors")) == (set(), [])
        assert torch.equal(loaded.model.lm_head.weight, wrapper.language_model.lm_head.weight)


def test_safetensors_keeps_the_registered_name_where_a_duplicate_keeps_the_alphabetically_first(tmp_path):
    """`model` sorts before `thinker`, so a file of the duplicated wrapper has lost the names that loaders want."""
    safetensors_torch = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")

    class Base(nn.Module):
        def __init__(self):
            super().__init__()
            self.thinker = nn.Linear(2, 2)

    class Duplicated(Base):
        def __init__(self):
            super().__init__()
            self.model = self.thinker

    class Aliased(GuardedSetattrMixin, Base):
        model = ReadOnlyAlias("thinker")

    saved = {}
    for cls in (Duplicated, Aliased):
        safetensors_torch.save_model(cls(), str(tmp_path / "model.safetensors"))
        saved[cls.__name__] = sorted(safetensors_torch.load_file(tmp_path / "model.safetensors"))

    assert saved == {
        "Duplicated": ["model.bias", "model.weight"],
        "Aliased": ["thinker.bias", "thinker.weight"],
    }


@pytest.fixture
def one_rank():
    with one_gloo_rank() as mesh:
        yield mesh


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_fsdp2_shards_runs_and_gathers_an_aliased_wrapper(wrapper, one_rank):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    for layer in wrapper.layers:
        fully_shard(layer, mesh=one_rank)
    fully_shard(wrapper, mesh=one_rank)

    wrapper.model = wrapper.model
    with pytest.raises(AliasWriteError):
        wrapper.model = nn.Linear(1, 1)
    wrapper(IDS).sum().backward()

    assert type(wrapper).__name__ == "FSDPGuarded"
    assert keys(wrapper) == keys(Plain())
    gathered = get_model_state_dict(wrapper, options=StateDictOptions(full_state_dict=True))
    assert sorted(gathered) == sorted(keys(Plain()))
    assert wrapper.model.lm_head.weight.grad is not None


def test_data_parallel_replicas_keep_the_guard(wrapper):
    replica = wrapper._replicate_for_data_parallel()
    replica._modules = dict(wrapper._modules)

    replica.model = replica.model

    assert list(replica._modules) == ["vision_tower", "language_model"]
