# What guard offers to other packages; written by `python scripts/notebooks.py door`
from .adapters import (bar_note as bar_note, StepOf as StepOf, as_it_stood as as_it_stood, Guard as Guard,
    action_metrics as action_metrics, lightning_governor as lightning_governor, guard_trainer as guard_trainer,
    guard_accelerator as guard_accelerator, fastai_governor as fastai_governor, skorch_governor as skorch_governor,
    GuardedUpdate as GuardedUpdate, guard_update as guard_update)
from .budget import Budget as Budget, is_extreme as is_extreme, blames_batch as blames_batch
from .causes import (SPARED as SPARED, OLD_GRADIENTS as OLD_GRADIENTS, RUINED as RUINED, YARD as YARD, ODD as ODD,
    BEFORE as BEFORE, EXPERIMENTS as EXPERIMENTS, CONTROLS as CONTROLS, WORTH_A_WORD as WORTH_A_WORD,
    SLOWER as SLOWER, UPHILL as UPHILL, CLIMBS as CLIMBS, SLOW_REPLAY as SLOW_REPLAY, REDONE as REDONE,
    first_apart as first_apart, same_number as same_number, own_settings as own_settings, Findings as Findings,
    carries_over as carries_over, Parting as Parting, part_by_settings as part_by_settings,
    switched_flag as switched_flag, writes_before as writes_before, wrote as wrote, WritesOfReplay as WritesOfReplay,
    written_inside as written_inside, spares_most as spares_most, explain_parting as explain_parting,
    center_spread as center_spread, level_spread as level_spread, find_onset as find_onset,
    find_earlier as find_earlier, GoodState as GoodState, Gap as Gap, Yardstick as Yardstick, find_odd as find_odd,
    odd_batches as odd_batches, odd_later as odd_later, bad_steps as bad_steps, odd_ones as odd_ones,
    name_batches as name_batches, Experiment as Experiment, leave_out_odd as leave_out_odd,
    exchange_odd as exchange_odd, leave_out_others as leave_out_others, earlier_batches as earlier_batches,
    few_later_batches as few_later_batches, later_batches as later_batches, are_sorted as are_sorted,
    can_mix as can_mix, have_one_form as have_one_form, out_of_turn as out_of_turn, mix_examples as mix_examples,
    with_tensors as with_tensors, switched_inputs as switched_inputs, hold_inputs as hold_inputs,
    name_inputs as name_inputs, counts_in as counts_in, lower_counts as lower_counts, name_counts as name_counts,
    hold_rate as hold_rate, most_changed as most_changed, rate_rose as rate_rose, is_in_cycles as is_in_cycles,
    had_a_spell as had_a_spell, hold_settings as hold_settings, other_settings as other_settings, is_near as is_near,
    without_autocast as without_autocast, full_precision as full_precision, bears_float32 as bears_float32,
    few_bits as few_bits, drop_gradients as drop_gradients, uses_old_gradients as uses_old_gradients,
    forget_moments as forget_moments, moments_push as moments_push, clip_as_usual as clip_as_usual,
    scale_rate as scale_rate, slower as slower, climb as climb, CaseFile as CaseFile, why_well as why_well,
    why_cured as why_cured, Repetition as Repetition, Inquiry as Inquiry, find_cause as find_cause,
    on_any_rank as on_any_rank, redo as redo, redo_disturbed as redo_disturbed)
from .detector import (WINDOW_LIMIT as WINDOW_LIMIT, SCALES as SCALES, ARRAYS as ARRAYS, NUMBERS as NUMBERS,
    RULES as RULES, Threshold as Threshold, threshold as threshold, DetectorConfig as DetectorConfig,
    list_thresholds as list_thresholds, label_entropy as label_entropy, Verdict as Verdict, judge as judge,
    LossLimits as LossLimits, Ops as Ops, Look as Look, Rule as Rule, find_nonfinite as find_nonfinite,
    find_explosion as find_explosion, find_collapse as find_collapse, find_rise as find_rise, calm_rise as calm_rise,
    find_gradient as find_gradient, exceeded as exceeded, name_limit as name_limit, name_mean as name_mean,
    log_of as log_of, on_scale as on_scale, off_scale as off_scale, LossStats as LossStats,
    loss_limits as loss_limits)
from .footprint import (DYNAMIC as DYNAMIC, LIBRARIES as LIBRARIES, PLAIN as PLAIN, FIXED as FIXED, ABSENT as ABSENT,
    SMALL as SMALL, COPIED as COPIED, RANDOM as RANDOM, STREAMS as STREAMS, CSV as CSV, LOCKS as LOCKS,
    ENVIRONMENT as ENVIRONMENT, LOGGING_MODULES as LOGGING_MODULES, MOST_OBJECTS as MOST_OBJECTS, FIRST as FIRST,
    CODE as CODE, MODULE_TABLES as MODULE_TABLES, GIVEN as GIVEN, FULL as FULL, NOT_SEEN as NOT_SEEN,
    CodeNames as CodeNames, names_in as names_in, has_installed as has_installed, is_own_file as is_own_file,
    is_own_module as is_own_module, is_users as is_users, package_of as package_of, code_of as code_of,
    module_of as module_of, is_plain as is_plain, Absent as Absent, Holder as Holder, alike as alike,
    Variable as Variable, Names as Names, FixedNames as FixedNames, Inside as Inside, Keys as Keys,
    Entries as Entries, Members as Members, whole_numbers_in as whole_numbers_in, moved_in as moved_in,
    version_of as version_of, dense_parts as dense_parts, same_values as same_values, some_of as some_of,
    bits_of as bits_of, sample_of as sample_of, bytes_of as bytes_of, Kept as Kept, AnyLeaf as AnyLeaf,
    TensorLeaf as TensorLeaf, ArrayLeaf as ArrayLeaf, PartLeaf as PartLeaf, StreamLeaf as StreamLeaf,
    leaf_of as leaf_of, has_state as has_state, attributes_of as attributes_of, slots_of as slots_of,
    Unrestorable as Unrestorable, kind_of_effect as kind_of_effect, wrapped_by as wrapped_by, place_of as place_of,
    memory_of as memory_of, Walk as Walk, tables_of_optimizers as tables_of_optimizers, StepWalk as StepWalk,
    owned_by_parts as owned_by_parts, has_nan as has_nan, is_nan_in as is_nan_in, mark_of as mark_of,
    top_name as top_name, Given as Given, clone_of as clone_of, arrays_in as arrays_in, flat as flat,
    exchanged as exchanged, moved_part as moved_part, tail_of as tail_of, quick_sum as quick_sum, Watched as Watched,
    names_of as names_of, kept_of as kept_of, marks_of as marks_of, FootprintState as FootprintState,
    Footprint as Footprint, Ruined as Ruined, ruined_in as ruined_in, callers as callers,
    ruined_around as ruined_around, plays_around as plays_around, NotSeen as NotSeen, content_of as content_of,
    tensor_digest as tensor_digest, batch_digest as batch_digest)
from .gate import (GateConfig as GateConfig, NormHistory as NormHistory,
    once_there_are_gradients as once_there_are_gradients, gradients_of as gradients_of, measure_norm as measure_norm,
    name_nonfinite as name_nonfinite, name_largest as name_largest, GateEvent as GateEvent, UpdateGate as UpdateGate)
from .governor import OWN_PARTS as OWN_PARTS, UNHEARD as UNHEARD, NOT_TAKEN as NOT_TAKEN, Governor as Governor
from .health import (LASTS as LASTS, GROWN as GROWN, OFTEN as OFTEN, SHARE as SHARE, JUMP as JUMP,
    STILL_NEAR as STILL_NEAR, SEEN as SEEN, LIKE as LIKE, LONG as LONG, RAISED as RAISED, STEEP as STEEP,
    LEAP as LEAP, SETTLED as SETTLED, StateHealth as StateHealth, Bands as Bands, BufferBands as BufferBands,
    LossCourse as LossCourse, Sign as Sign, Leap as Leap, RateCourse as RateCourse, Signs as Signs,
    is_steep as is_steep, UpdateWatch as UpdateWatch, Beside as Beside, StateJudge as StateJudge)
from .loops import (GENERATORS as GENERATORS, LOADS as LOADS, STORES as STORES, STOPS as STOPS,
    ABSENT_VARIABLE as ABSENT_VARIABLE, COUNTERS as COUNTERS, BodyNames as BodyNames, uses_of as uses_of,
    FrameVariables as FrameVariables, write_back as write_back, LoopBody as LoopBody,
    counter_around as counter_around, body_names as body_names, loop_around as loop_around, Batches as Batches,
    place_of_loop as place_of_loop)
from .losses import (loss_of as loss_of, as_loss as as_loss, WaitingLoss as WaitingLoss, TakenLosses as TakenLosses,
    LossQueue as LossQueue, Verdicts as Verdicts)
from .observation import (BREAKS as BREAKS, FALLEN as FALLEN, EffectResult as EffectResult, APART as APART,
    Exchange as Exchange, RiseObservation as RiseObservation, Fall as Fall, RunComparison as RunComparison,
    RiseEffects as RiseEffects, RunCheckup as RunCheckup, RunJudge as RunJudge)
from .phases import (TABLE as TABLE, Phase as Phase, PhaseMove as PhaseMove, Effect as Effect,
    next_phase as next_phase)
from .probation import (EARLY as EARLY, GOOD_STATE as GOOD_STATE, SavedAt as SavedAt, Rhythm as Rhythm,
    Probation as Probation, GoodFiles as GoodFiles, GoodStates as GoodStates)
from .ranks import Ranks as Ranks, SameWeights as SameWeights
from .rates import (set_setting as set_setting, has_rate as has_rate, rates_of as rates_of, scale_lr as scale_lr,
    LearningRates as LearningRates)
from .recorder import (COPIED_FIRST as COPIED_FIRST, GroupRates as GroupRates, HasModes as HasModes,
    RunModes as RunModes, Repeats as Repeats, Origin as Origin, number_of as number_of, RecordedStep as RecordedStep,
    RatePeaks as RatePeaks, out_of_shared_memory as out_of_shared_memory, own_copy as own_copy, is_data as is_data,
    StepRecorder as StepRecorder, RecordedIncident as RecordedIncident, copy_published as copy_published,
    why_missing as why_missing, give_inputs as give_inputs, tensors_of as tensors_of, same_content as same_content,
    same_stream as same_stream, keys_of as keys_of, as_key as as_key, with_origins as with_origins,
    iter_noting as iter_noting, fetch_from as fetch_from, Noting as Noting, NotingIterator as NotingIterator,
    settings_of as settings_of, stepping as stepping, idle as idle, still_schedules as still_schedules,
    foreign_optimizers as foreign_optimizers, lower_rates as lower_rates, put_rates_back as put_rates_back,
    at_share as at_share, Omissions as Omissions, WarmUp as WarmUp)
from .rehearsal import (LIMIT as LIMIT, NEAR as NEAR, can_fork as can_fork, quiet as quiet, in_a_fork as in_a_fork,
    end_with as end_with, read_all as read_all, DryReplay as DryReplay, dry_replay as dry_replay, Attempt as Attempt,
    equal_losses as equal_losses, in_place as in_place, why_not as why_not)
from .repairs import (HABIT as HABIT, RATE_CAUSES as RATE_CAUSES, REHEARSED as REHEARSED, AGAIN as AGAIN,
    NO_PROOF as NO_PROOF, DISTURBED as DISTURBED, WEAK_CAUSES as WEAK_CAUSES, IN_VAIN as IN_VAIN,
    BetweenSteps as BetweenSteps, Redone as Redone, Repairs as Repairs, Unsolved as Unsolved, Recovery as Recovery)
from .replay import (LOW as LOW, FILLS as FILLS, Changes as Changes, is_left_alone as is_left_alone,
    NotRestorable as NotRestorable, Replay as Replay, gradient_norm as gradient_norm, share_of_rate as share_of_rate,
    LayerWatch as LayerWatch, is_finite as is_finite, node_of as node_of, OperationWatch as OperationWatch,
    user_line as user_line, find_operation as find_operation)
from .reports import (Between as Between, GOVERNOR_PRESETS as GOVERNOR_PRESETS, NOTES as NOTES,
    LEFT_OPEN as LEFT_OPEN, SUSPECT as SUSPECT, SAID as SAID, AFAR as AFAR, ASIDE as ASIDE, CAUSES as CAUSES,
    NAN_AGAIN as NAN_AGAIN, logger as logger, GovernorConfig as GovernorConfig,
    as_governor_config as as_governor_config, as_chance_losses as as_chance_losses, Evidence as Evidence,
    Report as Report, ordinal as ordinal, describe_failure as describe_failure, Explanation as Explanation,
    GovernorStop as GovernorStop, IncidentLog as IncidentLog, Summary as Summary)
from .responses import (STRAYS as STRAYS, is_clock as is_clock, clocks_of as clocks_of,
    not_exchanged as not_exchanged, patience_of as patience_of, SingleRun as SingleRun, LaneRuns as LaneRuns,
    stray_weights as stray_weights, held_by as held_by, GuardedRun as GuardedRun, Moment as Moment,
    SameBatches as SameBatches, undone_with as undone_with, IncidentResponse as IncidentResponse,
    LaneCheckup as LaneCheckup, LaneJudge as LaneJudge, missing_parts as missing_parts,
    trains_others as trains_others)
from .resume import (TensorProof as TensorProof, prove_tensor as prove_tensor, PartProof as PartProof,
    prove_parts as prove_parts, StreamState as StreamState, read_streams as read_streams, leads_to as leads_to,
    ResumeCheck as ResumeCheck, compare_parts as compare_parts, prove_state as prove_state,
    check_resume as check_resume, ResumeWatch as ResumeWatch)
from .rises import (TURN as TURN, FEW as FEW, BACK as BACK, blames_weights as blames_weights,
    pair_turns as pair_turns, is_clearly_above as is_clearly_above, RiseMonitor as RiseMonitor,
    monitor_rise as monitor_rise, fall_of as fall_of, Calibration as Calibration)
from .snapshots import (StateKey as StateKey, Agree as Agree, PINNED as PINNED, TakeResult as TakeResult,
    RestoreResult as RestoreResult, StateVersion as StateVersion, SavedState as SavedState, LiveState as LiveState,
    read_parts as read_parts, StateBanks as StateBanks, pinned_buffers as pinned_buffers, Snapshot as Snapshot,
    trained_by as trained_by, owned_by as owned_by, BackgroundCopy as BackgroundCopy, OwnSettings as OwnSettings,
    own_settings_of as own_settings_of)
from .writes import (TensorTable as TensorTable, PIECE as PIECE, PIECES as PIECES, PieceOf as PieceOf,
    tensors_of_parts as tensors_of_parts, tables_of as tables_of, is_other as is_other, untrained_in as untrained_in,
    words_of as words_of, in_turns as in_turns, Written as Written, WriteCounts as WriteCounts,
    StateWatch as StateWatch, LoadWatch as LoadWatch, copies_of as copies_of, Distances as Distances)
