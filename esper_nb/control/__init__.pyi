# What control offers to other packages; written by `python scripts/notebooks.py door`
from .actions import (HEADS as HEADS, STYLES as STYLES, TEMPOS as TEMPOS, TARGETS as TARGETS, SPEEDS as SPEEDS,
    CURVES as CURVES, PLACEHOLDERS as PLACEHOLDERS, MIN_PRUNE_AGE as MIN_PRUNE_AGE, OPERATIONS as OPERATIONS,
    OPS as OPS, SHORT as SHORT, Choice as Choice, Operation as Operation, register_operation as register_operation,
    Repertoire as Repertoire, read_slots as read_slots, column as column, in_stage as in_stage,
    choice_of as choice_of, open_gates as open_gates, SlotView as SlotView, not_offered as not_offered,
    why_not_now as why_not_now, GrowthActions as GrowthActions, read_actions as read_actions,
    draw_actions as draw_actions, as_choice as as_choice)
from .envs import (Data as Data, EnvConfig as EnvConfig, GrowVecEnv as GrowVecEnv, DeviceParts as DeviceParts,
    LaneStates as LaneStates, lane_entry as lane_entry, class_names as class_names, sb3_env as sb3_env,
    SharedHome as SharedHome, SingleHome as SingleHome, FarHome as FarHome, homes_of as homes_of,
    lane_seeds as lane_seeds, first_seeds as first_seeds, copied_env as copied_env, one_lane_info as one_lane_info,
    GrowEnv as GrowEnv)
from .episodes import (clone_all as clone_all, DevicePart as DevicePart, EnvStep as EnvStep,
    merge_lanes as merge_lanes, EpisodeSums as EpisodeSums, EpisodeSummary as EpisodeSummary, lane_info as lane_info,
    part_finals as part_finals, read_reset_options as read_reset_options, read_reset_mask as read_reset_mask)
from .forecast import (PENALTIES as PENALTIES, LEAST_ERROR as LEAST_ERROR, SURE as SURE, look_columns as look_columns,
    read_look as read_look, fit_ridge as fit_ridge, Forecast as Forecast, lane_looks as lane_looks,
    SeedForecast as SeedForecast, play_seeds as play_seeds, ColumnCut as ColumnCut, best_threshold as best_threshold,
    LookOnce as LookOnce)
from .observations import (HISTORY as HISTORY, OBSERVATIONS as OBSERVATIONS, WIDTH as WIDTH, HEIGHT as HEIGHT,
    LaneHistory as LaneHistory, symlog as symlog, Feature as Feature, LaneView as LaneView,
    Observation as Observation, known_column as known_column, register_observation as register_observation,
    feature_bounds as feature_bounds, Observer as Observer, SlotLook as SlotLook, LaneLook as LaneLook,
    draw_lane as draw_lane, slot_looks as slot_looks)
from .rewards import (RewardState as RewardState, TERMS as TERMS, PRESETS as PRESETS, RewardConfig as RewardConfig,
    Transition as Transition, RewardInputs as RewardInputs, reward_term as reward_term, RewardPreset as RewardPreset,
    Reward as Reward, start_rewards as start_rewards, compute_reward as compute_reward,
    RewardBreakdown as RewardBreakdown, explain_reward as explain_reward, seed_sizes as seed_sizes,
    occupied_size as occupied_size)
from .rules import (QUICK as QUICK, QUICK_RULES as QUICK_RULES, Signals as Signals, View as View, view as view,
    GrowthRule as GrowthRule, reset_rule as reset_rule, Memoryless as Memoryless, HeuristicConfig as HeuristicConfig,
    HeuristicMemory as HeuristicMemory, Heuristic as Heuristic, WaitOnly as WaitOnly, Fixed as Fixed,
    GerminationRule as GerminationRule, as_controller as as_controller, encode_decision as encode_decision)
