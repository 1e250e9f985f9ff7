"""How the code reads, in numbers: mirror.py [--pages [PACKAGE ...]] [--check] [--beside]

--pages   one line a page: size, width, cells, prose, demonstrations
--check   the limits that `make test` holds; says what breaks them
--beside  the library's modules beside fastcore's and Stable-Baselines3's, counted alike
"""
import ast
import importlib.util
import json
import re
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXPORTED = re.compile(r"^#\|\s*(export|exports|exporti)\b", re.M)
HIDDEN = re.compile(r"^#\|\s*(hide|default_exp)\b", re.M)
WIDTH, BYTES, P90, CELL, WORDS, DEMO, RUN = 120, 16_384, 25, 40, 3.5, .5, 3


def code_lines(source):
    "Lines that are neither empty nor directives."
    return [line for line in source.splitlines() if line.strip() and not line.startswith("#|")]


def tree_of(source):
    "Syntax tree of a cell, its magics left out."
    return ast.parse(re.sub(r"^\s*[%!].*$", "", source, flags=re.M))


def wide(source):
    "Lines over 120 columns."
    return [line for line in source.splitlines() if len(line) > WIDTH]


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
    trees = [tree_of(s) for s, _ in code]
    count = lambda f: sum(len(f(t)) for t in trees)  # noqa: E731
    return dict(
        kb=sum(len("\n".join(code_lines(s)).encode()) for s in exported) / 1024,
        wide=sum(len(wide(s)) for s, _ in code),
        p90=lengths[int(.9 * (len(lengths) - 1) + .5)],
        longest=lengths[-1],
        words=words / max(1, lines),
        demo=sum(map(cell_length, demo)) / max(1, lines),
        run=longest_run(cells),
        shown=sum(bool(c.get("outputs")) for _, c in code) / max(1, len(code)),
        tuples=count(unrelated), lambdas=count(bound_lambdas), attached=count(attached),
        positional=count(long_positional), columns=count(numbered_columns))


def only_imports(source):
    "A cell of imports and constants' names only."
    return all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in tree_of(source).body)


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
    found = sorted(p for p in (ROOT/"nbs").glob("*/*.ipynb") if re.match(r"\d\d_", p.name))
    return [p for p in found if not packages or p.parent.name in packages]


def broken(page, n):
    "Which limits a page breaks."
    limits = [("wide", 0), ("p90", P90), ("longest", CELL), ("run", RUN), ("tuples", 0), ("lambdas", 0), ("attached", 0),
              ("positional", 0), ("columns", 0)]
    found = [f"{k} {n[k]} (at most {top})" for k, top in limits if n[k] > top]
    if n["kb"] * 1024 > BYTES: found.append(f"exports {n['kb']:.1f} KB (at most {BYTES / 1024:.0f})")
    if n["words"] < WORDS: found.append(f"{n['words']:.1f} words per exported line (at least {WORDS})")
    if n["demo"] < DEMO: found.append(f"{n['demo']:.2f} demo lines per exported line (at least {DEMO})")
    return [f"{page.parent.name}/{page.name}: {f}" for f in found]


def print_pages(packages):
    "One line a page."
    names = list(page_numbers(pages()[0]))
    print(f"{'':34}" + "".join(f"{k:>10}" for k in names))
    for p in pages(packages):
        n = page_numbers(p)
        print(f"{p.parent.name + '/' + p.stem:34}" + "".join(f"{v:>10.2f}" if isinstance(v, float) else f"{v:>10}" for v in n.values()))


def check(packages):
    "Say which pages break a limit; the number of breaches is the exit status."
    found = [line for p in pages(packages) for line in broken(p, page_numbers(p))]
    print("\n".join(found) or f"{len(pages(packages))} pages within the limits")
    sys.exit(bool(found))


def module_numbers(files):
    "The same counts over a library's modules, per 1000 lines of code."
    sources = [p.read_text(encoding="utf-8") for p in files]
    trees = [ast.parse(s) for s in sources]
    lines = [line for s in sources for line in s.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    sizes = [n for t in trees for n in statement_sizes(t)]
    per = 1000 / len(lines)
    return dict(lines=len(lines), over_120=per * sum(len(x) > 120 for x in lines),
                tuples=per * sum(len(unrelated(t)) for t in trees), lambdas=per * sum(len(bound_lambdas(t)) for t in trees),
                nodes_mean=statistics.fmean(sizes), nodes_p90=sorted(sizes)[int(.9 * len(sizes))],
                chars=statistics.fmean(map(len, lines)))


def beside():
    "This library beside two that read well."
    def files(name):
        spec = importlib.util.find_spec(name)
        return [] if spec is None else sorted(Path(spec.origin).parent.rglob("*.py"))
    for name in ("esper_nb", "fastcore", "stable_baselines3"):
        found = sorted((ROOT/"esper_nb").rglob("*.py")) if name == "esper_nb" else files(name)
        found = [p for p in found if p.name not in ("_modidx.py", "__init__.py")]
        if found: print(f"{name:20}" + "".join(f"{k}={v:.1f}  " for k, v in module_numbers(found).items()))


if __name__ == "__main__":
    args, packages = sys.argv[1:], [a for a in sys.argv[1:] if not a.startswith("-")]
    if "--beside" in args: beside()
    elif "--check" in args: check(packages)
    else: print_pages(packages)
