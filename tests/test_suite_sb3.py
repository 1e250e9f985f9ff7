"Stable-Baselines3's and sb3-contrib's algorithms, wrappers and callbacks on our lanes, and on its own of the same."
import warnings

import numpy as np
import pytest
import torch

from tests.test_sb3_lanes import N, dummy_counter, dummy_grow, own_counter, own_grow, same
from tests.test_suite_gymnasium import makers, without_times

sb3 = pytest.importorskip("stable_baselines3", reason="the adapter needs: pip install 'esper_nb[bench]'")
contrib = pytest.importorskip("sb3_contrib", reason="the adapter needs: pip install 'esper_nb[bench]'")
from sb3_contrib.common.maskable.callbacks import MaskableEvalCallback
from sb3_contrib.common.maskable.evaluation import evaluate_policy as evaluate_masked
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
from stable_baselines3.common import callbacks as calls
from stable_baselines3.common.env_checker import check_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.logger import configure
from stable_baselines3.common.utils import get_system_info
from stable_baselines3.common.vec_env import (
    VecCheckNan, VecFrameStack, VecMonitor, VecNormalize, VecVideoRecorder, sync_envs_normalization,
    unwrap_vec_normalize, unwrap_vec_wrapper)

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]


def numbered_grow(render_mode=None):
    "Lanes with one seed, which their numbers tell apart, as ours are; the library's own way is a seed for each."
    envs = dummy_grow(render_mode)
    envs.seed = lambda seed=None: setattr(envs, "_seeds", [seed] * N) or [seed] * N
    return envs

PAIRS = dict(grow=(own_grow, numbered_grow), counter=(own_counter, dummy_counter))
SMALL_STEPS = dict(n_steps=6, seed=0, device="cpu")
BATCHES = dict(batch_size=9, n_epochs=2)
REPLAYED = dict(seed=0, device="cpu", learning_starts=6, batch_size=6, buffer_size=60)
ALGORITHMS = dict(
    ppo=lambda e: sb3.PPO("MlpPolicy", e, **SMALL_STEPS, **BATCHES),
    a2c=lambda e: sb3.A2C("MlpPolicy", e, **SMALL_STEPS),
    trpo=lambda e: contrib.TRPO("MlpPolicy", e, **SMALL_STEPS, batch_size=9),
    masks=lambda e: contrib.MaskablePPO("MlpPolicy", e, **SMALL_STEPS, **BATCHES),
    memory=lambda e: contrib.RecurrentPPO("MlpLstmPolicy", e, **SMALL_STEPS, **BATCHES,
                                          policy_kwargs=dict(lstm_hidden_size=8)),
    dqn=lambda e: sb3.DQN("MlpPolicy", e, **REPLAYED), qrdqn=lambda e: contrib.QRDQN("MlpPolicy", e, **REPLAYED))
UNFIT = dict(masks="counter", dqn="grow", qrdqn="grow") # it has no masks; these take one number as an action
LEARNED = [(a, p) for a in ALGORITHMS for p in PAIRS if p != UNFIT.get(a)]


def weights(agent): return torch.cat([p.detach().flatten() for p in agent.policy.parameters()])
def both(pair, f): # the same of ours and of theirs
    "What a function of an environment says of each of a pair."
    return [f(make) for make in PAIRS[pair]]
def episodes(agent): return [(e["r"], e["l"]) for e in agent.ep_info_buffer]


@pytest.mark.parametrize("render_mode", [None, "rgb_array"])
def test_its_checker_finds_nothing(render_mode):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_env(makers(render_mode)[0](), skip_render_check=render_mode is None)


@pytest.mark.parametrize("algorithm, pair", LEARNED)
def test_what_is_saved_goes_on_the_same(algorithm, pair, tmp_path):
    def learned(make):
        agent = ALGORITHMS[algorithm](VecMonitor(make())).learn(18)
        agent.save(tmp_path/"agent")
        again = type(agent).load(tmp_path/"agent", env=VecMonitor(make()), device="cpu")
        assert torch.equal(weights(agent), weights(again))
        state, action = again.env.reset(), None
        action = again.predict(state, deterministic=True)[0]
        again.set_env(VecMonitor(make()))
        again.learn(18, reset_num_timesteps=False)
        return action, weights(again), again.num_timesteps, episodes(agent), episodes(again)
    ours, theirs = both(pair, learned)
    assert same(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1]) and ours[2] == theirs[2] >= 36
    assert ours[3:] == theirs[3:] and len(ours[3]) >= 3


# ---- wrappers

WRAPPERS = dict(
    normal=VecNormalize, rewards=lambda e: VecNormalize(e, norm_obs=False),
    observed=lambda e: VecNormalize(e, norm_reward=False),
    stack=lambda e: VecFrameStack(e, 2), deep=lambda e: VecFrameStack(e, 4), monitor=VecMonitor,
    finite=lambda e: VecCheckNan(e, raise_exception=True), all=lambda e: VecFrameStack(VecNormalize(VecMonitor(e)), 2))

@pytest.mark.parametrize("name, pair", [*((name, "grow") for name in WRAPPERS), ("all", "counter")])
def test_wrappers_make_the_same_of_it(name, pair):
    def played(make):
        envs = WRAPPERS[name](make())
        envs.seed(4)
        envs.action_space.seed(4)
        out = [envs.reset()]
        for _ in range(9): out.append(envs.step(np.stack([envs.action_space.sample() for _ in range(N)])))
        return [without_times(list(x)) if isinstance(x, tuple) else x for x in out], envs.unwrapped.reset_infos
    ours, theirs = both(pair, played)
    assert same(list(ours[0]), list(theirs[0])) and same(ours[1], theirs[1])


@pytest.mark.parametrize("pair", PAIRS)
def test_statistics_are_saved_and_shared(pair, tmp_path):
    def told(make):
        envs, test = VecNormalize(make()), VecNormalize(make(), training=False)
        envs.reset()
        for _ in range(5): envs.step(np.zeros((N, *envs.action_space.shape), int))
        envs.save(tmp_path/"statistics")
        loaded = VecNormalize.load(tmp_path/"statistics", make())
        sync_envs_normalization(envs, test)
        assert unwrap_vec_normalize(loaded) is loaded and unwrap_vec_wrapper(loaded, VecMonitor) is None
        return [x for e in (loaded, test) for x in (e.obs_rms.mean, e.obs_rms.var, e.obs_rms.count, e.reset())]
    assert same(*both(pair, told))


@pytest.mark.parametrize("pair", PAIRS)
def test_a_file_of_episodes(pair, tmp_path):
    def told(make):
        path = tmp_path/make.__name__
        agent = sb3.A2C("MlpPolicy", VecMonitor(make(), str(path)), n_steps=6, seed=0, device="cpu").learn(36)
        agent.env.close()
        return [line.rsplit(",", 1)[0] for line in path.with_suffix(".monitor.csv").read_text().splitlines()[1:]]
    ours, theirs = both(pair, told)
    assert ours == theirs and len(ours) > 6


@pytest.mark.parametrize("pair", PAIRS)
def test_videos(pair, tmp_path):
    pytest.importorskip("moviepy", reason="videos need: pip install 'esper_nb[video]'")
    for make in PAIRS[pair]:
        envs = VecVideoRecorder(make("rgb_array"), str(tmp_path/make.__name__), lambda t: t == 0, video_length=4)
        envs.reset()
        for _ in range(5): envs.step(np.zeros((N, *envs.action_space.shape), int))
        envs.close()
        assert all(f.stat().st_size > 500 for f in tmp_path.glob(f"{make.__name__}/*.mp4"))
    assert len(list(tmp_path.glob("*/*.mp4"))) == 2


# ---- callbacks, evaluation, logs

def count(say):
    "A callback that says something at each step."
    return calls.ConvertCallback(lambda local, _: say(len(local["infos"])))
CALLBACKS = dict(
    saves=lambda make, to: calls.CheckpointCallback(6, str(to), save_vecnormalize=True),
    episodes=lambda make, to: calls.StopTrainingOnMaxEpisodes(2),
    reward=lambda make, to: calls.EvalCallback(VecMonitor(make()), eval_freq=4, verbose=0,
                                               callback_on_new_best=calls.StopTrainingOnRewardThreshold(-99.)),
    no_better=lambda make, to: calls.EvalCallback(
        VecMonitor(make()), eval_freq=2, verbose=0,
        callback_after_eval=calls.StopTrainingOnNoModelImprovement(1, min_evals=1)),
    every=lambda make, to: calls.EveryNTimesteps(6, calls.CheckpointCallback(1, str(to))),
    evaluate=lambda make, to: calls.EvalCallback(VecMonitor(make()), n_eval_episodes=4, eval_freq=4, log_path=str(to),
                                                 best_model_save_path=str(to), verbose=0),
    log=lambda make, to: calls.LogEveryNTimesteps(6), bar=lambda make, to: calls.ProgressBarCallback(),
    listed=lambda make, to: calls.CallbackList([calls.StopTrainingOnMaxEpisodes(2), count(lambda n: n == N)]))

@pytest.mark.parametrize("name, pair", [*((name, "grow") for name in CALLBACKS), *(
    (name, "counter") for name in ("saves", "evaluate", "listed"))])
def test_callbacks_do_the_same(name, pair, tmp_path):
    def learned(make):
        to = tmp_path/make.__name__
        agent = sb3.PPO("MlpPolicy", VecMonitor(make()), **SMALL_STEPS, **BATCHES)
        agent.learn(36, callback=CALLBACKS[name](make, to))
        found = to/"evaluations.npz"
        scores = np.load(found)["results"] if found.exists() else np.zeros(0)
        return agent.num_timesteps, sorted(f.name for f in to.glob("*")), scores, weights(agent)
    ours, theirs = both(pair, learned)
    assert ours[:2] == theirs[:2] and same(ours[2], theirs[2]) and torch.equal(ours[3], theirs[3])
    assert (ours[0] < 36) == (name in ("episodes", "reward", "no_better", "listed"))
    assert bool(ours[1]) == (name in ("evaluate", "saves", "every"))


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("deterministic", [True, False])
def test_evaluation_is_the_same(pair, deterministic):
    def told(make):
        agent = ALGORITHMS["ppo"](VecMonitor(make()))
        return evaluate_policy(agent, VecMonitor(make()), 7, deterministic=deterministic, return_episode_rewards=True)
    assert same(*both(pair, told))


@pytest.mark.slow
def test_masks_reach_the_agent_that_reads_them(tmp_path):
    def told(make):
        agent = ALGORITHMS["masks"](VecMonitor(make()))
        agent.learn(36, callback=MaskableEvalCallback(VecMonitor(make()), n_eval_episodes=4, eval_freq=4, verbose=0,
                                                      log_path=str(tmp_path)))
        assert is_masking_supported(agent.env)
        obs, masks = agent.env.reset(), get_action_masks(agent.env)
        scores = np.load(tmp_path/"evaluations.npz")["results"]
        masked = agent.predict(obs, action_masks=masks, deterministic=True)[0]
        tested = evaluate_masked(agent, VecMonitor(make()), 5, return_episode_rewards=True)
        return masks, masked, scores, tested, weights(agent)
    ours, theirs = both("grow", told)
    assert same(ours[:4], theirs[:4]) and torch.equal(ours[4], theirs[4])


@pytest.mark.parametrize("kind", ["csv", "json", "log", pytest.param("tensorboard", marks=pytest.mark.slow)])
def test_logs_have_the_same_columns(kind, tmp_path):
    if kind == "tensorboard": pytest.importorskip("tensorboard")
    def told(make):
        agent = sb3.PPO("MlpPolicy", VecMonitor(make()), **SMALL_STEPS, **BATCHES)
        logger = configure(str(tmp_path/make.__name__), [kind])
        agent.set_logger(logger)
        seen = []
        write = logger.dump
        def dump(step=0):
            seen.append({k: v for k, v in logger.name_to_value.items() if not k.startswith("time/")})
            write(step)
        logger.dump = dump
        agent.learn(36)
        return seen
    ours, theirs = both("grow", told)
    assert same(ours, theirs) and "rollout/ep_rew_mean" in ours[-1] and get_system_info(print_info=False)
