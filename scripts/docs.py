"""Build the site in _docs: nbdev processes the notebooks, Quarto renders them; where Quarto is missing, nbconvert does.

Either way the pages have a search, and every link and picture is looked up in what was built.
"""
import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
from functools import cache
from html import unescape
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path

from fastcore.basics import AttrDict
from fastcore.docments import MarkdownRenderer, docstring
from fastcore.nbio import mk_cell, read_nb, write_nb
from fastcore.xtras import dict2obj
from nbdev.config import get_config
from nbdev.processors import FilterDefaults, Processor
from numpydoc.docscrape import NumpyDocString

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path: sys.path.insert(0, str(ROOT))      # when this file is run
from scripts.notebooks import LAYERS, NBS, TRAINED, alt_text, find_notebooks

DOCS, PROC = ROOT/"_docs", ROOT/"_proc"
TASKS = { # section of the sidebar -> its pages, what a newcomer reads first first
    "Start": "tutorials/first_rollback tutorials/dashboard explanations/look_first explanations/glossary",
    "Guard": "tutorials/guard_your_trainer tutorials/bring_your_own tutorials/survive_a_bad_learning_rate "
             "tutorials/why_did_my_run_blow_up",
    "Grow": "tutorials/grow_by_hand tutorials/own_network tutorials/own_pictures tutorials/resnet_slots "
            "tutorials/export_a_network",
    "Train a controller": "tutorials/train_a_controller tutorials/watch_a_controller tutorials/read_a_run "
                          "tutorials/laptop_to_cluster explanations/many_machines tutorials/train_sb3 "
                          "tutorials/tune_with_optuna",
    "Compare": "explanations/results explanations/leaderboard explanations/fleets explanations/growing_pays "
               "explanations/growing_what_is_trained explanations/frontier explanations/negative_results "
               "explanations/benchmarks explanations/on_a_gpu explanations/numbers"}
OPERATORS = ("__call__", "__iter__", "__len__", "__getitem__", "__contains__")      # have entries, if documented
WHOSE = ("*What trainings come to is shown as one processor computed it. Another one rounds otherwise, and training "
         "amplifies the last digits; what this page claims of such figures it asserts with a margin.*")
COLAB = ("[Open in Colab](https://colab.research.google.com/github/esper-nb/esper_nb/blob/main/nbs/tutorials/{}), "
         "and run `%pip install git+https://github.com/esper-nb/esper_nb` there first.\n\n")
NO_QUARTO = "Quarto is not on PATH: plain pages. To get it: https://quarto.org/docs/get-started"


# --- the sidebar

def sections():
    "Return [(title, [paths below nbs])]: the tasks, other pages of prose, the packages from the lowest up."
    found = {p.relative_to(NBS).with_suffix("").as_posix(): p.relative_to(NBS).as_posix() for p in find_notebooks()}
    by_task = {title: [found[name] for name in names.split() if name in found] for title, names in TASKS.items()}
    listed = {path for paths in by_task.values() for path in paths}
    prose = [p for p in sorted(found.values()) if p.split("/")[0] in ("tutorials", "explanations") and p not in listed]
    packages = {name: sorted(p for p in found.values() if p.startswith(f"{name}/")) for name in LAYERS}
    return [(title, paths) for title, paths in (by_task | {"Background": prose} | packages).items() if paths]


def version():
    "Return which version the pages are about."
    cfg = get_config()
    return f"{cfg.title} {cfg.version}"


def sidebar():
    """Write nbs/sidebar.yml, which is JSON and so YAML too; the packages stand together under Reference.
    The version stands at the foot of every page."""
    parts = [dict(section=title, contents=paths) for title, paths in sections()]
    packages = [part for part in parts if part["section"] in LAYERS]
    tasks = [part for part in parts if part not in packages]
    contents = ["index.ipynb", *tasks, dict(section="Reference", contents=packages)]
    website = {"sidebar": {"contents": contents}, "page-footer": {"left": version()}}
    text = json.dumps({"website": website}, indent=1) + "\n"
    (NBS/"sidebar.yml").write_text(text, encoding="utf-8")


# --- entries of the reference

def source_link(sym):
    "Return the address of the source of a function or class, or nothing."
    sym = inspect.unwrap(sym)
    try: path, (_, line) = Path(inspect.getsourcefile(sym)), inspect.getsourcelines(sym)
    except (TypeError, OSError): return ""
    cfg = get_config()
    return f"[source]({cfg.git_url}/blob/{cfg.branch}/{path.relative_to(ROOT).as_posix()}#L{line})\n\n"


class Entry(MarkdownRenderer):
    "nbdev's entry of a name, with the sections of its docstring that nbdev leaves out."
    def _repr_markdown_(self):
        "Return heading, source, signature, summary, and what it raises, examples and papers."
        doc = NumpyDocString(docstring(self.sym))
        parts = [f"{'#' * self.title_level} {self.nm}\n\n{source_link(self.sym)}{super()._repr_markdown_()}"]
        raised = [f"- `{p.type or p.name}`: {' '.join(p.desc)}" for p in doc["Raises"]]
        if raised: parts += ["**Raises**", "\n".join(raised)]
        if doc["Examples"]: parts.append("**Examples**\n\n```python\n" + "\n".join(doc["Examples"]).strip() + "\n```")
        if doc["References"]: parts += ["**References**", " ".join(doc["References"])]
        return "\n\n".join(parts)


def public_methods(cls):
    "Return {name: method} of a class and of its private bases, in the order of their definition."
    found = {}
    for base in [b for b in reversed(cls.__mro__) if b is cls or b.__name__.startswith("_")]:
        for name, value in vars(base).items():
            method = inspect.unwrap(getattr(value, "__func__", getattr(value, "fget", value)))
            own = getattr(getattr(method, "__code__", None), "co_filename", "").startswith(str(ROOT/"esper_nb"))
            wanted = name in OPERATORS and method.__doc__ if name.startswith("_") else True
            if own and wanted: found[name] = value
    return found


def bind_annotations(module):
    "Import into a module what it imports for annotations only."
    for n in ast.parse(inspect.getsource(module)).body:
        if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING":
            exec(compile(ast.Module(n.body, []), module.__file__, "exec"), vars(module))


def entries(name, module):
    "Return the entry of a name of a module, and those of its methods, as Markdown."
    sym = getattr(module, name)
    found = [Entry(sym, name=name)]
    if inspect.isclass(sym):
        found += [Entry(m, name=f"{name}.{k}", title_level=4) for k, m in public_methods(sym).items()]
    return "\n\n".join(["---", *(e._repr_markdown_() for e in found)])


def as_nodes(outputs):
    "Return outputs as nbdev's processors expect them: with attributes, lists as lists."
    return dict2obj(outputs, list_func=list, dict_func=AttrDict)


class ShowEntries(Processor):
    "nbdev's `exec_show_docs`, but that it imports the finished module: no cell of the page is run."
    def begin(self):
        sources = "\n".join(c.source for c in self.nb.cells if c.cell_type == "code")
        name = re.search(r"^#\|\s*default_exp\s+(\S+)", Path(self.nb.path_).read_text(encoding="utf-8")
                         .replace('"', "\n").replace("\\n", "\n"), re.M)
        self.module = import_module(f"esper_nb.{name[1]}") if name and "show_doc(" in sources else None
        if self.module: bind_annotations(self.module)

    def cell(self, cell):
        "Answer `show_doc(name)`."
        cell.pop("has_sd", None)      # nbdev's own mark, which is no part of the format
        asked = re.search(r"^show_doc\((\w+)", cell.source, re.M) if cell.cell_type == "code" else None
        if not asked or self.module is None: return
        data = {"text/markdown": entries(asked[1], self.module).splitlines(keepends=True)}
        cell.outputs = as_nodes([dict(output_type="display_data", metadata={}, data=data)])


class SayPictures(Processor):
    "Give a picture without `#| fig-alt` the words above it: the heading, and the first sentence below."
    def begin(self): self.heading = self.sentence = ""

    def cell(self, cell):
        if cell.cell_type == "markdown":
            for line in cell.source.splitlines():
                if line.startswith("#"): self.heading, self.sentence = line.strip("# "), ""
                elif not self.sentence and re.match(r"[*`\[]*\w", line):
                    self.sentence = re.split(r"(?<=[.:!?]) ", re.sub(r"\]\([^)]*\)|[*`\[\]$]", "", line))[0]
        elif any("image/png" in o.get("data", {}) for o in cell.get("outputs", ())) and not alt_text(cell.source):
            words = f"{self.heading}. {self.sentence}".replace("\\", "/").replace('"', "'")
            cell.source = f'#| fig-alt: "{words}"\n{cell.source}'


class HoldHTML(Processor):
    "Make Markdown of HTML in outputs: for plain HTML, too, Quarto loads scripts of widgets from a foreign server."
    def cell(self, cell):
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "text/html" not in data: continue
            html = "".join(data.pop("text/html"))
            if "<script" in html: raise ValueError(f"an output with a script: {html[:80]}")
            lines = [line for line in html.splitlines(keepends=True) if line.strip()]
            data["text/markdown"] = ["```{=html}\n", *lines, "\n```\n"]


class KeepPromise(Processor):
    """Put back what stands below title and subtitle in the first cell: nbdev makes metadata of them and drops the rest.
    A tutorial has the way to Colab above."""
    def begin(self):
        path = Path(self.nb.path_)
        first = json.loads(path.read_text(encoding="utf-8"))["cells"][0]["source"]
        rest = re.sub(r"\A\s*# [^\n]*\n+(> [^\n]*\n*)?", "", "".join(first) + "\n").strip()
        if path.parent.name == "tutorials": rest = COLAB.format(path.name) + rest
        if rest: self.nb.cells.insert(1, mk_cell(rest, "markdown"))


class SayWhoseFigures(Processor):
    "Say at the foot of a page whose processor the figures of its trainings are of."
    def begin(self):
        trained = any(TRAINED in c.get("metadata", {}).get("tags", ()) for c in self.nb.cells)
        if trained: self.nb.cells.append(mk_cell(WHOSE, "markdown"))


def hide_marks(cell):
    "Take out of code what only the comparison of outputs reads."
    if cell.cell_type == "code": cell.source = re.sub(r"^# NBVAL_\w+\n", "", cell.source, flags=re.M)


def unnest_links(cell):
    "Keep where a link leads whose text is a name: nbdev makes a link of the name in it, and none is left outside."
    if cell.cell_type == "markdown":
        cell.source = re.sub(r"\[\[(`[^`\n]+`)\]\([^)\n]*\)\]\(", r"[\1](", cell.source)


class Processors(FilterDefaults):
    "nbdev's processors of a page, with ours in the place of the one that runs the page."
    def base_procs(self):
        ours = dict(exec_show_docs=[ShowEntries], FrontmatterProc=[super().base_procs()[0], KeepPromise])
        found = [p for q in super().base_procs() for p in ours.get(q.__name__, [q])]
        return [*found, SayPictures, HoldHTML, SayWhoseFigures, hide_marks, unnest_links]


@cache
def keep_entries_only():
    "Take names without an entry out of nbdev's index, so that prose links to none of them."
    from nbdev.doclinks import NbdevLookup
    for symbols in import_module("esper_nb._modidx").d["syms"].values():
        for name in [n for n in symbols if re.search(r"\._(?!_)|\.__", n)]: del symbols[name]
    return NbdevLookup


def process(paths=None):
    "Write what the site is made from into _proc: every page and the files beside them, or some of them."
    from nbdev.quarto import refresh_quarto_yml
    keep_entries_only()
    shutil.rmtree(PROC, ignore_errors=True)      # pages of notebooks that are gone
    refresh_quarto_yml()
    for path in paths or sorted(p for p in NBS.rglob("*") if p.is_file()):
        at = path.relative_to(NBS)
        if any(part[0] in "._" for part in at.parts) and path.name != "_quarto.yml": continue
        (PROC/at).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".ipynb": shutil.copy(path, PROC/at)
        else:
            nb = read_nb(path)
            Processors()(nb)
            write_nb(nb, PROC/at)


# --- HTML

def quarto():
    "Render the site with Quarto."
    done = subprocess.run(["quarto", "render", "--no-cache"], cwd=PROC)
    if done.returncode: sys.exit("quarto render failed: see above")
    shutil.rmtree(DOCS, ignore_errors=True)
    shutil.move(PROC/"_docs", DOCS)
    index = DOCS/"search.json"
    index.write_text(json.dumps(search_index(json.loads(index.read_text(encoding="utf-8")), DOCS)), encoding="utf-8")


def words(html):
    "Return the text of HTML."
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def search_index(found, docs):
    """Return Quarto's index of the search with every entry of the reference, and prose before it.

    Quarto makes one entry of a heading of the second level and what is below it, and lists the first of equal matches
    first.
    """
    heading = re.compile(r'<h([34])[^>]*data-anchor-id="([^"]+)"[^>]*>(.*?)</h\1>(.*?)(?=<h\d|</main>)', re.S)
    entries = []
    for page in {entry["href"].split("#")[0]: entry for entry in found}.values():
        href = page["href"].split("#")[0]
        if href.split("/")[0] not in LAYERS or not (docs/href).exists(): continue
        for _, name, title, rest in heading.findall((docs/href).read_text(encoding="utf-8")):
            entries.append(page | dict(objectID=f"{href}#{name}", href=f"{href}#{name}", section=words(title),
                                       text=words(rest)[:300]))
    order = ("tutorials", "explanations")
    known = {entry["href"] for entry in found}
    every = found + [entry for entry in entries if entry["href"] not in known]
    return sorted(every, key=lambda e: order.index(k) if (k := e["href"].split("/")[0]) in order else len(order))


def page_name(notebook):
    "Return where nbdev puts the page of a notebook: `core/00_config.ipynb` becomes `core/config.html`."
    from nbdev.config import nbpath2html
    return nbpath2html(notebook)


def slug(title):
    "Return the name of a heading in links, as Quarto makes it."
    return re.sub(r"^[^a-z]+", "", re.sub(r"\s+", "-", re.sub(r"[^\w\s.-]", "", title.lower()).strip()))


def plain_cell(cell):
    "Turn what only Quarto reads in a cell into what nbconvert and the template `plain.html.j2` read."
    def mend(text):
        text = re.sub(r"\{target=[^}\n]*\}|^:::.*$|^```\{=html\}\n((?s:.*?))^```$", r"\1", "".join(text), flags=re.M)
        return re.sub(r"(\]\()(?![a-z]+:)([^)\s#]+\.ipynb)", lambda m: m[1] + page_name(m[2]).as_posix(), text)
    for output in cell.get("outputs", ()):
        for data in (d for k, d in output.items() if k == "data" and "text/markdown" in d):
            data["text/markdown"] = mend(data["text/markdown"])
    if cell.cell_type == "markdown": cell.source = mend(cell.source)
    if cell.cell_type != "code": return
    options = dict(re.findall(r"^#\|\s*([\w-]+):\s*(.*?)\s*$", cell.source, re.M))
    title = options.get("code-summary", "Code").strip('"')
    cell.metadata.update(alt=alt_text(cell.source), echo=options.get("echo") != "false",
                         fold=title if options.get("code-fold") == "true" else "")
    cell.source = "\n".join(line for line in cell.source.splitlines() if not line.startswith("#|")).strip()


def named_headings(page):
    "Return a page of nbconvert's with Quarto's names of headings, so that a link works in both."
    seen = {}
    def fix(m):
        name = slug(unescape(re.sub(r"<[^>]*>", "", m[2])))
        seen[name] = seen.get(name, -1) + 1
        return f'<h{m[1]} id="{name}{f"-{seen[name]}" if seen[name] else ""}">{m[2]}</h{m[1]}>'
    return re.sub(r'<h(\d) id="[^"]*">(.*?)<a class="anchor-link"[^>]*>.*?</a></h\1>', fix, page, flags=re.S)


def heading_of(path):
    "Return title and subtitle of a notebook."
    first = "".join(json.loads((NBS/path).read_text(encoding="utf-8"))["cells"][0]["source"])
    return [re.search(rf"^{mark} (.*)$", first, re.M)[1] for mark in "#>"]


def plain_sections(page):
    "Return [(name, heading, first words below)] of a plain page, for its search."
    page = re.sub(r"<(style|script|nav|footer)\b.*?</\1>", " ", page, flags=re.S)
    parts = re.split(r'(?=<h[1-4]\b)', page.partition("<main>")[2])[1:]
    found = [re.match(r'<h\d(?: id="([^"]*)")?[^>]*>(.*?)</h\d>(.*)', part, re.S) for part in parts]
    return [(m[1] or "", words(m[2]), words(m[3])[:400]) for m in found if m]


def plain():
    "Render the site with nbconvert: JupyterLab's look, all pages beside each, the one before and the next at its foot."
    import nbformat
    from nbconvert import HTMLExporter
    exporter = HTMLExporter(template_name="lab", template_file=str(ROOT/"scripts/plain.html.j2"),
                            exclude_raw=True, exclude_input_prompt=True, exclude_output_prompt=True)
    cfg = get_config()
    shutil.rmtree(DOCS, ignore_errors=True)
    menu = [(title, [(page_name(p).as_posix(), heading_of(p)[0]) for p in paths])
            for title, paths in [("esper_nb", ["index.ipynb"]), *sections()]]
    order = [None, *(page for _, pages in menu for page in pages), None]
    around = {page[0]: (before, after) for before, page, after in zip(order, order[1:], order[2:])}
    sections_of = {}      # page -> what its search finds
    for path in sorted(p for p in PROC.rglob("*") if p.suffix in (".ipynb", ".png", ".svg", ".gif")):
        at = path.relative_to(PROC)
        out = DOCS/(page_name(at) if path.suffix == ".ipynb" else at)
        out.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix != ".ipynb":
            shutil.copy(path, out)
            continue
        nb = nbformat.read(path, as_version=4)
        for cell in nb.cells: plain_cell(cell)
        up, here, heading = "../" * at.as_posix().count("/"), page_name(at).as_posix(), heading_of(at)
        nb.metadata.title = heading[0]
        page, _ = exporter.from_notebook_node(nb, dict(menu=menu, up=up, here=here, heading=heading,
                                                       around=around[here], version=version()))
        page = named_headings(page.replace(f'href="{cfg.doc_host}{cfg.doc_baseurl}/', f'href="{up}'))
        out.write_text(page, encoding="utf-8")
        sections_of[here] = [(f"{here}#{name}".rstrip("#"), heading[0], *rest) for name, *rest in plain_sections(page)]
    found = [entry for page in order[1:-1] for entry in sections_of.get(page[0], ())]
    (DOCS/"search.js").write_text(f"const ENTRIES = {json.dumps(found)};\n", encoding="utf-8")


def text_pages():
    "Write every page as Markdown too, at the address that the docstring of its module gives."
    import nbformat
    from nbconvert import MarkdownExporter
    exporter = MarkdownExporter(exclude_raw=True)
    for path in find_notebooks(PROC):
        at, nb = path.relative_to(PROC), nbformat.read(path, as_version=4)
        for cell in nb.cells: plain_cell(cell)
        nb.cells = [cell for cell in nb.cells if cell.metadata.get("echo", True)]
        for output in (o for cell in nb.cells for o in cell.get("outputs", ()) if "data" in o):
            output.data = {kind: data for kind, data in output.data.items() if kind.startswith("text/")}
        nb.metadata.language_info = dict(name="python")
        title, promise = heading_of(at)
        text, _ = exporter.from_notebook_node(nb)
        (DOCS/f"{page_name(at)}.md").write_text(f"# {title}\n\n> {promise}\n\n{text}", encoding="utf-8")


# --- what was built

class Targets(HTMLParser):
    "Where a page's links and pictures point, and the names that a link can point to."
    def __init__(self): super().__init__(); self.found, self.names = [], {"", "top"}
    def handle_starttag(self, tag, attrs):
        name = {"a": "href", "img": "src", "link": "href"}.get(tag)
        self.found += [v for k, v in attrs if k == name and v]
        self.names |= {v for k, v in attrs if k == "id"}


def broken_targets(docs):
    "Return 'page: target' of links and pictures of built pages that lead to no file, or to no heading of a page."
    docs, pages, bad, base = Path(docs).resolve(), {}, [], get_config().doc_baseurl
    for page in sorted(docs.rglob("*.html")):
        pages[page] = seen = Targets()
        seen.feed(page.read_text(encoding="utf-8"))
    for page, seen in pages.items():
        for target in dict.fromkeys(seen.found):
            if re.match(r"[a-z]+:|//", target): continue
            file, _, name = target.partition("#")
            file = file.split("?")[0].removeprefix(base) # the page of what is missing knows no other
            at = (docs/file.lstrip("/") if file.startswith("/") else page.parent/file).resolve() if file else page
            if not at.exists() or at in pages and name not in pages[at].names:
                bad.append(f"{page.relative_to(docs)}: {target}")
    return bad


def build():
    "Build the site and look at what was built."
    sidebar()
    process()
    if shutil.which("quarto"): quarto()
    else:
        print(NO_QUARTO)
        plain()
    text_pages()
    names = [n.relative_to(NBS) for n in find_notebooks()]
    bad = [f"{n}: was not built" for n in names if not (DOCS/page_name(n)).exists()] + broken_targets(DOCS)
    if bad: sys.exit("\n".join(["Broken in the site:", *(f"  {b}" for b in bad)]))
    print(f"{len(names)} pages; every link and picture is there. Open _docs/index.html")


if __name__ == "__main__": build()
