"""Nothing that runs code on reading data is used anywhere: not on a port, not between processes, not for weights."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted([*ROOT.glob("libs/**/*.py"), *ROOT.glob("services/**/*.py")])
# multiprocessing sends its arguments pickled.
MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "multiprocessing"}
CALLS = {("torch", "load"), ("torch", "save"), ("yaml", "load"), ("np", "load"), ("numpy", "load")}
BUILTINS = {"eval", "exec"}


def offences(source: str) -> list[str]:
    """What in a module's source reads data as code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                found += [name.name for name in names if name.name.partition(".")[0] in MODULES]
            case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in MODULES:
                found.append(module)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name)) if (owner, name) in CALLS:
                found.append(f"{owner}.{name}")
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                found.append(name)
            case ast.keyword(arg="allow_pickle"):
                found.append("allow_pickle")
    return found


def test_no_module_reads_data_as_code() -> None:
    assert len(SOURCES) > 100
    found = {str(path.relative_to(ROOT)): offences(path.read_text()) for path in SOURCES}
    assert {path: offence for path, offence in found.items() if offence} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from multiprocessing.connection import Client",
        "def f():\n    import dill as d",
        "torch.load(path)",
        "x = np.load(path, mmap_mode='r')",
        "f(allow_pickle=True)",
        "eval(text)",
    ],
)
def test_the_check_itself(source: str) -> None:
    assert len(offences(source)) == 1
