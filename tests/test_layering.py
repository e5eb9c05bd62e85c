"""The architecture as a table, held against every import: at the top, inside functions and for types alike."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent

# Imports run down: a row may use the rows below it, and no neighbour but its own package.
LEVELS = """
    generate
    tiny
    streaming  decoder_graphs  backend
    engine  checkpoint  processor  fast_decoder  fast_vision  ranks
    placement  checkpoint_files  file_reader  config_json  rank_watch  chat  image_processor  video
    tokenizer  sandbox  tool_declarations
    model
    language_model  vision_tower  projector
    layers  tensor_names
    config
    graphs
    aliasmix
"""
ROW = {module: row for row, line in enumerate(LEVELS.strip().splitlines()) for module in line.split()}
# What turns messages into ids knows no weights, though it stands above them; what runs weights knows no messages.
TEXT = set("processor chat tokenizer sandbox tool_declarations image_processor video".split())
WEIGHTS = set(
    "model language_model vision_tower projector layers graphs engine decoder_graphs fast_decoder fast_vision".split()
)


def imports(file: Path, root: Path) -> Iterator[str]:
    """Full names of what a file imports; `from a import b` may mean the module a.b, so it counts as that."""
    package = file.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield from (".".join([*base, *filter(None, [node.module]), alias.name]) for alias in node.names)


def module_of(parts: tuple[str, ...]) -> str:
    """The name in the table: ("kimi_k25", "layers", "mla") is in layers, ("aliasmix", "guard") in aliasmix."""
    return parts[1] if parts[0] == "kimi_k25" else parts[0]


def violations(root: Path) -> list[str]:
    found = []
    for file in sorted([*root.glob("kimi_k25/**/*.py"), *root.glob("aliasmix/**/*.py")]):
        path = file.relative_to(root).with_suffix("")
        if path.parts == ("kimi_k25", "__init__"):
            continue  # The front door: forwards public names on first use, and knows them all.
        module, name = module_of(path.parts), str(file.relative_to(root)).removeprefix("kimi_k25/")
        if module not in ROW:
            found.append(f"{name} is in no row of LEVELS")
            continue
        for parts in (tuple(full.split(".")) for full in imports(file, root)):
            if parts[0] not in ("kimi_k25", "aliasmix"):
                continue
            target = module_of(parts)
            is_down = target == module or ROW.get(target, -1) > ROW[module]
            if not is_down or (module in TEXT and target in WEIGHTS) or (module in WEIGHTS and target in TEXT):
                found.append(f"{name} imports {target}")
    return found


def test_imports_run_down():
    assert violations(ROOT) == []


def test_every_row_names_modules_that_exist():
    homes = [ROOT / "kimi_k25", ROOT]
    missing = [m for m in ROW if not any((h / f"{m}.py").is_file() or (h / m / "__init__.py").is_file() for h in homes)]

    assert missing == []


def test_the_table_notices_what_breaks_it(tmp_path):
    for name, text in {
        "kimi_k25/layers/mla.py": "from ..engine import Engine\nfrom .norm import RMSNorm\nfrom ..config import C",
        "kimi_k25/layers/deep/norm.py": "from ... import streaming\nimport torch",
        "kimi_k25/graphs/tape.py": "def late():\n    import kimi_k25.layers.mla",
        "kimi_k25/chat.py": "if TYPE_CHECKING:\n    from kimi_k25.model import KimiK25ForConditionalGeneration",
        "kimi_k25/engine.py": "from kimi_k25 import checkpoint, processor",
        "kimi_k25/config.py": "from . import Prompt",
        "kimi_k25/managers.py": "import torch",
        "kimi_k25/generate.py": "from .model import x\nfrom aliasmix import ReadOnlyAlias",
        "aliasmix/guard.py": "from kimi_k25.graphs import resolve_decoder\nfrom .alias import ReadOnlyAlias",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    assert violations(tmp_path) == [
        "aliasmix/guard.py imports graphs",
        "chat.py imports model",
        "config.py imports Prompt",
        "engine.py imports checkpoint",
        "engine.py imports processor",
        "graphs/tape.py imports layers",
        "layers/deep/norm.py imports streaming",
        "layers/mla.py imports engine",
        "managers.py is in no row of LEVELS",
    ]
