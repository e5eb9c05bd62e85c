"""Aliases on multimodal wrappers of transformers, and the same by hand, under what people do to models."""

import copy
import os
import pickle

import pytest
import torch
from aliased import one_gloo_rank, walk
from torch import nn
from torch.func import functional_call

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")
from transformers import (  # noqa: E402
    Blip2Config,
    Blip2ForConditionalGeneration,
    Blip2QFormerConfig,
    BlipConfig,
    BlipForConditionalGeneration,
    CLIPVisionConfig,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GitConfig,
    GitForCausalLM,
    GPT2Config,
    InstructBlipConfig,
    InstructBlipForConditionalGeneration,
    InstructBlipQFormerConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    OPTConfig,
    Pix2StructConfig,
    Pix2StructForConditionalGeneration,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SiglipVisionConfig,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
)

from aliasmix import AliasWriteError, GuardedSetattrMixin, ReadOnlyAlias, install_alias  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

IDS = torch.tensor([[3, 4, 5]])
VISION = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 4, "patch_size": 2}
TOKENS = {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT = {**TOKENS, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 4}
QFORMER = {**TEXT, "encoder_hidden_size": 8}
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 0], "rope_theta": 1e4}


def opt():
    return OPTConfig(
        **TOKENS,
        hidden_size=8,
        ffn_dim=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        word_embed_proj_dim=8,
        max_position_embeddings=16,
    )


def llava():
    return LlavaConfig(
        vision_config=CLIPVisionConfig(**VISION),
        text_config=LlamaConfig(**GROUPED),
        image_token_index=31,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )


def qwen2_vl():
    return Qwen2VLConfig(
        text_config={**GROUPED, "rope_parameters": ROPE},
        vision_config={"depth": 1, "embed_dim": 8, "hidden_size": 8, "num_heads": 2, "mlp_ratio": 1, "patch_size": 2},
        image_token_id=31,
    )


def gemma3():
    return Gemma3Config(
        vision_config=SiglipVisionConfig(**VISION), text_config=Gemma3TextConfig(**GROUPED), mm_tokens_per_image=4
    )


def blip2():
    return Blip2Config(
        vision_config=VISION, qformer_config=Blip2QFormerConfig(**QFORMER), text_config=opt(), num_query_tokens=2
    )


def instructblip():
    return InstructBlipConfig(
        vision_config=VISION, qformer_config=InstructBlipQFormerConfig(**QFORMER), text_config=opt(), num_query_tokens=2
    )


def vision_encoder_decoder():
    return VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        ViTConfig(**VISION), GPT2Config(**TOKENS, n_embd=8, n_layer=1, n_head=2, n_positions=16)
    )


def pix2struct():
    return Pix2StructConfig(
        text_config={**TOKENS, "hidden_size": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2},
        vision_config={**VISION, "patch_embed_hidden_size": 12, "d_ff": 8, "d_kv": 4, "seq_len": 4},
    )


def blip():
    return BlipConfig(
        text_config={
            **TEXT,
            "encoder_hidden_size": 8,
            "projection_dim": 8,
            "max_position_embeddings": 16,
            "sep_token_id": 2,
        },
        vision_config=VISION,
        projection_dim=8,
    )


def git():
    return GitConfig(vision_config=VISION, **TEXT, max_position_embeddings=16)


class AliasedLlava(GuardedSetattrMixin, LlavaForConditionalGeneration):  # the language model is inside `model`
    language_model = ReadOnlyAlias("model.language_model", expect=LlamaModel)


class AliasedGemma3(GuardedSetattrMixin, Gemma3ForConditionalGeneration):
    language_model = ReadOnlyAlias("model.language_model")


class AliasedBlip2(GuardedSetattrMixin, Blip2ForConditionalGeneration):  # the language model is beside vision
    model = ReadOnlyAlias("language_model")


class AliasedVisionEncoderDecoder(GuardedSetattrMixin, VisionEncoderDecoderModel):  # encoder and decoder
    model = ReadOnlyAlias("decoder")


class AliasedBlip(GuardedSetattrMixin, BlipForConditionalGeneration):  # a text decoder that has no `.model`
    model = ReadOnlyAlias("text_decoder")


class InstalledQwen2VL(Qwen2VLForConditionalGeneration): ...


class InstalledInstructBlip(InstructBlipForConditionalGeneration): ...


class InstalledPix2Struct(Pix2StructForConditionalGeneration): ...


class InstalledGit(GitForCausalLM): ...


install_alias(InstalledQwen2VL, "language_model", "model.language_model")
install_alias(InstalledInstructBlip, "model", "language_model")
install_alias(InstalledPix2Struct, "model", "decoder")
install_alias(InstalledGit, "model", "git")

WRAPPERS = [
    (AliasedLlava, LlavaForConditionalGeneration, llava, "language_model"),
    (InstalledQwen2VL, Qwen2VLForConditionalGeneration, qwen2_vl, "language_model"),
    (AliasedGemma3, Gemma3ForConditionalGeneration, gemma3, "language_model"),
    (AliasedBlip2, Blip2ForConditionalGeneration, blip2, "model"),
    (InstalledInstructBlip, InstructBlipForConditionalGeneration, instructblip, "model"),
    (AliasedVisionEncoderDecoder, VisionEncoderDecoderModel, vision_encoder_decoder, "model"),
    (InstalledPix2Struct, Pix2StructForConditionalGeneration, pix2struct, "model"),
    (AliasedBlip, BlipForConditionalGeneration, blip, "model"),
    (InstalledGit, GitForCausalLM, git, "model"),
]


class Case:
    """An aliased wrapper after its alias was assigned to itself, and the wrapper as it was without an alias."""

    def __init__(self, cls, original, config, alias):
        torch.manual_seed(0)
        self.alias, self.original = alias, original(config()).eval()
        torch.manual_seed(0)
        self.module = cls(config()).eval()
        self.before = walk(self.module)
        setattr(self.module, alias, getattr(self.module, alias))

    def decoder(self, module):
        return getattr(module, self.alias)


@pytest.fixture(params=WRAPPERS, ids=[cls.__name__ for cls, *_ in WRAPPERS])
def case(request):
    return Case(*request.param)


class TextOnly(nn.Module):
    """Runs the decoder through the alias; with_alias=False is the same without it."""

    def __init__(self, wrapper, path):
        super().__init__()
        self.wrapper, self.path = wrapper, path

    def forward(self, input_ids):
        decoder = self.wrapper
        for name in self.path.split("."):
            decoder = getattr(decoder, name)
        return decoder(input_ids=input_ids, use_cache=False)[0]


def ties(module):
    names = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(same for same in names.values() if len(same) > 1)


def test_every_walk_is_that_of_the_original_before_and_after(case):
    assert case.before == walk(case.module) == walk(case.original)
    with pytest.raises(AliasWriteError):
        setattr(case.module, case.alias, nn.Linear(1, 1))
    assert walk(case.module) == walk(case.original)


def test_saved_model_loads_completely_and_into_the_original(case, tmp_path):
    case.module.save_pretrained(tmp_path)

    for cls in (type(case.module), type(case.original)):
        loaded, info = cls.from_pretrained(tmp_path, output_loading_info=True)
        assert not any(info.values()), info
        state = loaded.state_dict()
        assert list(state) == list(case.original.state_dict())
        assert all(torch.equal(state[name], tensor) for name, tensor in case.module.state_dict().items())
        assert ties(loaded) == ties(case.original)


def test_ties_are_kept(case):
    assert ties(case.module) == ties(case.original)
    if isinstance(case.module, (AliasedLlava, AliasedGemma3, AliasedBlip)):
        assert ties(case.module)


@pytest.mark.parametrize("travel", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_keep_their_own_link(case, travel):
    copied = travel(case.module)

    setattr(copied, case.alias, case.decoder(copied))

    assert walk(copied) == walk(case.original)
    assert case.decoder(copied) is not case.decoder(case.module)
    assert any(case.decoder(copied) is module for module in copied.modules())


def test_compiles_to_the_graphs_of_the_original_and_exports_its_signature(case):
    def count_graphs(path):
        torch._dynamo.reset()
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        module = TextOnly(case.module, path)
        assert torch.equal(torch.compile(module, backend=backend)(IDS), module(IDS))
        torch._dynamo.reset()
        return len(graphs)

    target = getattr(type(case.module), case.alias).target
    assert count_graphs(case.alias) == count_graphs(target)

    exported = torch.export.export(TextOnly(case.module, case.alias), (IDS,), strict=False)
    assert sorted(exported.state_dict) == sorted(f"wrapper.{name}" for name in case.original.state_dict())


def test_functional_call_leaves_the_weights_untouched(case):
    module = TextOnly(case.module, case.alias)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    functional_call(module, {name: torch.zeros_like(p) for name, p in module.named_parameters()}, (IDS,))

    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert ties(case.module) == ties(case.original)


def test_accelerate_finds_the_ties_and_the_device_map_of_the_original(case):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

    def device_map(module):
        size = sum(p.numel() * 4 for p in module.parameters())
        return accelerate.infer_auto_device_map(module, max_memory={"cpu": size // 2, "disk": 10 * size})

    assert device_map(case.module) == device_map(case.original)
    assert accelerate.utils.find_tied_parameters(case.module) == accelerate.utils.find_tied_parameters(case.original)


def test_peft_adds_the_adapters_of_the_original(case):
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def adapters(module):
        linear = [name for name, inner in module.named_modules() if type(inner) is nn.Linear and "." in name]
        config = peft.LoraConfig(r=1, target_modules=linear)
        return [key for key in peft.inject_adapter_in_model(config, module).state_dict() if "lora_" in key]

    found = adapters(case.module)

    assert found
    assert found == adapters(case.original)


def test_accelerate_offloads_and_dispatches_through_the_alias(case):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    expected = TextOnly(case.original, getattr(type(case.module), case.alias).target)(IDS)

    for prepare in (accelerate.cpu_offload, lambda m: accelerate.dispatch_model(m, device_map={"": "cpu"})):
        module = copy.deepcopy(case.module)
        prepare(module)
        assert torch.equal(TextOnly(module, case.alias)(IDS), expected)
        assert list(module.state_dict()) == list(case.original.state_dict())


@pytest.fixture(scope="module")
def one_rank():
    with one_gloo_rank() as mesh:
        yield mesh


def test_fsdp2_keeps_keys_and_guard(case, one_rank):
    from torch.distributed.fsdp import fully_shard

    fully_shard(case.module, mesh=one_rank)

    setattr(case.module, case.alias, case.decoder(case.module))

    assert walk(case.module) == walk(case.original)
    with pytest.raises(AliasWriteError):
        setattr(case.module, case.alias, nn.Linear(1, 1))


# -- the patterns that engines wrote by hand, around the same decoder ----------------------------------------------


class Base(PreTrainedModel):
    config_class = LlamaConfig
    base_model_prefix = "language_model"
    _no_split_modules: list = []

    def __init__(self, config):
        super().__init__(config)
        self.vision_tower = nn.Linear(8, 8)
        self.language_model = LlamaForCausalLM(config)
        self.post_init()

    def forward(self, input_ids):
        return self.language_model(input_ids=input_ids, use_cache=False).logits


class ByProperty(Base):
    @property
    def model(self):
        return self.language_model


class ByPropertyAndSetattr(ByProperty):
    def __setattr__(self, name, value):
        if name == "model":
            return
        super().__setattr__(name, value)


class ByRegistration(Base):
    def __init__(self, config):
        super().__init__(config)
        self.model = self.language_model


class ByAlias(GuardedSetattrMixin, Base):
    model = ReadOnlyAlias("language_model")


class PrefixIsAlias(ByAlias):
    base_model_prefix = "model"


def self_assigned(cls):
    torch.manual_seed(0)
    module = cls(LlamaConfig(**GROUPED, tie_word_embeddings=False)).eval()
    module.model = module.model
    return module


@pytest.mark.parametrize("cls", [ByProperty, ByRegistration])
def test_patterns_that_register_twice_break(cls, tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    module = self_assigned(cls)
    names = [name for name in module.state_dict() if not name.startswith("model.")]
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    assert len(before) == len(names) + len(module.language_model.state_dict())
    with pytest.raises(RuntimeError, match=r"shared tensors|share memory"):
        module.save_pretrained(tmp_path)
    with pytest.raises(IndexError):
        accelerate.infer_auto_device_map(module, max_memory={"cpu": 4000, "disk": 10**6})
    functional_call(module, {name: torch.zeros_like(before[name]) for name in names}, (IDS,))
    assert not all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_second_registration_doubles_the_lora_keys_and_the_alias_does_not():
    peft = pytest.importorskip("peft", reason="peft is not installed")

    def num_lora_keys(cls):
        config = peft.LoraConfig(r=1, target_modules=["q_proj"])
        return sum("lora_" in key for key in peft.inject_adapter_in_model(config, self_assigned(cls)).state_dict())

    num_keys = {cls.__name__: num_lora_keys(cls) for cls in (ByProperty, ByRegistration, ByAlias)}
    assert num_keys == {"ByProperty": 4, "ByRegistration": 4, "ByAlias": 2}


def test_pattern_that_drops_every_value_loses_a_module_without_a_word():
    module, replacement = self_assigned(ByPropertyAndSetattr), nn.Linear(1, 1)

    module.model = replacement

    assert module.model is not replacement


def test_the_alias_does_none_of_that(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    module = self_assigned(ByAlias)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}

    module.save_pretrained(tmp_path)
    accelerate.infer_auto_device_map(module, max_memory={"cpu": 4000, "disk": 10**6})
    functional_call(module, {name: torch.zeros_like(tensor) for name, tensor in before.items()}, (IDS,))

    assert list(module.state_dict()) == list(self_assigned(ByPropertyAndSetattr).state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    with pytest.raises(AliasWriteError):
        module.model = nn.Linear(1, 1)


def test_base_model_prefix_has_to_be_the_target_and_not_the_alias(tmp_path):
    """transformers compares names and not modules: a text-only checkpoint loads where the prefix is registered."""
    torch.manual_seed(1)
    text_only = LlamaForCausalLM(LlamaConfig(**GROUPED, tie_word_embeddings=False))
    text_only.save_pretrained(tmp_path)

    loaded, info = ByAlias.from_pretrained(tmp_path, output_loading_info=True)
    _, wrong = PrefixIsAlias.from_pretrained(tmp_path, output_loading_info=True)

    assert torch.equal(loaded.model.lm_head.weight, text_only.lm_head.weight)
    assert not [name for name in info["missing_keys"] if name.startswith("language_model.")]
    assert any(name.startswith("language_model.") for name in wrong["missing_keys"])
