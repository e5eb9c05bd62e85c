"""check_checkpoint: every way in which files, index and module can disagree, told by its code."""

import json

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import nn

from aliasmix import GuardedSetattrMixin, ReadOnlyAlias, UnreadableFileError
from aliasmix.integrity import check_checkpoint, check_manifest, check_module, write_manifest


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(8, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.lm_head = nn.Linear(4, 8, bias=False)


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.thinker = LM()


class Dup(Plain):
    def __init__(self):
        super().__init__()
        self.model = self.thinker


class Aliased(GuardedSetattrMixin, Plain):
    model = ReadOnlyAlias("thinker")


def told(report):
    return [(f.code, *f.paths) for f in report.findings]


@pytest.fixture
def folder(tmp_path):
    """A checkpoint of two shards with a right index."""
    tensors = {name: value.clone() for name, value in Plain().state_dict().items()}
    names = list(tensors)
    weight_map = {}
    for number, part in enumerate((names[:3], names[3:]), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


@pytest.fixture
def edit(folder):
    """Changes the index by a function of its content."""

    def change(function):
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        function(index)
        path.write_text(json.dumps(index))

    return change


FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.mark.parametrize("reference", [Plain, Aliased])
def test_a_right_checkpoint_has_no_findings(folder, reference):
    report = check_checkpoint(reference(), folder)

    assert report.ok and told(report) == []
    assert report.stats == {"expected": 6, "tensors": 6, "files": 2}


def test_a_manifest_stands_for_the_module(folder, tmp_path):
    write_manifest(Plain(), tmp_path / "keys.json")

    assert told(check_checkpoint(tmp_path / "keys.json", folder)) == []
    assert told(check_manifest(folder, tmp_path / "keys.json")) == []


def test_the_manifest_of_a_folder_matches_the_module(folder, tmp_path):
    write_manifest(folder, tmp_path / "keys.json")
    content = json.loads((tmp_path / "keys.json").read_text())

    assert content["keys"]["thinker.embed_tokens.weight"] == {"kind": "tensor", "shape": [8, 4], "dtype": "float32"}
    assert told(check_manifest(Plain(), tmp_path / "keys.json")) == []


def test_missing_unexpected_shape_and_dtype(tmp_path):
    tensors = Plain().state_dict()
    del tensors["thinker.lm_head.weight"]
    tensors["extra"] = torch.zeros(1)
    tensors["thinker.layers.0.weight"] = torch.zeros(4, 5)
    tensors["thinker.layers.0.bias"] = tensors["thinker.layers.0.bias"].bfloat16()
    save_file(tensors, tmp_path / "model.safetensors")

    report = check_checkpoint(Plain(), tmp_path)

    assert told(report) == [
        ("CKPT_MISSING", "thinker.lm_head.weight"),
        ("CKPT_UNEXPECTED", "extra"),
        ("CKPT_SHAPE", "thinker.layers.0.weight"),
        ("CKPT_DTYPE", "thinker.layers.0.bias"),
    ]
    assert [f.severity for f in report.findings] == ["error", "error", "error", "warning"]
    assert "(model.safetensors)" in report.findings[1].detail


def test_a_missing_shard_is_one_finding(folder):
    (folder / SECOND).unlink()

    report = check_checkpoint(Plain(), folder)

    assert told(report) == [("INDEX_SHARD_MISSING", SECOND)]
    assert report.findings[0].count == 3


def test_a_truncated_shard_is_one_finding(folder):
    path = folder / SECOND
    path.write_bytes(path.read_bytes()[:-1])

    report = check_checkpoint(Plain(), folder)

    assert told(report) == [("HEADER_BAD", SECOND)]


def test_a_stale_index_names_the_tensor_and_its_shard(folder, edit):
    edit(lambda index: index["weight_map"].update({"thinker.gone": FIRST}))

    report = check_checkpoint(Plain(), folder)

    assert told(report) == [("INDEX_TENSOR_MISSING", "thinker.gone")]
    assert FIRST in report.findings[0].detail


def test_a_misplaced_tensor_is_found_and_still_compared(folder, edit):
    edit(lambda index: index["weight_map"].update({"thinker.embed_tokens.weight": SECOND}))

    report = check_checkpoint(Plain(), folder)

    assert told(report) == [("INDEX_TENSOR_MISPLACED", "thinker.embed_tokens.weight")]
    assert FIRST in report.findings[0].detail and SECOND in report.findings[0].detail


def test_an_unlisted_tensor_is_found(folder, edit):
    edit(lambda index: index["weight_map"].pop("thinker.embed_tokens.weight"))

    assert told(check_checkpoint(Plain(), folder)) == [("INDEX_UNLISTED", "thinker.embed_tokens.weight")]


def test_a_shard_that_the_index_forgot_is_one_finding_for_its_tensors(folder, edit):
    edit(lambda index: index["weight_map"].update(dict.fromkeys(index["weight_map"], FIRST)))

    report = check_checkpoint(Plain(), folder)

    assert told(report)[-1] == ("STRAY_FILE", SECOND)
    assert report.findings[-1].severity == "warning"


def test_a_wrong_total_size_is_a_warning(folder, edit):
    edit(lambda index: index["metadata"].update(total_size=1))

    report = check_checkpoint(Plain(), folder)

    assert report.ok and [f.code for f in report.findings] == ["INDEX_TOTAL_SIZE"]


def test_many_stale_names_are_one_finding(folder, edit):
    edit(lambda index: index["weight_map"].update({f"old.layers.{n}.weight": FIRST for n in range(40)}))

    report = check_checkpoint(Plain(), folder)

    assert told(report) == [("INDEX_TENSOR_MISSING", "old.layers.*")]
    assert report.findings[0].count == 40


# Names under which a tensor is kept


def test_a_tied_tensor_may_be_missing_where_its_twin_is_there(tmp_path):
    module = Plain()
    module.thinker.lm_head.weight = module.thinker.embed_tokens.weight
    tensors = module.state_dict()
    del tensors["thinker.lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    write_manifest(module, tmp_path / "keys.json")

    for reference in (module, tmp_path / "keys.json"):
        report = check_checkpoint(reference, tmp_path / "model.safetensors")

        assert report.ok
        assert told(report) == [("CKPT_MISSING", "thinker.lm_head.weight", "thinker.embed_tokens.weight")]
        assert "tied to thinker.embed_tokens.weight, which is" in report.findings[0].detail
    assert told(check_checkpoint(Plain(), tmp_path)) == [("CKPT_MISSING", "thinker.lm_head.weight")]


def test_a_tied_tensor_without_its_twin_is_missing(tmp_path):
    module = Plain()
    module.thinker.lm_head.weight = module.thinker.embed_tokens.weight
    tensors = {name: t for name, t in module.state_dict().items() if "layers" in name}
    save_file(tensors, tmp_path / "model.safetensors")

    report = check_checkpoint(module, tmp_path)

    assert [f.severity for f in report.findings] == ["error", "error"]


def test_metadata_of_save_model_is_honoured(tmp_path):
    module = Plain()
    module.thinker.lm_head.weight = module.thinker.embed_tokens.weight
    save_model(module, str(tmp_path / "model.safetensors"))

    report = check_checkpoint(Plain(), tmp_path)  # a module that does not know of the tie

    assert report.ok and [f.code for f in report.findings] == ["CKPT_MISSING"]
    assert "its metadata says that it is kept as thinker.embed_tokens.weight" in report.findings[0].detail


def test_a_wrong_keeper_is_one_finding(tmp_path):
    save_model(Dup(), str(tmp_path / "model.safetensors"))  # keeps `model`, which is before `thinker`

    for reference in (Plain(), Aliased()):
        report = check_checkpoint(reference, tmp_path)

        assert told(report) == [("CKPT_WRONG_KEEPER", "thinker.*", "model.*")]
        assert report.findings[0].count == len(Plain().state_dict())
    assert check_checkpoint(Aliased(), tmp_path, rename=["model = thinker"]).ok


def test_alias_names_without_metadata_are_a_wrong_keeper(tmp_path):
    tensors = {name.replace("thinker", "model"): t for name, t in Plain().state_dict().items()}
    tensors["model.layers.1.bias"] = torch.zeros(5)
    save_file(tensors, tmp_path / "model.safetensors")

    report = check_checkpoint(Aliased(), tmp_path)

    assert told(report) == [
        ("CKPT_SHAPE", "thinker.layers.1.bias"),
        ("CKPT_WRONG_KEEPER", "thinker.*", "model.*"),
    ]


def test_doubled_keys_of_an_old_checkpoint_name_the_fold(tmp_path):
    tensors = {name: t.clone() for name, t in Dup().state_dict().items()}
    save_file(tensors, tmp_path / "model.safetensors")

    report = check_checkpoint(Aliased(), tmp_path)

    assert told(report) == [("CKPT_UNEXPECTED", "model.*")]
    assert "fold_alias_keys" in report.findings[0].fix


def test_a_wrapper_that_save_file_refuses_is_flagged_and_its_aliased_twin_saved(tmp_path):
    with pytest.raises(RuntimeError, match="share memory"):
        save_file(Dup().state_dict(), tmp_path / "dup.safetensors")
    assert not check_module(Dup()).ok

    wrapper = Aliased()
    wrapper.model = wrapper.model
    save_file(wrapper.state_dict(), tmp_path / "model.safetensors")

    assert told(check_checkpoint(wrapper, tmp_path)) == []


# Renames


def test_a_rename_maps_a_prefix(tmp_path):
    save_file({f"base.{name}": t for name, t in LM().state_dict().items()}, tmp_path / "model.safetensors")

    report = check_checkpoint(Plain(), tmp_path)
    assert "'base = thinker'" in report.findings[0].fix
    assert told(check_checkpoint(Plain(), tmp_path, rename=["base = thinker"])) == []


def test_renames_that_meet_are_refused(tmp_path):
    save_file({"a.w": torch.zeros(1), "b.w": torch.zeros(1)}, tmp_path / "model.safetensors")

    with pytest.raises(ValueError, match=r"two tensors of the checkpoint are called 'b\.w'"):
        check_checkpoint(Plain(), tmp_path, rename=["a = b"])


# Bad input


def test_what_is_no_checkpoint_is_named(tmp_path):
    with pytest.raises(UnreadableFileError, match="no such file or folder"):
        check_checkpoint(Plain(), tmp_path / "gone")
    with pytest.raises(UnreadableFileError, match=r"holds no checkpoint; expected model\.safetensors"):
        check_checkpoint(Plain(), tmp_path)


def test_a_manifest_of_a_broken_folder_is_refused(folder, tmp_path):
    (folder / SECOND).unlink()

    with pytest.raises(UnreadableFileError, match=f"{SECOND}: is not there"):
        write_manifest(folder, tmp_path / "keys.json")
    assert not (tmp_path / "keys.json").exists()
