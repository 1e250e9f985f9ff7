"""How the code reads, in numbers: mirror.py [PACKAGE ...] [--beside]

          one line a page: size, width, cells, prose, demonstrations; then how the library holds together
--beside  the library's modules beside those of libraries that read well, counted alike

Nothing here is a limit, but for `tricks`, to which `tests/test_project.py` holds every page.
"""
import ast
import importlib.util
import json
import re
import statistics
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXPORTED = re.compile(r"^#\|\s*(export|exports|exporti)\b", re.M)
HIDDEN = re.compile(r"^#\|\s*(hide|default_exp)\b", re.M)
WIDTH = 120      # columns of a line
ANCHORS = ("fastcore", "fastai", "skorch", "gymnasium", "stable_baselines3")


def code_lines(source):
    "Return the lines that are neither empty nor directives."
    return [line for line in source.splitlines() if line.strip() and not line.startswith("#|")]


@cache
def tree_of(source):
    "Return the syntax tree of a cell without its magics."
    return ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.M))


def ninth(values):
    "Return the ninth decile."
    values = sorted(values) or [0]
    return values[min(len(values) - 1, int(.9 * len(values)))]


# --- tricks: ways to write less that cost the reader more; each looks at all nodes of a cell, its module first

def tuple_assignments(nodes):
    "Return assignments of four values or more to as many names at once."
    return [n for n in nodes if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Tuple)
            and len(n.targets[0].elts) >= 4 and isinstance(n.value, ast.Tuple)]


def named_lambdas(nodes):
    "Return assignments of a lambda to a name."
    def values(n): return n.value.elts if isinstance(n.value, ast.Tuple) else [n.value]
    return [n for n in nodes if isinstance(n, ast.Assign) and
            any(isinstance(v, ast.Lambda) for v in values(n))]


def attached_methods(nodes):
    "Return assignments to an attribute of a class from outside its body."
    def on_class(t): return isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.value.id[:1].isupper()
    def targets(n): return [e for t in n.targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return [n for n in nodes[0].body if isinstance(n, ast.Assign) and any(map(on_class, targets(n)))]


def positional_records(nodes):
    "Return calls of a class with more than six arguments by position."
    return [n for n in nodes if isinstance(n, ast.Call) and len(n.args) > 6
            and isinstance(n.func, ast.Name) and n.func.id.lstrip("_")[:1].isupper()]


def numbered_columns(nodes):
    "Return columns of a table that are picked by a number above 2: `a[:, 7]`, `a[..., 3]`."
    def number(e): return isinstance(e, ast.Constant) and isinstance(e.value, int) and e.value > 2
    return [n for n in nodes if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Tuple)
            and any(number(e) for e in n.slice.elts)]


TRICKS = {
    "a tuple assignment of four names or more": tuple_assignments,
    "a lambda with a name": named_lambdas,
    "a method given to a class from outside": attached_methods,
    "a record of more than six fields built by position": positional_records,
    "a column picked by a number": numbered_columns}


def tricks(path):
    "Return 'package/page: trick: code' for each trick on a page."
    return [f"{path.parent.name}/{path.name}: {what}: {ast.unparse(node)[:80]}"
            for source in page_sources(path) for nodes in [[*ast.walk(tree_of(source))]]
            for what, find in TRICKS.items() for node in find(nodes)]


# --- pages

def page_cells(path): return json.loads(Path(path).read_text(encoding="utf-8"))["cells"]


def page_sources(path):
    "Return the code cells of a page."
    return ["".join(c["source"]) for c in page_cells(path) if c["cell_type"] == "code"]


def pages(packages=()):
    "Return the pages of the library, all or those of some packages."
    found = sorted(p for p in (ROOT/"nbs").glob("*/*.ipynb") if re.match(r"\d\d[a-z]?_", p.name))
    return [p for p in found if not packages or p.parent.name in packages]


@cache
def page_numbers(path):
    "Return what there is to count on a page."
    sources = page_sources(path)
    exported = [s for s in sources if EXPORTED.search(s)]
    demo = [s for s in sources if not EXPORTED.search(s) and not HIDDEN.search(s) and "nbdev_export(" not in s]
    words = sum(len("".join(c["source"]).split()) for c in page_cells(path) if c["cell_type"] == "markdown")
    lengths = [len(code_lines(s)) for s in exported]
    return dict(
        kb=sum(len("\n".join(code_lines(s)).encode()) for s in exported) / 1024,
        lines=sum(lengths), cells=len(exported), p90=ninth(lengths), longest=max(lengths, default=0),
        wide=sum(len(line) > WIDTH for s in sources for line in code_lines(s)),
        words=words / max(1, sum(lengths)), demo=sum(len(code_lines(s)) for s in demo) / max(1, sum(lengths)))


def print_pages(packages):
    "Print one line a page, all pages together, and how the library holds together."
    numbers = {p: page_numbers(p) for p in pages(packages)}
    print(f"{'':34}" + "".join(f"{k:>9}" for k in next(iter(numbers.values()))))
    for p, found in numbers.items():
        values = "".join(f"{v:>9.2f}" if isinstance(v, float) else f"{v:>9}" for v in found.values())
        print(f"{p.parent.name + '/' + p.stem:34}{values}")
    lines = sum(n["lines"] for n in numbers.values())
    words, demo = (sum(n[k] * n["lines"] for n in numbers.values()) / lines for k in ("words", "demo"))
    print(f"{len(numbers)} pages, {lines} exported lines; for each of them {words:.1f} words of prose and {demo:.2f} "
          f"lines that use it")
    library = Library(ROOT/"esper_nb")
    for what, found in dict(writers=library.writers(), lone_bases=library.lone_bases(),
                            shared=library.shared()).items():
        print(f"{what.replace('_', ' ')}: {', '.join(found) or 'none'}")


# --- modules, of this library and of others

class Library:
    "The modules of a package as syntax trees, and counts over them."
    def __init__(self, root):      # folder of the package
        self.root, self.sources, self.trees = Path(root), {}, {}
        for path in sorted(self.root.rglob("*.py")):
            parts = path.relative_to(self.root).parts
            if path.name == "_modidx.py" or any(p.startswith("test") for p in parts): continue
            self.sources[path] = path.read_text(encoding="utf-8", errors="replace")
            self.trees[path] = ast.parse(self.sources[path])
        self.nodes = [n for tree in self.trees.values() for n in ast.walk(tree)]
        self.classes = [n for n in self.nodes if isinstance(n, ast.ClassDef)]
        self.names = {c.name for c in self.classes}

    def lines_of(self, path):
        "Return the lines of a module that are neither empty nor comments."
        return [x for x in self.sources[path].splitlines() if x.strip() and not x.lstrip().startswith("#")]

    def modules(self):
        "Return the modules without short `__init__.py` files, which only pass names on."
        return [p for p in self.trees if p.name != "__init__.py" or len(self.lines_of(p)) >= 40]

    def writers(self):
        "Return functions of modules that write into an object of the library that is passed to them first."
        found = []
        for path in self.modules():
            for f in (n for n in self.trees[path].body if isinstance(n, ast.FunctionDef)):
                first = next(iter([*f.args.posonlyargs, *f.args.args]), None)
                if first is None: continue
                own = first.annotation is not None and \
                    self.names & set(re.findall(r"\w+", ast.unparse(first.annotation)))
                writes = any(isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                             and isinstance(n.value, ast.Name) and n.value.id == first.arg for n in ast.walk(f))
                if writes and (own or first.arg == "self"):
                    found.append(f"{path.relative_to(self.root).as_posix()}:{f.name}")
        return found

    def lone_bases(self):
        "Return 'Base < Child' of classes that have one child and are never instantiated."
        children = defaultdict(set)
        for c in self.classes:
            for b in c.bases: children[ast.unparse(b).split("[")[0].split(".")[-1]].add(c.name)
        calls = [n.func for n in self.nodes if isinstance(n, ast.Call)]
        made = {getattr(f, "id", getattr(f, "attr", "")) for f in calls}
        lone = {b: min(c) for b, c in children.items() if b in self.names and len(c) == 1 and b not in made}
        return [f"{base} < {child}" for base, child in sorted(lone.items())]

    def shared(self):
        "Return 'Class.attribute' of what three or more methods write, `__init__` aside."
        found = []
        for c in self.classes:
            methods = defaultdict(set)
            for f in (n for n in c.body if isinstance(n, ast.FunctionDef) and n.name != "__init__" and n.args.args):
                for node in ast.walk(f):
                    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store): node = node.value
                    elif not isinstance(getattr(node, "ctx", None), ast.Store): continue
                    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == f.args.args[0].arg:
                        methods[node.attr].add(f.name)
            found += [f"{c.name}.{name}" for name, of in methods.items() if len(of) >= 3]
        return sorted(found)

    def largest_cell(self):
        "Return the lines of the largest cell that nbdev has exported; None: the library has no such cells."
        cells = [cell for source in self.sources.values() for cell in re.split(r"^# %% .*$", source, flags=re.M)[1:]]
        return max((len(code_lines(cell)) for cell in cells), default=None)

    def imports(self, path):
        "Return the modules of its own library that a module imports from, inside functions too."
        return {(n.level, n.module) for n in ast.walk(self.trees[path]) if isinstance(n, ast.ImportFrom)
                and (n.level or (n.module or "").split(".")[0] == self.root.name)}

    def numbers(self):
        "Return the counts by what they count."
        lines = [line for path in self.sources for line in self.lines_of(path)]
        def size(node): return 1 + sum(size(c) for c in ast.iter_child_nodes(node) if not isinstance(c, ast.stmt))
        sizes = [size(n) for n in self.nodes if isinstance(n, ast.stmt)]
        imports = [len(self.imports(p)) for p in self.modules()]
        return {
            "lines of code": len(lines),
            "modules": len(self.modules()),
            "lines over 120 columns, in 1000": 1000 / len(lines) * sum(len(x) > WIDTH for x in lines),
            "characters of a line, mean": statistics.fmean(map(len, lines)),
            "syntax nodes of a statement, mean": statistics.fmean(sizes),
            "syntax nodes of a statement, ninth decile": ninth(sizes),
            "lines of a class, median": statistics.median(c.end_lineno - c.lineno + 1 for c in self.classes),
            "lines of the largest exported cell": self.largest_cell(),
            "attributes that three methods write": len(self.shared()),
            "functions that write into an own object": len(self.writers()),
            "bases with one child, never instantiated": len(self.lone_bases()),
            "own imports of a module, mean": statistics.fmean(imports),
            "own imports of a module, ninth decile": ninth(imports)}


def tool_counts():
    "Return how much mypy and ruff have to say about this project."
    tools = Path(sys.executable).parent
    def said(*command): return subprocess.run([tools/command[0], *command[1:]], cwd=ROOT, capture_output=True,
                                              text=True).stdout
    return {"mypy, errors in the package": len(re.findall(": error:", said("mypy", "esper_nb"))),
            "ruff, all files": len(re.findall(r"^\S+:\d+:\d+: ", said("ruff", "check", "--output-format", "concise"),
                                              re.M))}


def print_beside():
    "Print the library's numbers beside those of others."
    found = {name: importlib.util.find_spec(name) for name in ANCHORS}
    roots = {"esper_nb": ROOT/"esper_nb"} | {name: Path(s.origin).parent for name, s in found.items() if s is not None}
    numbers = {name: Library(root).numbers() for name, root in roots.items()}
    print(f"{'':44}" + "".join(f"{name:>20}" for name in numbers))
    for what in numbers["esper_nb"]:
        values = [n[what] for n in numbers.values()]
        shown = ["" if v is None else f"{v:.1f}" if isinstance(v, float) else str(v) for v in values]
        print(f"{what:44}" + "".join(f"{v:>20}" for v in shown))
    for what, n in tool_counts().items(): print(f"{what:44}{n:>20}")


if __name__ == "__main__":
    if "--beside" in sys.argv: print_beside()
    else: print_pages([a for a in sys.argv[1:] if not a.startswith("-")])
