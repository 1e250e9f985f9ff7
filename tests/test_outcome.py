"The short life, families of instances, and a reward that pays for what is compared and for nothing else."
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from esper_nb.control import (
    OPS, SHORT, Choice, EnvConfig, GrowVecEnv, RewardConfig, choice_of, compute_reward, draw_actions, start_rewards)
from esper_nb.core import by_lane
from esper_nb.grow import SHORT_LIFE, SeedState, Stage
from esper_nb.train import (
    TASK_FAMILIES, FamilyData, FitConfig, Instance, begin_lessons, get_task, new_population, run_epoch)
from tests.test_rewards import fresh, transition

DATA = get_task("digits_impaired").load(limit=256)
SETTINGS = dict(task="digits_impaired", num_envs=4, horizon=4, rules=SHORT_LIFE, repertoire=SHORT, schedule="cosine",
                reward="outcome", workers=1, blueprints=("conv_light", "conv_heavy"))


def population(**settings):
    config = FitConfig(lanes=3, epochs=6, workers=1, **settings)
    return new_population("digits_impaired", config, data=DATA, blueprints=["conv_light"], rules=SHORT_LIFE)


# ---- the short life

def test_the_function_is_unchanged_at_germination_and_the_seed_learns_in_its_first_epoch():
    pop = population()
    x = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    pop.model.eval()
    before = pop.model(x)
    pop.model.germinate("r0c0", "conv_light", [1], tempo=1)
    assert torch.equal(pop.model(x), before)
    pop.model.train()
    bank = pop.model.slot("r0c0").banks["conv_light"]
    born = [by_lane(p.detach(), 3)[1].clone() for p in bank.parameters()]
    r = run_epoch(pop)
    assert pop.model.slot("r0c0").state(1).stage == Stage.FOSSILIZED
    assert [e.after.name for _, lane, e in r.events if lane == 1] == ["HOLDING", "FOSSILIZED"]
    assert all(not torch.equal(a, by_lane(p, 3)[1]) for a, p in zip(born, bank.parameters()))
    assert not r.ablation.contribution.isnan()[0, 1] and r.ablation.heard[0].tolist() == [False, True, False]


def test_alpha_follows_the_batches_and_rests_between_epochs():
    pop, seen = population(), []
    pop.model.germinate("r0c0", "conv_light", tempo=2)
    def look(net, stepper, lanes, b, x, y):
        seen.append(pop.copies.spare[next(iter(pop.copies.spare))].net.slot("r0c0").roles()[0].alphas[0])
        return x, y
    for _ in range(2): run_epoch(pop, disturb=look)
    n = len(seen) // 2
    expected = [(e + (b + .5) / n) / 2 for e in range(2) for b in range(n)]
    np.testing.assert_allclose(seen, expected, atol=1e-6)
    assert pop.model.within == 0 and pop.model.slot("r0c0").state(0).alpha == 1


@pytest.mark.parametrize("restart", [True, False])
def test_a_germination_starts_the_schedule_of_its_lane_anew(restart):
    pop = population(restart=restart)
    for e in range(6):
        if e == 3: pop.model.germinate("r0c0", "conv_light", [2], tempo=1)
        lr = run_epoch(pop, split=None).lr / pop.task.lr
        falls = (1 + math.cos(math.pi * e / 6)) / 2
        anew = (1 + math.cos(math.pi * (e - 3) / 3)) / 2 if restart and e >= 3 else falls
        torch.testing.assert_close(lr, torch.tensor([falls, falls, anew], dtype=lr.dtype))


# ---- what is offered

def test_a_repertoire_masks_and_nothing_else_is_ever_drawn():
    env = GrowVecEnv(**SETTINGS | dict(repertoire=SHORT.replace(earliest=2)), data=DATA, seed=0)
    env.reset()
    g, born = torch.Generator().manual_seed(0), []
    for _ in range(4):
        a = draw_actions(env.actions, env.mask, g)
        env.step(a.numpy())
        assert env.last_result.ok.all()
        born.append(sum(op == "germinate" for op in env.last_result.op))
        ops = choice_of(a, "op")
        assert torch.isin(ops, torch.tensor([OPS.index("wait"), OPS.index("germinate")])).all()
        for choice in map(env.actions.decode, a):
            if choice.op == "germinate": assert (choice.style, choice.tempo, choice.target) == ("linear_add", 1, 1.)
    assert born[:2] == [0, 0] and sum(born) > 0


def test_germinations_have_a_window():
    window = SHORT.replace(earliest=1, latest=2)
    env = GrowVecEnv(**SETTINGS | dict(repertoire=window), data=DATA, seed=0)
    env.reset()
    begin = env.actions.encode(Choice("germinate", "r0c0", "conv_light", "linear_add", 1, 1.))
    found = []
    for _ in range(4):
        found.append(env.actions.allowed(env.mask, begin.expand(env.num_envs, -1)).all().item())
        env.step(np.zeros((env.num_envs, len(begin)), int))
    assert found == [False, True, True, False]
    with pytest.raises(ValueError, match="latest=0, expected at least earliest=1"): SHORT.replace(earliest=1, latest=0)


def test_a_family_wants_images():
    with pytest.raises(ValueError, match="family='digits', expected None for 'prose'"):
        GrowVecEnv(task="prose", family="digits", num_envs=2)


def test_several_seeds_may_be_young_at_a_time():
    one, many = (GrowVecEnv(**SETTINGS | dict(repertoire=SHORT.replace(several=s)), data=DATA, seed=0)
                 for s in (False, True))
    for env in (one, many):
        env.reset()
        first = env.actions.encode(SHORT.nearest(Choice("germinate", "r0c0", "conv_light")))
        for i in range(4): env.parts[0][1].model.germinate("r0c0", "conv_light", [i], tempo=8)
        env.parts[0][1].model.slot("r0c0").change(None, lambda s: s._replace(stage=Stage.TRAINING))
        env.refresh()
        ops, _ = env.actions.facts(env.mask)
        assert bool(ops[0, OPS.index("germinate"), 1]) == (env is many)
        assert not env.actions.allowed(env.mask[0], first)


# ---- nothing to game

def play(env, plan, seed=0):
    env.reset(seed=seed)
    for t in range(env.horizon):
        env.step(torch.stack([env.actions.encode(SHORT.nearest(plan.get(t, Choice())))] * env.num_envs).numpy())
    return torch.tensor([r.reward for r in list(env.summaries)[-env.num_envs:]]), env


@pytest.mark.parametrize("price", [0., 30.])
def test_the_return_is_the_outcome_whatever_the_way(price):
    "Accuracy net of the parameter cost, 0.1 a percentage point: not one reward for growing, keeping, or going round."
    every = {0: Choice("germinate", "r0c0", "conv_heavy"), 1: Choice("germinate", "r0c1", "conv_light"),
             2: Choice("germinate", "r0c2", "conv_light")}
    for plan in ({}, every, {3: every[0]}):
        paid, env = play(GrowVecEnv(**SETTINGS, price=price, data=DATA), plan)
        ends = list(env.summaries)[-4:]
        host = env.host_size[0].item()
        room = torch.tensor([r.parameters / host - 1 for r in ends])
        accuracy = torch.tensor([r.accuracy_pp for r in ends])
        torch.testing.assert_close(paid, .1 * (accuracy - price * room), atol=1e-4, rtol=1e-4)


def test_useless_fossils_cost_their_room_and_earn_nothing():
    config = SETTINGS | dict(blueprints=("norm",), price=20.)
    env = GrowVecEnv(**config, data=DATA)
    paid, _ = play(env, {t: Choice("germinate", k, "norm") for t, k in enumerate(env.actions.slots)})
    gain = torch.tensor([r.accuracy_pp for r in env.summaries]) / 10
    assert (paid < gain).all(), "three seeds that do nothing have cost their room"


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0, 100), min_size=2, max_size=8), st.floats(.9, 1.))
def test_a_circle_of_accuracy_pays_nothing(way, gamma):
    empty, config, total = [SeedState()] * 3, RewardConfig("outcome", gamma), 0.
    state = start_rewards(config, fresh(*empty))
    for a in [*way, way[0]]:
        r = compute_reward(config, transition(empty, empty, accuracy=a), state)
        state, total = r.state, total + r.total.item()
    assert total == pytest.approx(.1 * way[0], abs=1e-6)


# ---- families

def family_env(**settings):
    base = dict(task="digits_masked", family="digits", num_envs=12, horizon=3, rules=SHORT_LIFE, repertoire=SHORT,
                reward="outcome", workers=1, limit=256)
    return GrowVecEnv(**base | settings)


def test_instances_are_drawn_by_seed_key_and_come_back_from_a_saved_state():
    one, two = family_env(), family_env()
    one.reset(seed=3)
    keys = one.parts[0][1].data.seed_keys
    one.step(np.zeros((12, 8), int))
    two.reset(seed=4)
    assert two.parts[0][1].data.seed_keys != keys
    two.load_state_dict(one.state_dict())
    assert two.parts[0][1].data.seed_keys == keys
    for env in (one, two): env.step(np.zeros((12, 8), int))
    assert torch.equal(one.obs, two.obs) and torch.equal(one.last_result.reward, two.last_result.reward)


def test_what_is_judged_was_not_practised():
    kinds = [Instance(groups=2)]
    halves = []
    for judged in (False, True):
        data = FamilyData(get_task("digits_masked").load(limit=64), kinds, judged)
        data.begin(range(300), range(300))
        halves.append({tuple(lesson.classes.tolist()) for lesson in data.lessons.values()})
    assert not halves[0] & halves[1] and len(halves[0]) > 60 < 3 * len(halves[1])


def test_a_blind_block_neither_sees_nor_learns_to():
    data = FamilyData(get_task("digits_masked").load(limit=256), [Instance((0, 2))])
    pop = new_population("digits_masked", FitConfig(lanes=2, epochs=2, workers=1), data=data)
    begin_lessons(pop, range(2), [0, 1])
    pop.model.host.blind(1, ())
    run_epoch(pop)
    for k, block in enumerate(pop.model.host.blocks):
        conv = block[0]
        mask = by_lane(conv.mask, 2)
        assert mask[1].all() and bool(mask[0].all()) == (k == 1)
        weight = by_lane((conv.weight * conv.mask).detach(), 2)[0]
        assert ((weight != 0).sum() == weight[..., 1, 1].numel()) == (k != 1)


def test_every_kind_of_the_family_trains_in_one_population():
    kinds = TASK_FAMILIES["digits"]
    data = FamilyData(get_task("digits_masked").load(limit=256), kinds)
    pop = new_population("digits_masked", FitConfig(lanes=24, epochs=2, workers=1), data=data)
    begin_lessons(pop, range(24), range(24))
    r = run_epoch(pop)
    assert r.train.loss.isfinite().all() and r.heldout.class_pp.shape == (24, 10)
    alone = FamilyData(data, kinds)
    small = new_population("digits_masked", FitConfig(lanes=1, epochs=2, workers=1), data=alone)
    begin_lessons(small, [0], [0])
    assert torch.allclose(run_epoch(small).train.losses[:, 0], r.train.losses[:, 0], atol=1e-4)


@pytest.mark.parametrize("wrong, says", [(dict(family="letters"), "family='letters', expected one of digits"),
                                         (dict(family="digits", task="digits"), "a family takes sight away"),
                                         (dict(price=-1.), "price=-1.0, expected a finite number of at least 0"),
                                         (dict(schedule="linear"), "'cosine' or 'constant'")])
def test_bad_settings_are_refused_with_the_reason(wrong, says):
    with pytest.raises(ValueError, match=says):
        env = GrowVecEnv(EnvConfig(**dict(task="digits_masked", num_envs=1, horizon=2, reward="outcome") | wrong))
        env.reset(seed=0)
