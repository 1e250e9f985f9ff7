"Growth rules as rows of one table: what a row takes, and what a comparison makes of it."
import numpy as np
import pytest

from esper_nb.control import GrowVecEnv
from esper_nb.run import (
    GROWTH_RULES, Comparison, Practice, as_player, begin_run, compare_recipe, get_recipe, growth_rule, main,
    open_offers, play_lanes, register_rule, report_html)

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = {"env.num_envs": 2, "env.horizon": 3, "env.limit": 128, "env.workers": 1, "ppo.num_steps": 3,
        "ppo.num_updates": 1, "ppo.num_minibatches": 1, "env.blueprints": ["conv_light", "conv_heavy"]}
WORDS = [word for k, v in TINY.items() for word in ("--set", f"{k}={v}".replace("'", '"'))]
PLUGIN = '''
from esper_nb import Decision, RuleRow, register_rule
def first_come(v): return next((Decision("germinate", k, offered[0]) for k, offered in v.offers.items()), None)
register_rule(RuleRow("first-come", lambda practice: first_come, "whatever is offered first"))
'''

@pytest.fixture
def table(monkeypatch):
    "The table, as it was before, afterwards."
    before = dict(GROWTH_RULES)
    yield GROWTH_RULES
    GROWTH_RULES.clear()
    GROWTH_RULES.update(before)


def test_a_rule_of_your_own_is_one_row_and_stands_in_table_and_report(tmp_path, capsys, table, no_pictures):
    plugin, out = tmp_path/"mine.py", tmp_path/"c.json"
    plugin.write_text(PLUGIN)
    assert main(["compare", "digits_impaired", "--import", str(plugin), "--rules", "first, random", "--seeds", "1",
                 "--out", str(out), *WORDS]) == 0
    said, c = capsys.readouterr().out, Comparison.load(out)
    assert c.names == ["first-come", "random-legal", "wait-only"] and not c.learned # nobody has learned
    assert "first-come" in said and " paired networks" in said
    mine, wait = c.plays[0], c.plays[-1]
    assert mine.ops["germinate"] == 2 * 3 and min(mine.parameters) > max(wait.parameters)
    run = begin_run(get_recipe("digits_impaired", TINY), tmp_path)
    def more(run, left): return {"first-come": lambda seed: as_player(growth_rule("first").make(Practice(run.config)))}
    run.finish(more=more)
    assert "first-come" in report_html(run.folder)


def test_a_rule_that_does_not_exist_is_one_line_with_the_nearest_one(tmp_path, capsys):
    assert main(["compare", "digits", "--rules", "wait,rigde", "--out", str(tmp_path/"c.json")]) == 2
    said = capsys.readouterr().err
    assert "'ridge' perhaps" in said and said.count("\n") == 1
    assert main(["compare", "digits", "--rules", "", "--out", str(tmp_path/"c.json")]) == 2
    with pytest.raises(ValueError, match="a new name"): register_rule(GROWTH_RULES["ridge"])
    with pytest.raises(ValueError, match="without a comma"): register_rule(GROWTH_RULES["ridge"]._replace(name="a,b"))


def test_what_may_be_born_is_what_the_mask_allows():
    config = get_recipe("digits_family", {"env.num_envs": 2, "env.horizon": 4, "env.workers": 1}).env
    env = GrowVecEnv(config.replace(autoreset_mode="NextStep"))
    seen = []
    play_lanes(env, as_player(lambda v: seen.append((v.signals.epoch, bool(v.offers), bool(v.growth)))), 3)
    assert {(epoch, offers) for epoch, offers, _ in seen} == {(0, False), (1, True), (2, True), (3, False)}
    assert open_offers(env) == [{}, {}]


def test_rules_that_look_choose_by_the_scores_of_their_practice():
    p = Practice(get_recipe("digits_impaired", TINY), found=dict(
        search_arms=dict(names=["conv_light in r0c0 from 0"], epochs=5),
        try_arms=dict(columns=("loss", "accuracy"), epochs=7, looks=[[i / 40, None] for i in range(40)],
                      scores=[[50., 60. if i >= 20 else 40.] for i in range(40)])))
    for name in ("threshold", "ridge", "forecast"):
        player = GROWTH_RULES[name].make(p)
        assert player.practice_epochs == 12 and [player.rule(0).choose([x, np.nan]) for x in (.05, .95)] == [0, 1], name
    cautious = GROWTH_RULES["forecast"].make(p).rule(0).choose
    assert [GROWTH_RULES["ridge"].make(p).rule(0).choose([.55, .0]), cautious([.55, .0])] == [1, 0] # it is not sure


@pytest.mark.slow
def test_every_rule_plays(table):
    c = compare_recipe(get_recipe("digits_impaired", TINY | {"env.num_envs": 4, "ppo.num_updates": 2}), (0,),
                       (101, 102, 103, 104), rules=[*GROWTH_RULES])
    assert c.names == [*GROWTH_RULES] and all(p.refused == 0 for p in c.plays if p.controller != "heuristic")
    free = {"heuristic", "random-legal", "wait-only", "plateau", "gradient-norm", "natural-expansion"}
    assert {p.controller for p in c.plays if not p.practice_epochs} == free
