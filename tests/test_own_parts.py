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

import esper_nb.record as record
import esper_nb.run as run
import esper_nb.train as train
from esper_nb import (
    FitConfig, Learner, ModuleHostConfig, PolicyConfig, PPOConfig, begin_fit, begin_run, explore_host, get_recipe,
    new_population, train_ppo)
from esper_nb.control import PRESETS, TERMS, RewardConfig, reward_term
from test_rewards import fresh, play # noqa: F401
from esper_nb.grow import SeedState

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
    (tmp_path/"in"/"README.md").write_text("of whoever took them")
    assert train.task_from_folder(tmp_path/"in").notes == ()
    Image.new("L", (8, 8)).save(stray)
    with pytest.raises(ValueError, match=r"beside the folders=\['stray.png'\], expected none; put them into"):
        train.task_from_folder(tmp_path/"in")
    with pytest.raises(ValueError, match="if .*in holds the classes, name that one"): train.task_from_folder(tmp_path)


def test_pictures_that_are_nearly_black_are_told(tmp_path):
    [note] = train.task_from_folder(pictures(tmp_path, 0)).notes # of 12 bits in files of 16, say
    assert note.startswith("the brightest pixel is 11 of 255")


def test_classes_that_differ_in_their_capitals_are_told(tmp_path):
    (tmp_path/"a.csv").write_text("x,y\n" + "\n".join(f"{i},{('yes', 'no', 'No')[i % 3]}" for i in range(30)))
    assert "y: No, no differ in their capitals only, and are classes each" in train.task_from_table(
        tmp_path/"a.csv").notes
