"""lint: the shapes in which module aliases are written by hand, and what merely looks like one."""

import textwrap

import pytest

from aliasmix import UnreadableFileError
from aliasmix.lint import lint, lint_source


def told(source):
    return [(f.code, f.paths[0], f.line) for f in lint_source(textwrap.dedent(source), "model.py")]


PROPERTY_WITH_SETATTR = """
class Wrapper(nn.Module):
    def __init__(self, config, prefix=""):
        super().__init__()
        self.language_model = DeepLM(config.text_config, prefix=prefix)

    @property
    def model(self):
        return self.language_model

    def __setattr__(self, name, value):
        # the runner assigns it back
        if name == "model":
            return
        super().__setattr__(name, value)
"""

PROPERTY_ONLY = """
class Base(nn.Module):
    pass

class Wrapper(Base):
    def __init__(self, config):
        super().__init__()
        self.llm = build_language_model(config)

    @property
    def model(self) -> nn.Module:
        "The part that the runner looks for."
        return self.llm.model
"""

SECOND_NAME = """
class Chat(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.vision_model = VisionModel(config.vision_config)
        if config.arch == "a":
            self.language_model = AForCausalLM(config)
        else:
            self.language_model = BForCausalLM(config)
        self.model = self.language_model.model
"""

HEAD_TIE = """
class CausalLM(PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = TextModel(config)
        if config.tie_word_embeddings:
            self.lm_head = self.model.embed_tokens
        else:
            self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size)
"""


def test_a_swallowing_setattr_is_found_once():
    assert told(PROPERTY_WITH_SETATTR) == [("SWALLOWING_SETATTR", "Wrapper.__setattr__", 13)]


def test_a_property_without_a_guard_is_found():
    assert told(PROPERTY_ONLY) == [("PROPERTY_ALIAS", "Wrapper.model", 11)]


def test_a_dotted_second_registration_is_found():
    assert told(SECOND_NAME) == [("SECOND_REGISTRATION", "Chat.model", 10)]


def test_a_tie_behind_a_condition_is_info():
    (found,) = lint_source(HEAD_TIE, "model.py")

    assert (found.code, found.severity) == ("SECOND_REGISTRATION", "info")


def in_init(*lines):
    body = "\n        ".join(lines)
    return f"class W(nn.Module):\n    def __init__(self, config):\n        super().__init__()\n        {body}\n"


@pytest.mark.parametrize(
    "lines",
    [
        ("self.language_model = LanguageModel(config)", "self.model = self.language_model"),
        ("self.model = self.language_model = LanguageModel(config)",),
        ("lm = LanguageModel(config)", "self.language_model = lm", "self.model = lm"),
        ("self.language_model = LanguageModel(config)", "inner = self.language_model.model", "self.model = inner"),
        ("self.a = nn.Linear(2, 2)", "setattr(self, 'b', self.a)"),
        ("self.a = nn.Linear(2, 2)", "self.add_module('b', self.a)"),
        ("self.layers = nn.ModuleList([])", "self.last = self.layers[-1]"),
        ("self.weight = nn.Parameter(x)", "self.kernel = self.weight"),
        ("with device:", "    self.a = nn.Linear(2, 2)", "    self.b = self.a"),
        ("self.a, self.b = nn.Linear(2, 2), self.language_model",),
        ("self.language_model = config.language_model()", "self.model: nn.Module = self.language_model"),
        ("self.language_model = LM(config) if config.lm else None", "self.model = self.language_model"),
    ],
)
def test_second_registrations_are_found_however_they_are_written(lines):
    assert [code for code, *_ in told(in_init(*lines))] == ["SECOND_REGISTRATION"]


@pytest.mark.parametrize(
    "lines",
    [
        ("self.model = LanguageModel(config)", "self.hidden_size = self.model.hidden_size"),
        ("self.model = LanguageModel(config)", "self.config = self.model.config", "self.dtype = self.model.dtype"),
        ("self.config = ModelConfig()", "self.cfg = self.config"),
        ("self.model_name = config.name", "self.model = self.model_name"),
        ("self.num_layers = len(config.layers)", "self.layers = self.num_layers"),
        ("self.a = nn.Linear(2, 2)", "self.a = self.a"),
        ("self.a = nn.Linear(2, 2)", "self.b = nn.Linear(2, 2)"),
        ("self.head = nn.Linear(2, 2)", "self.head.weight = self.embed.weight"),
        ("self.a = nn.Linear(2, 2)", "self.out = self.a(config)"),
        ("self.a = nn.Linear(2, 2)", "self.b = self.a  # aliasmix: allow"),
        ("self.layers = nn.ModuleList([])", "self.num = len(self.layers)"),
        ("self.norm_eps = 1e-6", "self.norm = self.norm_eps"),
        ("self.a = self.b", "self.b = self.a"),
        ("self.config = config", "self.layers = self.config.num_hidden_layers"),
        ("self.attention_layers = config.attention_layers", "self.attention = self.attention_layers[0]"),
    ],
)
def test_what_registers_once_is_left_alone(lines):
    assert told(in_init(*lines)) == []


def test_a_class_of_the_file_decides_better_than_a_name():
    source = """
    class Settings:
        def __init__(self):
            self.model = "tiny"

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.core = nn.Linear(2, 2)
            self.layers = 12

    class W(nn.Module):
        def __init__(self):
            super().__init__()
            self.settings = Settings()
            self.model = self.settings.model
            self.inner = Inner()
            self.layers = self.inner.layers
            self.core = self.inner.core
    """

    assert told(source) == [("SECOND_REGISTRATION", "W.core", 19)]


def test_properties_that_are_no_alias_are_left_alone():
    source = """
    class W(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.model = LanguageModel(config)
            self._layers = config.num_layers

        @property
        def dtype(self):
            return self.model.dtype

        @property
        def layers(self):
            return self._layers

        @property
        def device(self):
            return next(self.parameters()).device

        def get_language_model(self):
            return self.model

    class NoModule:
        @property
        def model(self):
            return self.language_model
    """

    assert told(source) == []


def test_a_property_with_a_setter_is_found_since_modules_never_reach_it():
    source = """
    class W(nn.Module):
        @property
        def model(self):
            return self.language_model

        @model.setter
        def model(self, value):
            self.language_model = value
    """

    assert told(source) == [("PROPERTY_ALIAS", "W.model", 4)]


@pytest.mark.parametrize("base", ["GuardedSetattrMixin, nn.Module", "aliasmix.GuardedSetattrMixin, PreTrainedModel"])
def test_aliasmix_wrappers_are_left_alone(base):
    source = f"""
    class W({base}):
        model = ReadOnlyAlias("language_model")
        text: "ReadOnlyAlias" = aliasmix.ReadOnlyAlias[LM]("language_model")

        def __init__(self):
            super().__init__()
            self.language_model = LanguageModel()
            self.model = self.language_model
            self.text = self.language_model
    """

    assert told(source) == []


@pytest.mark.parametrize(
    "body, is_found",
    [
        ("if name == 'model':\n    return\nsuper().__setattr__(name, value)", True),
        ("if name in NAMES and isinstance(value, nn.Module):\n    return None\nsuper().__setattr__(name, value)", True),
        ("if name == 'model':\n    pass\nelse:\n    super().__setattr__(name, value)", True),
        ("if name != 'model':\n    super().__setattr__(name, value)", True),
        ("if name == 'model' and value is self.language_model:\n    return\nsuper().__setattr__(name, value)", False),
        ("if name == 'model':\n    raise AttributeError(name)\nsuper().__setattr__(name, value)", False),
        ("if name == 'model':\n    self.language_model = value\n    return\nsuper().__setattr__(name, value)", False),
        ("if name != 'model':\n    super().__setattr__(name, value)\nelse:\n    self.language_model = value", False),
        ("super().__setattr__(name, value)", False),
    ],
)
def test_only_a_setattr_that_drops_values_unseen_is_found(body, is_found):
    source = "class W(nn.Module):\n    def __setattr__(self, name, value):\n" + textwrap.indent(body, " " * 8)

    assert [code for code, *_ in told(source)] == ["SWALLOWING_SETATTR"] * is_found


def test_folders_are_read_in_order_without_environments(tmp_path):
    for name in ("b.py", "a.py", "notes.txt", ".hidden/c.py", "env/lib/d.py", "sub/e.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(SECOND_NAME)
    (tmp_path / "env" / "pyvenv.cfg").touch()

    report = lint([tmp_path])

    assert [f.file for f in report.findings] == [str(tmp_path / name) for name in ("a.py", "b.py", "sub/e.py")]
    assert report.stats == {"files": 3}


@pytest.mark.parametrize("content", [b"class W(:\n", b"\0", b"# coding: nonsense\n", b"x = " + b"(" * 5000])
def test_what_is_no_python_is_named(tmp_path, content):
    path = tmp_path / "bad.py"
    path.write_bytes(content)

    with pytest.raises(UnreadableFileError, match=r"bad\.py: not Python"):
        lint([path])


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UnreadableFileError, match=r"gone\.py: there is no such file or folder"):
        lint([tmp_path / "gone.py"])


def test_a_file_of_another_kind_is_refused(tmp_path):
    (tmp_path / "README.md").write_text("# Title")

    with pytest.raises(UnreadableFileError, match=r"README\.md: is no \.py file; Python files and folders"):
        lint([tmp_path / "README.md"])


def test_the_place_of_a_syntax_error_is_said_once(tmp_path):
    (tmp_path / "bad.py").write_text("x = 1\ny = 'open\n")

    with pytest.raises(UnreadableFileError, match=r"bad\.py: not Python \(line 2\): unterminated[^,]*$"):
        lint([tmp_path / "bad.py"])


def test_our_own_packages_are_clean(request):
    report = lint([request.config.rootpath / "aliasmix", request.config.rootpath / "kimi_k25"])

    assert report.ok, report.render()


def test_classes_of_one_name_are_all_read():
    source = """
if fast:
    class W(nn.Module):
        def __init__(self):
            self.language_model = nn.Linear(1, 1)
            self.model = self.language_model
else:
    class W(nn.Module):
        pass
"""

    assert [found.line for found in lint_source(source, "w.py")] == [6]
