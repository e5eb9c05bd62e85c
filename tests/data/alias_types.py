"""What mypy and basedpyright make of aliases: a line that ends in `# error` has to be one, and no other line may be."""

from typing import assert_type

from torch import nn

import aliasmix
from aliasmix import GuardedSetattrMixin, ReadOnlyAlias, Unaliased, aliases, explain, install_alias


class LM(nn.Module):
    num_layers: int = 2


class Wrapper(GuardedSetattrMixin, nn.Module):
    subscripted = ReadOnlyAlias[LM]("language_model")
    forward_reference = ReadOnlyAlias["Later"]("language_model")
    expected = ReadOnlyAlias("language_model", expect=LM)
    unknown = ReadOnlyAlias("language_model", on_write="forward")

    def __init__(self) -> None:
        super().__init__()
        self.language_model = LM()


class Later(nn.Module): ...


class Own(Wrapper):
    expected = Unaliased()


def read(wrapper: Wrapper) -> int:
    assert_type(wrapper.subscripted, LM)
    assert_type(wrapper.forward_reference, Later)
    assert_type(wrapper.expected, LM)
    assert_type(wrapper.unknown, nn.Module)
    assert_type(wrapper.language_model, LM)
    assert_type(Wrapper.expected, ReadOnlyAlias[LM])
    assert_type(Wrapper.expected.resolve(wrapper), LM)
    assert_type(aliases(wrapper)["unknown"].target, str)
    assert_type(explain(wrapper, "unknown"), str)
    return wrapper.expected.num_layers


def write(wrapper: Wrapper, own: Own) -> None:
    wrapper.expected = wrapper.expected
    wrapper.expected = LM()
    wrapper.expected = nn.Linear(1, 1)  # error
    wrapper.subscripted = 3  # error
    wrapper.language_model = LM()
    own.expected = 3


ReadOnlyAlias("language_model", on_write="warn")  # error
install_alias(LM, "layers", "model.layers", expect=nn.ModuleList)
install_alias(LM, "layers", "model.layers", on_write="warn")  # error
print(aliasmix.check_everything)  # error


class WrongOrder(nn.Module, GuardedSetattrMixin): ...  # error
