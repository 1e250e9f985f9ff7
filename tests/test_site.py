"The site, without the program that draws it: every page processes and is listed, every link and picture leads on."
import ast
import base64
import html
import importlib
import inspect
import json
import os
import re
import shutil
import struct
from functools import cache

import pytest
import yaml
from scripts import notebooks, pages, reference
from scripts.notebooks import NBS, ROOT, alt_text, broken_targets, find_notebooks, page_name, site_sections, slug

NOTEBOOKS = find_notebooks()
HOME = "https://github.com/esper-nb/esper_nb"
PROSE = [ROOT/"README.md", ROOT/"CONTRIBUTING.md"]

def ids(path): return path.name
def text(part): return "".join(part)

@cache
def shown(path):
    "Markdown that a page shows, code in it left out: prose, and stored output."
    if path.suffix == ".md": parts = [path.read_text(encoding="utf-8")]
    else:
        parts = []
        for c in json.loads(path.read_text(encoding="utf-8"))["cells"]:
            if c["cell_type"] == "markdown": parts.append(text(c["source"]))
            else: parts += [text(o["data"]["text/markdown"]) for o in c["outputs"] if "text/markdown" in o.get("data",
                    {})]
    return re.sub(r"```.*?```|`[^`\n]*`", "", "\n\n".join(parts), flags=re.S)

@cache
def shown_source(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n\n".join(text(c["source"]) for c in cells if c["cell_type"] == "markdown")

@cache
def anchors(path):
    "Names of a page's headings, as the site makes them."
    found: list[str] = []
    for title in re.findall(r"^#+ (.*)$", shown(path), re.M):
        if own := re.search(r"\{#([\w-]+)", title): found.append(own[1]); continue
        name = slug(title)
        found.append(name if name not in found else f"{name}-{found.count(name)}")
    return found

def targets(path):
    "Targets of links and of pictures in a page."
    body = shown(path)
    return re.findall(r"(?<!!)\[[^\]\[]*(?:\[[^\]]*\][^\]\[]*)*\]\(([^)\s]+)\)",
                      body), re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", body) + re.findall(r'<img[^>]+src="([^"]+)"', body)

def leads_nowhere(path, target):
    "Why a link is broken, or nothing."
    if target.startswith(HOME):
        inside = re.match(r"/(?:blob|tree)/main/([^#]*)", target.removeprefix(HOME))
        return inside and not (ROOT/inside[1]).exists() and "no such file in this project"
    if re.match(r"[a-z]+:", target):
        return not re.fullmatch(r"(https?://[\w.-]+\.\w+(/\S*)?|mailto:\S+@\S+)", target) and "no address"
    file, _, anchor = target.partition("#")
    page = (path.parent/file).resolve() if file else path
    if not page.exists(): return "no such file"
    lost = anchor and page.suffix in (".ipynb", ".md") and anchor not in anchors(page)
    return lost and f"{page.name} has {', '.join(anchors(page))}"


def test_the_sidebar_has_every_page_once():
    listed = ["index.ipynb", *(p for _, pages in site_sections() for p in pages)]
    assert sorted(listed) == sorted(p.relative_to(NBS).as_posix() for p in NOTEBOOKS)

def test_the_sidebar_has_the_packages_of_the_index():
    "In the order of the index, with the same pages; a page that is new wants `make refresh NB=nbs/index.ipynb`."
    cells = json.loads((NBS/"index.ipynb").read_text(encoding="utf-8"))["cells"]
    tables = [text(o["data"].get("text/markdown", "")) for c in cells for o in c.get("outputs", []) if "data" in o]
    table = next(t for t in tables if t.startswith("| package |"))
    index = [f"{package}/{stem}.ipynb" for package, pages in re.findall(r"^\| `(\w+)` \|[^|]*\| (.*) \|$", table, re.M)
             for stem in re.findall(r"`(\w+)`", pages)]
    assert index == [p for _, pages in site_sections() for p in pages if p.split("/")[0] in notebooks.LAYERS]

def test_the_sidebar_begins_where_a_newcomer_does():
    of = dict(site_sections())
    assert of["Tutorials"][0] == "tutorials/first_rollback.ipynb"
    def stems(title): return [p.split("/")[1].removesuffix(".ipynb") for p in of[title]]
    assert stems("Explanations") == [
        "results", "look_first", "design", "glossary", "frontier", "growing_pays", "many_machines", "negative_results"]
    assert stems("Appendix") == ["metrics", "findings"]
    assert list(of)[0] == "Tutorials" and list(of)[-2:] == ["Explanations", "Appendix"]

def test_the_sidebar_is_what_quarto_reads():
    notebooks.sidebar()
    contents = yaml.safe_load((NBS/"sidebar.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    assert contents[0] == "index.ipynb"
    assert [c["section"] for c in contents[1:]] == [title for title, _ in site_sections()]
    quarto = yaml.safe_load((ROOT/"_quarto.yml").read_text(encoding="utf-8"))
    assert "sidebar.yml" in quarto["metadata-files"] and quarto["website"]["search"] is True
    assert quarto["project"]["output-dir"] == "_docs"
    assert re.search(r"^custom_sidebar = True$", (ROOT/"settings.ini").read_text(encoding="utf-8"), re.M), \
        "or nbdev writes another one over it"

def test_what_a_reader_looks_up_is_there():
    pages = {p.relative_to(NBS).as_posix() for p in NOTEBOOKS}
    wanted = ("results", "design", "glossary", "metrics", "findings", "negative_results")
    assert {"index.ipynb", *(f"explanations/{n}.ipynb" for n in wanted)} <= pages
    assert len([p for p in pages if p.startswith("tutorials/")]) >= 5

@pytest.mark.parametrize("page", [*NOTEBOOKS, *PROSE], ids=ids)
def test_links_lead_somewhere(page):
    broken = {t: why for t in targets(page)[0] if (why := leads_nowhere(page, t))}
    assert not broken, f"{page.name}: {broken}"

@pytest.mark.parametrize("page", [*NOTEBOOKS, *PROSE], ids=ids)
def test_pictures_are_there(page):
    missing = [t for t in targets(page)[1] if not re.match(r"https?:|data:|attachment:",
                                                           t) and not (page.parent/t).exists()]
    assert not missing, f"{page.name}: {missing}"
    if page.suffix == ".md": return
    for c in json.loads(page.read_text(encoding="utf-8"))["cells"]:
        for o in c.get("outputs", []):
            if "image/png" not in o.get("data", {}): continue
            data = base64.b64decode(text(o["data"]["image/png"]))
            assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND", \
                f"{page.name}, cell {c['id']}: no whole picture"
            assert min(struct.unpack(">II", data[16:24])) > 20, f"{page.name}, cell {c['id']}: an empty picture"

SPOKEN = [ROOT/"README.md", NBS/"index.ipynb", *(p for p in NOTEBOOKS if p.parent.name == "tutorials")]

@pytest.mark.parametrize("page", SPOKEN, ids=ids)
def test_every_picture_says_what_it_shows(page):
    "To readers who do not see it: `![text](file)`, and `#| fig-alt: \"text\"` in a cell that draws."
    said = re.findall(r"!\[([^\]]*)\]\(",
                      page.read_text(encoding="utf-8") if page.suffix == ".md" else shown_source(page))
    if page.suffix == ".ipynb":
        for c in json.loads(page.read_text(encoding="utf-8"))["cells"]:
            said += [alt_text(text(c["source"])) for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert all(len(s.split()) >= 5 for s in said), f"{page.name}: {said}"
    assert len(set(said)) == len(said) and (said or page.name != "README.md")

def test_alt_text_is_read_as_quarto_reads_it():
    line = '#| fig-alt: "Two \\"curves\\": up, and down"'
    said = alt_text(f"#| echo: false\n{line}\nplt.plot()")
    assert said == yaml.safe_load(line[3:])["fig-alt"] == 'Two "curves": up, and down'
    assert alt_text("#| fig-alt: A curve\nplot()") == "A curve"
    assert alt_text("plot()") == alt_text("x = '#| fig-alt: no'") == ""

def test_broken_links_of_pages_are_noticed(tmp_path):
    page = tmp_path/"page.ipynb"
    page.write_text(json.dumps(dict(cells=[dict(cell_type="markdown", id="a", metadata={},
                                                source=["# Title here, and more\n\n## Again\n\n## Again\n"])])))
    good = ("page.ipynb", "#title-here-and-more", "page.ipynb#again-1", "https://jsonlines.org")
    bad = ("pages.ipynb", "#title", "page.ipynb#again-2", "https:/jsonlines", f"{HOME}/blob/main/tests/test_gone.py")
    assert not any(leads_nowhere(page, t) for t in (*good, f"{HOME}/blob/main/README.md"))
    assert all(leads_nowhere(page, t) for t in bad)

def test_broken_links_of_the_built_site_are_noticed(tmp_path):
    (tmp_path/"a").mkdir()
    links = [f'<a href="{to}">a</a>' for to in ("../two.html#x", "https://jsonlines.org", "#y", "#")]
    body = ['<h2 id="y">Y</h2>', *links, '<img src="gone.png"><a href="three.html">3</a>']
    (tmp_path/"a/one.html").write_text(" ".join(body))
    (tmp_path/"two.html").write_text('<a href="a/one.html?v=1#y">1</a><a href="/two.html">2</a><link href="gone.css">')
    files = ["a/one.html: gone.png", "a/one.html: three.html", "two.html: gone.css"]
    assert broken_targets(tmp_path) == ["a/one.html: ../two.html#x", *files]

def test_names_that_no_heading_explains_are_no_links(tmp_path):
    (tmp_path/"a").mkdir()
    site, away, plain = notebooks.site_address(), "https://jsonlines.org/#g", "<code>f</code>"
    def link(to): return f'<a href="{to}"><code>f</code></a>'
    targets = ("../two.html#f", "../two.html#g", f"{site}two.html#f", f"{site}two.html#g", "#g", away)
    (tmp_path/"a/one.html").write_text(" ".join(map(link, targets)))
    (tmp_path/"two.html").write_text('<h3 id="f">f</h3>')
    notebooks.unlink_unknown(tmp_path)
    left = [link("../two.html#f"), plain, link(f"{site}two.html#f"), plain, plain, link(away)]
    assert (tmp_path/"a/one.html").read_text() == " ".join(left)

def test_pages_are_where_nbdev_puts_them(tmp_path):
    from nbdev.doclinks import _nbpath2html
    assert all(page_name(p.relative_to(NBS)) == _nbpath2html(p.relative_to(NBS)) for p in NOTEBOOKS)
    assert len({page_name(p) for p in NOTEBOOKS}) == len(NOTEBOOKS)

def test_a_plain_page_has_all_that_the_site_has():
    "Title, prose, code without its options, pictures with their text, links to pages and headings, and the way back."
    png = base64.b64encode(b"\x89PNG").decode()
    def cell(kind, source, **kw): return dict(cell_type=kind, id=f"c{len(source)}", metadata={}, source=source, **kw)
    def shown_by(kind, data):
        return dict(execution_count=None, outputs=[dict(output_type="display_data", metadata={}, data={kind: data})])
    link = '[source](https://esper-nb.github.io/esper_nb/core.html#f){target="_blank"}'
    cells = [cell("raw", "---\ntitle: x\n---"),
             cell("markdown", "## Two words\n\n[g](guard/16_governor.ipynb#fit) [h](https://jsonlines.org/a.ipynb)"),
             cell("code", '#| fig-alt: "A curve"\nplot(7)', **shown_by("image/png", png)),
             cell("code", "#| echo: false\nhidden(8)", **shown_by("text/markdown", link))]
    page = notebooks.plain_page(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5),
                                 "tutorials/grow_by_hand.ipynb")
    assert "<h1>Grow by hand</h1>" in page and '<h2 id="two-words">Two words</h2>' in page and 'alt="A curve"' in page
    assert 'href="guard/governor.html#fit"' in page and 'href="../core.html#f"' in page
    assert 'href="https://jsonlines.org/a.ipynb"' in page
    assert not re.search(r"fig-alt|hidden\(|>hidden<|target=|title: x", page)
    assert '<header><a href="../index.html">' in page
    assert "plot" in page
    assert re.findall(r'href="([^"]+)" aria-current', page) == ["../tutorials/grow_by_hand.html"]

def test_without_quarto_docs_says_what_to_install_and_still_checks(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    monkeypatch.setattr(notebooks, "NBS", tmp_path/"nbs")
    (tmp_path/"nbs").mkdir()
    shutil.copy(NBS/"explanations/glossary.ipynb", tmp_path/"nbs/index.ipynb")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    def build(page):
        (tmp_path/"_docs").mkdir(exist_ok=True)
        (tmp_path/"_docs/index.html").write_text(page)
    monkeypatch.setattr(notebooks, "find_notebooks", lambda folder=None: [tmp_path/"nbs/index.ipynb"])
    monkeypatch.setattr(notebooks, "process", lambda: None)
    monkeypatch.setattr(notebooks, "html", lambda: build('<a href="index.html">i</a>'))
    notebooks.docs()
    out = capsys.readouterr().out
    assert "https://quarto.org/docs/get-started" in out and "make docs" in out
    assert "every link and picture is there" in out
    monkeypatch.setattr(notebooks, "html", lambda: build('<img src="gone.png">'))
    with pytest.raises(SystemExit, match="gone.png"): notebooks.docs()

def test_with_quarto_its_site_is_taken_and_checked(monkeypatch, capsys, tmp_path):
    (tmp_path/"bin").mkdir(); (tmp_path/"_proc").mkdir(); (tmp_path/"nbs").mkdir()
    renders = '[ "$*" = "render --no-cache" ] && mkdir _docs && echo "<img src=$PICTURE>" > _docs/config.html'
    (tmp_path/"bin/quarto").write_text(f"#!/bin/sh\n{renders}\n")
    (tmp_path/"bin/quarto").chmod(0o755)
    shutil.copy(NBS/"core/00_config.ipynb", tmp_path/"nbs")
    for k, v in dict(ROOT=tmp_path, NBS=tmp_path/"nbs", process=lambda: None, sidebar=lambda: None,
                     find_notebooks=lambda folder=None: [tmp_path/"nbs/00_config.ipynb"]).items():
        monkeypatch.setattr(notebooks, k, v)
    monkeypatch.setenv("PATH", f"{tmp_path/'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PICTURE", "config.html")
    notebooks.docs()
    assert "Every page was built" in capsys.readouterr().out and (tmp_path/"_docs/config.html").exists()
    monkeypatch.setenv("PICTURE", "gone.png")
    with pytest.raises(SystemExit, match="gone.png"): notebooks.docs()
    renders = 'mkdir _docs && echo "<h2 id=a>A</h2><a href=#a>a</a><a href=#lost>b</a>" > _docs/config.html'
    (tmp_path/"bin/quarto").write_text(f"#!/bin/sh\n{renders}\n")
    with pytest.raises(SystemExit, match="config.html: #lost") as said: notebooks.docs()
    assert "#a" not in str(said.value)
    (tmp_path/"bin/quarto").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(SystemExit, match="quarto render failed"): notebooks.docs()

def test_the_promise_of_a_page_reaches_the_site(tmp_path):
    "nbdev makes title and description of the first cell, and drops what else stands in it."
    first_cells = ("# t\n\n> s\n\nOne.\n\nTwo.\n", "# t\n> s", "# t\n\nOne.", "# t")
    assert [notebooks.promise(c) for c in first_cells] == ["One.\n\nTwo.", "", "One.", ""]
    def cell(kind, source): return dict(cell_type=kind, metadata={}, source=source)
    cells = [cell("markdown", ["# t\n", "\n", "> s\n", "\n", "One."]), cell("code", "a = 1\nb = 2"),
             cell("markdown", "## More\n\nA [`Snapshot`](guard/13_snapshots.ipynb).")]      # nbdev nests a link
    (tmp_path/"a.ipynb").write_text(json.dumps(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5)))
    found = [c["source"] for c in notebooks.processed(tmp_path/"a.ipynb")["cells"]]
    sources = [s for s in found if "WARNING" not in text(s)]
    assert [text(s) for s in sources[1:]] == ["One.", "a = 1\nb = 2", text(cells[2]["source"])]
    assert sources[2] == ["a = 1\n", "b = 2"], "Quarto splits a source that is one string without line ends"

def test_workflows_build_publish_and_test():
    def load(name): return yaml.safe_load((ROOT/f".github/workflows/{name}.yml").read_text(encoding="utf-8"))
    docs, tests = load("docs"), load("test")
    steps = docs["jobs"]["site"]["steps"]
    order = [s.get("run") or s["uses"].split("@")[0] for s in steps]
    wanted = ["quarto-dev/quarto-actions/setup", "make install", "make docs", "actions/upload-pages-artifact",
              "actions/deploy-pages"]
    assert [s for s in order if s in wanted] == wanted and docs["permissions"]["pages"] == "write"
    assert next(s for s in steps if "upload-pages" in s.get("uses", ""))["with"]["path"] == "_docs"
    job = tests["jobs"]["test"]
    assert job["runs-on"] == "ubuntu-latest" and job["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]
    assert {"run": "make test"} in job["steps"]
    make = (ROOT/"Makefile").read_text(encoding="utf-8")
    every = [s.get("run", "") for w in (docs, tests) for j in w["jobs"].values() for s in j["steps"]]
    called = [c for run in every for c in re.findall(r"\bmake (\w+)", run)]
    assert set(called) == {"install", "docs", "test"} and all(re.search(rf"^{c}:", make, re.M) for c in called)
    for w in (docs, tests): assert "jobs" in w and (w.get("on") or w.get(True))      # YAML reads a bare `on` as yes
    assert re.search(r"^docs: .*\n\t\$\(BIN\)/python scripts/notebooks.py docs$", make, re.M)


# --- what the pages are made from, all of them

@cache
def processed(path): return notebooks.processed(path)

@cache
def plain(path): return notebooks.plain_page(json.loads(json.dumps(processed(path))), path.relative_to(NBS).as_posix())

@cache
def entries(module):
    "{name: its entry} of the page that makes a module, as the site has it."
    path = next(p for p in NOTEBOOKS if f"#| default_exp {module}\\n" in p.read_text(encoding="utf-8")
                or f'#| default_exp {module}"' in p.read_text(encoding="utf-8"))
    found = {}
    for c in processed(path)["cells"]:
        for o in c.get("outputs", ()):
            said = text(o.get("data", {}).get("text/markdown", ""))
            if said.startswith("---\n\n[source]"): found[re.search(r"^### (\S+)$", said, re.M)[1]] = said
    return found

def unescaped(said): return html.unescape(re.sub(r"\[(`[^`\n]+`)\]\([^)]*\)|</?code>", r"\1", said))

NAMES = notebooks.exported_names()
CLASSES = {n: getattr(importlib.import_module(f"esper_nb.{where}"), n) for n, where in NAMES.items()
           if isinstance(reference.module(where).nodes.get(n), ast.ClassDef)}

@pytest.mark.parametrize("page", NOTEBOOKS, ids=ids)
def test_every_processed_source_is_a_list_of_lines_with_their_ends(page):
    "Quarto splits a source that is one string without line ends: lists, tables and fences collapse."
    for c in processed(page)["cells"]:
        outputs = [o["data"][k] for o in c.get("outputs", ()) for k in o.get("data", ()) if k.startswith("text/")]
        for lines in (c["source"], *outputs):
            assert isinstance(lines, list) and lines == text(lines).splitlines(keepends=True), c["id"]

def test_every_public_name_has_an_entry_with_heading_signature_and_words():
    for name, where in NAMES.items():
        node = reference.module(where).nodes.get(name)
        if node is None: continue      # a constant
        said = entries(where)[name]
        assert re.search(rf"^### {name}$", said, re.M), name
        assert re.search(rf"^```python\n(@\w+\n|#.*\n)*(class )?{name}\b", said, re.M), said
        assert (ast.get_docstring(node) or "").split("\n")[0] in unescaped(said), name

@pytest.mark.parametrize("name", CLASSES)
def test_every_public_method_has_a_heading_and_a_signature(name):
    "Found by looking at the class, not at its source, which the reference is written from."
    kinds = (property, classmethod, staticmethod)
    said = entries(NAMES[name])[name]
    for method, value in vars(CLASSES[name]).items():
        made = getattr(inspect.unwrap(getattr(value, "__func__", value)), "__code__", None)
        if method.startswith("_") or not (inspect.isfunction(value) or isinstance(value, kinds)): continue
        if made is not None and "esper_nb" not in made.co_filename: continue      # written by NamedTuple or dataclass
        if method in vars(CLASSES[name]).get("__annotations__", ()):      # a function as an attribute
            assert re.search(rf"^\| {method} \|", unescaped(said), re.M), method
            continue
        assert re.search(rf"^#### {name}\.{method}\n\n```python\n(@\w+\n|#.*\n)*{name}\.{method}\b", said, re.M), method

def test_the_call_of_the_readme_is_documented():
    "`governor.watch(loss)`: each parameter with its comment; what a private base brings is told, too."
    said = entries("guard.governor")["Governor"]
    watch = unescaped(said[said.index("#### Governor.watch"):said.index("#### Governor.step")])
    assert "Governor.watch(loss, norm=None, before_step=False, asleep=()) -> tuple[Report, ...]" in watch
    for name, note in dict(loss="loss of this step", norm="gradient norm", before_step="has not stepped on this batch",
                           asleep="lanes that do not take part", returns="one report per lane").items():
        assert re.search(rf"^\| \*?{name}\*? \|.*{note}", watch, re.M), name
    assert re.search(r"\[`label_entropy`\]\(https://[^)]+#label_entropy\)", said)
    assert "@property\nGovernor.stopped -> np.ndarray" in said
    page = plain(NBS/"guard/16_governor.ipynb")
    assert "label_entropy</code></a>" in page and '<h4 id="governor.watch">' in page

def test_signatures_are_short_and_as_they_are_written():
    "No default printed whole, no `__main__`, no Markdown that a page would read."
    for where in dict.fromkeys(NAMES.values()):
        for name, said in entries(where).items():
            blocks = re.findall(r"^```python\n(.*?)\n```$", said, re.M | re.S)
            assert all(len(b) <= 1500 and max(map(len, b.split("\n"))) <= 140 for b in blocks), name
            assert "__main__" not in said and " object at 0x" not in said, name
            outside = re.sub(r"```.*?```|<code>.*?</code>|\[`[^`\n]*`\]\([^)]*\)|`[^`\n]*`", "", said, flags=re.S)
            rows = [line.replace("*returns*", "") for line in outside.split("\n") if line.startswith("|")]
            assert not any(re.search(r"[*_]\w|\]\(", row) for row in rows), name
    long = ast.parse(f"def f(a={list(range(99))}, b: 'int' = 'x'): pass").body[0]
    first, second = reference.parameters(reference.Module(ROOT), long)
    assert len(first.default) <= reference.LONGEST and first.default.endswith("…") and second.type == "int"

def test_a_signature_says_how_a_function_is_called():
    m = reference.Module(ROOT/"esper_nb/x.py")
    def shown(code): return reference.signature(reference.function_entry(m, ast.parse(code).body[0]))
    assert shown("def f(a, /, b: int = 1, *c, d, **e) -> str: ...") == "f(a, /, b: int = 1, *c, d, **e) -> str"
    assert shown("def f(a, b, /): ...") == "f(a, b, /)"
    assert shown("def f(*, a=None): ...") == "f(*, a=None)"
    wide = shown(f"def f({', '.join(f'{c * 9}: int' for c in 'abcdefgh')}): ...").split("\n")
    assert wide[0] == "f(" and wide[1] == "    aaaaaaaaa: int," and wide[-1] == ")"
    assert reference.literal("a_*b*|[c]") == "a&#95;&#42;b&#42;&#124;&#91;c&#93;"

@pytest.mark.parametrize("name", [n for n in CLASSES if n.endswith("Config")])
def test_comments_of_configurations_are_a_table(name):
    "Every field has a row; the comment beside it in the source stands in it, with its default."
    said = unescaped(entries(NAMES[name])[name])
    cls = CLASSES[name]
    family = [k for k in reversed(cls.__mro__) if k.__module__.startswith("esper_nb")]
    told = [line for k in family for line in inspect.getsource(k).split("\n")]
    commented = [m for line in told if (m := re.match(r"    ([a-z]\w*): [^=#]+(?:= [^#]*)?# (.+)$", line))]
    rows = {m[1]: m[0] for m in re.finditer(r"^\| (\w+) \|.*$", said, re.M)}
    assert commented or len(getattr(cls, "__dataclass_fields__", ())) < 3, "no comments found"
    own = {m[1]: m[2] for m in commented}      # the last word is the class's own
    for f in getattr(cls, "__dataclass_fields__", ()):
        if f in own: assert own[f].split("; ")[0].strip() in rows[f], f

def test_pictures_have_words_of_their_own():
    "On every page: at least five, no two pictures alike, from the cell itself or from what stands around it."
    for page in NOTEBOOKS:
        said = [alt_text(text(c["source"])) for c in processed(page)["cells"] if c["cell_type"] == "code"
                and pages.pictures(c)]
        assert all(len(s.split()) >= 5 for s in said) and len(set(said)) == len(said), (page.name, said)
        for s in said: assert not re.search(r"\]\(|[`*$<>]", s) or "#| fig-alt" in page.read_text(), s
        shown = re.findall(r"<img\b[^>]*>", plain(page)) if said and page.parent.name == "grow" else []
        assert all(re.search(r'alt="[^"]{15,}"', tag) for tag in shown), page.name

def test_words_for_a_picture_come_from_its_code_and_the_prose_above():
    def cell(kind, source, **kw): return dict(cell_type=kind, id="c", metadata={}, source=source, outputs=[], **kw)
    png = [dict(output_type="display_data", metadata={}, data={"image/png": ""})]
    code = 'ax.plot(a, label="one")\nax.set(xlabel="step", ylabel="loss", title=f"Run {n}")'
    draw = cell("code", code) | dict(outputs=png)
    cells = [cell("markdown", "Elsewhere.\n\n## Losses\n\nA [curve](a.ipynb) of *one* `run`:"), draw, dict(draw)]
    pages.speak_pictures(cells)
    words = "Run …; loss over step; curves: one. A curve of one run"
    assert [alt_text(c["source"]) for c in cells[1:]] == [words, f"{words} Picture 2 of this page."]
    assert yaml.safe_load(cells[1]["source"].split("\n")[0][3:])["fig-alt"] == words

def test_checks_are_folded_behind_the_pictures_they_follow():
    def cell(kind, source, **kw): return dict(cell_type=kind, id="c", metadata={}, source=source, outputs=[], **kw)
    png = [dict(output_type="display_data", metadata={}, data={"image/png": ""})]
    check = "n = 3\ntest_eq(n, 3)"
    draw = cell("code", "plot(1)\nx = 2\n# so\nassert x == 2\ntest_eq(x, 2)") | dict(outputs=png)
    cells = [cell("code", check), draw, cell("code", check), cell("code", "show(n)"), cell("markdown", "## Next"),
             cell("code", check)]
    found = pages.fold_checks(cells)
    folded = ["code-fold: true" in c["source"] for c in found]
    assert folded == [False, False, True, True, False, False, False]
    assert found[1]["source"] == "plot(1)\nx = 2" and found[1]["outputs"] and found[2]["source"].endswith(
        "# so\nassert x == 2\ntest_eq(x, 2)")
    page = plain(NBS/"show/78_plot_runs.ipynb")
    assert page.count(f"<summary>{pages.CHECKS}</summary>") >= 4
    opened = re.sub(r"<details><summary>.*?</details>", "", page, flags=re.S)
    assert "rollbacks" in page and not re.search(r'class="n">test_eq</span>.{0,200}get_yscale', opened, re.S)

def test_a_page_leads_to_the_one_before_and_the_one_after():
    quarto = yaml.safe_load((ROOT/"_quarto.yml").read_text(encoding="utf-8"))
    assert quarto["website"]["page-navigation"] is True and quarto["format"]["html"]["toc-depth"] == 4
    foot = re.search(r"<footer>(.*)</footer>", plain(NBS/"guard/16_governor.ipynb"))[1]
    assert re.findall(r'href="([^"]+)">(.)', foot) == [("../guard/acts.html", "←"), ("../guard/adapters.html", "→")]

def test_the_plain_page_has_its_contents():
    page = plain(NBS/"guard/16_governor.ipynb")
    aside = re.search(r"<aside>.*?</aside>", page, re.S)[0]
    inside = dict(re.findall(r'href="#([^"]+)">([^<]+)<', aside))
    assert inside["governor.watch"] == "watch" and inside["what-it-costs"] == "What it costs"
    assert all(f'id="{name}"' in page.replace(aside, "") for name in inside)

def test_the_plain_site_can_be_searched():
    path = NBS/"guard/16_governor.ipynb"
    found = {e[0]: e for e in notebooks.search_entries(plain(path), path.relative_to(NBS))}
    _, page, heading, words = found["guard/governor.html#governor.watch"]
    assert (page, heading) == ("governor", "Governor.watch") and "Judge the loss of this step" in words
    assert "knows five kinds of ruin" in found["guard/governor.html"][3]
    assert not any("<" in w and ">" in w and "</" in w for e in found.values() for w in e)
    assert '<script defer src="../plain.js" data-up="../">' in plain(path)

def test_plots_are_dark_on_a_dark_page():
    "But an image of values is not turned: its prose says what is dark."
    for file, dark in (("scripts/plain.css", "prefers-color-scheme: dark"), ("nbs/styles.css", ".quarto-dark")):
        css = (ROOT/file).read_text(encoding="utf-8")
        assert dark in css and re.search(r"img \{ filter: invert\([\d.]+\) hue-rotate\(180deg\); \}", css)
        assert re.search(rf"{pages.KEPT} .*img \{{ filter: brightness", css)
    assert f"celltag_{pages.KEPT}" in plain(NBS/"control/46_actions.ipynb")

def test_modules_on_the_front_page_are_linked():
    pages_of = [p for _, found in site_sections() for p in found if p.split("/")[0] in notebooks.LAYERS]
    page = plain(NBS/"index.ipynb")
    table = re.search(r"<table.*?</table>", page[page.index("What is where</h2>"):], re.S)[0]
    assert re.findall(r'href="([^"]+)"', table) == [page_name(p).as_posix() for p in pages_of]
    readme = (ROOT/"README.md").read_text(encoding="utf-8")
    assert all(f"](nbs/{p})" in readme for p in pages_of)

def chromium():
    "Path of a browser, or nothing."
    names = (os.environ.get("CHROMIUM"), "chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for n in names if n and (path := shutil.which(n))), None)

@pytest.mark.browser
@pytest.mark.skipif(chromium() is None, reason="needs a Chromium: apt install chromium, or set CHROMIUM to its path")
def test_the_plain_site_in_a_browser(tmp_path):
    "Read from files: nothing is wider than the window, the search finds the call of the README, plots are dark."
    api = pytest.importorskip("playwright.sync_api")
    for at in ("index.ipynb", "guard/16_governor.ipynb", "tutorials/first_rollback.ipynb"):
        (tmp_path/"proc"/at).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path/"proc"/at).write_text(json.dumps(processed(NBS/at)), encoding="utf-8")
    shutil.copytree(NBS/"tutorials/images", tmp_path/"proc/tutorials/images")
    notebooks.html(tmp_path/"docs", tmp_path/"proc")
    errors: list[str] = []
    def open_page(browser, width, scheme):
        page = browser.new_context(viewport=dict(width=width, height=900), color_scheme=scheme).new_page()
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        return page
    with api.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        for width in (1280, 900, 640):
            page = open_page(browser, width, "light")
            for name in ("index", "guard/governor", "tutorials/first_rollback"):
                page.goto(f"file://{tmp_path}/docs/{name}.html")
                assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, (name, width)
                assert page.evaluate("document.querySelector('aside details').open") is (width == 1280)
                assert page.evaluate("[...document.images].every(i => i.alt.length > 20 && i.naturalWidth)")
        page.keyboard.press("/")
        page.keyboard.type("governor.watch")
        page.wait_for_selector("search li a")
        page.keyboard.press("Enter")
        page.wait_for_url("**/guard/governor.html#governor.watch")
        page.wait_for_function("Math.abs(document.getElementById('governor.watch').getBoundingClientRect().top) < 200")
        dark = open_page(browser, 1280, "dark")
        dark.goto(f"file://{tmp_path}/docs/guard/governor.html")
        assert "invert" in dark.evaluate("getComputedStyle(document.querySelector('.output_png img')).filter")
        browser.close()
    assert not errors
