"""PPO measured: does it learn, remember, obey masks, survive kills, and how fast is its update?

    python -m benchmarks.ppo_bench all                     # a quarter of an hour on one core
    python -m benchmarks.ppo_bench cartpole speed          # some sections
    python -m benchmarks.ppo_bench hidden_sb3_0            # and the ones that `all` leaves out: minutes for each seed

Writes nbs/explanations/ppo_bench.json, section by section; nbs/explanations/results.ipynb shows it.
Where a section says no more, `PPOConfig()` and `PolicyConfig()` are as they come, and the seeds are 10 to 14: those
with smaller numbers were looked at while the defaults were chosen.
The other libraries must be there: pip install stable-baselines3 sb3-contrib
"""
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import SyncVectorEnv

from esper_nb.core.devices import generator
from esper_nb.learn.distributions import Heads, choose
from esper_nb.learn.learner import Learner, train_ppo
from esper_nb.learn.loss import PPOConfig
from esper_nb.learn.policies import PolicyConfig
from esper_nb.learn.rollouts import play
from esper_nb.record.checkpoints import previous_checkpoint, read_checkpoint, write_checkpoint

STORED = Path(__file__).resolve().parents[1]/"nbs/explanations/ppo_bench.json"


FRESH = range(10, 15) # seeds that no setting was chosen with


def learn(envs, test, config, policy, episodes=100, updates=None):
    "Train, then play; the curve, the mean of the final returns and the time."
    begun, learner, curve, gap = time.time(), Learner(envs, config, policy), [], 0.
    for u in train_ppo(learner, updates):
        gap = max(gap, u.first_gap)
        if u.returns: curve.append([u.env_steps, float(np.mean(u.returns))])
    trained = time.time() - begun
    returns = play(learner.policy, test, episodes, seed=1000 + config.seed, view=learner.view)
    return dict(steps=learner.env_steps, curve=curve[::max(1, len(curve) // 60)], mean=float(np.mean(returns)),
                seconds=round(trained, 1), first_gap=gap)


# --- CartPole: 100,000 steps, eight environments; SB3 with its own tuned settings

def cartpole(n=8, hide=False):
    "Vectorised CartPole, with or without its velocities."
    envs = gym.make_vec("CartPole-v1", num_envs=n, vectorization_mode="vector_entry_point")
    return Hidden(envs) if hide else envs


class Hidden(gym.vector.VectorObservationWrapper):
    "CartPole without its two velocities: one observation does not say where the pole is going."
    def __init__(self, envs):
        super().__init__(envs)
        box = envs.single_observation_space
        self.single_observation_space = gym.spaces.Box(box.low[[0, 2]], box.high[[0, 2]])
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, envs.num_envs)

    def observations(self, obs): return obs[:, [0, 2]]


class HiddenOne(gym.ObservationWrapper):
    "The same for one environment."
    def __init__(self, env):
        super().__init__(env)
        box = env.observation_space
        self.observation_space = gym.spaces.Box(box.low[[0, 2]], box.high[[0, 2]])

    def observation(self, obs): return obs[[0, 2]]


def ours_cartpole(seed):
    "CartPole with the default settings: 97 updates of 100 are 99,328 steps."
    return learn(cartpole(), cartpole(10), PPOConfig(seed=seed), PolicyConfig(), updates=97)


def falling(start):
    "A setting that falls to 0 along a line, as Stable-Baselines3 wants it."
    return lambda left: start * left


def sb3_cartpole(seed):
    "The same with Stable-Baselines3's PPO."
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    model = PPO("MlpPolicy", make_vec_env("CartPole-v1", 8, seed=seed), seed=seed, n_steps=32, batch_size=256,
                gae_lambda=0.8, gamma=0.98, n_epochs=20, ent_coef=0., learning_rate=falling(1e-3),
                clip_range=falling(0.2), device="cpu")
    begun = time.time()
    model.learn(390 * 32 * 8)
    trained = time.time() - begun
    mean, _ = evaluate_policy(model, make_vec_env("CartPole-v1", 10, seed=1000 + seed), 100)
    return dict(steps=model.num_timesteps, mean=float(mean), seconds=round(trained, 1))


# --- the same without velocities: only memory helps

def ours_hidden(seed, core):
    "CartPole without velocities, with a memory or without; all other settings are the defaults."
    config, policy = PPOConfig(seed=seed), PolicyConfig(core=core)
    return learn(cartpole(hide=True), cartpole(10, hide=True), config, policy, updates=97)


def sb3_hidden(seed):
    "The same with sb3-contrib's RecurrentPPO; minutes for each seed."
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize
    def make(n, s): return make_vec_env("CartPole-v1", n, seed=s, wrapper_class=HiddenOne)
    envs = VecNormalize(make(8, seed))
    model = RecurrentPPO("MlpLstmPolicy", envs, seed=seed, n_steps=128, batch_size=256, n_epochs=8, gamma=0.99,
                         gae_lambda=0.95, ent_coef=0., learning_rate=falling(1e-3), device="cpu",
                         policy_kwargs=dict(lstm_hidden_size=64, net_arch=dict(pi=[], vf=[64])))
    begun = time.time()
    model.learn(97 * 128 * 8)
    trained = time.time() - begun
    test = VecNormalize(make(10, 1000 + seed), training=False, norm_reward=False)
    test.obs_rms = envs.obs_rms
    mean, _ = evaluate_policy(model, test, 100)
    return dict(steps=model.num_timesteps, mean=float(mean), seconds=round(trained, 1))


# --- a task that needs memory and masks

class Cue(gym.Env):
    "A cue at the first step, a wait, then the cue must be chosen among many illegal actions."
    observation_space, action_space = gym.spaces.Box(0, 1, (6,)), gym.spaces.Discrete(12)

    def __init__(self, masked=True): self.masked = masked

    def action_masks(self): return np.arange(12) < 4

    def _out(self):
        obs = np.zeros(6, np.float32)
        obs[4], obs[5] = self.t == 0, self.t == 5
        if self.t == 0: obs[self.cue] = 1
        return obs, {"action_mask": self.action_masks().astype(np.int8)} if self.masked else {}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.cue = 0, int(self.np_random.integers(4))
        return self._out()

    def step(self, action):
        end, legal, right = self.t == 5, action < 4, action == self.cue
        self.t += 1
        obs, info = self._out()
        return obs, float(end and right) if legal else -1., bool(end or not legal), False, info


def ours_cue(seed, core, masked):
    "With memory, masks, or both."
    def make(): return SyncVectorEnv([lambda: Cue(masked)] * 16)
    config = PPOConfig(seed=seed, num_updates=50, num_steps=24, learning_rate=5e-3)
    return learn(make(), make(), config, PolicyConfig(core=core, features=(16,), hidden=32), 160)


def default_cue(seed):
    "The same with the default settings."
    def make(): return SyncVectorEnv([Cue] * 8)
    return learn(make(), make(), PPOConfig(seed=seed), PolicyConfig(), 160, updates=97)


def sb3_play(model, masked):
    "Returns of 160 episodes."
    returns, env = [], Cue()
    for episode in range(160):
        obs, state, first, total, end = env.reset(seed=episode)[0], None, np.ones(1, bool), 0., False
        while not end:
            if masked: action, _ = model.predict(obs, action_masks=env.action_masks(), deterministic=True)
            else: action, state = model.predict(obs, state=state, episode_start=first, deterministic=True)
            obs, reward, end, _, _ = env.step(int(action))
            total += reward
            first = np.zeros(1, bool)
        returns.append(total)
    return returns


def sb3_cue(seed, masked):
    "sb3-contrib has masks or memory, not both."
    from sb3_contrib import MaskablePPO, RecurrentPPO
    from stable_baselines3.common.env_util import make_vec_env
    envs = make_vec_env(Cue, 16, seed=seed)
    common = dict(seed=seed, n_steps=24, batch_size=96, n_epochs=4, learning_rate=falling(5e-3), ent_coef=0.01,
                  device="cpu")
    shape = dict(lstm_hidden_size=32, net_arch=dict(pi=[], vf=[]))
    model = (MaskablePPO("MlpPolicy", envs, **common) if masked else
             RecurrentPPO("MlpLstmPolicy", envs, policy_kwargs=shape, **common))
    begun = time.time()
    model.learn(50 * 24 * 16)
    trained = time.time() - begun
    return dict(steps=model.num_timesteps, mean=float(np.mean(sb3_play(model, masked))), seconds=round(trained, 1))


# --- speed of an update, the two learners in turn in one process

class Noise(gym.Env):
    "Random observations; an episode ends at random, or after 150 steps."
    observation_space, action_space = gym.spaces.Box(-9, 9, (128,)), gym.spaces.Discrete(6)

    def __init__(self, share=0.): self.share = share

    def look(self): return self.np_random.normal(size=128).astype(np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.look(), {}

    def step(self, action):
        self.t += 1
        end = self.t >= 150 or self.np_random.random() < self.share
        return self.look(), float(self.np_random.normal()), end, False, {}


def our_update(width, share, parts):
    "A function that runs one update, without the acting."
    envs = SyncVectorEnv([lambda: Noise(share)] * 8, autoreset_mode="SameStep")
    config = PPOConfig(num_steps=150, num_minibatches=parts, update_epochs=4, max_grad_norm=0.5)
    return sweeps(Learner(envs, config, PolicyConfig(features=(), hidden=width, actor=64, critic=(64, 64))))


def sweeps(learner):
    "A function that learns from one and the same rollout as an update does."
    learner.reset()
    while not learner.rollout.full: learner.step_envs()
    learner.compute_targets()
    def update():
        for sweep in range(learner.config.update_epochs):
            for b in learner.rollout.minibatches(learner.config.num_minibatches, generator(0, "sweep", sweep)):
                learner.learn(b)
    return update


def sb3_update(width, share, parts):
    "The same of RecurrentPPO, with as many weights."
    from sb3_contrib import RecurrentPPO
    from stable_baselines3.common.logger import Logger
    from stable_baselines3.common.vec_env import DummyVecEnv
    shape = dict(lstm_hidden_size=width, shared_lstm=True, enable_critic_lstm=False,
                 net_arch=dict(pi=[64], vf=[64, 64]))
    model = RecurrentPPO("MlpLstmPolicy", DummyVecEnv([lambda: Noise(share)] * 8), seed=0, n_steps=150,
                         batch_size=1200 // parts, n_epochs=4, device="cpu", policy_kwargs=shape)
    model.learn(1200)
    model.set_logger(Logger(None, []))
    return model.train


def seconds_in_turns(functions, repeat):
    "CPU seconds of some calls of each, taken in turns: what other programs do meanwhile counts little."
    times = [[] for _ in functions]
    for _ in range(repeat):
        for f, seconds in zip(functions, times):
            begun = time.process_time()
            f()
            seconds.append(time.process_time() - begun)
    return times


def in_turns(functions, repeat):
    "Fastest of some calls of each, in CPU seconds."
    return [min(seconds) for seconds in seconds_in_turns(functions, repeat)]


def times_ours(ours, theirs):
    "How many times our seconds theirs are: median over the turns, and the 95 % interval of that median."
    ratios, n = sorted(t / o for o, t in zip(ours, theirs)), len(ours)
    outside = max(0, int((n - 1.96 * n ** 0.5) / 2)) # ranks that the interval leaves out at each end
    return [round(ratios[i], 2) for i in (n // 2, outside, n - 1 - outside)]


def speed(repeat=4):
    "Both updates for some numbers of minibatches, widths and places where episodes end."
    out = {}
    for parts in (4, 2, 1):
        for width in (128, 512):
            for name, share in (("together", 0.), ("inside", 0.025)):
                pair = [our_update(width, share, parts), sb3_update(width, share, parts)]
                ours, theirs = in_turns(pair, repeat)
                out[f"{parts} × {width} {name}"] = dict(
                    ours_ms=round(ours * 1e3, 1), sb3_ms=round(theirs * 1e3, 1), ratio=round(theirs / ours, 2))
    return out


# --- steps a second on CartPole: acting and learning, three programs in turns in one process

PACE = dict(num_steps=128, num_minibatches=4, update_epochs=4, learning_rate=2.5e-4, ent_coef=0.01)


def our_learner(n):
    "Sb3's networks, and nothing normalised."
    config = PPOConfig(**PACE, num_updates=10**6, norm_obs=False, norm_reward=False)
    policy = PolicyConfig(core="none", features=(64, 64), separate_critic=True)
    return Learner(gym.make_vec("CartPole-v1", num_envs=n, vectorization_mode="sync"), config, policy)


def our_pace(n):
    "A function that plays and learns one rollout."
    learner = our_learner(n)
    def rollout():
        while learner.step() is None: pass
    return rollout


def sb3_learner(n):
    "Stable-Baselines3's PPO after one rollout: networks of 64 and 64 for actor and critic are its own choice."
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    model = PPO("MlpPolicy", make_vec_env("CartPole-v1", n, seed=0), seed=0, n_steps=PACE["num_steps"], device="cpu",
                batch_size=PACE["num_steps"] * n // PACE["num_minibatches"], n_epochs=PACE["update_epochs"],
                learning_rate=PACE["learning_rate"], ent_coef=PACE["ent_coef"])
    model.learn(PACE["num_steps"] * n)
    return model


def sb3_pace(n):
    "The same with Stable-Baselines3."
    model = sb3_learner(n)
    return lambda: model.learn(PACE["num_steps"] * n, reset_num_timesteps=False)


def sb3_sweeps(n):
    "What `sweeps` does, with Stable-Baselines3."
    from stable_baselines3.common.logger import Logger
    model = sb3_learner(n)
    model.set_logger(Logger(None, []))
    return model.train


def plain_pace(n):
    "The same as a loop in one piece, with no class and no check: what PPO costs if it is written for one task."
    from torch.distributions import Categorical
    T, parts = PACE["num_steps"], PACE["num_minibatches"]
    def net(out, gain):
        layers = [torch.nn.Linear(4, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, out)]
        for layer, g in zip(layers, (2 ** 0.5, 2 ** 0.5, gain)):
            torch.nn.init.orthogonal_(layer.weight, g)
            torch.nn.init.zeros_(layer.bias)
        return torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])
    envs = gym.wrappers.vector.RecordEpisodeStatistics(gym.make_vec("CartPole-v1", num_envs=n,
                                                                    vectorization_mode="sync"))
    actor, critic = net(2, 0.01), net(1, 1.)
    weights = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(weights, lr=PACE["learning_rate"], eps=1e-5)
    obs, action = torch.zeros(T, n, 4), torch.zeros(T, n)
    logp, reward, done, value = (torch.zeros(T, n) for _ in range(4))
    now, over = torch.Tensor(envs.reset(seed=0)[0]), torch.zeros(n)
    def rollout():
        nonlocal now, over
        for t in range(T):
            obs[t], done[t] = now, over
            with torch.no_grad():
                choice = Categorical(logits=actor(now))
                action[t] = picked = choice.sample()
                logp[t], value[t] = choice.log_prob(picked), critic(now).flatten()
            found, gain, term, trunc, _ = envs.step(picked.numpy())
            reward[t], now, over = torch.tensor(gain).view(-1), torch.Tensor(found), torch.Tensor(term | trunc)
        with torch.no_grad():
            adv, last, following, ends = torch.zeros(T, n), 0., critic(now).flatten(), over
            for t in reversed(range(T)):
                delta = reward[t] + 0.99 * following * (1 - ends) - value[t]
                adv[t] = last = delta + 0.99 * 0.95 * (1 - ends) * last
                following, ends = value[t], done[t]
        flat = [x.reshape(T * n, *x.shape[2:]) for x in (obs, action, logp, adv, adv + value)]
        for _ in range(PACE["update_epochs"]):
            for part in torch.randperm(T * n).tensor_split(parts):
                o, a, old, ad, target = (x[part] for x in flat)
                choice = Categorical(logits=actor(o))
                ratio, ad = (choice.log_prob(a) - old).exp(), (ad - ad.mean()) / (ad.std() + 1e-8)
                gain = torch.minimum(ratio * ad, ratio.clamp(0.8, 1.2) * ad).mean()
                error = 0.5 * (critic(o).flatten() - target).square().mean()
                optimizer.zero_grad()
                (0.5 * error - gain - PACE["ent_coef"] * choice.entropy().mean()).backward()
                torch.nn.utils.clip_grad_norm_(weights, 0.5)
                optimizer.step()
    return rollout


def pace(n=8, repeat=40):
    "Steps a CPU second of three learners with equal settings and networks; how many times theirs ours are; an update."
    ours, *others = seconds_in_turns([our_pace(n), sb3_pace(n), plain_pace(n)], repeat)
    mine, theirs = seconds_in_turns([sweeps(our_learner(n)), sb3_sweeps(n)], repeat)
    steps = {k: round(PACE["num_steps"] * n / min(t)) for k, t in zip(("ours", "sb3", "plain"), (ours, *others))}
    return steps | dict(to_sb3=times_ours(ours, others[0]), to_plain=times_ours(ours, others[1]),
                        update_to_sb3=times_ours(mine, theirs))


def acting(repeat=300):
    "Microseconds of one decision: eight heads of 3 to 13 choices for 16 lanes, masked."
    heads, g = Heads((3, 13, 4, 3, 3, 4, 5, 6)), torch.Generator().manual_seed(0)
    logits, mask = torch.randn(16, 8, 13, generator=g), torch.rand(16, heads.flat, generator=g) < 0.7
    legal = heads.legal(mask, torch.zeros(16, 8).long()) | (torch.arange(13) == 0)
    noise = torch.empty_like(logits).exponential_(generator=g)
    mask = torch.cat([legal[:, k, :s] for k, s in enumerate(heads.sizes)], 1)
    def one_by_one():
        action, logp = [], []
        for k, size in enumerate(heads.sizes):
            scores = logits[:, k, :size].masked_fill(~legal[:, k, :size], -1e8)
            d = torch.distributions.Categorical(logits=scores, validate_args=False)
            action.append(d.sample())
            logp.append(d.log_prob(action[-1]))
        return torch.stack(action, -1), torch.stack(logp, -1)
    padded, single = in_turns([lambda: choose(heads, logits, mask, noise), one_by_one], repeat)
    return {"padded": round(padded * 1e6, 1), "one by one": round(single * 1e6, 1)}


# --- killed while saving; split and whole

def weights_of(k): return dict(k=k, t=[torch.full((300_000,), float(k)) for _ in range(5)])


def kills(times=200):
    "A process that saves 6 MB in a loop is killed; the file must be readable, unmixed and not too old."
    rng, k, bad = random.Random(0), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)/"run.safetensors"
        write_checkpoint(path, weights_of(0))
        for _ in range(times):
            child = os.fork()
            if not child:
                while True:
                    k += 1
                    write_checkpoint(path, weights_of(k))
            time.sleep(0.01 + rng.random() * 0.15)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            try:
                found, _ = read_checkpoint(path)
                bad += found["k"] < k or not all((t == found["k"]).all() for t in found["t"])
                k = found["k"]
                if k: read_checkpoint(previous_checkpoint(path))
            except Exception: bad += 1
    return dict(kills=times, saves=k, bad=int(bad))


def sb3_split():
    "How far Stable-Baselines3 is from an uninterrupted run after a save and a load; and from itself, run twice."
    from sb3_contrib import RecurrentPPO
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    def flat(m): return torch.cat([p.detach().flatten() for p in m.policy.parameters()])
    def gap(a, b): return float((flat(a) - flat(b)).abs().max())
    def env(): return make_vec_env("CartPole-v1", 4, seed=0)
    out = {}
    for name, cls, policy in (("PPO", PPO, "MlpPolicy"), ("RecurrentPPO", RecurrentPPO, "MlpLstmPolicy")):
        def make(cls=cls, policy=policy):
            return cls(policy, env(), seed=0, n_steps=64, batch_size=64, n_epochs=2, device="cpu")
        whole, again, half = make().learn(1024), make().learn(1024), make().learn(512)
        with tempfile.TemporaryDirectory() as folder:
            half.save(f"{folder}/half")
            rest = cls.load(f"{folder}/half", env=env(), device="cpu").learn(512, reset_num_timesteps=False)
        out[name] = dict(repeat=gap(whole, again), split=gap(whole, rest))
    return out


def of_seeds(f, *args, seeds=range(3)): return [f(seed, *args) for seed in seeds]


SECTIONS = {
    "cartpole": lambda: dict(ours=of_seeds(ours_cartpole, seeds=FRESH), sb3=of_seeds(sb3_cartpole)),
    "hidden": lambda: dict(lstm=of_seeds(ours_hidden, "lstm", seeds=FRESH),
                           none=of_seeds(ours_hidden, "none", seeds=FRESH[:3])),
    **{f"hidden_sb3_{s}": lambda s=s: sb3_hidden(s) for s in range(3)},
    "cue": lambda: dict(defaults=of_seeds(default_cue, seeds=FRESH),
                        both=of_seeds(ours_cue, "lstm", True), memory=of_seeds(ours_cue, "lstm", False),
                        masks=of_seeds(ours_cue, "none", True), sb3_memory=of_seeds(sb3_cue, False),
                        sb3_masks=of_seeds(sb3_cue, True)),
    "speed": speed, "pace": pace, "acting": acting, "kills": kills, "split": sb3_split}
SLOW = tuple(name for name in SECTIONS if name.startswith("hidden_sb3")) # run by name only


def main(wanted):
    "Measure some sections, and store what each found at once."
    unknown = set(wanted) - {"all", *SECTIONS}
    if unknown or not wanted: sys.exit(f"{__doc__}\nSections: {', '.join(SECTIONS)}")
    torch.set_num_threads(1)
    results = json.loads(STORED.read_text(encoding="utf-8")) if STORED.exists() else {}
    for name, f in SECTIONS.items():
        if name not in wanted and ("all" not in wanted or name in SLOW): continue
        begun = time.time()
        results[name] = f() | dict(seconds=round(time.time() - begun), torch=torch.__version__, threads=1)
        STORED.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(name, f"{time.time() - begun:.0f} s", flush=True)


if __name__ == "__main__": main(sys.argv[1:])
