# What train offers to other packages; written by `python scripts/notebooks.py door`
from .ablation import (for_all_lanes as for_all_lanes, lane_inputs as lane_inputs, label_counts as label_counts,
    Tally as Tally, EvalResult as EvalResult, tally_result as tally_result, evaluate as evaluate,
    count_players as count_players, contributions as contributions, pair_interactions as pair_interactions,
    shapley as shapley, Ablation as Ablation, heard_slots as heard_slots, seed_tables as seed_tables,
    measure_ablation as measure_ablation, evaluate_combinations as evaluate_combinations, judge_lanes as judge_lanes)
from .data import (AHEAD as AHEAD, check_images as check_images, default_peak as default_peak,
    check_labels as check_labels, check_alike as check_alike, Epoch as Epoch, lane_epochs as lane_epochs,
    whole_batches as whole_batches, draw_images as draw_images, stack_draws as stack_draws, DrawsAhead as DrawsAhead,
    window_index as window_index, label_frequencies as label_frequencies, own_seed_key as own_seed_key,
    Splits as Splits, check_scale as check_scale, ImageData as ImageData, is_target as is_target,
    count_answers as count_answers, target_lanes as target_lanes, lane_target_loss as lane_target_loss,
    target_counts as target_counts, share_pp as share_pp, standardised as standardised, TargetData as TargetData,
    check_tokens as check_tokens, draw_windows as draw_windows, TextData as TextData)
from .datasets import (ANSWERS as ANSWERS, MOST_STRATA as MOST_STRATA, PICTURES as PICTURES, Split as Split,
    FEWEST as FEWEST, OWN as OWN, Examples as Examples, number_labels as number_labels, one_each as one_each,
    given_labels as given_labels, check_classes as check_classes, refuse as refuse, dense_numbers as dense_numbers,
    check_kind as check_kind, as_targets as as_targets, check_targets as check_targets, Parts as Parts,
    stratified_split as stratified_split, target_strata as target_strata, picture_files as picture_files,
    read_picture as read_picture, read_folder as read_folder, read_table_file as read_table_file,
    from_frame as from_frame, group_numbers as group_numbers, as_pixels as as_pixels, from_arrays as from_arrays,
    from_dataset as from_dataset, digest_of as digest_of, balanced_order as balanced_order, first as first,
    load_digits_data as load_digits_data, load_cifar10 as load_cifar10, synthetic_cifar10 as synthetic_cifar10,
    load_prose as load_prose, load_text_file as load_text_file, split_examples as split_examples,
    example_data as example_data, wild_targets as wild_targets, own_source as own_source, is_own as is_own,
    source_words as source_words, read_own as read_own, keep_read as keep_read, keep_arrays as keep_arrays,
    text_digest as text_digest, load_own as load_own, load_source as load_source, host_for as host_for)
from .families import (TASK_FAMILIES as TASK_FAMILIES, Instance as Instance, groupings as groupings, Lesson as Lesson,
    draw_classes as draw_classes, draw_lesson as draw_lesson, FamilyData as FamilyData,
    begin_lessons as begin_lessons)
from .faults import (Strike as Strike, list_faults as list_faults, Fault as Fault, disturb_at as disturb_at,
    parse_fault as parse_fault)
from .gradients import (flat_lanes as flat_lanes, lane_grads as lane_grads, tensor_norms as tensor_norms,
    owner_norms as owner_norms, lane_grad_norms as lane_grad_norms, where_active as where_active,
    measured as measured, health_score as health_score, GradientHealth as GradientHealth,
    gradient_health as gradient_health, norm_ratio as norm_ratio, GrowthSignals as GrowthSignals,
    growth_signals as growth_signals)
from .graphs import (WAITS as WAITS, TrainStep as TrainStep, Group as Group, pack_step as pack_step, Moving as Moving,
    move_sgd as move_sgd, move_adam as move_adam, Resident as Resident, unfit_rule as unfit_rule,
    unfit_net as unfit_net, unfit_group as unfit_group, topology as topology, Recorded as Recorded,
    noting_waits as noting_waits, end_recording as end_recording, Graphs as Graphs, GraphMemory as GraphMemory,
    GroupSteps as GroupSteps, capture_steps as capture_steps)
from .optim import (check_state as check_state, LaneState as LaneState, lanes_apart as lanes_apart,
    copy_lanes as copy_lanes, LaneOptimizer as LaneOptimizer, check_owners as check_owners,
    optimizer_class as optimizer_class, check_options as check_options, fill_state as fill_state,
    state_names as state_names, equal_stretches as equal_stretches, LaneViews as LaneViews)
from .population import (Forecaster as Forecaster, MIXED_BYTES as MIXED_BYTES, SMALL_GROUP as SMALL_GROUP,
    SIGNALS as SIGNALS, LOOKED_AT as LOOKED_AT, FitConfig as FitConfig, TrainResult as TrainResult,
    GroupResult as GroupResult, SeedWorth as SeedWorth, EpochResult as EpochResult,
    latest_forecasts as latest_forecasts, forecasts_now as forecasts_now, lane_bytes as lane_bytes,
    grown_plan as grown_plan, owners_in_use as owners_in_use, part_of as part_of, Spare as Spare,
    GroupCopies as GroupCopies, undone_germination as undone_germination, kept_history as kept_history,
    RolledBackSeeds as RolledBackSeeds, LaneRates as LaneRates, Population as Population,
    new_governor as new_governor, new_stepper as new_stepper, check_population as check_population,
    new_population as new_population, seed_health as seed_health, traced as traced, latest_pass as latest_pass,
    site_signals as site_signals, join_results as join_results, spread_lanes as spread_lanes,
    join_ablations as join_ablations, total_gain as total_gain, join_groups as join_groups,
    sum_and_best as sum_and_best)
from .stepper import (StepInfo as StepInfo, Stepper as Stepper, LaneScaler as LaneScaler,
    check_power_of_two as check_power_of_two, SharedStep as SharedStep, Layout as Layout, Measurement as Measurement)
from .tables import (GAPS as GAPS, MISSING as MISSING, UNSEEN as UNSEEN, MOST as MOST, DAYS as DAYS, HALF as HALF,
    MANY as MANY, SIGNS as SIGNS, QUOTES as QUOTES, SPACES as SPACES, MOST_LINES as MOST_LINES, FENCE as FENCE,
    SLIPS as SLIPS, MIDDLES as MIDDLES, CODED as CODED, MOST_WORDS as MOST_WORDS, Table as Table,
    read_frame as read_frame, Column as Column, columns_of as columns_of, as_days as as_days,
    as_numbers as as_numbers, best_numbers as best_numbers, Preparation as Preparation)
from .tasks import (FEW_CLASSES as FEW_CLASSES, SOURCES as SOURCES, split_lanes as split_lanes,
    lane_cross_entropy as lane_cross_entropy, class_counts as class_counts, correct_counts as correct_counts,
    accuracy_pp as accuracy_pp, check_fit as check_fit, Task as Task, register_task as register_task,
    list_tasks as list_tasks, get_task as get_task, task_from_arrays as task_from_arrays,
    task_from_dataset as task_from_dataset, task_from_folder as task_from_folder, task_from_table as task_from_table,
    task_from_text as task_from_text, task_from_path as task_from_path, task_words as task_words,
    create_model as create_model)
from .trainer import (Disturb as Disturb, Decisions as Decisions, Controller as Controller, OwnerState as OwnerState,
    StepState as StepState, run_epoch as run_epoch, fit as fit, sum_up as sum_up, GroupTraining as GroupTraining,
    train_group as train_group, may_defer as may_defer, group_epoch as group_epoch, odd_lanes as odd_lanes,
    train_apart as train_apart)
from .yardsticks import (ROWS as ROWS, WIDE as WIDE, TOKENS as TOKENS, GRAM as GRAM, TELLING as TELLING,
    SimpleScore as SimpleScore, yardsticks as yardsticks, yardstick_lines as yardstick_lines,
    telling_column as telling_column, telling_text as telling_text)
