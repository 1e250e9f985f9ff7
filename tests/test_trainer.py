"Any plan trains the same networks; a lane's failure is its own; the same seed is the same run."
import json
import subprocess
import sys

import pytest
import torch

from esper_nb.core import Workers, by_lane, lane, lane_state, plan, repeatable, use_threads
from esper_nb.grow import GPTConfig
from esper_nb.guard import GovernorConfig
from esper_nb.train import (
    LOOKED_AT, EvalResult, Fault, FitConfig, Graphs, Population, fit, get_task, list_faults, new_population, run_epoch,
    site_signals, traced)

# A small learning rate: at 0.02 one ReLU that rounding tips over grows to 2e-3 within 17 steps,
# in plain PyTorch with one and two threads too.
SMALL_GPT = GPTConfig(vocab=96, d=16, heads=2, layers=2, block=16, segments=2)
TASKS = dict(digits=get_task("digits").replace(host=get_task("digits").host.replace(base=4), lr=.002),
             prose=get_task("prose").replace(host=SMALL_GPT, slots=("r0c0",), optimizer="sgd", lr=.01))
DATA = {k: t.load(limit=20 * t.batch_size) for k, t in TASKS.items()}


def population(kind, lanes=4, **kw):
    return new_population(TASKS[kind], FitConfig(lanes=lanes, epochs=4, governor=None, **kw), data=DATA[kind],
                          blueprints=["norm"])


def separate(kind, i, steps, seed=0):
    "Lane i as an ordinary network in plain PyTorch."
    pop, task = population(kind), TASKS[kind]
    net = lane(pop.model, i).train()
    opt = torch.optim.SGD(net.parameters(), **task.optimizer_options)
    batches, losses = pop.data.epoch(seed, [i], 0, pop.batch_size), []
    for b in range(steps):
        x, y = batches[b]
        loss = task.loss(net(x), y, 1).sum()
        opt.zero_grad(); loss.backward(); torch.nn.utils.clip_grad_norm_(net.parameters(), 1.); opt.step()
        losses.append(loss.item())
    return net, torch.tensor(losses)


PLANS = [dict(workers=1, width=4), dict(workers=1, width=1), dict(workers=1, width=2), dict(workers=2, width=2),
         dict(workers=2), dict(workers=3), dict(workers=4)]


@pytest.mark.costly
@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("kw", PLANS, ids=str)
def test_every_plan_equals_separate_networks(kind, kw):
    pop = population(kind, **kw)
    r = run_epoch(pop)
    steps = len(r.train.losses)
    assert steps >= 20
    for i in range(4):
        net, losses = separate(kind, i, steps)
        torch.testing.assert_close(r.train.losses[:, i], losses, rtol=1e-5, atol=1e-5)
        x, _ = next(iter(pop.data.evaluate("test", 32)))
        logits = net.eval()(x)
        torch.testing.assert_close(lane(pop.model, i).eval()(x), logits, rtol=0,
                                   atol=1e-5 * max(1, logits.abs().max().item()))


@pytest.mark.costly
@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("workers", [1, 2])
def test_poisoned_lane_is_alone_with_it(kind, workers):
    healthy, ill = (population(kind, workers=workers) for _ in range(2))
    with torch.no_grad(): by_lane(next(ill.model.parameters()), 4)[1] = torch.nan
    a, b = run_epoch(healthy), run_epoch(ill)
    assert b.train.losses[:, 1].isnan().all() and (b.train.skipped[1] == len(b.train.losses))
    assert b.train.skipped.sum() == b.train.skipped[1]
    for i in (0, 2, 3):
        assert torch.equal(a.train.losses[:, i], b.train.losses[:, i]) and a.heldout.loss[i] == b.heldout.loss[i]
        models = [lane_state(p.model) for p in (healthy, ill)]
        steppers = [p.stepper.state_dict() for p in (healthy, ill)]
        for s, t in (models, steppers):
            assert all(torch.equal(by_lane(u, 4)[i], by_lane(t[k], 4)[i]) for k, u in s.items())


def test_fp16_overflow_in_one_lane_halves_only_its_scale():
    def run(overflow):
        pop = population("digits", workers=1, precision="fp16")
        assert pop.stepper.scaler.enabled
        if overflow: pop.stepper.scaler.scale[2] = 2.**60
        r = run_epoch(pop)
        return pop, r
    (a, ra), (b, rb) = run(False), run(True)
    assert rb.train.skipped[2] > ra.train.skipped[2]
    assert b.stepper.scaler.scale[2] == 2.**(60 - rb.train.skipped[2].item())
    for i in (0, 1, 3):
        assert torch.equal(ra.train.losses[:, i], rb.train.losses[:, i])
        assert a.stepper.scaler.scale[i] == b.stepper.scaler.scale[i]
        there = lane_state(b.model)
        assert all(torch.equal(by_lane(t, 4)[i], by_lane(there[k], 4)[i]) for k, t in lane_state(a.model).items())


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_mixed_precision_learns(precision):
    pop = population("digits", precision=precision, lr=.05)
    records = list(fit(pop))
    assert records[-1].train.loss.median() < .7 * records[0].train.loss.median()
    assert records[-1].train.loss.isfinite().all()


SCRIPT = """
import hashlib, json
from esper_nb.core.lanes import lane_state
from esper_nb.train.population import FitConfig, new_population
from esper_nb.train.trainer import fit
pop = new_population("digits", FitConfig(lanes=6, epochs=2, workers=2))
losses = [r.train.losses.tolist() for r in fit(pop)]
weights = b"".join(t.detach().numpy().tobytes() for t in lane_state(pop.model).values())
print(json.dumps([losses, hashlib.sha256(weights).hexdigest()]))
"""


@pytest.mark.slow
def test_same_seed_is_the_same_run_in_two_processes(capsys):
    there = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True).stdout
    exec(SCRIPT, {})
    assert json.loads(there) == json.loads(capsys.readouterr().out)


def test_learning_rates_by_lane():
    pop = population("digits", schedule="constant")
    pop.rates.lr[1] = 0.
    before = {k: t.clone() for k, t in pop.model.host.named_parameters()}
    r = run_epoch(pop)
    assert r.lr.tolist() == [.002, 0., .002, .002]
    for k, p in pop.model.host.named_parameters():
        assert torch.equal(by_lane(p, 4)[1], by_lane(before[k], 4)[1])
        assert not torch.equal(by_lane(p, 4)[0], by_lane(before[k], 4)[0])


def test_plan_is_pure_and_workers_keep_the_threads_of_the_caller():
    assert plan([0, 1, 0, 1], 2) == plan([0, 1, 0, 1], 2)
    ours = torch.get_num_threads()
    with Workers(3) as w: assert w.map(lambda _: torch.get_num_threads(), range(9)) == [1] * 9
    assert torch.get_num_threads() == ours


def test_operations_use_one_core_beside_working_threads_and_in_a_small_group_and_else_all(monkeypatch):
    seen, really = [], Population.check_out
    monkeypatch.setattr(Population, "check_out", lambda *a: (seen.append(torch.get_num_threads()), really(*a))[1])
    with use_threads(3):
        large = dict(batch_size=640)   # an activation of 0.6 MB for each lane
        for kw in (dict(workers=2), dict(workers=2, lanes=1), dict(workers=1, width=2),
                   large | dict(workers=2), large | dict(workers=2, lanes=1), large | dict(workers=1, width=2)):
            run_epoch(population("digits", **kw))
        assert seen == [1, 1, 1, 1, 3, 3]
        def fails(*a): raise RuntimeError("in a group")
        with pytest.raises(RuntimeError, match="in a group"): run_epoch(population("digits", workers=2), disturb=fails)
        assert torch.get_num_threads() == 3


@pytest.mark.cuda
def test_cuda_population_learns_and_streams_agree_with_one_pass(machine):
    data = TASKS["digits"].load("cuda", limit=320 if machine else None)
    configs = [FitConfig(lanes=4, epochs=2, workers=w, width=2) for w in (1, 2)]
    pops = [new_population(TASKS["digits"], c, data=data, device="cuda") for c in configs]
    a, b = ([r.train.loss for r in fit(p)] for p in pops)
    torch.testing.assert_close(torch.stack(a), torch.stack(b), rtol=1e-3, atol=1e-3)


def test_signals_of_a_large_batch_are_those_of_its_first_examples():
    "A batch that repeats itself says what a third of it says: less is looked at, and the mean is put right."
    pop = new_population(TASKS["digits"], FitConfig(lanes=3, epochs=3, precision="fp32"), data=DATA["digits"])
    x, y = pop.data.epoch(0, range(3), 0, LOOKED_AT)[0]
    def signals(times):
        g = pop.check_out([(0, 1, 2)])[0]
        g.stepper.zero_grad()
        g.net.train()
        with traced(g.net):
            g.stepper.backward(pop.task.loss(g.net(x.repeat(times, 1, 1, 1)), y.repeat(times, 1), 3))
            return site_signals(g)
    one, three = signals(1), signals(3)
    for k in one: torch.testing.assert_close(three[k], one[k], rtol=1e-3, atol=1e-5)
    assert all((one[k][0] > 0).all() for k in one)


@pytest.mark.cuda
def test_cuda_runs_are_the_same_to_the_bit_by_replays_and_by_plain_calls(machine):
    data = TASKS["digits"].load("cuda", limit=320 if machine else None)
    def run(warm):
        pop = new_population(TASKS["digits"], FitConfig(lanes=4, epochs=3, precision="fp32"), data=data, device="cuda")
        pop.graphs = Graphs(warm)
        with repeatable(): losses = torch.cat([r.train.losses for r in fit(pop)])
        return losses, {k: t.cpu() for k, t in lane_state(pop.model).items()}, pop.graphs
    (a, ours, graphs), again, plain = run(2), run(2), run(10**9) # then nothing is recorded
    assert graphs.replays == again[2].replays > 0 == plain[2].replays and not graphs.said
    for b, theirs, _ in (again, plain):
        assert torch.equal(a, b) and all(torch.equal(t, theirs[k]) for k, t in ours.items())


def guarded(**kw):
    config = FitConfig(lanes=4, epochs=8, **kw)
    return new_population(TASKS["digits"], config, data=DATA["digits"], blueprints=["norm"])


@pytest.fixture(scope="module")
def calm():
    "A healthy run, and what its epochs said."
    pop = guarded()
    return pop, list(fit(pop))


def test_the_governor_does_not_touch_a_healthy_run(calm):
    (a, said), b = calm, guarded(governor=None)
    for ra, rb in zip(said, fit(b), strict=True):
        assert torch.equal(ra.train.losses, rb.train.losses) and ra.reports == ()
    assert all(torch.equal(t, lane_state(b.model)[k]) for k, t in lane_state(a.model).items())


@pytest.mark.costly
@pytest.mark.parametrize("kind", list_faults())
def test_a_ruined_lane_is_put_back_bit_for_bit_and_the_others_never_notice(calm, kind):
    hit, fault = guarded(), Fault(kind, lane=2, epoch=4, batch=2)
    for e, a in enumerate(calm[1]):
        b = run_epoch(hit, disturb=fault.at(e))
        for i in (0, 1, 3):
            assert torch.equal(a.train.losses[:, i], b.train.losses[:, i]) and a.heldout.loss[i] == b.heldout.loss[i]
        for r in b.reports:
            assert r.lane == 2
            if r.action != "rollback": continue
            assert hit.governor.snapshot.difference([2]) == {}  # what differs from the snapshot: nothing
            assert {"model", "stepper"} <= set(r.restored)
    if kind == "nan": assert [(r.reason, r.action) for r in hit.governor.reports] == [("non-finite", "rollback")]


def test_a_lane_that_is_ruined_for_good_stops_and_the_rest_goes_on():
    def always(net, stepper, lanes, b, x, y):
        if 1 in lanes: by_lane(next(net.parameters()).data, len(lanes))[list(lanes).index(1)] = torch.nan
        return x, y
    pop = guarded(governor=GovernorConfig(rollbacks=2, lowers=0))
    reports = [r for _ in range(6) for r in run_epoch(pop, disturb=always).reports]
    assert [r.action for r in reports] == ["rollback", "rollback", "stop"]
    assert pop.governor.stopped.tolist() == [False, True, False, False]
    assert all(r.lane == 1 for r in reports)


def test_looking_for_places_to_grow_changes_no_number():
    "An epoch without the look trains the same weights to the bit, grown or not, and has no signals."
    def train(look):
        pop = new_population(TASKS["digits"], FitConfig(lanes=3, epochs=3, workers=1), data=DATA["digits"])
        pop.model.germinate(pop.model.names[0], pop.model.slot(pop.model.names[0]).blueprints[0], lanes=[0, 2])
        results = [run_epoch(pop, split=None, look=look) for _ in range(2)]
        return [r.train.losses for r in results] + [*pop.model.state_dict().values()], results[-1].signals
    (looked, found), (blind, nothing) = train(True), train(False)
    assert all(torch.equal(a, b) for a, b in zip(looked, blind) if isinstance(a, torch.Tensor))
    assert found and not nothing


@pytest.mark.parametrize("lanes", [1, 16])
def test_a_result_that_ends_a_cell_is_a_few_lines_however_many_lanes(lanes):
    pop = new_population("digits", FitConfig(lanes=lanes, epochs=2, workers=1))
    result = next(fit(pop))
    text = repr(result)
    assert text.count("\n") == 2 and len(text) < 700 and repr(result.heldout) in text
    assert f"{result.heldout.accuracy_pp.quantile(.5):.1f}" in text
    assert "heldout=None" in repr(run_epoch(pop, split=None))


def test_a_result_says_how_many_lanes_have_no_number():
    loss = torch.tensor([1., 2., 3., 4., torch.nan])
    text = repr(EvalResult(loss, loss, torch.zeros(5, 2)))
    assert "median 2.500, 1.000 to 4.000, 1 NaN" in text
    assert "5 NaN" in repr(EvalResult(loss * torch.nan, loss, torch.zeros(5, 2)))


def test_a_disturbance_that_returns_no_batch_is_told_so():
    pop = population("digits", workers=1)
    before = {k: t.clone() for k, t in pop.model.state_dict().items()}
    with pytest.raises(ValueError, match="what disturb returned=None, expected x and y"):
        run_epoch(pop, disturb=lambda net, stepper, lanes, batch, x, y: None)
    assert all(torch.equal(t, before[k]) for k, t in pop.model.state_dict().items())
