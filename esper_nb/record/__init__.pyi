# What record offers to other packages; written by `python scripts/notebooks.py door`
from .alarms import (METRICS as METRICS, KINDS as KINDS, LEVELS as LEVELS, Limit as Limit, ALARM_RULES as ALARM_RULES,
    Statistic as Statistic, STATISTICS as STATISTICS, KEEP as KEEP, Metric as Metric, metric_table as metric_table,
    read_table as read_table, find_metric as find_metric, axis_label as axis_label, AlarmRule as AlarmRule,
    Alarm as Alarm, find_alarms as find_alarms, AlarmWatch as AlarmWatch, alarm_rows as alarm_rows,
    AlarmKind as AlarmKind, alarm_kinds as alarm_kinds)
from .analytics import (pick_rows as pick_rows, lane_numbers as lane_numbers, Rollback as Rollback,
    rollbacks as rollbacks, loss_curve as loss_curve, SeedLife as SeedLife, seed_lives as seed_lives,
    StageSpan as StageSpan, stage_spans as stage_spans, BlueprintStats as BlueprintStats,
    blueprint_stats as blueprint_stats, LaneScore as LaneScore, lane_scores as lane_scores, reward_mix as reward_mix,
    observation_ranges as observation_ranges, action_mix as action_mix, run_origin as run_origin)
from .checkpoints import (CheckpointError as CheckpointError, LoadResult as LoadResult,
    save_checkpoint as save_checkpoint, load_checkpoint as load_checkpoint,
    contract_difference as contract_difference, EnvState as EnvState, write_checkpoint as write_checkpoint,
    read_checkpoint as read_checkpoint, check_contract as check_contract, previous_checkpoint as previous_checkpoint,
    save_tensors as save_tensors, load_tensors as load_tensors, ResumableRun as ResumableRun)
from .notices import Notify as Notify, Notices as Notices, apprise_notify as apprise_notify
from .rows import (Value as Value, Row as Row, ROW_KEYS as ROW_KEYS, check_rows as check_rows, make_rows as make_rows,
    metric_names as metric_names, named_fields as named_fields, flatten as flatten, series as series,
    encode_row as encode_row, decode_row as decode_row)
from .training_rows import (population_rows as population_rows, run_rows as run_rows, size_metrics as size_metrics,
    epoch_rows as epoch_rows, batch_rows as batch_rows, limit_rows as limit_rows, governor_rows as governor_rows,
    slot_rows as slot_rows, forecast_rows as forecast_rows, seed_metrics as seed_metrics, seed_rows as seed_rows,
    seed_event_rows as seed_event_rows, test_rows as test_rows, closing_table as closing_table, EnvRows as EnvRows,
    update_rows as update_rows)
from .writers import (TRACKERS as TRACKERS, Writer as Writer, WriterReport as WriterReport, Recorder as Recorder,
    JSONLWriter as JSONLWriter, read_rows as read_rows, RowReader as RowReader, count_rows as count_rows,
    cut_rows as cut_rows, RunFolder as RunFolder, run_paths as run_paths, open_folder as open_folder,
    new_run as new_run, BackgroundWriter as BackgroundWriter, StepMetrics as StepMetrics,
    metrics_by_step as metrics_by_step, Tracker as Tracker, TensorBoardWriter as TensorBoardWriter,
    WandbWriter as WandbWriter, MLflowWriter as MLflowWriter, TrackioWriter as TrackioWriter,
    check_trackers as check_trackers, open_trackers as open_trackers)
