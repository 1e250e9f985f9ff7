"Observations over random records: in range, finite, unknown where nothing was measured, and lane by lane the same."
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st

from esper_nb.control import (
    HEADS, HISTORY, OBSERVATIONS, EnvStep, GrowthActions, LaneHistory, Observation, Observer, read_slots,
    register_observation, symlog)
from esper_nb.grow import COLUMNS, UNMEASURED, CNNConfig, CNNHost, GrowingModel, SeedState, Stage, encode_seed

MODEL = GrowingModel(CNNHost(CNNConfig(in_channels=1, size=8, base=4, blocks=2), lanes=1),
                     {"r0c0": ["norm", "conv_small"], "r0c1": ["depthwise", "norm"]})
OBSERVER = Observer(GrowthActions(MODEL), horizon=30)

some = st.one_of(st.none(), st.floats(-1e6, 1e6))
positive = st.one_of(st.none(), st.floats(0, 1e6), st.just(math.inf))
share = st.one_of(st.none(), st.floats(0, 1))
SHARES = ("health", "vanishing", "exploding", "alpha_up", "alpha_down")
MEASURED = ("contribution", "contribution_before", "velocity", "interaction", "boost")


@st.composite
def a_seed(draw):
    stage = draw(st.sampled_from([s for s in Stage if s != Stage.UNKNOWN]))
    if stage == Stage.DORMANT: return SeedState(germinations=draw(st.integers(0, 9)))
    shares = ("accuracy", "accuracy_stage", "accuracy_first", *SHARES)
    values = {k: draw(share) for k in shares} | {k: draw(some) for k in MEASURED}
    values |= {k: draw(positive) for k in ("gradient_norm", "gradient_ratio")}
    return SeedState(stage=stage, blueprint=draw(st.integers(0, 1)), germinations=1, alpha=draw(st.floats(0, 1)),
                     target=draw(st.floats(0, 1)), epochs=draw(st.integers(0, 500)), age=draw(st.integers(0, 500)),
                     total=draw(st.integers(0, 50)), **values)


def table(*lanes): return torch.tensor([[encode_seed(s) for s in lane] for lane in lanes]).double()


def step(loss, accuracy, op, ok, signals):
    idle = EnvStep.idle(len(loss), slots=2, heads=len(HEADS))
    action = idle.action.clone()
    action[:, HEADS.index("op")] = op
    return idle._replace(action=action, loss=loss, accuracy_pp=accuracy, ok=ok, signals=signals)


def in_range(obs):
    for i, f in enumerate(OBSERVER.features):
        x, known = obs[:, i], (obs[:, i] >= f.low - 1e-6) & (obs[:, i] <= f.high + 1e-6)
        assert (known | (x == f.unknown if f.unknown is not None else False)).all(), (f, x)
        assert f.unknown is None or not f.low <= f.unknown <= f.high, f


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(a_seed(), a_seed()), min_size=1, max_size=4), st.integers(0, 10**6))
def test_finite_in_range_and_pure(lanes, seed):
    g, n, t = torch.Generator().manual_seed(seed), len(lanes), table(*lanes)
    r = LaneHistory.start(n, 2)
    for e in range(seed % 8):
        loss = torch.randn(n, generator=g).exp() * 10.**(seed % 5)
        loss[torch.rand(n, generator=g) < .2] = math.nan
        accuracy, op = 100 * torch.rand(n, generator=g), torch.randint(0, 6, (n,), generator=g)
        r = r.add(step(loss, accuracy, op, torch.rand(n, generator=g) < .5,
                       torch.randn(n, 2, 4, generator=g, dtype=torch.float64).exp()))
    kept = t.clone()
    obs = OBSERVER(t, r)
    assert obs.shape == (n, OBSERVER.size) and obs.dtype == torch.float32 and obs.isfinite().all()
    in_range(obs)
    assert torch.equal(t, kept) and torch.equal(obs, OBSERVER(t, r))
    for i in range(n): assert torch.equal(OBSERVER(t[i:i + 1], LaneHistory(*(x[i:i + 1] for x in r)))[0], obs[i])


def test_every_unmeasured_quantity_is_unknown():
    bare = SeedState(stage=Stage.TRAINING, blueprint=0, germinations=1)
    obs = OBSERVER(table((bare, SeedState())), LaneHistory.start(1, 2))[0]
    for i, f in enumerate(OBSERVER.features):
        if f.unknown is None: continue
        applies = f.name in ("r0c0.tempo", "r0c0.goal")
        assert (obs[i] != f.unknown) if applies else (obs[i] == f.unknown), f
    unmeasured = [k for k, v in bare._asdict().items() if v is None]
    for k in (*MEASURED, *SHARES, "gradient_norm", "gradient_ratio"):
        assert k in unmeasured
        at = OBSERVER.index(f"r0c0.{k}")
        zero = OBSERVER(table((bare._replace(**{k: 0.}), SeedState())), LaneHistory.start(1, 2))[0]
        assert zero[at] == 0 and (zero != obs).sum() == 1 # a measured zero shows, and shows here alone


def test_a_ruined_loss_reads_as_the_worst_and_a_new_episode_as_unknown():
    empty = table((SeedState(), SeedState()), (SeedState(), SeedState()))
    losses, accuracies = torch.tensor([math.nan, 1.]), torch.tensor([10., 20.])
    r = LaneHistory.start(2, 2).add(step(
        losses, accuracies, torch.tensor([0, 1]), torch.tensor([True, False]), torch.full((2, 2, 4), math.nan)))
    obs = OBSERVER(empty, r)
    last, earlier, done = OBSERVER.index("loss_0"), OBSERVER.index("loss_1"), OBSERVER.index("done")
    assert obs[0, last] == 2 and obs[0, earlier] == -1 and obs[0, done] == 1 and obs[1, done] == 0
    torch.testing.assert_close(obs[1, last], symlog(torch.tensor(1.)) / 7)
    again = OBSERVER(empty, r.forget(torch.tensor([True, False])))
    assert (again[0, 1:1 + 2 * HISTORY] == -1).all() and again[0, done] == -1 and torch.equal(again[1], obs[1])


def test_blueprints_are_named_alike_in_every_slot():
    def s(b): return SeedState(stage=Stage.TRAINING, blueprint=b, germinations=1)
    for slot, own in (("r0c0", MODEL.slot("r0c0").blueprints), ("r0c1", MODEL.slot("r0c1").blueprints)):
        for b, name in enumerate(own):
            pair = (s(b), SeedState()) if slot == "r0c0" else (SeedState(), s(b))
            obs = OBSERVER(table(pair), LaneHistory.start(1, 2))[0]
            on = {k for k in OBSERVER.space.blueprints if obs[OBSERVER.index(f"{slot}.blueprint_{k}")] == 1}
            assert on == {name}


def test_the_model_and_its_table_say_the_same():
    obs = OBSERVER(MODEL, LaneHistory.start(1, 2))
    assert torch.equal(obs, OBSERVER(read_slots(MODEL), LaneHistory.start(1, 2)))
    assert len({f.name for f in OBSERVER.features}) == OBSERVER.size
    assert UNMEASURED not in obs and len(COLUMNS) == read_slots(MODEL).shape[-1]


def test_what_is_seen_may_be_of_lanes_alone_or_of_slots_alone():
    both = OBSERVER(MODEL, LaneHistory.start(1, 2))
    for names, wanted in ((["epoch"], ["epoch"]), (["alpha"], ["r0c0.alpha", "r0c1.alpha"])):
        some = Observer(OBSERVER.space, 30, names)
        assert [f.name for f in some.features] == wanted
        assert torch.equal(some(MODEL, LaneHistory.start(1, 2)), both[:, [OBSERVER.index(k) for k in wanted]])
    with pytest.raises(ValueError, match="expected some of epoch, loss"): Observer(OBSERVER.space, 30, [])


@pytest.mark.parametrize("per, read, said", [
    ("lane", lambda v: torch.zeros(3, 3), r"values of mine=\(3, 3\), expected a tensor of shape \(1,\)"),
    ("lane", lambda v: .5, r"values of mine=0.5, expected a tensor of shape \(1,\)"),
    ("lane", "accuracy", r"values of mine=\(1, 2\), expected a tensor of shape \(1,\)"),
    ("slot", lambda v: torch.zeros(1), r"values of mine=\(1,\), expected a tensor of shape \(1, 2\)"),
    ("slot", "acuracy", "read of mine='acuracy', expected a function of a LaneView, .*'accuracy' perhaps")])
def test_an_observation_of_ones_own_is_told_the_shape_of_its_values(per, read, said):
    try:
        with pytest.raises(ValueError, match=said):
            register_observation(Observation("mine", "1", (0., 1., -1.), "mine", read, per=per))
            Observer(OBSERVER.space, 30, ["epoch", "alpha", "mine"])(MODEL, LaneHistory.start(1, 2))
    finally: OBSERVATIONS.pop("mine", None)
