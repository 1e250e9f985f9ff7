"Growth in training: lanes are separate networks at every stage, a bad seed stays alone, rollbacks respect fossils."
import copy
import math
import signal

import pytest
import torch

from esper_nb.core import by_lane, lane_state, take_lanes, use_threads
from esper_nb.grow import COOLING, LIVE, Blend, Decision, Gates, Reason, Rules, SeedState, Stage
from esper_nb.guard import GovernorConfig
from esper_nb.record import lane_scores, pick_rows, population_rows, seed_lives
from esper_nb.train import (
    Fault, FitConfig, LaneOptimizer, LaneScaler, Stepper, create_model, fit, get_task, grown_plan, new_population,
    run_epoch)

TASK = get_task("digits").replace(host=get_task("digits").host.replace(base=4), lr=.002)
DATA = TASK.load(limit=8 * TASK.batch_size)
KINDS = ["norm", "depthwise", "conv_light"]


def population(lanes=4, governor=None, **kw):
    config = FitConfig(**dict(lanes=lanes, epochs=20, governor=governor) | kw)
    return new_population(TASK, config, data=DATA, blueprints=KINDS)


def grow(model, lanes, slot, kind, stage, blend=Blend.ADD):
    model.germinate(slot, kind, lanes, blend=blend, tempo=3)
    if stage == "germinated": return
    model.advance(slot, lanes)
    if stage == "training": return
    model.advance(slot, lanes, force=True)
    model.tick(lanes)
    if stage == "blending": return
    for _ in range(2): model.tick(lanes)
    model.advance(slot, lanes)
    if stage == "fossil": model.fossilize(slot, lanes, force=True)


LIVES = [[], [("r0c0", "conv_light", "training")], [("r0c1", "depthwise", "blending"), ("r0c0", "norm", "germinated")],
         [("r0c0", "conv_light", "fossil"), ("r0c1", "norm", "blending"), ("r0c2", "depthwise", "holding")]]


def live(model, i, life):
    for j, (slot, kind, stage) in enumerate(life): grow(model, i, slot, kind, stage, Blend(j % 3))


def grown(**kw):
    pop = population(**kw)
    for i, life in enumerate(LIVES): live(pop.model, i, life)
    return pop


def state(pop): return lane_state(pop.model) | pop.stepper.state_dict()


def alone(pop, i):
    "Lane i of a population as a population of its own that is still called i."
    one = population(1)
    for k, t in lane_state(one.model).items():
        by_lane(t.data, 1)[:] = by_lane(lane_state(pop.model)[k].data, pop.lanes)[[i]]
    one.data = copy.copy(one.data)
    real = type(one.data).epoch
    one.data.epoch = lambda seed, lanes, epoch, size: real(one.data, seed, [i], epoch, size)
    return one


def close(a, b):
    "What an epoch comes to, but for rounding that a dozen updates have passed on."
    torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)


WORKERS = [dict(workers=1), dict(workers=2), dict(workers=1, width=1), dict(workers=3, width=2)]

@pytest.mark.costly
@pytest.mark.parametrize("kw", WORKERS, ids=str)
def test_lanes_at_different_stages_are_separate_networks(kw):
    pop = grown(**kw)
    ones = [alone(pop, i) for i in range(4)]
    result, single = run_epoch(pop), [run_epoch(one) for one in ones]
    stages = {s.stage for k in pop.model.names for s in pop.model.slot(k).states()}
    assert stages >= {Stage.GERMINATED, Stage.TRAINING, Stage.BLENDING, Stage.HOLDING, Stage.FOSSILIZED}
    for i, (one, r) in enumerate(zip(ones, single)):
        close(result.train.losses[:, i], r.train.losses[:, 0])
        close(result.heldout.loss[i], r.heldout.loss[0])
        for k, t in lane_state(pop.model).items():
            mine, alone_ = by_lane(t, 4)[i], by_lane(lane_state(one.model)[k], 1)[0]
            if not k.endswith((".table", ".stream")): close(mine, alone_)
        if r.ablation is not None:
            mine = [result.ablation.slots.index(k) for k in r.ablation.slots]
            worth, single_worth = result.ablation.contribution[mine, i], r.ablation.contribution[:, 0]
            torch.testing.assert_close(worth, single_worth, equal_nan=True, rtol=0, atol=.6)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_seed_that_returns_nan_is_alone_with_it(workers):
    calm, ill = grown(workers=workers), grown(workers=workers)
    for p in ill.model.slot("r0c0").banks["conv_light"].parameters(): by_lane(p.data, 4)[1] = math.nan
    a, b = run_epoch(calm), run_epoch(ill)
    assert b.train.losses[:, 1].isnan().all() and b.train.skipped[1] == len(b.train.losses)
    for i in (0, 2, 3):
        assert torch.equal(a.train.losses[:, i], b.train.losses[:, i]) and a.heldout.loss[i] == b.heldout.loss[i]
        for k, t in state(calm).items(): assert torch.equal(by_lane(t, 4)[i], by_lane(state(ill)[k], 4)[i]), k


def test_an_empty_growing_model_trains_as_its_host():
    pop = population(workers=1)
    host = take_lanes(pop.model.host, range(4)).train()  # the host alone, checked out like any group
    opt = LaneOptimizer(host.named_parameters(), 4, TASK.optimizer, **TASK.optimizer_options)
    opt.set_lr(TASK.lr * pop.config.factor(0, pop.epochs))
    stepper = Stepper(dict(host=opt), LaneScaler(4, enabled=False), 1.)
    batches = DATA.epoch(0, range(4), [0] * 4, TASK.batch_size)
    with use_threads(pop.threads(pop.plan())): # sums depend on how many take part
        for k in range(len(batches)):
            x, y = batches[k]
            stepper.backward(TASK.loss(host(x), y, 4)); stepper.step()
    assert run_epoch(pop).ablation is None
    for k, t in lane_state(host).items(): assert torch.equal(t, lane_state(pop.model.host)[k]), k


def test_rollback_prunes_what_lives_and_restores_fossils():
    pop = grown(governor=GovernorConfig(lowers=0), workers=1)
    for _ in range(3): run_epoch(pop)
    def poison(net, stepper, lanes, b, x, y):
        if b == 2 and 3 in lanes: by_lane(next(net.parameters()).data, len(lanes))[list(lanes).index(3)] = math.nan
        return x, y
    r = run_epoch(pop, disturb=poison)
    assert [(p.lane, p.action) for p in r.reports] == [(3, "rollback")]
    stages = {k: pop.model.slot(k).state(3) for k in pop.model.names}
    assert stages["r0c0"].stage == Stage.FOSSILIZED
    for k in ("r0c1", "r0c2"): assert stages[k].stage in COOLING and stages[k].reason == Reason.ROLLBACK
    assert pop.model.status().problems == [] and state(pop)["host.blocks.0.0.weight"].isfinite().all()
    back = pop.governor.snapshot
    saved = {k for k in back.difference([3])}
    assert not any("r0c0.banks" in k or "host." in k for k in saved), saved       # fossil and host: the snapshot's bits
    pruned = lane_state(pop.model.slot("r0c1").banks["norm"])
    assert not any(by_lane(t, 4)[3].any() for t in pruned.values()) # the pruned lane is empty
    for i in (0, 1, 2): assert pop.model.slot("r0c0").state(i).stage != Stage.PRUNED
    assert run_epoch(pop).train.losses[:, 3].isfinite().all()


def test_a_germination_that_the_governor_undid_is_told_and_tried_again():
    def timetable(pop, last): # lane 1 gets a seed before epoch 1, and nobody asks again
        born = int(pop.epoch.max()) == 1
        return [None, Decision("germinate", "r0c1", "norm", settings=dict(tempo=0)) if born else None]
    pop = population(2, governor=GovernorConfig(lowers=0), workers=1, epochs=4)
    ruin, results, rows = Fault("nan", 1, 1), [], []
    def epoch(number):
        results.append(next(fit(pop, 1, ruin.at(number), timetable)))
        rows.extend(population_rows(pop, results[-1]))
    for e in range(2): epoch(e)
    assert [(d.lane, d.decision.slot, d.decision.blueprint) for d in results[1].undone] == [(1, "r0c1", "norm")]
    assert pop.model.slot("r0c1").state(1) == SeedState(germinations=1), "the slot is empty at once"
    epoch(2)
    again, = results[2].decided
    assert again.ok and again.decision.settings["tempo"] == 0 and results[2].undone == ()
    assert pop.model.slot("r0c1").state(1).stage in LIVE and pop.model.slot("r0c1").state(1).germinations == 2
    events = [(row["epoch"], row["seed.event"], row["seed.by"]) for row in pick_rows(rows, "seed", 1)]
    assert events[:3] == [(1, "germinate", "controller"), (1, "undone", "governor"), (2, "germinate", "controller")]
    assert [s.end for s in seed_lives(rows)] == ["undone", "alive"] and lane_scores(rows)[-1].prunes == 0


def test_a_grown_population_goes_on_exactly_after_saving():
    a = grown(workers=1)
    for _ in range(2): run_epoch(a)
    saved = tuple({k: t.clone() for k, t in x.state_dict().items()} for x in (a.model, a.stepper))
    b = population(workers=1)
    b.model.load_state_dict(saved[0]); b.stepper.load_state_dict(saved[1]); b.epoch.copy_(a.epoch)
    for _ in range(3): ra, rb = run_epoch(a), run_epoch(b)
    assert torch.equal(ra.train.losses, rb.train.losses) and torch.equal(ra.heldout.loss, rb.heldout.loss)
    for k, t in state(a).items(): assert torch.equal(t, state(b)[k]), k


def test_optimizers_follow_growth():
    pop = population(workers=1)
    grow(pop.model, [0, 2], "r0c0", "conv_light", "training")
    opt = pop.stepper.owners["r0c0.conv_light"]
    for k, t in opt.state_dict().items():
        if k.startswith("momentum"): t.fill_(9.)                                 # stale momentum from another life
    before = {k: p.detach().clone() for k, p in opt.params.items()}
    run_epoch(pop)
    for k, p in opt.params.items():
        moved = (by_lane(p, 4) != by_lane(before[k], 4)).flatten(1).any(1).tolist()
        assert moved == [True, False, True, False], (k, moved)
    momentum = [t for k, t in opt.state_dict().items() if k.startswith("momentum")]
    assert all(by_lane(t, 4)[0].abs().max() < 9 and (by_lane(t, 4)[1] == 9).all() for t in momentum)
    pop.model.prune("r0c0", 2)
    frozen = {k: t.clone() for k, t in opt.state_dict().items() if k != "lr"}
    weights = {k: by_lane(p, 4)[2].clone() for k, p in opt.params.items()}
    run_epoch(pop)
    assert all(torch.equal(by_lane(p, 4)[2], weights[k]) for k, p in opt.params.items())
    for k, t in opt.state_dict().items():
        if k != "lr": assert torch.equal(by_lane(t, 4)[2], by_lane(frozen[k], 4)[2])


def test_a_gate_learns():
    pop = population(lanes=2, workers=1)
    grow(pop.model, 1, "r0c1", "conv_light", "blending", Blend.GATE)
    before = {k: t.clone() for k, t in lane_state(pop.model.slot("r0c1").blend_gate).items()}
    run_epoch(pop)
    after = lane_state(pop.model.slot("r0c1").blend_gate)
    assert any(not torch.equal(by_lane(after[k], 2)[1], by_lane(t, 2)[1]) for k, t in before.items())
    assert all(torch.equal(by_lane(after[k], 2)[0], by_lane(t, 2)[0]) for k, t in before.items())


def test_measurements_reach_the_seeds():
    pop = grown(workers=2)
    r = run_epoch(pop)
    s = pop.model.slot("r0c0").state(1)
    assert s.health is not None and s.accuracy == pytest.approx(r.heldout.accuracy_pp[1].item())
    assert s.contribution is None # in training: not heard
    for slot in ("r0c0", "r0c1", "r0c2"): assert pop.model.slot(slot).state(3).contribution is not None
    assert pop.model.slot("r0c0").state(2).health is None
    assert torch.equal(r.ablation.accuracy_pp[-1], r.heldout.accuracy_pp)


def test_an_interrupted_epoch_has_not_happened():
    pop = grown(workers=1)
    pop.model.take_fresh()
    before = {k: t.clone() for k, t in state(pop).items()}
    def stop(net, stepper, lanes, b, x, y):
        if b == 3: raise KeyboardInterrupt
        return x, y
    with pytest.raises(KeyboardInterrupt): run_epoch(pop, disturb=stop)
    assert all(torch.equal(t, before[k]) for k, t in state(pop).items() if not k.endswith("lr"))
    other = grown(workers=1)
    a, b = run_epoch(pop), run_epoch(other)                                      # the borrowed networks are clean again
    assert torch.equal(a.train.losses, b.train.losses)


@pytest.mark.costly
@pytest.mark.parametrize("phase", ["give back", "note", "govern"])
def test_an_interrupt_while_an_epoch_is_put_back_is_raised_when_it_is_over(phase, plain_signals):
    pop, other = grown(governor=GovernorConfig()), grown(governor=GovernorConfig())
    def press(name):
        if name == phase: signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt): run_epoch(pop, clock=press)
    whole = run_epoch(other)
    assert torch.equal(pop.last.train.losses, whole.train.losses) and pop.epoch.tolist() == other.epoch.tolist()
    assert torch.equal(run_epoch(pop).train.losses, run_epoch(other).train.losses)
    assert all(torch.equal(t, state(other)[k]) for k, t in state(pop).items())
    for slot in pop.model.names: assert pop.model.slot(slot).states() == other.model.slot(slot).states()


@pytest.mark.parametrize("size", [0, 2**22])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_plans_hold_every_lane_once(size, workers):
    kinds = [((i * i) % 5,) for i in range(13)]
    groups = grown_plan(kinds, workers, size)
    assert sorted(i for g in groups for i in g) == list(range(13)) and len(groups) % workers == 0
    if size: assert all(len({kinds[i] for i in g}) == 1 for g in groups)


def test_strict_gates_and_rules_reach_the_model():
    model = create_model(TASK, ["r0c0"], rules=Rules(gates=Gates(training_epochs=2)), blueprints=["norm"])
    assert model.slot("r0c0").rules.gates.training_epochs == 2 and model.slot("r0c0").blueprints == ("norm",)
