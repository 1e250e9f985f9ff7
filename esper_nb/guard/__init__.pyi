# What guard offers to other packages; written by `python scripts/notebooks.py door`
from .adapters import (bar_note as bar_note, lightning_governor as lightning_governor, guard_trainer as guard_trainer,
    guard_accelerator as guard_accelerator, fastai_governor as fastai_governor)
from .detector import (WINDOW_LIMIT as WINDOW_LIMIT, SCALES as SCALES, ARRAYS as ARRAYS, NUMBERS as NUMBERS,
    RULES as RULES, Threshold as Threshold, threshold as threshold, DetectorConfig as DetectorConfig,
    list_thresholds as list_thresholds, label_entropy as label_entropy, Verdict as Verdict, judge as judge,
    LossLimits as LossLimits, Ops as Ops, Look as Look, Rule as Rule, find_nonfinite as find_nonfinite,
    find_explosion as find_explosion, find_collapse as find_collapse, find_rise as find_rise, calm_rise as calm_rise,
    find_gradient as find_gradient, log_of as log_of, on_scale as on_scale, off_scale as off_scale,
    LossStats as LossStats, loss_limits as loss_limits)
from .governor import (logger as logger, Governor as Governor, Question as Question, Waiting as Waiting,
    SavedAt as SavedAt, goes_on as goes_on, Trial as Trial, fall_of as fall_of, open_trial as open_trial,
    unheard_of as unheard_of, Budget as Budget, blames_batch as blames_batch, scale_lr as scale_lr)
from .ranks import Ranks as Ranks, SameWeights as SameWeights
from .reports import (GOVERNOR_PRESETS as GOVERNOR_PRESETS, GovernorConfig as GovernorConfig,
    as_governor_config as as_governor_config, as_chance_losses as as_chance_losses, Evidence as Evidence,
    Report as Report, describe_panic as describe_panic, GovernorStop as GovernorStop, Summary as Summary)
from .snapshots import (StateKey as StateKey, Agree as Agree, TakeResult as TakeResult,
    RestoreResult as RestoreResult, Snapshot as Snapshot, owned_by as owned_by, BackgroundCopy as BackgroundCopy,
    StateVersion as StateVersion, SavedState as SavedState, LiveState as LiveState, read_parts as read_parts)
