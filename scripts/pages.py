"""What the site adds to a page by machine: words for its pictures, folds for its checks, a picture to begin with.

Cells are dictionaries as notebooks store them, after nbdev has taken out what is not shown.
"""
import ast
import json
import re
from functools import cache

from scripts import reference

CHECKS = "Checks of what the picture shows"
DRAWING, IMPORTS = "Code of the picture", "Imports"
LONGEST = 280      # characters of the words for a picture
KEPT = "keep-colours"
IMAGE = re.compile(r"\.(imshow|matshow|pcolormesh|pcolor|spy)\(")
HIDDEN = re.compile(r"^#\|\s*echo:\s*false", re.M)


def source_of(cell): return "".join(cell["source"])


def options_of(source):
    "The `#|` lines of a cell, and the code below them."
    lines = source.split("\n")
    n = next((i for i, line in enumerate(lines) if line.strip() and not line.startswith("#|")), len(lines))
    return "\n".join(lines[:n]), "\n".join(lines[n:])


def with_option(source, name, value):
    "A cell's source with one more option for Quarto, unless it has it already."
    return source if re.search(rf"^#\|\s*{name}:", source, re.M) else f"#| {name}: {value}\n{source}"


def pictures(cell):
    "How many pictures a cell shows."
    return sum("image/png" in o.get("data", {}) for o in cell.get("outputs", ()))


def parsed(cell):
    "The statements of a code cell; none if it is no Python."
    try: return ast.parse(options_of(source_of(cell))[1]).body if cell["cell_type"] == "code" else []
    except SyntaxError: return []


# --- words for pictures

def alt_text(source):
    "What the pictures of a code cell show, as it says itself in a line `#| fig-alt: \"...\"`; without one, nothing."
    said = re.search(r"^#\|\s*fig-alt:\s*(.+?)\s*$", source, re.M)
    return "" if said is None else json.loads(said[1]) if said[1].startswith('"') else said[1]


def spoken(markdown):
    "Prose as one hears it: no marks, no addresses, one line."
    text = re.sub(r"```.*?```", " ", markdown, flags=re.S)
    text = re.sub(r"<[^>]*>|^\s*[#>|].*$|^:::.*$|\{[^}\n]*\}", " ", text, flags=re.M)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return " ".join(re.sub(r"[*`$]|^\s*[-+] ", "", text, flags=re.M).split())


def sentences(text):
    "Its sentences, each with its end."
    return [s.strip() for s in re.split(r"(?<=[.:!?])\s+(?=[A-Z\"“])", text) if s.strip()]


@cache
def drawers():
    "{name: first sentence of its docstring} of the library's functions."
    from scripts.notebooks import exported_names
    found = {}
    for name, where in exported_names().items():
        node = reference.module(where).nodes.get(name)
        if doc := node is not None and ast.get_docstring(node): found[name] = sentences(" ".join(doc.split()))[0]
    return found


def _said(node):
    "A string constant of the code, a formatted one without its values."
    if isinstance(node, ast.Constant) and isinstance(node.value, str): return node.value
    if not isinstance(node, ast.JoinedStr): return ""
    return "".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)


def drawn(statements):
    "What the code of a picture says about it: who draws it, its title, its axes, its curves."
    calls = [n for s in statements for n in ast.walk(s) if isinstance(n, ast.Call)]
    names = [getattr(c.func, "id", getattr(c.func, "attr", "")) for c in calls]
    called = [n for n in dict.fromkeys(names) if n.startswith(("plot_", "draw_", "picture"))]
    makers = [drawers()[n] for n in called if n in drawers()]
    def told(key, method):
        by_key = [_said(k.value) for c in calls for k in c.keywords if k.arg == key]
        by_call = [_said(c.args[0]) for c, n in zip(calls, names) if n == method and c.args]
        return [t for t in dict.fromkeys([*by_key, *by_call]) if t.strip(" …")]
    x, y = told("xlabel", "set_xlabel"), told("ylabel", "set_ylabel")
    axes = f"{y[0]} over {x[0]}" if x and y else f"axis: {(x or y)[0]}" if x or y else ""
    curves = told("label", "")
    parts = [*makers, *told("title", "set_title")[:3], axes, "curves: " + ", ".join(curves[:6]) if curves else ""]
    return [" ".join(p.replace("$", "").split()).rstrip(".;:") for p in parts if p]


def before(cells, i):
    "The heading and the prose above a cell."
    title, prose = "", ""
    for cell in reversed(cells[:i]):
        if cell["cell_type"] != "markdown": continue
        text = source_of(cell)
        pieces = re.split(r"^#+ (.*)$", text, flags=re.M)      # what is above a heading belongs to something else
        prose = prose or spoken(pieces[-1])
        if len(pieces) > 1:
            title = spoken(pieces[-2])
            break
    return title, prose


def shortened(text, longest):
    "As many whole sentences as there is room for, at least one, cut at a word if it must be."
    kept = ""
    for s in sentences(text):
        if kept and len(kept) + len(s) >= longest: break
        kept = f"{kept} {s}".strip()
    return kept if len(kept) <= longest else kept[:longest].rsplit(" ", 1)[0].rstrip(",;") + " …"


def picture_text(cells, i):
    "Words for the pictures of a cell that has none of its own: what the code says, and the prose above it."
    title, prose = before(cells, i)
    facts = drawn(parsed(cells[i]))
    if not facts: facts = [title] if title else []
    text = "; ".join(facts)
    text = text[:1].upper() + text[1:] + "." * bool(text)
    last = shortened(prose, max(LONGEST - len(text), 80))
    return f"{text} {last.rstrip(':')}".strip().replace('"', "'").replace("\\", "/")


def speak_pictures(cells):
    "Give every cell that shows a picture words for it."
    told = set()
    for i, cell in enumerate(cells):
        if cell["cell_type"] != "code" or not pictures(cell): continue
        source = source_of(cell)
        if alt_text(source):
            told.add(alt_text(source))
            continue
        text = picture_text(cells, i)
        if text in told: text = f"{text} Picture {len(told) + 1} of this page."
        told.add(text)
        cell["source"] = with_option(source, "fig-alt", json.dumps(text, ensure_ascii=False))


def keep_colours(cells):
    "Mark cells that draw an image of values: on a dark page their light and dark must not change places."
    helpers = {n.name: ast.unparse(n) for c in cells for n in parsed(c) if isinstance(n, ast.FunctionDef)}
    for cell in cells:
        if cell["cell_type"] != "code" or not pictures(cell): continue
        source = source_of(cell)
        called = [text for name, text in helpers.items() if re.search(rf"\b{name}\b", source)]
        if any(IMAGE.search(text) for text in (source, *called)):
            cell["source"] = with_option(source, "classes", KEPT)
            cell["metadata"] = dict(cell.get("metadata", {}), tags=[*cell.get("metadata", {}).get("tags", ()), KEPT])


# --- folds

def is_check(statement):
    "Whether a statement only checks: an assertion, or a call of a test."
    if isinstance(statement, ast.Assert): return True
    if isinstance(statement, ast.With):
        return any(re.search(r"expect_fail|raises", ast.unparse(i.context_expr)) for i in statement.items)
    if isinstance(statement, ast.For): return all(is_check(s) for s in statement.body)
    call = getattr(statement, "value", None)
    name = getattr(getattr(call, "func", None), "id", "") if isinstance(statement, ast.Expr) else ""
    return name.startswith("test_") or name == "expect_fail"


def folded(source, title):
    "A cell's source whose code is folded, with a title to unfold it."
    return with_option(with_option(source, "code-summary", json.dumps(title)), "code-fold", "true")


def _split_checks(cell):
    "A cell that draws, and the checks at its end as a cell of its own."
    options, code = options_of(source_of(cell))
    statements = parsed(cell)
    n = len(statements)
    while n and is_check(statements[n - 1]): n -= 1
    if n in (0, len(statements)) or HIDDEN.search(options): return [cell]
    lines = code.split("\n")
    cut = statements[n].lineno - 1
    while cut and lines[cut - 1].lstrip().startswith("#"): cut -= 1
    head = "\n".join(lines[:cut]).rstrip()
    cell["source"] = f"{options}\n{head}" if options else head
    checks = dict(cell_type="code", id=f"{cell.get('id', 'cell')}-checks", metadata={}, execution_count=None,
                  outputs=[], source="\n".join(lines[cut:]))
    return [cell, checks]


def fold_checks(cells):
    "Cells whose checks are folded where they follow a picture in the same section."
    found, seen = [], False
    for cell in cells:
        if cell["cell_type"] == "markdown" and re.search(r"^#+ ", source_of(cell), re.M): seen = False
        drew = cell["cell_type"] == "code" and pictures(cell)
        pieces = _split_checks(cell) if drew else [cell]
        for piece in pieces[1:] if drew else pieces:
            statements = parsed(piece)
            if (drew or seen) and not piece.get("outputs") and any(map(is_check, statements)) \
                    and not HIDDEN.search(source_of(piece)):
                piece["source"] = folded(source_of(piece), CHECKS)
        seen = seen or bool(drew)
        found += pieces
    return found


def open_with_picture(cells):
    "Fold the code above the first heading of a page, if it leads to a picture: the claim, then the thing at work."
    for i, cell in enumerate(cells):
        if cell["cell_type"] == "markdown" and re.search(r"^## ", source_of(cell), re.M): return
        if cell["cell_type"] != "code" or not pictures(cell): continue
        for c in cells[:i + 1]:
            if c["cell_type"] == "code" and source_of(c).strip() and not HIDDEN.search(source_of(c)):
                imports = all(isinstance(s, (ast.Import, ast.ImportFrom)) for s in parsed(c))
                c["source"] = folded(source_of(c), IMPORTS if imports else DRAWING)
        return


def dress(cells, opens=False):
    "All of it, for the cells of a page; `opens`: with its picture."
    speak_pictures(cells)
    keep_colours(cells)
    cells = fold_checks(cells)
    if opens: open_with_picture(cells)
    return cells
