"""The reference of the site: what it says about a public name, written from the source of the library.

An entry has a heading, a signature, the docstring and the comments of the parameters; a class has the same for every
public method, and a table of its fields. Nothing is run: names, annotations and defaults stand as they are written.
"""
import ast
import inspect
import io
import re
import tokenize
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from textwrap import fill
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LIB = ROOT/"esper_nb"
LONGEST = 48      # characters of a default that are shown; of an annotation twice as many
WIDTH = 88        # of a signature before it is broken, one parameter a line
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SHOWN_MARKS = ("property", "cached_property", "classmethod", "staticmethod", "contextmanager", "abstractmethod")
OPERATORS = ("__call__", "__iter__", "__len__", "__getitem__", "__contains__")      # told if they have a docstring
ENUMS = ("Enum", "IntEnum", "StrEnum", "Flag", "IntFlag")
SPECIAL = re.compile(r"([\\`*_{}\[\]()#+!|<>~$&])")      # what Markdown may read as more than a character


@dataclass
class Module:
    "A parsed module: its classes and functions by name, and the comment that ends each line."
    path: Path
    nodes: dict = field(default_factory=dict)      # {name: node}
    comments: dict[int, str] = field(default_factory=dict)      # {line, from 1: comment}
    imports: dict[str, str] = field(default_factory=dict)      # {name: module of esper_nb it comes from}


class Param(NamedTuple):
    "A parameter of a signature, or a field of a class."
    name: str      # with its stars
    kind: str      # "/", "" or "*": by position only, either way, by name only; "**" takes the rest
    type: str = ""
    default: str = ""
    note: str = ""      # its comment


class Entry(NamedTuple):
    "Something callable, or a class."
    name: str      # such as `Governor.watch`
    params: tuple[Param, ...] | None      # None: it is not called
    returns: str = ""
    returned: str = ""      # comment of what is returned
    aside: str = ""      # comment of a head of one line, which may be about a parameter or about what is returned
    marks: tuple[str, ...] = ()      # decorators that a reader wants to know
    doc: str = ""
    at: str = ""      # file and line below the library


@cache
def module(name):
    "A module of the library, such as `guard.governor`, parsed."
    path = LIB/(name.replace(".", "/") + ".py")
    text = path.read_text(encoding="utf-8")
    found = Module(path)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line[:token.start[1]].strip():
            found.comments[token.start[0]] = token.string.lstrip("# ").strip()
    for node in ast.parse(text).body:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)): found.nodes[node.name] = node
        elif isinstance(node, ast.ImportFrom) and node.level:
            package = name.split(".")[:-node.level]
            origin = ".".join([*package, *(node.module or "").split(".")])
            found.imports |= {n.asname or n.name: origin for n in node.names}
    return found


def written(node, longest=LONGEST):
    "A piece of code on one line, no longer than is good to read."
    if node is None: return ""
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= longest else text[:longest - 1].rstrip() + "…"


def annotation(node):
    "A type as it is written, a quoted one without its quotes."
    return written(node, 2 * LONGEST).strip("'\"")


def parameters(m, node):
    "The parameters of a function, with the comments that end their lines."
    a = node.args
    before = [*a.posonlyargs, *a.args]
    defaults = [None] * (len(before) - len(a.defaults)) + a.defaults
    rows = [(x, "/" if x in a.posonlyargs else "", d, "") for x, d in zip(before, defaults)]
    if a.vararg: rows.append((a.vararg, "", None, "*"))
    rows += [(x, "*", d, "") for x, d in zip(a.kwonlyargs, a.kw_defaults)]
    if a.kwarg: rows.append((a.kwarg, "**", None, "**"))
    ends = [(d or x).end_lineno for x, _, d, _ in rows]
    said = {end: i for i, end in enumerate(ends)}      # a comment is about the last parameter of its line
    if node.returns is not None: said.pop(node.returns.end_lineno, None)
    return tuple(Param(stars + x.arg, kind, annotation(x.annotation), written(d),
                       m.comments.get(ends[i], "") if said.get(ends[i]) == i else "")
                 for i, (x, kind, d, stars) in enumerate(rows))


def marks_of(node):
    "The decorators of a function that say how it is called."
    names = [written(d).split(".")[-1].split("(")[0] for d in node.decorator_list]
    return tuple(n for n in names if n in SHOWN_MARKS)


def function_entry(m, node, owner="", doc=""):
    "The entry of a function, or of a method of the class `owner`."
    params, marks = parameters(m, node), marks_of(node)
    head = node.body[0].lineno - 1 if node.returns is None else node.returns.end_lineno
    note = m.comments.get(head, "") if node.returns is not None or node.lineno == head else ""
    aside = note if node.lineno == head else ""
    if aside: params = tuple(p._replace(note="") for p in params)
    if owner and "staticmethod" not in marks: params = params[1:]
    if any("property" in mark for mark in marks): params = None
    name = f"{owner}.{node.name}" if owner else node.name
    at = f"{m.path.relative_to(LIB).as_posix()}#L{node.lineno}"
    said = ast.get_docstring(node) or doc
    return Entry(name, params, annotation(node.returns), "" if aside else note, aside, marks, said, at)


class Place(NamedTuple):
    "A class and the module it stands in."
    module: str
    node: ast.ClassDef


def find_class(name, within):
    "Where a class that is called `name` in the module `within` stands, if it is the library's."
    m = module(within)
    node = m.nodes.get(name)
    if isinstance(node, ast.ClassDef): return Place(within, node)
    came = m.imports.get(name)
    return find_class(name, came) if came and (LIB/(came.replace(".", "/") + ".py")).exists() else None


def bases_of(place):
    "The bases of a class as they are written, and those of the library found."
    names = [written(b).split("[")[0] for b in place.node.bases]
    return [(n, find_class(n, place.module)) for n in names]


def family(place):
    "A class and all its bases in the library, nearest first, each once."
    seen, waiting = {}, [place]
    while waiting:
        p = waiting.pop(0)
        if (p.module, p.node.name) in seen: continue
        seen[p.module, p.node.name] = p
        waiting += [b for _, b in bases_of(p) if b]
    return list(seen.values())


def own_family(place):
    "The class with those bases that have no entry of their own, since they are private."
    open_bases = [b for p in family(place) for _, b in bases_of(p) if b and not b.node.name.startswith("_")]
    told = {(q.module, q.node.name) for b in open_bases for q in family(b)}
    return [p for p in family(place) if (p.module, p.node.name) not in told]


def is_public(name): return not name.startswith("_") or name in OPERATORS


def methods(place):
    "{name: (class it is written in, node)} of every public method of a class that no public base tells about."
    found = {}
    for p in own_family(place):
        for node in p.node.body:
            if not isinstance(node, FUNCTIONS) or not is_public(node.name): continue
            if node.name in OPERATORS and not ast.get_docstring(node): continue
            if any(getattr(d, "attr", "") in ("setter", "deleter") for d in node.decorator_list): continue
            found.setdefault(node.name, (p, node))
    return found


def fields(place):
    "The annotated attributes of a class, those of its bases first: a dataclass and a NamedTuple are made from them."
    found = {}
    for p in reversed(family(place)):
        m = module(p.module)
        for node in p.node.body:
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name): continue
            name = node.target.id
            if name.startswith("_") or "ClassVar" in written(node.annotation): continue
            note = m.comments.get(node.end_lineno, "")
            if not note and node.value is not None: note = m.comments.get(node.lineno, "")
            before = found.get(name)
            found[name] = Param(name, "", annotation(node.annotation), default_of(node.value),
                                note or (before.note if before else ""))
    return tuple(found.values())


def default_of(node):
    "A field's default; what a factory makes is shown as its call."
    if isinstance(node, ast.Call) and written(node.func) in ("field", "dataclasses.field"):
        by_name = {k.arg: k.value for k in node.keywords}
        if "default" in by_name: return written(by_name["default"])
        factory = by_name.get("default_factory")
        return "" if factory is None else written(factory.body) if isinstance(factory, ast.Lambda) \
            else f"{written(factory)}()"
    return written(node)


def members(place):
    "The members of an enumeration."
    m = module(place.module)
    pairs = [(n, getattr(n.targets[0], "id", "_")) for n in place.node.body if isinstance(n, ast.Assign)]
    return tuple(Param(name, "", "", written(n.value), m.comments.get(n.end_lineno, ""))
                 for n, name in pairs if not name.startswith("_"))


def has_base(place, *names):
    "Whether a class descends from one that is called so, in the library or outside."
    said = {n.split(".")[-1] for p in family(place) for n, _ in bases_of(p)}
    return bool(said & set(names))


def is_record(place):
    "Whether a class is made from its fields."
    marked = any("dataclass" in written(d) for p in family(place) for d in p.node.decorator_list)
    return marked or has_base(place, "NamedTuple")


def class_entry(place):
    "The entry of a class: how one is made, from `__init__` or from its fields."
    m, name = module(place.module), place.node.name
    at = f"{m.path.relative_to(LIB).as_posix()}#L{place.node.lineno}"
    doc = ast.get_docstring(place.node) or ""
    if has_base(place, *ENUMS, "Protocol", "TypedDict"):
        return Entry(f"class {name}({', '.join(n for n, _ in bases_of(place))})", None, doc=doc, at=at)
    for p in family(place):
        makers = [n for n in p.node.body if isinstance(n, FUNCTIONS) and n.name in ("__init__", "__new__")]
        if makers: return Entry(name, parameters(module(p.module), makers[0])[1:], doc=doc, at=at)
    if is_record(place): return Entry(name, fields(place), doc=doc, at=at)
    outside = [n for p in family(place) for n, b in bases_of(p) if b is None and n not in ("object", "Generic", "ABC")]
    return Entry(name, (Param("…", ""),) if outside else (), doc=doc, at=at)


# --- as Markdown

def literal(text):
    "Text that Markdown shows as it stands, also in a cell of a table."
    return SPECIAL.sub(lambda m: f"&#{ord(m[1])};", text)


def as_code(text): return f"<code>{literal(text)}</code>" if text else ""


def signature(entry, types=True):
    "A call as it is written, broken into lines where it is long."
    end = f" -> {entry.returns}" if entry.returns else ""
    lines = [f"@{mark}" for mark in entry.marks]
    if entry.params is None: return "\n".join([*lines, _with_aside(entry.name + end, entry.aside)])
    parts, star, last = [], False, ""
    for p in entry.params:
        if last == "/" and p.kind != "/": parts.append("/")
        if p.name.startswith("*"): star = True
        if p.kind == "*" and not star:
            parts.append("*")
            star = True
        typed = f"{p.name}: {p.type}" if types and p.type else p.name
        equals = " = " if types and p.type else "="
        parts.append(typed + (equals + p.default if p.default else ""))
        last = p.kind
    if last == "/": parts.append("/")
    line = f"{entry.name}({', '.join(parts)}){end}"
    if len(line) > WIDTH:
        if types: inside = "".join(f"    {part},\n" for part in parts)
        else: inside = fill(", ".join(part.replace(" ", "\0") for part in parts), WIDTH, initial_indent="    ",
                            subsequent_indent="    ", break_long_words=False, break_on_hyphens=False) + "\n"
        line = f"{entry.name}(\n{inside}){end}".replace("\0", " ")
    return "\n".join([*lines, _with_aside(line, entry.aside)])


def _with_aside(line, aside):
    "A signature with its comment, which gets a line of its own where there is no room."
    if not aside: return line
    return f"{line}  # {aside}" if len(line.splitlines()[-1] + aside) < WIDTH else f"# {aside}\n{line}"


def _details(note):
    "A comment in a cell of a table: its code stays code, and links."
    def shown(part):
        if not part.startswith("`") or len(part) < 3: return literal(part)
        return as_code(part[1:-1]) if "|" in part else part
    return "".join(shown(part) for part in re.split(r"(`[^`]+`)", note))


def table(params, first, returned=None):
    "Parameters or fields as a table; columns that would be empty are left out."
    rows = [(as_code(p.name), as_code(p.type), as_code(p.default), _details(p.note)) for p in params]
    if returned: rows.append(("*returns*", as_code(returned[0]), "", _details(returned[1])))
    heads = (first, "type", "value" if first == "member" else "default", "what it is")
    keep = [i for i in range(4) if i in (0, 3) or any(r[i] for r in rows)]
    widths = (4, 5, 4, 12)
    lines = [heads, tuple("-" * widths[i] for i in range(4)), *rows]
    return "\n".join("| " + " | ".join(line[i] for i in keep) + " |" for line in lines)


def prose(doc):
    "A docstring as Markdown: its own line breaks are none."
    return inspect.cleandoc(doc)


def described(entry, first="parameter"):
    "Signature, docstring and table of an entry."
    noted = bool(entry.params and any(p.note for p in entry.params))
    parts = [f"```python\n{signature(entry, types=not noted)}\n```", prose(entry.doc)]
    if noted: parts.append(table(entry.params, first, (entry.returns, entry.returned) if entry.returned else None))
    elif entry.returned: parts.append(table((), "", (entry.returns, entry.returned)))
    return [p for p in parts if p]


def heading(level, name):
    "A heading with the name that links expect."
    return f"{'#' * level} {re.sub('_', chr(92) + '_', name) if '__' in name else name}"


def inherited_doc(place, name):
    "The docstring of a method in a base of the library."
    for p in family(place)[1:]:
        for node in p.node.body:
            said = ast.get_docstring(node) if isinstance(node, FUNCTIONS) and node.name == name else None
            if said: return said
    return ""


def describe(name, within, source=""):
    "The entry of a public name of the module `within`, as Markdown; `source` is the address of the library's folder."
    m = module(within)
    node = m.nodes[name]
    if isinstance(node, FUNCTIONS):
        entry = function_entry(m, node)
        body = described(entry)
    else:
        place = Place(within, node)
        entry = class_entry(place)
        record = is_record(place) and entry.params and not any(
            isinstance(n, FUNCTIONS) and n.name == "__init__" for n in node.body)
        body = described(entry, first="field" if record else "parameter")
        if values := has_base(place, *ENUMS) and members(place):
            body.append(table(values, "member"))
        bases = [n for n, b in bases_of(place) if b and not n.startswith("_")]
        if bases: body.append("Inherits from " + " and ".join(f"`{b}`" for b in bases) + ".")
        rest = [f for f in fields(place) if f.note and f.name not in {p.name for p in entry.params or ()}]
        if rest and not values: body.append(table(rest, "attribute"))
        for method, (p, n) in methods(place).items():
            told = function_entry(module(p.module), n, name, inherited_doc(place, method))
            body += [heading(4, told.name), *described(told)]
    link = f'[source]({source}/{entry.at}){{target="_blank" style="float:right; font-size:smaller"}}' if source else ""
    return "\n\n".join(p for p in ("---", link, heading(3, name), *body) if p) + "\n"


def public_methods(name, within):
    "Names of the methods that the entry of a class tells about."
    node = module(within).nodes.get(name)
    return [f"{name}.{m}" for m in methods(Place(within, node))] if isinstance(node, ast.ClassDef) else []
