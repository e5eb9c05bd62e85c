"""Loading and saving: every tensor in its place, nothing else accepted, and no half-written checkpoint."""

# ruff: noqa: E501 - the messages are pinned as they are printed

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import expecttest
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from aliasmix.errors import UnreadableFileError
from aliasmix.tensorinfo import read_checkpoint
from kimi_k25 import (
    ConfigError,
    KimiK25ForConditionalGeneration,
    load_config,
    load_model,
    save_checkpoint,
)
from kimi_k25.layers.int4 import dequantize_int4

REPOSITORY = Path(__file__).parents[1]
ORACLE = REPOSITORY / "tests" / "data" / "oracle"
BF16, INT4 = ORACLE / "tiny_bf16", ORACLE / "tiny_int4"
EXPERTS = "language_model.model.layers.1.mlp.experts"

Tensors = dict[str, Tensor]


def file_tensors(folder: Path) -> Tensors:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def edited(target: Path, source: Path, edit: Callable[[Tensors], object]) -> Path:
    """A one-file copy of a checkpoint with its tensors edited."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = file_tensors(source)
    edit(tensors)
    save_file(tensors, target / "model.safetensors")
    return target


def renamed(pattern: str, replacement: str) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if re.match(pattern, name)]:
            tensors[re.sub(pattern, replacement, name)] = tensors.pop(name)

    return edit


def state(model: KimiK25ForConditionalGeneration) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def same(a: Tensors, b: Tensors) -> bool:
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and torch.equal(a[n], b[n]) for n in a)


def stacked(tensors: Tensors) -> Tensors:
    """The model's state out of a checkpoint's tensors, the slow way."""
    result: Tensors = {}
    parts: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight(.*)", name)
        if match is None:
            result[name] = tensor
        elif match[4] != "_shape":
            proj = "down_proj" if match[3] == "down" else "gate_up_proj"
            parts.setdefault(f"{match[1]}.{proj}{match[4]}", {})[int(match[2]), match[3]] = tensor
    for name, by_expert in parts.items():
        experts = range(max(expert for expert, _ in by_expert) + 1)
        projs = ("down",) if "down" in name else ("gate", "up")
        result[name] = torch.stack([torch.cat([by_expert[e, p] for p in projs]) for e in experts])
    return result


@pytest.mark.parametrize("folder", [BF16, INT4], ids=lambda f: f.name)
def test_every_tensor_lies_in_its_place(folder: Path) -> None:
    model = load_model(folder, dtype=torch.bfloat16)

    assert same(state(model), stacked(file_tensors(folder)))
    assert not model.training


@pytest.mark.parametrize("folder", [BF16, INT4], ids=lambda f: f.name)
def test_float32_is_the_default_on_the_cpu_and_spares_what_has_its_own_dtype(folder: Path) -> None:
    model = load_model(folder)

    for name, tensor in stacked(file_tensors(folder)).items():
        loaded = model.state_dict()[name]
        keeps = name.endswith(("_packed", "_proj_scale"))
        assert loaded.dtype == (tensor.dtype if keeps else torch.float32), name
        assert torch.equal(loaded, tensor.to(loaded.dtype)), name


def test_derived_buffers_are_as_in_a_model_that_was_built_on_the_cpu() -> None:
    model, built = load_model(INT4, dtype=torch.bfloat16), KimiK25ForConditionalGeneration(load_config(INT4))
    derived = {*dict(model.named_buffers())} - {*model.state_dict()}

    assert derived
    for name in derived:
        assert torch.equal(model.get_buffer(name), built.get_buffer(name))
        assert model.get_buffer(name).dtype == built.get_buffer(name).dtype


def test_no_tensor_is_left_on_meta() -> None:
    model = load_model(INT4)

    assert {t.device.type for t in [*model.parameters(), *model.buffers()]} == {"cpu"}


def test_loading_does_not_import_torchs_compiler() -> None:
    code = "import sys, kimi_k25; kimi_k25.load_model(sys.argv[1]); sys.exit(bool({'torch._dynamo', 'sympy'} & {*sys.modules}))"

    subprocess.run([sys.executable, "-c", code, INT4], cwd=REPOSITORY, check=True, timeout=120)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype is torch.float16; supported: torch.float32, torch.bfloat16"):
        load_model(BF16, dtype=torch.float16)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("gpu", "device is 'gpu'; supported: cpu, cuda, cuda:N"),
        ("meta", "device is 'meta'; supported: cpu, cuda, cuda:N"),
        ("cuda:99", r"device is 'cuda:99'; CUDA devices that torch sees: \d+"),
    ],
)
def test_devices_that_are_not_there_are_refused(device: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(BF16, device)


RENAMES = {
    "no .model.": (r"language_model\.model\.(layers|embed_tokens|norm)\.", r"language_model.\1."),
    "blocks": (r"language_model\.model\.layers\.", "language_model.model.blocks."),
    "pre_norm": (r"mm_projector\.pre_norm\.", "model.mm_projector.pre_norm."),
    "patch_embed": (r"vision_tower\.patch_embed\.proj\.", "vision_tower.encoder.patch_embed.proj."),
}


@pytest.mark.parametrize("rename", RENAMES)
@pytest.mark.parametrize("folder", [BF16, INT4], ids=lambda f: f.name)
def test_names_of_other_tools_are_accepted(tmp_path: Path, folder: Path, rename: str) -> None:
    other = edited(tmp_path / "c", folder, renamed(*RENAMES[rename]))

    assert read_checkpoint(other).tensors.keys() != read_checkpoint(folder).tensors.keys()
    assert same(state(load_model(other)), state(load_model(folder)))


def test_weight_shape_may_be_int64(tmp_path: Path) -> None:
    def widen(tensors: Tensors) -> None:
        tensors |= {n: t.long() for n, t in tensors.items() if n.endswith("_shape")}

    assert same(state(load_model(edited(tmp_path / "c", INT4, widen))), state(load_model(INT4)))


def unpack_layer_2(tensors: Tensors) -> None:
    for name in [n for n in tensors if ".layers.2." in n and n.endswith("_packed")]:
        base = name.removesuffix("_packed")
        tensors[base] = dequantize_int4(tensors.pop(name), tensors.pop(f"{base}_scale"))
        del tensors[f"{base}_shape"]


def test_layers_may_be_packed_or_not_and_come_back_so(tmp_path: Path) -> None:
    folder = edited(tmp_path / "c", INT4, unpack_layer_2)

    model = load_model(folder, dtype=torch.bfloat16)
    save_checkpoint(model, tmp_path / "out")

    assert same(state(model), stacked(file_tensors(folder)))
    assert same(file_tensors(tmp_path / "out"), file_tensors(folder))


def test_the_ignore_list_decides_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    shutil.copytree(INT4, folder)
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["quantization_config"]["ignore"] = ["re:.*"]
    (folder / "config.json").write_text(json.dumps(config))

    assert same(state(load_model(folder)), state(load_model(INT4)))


class TestTexts(expecttest.TestCase):
    @pytest.fixture(autouse=True)
    def _in_an_empty_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    def refused(self, folder: Path) -> str:
        with pytest.raises((UnreadableFileError, ConfigError)) as e:
            load_model(folder)
        return str(e.value)

    def edited(self, source: Path, edit: Callable[[Tensors], object]) -> Path:
        return edited(Path("c"), source, edit)

    def test_missing_tensor(self) -> None:
        folder = self.edited(BF16, lambda t: t.pop("language_model.lm_head.weight"))

        self.assertExpectedInline(self.refused(folder), """c: does not fit config.json: language_model.lm_head.weight: not in the checkpoint; expected bfloat16 [640, 64]""")

    def test_everything_that_differs_is_one_error(self) -> None:
        def damage(tensors: Tensors) -> None:
            del tensors["language_model.lm_head.weight"]
            tensors["extra.weight"] = torch.zeros(1)
            tensors["mm_projector.pre_norm.bias"] = torch.zeros(47, dtype=torch.bfloat16)
            tensors["mm_projector.pre_norm.weight"] = torch.zeros(48)
            gate = "language_model.model.layers.1.mlp.gate.e_score_correction_bias"
            tensors[gate] = tensors[gate].bfloat16()
            tensors["vision_tower.encoder.blocks.0.wo.bias"] = torch.zeros(2, 24, dtype=torch.bfloat16)
            tensors["language_model.model.norm.weight"] = torch.zeros(63, dtype=torch.bfloat16)

        self.assertExpectedInline(self.refused(self.edited(BF16, damage)), """c: does not fit config.json: language_model.lm_head.weight: not in the checkpoint; expected bfloat16 [640, 64]; extra.weight: in the checkpoint (model.safetensors) but not expected: float32 [1]; vision_tower.encoder.blocks.0.wo.bias: expected [48], checkpoint has [2, 24]; mm_projector.pre_norm.bias: expected [48], checkpoint has [47]; language_model.model.norm.weight: expected [64], checkpoint has [63]; and 2 more""")

    def test_half_packed_layer(self) -> None:
        def unpack_one(tensors: Tensors) -> None:
            tensors[f"{EXPERTS}.3.up_proj.weight"] = torch.zeros(96, 64, dtype=torch.bfloat16)
            del tensors[f"{EXPERTS}.3.up_proj.weight_packed"]

        self.assertExpectedInline(self.refused(self.edited(INT4, unpack_one)), """c: holds layers with only some routed experts packed: of layer 1, 23 matrices are packed but not language_model.model.layers.1.mlp.experts.3.up_proj.weight; expected all or none""")

    def test_weight_shape_that_disagrees(self) -> None:
        def lie(tensors: Tensors) -> None:
            tensors[f"{EXPERTS}.3.up_proj.weight_shape"] = torch.tensor([96, 63], dtype=torch.int32)

        self.assertExpectedInline(self.refused(self.edited(INT4, lie)), """c/model.safetensors: language_model.model.layers.1.mlp.experts.3.up_proj.weight_shape is [96, 63]; the packed words beside it are of [96, 64]""")

    def test_packed_experts_without_quantization_config(self) -> None:
        folder = self.edited(INT4, lambda t: None)
        shutil.copyfile(BF16 / "config.json", folder / "config.json")

        self.assertExpectedInline(self.refused(folder), """c: there are packed layers but the configuration has no quantization_config""")

    def test_a_name_twice(self) -> None:
        def double(tensors: Tensors) -> None:
            tensors["model.mm_projector.pre_norm.bias"] = tensors["mm_projector.pre_norm.bias"].clone()

        self.assertExpectedInline(self.refused(self.edited(BF16, double)), """c: holds mm_projector.pre_norm.bias twice, as mm_projector.pre_norm.bias and as model.mm_projector.pre_norm.bias; expected one of them""")

    def test_other_formats_are_named(self) -> None:
        lines = []
        for name in (
            f"{EXPERTS}.0.up_proj.weight_scale_2",
            "language_model.model.layers.0.self_attn.k_proj.k_scale",
            f"{EXPERTS}.0.up_proj.weight_scale_inv",
            "multi_modal_projector.linear_1.weight",
            "model.language_model.norm.weight",
        ):
            folder = edited(Path(name), BF16, lambda t, name=name: t.update({name: torch.zeros(1)}))
            lines.append(self.refused(folder))
        (folder / "hf_quant_config.json").write_text("{}")
        lines.append(self.refused(folder))
        for model_type in ("kimi_vl", "kimi_k3"):
            (folder / "hf_quant_config.json").unlink(missing_ok=True)
            config = json.loads((BF16 / "config.json").read_text()) | {"model_type": model_type}
            (folder / "config.json").write_text(json.dumps(config))
            lines.append(self.refused(folder))

        self.assertExpectedInline("\n".join(lines), """\
language_model.model.layers.1.mlp.experts.0.up_proj.weight_scale_2: holds language_model.model.layers.1.mlp.experts.0.up_proj.weight_scale_2, which is NVFP4 (ModelOpt); supported: Moonshot's layout in bfloat16 or float32, routed experts also as compressed-tensors int4
language_model.model.layers.0.self_attn.k_proj.k_scale: holds language_model.model.layers.0.self_attn.k_proj.k_scale, which is NVFP4 (ModelOpt); supported: Moonshot's layout in bfloat16 or float32, routed experts also as compressed-tensors int4
language_model.model.layers.1.mlp.experts.0.up_proj.weight_scale_inv: holds language_model.model.layers.1.mlp.experts.0.up_proj.weight_scale_inv, which is FP8 in blocks; supported: Moonshot's layout in bfloat16 or float32, routed experts also as compressed-tensors int4
multi_modal_projector.linear_1.weight: holds multi_modal_projector.linear_1.weight, which is Kimi-VL, an older family; supported: Moonshot's layout in bfloat16 or float32, routed experts also as compressed-tensors int4
model.language_model.norm.weight: holds model.language_model.norm.weight, which is transformers' own layout; supported: Moonshot's layout in bfloat16 or float32, routed experts also as compressed-tensors int4
model.language_model.norm.weight/hf_quant_config.json: marks a ModelOpt (NVFP4) checkpoint; supported: Moonshot's layout in bfloat16 or float32, routed experts also as compressed-tensors int4
model.language_model.norm.weight/config.json: model_type is 'kimi_vl', Kimi-VL, an older family; supported: 'kimi_k25' (Kimi-K2.5, K2.6, K2.7)
model.language_model.norm.weight/config.json: model_type is 'kimi_k3', Kimi-K3, a newer family; supported: 'kimi_k25' (Kimi-K2.5, K2.6, K2.7)""")

    def test_pickles_are_refused_by_name(self) -> None:
        folder = Path("c")
        shutil.copytree(BF16, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
        (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")

        self.assertExpectedInline(self.refused(folder), """c: holds pytorch_model.bin, a pickle, which can run code and is never opened here; expected model.safetensors.index.json or model.safetensors: convert it where you trust it""")
        assert not Path("opened").exists()

    def test_missing_shard(self) -> None:
        shutil.copytree(INT4, "c")
        Path("c/model-00002-of-000006.safetensors").unlink()

        self.assertExpectedInline(self.refused(Path("c")), """c/model.safetensors.index.json: model-00002-of-000006.safetensors: is not there; the index puts 86 tensors in it""")

    def test_missing_folder(self) -> None:
        self.assertExpectedInline(self.refused(Path("moonshotai/Kimi-K2.5")), """moonshotai/Kimi-K2.5: is no folder here; a checkpoint is a local folder, and nothing is downloaded""")

    def test_missing_config(self) -> None:
        shutil.copytree(INT4, "c")
        Path("c/config.json").unlink()

        self.assertExpectedInline(self.refused(Path("c")), """c/config.json: there is no such file""")


def test_headers_are_checked_before_a_tensor_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = edited(tmp_path / "c", BF16, lambda t: t.pop("language_model.lm_head.weight"))
    monkeypatch.setattr("kimi_k25.checkpoint.safe_open", lambda *_: pytest.fail("a tensor was read"))

    with pytest.raises(UnreadableFileError, match="lm_head"):
        load_model(folder)


def test_the_bar_is_shown_on_a_terminal_only(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    load_model(INT4)
    quiet = capfd.readouterr()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)

    load_model(INT4)

    assert quiet == ("", "")
    assert "loading" in capfd.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is Linux's")
def test_loading_takes_at_most_200_mb_beside_the_model(tmp_path: Path) -> None:
    bench = REPOSITORY / "bench" / "load.py"
    runpy.run_path(str(bench))["make_checkpoint"](tmp_path / "c", int4=False, num_layers=1)

    command = [sys.executable, bench, "--one", "load_model, float32", tmp_path / "c"]
    run = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=120).stdout)

    assert run["loaded_bytes"] > 600e6  # From a file of half that.
    assert run["peak_bytes"] - run["loaded_bytes"] < 200e6


@pytest.mark.parametrize("folder", [BF16, INT4], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_gives_the_same_files(tmp_path: Path, folder: Path, dtype: torch.dtype) -> None:
    save_checkpoint(load_model(folder, dtype=dtype), tmp_path / "out")

    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in folder.iterdir()}
    for path in folder.iterdir():
        copy = (tmp_path / "out" / path.name).read_bytes()
        if path.name.endswith(".index.json"):
            assert json.loads(copy) == json.loads(path.read_bytes())
        else:
            assert copy == path.read_bytes(), path.name
    assert read_checkpoint(tmp_path / "out").problems == []


def test_one_file_stays_one_file(tmp_path: Path) -> None:
    folder = edited(tmp_path / "c", INT4, lambda t: None)

    save_checkpoint(load_model(folder), tmp_path / "out")

    assert [p.name for p in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]
    assert same(file_tensors(tmp_path / "out"), file_tensors(INT4))


def test_a_new_model_gets_a_config_and_loads_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = KimiK25ForConditionalGeneration(load_config(BF16))

    save_checkpoint(model, tmp_path / "out")

    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert same(state(load_model(tmp_path / "out", dtype=torch.bfloat16)), state(model.bfloat16()))


def test_a_new_model_takes_the_config_that_is_there(tmp_path: Path) -> None:
    shutil.copyfile(BF16 / "config.json", tmp_path / "config.json")

    save_checkpoint(KimiK25ForConditionalGeneration(load_config(BF16)), tmp_path)

    assert (tmp_path / "config.json").read_bytes() == (BF16 / "config.json").read_bytes()
    load_model(tmp_path)


def test_a_large_new_model_is_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kimi_k25.checkpoint.MAX_SINGLE_BYTES", 1000)

    save_checkpoint(KimiK25ForConditionalGeneration(load_config(BF16)), tmp_path)

    assert len(read_checkpoint(tmp_path).headers) == 6


def test_modules_of_the_package_that_holds_a_checkpoint_are_not_copied(tmp_path: Path) -> None:
    shutil.copytree(BF16, tmp_path / "package")
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").touch()

    save_checkpoint(load_model(tmp_path / "package"), tmp_path / "out")

    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in BF16.iterdir()}


@pytest.mark.parametrize("damage", ["another config", "another tokenizer", "no template"])
def test_another_checkpoint_is_not_overwritten(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "c"
    shutil.copytree(INT4 if damage == "another config" else BF16, folder)
    if damage == "another tokenizer":
        (folder / "tiktoken.model").write_text("")
    if damage == "no template":
        (folder / "chat_template.jinja").unlink()
    before = {p.name: p.read_bytes() for p in folder.iterdir()}

    with pytest.raises(FileExistsError, match=r"config.json|tiktoken.model|chat_template.jinja") as e:
        save_checkpoint(load_model(BF16), folder)

    assert str(e.value).startswith(str(folder))
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_another_models_config_is_not_overwritten(tmp_path: Path) -> None:
    shutil.copyfile(INT4 / "config.json", tmp_path / "config.json")

    with pytest.raises(FileExistsError, match="describes another model"):
        save_checkpoint(KimiK25ForConditionalGeneration(load_config(BF16)), tmp_path)

    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_checkpoint_can_be_saved_over_itself_again_and_again(tmp_path: Path) -> None:
    shutil.copytree(INT4, tmp_path / "c")
    for value in (1.0, 2.0, 3.0):
        model = load_model(tmp_path / "c")
        model.language_model.lm_head.weight.data.fill_(value)

        save_checkpoint(model, tmp_path / "c")

        assert same(state(load_model(tmp_path / "c")), state(model))
        assert read_checkpoint(tmp_path / "c").problems == []
        assert len([*(tmp_path / "c").iterdir()]) == len([*INT4.iterdir()])


def indexed_tensors(folder: Path) -> Tensors:
    """Those that a reader of the folder gets, strays left out."""
    return {name: t for file in read_checkpoint(folder).headers for name, t in load_file(folder / file).items()}


class Died(BaseException):
    """Stands for the process's end."""


class Mortal:
    """Counts the steps that reach the disk, and lets none happen from one of them on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last_step: int, *, error: type[BaseException]) -> None:
        self.steps, self.last_step, self.error = 0, last_step, error
        for name in ("replace", "fsync", "unlink"):
            monkeypatch.setattr(os, name, self.counted(getattr(os, name)))

    def counted(self, step: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            self.steps += 1
            is_over = self.steps == self.last_step + 1 if self.error is OSError else self.steps > self.last_step
            if is_over:
                raise self.error(28, "No space left on device")
            return step(*args, **kwargs)

        return run


def shards_over_shards(folder: Path) -> KimiK25ForConditionalGeneration:
    shutil.copytree(INT4, folder)
    return load_model(folder)


def file_over_file(folder: Path) -> KimiK25ForConditionalGeneration:
    return load_model(edited(folder, INT4, lambda t: None))


def shards_over_a_file(folder: Path) -> KimiK25ForConditionalGeneration:
    edited(folder, INT4, lambda t: None)
    return load_model(INT4)


def shards_to_an_empty_folder(folder: Path) -> KimiK25ForConditionalGeneration:
    folder.mkdir()
    return load_model(INT4)


@pytest.mark.parametrize("error", [Died, OSError])
@pytest.mark.parametrize("arrange", [shards_over_shards, file_over_file, shards_over_a_file, shards_to_an_empty_folder])
def test_a_crash_at_any_step_leaves_the_old_or_the_new(
    tmp_path: Path,
    arrange: Callable[[Path], KimiK25ForConditionalGeneration],
    error: type[BaseException],
) -> None:
    model = arrange(tmp_path / "start")
    old = file_tensors(INT4)
    model.language_model.lm_head.weight.data.fill_(0.5)
    new = old | {"language_model.lm_head.weight": torch.full_like(old["language_model.lm_head.weight"], 0.5)}
    files = {p.name: p.read_bytes() for p in (tmp_path / "start").iterdir()}
    seen = []
    for last_step in range(100):
        folder = tmp_path / str(last_step)
        shutil.copytree(tmp_path / "start", folder)

        with pytest.MonkeyPatch.context() as patch, contextlib.suppress(error):
            mortal = Mortal(patch, last_step, error=error)
            save_checkpoint(model, folder)

        try:
            after = indexed_tensors(folder)
        except UnreadableFileError as e:
            assert arrange is shards_to_an_empty_folder and "expected model.safetensors.index.json" in str(e)
            seen.append("old")
        else:
            seen.append("new" if same(after, new) else "old" if same(after, old) else "neither")
        if error is OSError and seen[-1] == "old":
            assert {p.name: p.read_bytes() for p in folder.iterdir()} == files, "something is left of the failure"
        if error is Died:  # What a crash left is no obstacle.
            save_checkpoint(model, folder)
            assert same(indexed_tensors(folder), new)
            assert read_checkpoint(folder).problems == []
            assert not [*folder.glob("*.tmp")]
        shutil.rmtree(folder)
        if mortal.steps <= last_step:
            break

    commit = seen.index("new")
    assert seen == ["old"] * commit + ["new"] * (len(seen) - commit)
    assert 2 <= commit < len(seen)


def test_an_interrupt_right_after_the_last_rename_leaves_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(INT4, tmp_path / "c")
    model = load_model(INT4)
    model.language_model.lm_head.weight.data.fill_(0.5)
    replace = os.replace

    def interrupted(source: Path, target: Path) -> None:
        replace(source, target)
        if target.name.endswith("index.json"):
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(model, tmp_path / "c")

    assert same(state(load_model(tmp_path / "c")), state(model))


def test_a_killed_process_leaves_the_old_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(BF16, tmp_path / "c")
    code = """
import os, signal, sys
from kimi_k25 import load_model, save_checkpoint
model = load_model(sys.argv[1])
model.language_model.lm_head.weight.data.zero_()
replace = os.replace
def kill(source, target):
    if str(target).endswith("model-00003-of-000006-b.safetensors"):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = kill
save_checkpoint(model, sys.argv[1])
"""

    killed = subprocess.run([sys.executable, "-c", code, tmp_path / "c"], cwd=REPOSITORY, timeout=120)

    assert killed.returncode == -signal.SIGKILL
    assert same(state(load_model(tmp_path / "c")), state(load_model(BF16)))
