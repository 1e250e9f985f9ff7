# What learn offers to other packages; written by `python scripts/notebooks.py door`
from .distributions import (ActionHeads as ActionHeads, Heads as Heads, heads_of as heads_of, to_env as to_env,
    MaskedHeads as MaskedHeads, mix_floor as mix_floor, choose as choose, acting_noise as acting_noise)
from .learner import (END_SIGNALS as END_SIGNALS, Update as Update, clone_state as clone_state,
    gap_limit as gap_limit, StopRequest as StopRequest, UpdateProgress as UpdateProgress,
    RunningEpisodes as RunningEpisodes, Learner as Learner, BestPolicy as BestPolicy, StopFlag as StopFlag,
    exit_on_signal as exit_on_signal, train_ppo as train_ppo)
from .loss import (PPOConfig as PPOConfig, PPOStats as PPOStats, read_stats as read_stats,
    average_steps as average_steps, ChoiceMasks as ChoiceMasks, Coefficients as Coefficients, ppo_loss as ppo_loss,
    minibatch_loss as minibatch_loss, explained_variance as explained_variance, Collected as Collected,
    collect_returns as collect_returns)
from .normalizers import (Moments as Moments, ObsNormalizer as ObsNormalizer, discounted_sums as discounted_sums,
    RewardNormalizer as RewardNormalizer, ValueNormalizer as ValueNormalizer, standardize as standardize)
from .policies import PolicyConfig as PolicyConfig, Act as Act, ActorCritic as ActorCritic, Trunk as Trunk
from .rollouts import (gae as gae, next_values as next_values, Outcome as Outcome,
    flat_observations as flat_observations, can_be_flat as can_be_flat, one_observation as one_observation,
    rolled_lanes as rolled_lanes, masked_lanes as masked_lanes, EnvStream as EnvStream, EpisodeEnd as EpisodeEnd,
    count_episodes as count_episodes, Batch as Batch, Rollout as Rollout, play as play)
