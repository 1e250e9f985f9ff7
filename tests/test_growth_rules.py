"Growth rules as rows of one table: what a row takes, and what a comparison makes of it."
import numpy as np
import pytest
import torch

from esper_nb.control import Forecast, GrowVecEnv, encode_decision
from esper_nb.run import (
    GROWTH_RULES, Comparison, Lookahead, Practice, as_player, begin_run, compare_recipe, get_recipe,
    growth_rule, main, open_offers, play_lanes, register_rule, report_html)

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


def test_a_rule_of_your_own_is_one_row_and_stands_in_table_and_report(tmp_path, capsys, table):
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


def test_a_trial_is_taken_back_to_the_bit_and_is_counted():
    class Nothing(Lookahead):
        def act(self, env):
            asked = super().act(env)
            assert asked.shape == (2, env.actions.count)
            return torch.stack([encode_decision(env, None)[1]] * env.num_envs)
    env = GrowVecEnv(get_recipe("digits_impaired", TINY).env.replace(autoreset_mode="NextStep"))
    idle, plain = Nothing(), as_player(GROWTH_RULES["wait-only"].make(Practice(get_recipe("digits_impaired", TINY))))
    a, b = play_lanes(env, idle, 7), play_lanes(env, plain, 7)
    assert {k: v for k, v in a.items() if k != "seconds"} == {k: v for k, v in b.items() if k != "seconds"}
    assert idle.practice_epochs == 2 * 3 * (1 + 3 * 2) # waiting, and two blueprints in each of three slots


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


def test_a_forecast_holds_what_it_says():
    g = np.random.default_rng(0)
    def networks(n):
        x = g.normal(size=(n, 6))
        return x, (x[:, :1] * [4., -1.] + 2 * g.normal(size=(n, 2)))
    f, (x, came) = Forecast.fit(*networks(400), tuple("abcdef"), ("one", "two")), networks(4000)
    for level in (.5, .8, .95):
        worth, within = f(x, level)
        assert abs((np.abs(worth - came) <= within).mean(0) - level).max() < .06
    assert Forecast.from_dict(f._asdict()) == f


@pytest.mark.slow
def test_every_rule_plays(table):
    c = compare_recipe(get_recipe("digits_impaired", TINY | {"env.num_envs": 4, "ppo.num_updates": 2}), (0,),
                       (101, 102, 103, 104), rules=[*GROWTH_RULES])
    assert c.names == [*GROWTH_RULES] and all(p.refused == 0 for p in c.plays if p.controller != "heuristic")
    free = {"heuristic", "random-legal", "wait-only", "plateau", "gradient-norm", "natural-expansion"}
    assert {p.controller for p in c.plays if not p.practice_epochs} == free
