"What the environment makes of actions of any kind, most of them illegal."
import numpy as np
import torch
from test_envs import make, weights
from tiny import same

from esper_nb.control.actions import SHORT, Choice, choice_of, draw_actions
from esper_nb.core.lanes import lane_state


def lives(env, epochs, seed=0):
    "Legal random lives without training: measurements are made up."
    g, model = torch.Generator().manual_seed(seed), env.parts[0][1].model
    for _ in range(epochs):
        env.carry_out(draw_actions(env.actions, env.mask, g))
        model.tick(); model.record_accuracy(100 * torch.rand(model.lanes, generator=g))
        for k in model.names:
            model.record_contribution(k, torch.randn(model.lanes, generator=g))
            norm, health = (torch.rand(model.lanes, generator=g) for _ in range(2))
            model.record_gradients(k, norm, health, exploding=torch.zeros(model.lanes))
        env.refresh()
        yield g


def test_unmasked_draws_are_waits_with_a_reason_where_illegal():
    env, refused, done, total = make(8), 0, 0, 0
    env.reset(seed=0)
    model = env.parts[0][1].model
    for t, g in enumerate(lives(env, 40)):
        for k in range(6):
            a = torch.stack([torch.randint(s, (8,), generator=g) for s in env.actions.sizes], -1)
            # the legal ones are carried out once an epoch, so that seeds grow old enough for every kind of refusal
            if k: a = a.where(~env.actions.allowed(env.mask, a)[:, None], 0)
            legal, before = env.actions.allowed(env.mask, a), env.table
            weights_before = [t.clone() for t in lane_state(model).values()] if k == 1 else []
            ok, why = env.carry_out(a)
            assert torch.equal(ok, legal) and all(bool(w) != bool(o) for w, o in zip(why, ok.tolist()))
            env.refresh()
            assert torch.equal(before[~ok].nan_to_num(), env.table[~ok].nan_to_num())
            if k == 1: assert all(torch.equal(x, y) for x, y in zip(weights_before, lane_state(model).values()))
            refused += int((~ok).sum())
            done += int((ok & (choice_of(a, "op") != 0)).sum())
            total += 8
    assert total >= 1_900 and refused > 1_250 and done > 6


def test_what_a_repertoire_leaves_out_is_refused_by_the_mask_and_by_the_environment():
    env = make(3, repertoire=SHORT)
    env.reset(seed=0)
    asked = Choice("germinate", "r0c1", "conv_small")
    each = [asked._replace(style="gated", tempo=8), asked._replace(tempo=5), asked] # the last says nothing but where
    actions = torch.stack([env.actions.encode(c) for c in each])
    assert env.actions.allowed(env.mask, actions).tolist() == [False, False, True]
    ok, why = env.carry_out(actions)
    assert ok.tolist() == [False, False, True] and why[2] == ""
    assert why[0] == "germinate: style gated is not on offer here, but linear_add"
    stages = [s.stage.name for s in env.parts[0][1].model.slot("r0c1").states()]
    assert stages == ["DORMANT", "DORMANT", "GERMINATED"]


def test_a_refused_action_is_a_wait_and_costs_nothing_else():
    a, b = make(1, price=1.), make(1, price=1.)
    a.reset(seed=0); b.reset(seed=0)
    illegal = a.actions.encode(Choice("fossilize", "r0c1"))[None].numpy()
    ra, rb = a.step(illegal), b.step(np.zeros((1, 8), int))
    obs, reward, _, _, info = ra
    assert reward == rb[1] and not info["ok"][0]
    assert info["refused"][0].startswith("fossilize: slot r0c1 is DORMANT")
    names = [f.name for f, x, y in zip(a.observer.features, obs[0], rb[0][0]) if x != y]
    assert names == ["done"] and obs[0, a.observer.index("op_wait")] == 1 # seen as a wait that was not what was asked
    assert same(weights(a, 0), weights(b, 0)) and a.last_result.refused[0] and a.lanes.sums.refused.item() == 1
