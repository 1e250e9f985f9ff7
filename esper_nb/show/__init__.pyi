# What show offers to other packages; written by `python scripts/notebooks.py door`
from .dashboard import (DASHBOARDS as DASHBOARDS, Ask as Ask, FAULT_TIPS as FAULT_TIPS, SEED_TIPS as SEED_TIPS,
    Dashboard as Dashboard, watch as watch, follow_runs as follow_runs, row_values as row_values,
    row_incident as row_incident, RowsSource as RowsSource, run_names as run_names, RunsSource as RunsSource,
    widgets_below as widgets_below, Panel as Panel, disabled_reasons as disabled_reasons, ControlBar as ControlBar,
    LaneSelector as LaneSelector, FaultButtons as FaultButtons, SeedsPanel as SeedsPanel,
    threshold_slider as threshold_slider, ThresholdsPanel as ThresholdsPanel)
from .history import (AXES as AXES, ACTIONS as ACTIONS, LIMITS as LIMITS, CURVE_COLUMNS as CURVE_COLUMNS,
    MOST_METRICS as MOST_METRICS, DownsampledSeries as DownsampledSeries, keep_later as keep_later,
    keep_last_known as keep_last_known, Note as Note, FaultMark as FaultMark, Incident as Incident,
    incident_from_report as incident_from_report, restored_level as restored_level, recovered_at as recovered_at,
    provoked_by as provoked_by, ReportPlaces as ReportPlaces, FaultLog as FaultLog, History as History,
    lane_limits as lane_limits, SlotState as SlotState, slot_codes as slot_codes, decode_slots as decode_slots,
    StateLayout as StateLayout, controller_curves as controller_curves, controller_point as controller_point,
    seed_lines as seed_lines, metric_point as metric_point, named_metrics as named_metrics, own_rows as own_rows,
    logged_metrics as logged_metrics)
from .live import (session_status as session_status, session_header as session_header, stage_entry as stage_entry,
    ReaderPosition as ReaderPosition, Packet as Packet, session_packet as session_packet,
    operation_probabilities as operation_probabilities, probabilities_html as probabilities_html, Pacer as Pacer,
    Canvas as Canvas, outside_requests as outside_requests, Feed as Feed, canvas_class as canvas_class,
    running_cell as running_cell, live_front_end as live_front_end)
from .plot_runs import (HEALTH as HEALTH, lane_median as lane_median, plot_lanes as plot_lanes, plot_run as plot_run,
    plot_incidents as plot_incidents, stage_bar as stage_bar, stage_text as stage_text, plot_slots as plot_slots,
    plot_blueprints as plot_blueprints, alarm_limits as alarm_limits, plot_learning as plot_learning,
    reward_terms as reward_terms, plot_rewards as plot_rewards, plot_compare as plot_compare,
    plot_controller as plot_controller, plot_side_by_side as plot_side_by_side, draw_controller as draw_controller,
    draw_metric as draw_metric)
from .session import (P as P, REQUESTS as REQUESTS, Request as Request, request as request, StepClock as StepClock,
    Session as Session, unmet_requirements as unmet_requirements, epochs_until_empty as epochs_until_empty,
    seed_disabled_reasons as seed_disabled_reasons)
from .sources import (WAITING as WAITING, Frame as Frame, frame_losses as frame_losses, Source as Source,
    FrameSource as FrameSource, PopulationSource as PopulationSource, LoopSource as LoopSource,
    update_numbers as update_numbers, operations_line as operations_line, EnvSource as EnvSource)
from .theme import (THEMES as THEMES, COLORS as COLORS, BLUE as BLUE, RED as RED, GREEN as GREEN, LILAC as LILAC,
    WINE as WINE, BROWN as BROWN, STEEL as STEEL, GREY as GREY, MARKERS as MARKERS, HATCHES as HATCHES,
    STAGE_STYLES as STAGE_STYLES, WORDS as WORDS, THRESHOLDS as THRESHOLDS, MAIN_THRESHOLDS as MAIN_THRESHOLDS,
    theme_settings as theme_settings, asset_path as asset_path, theme as theme, StageStyle as StageStyle,
    stage_style as stage_style, new_axes as new_axes, axes_or_new as axes_or_new, text_color as text_color,
    draw_empty as draw_empty, add_legend as add_legend, log_ticks as log_ticks, integer_ticks as integer_ticks,
    x_label as x_label, explain as explain, WidgetFactory as WidgetFactory, is_count as is_count,
    can_be_off as can_be_off, threshold_help as threshold_help, rules_help as rules_help)
from .views import (STATE_SYMBOLS as STATE_SYMBOLS, NOTE_SYMBOLS as NOTE_SYMBOLS, REOPEN_HINT as REOPEN_HINT,
    WIDGET_MIME as WIDGET_MIME, HIDE_LOST_PANEL as HIDE_LOST_PANEL, duration_text as duration_text,
    status_parts as status_parts, last_line as last_line, session_text as session_text, error_html as error_html,
    status_html as status_html, log_html as log_html, plot_session as plot_session, figure_png as figure_png,
    has_learned as has_learned, measured_losses as measured_losses, discarded_batches as discarded_batches,
    loss_bounds as loss_bounds, side_by_side as side_by_side, draw_losses as draw_losses, draw_lanes as draw_lanes,
    has_grown as has_grown, draw_slots as draw_slots, notebook_html as notebook_html,
    NotebookOutput as NotebookOutput)
