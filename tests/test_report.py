"What a report says first, how it lets one do it again, what it leaves out; what a training says first and last."
import html, json, re, shlex, shutil
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from statistics import median

import pytest
import torch

from esper_nb.core import new_file
from esper_nb.grow import list_blueprints
from esper_nb.record import RunFolder, encode_row, read_rows
from esper_nb.run import (
    Comparison, begin_run, cli, command_words, get_recipe, report_html, search_rivals, watch_text, write_report)
from esper_nb.train import FitConfig, get_task, task_from_table

ROOT = Path(__file__).parents[1]
TINY = {"env.num_envs": 4, "env.horizon": 4, "env.limit": 256, "ppo.num_steps": 4, "ppo.num_updates": 3,
        "ppo.num_minibatches": 2, "env.blueprints": ["norm"], "comparison": 4.}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    "A run that is over, with all that was said meanwhile."
    torch.set_num_threads(1)
    said = []
    run = begin_run(get_recipe("digits_impaired", TINY), tmp_path_factory.mktemp("runs"))
    run.drive(progress=False, say=said.append, more=search_rivals)
    return run, said

@pytest.fixture(scope="module")
def page(made): return write_report(made[0].folder.path).read_text(encoding="utf-8")

def words_of(text):
    "What a reader sees."
    text = re.sub("</?abbr[^>]*>", "", text) # within a sentence
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<style>.*?</style>|<[^>]+>", " ", text, flags=re.DOTALL)))


# --- the first lines

def test_the_first_sentence_says_what_came_out(made, page):
    c = Comparison.load(made[0].folder.path/"comparison.json")
    first = words_of(page[:page.index("<h2>")])
    assert c.verdict() in first and c.verdict().startswith("Growing ")
    accuracy, said = {k: v.mean for k, v in c.intervals().items()}, c.conclusion()
    assert said in first and first.index(said) < first.index("esper-nb train")
    for part in (f"to {accuracy['PPO']:.1f} pp", f"where waiting gets {accuracy['wait-only']:.1f}",
                 f"the best constant timetable gets {accuracy['constant']:.1f}"): assert part in said

def test_each_class_has_its_accuracy_the_weakest_first(made, page):
    tests = [r for r in read_rows(made[0].folder.path/"final.jsonl") if r["kind"] == "test"]
    of_class = {str(k): median(r[f"test.class_pp.{k}"] for r in tests) for k in range(10)}
    shown = re.search(r"<h2>Class by class</h2>(.*?)</table>", page, re.DOTALL)[1]
    order = re.findall(r"<tr><td>(\d)</td>", shown)
    assert len(tests) == 4 and len(order) == 10 and [of_class[k] for k in order] == sorted(of_class.values())
    for r in tests: # ten classes of about the same size
        assert abs(r["test.accuracy_pp"] - sum(r[f"test.class_pp.{k}"] for k in of_class) / 10) < 3

def tables(page):
    "Every table with columns as (section, caption, rows of texts), but that of the machine, above all sections."
    found = []
    for section in re.split("<h2>", page)[1:]:
        for table in re.findall(r"<table>(?=.*?<thead>).*?</table>", section, re.DOTALL):
            rows = [re.findall(r"<td.*?>(.*?)</td>", row) for row in re.findall("<tr>.*?</tr>", table)]
            caption = re.search("<caption>(.*?)</caption>", table)
            found.append((section.partition("<")[0], caption and caption[1], [row for row in rows if row]))
    return found

def test_each_table_says_what_it_measured(page):
    found = [t for t in tables(page) if t[0] != "Settings"]
    captions = [caption for _, caption, _ in found]
    assert len(found) > 8 and all(captions), [(section, rows) for section, caption, rows in found if not caption]
    assert len(set(captions)) == len(captions)
    for section, said in (("Result", "final play"), ("Learning", "of training"), ("Failures", "of training"),
                          ("What was chosen in training", "of training"),
                          ("The controller's last play", "last play"), ("Class by class", "last play")):
        assert all(said in caption for name, caption, _ in found if name == section), section

def test_the_result_stands_in_one_table(made, page):
    c = Comparison.load(made[0].folder.path/"comparison.json")
    results = [rows for section, _, rows in tables(page) if section == "Result"]
    assert "<pre" not in page and len(results) == 2 # the controllers, and what each is ahead by
    assert [row[0] for row in results[0]] == [row[0] for row in c.table()[1:]]
    mine = next(row for row in results[0] if row[0] == "PPO")
    lanes = next(p.test_accuracy_pp for p in c.plays if p.controller == "PPO")
    assert mine[1:4] == [f"{x:.1f}" for x in (sum(lanes) / len(lanes), min(lanes), max(lanes))]
    assert len(results[1]) == len(c.names) - 1 and not any(row[0] == "PPO" for row in results[1])

def test_the_reports_first_sentence_explains_its_words(page):
    assert re.search(r'class="lead">[^\n]*<abbr title="percentage points[^"]*">pp</abbr>', page)

def test_seed_date_machine_and_versions_stand_above_everything_else(made, page):
    first, config = words_of(page[:page.index("<h2>")]), made[0].folder.config()
    origin = config["origin"]
    begun = origin["begun"][:16].replace("T", " ")
    assert abs((datetime.now().astimezone() - datetime.fromisoformat(origin["begun"])).total_seconds()) < 3600
    for name, value in (("seed", 0), ("begun", begun), ("processor", origin["processor"]),
                        ("cores", origin["cores"]), ("Python", origin["python"]), ("NumPy", origin["numpy"]),
                        ("torch", torch.__version__), ("esper_nb", config["version"])):
        assert f"{name} {value}" in first, name

@pytest.fixture
def chosen(monkeypatch):
    "What the command line makes of a command."
    made = []
    done = SimpleNamespace(drive=lambda *args, **kwargs: True) # None: interrupted
    monkeypatch.setattr("esper_nb.run.begin_run", lambda config, *args, **kwargs: made.append(config) or done)
    over = SimpleNamespace(epoch=torch.zeros(1), epochs=0)
    def fit_run(task, config, *args, **kwargs): return made.append(config) or (over, None)
    monkeypatch.setattr("esper_nb.run.fit_run", fit_run)
    def choose(words):
        assert cli.main(words[1:]) in (0, None)
        return made.pop()
    return choose

@pytest.mark.parametrize("settings", [
    {}, {"seed": 7}, TINY, {"env.governor": None}, {"env.governor.sigma": 5.}, {"minutes": 2.5}, {"sampled": True},
    {"env.faults": [dict(kind="nan", lane=2, epoch=3)]}, {"env.faults": [dict(kind="nan", lane=2, epoch=3, batch=4)]},
    {"env.slots": ["r0c0"]}, {"env.devices": ["cpu", "cpu"]},
    {"env.rules.embargo": 3}, {"ppo.learning_rate": 1e-3, "policy.features": [32, 32]},
    {"env.gamma": .9, "ppo.gamma": .9}],
    ids=str)
def test_the_command_makes_the_same_run_again(settings, chosen):
    config = get_recipe("digits_impaired", settings)
    words = command_words({"run": json.loads(json.dumps(config.to_dict()))})
    assert words is not None and chosen(shlex.split(shlex.join(words))) == config
    assert len(words) <= 3 + 2 * len(settings) + 2 * ("minutes" in settings)
    assert ("nan:2:3" in words) == (settings.get("env.faults") == [dict(kind="nan", lane=2, epoch=3)])

def test_a_report_offers_a_comparison_that_the_command_line_takes(page, made, monkeypatch, capsys):
    def begin(config): raise RuntimeError(f"{config.name} is compared")
    monkeypatch.setattr("esper_nb.run.check_faults", begin)
    offered = re.search(r"esper-nb compare [^<]*", page)[0]
    words = shlex.split(html.unescape(offered))
    assert "--comparison" in made[0].folder.config()["command"] and "--comparison" not in words
    assert cli.main(words[1:]) == 2 and "digits_impaired is compared" in capsys.readouterr().err

@pytest.mark.parametrize("options", [dict(label=["so, big", "odd"], target="labels"), dict(label="kind"),
                                     dict(label="kind", columns=["a", "so, big"], groups="who")], ids=str)
def test_a_run_of_a_table_has_the_command_that_makes_its_task(options, chosen, tmp_path):
    place = tmp_path/"digits.csv" # and not the task of this name
    rows = (f"{i % 7},{i % 3 % 2},{i % 2},p{i % 9},{'xy'[i % 2]}" for i in range(60))
    place.write_text("\n".join(['a,"so, big",odd,who,kind', *rows]))
    task = task_from_table(place, **options)
    config, fit = get_recipe(task, {"seed": 3}), FitConfig(lanes=2)
    assert chosen(command_words({"run": json.loads(json.dumps(config.to_dict()))})) == config
    words = command_words({"task": task.to_dict(), "fit": fit.to_dict()})
    assert words[:4] == ["esper-nb", "fit", "--data", str(place)] and chosen(words) == fit
    assert command_words({"run": get_recipe(task.replace(lr=.3)).to_dict()}) is None
    assert command_words({"task": get_task("digits").replace(lr=.3).to_dict(), "fit": fit.to_dict()}) is None

@pytest.mark.parametrize("minutes, where", [(None, "update 1 of 3;"), (9., "update 1;")])
def test_a_run_in_its_midst_says_how_far_it_is_and_how_to_go_on(no_pictures, tmp_path, minutes, where):
    run = begin_run(get_recipe("digits_impaired", TINY | dict(minutes=minutes)), tmp_path)
    assert "has not come to its end" in report_html(run.folder)
    for u in run.updates(): break
    text = words_of(report_html(run.folder))
    assert f"stands at {where}" in text and "nothing has been tested yet" in text
    assert f"esper-nb resume {run.folder.path}" in text and f"esper-nb watch {run.folder.path}" in text


# --- what it tells, and in which words

def test_true_alarms_first_and_notes_folded(no_pictures, made, tmp_path):
    copy = tmp_path/"run"
    shutil.copytree(made[0].folder.path, copy)
    (copy/"rows.jsonl").unlink()
    rows = []
    for t in range(48):      # four episodes: each begins at a guess, which is no alarm
        rows += [dict(kind="epoch", lane=0, epoch=t, **{"heldout.accuracy_pp": 10. + 6 * (t % 12)})]
        if t % 12 == 11: rows += [dict(kind="episode", lane=0, epoch=t, episode=t // 12, **{"episode.total": 4.})]
    with new_file(copy/"rows.jsonl") as part: part.write_text("".join(encode_row(r) + "\n" for r in rows))
    assert "no alarms" in words_of(report_html(RunFolder(copy)))
    health = [dict(update=u, lane=None, kind="update", **{"update.explained_variance": .1, "update.approx_kl": kl})
              for u, kl in enumerate((.001, .2, .001, .6, .001, .7), 1)]
    with new_file(copy/"rows.jsonl") as part: part.write_text("".join(encode_row(r) + "\n" for r in [*rows, *health]))
    text = report_html(RunFolder(copy))
    levels = re.findall(r"<tr><td>(critical|warning|note)</td><td>(.*?)</td><td class=\"n\">(\d+)</td>", text)
    assert levels == [("critical", "policy moved far", "2"), ("warning", "policy moved far", "1"),
                      ("note", "critic explains little", "1")]
    assert "3 alarms" in words_of(text) and text.index("<details>") < text.index("critic explains little")

def test_an_unbeaten_run_has_notes_and_no_alarms(no_pictures, made, tmp_path):
    copy, comparison = tmp_path/"run", Comparison.load(made[0].folder.path/"comparison.json")
    shutil.copytree(made[0].folder.path, copy)
    far = dict(kind="update", lane=None, update=1, **{"update.approx_kl": .9})
    def alarm(level, name, metric): return dict(kind="alarm", lane=None, update=1) | {
        f"alarm.{k}": v for k, v in dict(name=name, metric=metric, level=level, value=.9, shown="0.9").items()}
    lines = [alarm("critical", "policy moved far", "update.approx_kl"),
            alarm("warning", "accuracy falls", "heldout.accuracy_pp")]
    with open(copy/"rows.jsonl", "a") as file: file.write("".join(encode_row(r) + "\n" for r in (far, *lines)))
    cases = (0, (), True), (90, (), False), (90, ("heuristic",), False), (90, ("wait-only",), True)
    for better, level, loud in cases:
        plays = [p._replace(test_accuracy_pp=tuple(better + k / 100 for k, _ in enumerate(p.test_accuracy_pp)))
                 if p.controller in ("PPO", *level) else p._replace(test_accuracy_pp=(5.,) * len(p.test_accuracy_pp))
                 for p in comparison.plays]
        comparison._replace(plays=tuple(plays), price=0.).save(copy/"comparison.json")
        text = report_html(RunFolder(copy))
        assert ("<td>critical</td><td>policy moved far</td>" in text) == loud
        assert loud or "<td>note</td><td>policy moved far</td>" in text
        lines = []
        watch_text(copy, say=lines.append)
        assert any("! warning: accuracy falls" in line for line in lines) == loud
        assert any("! critical: policy moved far" in line for line in lines) == loud

def test_fields_have_the_names_that_people_give_them(page):
    shown = words_of(page[:page.index("<h2>Settings</h2>")])
    commands = re.sub(r"esper-nb \S+ .*? (?=train longer|against|recipe )", "", shown)
    commands = re.sub(r"--set \S+", "", commands)
    found = set(re.findall(r"\b[a-z]+_[a-z_]+\b", commands)) - {"digits_impaired", "esper_nb"}
    advice = {"learning_rate", "update_epochs", "target_kl", "ent_coef", "norm_value", "vf_coef"} # settings, to be set
    found -= set(list_blueprints())                                                         # of the best timetable
    assert not found - advice, found - advice

def test_links_lead_to_pages_that_there_are(page):
    links = re.findall(r'href="https://esper-nb.github.io/esper_nb/(.*?)\.html"', page)
    pages = {re.sub(r"/\d\d_", "/", p.relative_to(ROOT/"nbs").as_posix()).removesuffix(".ipynb")
             for p in (ROOT/"nbs").glob("*/*.ipynb")}
    assert len(set(links)) >= 8 and set(links) <= pages, set(links) - pages
    assert page.count("https:") == len(links) and page.count("http:") == 0

def test_what_is_in_the_files_stays_text(no_pictures, made, tmp_path):
    copy, evil = tmp_path/"a<b>", "<script>alert(1)</script>"
    shutil.copytree(made[0].folder.path, copy)
    config = json.loads((copy/"config.json").read_text())
    config["run"]["name"] = config["origin"]["processor"] = config["torch"] = evil
    (copy/"config.json").unlink()
    with new_file(copy/"config.json") as part: part.write_text(json.dumps(config))
    for text in (report_html(RunFolder(copy)), report_html(RunFolder(copy), made[0].folder)):
        assert "<script" not in text and "&lt;script&gt;" in text and "a<b>" not in text

FORGED = [*(("origin", v) for v in ([], "x", 3, {"begun": {"a": 1}}, None)),
          *(("measure", v) for v in (3, [], "x", [1, 2, 3], ["a", "b", "c", "d"], {"name": "x"}))]

@pytest.mark.parametrize("field, value", FORGED)
def test_a_forged_field_ends_in_a_page_or_names_the_file(no_pictures, made, tmp_path, field, value):
    copy = tmp_path/"run"
    shutil.copytree(made[0].folder.path, copy)
    config = json.loads((copy/"config.json").read_text()) | {field: value}
    (copy/"config.json").unlink()
    if field == "measure": (copy/"comparison.json").unlink()
    with new_file(copy/"config.json") as part: part.write_text(json.dumps(config))
    try: assert "<h1>" in report_html(RunFolder(copy)) and "<h1>" in report_html(RunFolder(copy), made[0].folder)
    except ValueError as e: assert "config.json is not as a run writes it" in str(e)


# --- several runs

@pytest.fixture(scope="module")
def two(made):
    other = begin_run(get_recipe("digits_impaired", TINY | {"seed": 1, "ppo.learning_rate": 1e-3}),
                      made[0].folder.path.parent)
    other.drive(progress=False, say=lambda text: None)
    return made[0].folder, other.folder

def test_several_runs_side_by_side(two, capsys):
    assert cli.main(["report", *(str(f.path) for f in two)]) in (0, None)
    path = Path(capsys.readouterr().out.strip())
    assert path == two[0].path.parent/"report.html"
    text = path.read_text(encoding="utf-8")
    first = words_of(text[:text.index("<h2>")])
    best = max(two, key=lambda f: median(Comparison.load(f.path/"comparison.json").plays[0].test_accuracy_pp))
    assert f"Of 2 runs, {best.path.name} made the best networks" in first
    assert first.count("The controller grew networks to") == 2
    different = text[text.index("set differently"):text.index("Once more")]
    assert sorted(re.findall(r"<tr><td>([\w.]+)</td>", different)) == ["ppo.learning_rate", "ppo.seed", "seed"]
    assert "--set ppo.learning_rate=0.001" in words_of(text) and "alt=" in text

def test_the_order_of_runs_changes_no_sentence_and_equal_names_get_their_places(no_pictures, two, tmp_path):
    def lead(*folders): return re.search('<p class="lead">(.*?)</p>', report_html(*folders))[1]
    assert lead(*two) == lead(*two[::-1])
    shutil.copytree(two[0].path, tmp_path/two[0].path.name)
    assert str(tmp_path) in lead(two[0], RunFolder(tmp_path/two[0].path.name))


# --- what a training says

def test_a_training_says_first_what_is_ahead_and_last_what_came_out(made):
    run, said = made
    plan, end = said[0], said[-1]
    time = next(text for text in said if "s a step" in text)
    comparison = next(text for text in said if "play, about" in text)
    path = run.folder.path
    assert plan.splitlines()[0].startswith("digits_impaired: 3 updates of 4 steps in 4 lanes")
    assert f"esper-nb watch {path}" in plan and str(path) in plan
    pace = float(re.search(r"at ([\d.]+) s a step as it began", time)[1])
    assert re.search(r"time  about [\d.]+ (seconds|minutes|hours),", time) and 0 < pace < 60
    assert "the controller and those it is compared with play, about" in comparison and "Growing " in end
    assert "The controller grew networks to" in end and end.splitlines()[-1].split() == [
        "report", "esper-nb", "report", str(path)]

def test_a_training_limited_by_time_says_so(no_plays, tmp_path):
    said = []
    run = begin_run(get_recipe("digits_impaired", TINY | {"minutes": 1e-4, "ppo.num_updates": 50}), tmp_path)
    run.drive(progress=False, say=said.append)
    assert "0.0001 min of training in 4 lanes" in said[0]
