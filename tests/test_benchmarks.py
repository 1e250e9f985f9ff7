"Benchmarks time two programs that do the same work, and their rivals are fair."
import contextlib
import importlib.util
import io
import math
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import drawn_loops, faults, growth, lanes
from benchmarks.growth import GROWTH_CASES, GROWTH_PLANS, GrowthCase, PlainGrown, arithmetic_share, growth_text
from benchmarks.detector_bench import SpikeDetection, lightning
from benchmarks.measure import Case, Side, fastest_epoch, find_maker, machine, machine_text, take_turns
from esper_nb.train import Fault, get_task, list_faults

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
MULTIPLY = "benchmarks.measure:multiply"


def close(a, b, tolerance): torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=0, atol=tolerance)


# --- time

def test_a_side_is_a_process_that_answers_with_seconds():
    seen = []
    turns = take_turns({name: Side(MULTIPLY, dict(size=2)) for name in "ab"}, 2, seen.append)
    assert seen == ["a", "b"] * 3 and {k: len(v) for k, v in turns.items()} == dict(a=2, b=2)
    with Side(MULTIPLY, dict(size=8)) as side:
        assert 0 < fastest_epoch(side, rounds=2, least=.01) < 1
    assert side.process is None and find_maker(MULTIPLY).__name__ == "multiply"


def test_a_side_that_fails_says_why():
    with Side(MULTIPLY, dict(sides=8)) as side:
        with pytest.raises(ValueError, match="unexpected keyword argument 'sides'"): side.epoch()


def test_a_case_travels_and_figures_name_their_machine():
    wide = Case("cifar_baseline", 64, base=32, images=64)
    assert Case.from_dict(wide.to_dict()) == wide
    task, data = wide.load()
    assert task.host.base == 32 and len(data.y["train"]) == 64
    assert list(machine()) == ["cpu", "cores", "capability", "torch", "python", "date"]
    assert machine_text(machine()).startswith("cpu ")


# --- lanes

def test_the_plain_loop_does_the_lanes_work():
    small = Case(lanes=3, batch_size=256)
    by_loop, by_lanes = lanes.plain_loop(small)(0), lanes.lane_loop(small)(0)
    close(by_loop, by_lanes, 1e-3)
    apart = [lanes.plain_loop(small, (k, 2))(0) for k in (0, 1)] # two processes, the same work
    assert apart == [by_loop[::2], by_loop[1::2]]


def test_lanes_get_no_more_tries_than_loops():
    kinds = [kind for kind, *_ in lanes.lane_settings(Case())]
    assert sum(kind in lanes.LOOPS for kind in kinds) == kinds.count("lanes")
    assert [kind for kind, *_ in lanes.lane_settings(Case(precision="bf16"))][:3] == ["loop", "lanes", "fp32 lanes"]
    assert isinstance(lanes.open_side("module:maker", dict(kind="processes"), 1, True), lanes.OnePerCore)


@pytest.mark.slow
def test_a_tiny_case_goes_through_all_of_it(monkeypatch):
    every = lanes.lane_settings(Case())
    one_of_a_kind = list({kind: (kind, *how) for kind, *how in every}.values()) # each setting is processes of its own
    monkeypatch.setattr(lanes, "lane_settings", lambda case: one_of_a_kind)
    tiny = lanes.compare_case(Case(lanes=2, batch_size=256), passes=1, rounds=1, least=.01)
    assert tiny["ratio"] > 0 and tiny["over_fp32"] is None
    assert tiny["loop_s"] == min(seconds for name, seconds in tiny["all"].items() if name.split(",")[0] in lanes.LOOPS)


@pytest.mark.slow
def test_blocks_in_one_pass_are_measured_beside_the_others(monkeypatch):
    pytest.importorskip("numba")
    monkeypatch.setattr(lanes, "FUSED", lanes.FUSED[1:])
    row = lanes.fused_row(Case(lanes=2, batch_size=256), passes=1, rounds=1, least=.01)
    assert row["fused"] == row["processes_s"] / row["fused_s"] and row["lanes"] > 0


# --- rivals

def test_every_benchmark_starts_by_the_command_that_is_told():
    root = Path(__file__).parents[1]
    names = [f"{folder}.{p.stem}" for folder in ("benchmarks", "research") for p in (root/folder).glob("*.py")]
    imports = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    subprocess.run([sys.executable, "-c", imports, *names], cwd=root, check=True)

def test_a_rule_that_sees_one_loss_at_a_time_says_what_it_says_of_all():
    draws = np.random.default_rng(0)
    for k in range(50):
        x = np.exp(.1 * draws.normal(size=300).cumsum() + .4 * draws.normal(size=300)) - .5 * (k % 3 == 0)
        x[draws.integers(300, size=3)] *= draws.choice([5, 50, np.nan, np.inf], 3)
        spike, one_by_one = lightning(x[:, None])[:, 0], SpikeDetection()
        assert [one_by_one(float(v)) for v in x] == spike.tolist() and spike.any()


# --- growth

def test_a_plain_network_computes_what_its_lane_does():
    pop = growth.grown_population(GrowthCase(lanes=2, mix="mixed"))
    one = pop.model.lane(1).eval()
    net, (x, _) = PlainGrown(one).eval(), next(iter(pop.data.evaluate("heldout", 8)))
    with torch.no_grad(): close(net(x), one(x).reshape(8, -1), 1e-5)


@pytest.mark.parametrize("mix", ["agree", "mixed"])
def test_the_growing_loop_does_the_lanes_work(mix):
    case = GrowthCase(lanes=3, batch_size=320, mix=mix)
    (loss, table), record = growth.grown_loop(case)(0), growth.grown_lanes(case)(0)
    close(record.train.loss, loss, 1e-5)
    close(record.ablation.accuracy_pp, table, .5) # one image of 256 may lie on the edge of two classes
    by_side = [torch.cat(growth.grown_validation(case, k)(0), 1) for k in ("factorial", "separate", "plain")]
    assert torch.equal(by_side[0], by_side[1]) and torch.equal(by_side[0][-1:], by_side[2])


def test_every_plan_trains_every_lane():
    pop = growth.grown_population(GrowthCase(lanes=6, mix="mixed"))
    for chosen in GROWTH_PLANS.values(): assert sorted(i for group in chosen(pop) for i in group) == list(range(6))
    assert [case.aim for case in GROWTH_CASES] == [2.4, 1.6, 1.5, 1.3, 1.3, 1.05]


def test_the_limit_is_the_loop_over_the_convolutions_of_the_better_side():
    part = arithmetic_share(GrowthCase(lanes=2, batch_size=320))
    s, inside = part["seconds"], part["convolutions"]
    assert all(0 < inside[k] < part["profiled"][k] and s[k] > 0 for k in s) # both of the same epoch, by the same clock
    assert part["ratio"] == s["loop"] / s["lanes"] and part["limit"] == s["loop"] / min(inside.values())
    text = growth_text(dict(machine=machine(), rows=[], validation=[], arithmetic=[part]))
    assert part["case"] in text and f"{part['limit']:.2f}x" in text


def test_a_table_says_what_was_missed():
    row = dict(case="digits, batch 64, mixed", loop_s=2., loop_setting="1 threads", ratios=dict(default=4.), aim=3.)
    checked = dict(case="digits", seconds=dict(factorial=1.), faster=5., price=2., aims=[4., 1.8])
    shown = growth_text(dict(machine={}, rows=[row, row | dict(ratios=dict(default=2.9))], validation=[checked],
                             arithmetic=[]))
    assert (shown.count("met"), shown.count("MISSED")) == (2, 2)


def test_a_case_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(ValueError, match="digits, batch 64, agree"):
        growth.run_growth_bench(False, tmp_path/"x.json", only="imagenet")


# --- faults

def test_runs_are_one_run_up_to_the_fault_and_the_governor_saves_them():
    task, kinds = get_task("digits"), list_faults()[:3]
    world = faults.FaultWorld(task, task.load(), dict(epochs=6), 3, 5)
    healthy = faults.fault_run(world, [], 1, True)
    guarded, alone = faults.fault_run(world, kinds, 1, True), faults.fault_run(world, kinds, 1, False)
    assert torch.equal(alone.losses[:guarded.start], guarded.losses[:guarded.start])
    assert healthy.reports == alone.reports == [] and (guarded.accuracy_pp > healthy.accuracy_pp - 5).all()
    row = faults.fault_row("digits", kinds[0], healthy.accuracy_pp, faults.lanes_of_fault(guarded, slice(0, 1)),
                           alone.accuracy_pp[:1])
    assert (row["caught"], row["seeds"], row["peer"]) == (1, 1, None)
    alone_pp = torch.tensor([math.nan, 10., 20.])
    calm = faults.fault_row("digits", "nan", healthy.accuracy_pp, healthy, alone_pp, [90., 96.])
    assert (calm["caught"], calm["delay"], calm["alone"], calm["peer"]) == (0, None, 10., 93.)
    assert faults.short_trace([1.23456, math.nan, 1e-5]) == [1.23, None, 1e-05]


def test_a_fault_ruins_a_plain_optimizer_as_it_does_ours():
    net, batch = torch.nn.Linear(2, 2), torch.zeros(1, 1)
    sgd = torch.optim.SGD(net.parameters(), lr=.1, momentum=.9)
    net(torch.ones(1, 2)).sum().backward()
    sgd.step()
    plain = faults.PlainStepper(dict(host=faults.PlainState(sgd, net)))
    Fault("poison-optimizer", epoch=0).at(0)(net, plain, [0], 0, batch, batch)
    assert all(t.abs().max() > 1 for t in plain.owners["host"].state_dict().values())


@pytest.mark.slow
@pytest.mark.skipif(not importlib.util.find_spec("stabilityguard"), reason="needs: pip install 'esper_nb[bench]'")
def test_the_other_tool_trains_the_same_network():
    task = get_task("digits")
    world = faults.FaultWorld(task, task.load(), dict(epochs=2), 1, 5)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(action="ignore"):
        assert 0 <= faults.stability_guard_run(world, "explode", 0) <= 100


# --- drawn loops

def test_a_seed_draws_one_loop_that_is_a_script_in_every_way():
    draws = [drawn_loops.draw(seed) for seed in range(150)]
    assert draws == [drawn_loops.draw(seed) for seed in range(150)]
    for d in draws:
        texts = [drawn_loops.write(d, way) for way in (None, *drawn_loops.WAYS)]
        for text in texts: compile(text, "drawn", "exec")
        assert "governor" not in texts[0] and not any("$" in text for text in texts)
        assert all(drawn_loops.FAULTS[fault].can(d) for fault in drawn_loops.faults_of(d, 2))
    for name, table in dict(task=drawn_loops.TASKS, net=drawn_loops.NETS, form=drawn_loops.FORMS,
                            optimizer=drawn_loops.OPTIMIZERS, source=drawn_loops.SOURCES).items():
        assert len({getattr(d, name) for d in draws}) > .8 * len(table), name


@pytest.mark.parametrize("way", drawn_loops.WAYS)
def test_a_drawn_loop_is_held_against_the_same_run_alone(way):
    def seen(*how): return drawn_loops.in_a_copy(lambda: drawn_loops.played(d, *how))
    d = drawn_loops.draw(0)._replace(steps=90, at=60)
    clean, ruined = seen(), seen(None, "a layer NaN")
    assert clean["score"] < clean["first"] and math.isnan(ruined["score"]) and not clean["ended"]
    assert drawn_loops.judged_healthy(seen(way), clean) == []
    assert "state" in drawn_loops.judged_healthy(ruined, clean)
    guarded = drawn_loops.judged_ruined(seen(way, "a layer NaN"), clean | dict(slack=.2), ruined, "a layer NaN")
    assert guarded["verdict"] == "recovered" and guarded["named"] == ("" if way == "watch" else "true")
