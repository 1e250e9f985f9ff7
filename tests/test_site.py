"The site: every link of a page leads on, every picture is there, and what nbdev is given makes a page."
import base64
import inspect
import json
import re
import struct
import tomllib
from functools import cache
from importlib import import_module

import pytest
import yaml
from scripts import docs
from scripts.docs import DOCS, broken_targets, sections, slug
from scripts.notebooks import NBS, ROOT, alt_text, exported_names, find_notebooks

NOTEBOOKS = find_notebooks()
HOME = "https://github.com/esper-nb/esper_nb"
PROSE = [ROOT/"README.md", ROOT/"CONTRIBUTING.md"]


def text(part): return "".join(part)

def notebook(path): return json.loads(path.read_text(encoding="utf-8"))["cells"]

@cache
def shown(path):
    "Return the Markdown that a page shows without the code in it: prose, and stored output."
    if path.suffix == ".md": parts = [path.read_text(encoding="utf-8")]
    else:
        parts = []
        for c in notebook(path):
            if c["cell_type"] == "markdown": parts.append(text(c["source"]))
            parts += [text(o.get("data", {}).get("text/markdown", "")) for o in c.get("outputs", ())]
    return re.sub(r"```.*?```|`[^`\n]*`", "", "\n\n".join(parts), flags=re.S)

@cache
def anchors(path):
    "Return the names of a page's headings, as the site makes them."
    found = []
    for title in re.findall(r"^#+ (.*)$", shown(path), re.M):
        own = re.search(r"\{#([\w-]+)", title)
        name = own[1] if own else slug(title)
        found.append(name if name not in found else f"{name}-{found.count(name)}")
    return found

def links(path): return re.findall(r"(?<!!)\[[^\]\[]*(?:\[[^\]]*\][^\]\[]*)*\]\(([^)\s]+)\)", shown(path))

def images(path):
    return re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", shown(path)) + re.findall(r'<img[^>]+src="([^"]+)"', shown(path))

def leads_nowhere(path, target):
    "Return why a link is broken, or nothing."
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

def pictures(path):
    "Yield (cell, bytes) of the pictures that a notebook stores."
    for c in notebook(path):
        for o in c.get("outputs", ()):
            if "image/png" in o.get("data", {}): yield c, base64.b64decode(text(o["data"]["image/png"]))

def whole(data):
    "Return whether bytes are a PNG with something on it."
    return data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND" and min(struct.unpack(">II", data[16:24])) > 20


def test_links_and_pictures_lead_somewhere():
    wrong = []
    for page in (*NOTEBOOKS, *PROSE):
        wrong += [f"{page.name}: {t}: {why}" for t in links(page) if (why := leads_nowhere(page, t))]
        wrong += [f"{page.name}: {t} is not there" for t in images(page)
                  if not re.match(r"https?:|data:|attachment:", t) and not (page.parent/t).exists()]
        if page.suffix == ".ipynb":
            wrong += [f"{page.name}, cell {c['id']}: no whole picture" for c, p in pictures(page) if not whole(p)]
    assert not wrong, "\n".join(["", *wrong])


def test_pictures_of_readme_and_tutorials_say_what_they_show():
    "To readers who do not see them: `![text](file)`, and `#| fig-alt: \"text\"` in a cell that draws."
    wrong = []
    for page in (ROOT/"README.md", NBS/"index.ipynb", *(NBS/"tutorials").glob("*.ipynb")):
        said = re.findall(r"!\[([^\]]*)\]\(", shown(page))
        if page.suffix == ".ipynb": said += [alt_text(text(c["source"])) for c, _ in pictures(page)]
        wrong += [f"{page.name}: {s!r}" for s in said if len(s.split()) < 5 or said.count(s) > 1]
    assert not wrong, "\n".join(["", *wrong])


def test_broken_links_are_noticed(tmp_path):
    page = tmp_path/"page.ipynb"
    cell = dict(cell_type="markdown", id="a", metadata={}, source=["# Title here, and more\n\n## Again\n\n## Again\n"])
    page.write_text(json.dumps(dict(cells=[cell])))
    good = ("page.ipynb", "#title-here-and-more", "page.ipynb#again-1", "https://jsonlines.org")
    bad = ("pages.ipynb", "#title", "page.ipynb#again-2", "https:/jsonlines", f"{HOME}/blob/main/tests/test_gone.py")
    assert not any(leads_nowhere(page, t) for t in (*good, f"{HOME}/blob/main/README.md"))
    assert all(leads_nowhere(page, t) for t in bad)

    built = tmp_path/"built"
    (built/"a").mkdir(parents=True)
    to = [f'<a href="{to}">a</a>' for to in ("../two.html#x", "https://jsonlines.org", "#y", "#")]
    (built/"a/one.html").write_text(" ".join(['<h2 id="y">Y</h2>', *to, '<img src="gone.png"><a href="3.html">3</a>']))
    (built/"two.html").write_text('<a href="a/one.html?v=1#y">1</a><a href="/two.html">2</a><link href="gone.css">')
    (built/"404.html").write_text('<a href="/esper_nb/two.html">2</a>') # on the site, whatever was asked for
    assert broken_targets(built) == ["a/one.html: ../two.html#x", "a/one.html: gone.png", "a/one.html: 3.html",
                                     "two.html: gone.css"]


def test_the_sidebar_has_every_page_once_and_begins_where_a_newcomer_does():
    listed = ["index.ipynb", *(p for _, pages in sections() for p in pages)]
    assert sorted(listed) == sorted(p.relative_to(NBS).as_posix() for p in NOTEBOOKS)
    assert listed[1] == "tutorials/first_rollback.ipynb"
    docs.sidebar()
    contents = yaml.safe_load((NBS/"sidebar.yml").read_text(encoding="utf-8"))["website"]["sidebar"]["contents"]
    titles = [c["section"] for c in contents[1:]]
    assert contents[0] == "index.ipynb" and titles[:5] == ["Start", "Guard", "Grow", "Train a controller", "Compare"]
    packages = [c["section"] for c in contents[-1]["contents"]]
    assert titles[-1] == "Reference" and [*titles[:-1], *packages] == [title for title, _ in sections()]
    quarto = yaml.safe_load((ROOT/"_quarto.yml").read_text(encoding="utf-8"))
    assert "sidebar.yml" in quarto["metadata-files"] and quarto["project"]["output-dir"] == DOCS.name
    assert tomllib.loads((ROOT/"pyproject.toml").read_text(encoding="utf-8"))["tool"]["nbdev"]["custom_sidebar"], \
        "or nbdev writes another"

def test_the_foot_of_every_page_names_the_version():
    docs.sidebar()
    foot = yaml.safe_load((NBS/"sidebar.yml").read_text(encoding="utf-8"))["website"]["page-footer"]["left"]
    number = re.search(r"^version = (\S+)", (ROOT/"settings.ini").read_text(encoding="utf-8"), re.M)[1]
    assert foot == docs.version() == f"esper_nb {number}"

@pytest.mark.parametrize("asked, page", [
    ("early stopping", "bring_your_own"), ("freeze", "bring_your_own"), ("lightning", "guard_your_trainer"),
    ("onnx", "export_a_network"), ("rollback", "first_rollback")])
def test_the_search_leads_to_the_page_for_what_a_newcomer_wants(asked, page):
    "The first heading that has the words, in the order in which the search lists equal matches."
    found = [(path, title) for _, pages in sections() for path in pages
             for title in re.findall(r"^#+ (.*)$", shown(NBS/path), re.M) if asked in title.lower()]
    assert found and found[0][0] == f"tutorials/{page}.ipynb"


def test_the_search_finds_methods_and_lists_tutorials_first(tmp_path):
    (tmp_path/"guard").mkdir()
    (tmp_path/"guard/governor.html").write_text(
        '<main><h2 data-anchor-id="the-loop">The loop</h2><p>Words.</p><h4 data-anchor-id="governor.watch" class="x">'
        '<code>Governor.watch</code></h4><p>Judge a &lt;loss&gt;.</p></main>')
    found = [dict(objectID=href, href=href, title="t", section="", text="") for href in (
        "guard/governor.html#the-loop", "index.html", "explanations/results.html", "tutorials/dashboard.html")]
    index = docs.search_index(found, tmp_path)
    assert [e["href"] for e in index] == ["tutorials/dashboard.html", "explanations/results.html",
                                          "guard/governor.html#the-loop", "index.html",
                                          "guard/governor.html#governor.watch"]
    assert (index[-1]["section"], index[-1]["text"], index[-1]["title"]) == ("Governor.watch", "Judge a <loss>.", "t")


class Site(list):
    "The processed cells and the HTML of each page."
    search = "" # what the search of the pages knows

@pytest.fixture(scope="module")
def site(tmp_path_factory):
    "Two pages of the site, built without Quarto."
    patch, root = pytest.MonkeyPatch(), tmp_path_factory.mktemp("site")
    pages = [next(p for p in NOTEBOOKS if p.parent.name == a and p.stem.endswith(f"_{b}"))
             for a, b in (exported_names()[name].split(".") for name in ("Governor", "plot_learning"))]
    patch.setattr(docs, "PROC", root/"proc")
    patch.setattr(docs, "DOCS", root/"docs")
    docs.process(pages)
    docs.plain()
    patch.undo()
    built = Site((notebook(root/"proc"/p.relative_to(NBS)),
                  (root/"docs"/docs.page_name(p.relative_to(NBS))).read_text()) for p in pages)
    built.search = (root/"docs/search.js").read_text()
    return built


@pytest.mark.slow
def test_the_reference_has_every_public_method(site):
    "Heading, signature with the comment of each parameter, words, what is raised; in nbdev's cells and in HTML."
    from esper_nb import Governor
    cells, page = site[0]
    said = [text(o["data"]["text/markdown"]) for c in cells for o in c.get("outputs", ()) if "data" in o
            and text(o["data"].get("text/markdown", "")).startswith("---\n\n### Governor\n")]
    assert len(said) == 1 and f"esper_nb/{exported_names()['Governor'].replace('.', '/')}.py#L" in said[0]
    for name in (n for n, f in vars(Governor).items() if n[0] != "_" and inspect.isfunction(f)):
        assert re.search(rf"^#### Governor\.{name}$", said[0], re.M), name
    assert re.search(r"loss:.*# \(\) or \(n,\) loss of this step", said[0])
    assert 'id="governor.watch"' in page and "show_doc(" not in page
    assert re.search(r'href="[^"]+\.html#\w+"[^>]*><code>\w+</code></a>', page), "names in prose lead to their entries"


def test_entries_show_what_a_docstring_raises_and_its_examples():
    def f(x: int) -> int:      # twice as much
        """Return the double of `x`.

        Raises
        ------
        ValueError
            If `x` is odd.

        Examples
        --------
        >>> f(2)
        4
        """
    shown = docs.Entry(f)._repr_markdown_()
    assert "- `ValueError`: If `x` is odd." in shown and "```python\n>>> f(2)\n4\n```" in shown
    assert shown.startswith("### ") and "double" in shown


def test_a_link_whose_text_is_a_name_leads_where_its_page_says():
    from nbdev.doclinks import NbdevLookup
    cell = docs.mk_cell("See [`fit`](../train/39_trainer.ipynb#early-stopping), and `fit`.", "markdown")
    cell.source = NbdevLookup().linkify(cell.source)
    assert cell.source.count("trainer.html#fit") == 2
    docs.unnest_links(cell)
    assert cell.source.startswith("See [`fit`](../train/39_trainer.ipynb#early-stopping), and [`fit`](https:")


def test_the_docstring_of_a_module_says_where_its_page_stands_as_text(tmp_path, monkeypatch):
    for name, path in (("PROC", tmp_path/"proc"), ("DOCS", tmp_path/"docs")): monkeypatch.setattr(docs, name, path)
    docs.process([NBS/"guard/10_phases.ipynb"])
    (tmp_path/"docs/guard").mkdir(parents=True)
    docs.text_pages()
    url = inspect.getdoc(import_module("esper_nb.guard.phases")).rpartition("Docs: ")[2]
    base = docs.get_config().doc_url
    assert url.startswith(base)
    text = (tmp_path/"docs"/url.removeprefix(base)).read_text(encoding="utf-8")
    title, promise = docs.heading_of("guard/10_phases.ipynb")
    assert text.startswith(f"# {title}\n\n> {promise}\n") and "```python\n" in text
    assert "#|" not in text and ".ipynb)" not in text


def test_a_tutorial_opens_in_colab():
    def begun(name):
        path = NBS/f"{name}.ipynb"
        nb = docs.read_nb(path)
        docs.KeepPromise(nb).begin()
        return nb.cells[1].source
    link = "https://colab.research.google.com/github/esper-nb/esper_nb/blob/main/nbs/tutorials/first_rollback.ipynb"
    assert f"[Open in Colab]({link})" in begun("tutorials/first_rollback")
    assert "Colab" not in begun("guard/32_governor")

def test_a_page_says_whose_figures_those_of_its_trainings_are():
    for name, said in (("tutorials/grow_by_hand", True), ("core/04_lanes", False)):
        nb = docs.read_nb(NBS/f"{name}.ipynb")
        docs.SayWhoseFigures(nb).begin()
        assert ("another one rounds" in nb.cells[-1].source.lower()) == said

def test_every_name_that_a_page_shows_has_an_entry():
    failed = []
    for page in sorted(NBS.glob("[a-z]*/[0-9]*.ipynb")):
        text = page.read_text(encoding="utf-8")
        module = import_module("esper_nb." + re.search(r"default_exp (\w+\.\w+)", text)[1])
        docs.bind_annotations(module)
        for name in re.findall(r"show_doc\((\w+)", text):
            if name not in docs.entries(name, module): failed.append(f"{page.name}: {name}")
    assert not failed


@pytest.mark.slow
def test_a_plain_page_has_a_search_and_its_version(site):
    entries = json.loads(re.search(r"const ENTRIES = (.*);$", site.search)[1])
    found = {href: (title, heading) for href, title, heading, _ in entries}
    assert found["guard/governor.html#governor.watch"] == ("governor", "Governor.watch")
    assert all(text and len(text) <= 400 or heading for *_, heading, text in entries)
    for _, page in site:
        assert '<script src="../search.js">' in page and f'<p class="version">{docs.version()}</p>' in page
        assert page.count('type="search"') == 1


@pytest.mark.slow
def test_html_in_outputs_asks_for_no_scripts(site):
    cells, page = site[0]
    data = [o["data"] for c in cells for o in c.get("outputs", ()) if "data" in o]
    assert any("```{=html}" in text(d.get("text/markdown", "")) for d in data) and "{=html}" not in page
    assert not any("text/html" in d for d in data)


@pytest.mark.slow
def test_plain_pages_have_pictures_with_words_and_the_way_on(site):
    for cells, page in site:
        assert not re.search(r"#\| |# NBVAL|\{target=|^:::", page, re.M)
        assert page.count('aria-current="page"') == 1 and 'href="../index.html"' in page
        assert re.findall(r'<a href="\.\./\w+/\w+\.html" rel="(prev|next)">\w', page) == ["prev", "next"]
        assert page.count('button.ariaLabel = "Copy this code"') == 1 and ".highlight pre" in page
        pictures = re.findall(r'<img[^>]*src="data:image/png[^>]*>', page)
        assert all(re.search(r'alt="[^"]{15,}"', tag) for tag in pictures)
        assert len(pictures) == sum("image/png" in o.get("data", {}) for c in cells for o in c.get("outputs", ()))
