"The site, without the program that draws it: every page processes and is listed, every link and picture leads on."
import base64
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from functools import cache

import pytest
import yaml
from scripts import notebooks
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
    assert stems("Explanations") == ["results", "design", "glossary", "growing_pays", "negative_results"]
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
    assert broken_targets(tmp_path, headings=False) == files
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
             cell("markdown", "## Two words\n\n[g](guard/18_governor.ipynb#fit) [h](https://jsonlines.org/a.ipynb)"),
             cell("code", '#| fig-alt: "A curve"\nplot(7)', **shown_by("image/png", png)),
             cell("code", "#| echo: false\nhidden(8)", **shown_by("text/markdown", link))]
    page = notebooks.plain_page(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5),
                                 "tutorials/grow_by_hand.ipynb")
    assert "<h1>Grow by hand</h1>" in page and '<h2 id="two-words">Two words</h2>' in page and 'alt="A curve"' in page
    assert 'href="guard/governor.html#fit"' in page and 'href="../core.html#f"' in page
    assert 'href="https://jsonlines.org/a.ipynb"' in page
    assert not re.search(r"fig-alt|hidden|target=|title: x", page) and '<header><a href="../index.html">' in page
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
    (tmp_path/"bin/quarto").write_text("#!/bin/sh\nexit 3\n")
    with pytest.raises(SystemExit, match="quarto render failed"): notebooks.docs()

def test_the_promise_of_a_page_reaches_the_site(monkeypatch, tmp_path):
    "nbdev makes title and description of the first cell, and drops what else stands in it."
    first_cells = ("# t\n\n> s\n\nOne.\n\nTwo.\n", "# t\n> s", "# t\n\nOne.", "# t")
    assert [notebooks.promise(c) for c in first_cells] == ["One.\n\nTwo.", "", "One.", ""]
    def cell(kind, source): return dict(cell_type=kind, metadata={}, source=source)
    nested = "## More\n\nA [[`Snapshot`](https://a.org/s.html#snapshot)](guard/12_snapshots.ipynb)."
    def processed():
        (tmp_path/"_proc").mkdir()
        cells = [cell("raw", "---"), cell("markdown", nested), cell("code", "a = 1\nb = 2")]
        (tmp_path/"_proc/a.ipynb").write_text(json.dumps(dict(cells=cells)))
    for k, v in dict(ROOT=tmp_path, NBS=tmp_path/"nbs").items(): monkeypatch.setattr(notebooks, k, v)
    monkeypatch.setattr("nbdev.quarto.refresh_quarto_yml", lambda: None)
    monkeypatch.setattr("nbdev.serve.proc_nbs", processed)
    (tmp_path/"nbs").mkdir()
    first = cell("markdown", ["# t\n", "\n", "> s\n", "\n", "One."])
    (tmp_path/"nbs/a.ipynb").write_text(json.dumps(dict(cells=[first])))
    notebooks.process()
    sources = [c["source"] for c in json.loads((tmp_path/"_proc/a.ipynb").read_text())["cells"]]
    assert ["".join(s) for s in sources] == ["---", "One.", "## More\n\nA [`Snapshot`](guard/12_snapshots.ipynb).",
                                             "a = 1\nb = 2"]
    assert sources[-1] == ["a = 1\n", "b = 2"], "Quarto splits a source that is one string without line ends"

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

@pytest.mark.slow
def test_every_page_processes(tmp_path):
    "What the site is made from, in a copy: reference entries written, cells run that the site runs."
    for name in ("nbs", "esper_nb"):
        shutil.copytree(ROOT/name, tmp_path/name,
                        ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "_quarto.yml"))
    for name in ("settings.ini", "pyproject.toml"): shutil.copy(ROOT/name, tmp_path)
    code = "from nbdev.serve import proc_nbs\nif __name__ == '__main__': proc_nbs(n_workers=2)\n"
    (tmp_path/"process.py").write_text(code)
    done = subprocess.run([sys.executable, "process.py"], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "PYTHONWARNINGS": "ignore"})
    assert done.returncode == 0, done.stderr[-3000:]
    left_out = [p.relative_to(NBS).as_posix() for p in NOTEBOOKS if not (tmp_path/"_proc"/p.relative_to(NBS)).exists()]
    assert not left_out, f"{left_out} were not processed:\n{done.stderr[-3000:]}"
    for p in (p for p in NOTEBOOKS if p.parent == NBS and re.match(r"\d\d_", p.name)):
        if "#| export\n" not in p.read_text(encoding="utf-8").replace("\\n", "\n"): continue
        assert '"has_sd"' in (tmp_path/"_proc"/p.name).read_text(encoding="utf-8"), f"{p.name} has no reference entry"
