"Growing what is trained: every way gets the same operations, and growing goes on from the trained network."
import importlib.util

import numpy as np
import pytest
import torch

from research import fleets, grow_trained as g

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]
HAS_PEFT = importlib.util.find_spec("peft") is not None
SOME = tuple(w for w in g.WAYS if HAS_PEFT or w != "lora")
iris = next(t for t in fleets.list_tables(None) if t.name == "iris")


@pytest.fixture
def tiny():
    "A task of sixty steps, its data for three seeds, and networks that have been trained on them."
    task = g.tables_task([iris], steps=400)
    data = task.load((1, 2, 3))
    with g.seed_block(task.kind):
        start = g.Start(1, (0, 1, 2), None)
        model = g.build(task, "on", start)
        g.train(task, model, start, data, "first", 30, [.01] * 3)
        yield task, data, start._replace(state={k: t.clone() for k, t in model.host.state_dict().items()})


def outputs(model, n, data):
    at = torch.arange(5).expand(n, -1)
    with torch.no_grad(): return model.eval()(data.batch("further", at)[0])


@pytest.mark.parametrize("family", ["digits8", "source", "tables"])
def test_every_way_gets_the_operations_of_its_budget(family):
    task = g.get_task(family)
    with g.seed_block(task.kind):
        for way in SOME:
            for budget in g.BUDGETS: assert abs(g.spent(task, way, budget) - 1) < .02, (way, budget)
        assert g.step_flops(task, "identity") == g.step_flops(task, "copy") == g.step_flops(task, "new")
        assert g.steps_for(task, "on", .5) == task.steps // 2 > g.steps_for(task, "identity", .5)


@pytest.mark.parametrize("way", [w for w in SOME if w not in ("on", "new")])
def test_growing_goes_on_from_what_the_trained_network_computes(tiny, way):
    task, data, start = tiny
    before = outputs(g.build(task, "on", start), 3, data)
    model = g.build(task, way, start, [0, 1, 0] if way == "forecast" else None)
    assert torch.equal(outputs(model, 3, data), before)
    if way == "copy": # wholly blended in, each block runs twice
        for _ in range(g.PARTS): model.tick()
        twice = [g.lane_block(model, k) for k in model.names]
        assert all(torch.equal(a, b) for pair in twice for a, b in zip(*pair))
    g.train(task, model, start, data, "further", 20, [.01] * 3)
    assert all(s.alpha == 1 for k in model.names for s in model.slot(k).states() if s.blueprint is not None)
    assert not torch.equal(outputs(model, 3, data), before)


def test_a_new_start_has_nothing_of_the_trained_network(tiny):
    task, data, start = tiny
    other = start._replace(state={k: t + 1 for k, t in start.state.items()})
    assert torch.equal(*(outputs(g.build(task, "new", s), 3, data) for s in (start, other)))


def test_a_forecast_grows_only_where_it_says(tiny):
    task, _, start = tiny
    model = g.build(task, "forecast", start, [1, 0, 1])
    grown = {k: [s.blueprint is not None for s in model.slot(k).states()] for k in model.names}
    assert grown == {"blocks.0": [False, True, False], "blocks.1": [True, False, True]}


def test_lanes_are_the_networks_alone_and_two_runs_are_one(tiny):
    task, data, start = tiny
    every = [g.go_on(task, "identity", start, data, .05, [.01] * 3) for _ in range(2)]
    assert every[0] == every[1]
    one = g.go_on(task, "identity", start.take([2]), task.load((3,)), .05, [.01])
    np.testing.assert_allclose(one["test_loss"][0], every[0]["test_loss"][2], atol=1e-4) # other sums, other rounding


def test_a_book_is_written_once_and_read_again(tmp_path, monkeypatch):
    pytest.importorskip("peft")
    task = g.tables_task(fleets.list_tables(None)[:2], steps=40)
    monkeypatch.setattr(g, "RATES", (.003, .01))
    def run(folder):
        book = g.Book(tmp_path/f"{folder}.json", tmp_path/folder)
        with g.seed_block(task.kind):
            found = g.search(task, book)
            g.report(task, book, found.rates, g.practise(task, book, found), 3)
        return book.runs
    runs = run("a")
    assert runs == run("b")
    monkeypatch.setattr(g, "train", lambda *args: pytest.fail("measured again"))
    assert runs == run("a") # from the file
    cell = g.judge_cell(runs, task.name, 3, .05)
    assert cell.grown in g.GROWING and cell.rival in g.RIVALS
    for k in ("identity", "copy", "lora", "new", "forecast"): assert len(runs[f"tables/3/{k}/0.5"]["test_loss"]) == 6


@pytest.mark.parametrize("gain, won", [(.01, True), (.0008, False), (-.01, False)]) # .0008: the interval holds 0
def test_a_cell_is_won_only_with_the_whole_interval(gain, won):
    noise = .002 * np.sin(np.arange(10.))
    losses = dict(on=.5 + 0 * noise, new=.9 + noise, lora=.6 + noise, identity=.5 - gain + noise, copy=.3 + noise,
                  forecast=.5 + noise)
    runs = {f"t/10/{k}/0.05": dict(test_loss=v.tolist()) for k, v in losses.items()}
    runs |= {f"t/search/{k}/0.05": dict(loss=[.9, .1 if k == "identity" else .2]) for k in g.GROWING}
    cell = g.judge_cell(runs, "t", 10, .05)
    assert (cell.grown, cell.rival, cell.won) == ("identity", "on", won) # not the copy, which was worse in development
