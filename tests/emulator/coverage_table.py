"""List every public name of PopTorch with its status (executed, recorded or missing) and a test.

``python tests/emulator/coverage_table.py MANIFEST TESTS OUTPUT`` writes the table.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from pathlib import Path
from typing import Any, Dict, FrozenSet, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

__all__ = ["Row", "make_table", "rows"]

_PACKAGE = "ipurun.emulator"

# Names that matter only on a device: accepted, checked as in PopTorch, stored, without effect on results.
_RECORDED: Dict[str, str] = {
    "poptorch": "Attribute MultiConv NameScope set_available_memory set_overlap_for_input set_overlap_for_output",
    "poptorch.enums": "HalfFloatCastingBehavior Liveness MultiConvPlanType OverlapMode SyncPattern",
    "poptorch.options": """
        Attribute TensorLocationSettings _TensorLocationOptions _JitOptions Options.autoRoundNumIPUs
        Options.appendToLocationExcludes Options.disableModuleNamescope Options.enableProfiling
        Options.enableStableNorm Options.logDir Options.maxRepeatLogs Options.modelName
        Options.setAvailableMemoryProportion Options.sourceLocationExcludes Options.syncPattern
        Options.useIpuModel _PopartOptions.setEngineOptions _PopartOptions.setPatterns
        _PrecisionOptions.halfFloatCasting _PrecisionOptions.runningStatisticsAlwaysFloat
        _PrecisionOptions.setPartialsType _TrainingOptions.setConvolutionDithering
        _IPhasedExecution.useSeparateBackwardPhase ParallelPhasedExecution.sendTensorsOffChipAfterFwd
        SerialPhasedExecution.setTensorsLiveness
    """,
}
# How tests use a class that they do not name.
_SPOKEN_AS = {
    "_DefaultStageManager": "stage_manager",
    "_DistributedOptions": "Distributed",
    "_IExecutionStrategy": "PipelinedExecution",
    "_IPhasedExecution": "SerialPhasedExecution",
    "_JitOptions": "Jit",
    "_PopartOptions": "_Popart",
    "_PrecisionOptions": "Precision",
    "_TensorLocationOptions": "TensorLocations",
    "_TrainingOptions": "Training",
    "IStageManager": "stage_manager",
    "Optimizer": "SGD",
    "OptionsDict": "_OptionsDict",
    "PoplarExecutor": "trainingModel",
    "VariableAttributes": "variable_attrs",
}
# Names in the package root that have other meanings elsewhere.
_COMMON_WORDS = frozenset({"load", "print"})
# These only compare names, so they do not test what a name does.
_NOT_EVIDENCE = frozenset({"test_api_manifest.py", "test_emulator_coverage.py"})


class Row(NamedTuple):
    """One line of the table."""

    module: str
    name: str
    status: str
    test: Optional[str]


class _Test(NamedTuple):
    label: str
    words: FrozenSet[str]


def _words_of(node: ast.AST) -> Set[str]:
    words: Set[str] = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            words.add(part.id)
        elif isinstance(part, ast.Attribute):
            words.add(part.attr)
            if isinstance(part.value, ast.Name):
                words.add(f"{part.value.id}.{part.attr}")
        elif isinstance(part, ast.keyword) and part.arg:
            words.add(part.arg)
        elif isinstance(part, ast.FunctionDef):
            words.add(part.name)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier():
            words.add(part.value)
    return words


def _tests_in(path: Path) -> Iterator[_Test]:
    """Yield the tests of a file with all words in them and in the helpers they use."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    definitions = (ast.FunctionDef, ast.ClassDef, ast.Assign)
    words_of_helper: Dict[str, Set[str]] = {}
    for node in tree.body:
        if isinstance(node, definitions):
            names = [node.name] if not isinstance(node, ast.Assign) else _assigned(node)
            for name in names:
                words_of_helper.setdefault(name, set()).update(_words_of(node))
    for test in ast.walk(tree):
        if isinstance(test, ast.FunctionDef) and test.name.startswith("test_"):
            words = _words_of(test) | {argument.arg for argument in test.args.args}
            for helper in sorted(words.intersection(words_of_helper)):
                words |= words_of_helper[helper]
            yield _Test(f"{path.name}::{test.name}", frozenset(words))


def _assigned(node: ast.Assign) -> List[str]:
    return [target.id for target in node.targets if isinstance(target, ast.Name)]


def _all_tests(folder: str) -> List[_Test]:
    files = sorted(Path(folder).rglob("test_*.py"))
    found = [test for path in files if path.name not in _NOT_EVIDENCE for test in _tests_in(path)]
    # Prefer tests of behaviour to tests of errors, and short tests, which are more specific.
    return sorted(found, key=lambda test: ("raises" in test.words, len(test.words), test.label))


def _names(entry: Dict[str, Any]) -> Iterator[Tuple[str, ...]]:
    for name in entry.get("functions", {}):
        yield (name,)
    for class_name, described in entry.get("classes", {}).items():
        yield (class_name,)
        members = [*described.get("methods", {}), *described.get("properties", {})]
        for member in members:
            if not member.startswith("_"):
                yield class_name, member


def rows(manifest: Dict[str, Any], tests_folder: str) -> List[Row]:
    """Return a row for every public name of the manifest.

    Args:
        manifest: PopTorch's API: modules with their functions, classes and methods.
        tests_folder: The folder of the emulator's tests.
    """
    tests = _all_tests(tests_folder)
    found = []
    for module_name, entry in manifest["modules"].items():
        module = importlib.import_module(_PACKAGE + module_name[len("poptorch") :])
        recorded = frozenset(_RECORDED.get(module_name, "").split())
        for path in _names(entry):
            status = _status(module, path, recorded)
            found.append(Row(module_name, ".".join(path), status, _test_for(path, tests)))
    return found


def _status(module: Any, path: Tuple[str, ...], recorded: FrozenSet[str]) -> str:
    item = module
    for part in path:
        item = inspect.getattr_static(item, part, None) if inspect.isclass(item) else getattr(item, part, None)
        if item is None:
            return "missing"
    return "recorded" if path[0] in recorded or ".".join(path) in recorded else "executed"


def _test_for(path: Tuple[str, ...], tests: Sequence[_Test]) -> Optional[str]:
    word = _SPOKEN_AS.get(path[0], path[0]) if len(path) == 1 else path[-1]
    if word in _COMMON_WORDS:
        word = f"poptorch.{word}"
    return next((test.label for test in tests if word in test.words), None)


def make_table(manifest: Dict[str, Any], tests_folder: str) -> str:
    """Return the table as Markdown."""
    found = rows(manifest, tests_folder)
    counts = {status: sum(row.status == status for row in found) for status in ("executed", "recorded", "missing")}
    shown = sum(row.test is not None for row in found)
    lines = [
        "# Emulator coverage",
        "",
        "Generated by `make docs`; do not edit. *Executed*: behaves on the CPU as in",
        "PopTorch. *Recorded*: matters only on a device; accepted, checked and stored, without effect on results.",
        "*Missing*: not implemented. The test is the most specific one for the name, in `tests/emulator/`.",
        "",
        f"Of {len(found)} public names of PopTorch {manifest['version']}, {counts['executed']} are executed,",
        f"{counts['recorded']} recorded and {counts['missing']} missing; {shown} of them "
        f"({100 * shown // len(found)} %) have a test.",
    ]
    for module_name in manifest["modules"]:
        of_module = [row for row in found if row.module == module_name]
        if of_module:
            lines += ["", f"## {module_name}", "", "| Name | Status | Test |", "|---|---|---|"]
            lines += [f"| `{row.name}` | {row.status} | {_linked(row.test)} |" for row in of_module]
    return "\n".join(lines) + "\n"


def _linked(test: Optional[str]) -> str:
    return "-" if test is None else f"`{test}`"


def main(arguments: Sequence[str]) -> int:
    """Write the table: arguments are the manifest's file, the tests' folder and the output file."""
    manifest_path, tests_folder, output = arguments
    with open(manifest_path, encoding="utf-8") as file:
        table = make_table(json.load(file), tests_folder)
    with open(output, "w", encoding="utf-8") as file:
        file.write(table)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
