# What guard offers to other packages; written by `python scripts/notebooks.py door`
from .adapters import (bar_note as bar_note, lightning_governor as lightning_governor, guard_trainer as guard_trainer,
    guard_accelerator as guard_accelerator, fastai_governor as fastai_governor)
from .causes import (CAUSES as CAUSES, LOW as LOW, EXPERIMENTS as EXPERIMENTS, SLOWER as SLOWER, UPHILL as UPHILL,
    REDONE as REDONE, Explanation as Explanation, RecordedStep as RecordedStep, StepRecorder as StepRecorder,
    settings_of as settings_of, keys_of as keys_of, tensors_of as tensors_of, same_stream as same_stream,
    RecordedIncident as RecordedIncident, copy_published as copy_published, Replay as Replay,
    gradient_norm as gradient_norm, idle as idle, share_of_rate as share_of_rate, set_setting as set_setting,
    Experiment as Experiment, leave_out_odd as leave_out_odd, hold_rate as hold_rate, hold_settings as hold_settings,
    without_autocast as without_autocast, full_precision as full_precision, drop_gradients as drop_gradients,
    updates_every_step as updates_every_step, mix_examples as mix_examples, can_mix as can_mix,
    with_tensors as with_tensors, forget_moments as forget_moments, clip_as_usual as clip_as_usual,
    usual_norms as usual_norms, lower_rate as lower_rate, scale_rate as scale_rate, most_changed as most_changed,
    had_a_spell as had_a_spell, other_settings as other_settings, is_near as is_near, rate_rose as rate_rose,
    name_batches as name_batches, odd_ones as odd_ones, LayerWatch as LayerWatch, center_spread as center_spread,
    level_spread as level_spread, find_onset as find_onset, find_earlier as find_earlier, find_odd as find_odd,
    find_cause as find_cause, Inquiry as Inquiry, carries_over as carries_over, same_number as same_number,
    redo as redo, redo_disturbed as redo_disturbed)
from .detector import (WINDOW_LIMIT as WINDOW_LIMIT, SCALES as SCALES, ARRAYS as ARRAYS, NUMBERS as NUMBERS,
    RULES as RULES, Threshold as Threshold, threshold as threshold, DetectorConfig as DetectorConfig,
    list_thresholds as list_thresholds, label_entropy as label_entropy, Verdict as Verdict, judge as judge,
    LossLimits as LossLimits, Ops as Ops, Look as Look, Rule as Rule, find_nonfinite as find_nonfinite,
    find_explosion as find_explosion, find_collapse as find_collapse, find_rise as find_rise, calm_rise as calm_rise,
    find_gradient as find_gradient, exceeded as exceeded, name_limit as name_limit, name_mean as name_mean,
    log_of as log_of, on_scale as on_scale, off_scale as off_scale, LossStats as LossStats,
    loss_limits as loss_limits)
from .gate import (GateConfig as GateConfig, NormHistory as NormHistory, gradients_of as gradients_of,
    measure_norm as measure_norm, name_nonfinite as name_nonfinite, GateEvent as GateEvent, UpdateGate as UpdateGate)
from .governor import (logger as logger, Governor as Governor, GoodFiles as GoodFiles,
    PendingComparison as PendingComparison, Waiting as Waiting, SavedAt as SavedAt, is_clock as is_clock,
    is_extreme as is_extreme, Budget as Budget, blames_batch as blames_batch, scale_lr as scale_lr)
from .ranks import Ranks as Ranks, SameWeights as SameWeights
from .reports import (GOVERNOR_PRESETS as GOVERNOR_PRESETS, GovernorConfig as GovernorConfig,
    as_governor_config as as_governor_config, as_chance_losses as as_chance_losses, Evidence as Evidence,
    Report as Report, describe_failure as describe_failure, GovernorStop as GovernorStop, Summary as Summary)
from .rises import (TURN as TURN, FEW as FEW, BACK as BACK, blames_weights as blames_weights,
    pair_turns as pair_turns, is_clearly_above as is_clearly_above, RiseMonitor as RiseMonitor,
    monitor_rise as monitor_rise, fall_of as fall_of)
from .snapshots import (StateKey as StateKey, Agree as Agree, TakeResult as TakeResult,
    RestoreResult as RestoreResult, Snapshot as Snapshot, owned_by as owned_by, BackgroundCopy as BackgroundCopy,
    StateVersion as StateVersion, SavedState as SavedState, LiveState as LiveState, read_parts as read_parts)
