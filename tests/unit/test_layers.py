"""The architecture, read off the imports of every file: layers as in docs/architecture.md, and no circles."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("trainer", "callbacks")
    for path in sorted((ROOT / package).rglob("*.py"))
}
"""Dotted name of every module -> its file."""

OPTIONAL = {
    "yaml", "tqdm.notebook", "IPython", "rich", "torchmetrics", "psutil", "tensorboard", "torch.utils.tensorboard", "torchvision", "torch.utils.flop_counter", "trainer.strategies.sharding",
    "trainer.strategies.schedule", "trainer.strategies.dtensors",
    "trainer.checkpoint.sharded", "trainer.migrate.project", "jsonargparse", "matplotlib",
}  # fmt: skip
"""What a function may import: packages that may be missing or are slow to load."""

OUTSIDE = {"trainer": {"torch", "cloudpickle", "callbacks"}, "callbacks": {"torch", "tqdm", "tensorboard"}}
FROM_CALLBACKS = {
    "trainer": {"callbacks", "callbacks.callback"},
    "trainer.errors": {"callbacks.errors"},
    "trainer.hooks": {"callbacks.callback"},
    "trainer.leaving": {"callbacks.checkpoint_files"},
    "trainer.defaults": {"callbacks", "callbacks.callback", "callbacks.loggers.base", "callbacks.loggers.silent"},
    "trainer.cli.parser": {"callbacks", "callbacks.callback"},
    "trainer.cli.saving": {"callbacks.callback"},
    "trainer.migrate.advice": {"callbacks"},
    "trainer.migrate.names": {"callbacks"},
    "trainer.tuner.inside": {"callbacks.tuning"},
    "trainer.tuner.rates": {"callbacks.tuning"},
    "trainer.tuner.sizes": {"callbacks.tuning"},
    "trainer.tuner.tuner": {"callbacks.tuning"},
}


def layers() -> dict[str, int]:
    """Return dotted name (of a file, or of a sub-package) -> layer, from the table on the page."""
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", (ROOT / "docs" / "architecture.md").read_text(), re.M)
    return {"trainer." + name.rstrip("/").replace("/", "."): int(number) for number, names in rows for name in names.split()}


LAYERS = layers()


def layer(module: str) -> int | None:
    """The layer of a module: its own entry, or that of its sub-package."""
    return LAYERS.get(module, LAYERS.get(module.rpartition(".")[0]))


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


def imports(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield (dotted name, line) of everything imported in `node`, also in functions and under `if TYPE_CHECKING`."""
    for child in ast.walk(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield alias.name, child.lineno
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: imports are written in full"
            for alias in child.names:
                inner = f"{child.module}.{alias.name}"
                yield (inner if inner in FILES else child.module or ""), child.lineno


@cache
def edges(module: str) -> set[str]:
    """Our own modules that `module` imports."""
    return {name for name, _ in imports(tree(module)) if name in FILES} - {module}


def problems_of_layers(module: str) -> Iterator[str]:
    package = module.rpartition(".")[0]
    if FILES[module].name == "__init__.py":  # a sub-package's __init__ names its own files
        yield from (f"{module} imports {target}" for target in edges(module) if target.rpartition(".")[0] != module)
        return
    mine = layer(module)
    if mine is None:
        yield f"{module} is in no layer of docs/architecture.md"
        return
    for target in edges(module):
        sibling = package != "trainer" and target.rpartition(".")[0] == package
        its = layer(target)
        if target.startswith("trainer.") and not sibling and (its is None or its >= mine):
            yield f"{module} (layer {mine}) imports {target} (layer {its})"


def test_a_file_imports_from_lower_layers_only() -> None:
    assert [p for module in FILES if module.startswith("trainer.") for p in problems_of_layers(module)] == []


def test_every_entry_of_the_table_exists() -> None:
    assert len(LAYERS) > 25
    assert [name for name in LAYERS if name not in FILES] == []


def test_there_is_no_circle() -> None:
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for target in edges(module):
                visit(target, (*path, module))
            done.add(module)

    for module in FILES:
        visit(module, ())


def test_a_package_imports_what_it_may() -> None:
    for module in FILES:
        package = module.partition(".")[0]
        allowed = OUTSIDE[package] | {package} | sys.stdlib_module_names | ({"jsonargparse", "docstring_parser"} if ".cli." in module else set())
        allowed |= {"libcst"} if ".migrate." in module else set()
        optional = {name.partition(".")[0] for name, _ in imported_in_functions(module)}  # which ones, the next test says
        assert {name.partition(".")[0] for name, _ in imports(tree(module))} - optional <= allowed, module
        if package == "trainer":
            assert {target for target in edges(module) if target.startswith("callbacks")} <= FROM_CALLBACKS.get(module, set()), module


@cache
def imported_in_functions(module: str) -> set[tuple[str, int]]:
    functions = [n for n in ast.walk(tree(module)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))]
    return {found for function in functions for found in imports(function)}


def test_functions_import_what_is_optional_only() -> None:
    for module, path in FILES.items():
        for name, line in imported_in_functions(module):
            parts = name.split(".")
            optional = OPTIONAL & {".".join(parts[: i + 1]) for i in range(len(parts))}
            assert optional, f"{module}:{line} imports {name} inside a function"
        if path.name != "__init__.py" and not module.startswith("trainer.launchers"):
            names = {getattr(node, "attr", getattr(node, "id", "")) for node in ast.walk(tree(module))}
            assert not names & {"import_module", "__import__"}, f"{module} imports by name"


def test_environment_variables_are_the_launchers_business() -> None:
    names = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for module in FILES:
        if module.startswith("trainer.launchers"):
            continue
        for node in ast.walk(tree(module)):
            attribute = isinstance(node, ast.Attribute) and node.attr in names
            imported = isinstance(node, ast.ImportFrom) and node.module == "os" and any(alias.name in names for alias in node.names)
            assert not attribute and not imported, f"{module}:{node.lineno} touches the environment"
