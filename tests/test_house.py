"""The house: who may import whom, and how long files and functions may be."""
import ast
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

FOLDERS = ("tasks", "engines", "policies", "runtime", "look")
MOST_LINES = {"train": 200, "settings": 450, "envs": 280, "rollout": 230, "episode": 250, "judge": 180, "buffer": 400,
              "problems": 220, "drift": 110, "losses": 600, "update": 350, "models": 400, "eval": 320}
WITHOUT_TORCH = ("tasks", "look", "envs", "episode", "buffer", "problems", "drift", "runtime.files")
# (who, what it must not import), modules or folders
FORBIDDEN = [("runtime", "tasks"), ("runtime", "engines"), ("judge", "engines"), ("judge", "tasks"), ("judge", "look"),
             ("rollout", "engines"), ("engines", "train"), ("update", "engines"), ("update", "tasks"), ("update", "look")]
ALLOWED = {"tasks": ("envs", "episode", "tasks"), "policies": ("models", "envs", "policies", "runtime.files")}
EXCEPT = ("runtime.setup",)  # opens a run


class Module:
    """A file of the product, and what it imports."""

    def __init__(self, path: Path, root: Path):
        parts = path.relative_to(root).with_suffix("").parts
        self.name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        self.text = path.read_text()
        self.tree = ast.parse(self.text)
        self.lines = len(self.text.splitlines())
        self.functions = [node for node in ast.walk(self.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        self.late = imported([node for function in self.functions for node in ast.walk(function)])
        inside = {id(node) for function in self.functions for node in ast.walk(function)}
        self.early = imported([node for node in ast.walk(self.tree) if id(node) not in inside])


def imported(nodes: list[ast.AST]) -> set[str]:
    """Names after import, and both X and X.y of `from X import y`: y may be a module."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def read(root: Path = ROOT) -> dict[str, Module]:
    """The product's modules by their names."""
    paths = sorted(root.glob("*.py"))
    for folder in FOLDERS:
        paths += sorted((root / folder).glob("*.py"))
    modules = [Module(path, root) for path in paths]
    return {module.name: module for module in modules}


def within(name: str, place: str) -> bool:
    return name == place or name.startswith(f"{place}.")


def runs(module: Module) -> set[str]:
    """What is run when the module is imported. Who imports X.y runs X too, but when X.z does so X is under way already."""
    packages = {name.rpartition(".")[0] for name in module.early}
    return module.early | packages - {"", module.name.partition(".")[0]}


def reached(modules: dict[str, Module], start: str) -> dict[str, list[str]]:
    """All that is imported when `start` is, each with the way there."""
    ways, waiting = {start: [start]}, [start]
    while waiting:
        name = waiting.pop()
        if name not in modules:
            continue
        for other in sorted(runs(modules[name])):
            if other not in ways:
                ways[other] = ways[name] + [other]
                waiting.append(other)
    return ways


def cycles(modules: dict[str, Module]) -> list[str]:
    found = []
    for name, module in modules.items():
        for other in module.early & set(modules):
            back = reached(modules, other).get(name)
            if back:
                found.append(" -> ".join([name, *back]))
    return sorted(found)


def broken_walls(modules: dict[str, Module]) -> list[str]:
    """Imports that the house forbids, those inside functions too."""
    found = []
    for name, module in modules.items():
        if name in EXCEPT:
            continue
        for other in sorted(module.early | module.late):
            where = "" if other in module.early else " inside a function"
            wrong = any(within(name, who) and within(other, what) for who, what in FORBIDDEN)
            own = other.partition(".")[0] in FOLDERS or other.partition(".")[0] in MOST_LINES
            for who, allowed in ALLOWED.items():
                if within(name, who) and own:
                    wrong |= not any(within(other, place) or other == place.partition(".")[0] for place in allowed)
            if wrong:
                found.append(f"{name} imports {other}{where}")
    return found


MODULES = read()


def test_imports_make_no_cycle():
    assert not cycles(MODULES)


def test_imports_go_down_only():
    assert not broken_walls(MODULES)


def light_modules() -> list[str]:
    return [name for name in MODULES if any(within(name, place) for place in WITHOUT_TORCH)]


def test_what_people_look_at_and_play_needs_no_torch():
    """By the graph, and by really importing it."""
    ways = [reached(MODULES, name).get("torch") for name in light_modules()]
    assert [" -> ".join(way) for way in ways if way] == []
    code = f"import importlib, sys\nfor name in {light_modules()}: importlib.import_module(name)\nprint('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_the_top_level_is_one_file_a_stage():
    top = {name for name in MODULES if (ROOT / f"{name}.py").is_file()}
    assert top == set(MOST_LINES)
    assert sum(MODULES[name].lines for name in top) <= 4000


def test_the_product_is_small():
    """11,800 lines with everything that is planned."""
    assert sum(module.lines for module in MODULES.values()) <= 11_400


@pytest.mark.parametrize("name", MOST_LINES)
def test_a_stage_is_short(name):
    assert MODULES[name].lines <= MOST_LINES[name]


def test_the_buffer_is_tiny():
    assert len(MODULES["buffer"].text) <= 20_000


def length(function) -> int:
    return function.end_lineno - function.lineno + 1


def test_functions_are_short():
    long = [f"{module.name}.{function.name}: {length(function)}" for module in MODULES.values()
            for function in module.functions if length(function) > 80]
    assert not long


def main_of_train():
    (main,) = [function for function in MODULES["train"].functions if function.name == "main"]
    return main


def test_the_loop_is_plain():
    """`main` fits on a screen or two, defines no function, and makes no lambda anew in each iteration."""
    main = main_of_train()
    inside = [node for node in ast.walk(main) if isinstance(node, ast.FunctionDef) and node is not main]
    loops = [node for node in ast.walk(main) if isinstance(node, (ast.For, ast.While))]
    lambdas = [node.lineno for loop in loops for node in ast.walk(loop) if isinstance(node, ast.Lambda)]
    assert length(main) <= 100
    assert [function.name for function in inside] == []
    assert lambdas == []


def test_flags_earn_their_place():
    (args,) = [node for node in MODULES["settings"].tree.body if isinstance(node, ast.ClassDef) and node.name == "Args"]
    flags = [node.target.id for node in args.body if isinstance(node, ast.AnnAssign)]
    assert len(flags) <= 85  # 70 when the house was built


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().split()) <= 2000


# ------------------------------------------------------------------------------------------------ the checks can fail


def house(root: Path, **texts: str) -> dict[str, Module]:
    for name, text in texts.items():
        path = root / (name.replace("_", "/") + ".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return read(root)


def test_a_cycle_is_found(tmp_path):
    assert cycles(house(tmp_path, envs="import episode", episode="from models import x", models="import envs")) == [
        "envs -> episode -> models -> envs", "episode -> models -> envs -> episode", "models -> envs -> episode -> models"]


def test_an_import_inside_a_function_makes_no_cycle_but_may_break_a_wall(tmp_path):
    modules = house(tmp_path, tasks_a="import envs", runtime_b="def late():\n    from tasks import a", envs="")
    assert cycles(modules) == []
    assert broken_walls(modules) == ["runtime.b imports tasks inside a function", "runtime.b imports tasks.a inside a function"]


def test_a_task_that_imports_a_model_is_found(tmp_path):
    modules = house(tmp_path, tasks_a="import models\nimport numpy", models="import torch")
    assert broken_walls(modules) == ["tasks.a imports models"]
    assert reached(modules, "tasks.a")["torch"] == ["tasks.a", "models", "torch"]


def test_every_text_file_names_its_encoding():
    found = []
    for name, module in MODULES.items():
        for call in ast.walk(module.tree):
            if not isinstance(call, ast.Call):
                continue
            called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
            said = [value.value for value in [*call.args, *(keyword.value for keyword in call.keywords)] if isinstance(value, ast.Constant)]
            text = called in ("read_text", "write_text") or called == "open" and isinstance(call.func, ast.Name) and "rb" not in said
            if text and not {"utf-8", "utf-8-sig", "latin1"} & set(said):
                found.append(f"{name}:{call.lineno}")
    assert found == []


def test_durations_come_from_a_clock_that_only_goes_forward():
    assert [name for name, module in MODULES.items() if "time.time()" in module.text] == []
