"What users bring, done wrong: a reward, a network, an environment and a path that are told what is the matter."
import math
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from PIL import Image
from torch import nn

import esper_nb.learn as learn
import esper_nb.record as record
import esper_nb.run as run
import esper_nb.train as train
from esper_nb import (
    FitConfig, Learner, ModuleHostConfig, PolicyConfig, PPOConfig, attach_slots, begin_fit, begin_run, explore_host,
    export_model, get_recipe, new_population, train_ppo)
from esper_nb.control import (
    OBSERVATIONS, OPERATIONS, OPS, PRESETS, TERMS, Choice, GrowVecEnv, Observation, Operation, Repertoire, RewardConfig,
    RewardPreset, register_observation, register_operation, reward_term, sb3_env)
from esper_nb.grow import Decision, SeedState, Stage, blueprint
from esper_nb.learn import BestPolicy
from esper_nb.run import RulePlayer, as_player
from test_rewards import play

pytestmark = pytest.mark.usefixtures("one_thread")


# --- an environment with a state of its own

class Counter(VectorEnv):
    "Two lanes that count; a whole one is observed, and its state is one number, which may be loaded without a reset."
    metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP}
    num_envs = 2
    single_observation_space, single_action_space = gym.spaces.Box(-1e6, 1e6, (1,)), gym.spaces.Discrete(2)
    def __init__(self): self.count, self.resets = None, 0
    def _see(self): return np.full((2, 1), self.count, np.float32)
    def reset(self, *, seed=None, options=None):
        self.count, self.resets = 0, self.resets + 1
        return self._see(), {}
    def step(self, actions):
        self.count += 1
        return self._see(), np.asarray(actions, np.float32), np.zeros(2, bool), np.zeros(2, bool), {}
    def state_dict(self): return dict(count=self.count)
    def load_state_dict(self, state): self.count = state["count"]


def counting(): return Learner(Counter(), PPOConfig(num_steps=6, num_updates=3, num_minibatches=1),
                               PolicyConfig(hidden=8, features=(8,)))

@pytest.mark.parametrize("envs_first", [True, False])
def test_an_environment_that_restores_itself_is_not_reset_behind_its_back(envs_first):
    one, two = counting(), counting()
    for _ in range(9): one.step()
    pairs = [(two.stream.envs, one.stream.envs.state_dict()), (two, one.state_dict())]
    for part, state in pairs if envs_first else pairs[::-1]: part.load_state_dict(state)
    with warnings.catch_warnings(action="error"): assert list(train_ppo(two)) == list(train_ppo(one))
    assert two.stream.envs.resets == 0 and two.stream.envs.count == one.stream.envs.count == 18


def test_a_learner_that_goes_back_in_the_same_process_begins_new_episodes_where_its_environments_went_on():
    def cartpoles(): return Learner(gym.make_vec("CartPole-v1", num_envs=2), PPOConfig(
        num_steps=6, num_updates=3, num_minibatches=1), PolicyConfig(hidden=8, features=(8,)))
    one = cartpoles()
    for _ in range(8): one.step()
    kept = one.state_dict()
    for _ in range(3): one.step()
    one.load_state_dict(kept) # the best one so far, say
    with pytest.warns(UserWarning, match="were not restored with the learner"): one.step()


# --- a reward

@pytest.fixture
def mine():
    "A preset with a term that is added by the test."
    PRESETS["mine"] = PRESETS["outcome"]._replace(weights=dict(accuracy_rise=1., mine=1.))
    yield "mine"
    del PRESETS["mine"], TERMS["mine"]


@pytest.mark.parametrize("paid", [math.nan, math.inf, -math.inf])
def test_a_term_that_pays_no_number_is_named_with_its_lanes(mine, paid):
    def mine(i):
        "log of a share, which is 0 at the start"
        return torch.full_like(i.transition.host, paid)
    reward_term(mine)
    step = [([SeedState()], dict(loss=2.))]
    with pytest.raises(ValueError, match=rf"the term mine pays lanes \[0\]=\[{paid}\], expected finite"):
        play(RewardConfig("mine"), step)
    asleep = [([SeedState()], dict(loss=2., active=False))]
    assert float(play(RewardConfig("mine"), asleep)[0].total) == 0 # of a lane that does nothing, nobody asks


class Unpaid(gym.Env):
    "An environment whose reward is no number."
    observation_space, action_space = gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(2)
    def __init__(self, reward): self.reward = reward
    def reset(self, *, seed=None, options=None): return np.zeros(2, np.float32), {}
    def step(self, action): return np.zeros(2, np.float32), self.reward, False, False, {}


def test_rewards_that_are_no_numbers_are_named_by_lane_when_nothing_can_be_learnt():
    envs = gym.vector.SyncVectorEnv([lambda: Unpaid(1.), lambda: Unpaid(math.nan)])
    learner = Learner(envs, PPOConfig(num_steps=4, num_updates=9, num_minibatches=1), PolicyConfig(hidden=8))
    with pytest.raises(RuntimeError, match=r"'nonfinite', rewards of lanes \[1\] are not finite"):
        list(train_ppo(learner))


# --- a network

class Net(nn.Sequential):
    def __init__(self, width, depth=1):
        super().__init__(nn.Conv2d(1, width, 3), *(nn.ReLU() for _ in range(depth)), nn.Flatten(),
                         nn.Linear(36 * width, 10))

def any_net(**kwargs): return Net(**kwargs)

@pytest.mark.parametrize("factory, kwargs, said", [
    (Net, {}, r"Net\(width, depth=1\) makes a network; it raised TypeError: .*missing 1 required .* 'width'"),
    (Net, dict(widht=4), r"kwargs=\{'widht': 4\}.*Net\(width, depth=1\).*'widht'"),
    (any_net, dict(width=4, deep=2), r"any_net\(\*\*kwargs\).*unexpected keyword argument 'deep'"),
    (Net, dict(width=-1), r"kwargs=\{'width': -1\}.*RuntimeError"), (Net, dict(width="4"), "kwargs=.*TypeError")])
def test_arguments_of_a_network_that_it_does_not_take_are_named(factory, kwargs, said):
    with pytest.raises(ValueError, match=said):
        explore_host(ModuleHostConfig(factory, ["0"], (1, 8, 8), 10, kwargs=kwargs))


def linear(inputs): return inputs * 2

def test_a_factory_that_makes_no_network_is_told_so():
    with pytest.raises(ValueError, match="what .*linear makes='int', expected a module"):
        explore_host(ModuleHostConfig(linear, ["0"], (1, 8, 8), 10, kwargs=dict(inputs=4)))


# --- pictures

def animated(place, frames, **how):
    place.parent.mkdir(exist_ok=True, parents=True)
    several = [Image.new("RGB", (8, 8), (20 * i, 0, 0)) for i in range(frames)]
    several[0].save(place, save_all=True, append_images=several[1:], **how)

@pytest.mark.parametrize("name", ["a.gif", "a.tif", "a.webp", "a.png"])
def test_a_file_of_several_pictures_is_refused_by_name(name, tmp_path):
    for i in range(6): animated(tmp_path/"ab"[i % 2]/f"{i}.png", 1)
    animated(tmp_path/"a"/name, 3)
    with pytest.raises(ValueError, match=rf"frames of .*{name}=3, expected a single picture"):
        train.task_from_folder(tmp_path)


def test_a_camera_that_leaves_a_preview_beside_its_picture_is_no_animation(tmp_path):
    animated(tmp_path/"a.jpg", 2, format="MPO")
    assert Image.open(tmp_path/"a.jpg").n_frames == 2 and train.read_picture(tmp_path/"a.jpg").shape == (8, 8, 3)


# --- paths

TAKE_PATHS = dict(
    open_fit=run.open_fit, open_run=run.open_run, run_status=run.run_status, watch_text=run.watch_text,
    write_report=run.write_report, export_run=run.export_run, load_checkpoint=record.load_checkpoint,
    save_checkpoint=record.save_checkpoint, read_checkpoint=record.read_checkpoint, read_rows=record.read_rows,
    load_tensors=record.load_tensors, new_run=record.new_run, task_from_folder=train.task_from_folder,
    task_from_table=train.task_from_table, task_from_text=train.task_from_text, task_from_path=train.task_from_path,
    load_comparison=run.Comparison.load,
    begin_run=lambda out: begin_run(get_recipe("digits_impaired"), out),
    begin_fit=lambda out: begin_fit(new_population("digits", FitConfig(lanes=1, epochs=1, workers=1)), out))

@pytest.mark.parametrize("wrong", [3, None, "", ["runs", 3]], ids=repr)
@pytest.mark.parametrize("name", TAKE_PATHS)
def test_what_is_no_path_is_refused_by_name(name, wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match="(path|out)=.*, expected"): TAKE_PATHS[name](wrong)
    assert list(tmp_path.iterdir()) == []


def test_the_home_folder_may_be_meant(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/")
    folder = record.new_run("~/runs", "mine", {})
    assert folder.path == tmp_path/"runs"/"mine" and record.open_folder("~/runs/mine").config() == {}


def test_a_state_that_is_kept_in_memory_stays_as_it_was_and_may_be_loaded_twice():
    one = counting()
    for _ in range(8): one.step() # the optimizer has moments
    kept, there = one.state_dict(), one.stream.envs.state_dict()
    ends = []
    for _ in range(3):
        one.load_state_dict(kept)
        one.stream.envs.load_state_dict(there)
        ends.append(list(train_ppo(one)))
    assert ends[0] == ends[1] == ends[2]


def pictures(root, shade=200):
    for i in range(12):
        (root/"ab"[i % 2]).mkdir(exist_ok=True, parents=True)
        Image.new("L", (8, 8), shade + i).save(root/"ab"[i % 2]/f"{i}.png")
    return root

def test_pictures_that_have_no_class_are_not_left_out_in_silence(tmp_path):
    stray = pictures(tmp_path/"in")/"stray.png"
    for name in ("README.md", "._a.png"): (tmp_path/"in"/name).write_text("of whoever took them, and of a Mac")
    assert train.task_from_folder(tmp_path/"in").notes == ()
    Image.new("L", (8, 8)).save(stray)
    with pytest.raises(ValueError, match=r"beside the folders=\['stray.png'\], expected none; put them into"):
        train.task_from_folder(tmp_path/"in")
    with pytest.raises(ValueError, match="if .*in holds the classes, name that one"): train.task_from_folder(tmp_path)
    with pytest.raises(ValueError, match=r"folders in .*=\[\], expected one for each class"):
        train.task_from_folder(tmp_path/"in"/"a")


def test_pictures_that_are_nearly_black_are_told(tmp_path):
    [note] = train.task_from_folder(pictures(tmp_path, 0)).notes # of 12 bits in files of 16, say
    assert note.startswith("the brightest pixel is 11 of 255")


def test_classes_that_differ_in_their_capitals_are_told(tmp_path):
    (tmp_path/"a.csv").write_text("x,y\n" + "\n".join(f"{i},{('yes', 'no', 'No')[i % 3]}" for i in range(30)))
    assert "y: No, no differ in their capitals only, and are classes each" in train.task_from_table(
        tmp_path/"a.csv").notes


# --- rows of the tables, done wrong: what is said names the row, what it gave, and what is expected

def small(**more):
    return GrowVecEnv(task="digits_impaired", num_envs=2, horizon=2, limit=64, workers=1, **more)

def wait(env):
    env.reset(seed=0)
    env.step([[0] * 8] * 2)


@pytest.mark.parametrize("read, given, said", [
    (lambda v: v.history.lr, (0., 1., None), r"values of mine='NaN', expected numbers; where they may be missing"),
    (lambda v: v.history.lr, (0., 1.), r"range of mine=\(0.0, 1.0\), expected three numbers")])
def test_an_observation_that_is_missing_needs_a_number_for_that(read, given, said):
    row = Observation("mine", "1", given, "learning rate, before the first epoch none", read, per="lane")
    try:
        with pytest.raises(ValueError, match=said):
            register_observation(row)
            wait(small())
        OBSERVATIONS.pop("mine", None)
        register_observation(row._replace(name="other", range=(0., 1., -1.)))
        wait(small())
    finally:
        for name in ("mine", "other"): OBSERVATIONS.pop(name, None)


@pytest.mark.parametrize("legal, decide, said", [
    (lambda v: True, lambda c: Decision(), "legal of mine returns=True, expected a bool for each lane and slot"),
    (lambda v: torch.ones(2, dtype=torch.bool), lambda c: Decision(), r"legal of mine returns='torch.bool \(2,\)'"),
    (lambda v: v.in_stage(Stage.DORMANT).double(), lambda c: Decision(), "legal of mine returns='torch.float64"),
    (lambda v: v.in_stage(Stage.DORMANT), lambda c: "prune", "what mine decides='prune', expected a Decision")])
def test_an_operation_is_told_what_its_functions_return(legal, decide, said):
    register_operation(Operation("mine", ("slot",), legal, decide, "whatever the case says"))
    try:
        with pytest.raises(ValueError, match=said):
            env = small(repertoire=Repertoire((*OPS, "mine"), several=True))
            env.reset(seed=0)
            env.step(env.actions.encode(Choice("mine", env.actions.slots[0])).expand(2, -1))
    finally: del OPERATIONS["mine"]


@pytest.mark.parametrize("register, said", [
    (register_observation, "row='mine', expected an Observation"), (register_operation, "expected an Operation"),
    (reward_term, "term='mine', expected a function")])
def test_what_is_no_row_is_refused(register, said):
    with pytest.raises(ValueError, match=said): register("mine")


def test_a_blueprint_without_arguments_is_told_which_it_takes():
    with pytest.raises(ValueError, match=r"arguments of mine=\[\], expected channels, lanes"):
        blueprint("mine", "cnn", 9)(lambda: nn.Identity())


class Worded:
    "A rule that answers with a word."
    def signals(self): return None
    def act(self, v): return "norm"

@pytest.mark.parametrize("player, said", [
    (lambda: as_player(lambda v: "norm"), "what choose returns='norm', expected a Decision to germinate"),
    (lambda: as_player(lambda v: 3), "what choose returns=3, expected a Decision to germinate"),
    (lambda: RulePlayer(Worded()), "decision of a rule='norm', expected a Decision, such as")])
def test_a_rule_is_told_to_decide(player, said):
    env, rule = small(), player()
    env.reset(seed=0)
    rule.begin(env)
    with pytest.raises(ValueError, match=said): rule.act(env)


def kept(table): return dict(a=torch.zeros(len(table)))

@pytest.mark.parametrize("row, said", [
    (3, "preset mine=3, expected a RewardPreset"),
    (RewardPreset({}, kept, lambda i: {}), r"weights of mine=\{\}, expected a finite number for each term"),
    (RewardPreset(dict(price="1"), kept, lambda i: {}), "weights of mine=.*'1'.*, expected a finite number"),
    (RewardPreset(dict(price=math.nan), kept, lambda i: {}), "weights of mine=.*nan.*, expected a finite number"),
    (RewardPreset(dict(nothing=1.), lambda t: None, lambda i: {}), "what start of mine returns=None, expected tensors"),
    (RewardPreset(dict(nothing=1.), lambda t: dict(a=torch.zeros(7)), lambda i: {}), r"what start of mine .*\(7,\)"),
    (RewardPreset(dict(nothing=1.), kept, lambda i: None), "what remember of mine returns=None, expected tensors"),
    (RewardPreset(dict(nothing=1.), kept, lambda i: dict(a=1.)), "what remember of mine returns=.*1.0.*, expected"),
    (RewardPreset(dict(nothing=1.), kept, lambda i: {}), r"what remember of mine returns=\[\], expected what start")])
def test_a_preset_is_told_what_its_row_lacks(row, said):
    def nothing(i):
        "nothing at all, and of a tensor that has a gradient"
        return torch.zeros(2, requires_grad=True)
    reward_term(nothing)
    PRESETS["mine"] = row
    try:
        with pytest.raises(ValueError, match=said): wait(small(reward="mine"))
        PRESETS["mine"] = RewardPreset(dict(nothing=1.), kept, lambda i: dict(i.state))
        wait(small(reward="mine"))
    finally: del PRESETS["mine"], TERMS["nothing"]


# --- decisions, metrics and recipes

@pytest.mark.parametrize("decision, said", [
    (Decision("germinate", "r0c0", "norm", settings=dict(speed=3)), r"settings of germinate=\{'speed': 3\}.*: blend"),
    (Decision("set_alpha", "r0c0"), r"settings of set_alpha=\{\}, .* by name: target \(needed\), steps"),
    (Decision("schedule_prune", "r0c0", settings=dict(step=3)), r"settings of schedule_prune.*steps \(needed\)"),
    (Decision("prune", "r0c0", settings=dict(lanes=[0])), "settings of prune=.*'lanes'")])
def test_settings_of_a_decision_that_its_verb_does_not_take_are_named(decision, said):
    pop = new_population("digits_impaired", FitConfig(lanes=2, epochs=1, workers=1))
    with pytest.raises(ValueError, match=said): list(train.fit(pop, controller=lambda pop, last: [decision, None]))
    ends = [Decision("germinate", "r0c0", "norm", settings=dict(tempo=3, goal=.5)), None]
    [result] = train.fit(pop, controller=lambda pop, last: ends)
    assert [d.ok for d in result.decided] == [True]


@pytest.mark.parametrize("metrics, said", [
    (3, "metrics=3, expected values by name"), ([1.], r"metrics=\[1.0\], expected values by name"),
    ({3: 1.}, r"names of metrics=\[3\], expected words"), ({" ": 1.}, r"names of metrics=\[' '\], expected words"),
    (dict(large=10**400), "large=1000.*expected a number, or one of each of the 2 lanes")])
def test_a_metric_has_a_name_and_a_number(metrics, said, tmp_path):
    a_run = begin_fit(new_population("digits", FitConfig(lanes=2, epochs=2, workers=1)), tmp_path)
    for result in a_run.epochs():
        with pytest.raises(ValueError, match=said): a_run.log(metrics)
        a_run.log({"acc, %": 97.}, gap=[1., 2.])
    assert sum(r["kind"] == "metric" and "own.gap" in r for r in a_run.folder.rows()) == 4


def test_a_recipe_is_a_function_with_a_name_that_returns_settings():
    with pytest.raises(ValueError, match="recipe='mine', expected a function with a name"): run.register_recipe("mine")
    with pytest.raises(ValueError, match="expected a function with a name"): run.register_recipe(lambda: 3)
    @run.register_recipe
    def returns_three(): return 3
    try:
        with pytest.raises(ValueError, match="what the recipe returns_three returns=3, expected a RunConfig"):
            get_recipe("returns_three")
    finally: del run.recipes._recipes["returns_three"] # noqa: SLF001


# --- learners

def learner_of(num_envs=2, num_steps=4):
    settings = PPOConfig(num_steps=num_steps, num_updates=2, num_minibatches=1)
    return Learner(gym.make_vec("CartPole-v1", num_envs=num_envs), settings, PolicyConfig(hidden=8, features=(8,)))

def stepped(learner):
    learner.step()
    return learner

@pytest.mark.parametrize("state, said", [
    (lambda: None, "state=None, expected what `state_dict` of a Learner returned"),
    (lambda: nn.Linear(2, 2).state_dict(), r"state=\['bias', 'weight'\], expected what"),
    (lambda: learner_of(3).state_dict(), r"'observations': \(\(3, 4\), \(2, 4\)\)"),
    (lambda: Learner(gym.make_vec("Acrobot-v1", num_envs=2), PPOConfig(num_steps=4, num_minibatches=1), PolicyConfig(
        hidden=8, features=(8,))).state_dict(), r"'logits_weight': \(.*expected the same in both"),
    (lambda: stepped(learner_of(num_steps=5)).state_dict(), r"'rollout': \(\(5, 2, 4\), \(4, 2, 4\)\)")])
def test_a_state_of_another_learner_changes_nothing(state, said):
    one, two = learner_of(), learner_of()
    with pytest.raises(ValueError, match=said): one.load_state_dict(state())
    assert list(train_ppo(one)) == list(train_ppo(two))


@pytest.mark.parametrize("call, said", [
    (lambda: list(train_ppo(None)), "learner=None, expected a Learner"),
    (lambda: list(train_ppo(learner_of(), best=3)), r"best=3, expected a BestPolicy\(envs\), or None"),
    (lambda: BestPolicy(None), "envs='NoneType', expected a vector environment"),
    (lambda: learn.play(None, gym.make_vec("CartPole-v1", num_envs=2)), "policy=None, expected a Learner"),
    (lambda: learn.play(learner_of(), gym.make_vec("CartPole-v1", num_envs=2), 0), "episodes=0, expected a whole"),
    (lambda: run.growth_rule(3), "rule=3, expected one of PPO"),
    (lambda: sb3_env(3), "envs='int', expected a vector environment")])
def test_what_is_no_learner_policy_or_rule_is_refused_by_name(call, said):
    with pytest.raises(ValueError, match=said): call()


@pytest.mark.parametrize("example, said", [
    (torch.ones(1, 3), r"example=\(1, 3\), expected a batch that one lane takes; it raised RuntimeError"),
    (None, r"example=NoneType, expected a batch that one lane takes; it raised TypeError")])
def test_an_export_names_an_example_that_the_network_does_not_take(example, said):
    model = attach_slots(nn.Sequential(nn.Linear(2, 4)), ["0"], torch.ones(1, 2), layouts={"0": "BD"})
    with pytest.raises(ValueError, match=said): export_model(model, 0, example)
