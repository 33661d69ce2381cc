"""The house rules that erode first: imports point down, classes stay small."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
from collections.abc import Set
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch

from tests.cpp_classes import CppClass, classes_in, one_calls_in

ROOT = Path(__file__).parents[1]
MOST_ATTRIBUTES = 12
MOST_NAMES = 26
MOST_METHODS = 30
MOST_STUBS = 3
MOST_LINES = 65  # of a function, its docstring with it

# Each module or package may import those above it. Those that share a line don't see each other.
PYTHON_LAYERS = [
    ["plan"],
    ["_C", "_torch"],
    ["_ext"],
    ["grad_dtype", "model_names", "ops", "rules", "sliced_tensor"],
    ["ranks"],
    ["memory"],
    ["options"],
    ["params"],
    ["residency"],
    ["grads"],
    ["rows", "update"],
    ["calls"],
    ["optimizer"],
    ["state"],
    ["estimate"],
    ["engine"],
    ["optimizers", "checkpoint"],
    ["wrapper"],
    ["sparsity"],
    ["scaler"],
    ["__init__"],
    ["__main__", "integrations"],
]
CPP_LAYERS = {
    "math": {"math"},
    "cuda": {"math", "cuda", "check.h", "op_arguments.h", "cuda_on_host.h", "torch_internals.h"},
    "op_arguments.h": {"math", "check.h"},
    "cpu": {"math", "cpu", "check.h", "locks.h", "op_arguments.h"},
    "workers": {"workers", "locks.h", "torch_internals.h"},
    "buckets": {"workers", "buckets", "locks.h", "torch_internals.h"},
    "peers": {"peers", "check.h", "locks.h"},
    "exchange": {"peers", "exchange", "check.h", "locks.h", "torch_internals.h"},
    "params": {"workers", "buckets", "peers", "exchange", "params", "check.h", "locks.h", "torch_internals.h"},
    "rows": {"math", "cpu", "peers", "rows", "check.h", "op_arguments.h"},
    "residency": {
        "workers",
        "buckets",
        "peers",
        "params",
        "rows",
        "residency",
        "check.h",
        "locks.h",
        "torch_internals.h",
        "torch_names.h",
    },
    "grads": {
        "math",
        "workers",
        "buckets",
        "peers",
        "exchange",
        "params",
        "grads",
        "check.h",
        "locks.h",
        "torch_internals.h",
    },
    "check.h": set(),
    "locks.h": set(),
    "torch_internals.h": {"torch_names.h"},
    "torch_names.h": set(),
}


def modules() -> list[Path]:
    return sorted(path for path in (ROOT / "zerox").rglob("*.py") if path.name != "_build_info.py")


def top_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def place(name: str) -> int:
    return next(index for index, names in enumerate(PYTHON_LAYERS) if name in names)


def imports_of(path: Path) -> set[str]:
    """Dotted names of all modules that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"zerox.{alias.name}" for alias in node.names} if node.module == "zerox" else {node.module}
    return found


def upward_imports(name: str, imported: set[str]) -> list[str]:
    own = top_of(name)
    bad = []
    for module in imported:
        other = top_of(module)
        if not module.startswith("zerox") or other in (own, "_build_info"):
            continue
        if place(other) >= place(own):
            bad.append(f"{name} imports {module}")
    return bad


def test_python_imports_point_down() -> None:
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules()}
    assert len(names) > 100
    assert not [said for name, path in names.items() for said in upward_imports(name, imports_of(path))]


def test_an_upward_import_is_noticed() -> None:
    assert upward_imports("zerox.memory.bucket", {"zerox.engine"})
    assert upward_imports("zerox.grads.grads", {"zerox.state.fill"})
    assert not upward_imports("zerox.engine", {"zerox.plan.layout", "torch"})


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name != "_"


@functools.cache
def names_of_zerox() -> frozenset[str]:
    """What zerox calls its own functions, classes and attributes."""
    found = set()
    for path in modules():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.id if isinstance(node, ast.Name) else node.attr)
    return frozenset(found)


def private_names_of_torch(text: str, own: Set[str], of_torch: Set[str]) -> list[str]:
    """Imports from torch and attributes that begin with an underscore, unless they are ``own`` names and no others'."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            dotted = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            dotted = [alias.name for alias in node.names if alias.name.split(".")[0] == "torch"]
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            is_own = ast.unparse(node.value) in ("self", "sys") or (node.attr in own and node.attr not in of_torch)
            dotted = [] if is_own else [ast.unparse(node)]
        else:
            dotted = []
        found += [each for each in dotted if any(map(is_private, each.split(".")))]
    return found


OF_PYTHON = {"_C", "_ext", "_build_info", "_torch", "_replace", "_asdict"}  # zerox's modules, and named tuples
# Names that torch's protocols have zerox's classes define.
PROTOCOLS = {"_join_config"}


@pytest.fixture(scope="module")
def of_torch() -> set[str]:
    """The private attributes that _torch.py takes of something."""
    text = (ROOT / "zerox/_torch.py").read_text()
    attributes = {node.attr for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)}
    named = set(re.findall(r'(?:attrgetter|methodcaller)\("(\w+)"\)|getattr\(\w+, "(\w+)"', text))
    return {each for each in attributes.union(*named) if is_private(each)} - {"_C"}


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.name)
def test_private_names_of_torch_stand_in_one_file(path: Path, of_torch: set[str]) -> None:
    """Those that zerox/integrations uses, of torch and of frameworks, stand there."""
    if path.name == "_torch.py" or "integrations" in path.parts:
        return
    own = names_of_zerox() | OF_PYTHON
    assert not set(private_names_of_torch(path.read_text(), own, of_torch)) - PROTOCOLS


def test_a_private_name_of_torch_is_noticed(of_torch: set[str]) -> None:
    assert {"_version", "_local_tensor", "_world", "_optimizer_step_pre_hooks"} <= of_torch
    for text in (
        "from torch._utils import _get_device_index",
        "import torch._dynamo",
        "dist.distributed_c10d._world.pg_map",
        "grad._version",
        "optimizer._optimizer_step_pre_hooks",
        "param.new_name()._unknown",
    ):
        assert private_names_of_torch(text, {"_version", "_known"}, of_torch), text
    assert not private_names_of_torch("self._version\nother._known\nx.__dict__", {"_known"}, of_torch)


def test_zerox_has_few_names_at_its_top() -> None:
    names = {name for path in modules() if (name := top_of(".".join(path.relative_to(ROOT).with_suffix("").parts)))}
    assert len(names - {"__init__", "__main__"}) <= MOST_NAMES, sorted(names)


def test_no_two_modules_import_each_other() -> None:
    """Also inside a package, and over any number of others."""
    known = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in modules()}
    graph = {name: {each for each in imports_of(path) if each in known} for name, path in known.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which has them


def test_plans_know_the_standard_library_only() -> None:
    paths = sorted((ROOT / "zerox/plan").glob("*.py"))
    assert paths
    for path in paths:
        for module in imports_of(path):
            top = module.split(".")[0]
            assert top in sys.stdlib_module_names or module.startswith("zerox.plan"), f"{path.name}: {module}"


def sources() -> list[Path]:
    return sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cpp", ".cu", ".cuh"))


def test_cpp_includes_point_down() -> None:
    assert len(sources()) > 100
    for path in sources():
        own, text = path.relative_to(ROOT / "csrc").parts[0], path.read_text()
        folders = {include.split("/")[0] for include in re.findall(r'#include "([^"]+)"', text)}
        if own in CPP_LAYERS:
            assert folders <= CPP_LAYERS[own], f"{path.name} includes {folders - CPP_LAYERS[own]}"
        if own == "math":
            assert not re.search(r"#include <(torch|ATen|c10)/", text), path.name
        if own != "bindings":
            assert not re.search(r"#include [<\"](Python.h|pybind11|torch/csrc/utils/pybind)", text), path.name


def python_attributes(tree: ast.ClassDef) -> set[str]:
    found = {
        node.target.id for node in tree.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


def classes() -> dict[tuple[Path, str], ast.ClassDef]:
    found = ((path, node) for path in modules() for node in ast.walk(ast.parse(path.read_text())))
    return {(path, node.name): node for path, node in found if isinstance(node, ast.ClassDef)}


def with_bases(place: tuple[Path, str], known: dict[tuple[Path, str], ast.ClassDef]) -> list[ast.ClassDef]:
    """A base of a name that several files have is that of the class's own file."""
    found = []
    for base in known[place].bases:
        name = base.attr if isinstance(base, ast.Attribute) else getattr(base, "id", "")
        places = [(place[0], name)] if (place[0], name) in known else [each for each in known if each[1] == name]
        assert len(places) <= 1, f"{place}: which {name}?"
        found += [each for of_base in places if of_base != place for each in with_bases(of_base, known)]
    return list({id(each): each for each in [*found, known[place]]}.values())


def attributes_over_bases(place: tuple[Path, str], known: dict[tuple[Path, str], ast.ClassDef]) -> set[str]:
    """Without those that a wrapper in place of torch's must have, since torch's has them."""
    names = set().union(*map(python_attributes, with_bases(place, known)))
    is_wrapper = place[1] == "DistributedDataParallel"
    return names - of_torch_s_wrapper() if is_wrapper else names


@functools.cache
def of_torch_s_wrapper() -> set[str]:
    (tree,) = ast.parse(inspect.getsource(torch.nn.parallel.DistributedDataParallel)).body
    assert isinstance(tree, ast.ClassDef)
    return {name for name in python_attributes(tree) if not name.startswith("_")}


def test_python_classes_have_few_attributes() -> None:
    """Over all their bases."""
    known = classes()
    over = {place: found for place in known if len(found := attributes_over_bases(place, known)) > MOST_ATTRIBUTES}
    assert not over


def hands_over(method: ast.FunctionDef) -> bool:
    """Whether it is public, and one call of something else."""
    body = [each for each in method.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
    is_call = len(body) == 1 and isinstance(body[0], ast.Expr | ast.Return) and isinstance(body[0].value, ast.Call)
    return is_call and not method.name.startswith("_")


def methods_of(node: ast.ClassDef) -> set[str]:
    return {each.name for each in node.body if isinstance(each, ast.FunctionDef) and not hands_over(each)}


@pytest.mark.parametrize("name", ["FusedShardedAdam", "ShardedOptimizer"])
def test_the_optimizer_is_no_heap_of_methods(name: str) -> None:
    """Over all its bases: what does the work are its parts, Note [Parts of an optimizer]."""
    bases = with_bases((ROOT / "zerox" / "optimizers.py", name), classes())
    assert {"Engine", "Face", "TorchOptimizer"} <= {each.name for each in bases}
    attributes = set().union(*map(python_attributes, bases))
    assert len(attributes) <= MOST_ATTRIBUTES, sorted(attributes)
    methods = set().union(*map(methods_of, bases))
    assert len(methods) <= MOST_METHODS, sorted(methods)


def test_classes_have_few_methods() -> None:
    """Over all their bases."""
    known = classes()
    for place in known:
        assert len(set().union(*map(methods_of, with_bases(place, known)))) <= MOST_METHODS, place


def long_functions(text: str) -> list[str]:
    functions = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
    return [each.name for each in functions if (each.end_lineno or 0) - each.lineno >= MOST_LINES]


def test_python_functions_are_short() -> None:
    assert long_functions("def f():\n" + "    x()\n" * MOST_LINES) == ["f"]
    assert not {path.name: found for path in modules() if (found := long_functions(path.read_text()))}


def test_few_methods_are_there_to_be_overridden() -> None:
    """A method that only raises NotImplementedError glues classes together that should hold each other."""
    methods = (node for path in modules() for node in ast.walk(ast.parse(path.read_text())))
    stubs = [
        node.name
        for node in methods
        if isinstance(node, ast.FunctionDef) and ast.unparse(node.body[-1]) == "raise NotImplementedError"
    ]
    assert len(stubs) <= MOST_STUBS, stubs


def test_nobody_reaches_into_an_optimizer() -> None:
    """``optimizer.inside`` is for that; names of torch's own class are torch's."""
    of_torch = ("_optimizer_step_code", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    for path in modules():
        found = set(re.findall(r"\b(?:optimizer|engine)\.(_[a-z]\w*)", path.read_text())) - set(of_torch)
        assert not found or path.name == "join.py", f"{path.name}: {found}"
        assert found <= {"_joining"}


@functools.cache
def cpp_classes() -> dict[str, CppClass]:
    return classes_in(path.read_text() for path in sources())


def test_cpp_classes_have_few_attributes() -> None:
    """Over bases, and through structs that are members."""
    known = cpp_classes()
    attributes = {name: each.attributes(known) for name, each in known.items()}
    assert sum(map(len, attributes.values())) > 500, "the members of our classes were not found"
    over = {name: found for name, found in attributes.items() if len(found) > MOST_ATTRIBUTES}
    assert not over


def test_cpp_classes_have_few_methods() -> None:
    """Wherever they are defined, beside public ones that are one call."""
    one_calls = one_calls_in(path.read_text() for path in sources())
    methods = {name: each.methods(one_calls) for name, each in cpp_classes().items()}
    assert sum(map(len, methods.values())) > 500, "the methods of our classes were not found"
    over = {name: found for name, found in methods.items() if len(found) > MOST_METHODS}
    assert not over


def unlockable(text: str) -> list[str]:
    """Parameters that are locks of the caller's, which the function could unlock."""
    return re.findall(r"[(,]\s*([\w:]*\b(?:unique_lock(?:<[^<>]*>)?|Lock)\s*&\s*\w*)\s*(?=[,)])", text)


def test_who_locks_unlocks() -> None:
    found = {path.name: named for path in sources() if (named := unlockable(path.read_text()))}
    assert not found


def test_a_lock_that_others_could_unlock_is_noticed() -> None:
    assert unlockable("int wait_for(const A& a, std::unique_lock<std::mutex>& lock, int b);") == [
        "std::unique_lock<std::mutex>& lock"
    ]
    assert unlockable("void f(BucketCopies::Lock& lock) {") == ["BucketCopies::Lock& lock"]
    assert unlockable("void f(Lock&);") == ["Lock&"]
    assert not unlockable("void f(const std::unique_lock<std::mutex>& lock, BucketCopies::Locked lock);")
    assert not unlockable("void f(std::unique_lock<std::mutex> lock, Block& block) const Lock& g();")


def test_cpp_members_are_counted() -> None:
    text = """
struct Base { int a = 1; };  // not int b;
template <class T> class A final : public Base, public std::vector<int> {
 public:
  explicit A(int x) : a_{x}, b_(x) { start(); }
  ~A() override { stop(); }
  A(const A&) = delete;
  A& operator=(const A&) = delete;
  enum class Kind : uint8_t { one, two };
  using Body = std::function<void(int)>;
  struct Place { int start; int stop; };
  template <class Each> void for_each(const Each& each) const { for (int x : b_) each(x); }
  int f(int x) const { return g(x); }
  bool empty() const;
  static A make(std::function<void(int)> body);

 private:
  int f_() const { return g(1); }
  int a_;
  std::vector<int> b_{1, 2};
  std::function<void(int)> body_{};
  static constexpr int kMost = 1 << 3;
  const bool c_ = size() < 3;
  int64_t of_[3] = {0, 0, 0};
  Place place_;
  std::vector<Place> places_;
  struct {
    int one = 1;
    struct { int inner; } two{};
  } now_;
};"""
    known = classes_in([text])
    assert set(known) == {"Base", "A", "A::Place"}
    own = ["a_", "b_", "body_", "c_", "of_", "place_.start", "place_.stop", "places_", "now_.one", "now_.two.inner"]
    assert known["A"].attributes(known) == ["a", *own]
    assert known["A"].methods(set()) == {"for_each", "empty", "make", "f_"}
    defined = """
bool A::empty() const { return b_.empty(); }
A A::make(std::function<void(int)> body) {
  started = true;
  return A(body);
}"""
    assert one_calls_in([defined]) == {"A::empty"}
    assert known["A"].methods({"A::empty", "A::f_"}) == {"for_each", "make", "f_"}


def folders() -> list[Path]:
    packages = {path.parent for path in modules() if path.parent != ROOT / "zerox"}
    return sorted({*packages, *(path.parent for path in sources() if path.parent != ROOT / "csrc")})


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: "/".join(folder.parts[-2:]))
def test_a_folders_first_file_names_all_of_its_files(folder: Path) -> None:
    """In the order in which somebody new may read them, without their suffixes."""
    is_package = (folder / "__init__.py").exists()
    first = ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) if is_package else None
    named = set(re.findall(r"\w+", first or (folder / "README.md").read_text()))
    there = {path.stem for path in folder.iterdir() if path.suffix in (".py", ".h", ".cpp", ".cu", ".cuh")} - {
        "__init__"
    }
    assert there
    assert not there - named
