"""How the code reads, in numbers: mirror.py [PACKAGE ...] [--check] [--beside]

          one line a page: size, width, cells, prose, demonstrations
--check   the limits that `make test` holds; says what breaks them
--beside  the library's modules beside fastcore's and Stable-Baselines3's, counted alike
"""
import ast
import importlib.util
import json
import re
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXPORTED = re.compile(r"^#\|\s*(export|exports|exporti)\b", re.M)
HIDDEN = re.compile(r"^#\|\s*(hide|default_exp)\b", re.M)
WIDTH = 120      # columns of a line
BYTES = 16_384      # exported by a page
P90 = 25      # lines of an exported cell that holds no class, nine in ten
CELL, CLASS = 40, 60      # lines of any exported cell; of one that holds a single class
RUN = 3      # exported cells in a row before one that shows or checks something
WORDS, DEMO = 3.5, .5      # of prose, and lines that use it, for each exported line: aims for the whole library
FEWEST_WORDS, FEWEST_DEMO = 2., .2      # and what no page may fall below


def code_lines(source):
    "Lines that are neither empty nor directives."
    return [line for line in source.splitlines() if line.strip() and not line.startswith("#|")]


def tree_of(source):
    "Syntax tree of a cell, its magics left out."
    return ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.M))


def wide(source):
    "Lines over 120 columns; what a picture shows is one line, however long."
    return [line for line in source.splitlines() if len(line) > WIDTH and not line.startswith("#| fig-alt")]


def unrelated(tree):
    "Tuple assignments of four targets or more from as many values."
    return [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Tuple)
            and len(n.targets[0].elts) >= 4 and isinstance(n.value, ast.Tuple)]


def bound_lambdas(tree):
    "Lambdas that are given a name."
    return [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and
            any(isinstance(v, ast.Lambda) for v in ([n.value] if not isinstance(n.value, ast.Tuple) else n.value.elts))]


def attached(tree):
    "Methods that are given to a class from outside its body."
    def on_class(t): return isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.value.id[:1].isupper()
    found = []
    for n in tree.body:
        if isinstance(n, ast.Assign):
            targets = [e for t in n.targets for e in (t.elts if isinstance(t, ast.Tuple) else [t])]
            found += [n] * any(on_class(t) for t in targets)
    return found


def long_positional(tree):
    "Records of more than six fields that are built by position."
    return [n for n in ast.walk(tree) if isinstance(n, ast.Call) and len(n.args) > 6
            and isinstance(n.func, ast.Name) and n.func.id.lstrip("_")[:1].isupper()]


def numbered_columns(tree):
    "Columns of a table that are picked by a number above 2: `a[:, 7]`, `a[..., 3]`."
    def number(e): return isinstance(e, ast.Constant) and isinstance(e.value, int) and e.value > 2
    return [n for n in ast.walk(tree) if isinstance(n, ast.Subscript) and isinstance(n.slice, ast.Tuple)
            and any(number(e) for e in n.slice.elts)]


def statement_sizes(tree):
    "Syntax nodes of every statement, those of statements inside it left out."
    def size(node): return 1 + sum(size(c) for c in ast.iter_child_nodes(node) if not isinstance(c, ast.stmt))
    return [size(n) for n in ast.walk(tree) if isinstance(n, ast.stmt)]


def cell_length(source):
    "Lines of an exported cell."
    return len(code_lines(source))


@cache
def page_numbers(path):
    "What there is to count on a page."
    cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    code = [("".join(c["source"]), c) for c in cells if c["cell_type"] == "code"]
    exported = [s for s, _ in code if EXPORTED.search(s)]
    body = [s for s in exported if not only_imports(s)]
    demo = [s for s, _ in code if not EXPORTED.search(s) and not HIDDEN.search(s) and "nbdev_export(" not in s]
    words = sum(len("".join(c["source"]).split()) for c in cells if c["cell_type"] == "markdown")
    lines = sum(map(cell_length, exported))
    lengths = sorted(map(cell_length, body)) or [0]
    plain = [cell_length(s) for s in body if not holds_a_class(s)]
    over = [n for s in body if (n := cell_length(s)) > (CLASS if only_a_class(s) else CELL)]
    trees = [tree_of(s) for s, _ in code]
    def count(f): return sum(len(f(t)) for t in trees)
    return dict(
        kb=sum(len("\n".join(code_lines(s)).encode()) for s in exported) / 1024,
        lines=lines,
        wide=sum(len(wide(s)) for s, _ in code),
        p90=ninth(plain),
        longest=lengths[-1],
        over=len(over),
        words=words / max(1, lines),
        demo=sum(map(cell_length, demo)) / max(1, lines),
        run=longest_run(cells),
        shown=sum(bool(c.get("outputs")) for _, c in code) / max(1, len(code)),
        tuples=count(unrelated), lambdas=count(bound_lambdas), attached=count(attached),
        positional=count(long_positional), columns=count(numbered_columns))


def ninth(lengths):
    "What nine in ten are not above."
    lengths = sorted(lengths) or [0]
    return lengths[int(.9 * (len(lengths) - 1) + .5)]


def only_imports(source):
    "A cell of imports only."
    return all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in tree_of(source).body)


def only_a_class(source):
    "A cell that holds one class and nothing else."
    body = tree_of(source).body
    return len(body) == 1 and isinstance(body[0], ast.ClassDef)


def holds_a_class(source):
    "A cell that holds a class, alone or among other things: a class stands whole, so it has a limit of its own."
    return any(isinstance(n, ast.ClassDef) for n in ast.walk(tree_of(source)))


def longest_run(cells):
    "Exported cells in a row, imports aside, before one that shows or checks something."
    best = now = 0
    for c in cells:
        if c["cell_type"] != "code": continue
        source = "".join(c["source"])
        if EXPORTED.search(source): now += not only_imports(source)
        elif not HIDDEN.search(source) or re.search(r"\b(assert|test_\w+\()", source): now = 0
        best = max(best, now)
    return best


def pages(packages=()):
    "Pages of the library, all or those of some packages."
    found = sorted(p for p in (ROOT/"nbs").glob("*/*.ipynb") if re.match(r"\d\d[a-z]?_", p.name))
    return [p for p in found if not packages or p.parent.name in packages]


def exported_cells(paths):
    "Sources of the exported cells of pages, those of imports left out."
    cells = [c for p in paths for c in json.loads(p.read_text(encoding="utf-8"))["cells"]]
    sources = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    return [s for s in sources if EXPORTED.search(s) and not only_imports(s)]


def ninth_decile(paths):
    "Lines that nine in ten exported cells without a class are not above."
    return ninth([cell_length(s) for s in exported_cells(paths) if not holds_a_class(s)])


def broken(page, n):
    "Which limits a page breaks."
    limits = [
        ("wide", "lines over 120 columns", 0),
        ("over", f"exported cells over {CELL} lines, {CLASS} for a class", 0),
        ("run", "exported cells in a row without a result", RUN),
        ("tuples", "tuple assignments of unrelated names", 0),
        ("lambdas", "lambdas with a name", 0),
        ("attached", "methods given to a class from outside", 0),
        ("positional", "records of more than six fields built by position", 0),
        ("columns", "columns picked by a number", 0)]
    found = [f"{n[k]} {what} (at most {top})" for k, what, top in limits if n[k] > top]
    if n["kb"] * 1024 > BYTES: found.append(f"exports {n['kb']:.1f} KB (at most {BYTES / 1024:.0f})")
    fewest = [("words", "words", FEWEST_WORDS), ("demo", "demo lines", FEWEST_DEMO)]
    found += [f"{n[k]:.2f} {what} for each exported line (at least {low})" for k, what, low in fewest if n[k] < low]
    return [f"{page.parent.name}/{page.name}: {f}" for f in found]


def totals(packages):
    "The whole of some packages, or of the library."
    paths = pages(packages)
    numbers = [page_numbers(p) for p in paths]
    lengths = [cell_length(s) for s in exported_cells(paths)]
    lines = sum(n["lines"] for n in numbers)
    words, demo = (sum(n[k] * n["lines"] for n in numbers) / lines for k in ("words", "demo"))
    return dict(pages=len(paths), lines=lines, p90=ninth_decile(paths), longest=max(lengths), words=words, demo=demo)


def totals_text(packages):
    "The same in words, with what is aimed at."
    t = totals(packages)
    return (f"{t['pages']} pages, {t['lines']} exported lines; a cell without a class has {t['p90']} lines at "
            f"the ninth decile (at most {P90}), the longest cell {t['longest']}; for each exported line "
            f"{t['words']:.1f} words of prose (aim {WORDS}) and {t['demo']:.2f} lines that use it (aim {DEMO})")


def print_pages(packages):
    "One line a page, and all together."
    names = list(page_numbers(pages()[0]))
    print(f"{'':34}" + "".join(f"{k:>11}" for k in names))
    for p in pages(packages):
        values = [f"{v:>11.2f}" if isinstance(v, float) else f"{v:>11}" for v in page_numbers(p).values()]
        print(f"{p.parent.name + '/' + p.stem:34}" + "".join(values))
    print(totals_text(packages))


def breaches(packages=()):
    "Every limit that is broken, in words."
    found = [line for p in pages(packages) for line in broken(p, page_numbers(p))]
    p90 = ninth_decile(pages(packages))
    return found + [f"a cell without a class has {p90} lines at the ninth decile (at most {P90})"] * (p90 > P90)


def check(packages):
    "Say which pages break a limit."
    found = breaches(packages)
    print("\n".join([*found, totals_text(packages)]))
    sys.exit(bool(found))


# --- beside other libraries

def public_names(tree):
    "What a module lists in `__all__`, or else its functions and classes without an underscore."
    listed = [n.value for n in tree.body if isinstance(n, ast.Assign) and getattr(n.targets[0], "id", "") == "__all__"]
    if listed and isinstance(listed[0], (ast.List, ast.Tuple)):
        return {e.value for e in listed[0].elts if isinstance(e, ast.Constant)}
    made = [n.name for n in tree.body if isinstance(n, (ast.FunctionDef, ast.ClassDef))]
    return {name for name in made if name[0] != "_"}


def module_numbers(files):
    "The same counts over a library's modules."
    sources = [p.read_text(encoding="utf-8") for p in files]
    trees = [ast.parse(s) for s in sources]
    lines = [line for s in sources for line in s.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    sizes = sorted(n for t in trees for n in statement_sizes(t))
    per = 1000 / len(lines)
    return {
        "lines of code": len(lines),
        "public names": len(set().union(*map(public_names, trees))),
        "lines over 120 columns, in 1000": per * sum(len(x) > WIDTH for x in lines),
        "tuple assignments of 4 or more, in 1000": per * sum(len(unrelated(t)) for t in trees),
        "lambdas with a name, in 1000": per * sum(len(bound_lambdas(t)) for t in trees),
        "syntax nodes of a statement, mean": statistics.fmean(sizes),
        "syntax nodes of a statement, ninth decile": float(ninth(sizes)),
        "characters of a line, mean": statistics.fmean(map(len, lines))}


def module_files(name):
    "Modules of an installed library, or of this one; nothing where it is missing."
    if name == "esper_nb": root = ROOT/name
    else:
        spec = importlib.util.find_spec(name)
        if spec is None: return []
        root = Path(spec.origin).parent
    return [p for p in sorted(root.rglob("*.py")) if p.name not in ("_modidx.py", "__init__.py")]


def used_in_tutorials(names):
    "Those of some names that stand in the code of a tutorial or of the index."
    paths = [ROOT/"nbs/index.ipynb", *(ROOT/"nbs/tutorials").glob("*.ipynb")]
    cells = [c for p in paths for c in json.loads(p.read_text(encoding="utf-8"))["cells"]]
    code = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "code")
    return names & set(re.findall(r"\w+", code))


def tool_counts():
    "How much mypy and ruff have to say about this project."
    tools = Path(sys.executable).parent
    types = subprocess.run([tools/"mypy", "esper_nb"], cwd=ROOT, capture_output=True, text=True).stdout
    command = [tools/"ruff", "check", "--output-format", "concise"]
    rules = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout
    found = len(re.findall(r": error:", types)), len(re.findall(r"^\S+:\d+:\d+: ", rules, re.M))
    return dict(zip(("mypy, errors in the package", "ruff, in pages, package, tests and scripts"), found))


def beside():
    "This library beside two that read well."
    files = {name: module_files(name) for name in ("esper_nb", "fastcore", "stable_baselines3")}
    numbers = {name: module_numbers(found) for name, found in files.items() if found}
    print(f"{'':44}" + "".join(f"{name:>20}" for name in numbers))
    for what in numbers["esper_nb"]:
        values = [n[what] for n in numbers.values()]
        print(f"{what:44}" + "".join(f"{v:>20.1f}" if isinstance(v, float) else f"{v:>20}" for v in values))
    trees = [ast.parse(p.read_text(encoding="utf-8")) for p in files["esper_nb"]]
    names = set().union(*map(public_names, trees))
    for what, n in {"of the names, in a tutorial or the index": len(used_in_tutorials(names)), **tool_counts()}.items():
        print(f"{what:44}{n:>20}")


if __name__ == "__main__":
    args, packages = sys.argv[1:], [a for a in sys.argv[1:] if not a.startswith("-")]
    if "--beside" in args: beside()
    elif "--check" in args: check(packages)
    else: print_pages(packages)
