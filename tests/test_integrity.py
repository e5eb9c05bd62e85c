"""check_module: one finding for each thing that is registered twice, shared, cyclic, hidden or aliased wrongly."""

import time
import weakref

import pytest
import torch
from expecttest import assert_expected_inline
from safetensors.torch import save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from aliasmix import GuardedSetattrMixin, ReadOnlyAlias
from aliasmix.integrity import assert_clean, check_module
from aliasmix.storage import overlap
from aliasmix.walk import walk


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Inner()
        self.lm_head = nn.Linear(4, 8, bias=False)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.language_model = LM()


class Dup(Plain):
    def __init__(self):
        super().__init__()
        self.model = self.language_model


class Prop(Plain):
    @property
    def model(self):
        return self.language_model


class Aliased(GuardedSetattrMixin, Plain):
    model = ReadOnlyAlias("language_model", expect=LM)


def told(report):
    return [(f.code, *f.paths) for f in report.findings]


def codes(report):
    return [f.code for f in report.findings]


def test_a_clean_wrapper_has_no_findings():
    report = check_module(Aliased())

    assert told(report) == []
    assert report.ok and report.stats == {"modules": 8, "tensors": 6}


def test_the_walk_agrees_with_that_of_modules_without_cycles():
    for module in (Dup(), tied(), Aliased(), nn.TransformerDecoderLayer(4, 1)):
        found = walk(module)

        assert list(found.modules.items()) == list(module.named_modules())
        names = [name for name, _ in module.named_modules(remove_duplicate=False)]
        assert {path for paths in found.paths.values() for path in paths} <= set(names)
        slots = {slot.name: id(slot.tensor) for slot in found.slots if slot.kind == "param"}
        assert slots.items() <= {(n, id(p)) for n, p in module.named_parameters(remove_duplicate=False)}
        assert set(slots.values()) == {id(p) for p in module.parameters()}


def test_a_duplicated_module_is_one_finding():
    wrapper = Dup()
    too_many = len(wrapper.state_dict()) - len(Plain().state_dict())

    report = check_module(wrapper)

    assert told(report) == [("DUP_MODULE", "language_model", "model")]
    assert f": {too_many} state_dict keys too many" in report.findings[0].detail
    assert_expected_inline(
        report.render(),
        """\
error DUP_MODULE language_model = model
    one LM is registered under 2 names: 6 state_dict keys too many
    fix: declare `model = ReadOnlyAlias('language_model')` instead of assigning, or allow 'model = language_model'
1 error; 8 modules, 6 tensors""",
    )


def test_a_self_assignment_behind_a_property_is_one_finding_that_names_the_property():
    wrapper = Prop()
    wrapper.model = wrapper.model

    report = check_module(wrapper)

    assert told(report) == [("DUP_MODULE", "language_model", "model")]
    assert "'model' is hidden by Prop.model (property)" in report.findings[0].detail


def test_a_list_entry_that_is_also_an_attribute_is_found():
    module = nn.Module()
    module.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    module.last = module.blocks[1]

    report = check_module(module)

    assert told(report) == [("DUP_MODULE", "blocks.1", "last")]


def test_a_shared_module_without_saved_tensors_is_info():
    act = nn.GELU()

    report = check_module(nn.Sequential(nn.Linear(2, 2), act, nn.Linear(2, 2), act))

    assert [(f.code, f.severity) for f in report.findings] == [("DUP_MODULE", "info")]


@pytest.mark.parametrize(
    "bypass",
    [
        lambda w: nn.Module.__setattr__(w, "model", w.language_model),
        lambda w: w._modules.__setitem__("model", w.language_model),
    ],
    ids=["nn.Module.__setattr__", "_modules"],
)
def test_what_went_round_the_guard_is_found(bypass):
    wrapper = Aliased()
    bypass(wrapper)

    report = check_module(wrapper)

    assert told(report) == [("DUP_MODULE", "language_model", "model")]


def test_another_module_behind_a_guarded_alias_is_shadowed():
    wrapper = Aliased()
    nn.Module.__setattr__(wrapper, "model", LM())

    report = check_module(wrapper)

    assert told(report) == [("SHADOWED_REGISTRATION", "model")]
    assert "hidden by Aliased.model (ReadOnlyAlias)" in report.findings[0].detail


def test_an_entry_of_dict_behind_an_alias_is_shadowed():
    wrapper = Aliased()
    wrapper.__dict__["model"] = LM()

    report = check_module(wrapper)

    assert told(report) == [("SHADOWED_REGISTRATION", "model")]
    del wrapper.model
    assert told(check_module(wrapper)) == []


def test_a_class_placeholder_that_hides_a_child_is_shadowed():
    class Placeholder(nn.Module):
        head = None

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 2)

    report = check_module(Placeholder())

    assert told(report) == [("SHADOWED_REGISTRATION", "head")]


def test_a_property_that_returns_the_registered_child_hides_nothing():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self._modules["head"] = nn.Linear(2, 2)

        @property
        def head(self):
            return self._modules["head"]

    assert told(check_module(Reader())) == []


def test_a_cycle_is_a_finding_and_no_recursion():
    parent = Plain()
    parent.language_model.parent = parent
    with pytest.raises(RecursionError):
        parent.state_dict()

    report = check_module(parent)

    assert told(report) == [("CYCLE", "language_model.parent", "(root)")]


def test_a_very_deep_module_does_not_recurse():
    root = module = nn.Module()
    for _ in range(5000):
        module.child = nn.Module()
        module = module.child
    module.loop = root

    assert len(walk(root).modules) == 5001
    assert codes(check_module(root)) == ["CYCLE"]
    while module is not root:  # or its destruction recurses
        root._modules, root = {}, root.child


# Ties


def tied():
    lm = LM()
    lm.lm_head.weight = lm.model.embed_tokens.weight
    return lm


def test_a_tie_is_one_finding_with_both_names_and_predicts_save_file():
    lm = tied()

    report = check_module(lm)

    assert told(report) == [("TIED_TENSOR", "model.embed_tokens.weight", "lm_head.weight")]
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(lm.state_dict(), "never-written.safetensors")


@pytest.mark.parametrize("rule", ["lm_head = model.embed_tokens", "model.embed_tokens.weight=lm_head.weight"])
def test_an_allowed_tie_is_info(rule):
    report = check_module(tied(), allow=[rule])

    assert report.ok and [f.severity for f in report.findings] == ["info"]
    assert "allowed by" in report.findings[0].detail


def test_a_module_level_rule_allows_a_duplicated_module():
    assert check_module(Dup(), allow=["model = language_model"]).ok


def test_three_names_need_rules_that_connect_them():
    lm = tied()
    lm.extra = nn.Embedding(8, 4)
    lm.extra.weight = lm.lm_head.weight
    first = "lm_head = model.embed_tokens"

    assert not check_module(lm, allow=[first]).ok
    assert check_module(lm, allow=[first, "extra = lm_head"]).ok


def test_a_rule_that_nothing_needs_is_told():
    assert told(check_module(Aliased(), allow=["a = b"])) == [("ALLOW_UNUSED", "a = b")]


@pytest.mark.parametrize(
    "keys",
    [
        {"lm_head.weight": "model.embed_tokens.weight"},
        ["lm_head.weight"],
        {r"lm_h\w+\.weight": "model.embed_tokens"},
    ],
    ids=["mapping", "list", "regex"],
)
def test_ties_declared_the_hugging_face_way_are_info(keys):
    wrapper = nn.Module()
    wrapper.language_model = tied()
    wrapper.language_model._tied_weights_keys = keys

    report = check_module(wrapper)

    assert report.ok and codes(report) == ["TIED_TENSOR"]
    assert "declared by _tied_weights_keys of language_model" in report.findings[0].detail


def test_a_tie_may_be_declared_in_parts_by_inner_and_outer_classes():
    lm = tied()
    lm.model.shared = nn.Embedding(8, 4)
    lm.model.shared.weight = lm.lm_head.weight
    lm.model._tied_weights_keys = {"embed_tokens.weight": "shared.weight"}
    assert not check_module(lm).ok

    lm._tied_weights_keys = {"lm_head.weight": "model.shared.weight"}
    report = check_module(lm)
    assert report.ok and codes(report) == ["TIED_TENSOR"]


def test_an_undeclared_tie_beside_declared_ones_is_an_error():
    lm = tied()
    lm._tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    lm.model.layers[1].weight = lm.model.layers[0].weight

    report = check_module(lm)

    assert [(f.code, f.severity) for f in report.findings] == [("TIED_TENSOR", "error"), ("TIED_TENSOR", "info")]


@pytest.mark.parametrize("name", ["T5", "Bart"])
def test_transformers_ties_need_no_rule(name):
    import transformers

    config = getattr(transformers, f"{name}Config")(vocab_size=16, d_model=16, num_layers=1, encoder_layers=1)
    with torch.device("meta"):
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config)

    report = check_module(model)

    assert report.ok, report.render()
    assert {"DUP_MODULE", "TIED_TENSOR"} & set(codes(report))


def test_a_malformed_rule_is_refused():
    with pytest.raises(ValueError, match="rule 'lm_head' is not of the form"):
        check_module(Plain(), allow=["lm_head"])


# Storage


def test_views_are_told_apart():
    module, base = nn.Module(), torch.arange(24.0)
    module.register_buffer("whole", base)
    module.register_buffer("slice", base[8:16])
    assert told(check_module(module)) == [("SHARED_STORAGE", "whole", "slice")]

    module.register_buffer("whole", base[:8])
    report = check_module(module)
    assert report.ok and told(report) == [("DISJOINT_VIEWS", "whole", "slice")]


def test_a_transposed_tie_is_shared_storage():
    module = nn.Module()
    module.a = nn.Parameter(torch.zeros(3, 4))
    module.b = nn.Parameter(module.a.data.t())

    assert codes(check_module(module)) == ["SHARED_STORAGE"]


def test_column_slices_of_one_matrix_do_not_overlap():
    module, base = nn.Module(), torch.zeros(4, 6)
    module.q, module.k = nn.Parameter(base[:, :2]), nn.Parameter(base[:, 2:])

    report = check_module(module)

    assert report.ok and codes(report) == ["DISJOINT_VIEWS"]


def test_overlap_agrees_with_the_elements():
    base = torch.arange(60).reshape(3, 4, 5)
    slices = [slice(None), slice(0, 2), slice(1, 3), slice(2, 3), slice(0, 1)]
    views = [base[a, b, c] for a in slices for b in slices[1:] for c in slices[:4]]

    for a in views:
        for b in views[::7]:
            assert overlap(a, b) == bool(set(a.flatten().tolist()) & set(b.flatten().tolist()))


@pytest.mark.parametrize("make", [Plain, lambda: nn.Sequential(nn.Linear(0, 2), nn.Linear(0, 2))])
@pytest.mark.parametrize("context", [lambda: torch.device("cpu"), lambda: torch.device("meta"), FakeTensorMode])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_tensors_without_data_are_not_taken_for_one(make, context):
    with context():
        module = make()

    assert told(check_module(module)) == []


@pytest.mark.parametrize("context", [lambda: torch.device("meta"), FakeTensorMode])
def test_ties_are_found_without_data(context):
    with context():
        lm = tied()

    assert told(check_module(lm)) == [("TIED_TENSOR", "model.embed_tokens.weight", "lm_head.weight")]


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_sparse_and_quantised_tensors_are_compared_by_what_they_are():
    module = nn.Module()
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    module.register_buffer("again", module.sparse)
    module.register_buffer("other", torch.eye(3).to_sparse())
    module.register_buffer("quantised", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))
    module.register_buffer("alike", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))

    assert told(check_module(module)) == [("TIED_TENSOR", "sparse", "again")]


def test_parametrised_and_lazy_modules_are_clean():
    wrapper = Aliased()
    nn.utils.parametrizations.weight_norm(wrapper.language_model.lm_head)
    wrapper.lazy = nn.LazyLinear(3)

    assert told(check_module(wrapper)) == []


def test_sharded_parameters_are_clean_and_their_ties_found(tmp_path):
    from torch import distributed
    from torch.distributed.fsdp import fully_shard

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (1,))
        clean = fully_shard(Aliased(), mesh=mesh)
        lm = tied()
        fully_shard(lm, mesh=mesh)

        assert told(check_module(clean)) == []
        assert told(check_module(lm)) == [("TIED_TENSOR", "model.embed_tokens.weight", "lm_head.weight")]
    finally:
        distributed.destroy_process_group()


# Aliases


def alias_report(cls, change=lambda w: None):
    wrapper = cls()
    change(wrapper)
    return check_module(wrapper)


def test_an_alias_that_leads_nowhere_is_found():
    report = alias_report(Aliased, lambda w: delattr(w, "language_model"))

    assert told(report) == [("ALIAS_UNRESOLVED", "model")]
    assert "hop 1 'language_model' missing on Aliased" in report.findings[0].detail


def test_a_none_target_is_a_warning_unless_declared():
    class Declared(Aliased):
        model = ReadOnlyAlias("language_model", none_is_missing=True)

    report = alias_report(Aliased, lambda w: setattr(w, "language_model", None))

    assert report.ok and [(f.code, f.severity) for f in report.findings] == [("ALIAS_UNRESOLVED", "warning")]
    assert told(alias_report(Declared, lambda w: setattr(w, "language_model", None))) == []


def test_an_alias_to_another_type_is_found_and_a_compiled_target_is_not():
    report = alias_report(Aliased, lambda w: setattr(w, "language_model", nn.Linear(2, 2)))

    assert told(report) == [("ALIAS_TYPE", "model")]
    wrapper = Aliased()
    wrapper.language_model = torch.compile(wrapper.language_model, backend="eager")
    assert told(check_module(wrapper)) == []


def test_an_alias_to_something_unregistered_is_found():
    def hide(w):
        lm = w.language_model
        del w.language_model
        w.__dict__["language_model"] = lm

    report = alias_report(Aliased, hide)

    assert told(report) == [("ALIAS_TARGET_UNREGISTERED", "model")]


def test_aliases_to_what_is_computed_parameters_and_plain_attributes_are_fine():
    class Many(GuardedSetattrMixin, Plain):
        weight = ReadOnlyAlias("language_model.lm_head.weight")
        num = ReadOnlyAlias("language_model.lm_head.out_features")
        step = ReadOnlyAlias("language_model.forward")

    wrapper = Many()
    assert told(check_module(wrapper)) == []
    nn.utils.parametrizations.weight_norm(wrapper.language_model.lm_head)
    assert told(check_module(wrapper)) == []


def test_a_setattr_that_goes_round_the_guard_is_found():
    class Bypass(Aliased):
        def __setattr__(self, name, value):
            nn.Module.__setattr__(self, name, value)

    report = check_module(Bypass())

    assert told(report) == [("ALIAS_UNGUARDED", "model")]
    assert "Bypass.__setattr__ does not come to the guard" in report.findings[0].detail


def test_a_base_model_prefix_that_names_an_alias_is_found():
    class Flagged(Aliased):
        base_model_prefix = "model"

    class Right(Aliased):
        base_model_prefix = "language_model"

    assert told(check_module(Flagged())) == [("ALIAS_IS_BASE_MODEL_PREFIX", "model")]
    assert told(check_module(Right())) == []


def test_aliases_are_not_followed_when_not_asked_for():
    wrapper = Aliased()
    del wrapper.language_model

    assert told(check_module(wrapper, aliases=False)) == []


def test_unregistered_modules_are_found_on_request():
    wrapper = Aliased()
    wrapper.extra = [nn.Linear(2, 2), wrapper.language_model]
    wrapper.table = {"a": nn.Linear(2, 2)}
    wrapper.parent = weakref.ref(wrapper)

    assert told(check_module(wrapper)) == []
    report = check_module(wrapper, unregistered=True)
    assert told(report) == [("UNREGISTERED_MODULE", "extra[0]"), ("UNREGISTERED_MODULE", "table['a']")]


def test_assert_clean_raises_the_report():
    assert_clean(Aliased())
    with pytest.raises(AssertionError, match="Dup is not clean\nerror DUP_MODULE language_model = model"):
        assert_clean(Dup())


def test_columns_of_one_tensor_do_not_overlap():
    base = torch.zeros(4, 6)

    assert not overlap(base[:, 1], base[:, 4])
    assert not overlap(base[:, 1], base[2:, 4])
    assert overlap(base[:, 1], base[1:, 1])


def test_an_alias_whose_property_raises_is_a_finding():
    class Wrapper(GuardedSetattrMixin, nn.Module):
        model = ReadOnlyAlias("broken")

        @property
        def broken(self):
            raise RuntimeError("no weights yet")

    (found,) = check_module(Wrapper()).findings

    assert found.code == "ALIAS_UNRESOLVED"
    assert found.detail.endswith("hop 1 'broken' of Wrapper raises RuntimeError: no weights yet")


def test_many_duplicates_and_nested_views_are_told_in_seconds():
    root = nn.Module()
    for i in range(1000):
        root.add_module(f"first{i}", nn.Linear(1, 1))
        root.add_module(f"second{i}", root.get_submodule(f"first{i}"))
    base = torch.zeros(1000, 4)
    for i in range(1000):
        root.register_parameter(f"view{i}", nn.Parameter(base[: i + 1]))
    began = time.process_time()

    codes = [f.code for f in check_module(root).findings]

    assert time.process_time() - began < 5  # 0.2; it was 25 with every pair compared
    assert codes.count("DUP_MODULE") == 1000
    assert codes.count("SHARED_STORAGE") == 1


def test_a_class_in_place_of_a_module_is_named():
    with pytest.raises(TypeError, match=r"found <class '.*Linear'>; is it a class that is still to be called\?"):
        check_module(nn.Linear)
