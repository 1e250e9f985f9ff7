# What run offers to other packages; written by `python scripts/notebooks.py door`
from .cli import (lab_command as lab_command, known_names as known_names, registered_names as registered_names,
    main as main)
from .compare import (Player as Player, latest_step as latest_step, open_offers as open_offers,
    RulePlayer as RulePlayer, RandomPlayer as RandomPlayer, PolicyPlayer as PolicyPlayer, play_lanes as play_lanes,
    compare_controllers as compare_controllers, simple_controllers as simple_controllers)
from .comparison import (METERS as METERS, PlayResult as PlayResult, PracticeUpdate as PracticeUpdate,
    paired_interval as paired_interval, standing as standing, Comparison as Comparison,
    comparison_text as comparison_text, align_columns as align_columns)
from .engines import (Callback as Callback, Make as Make, ENGINES as ENGINES, Engine as Engine,
    WorkerLost as WorkerLost, Worker as Worker, LocalWorker as LocalWorker, ProcessWorker as ProcessWorker,
    core_share as core_share, start_ray as start_ray, RayWorker as RayWorker, check_engine as check_engine,
    new_worker as new_worker, work_off as work_off, FaultTolerance as FaultTolerance, Supervisor as Supervisor)
from .exports import (SUFFIXES as SUFFIXES, GrownLanes as GrownLanes, regrow as regrow, lane_example as lane_example,
    raw_example as raw_example, RawInput as RawInput, input_facts as input_facts, used_columns as used_columns,
    onnx_answers as onnx_answers, write_network as write_network, Exported as Exported, usage as usage,
    export_run as export_run)
from .fits import (MOST_INCIDENTS as MOST_INCIDENTS, fit_run as fit_run, begin_fit as begin_fit, open_fit as open_fit,
    saved_population as saved_population, FitRun as FitRun, incidents_text as incidents_text,
    pack_record as pack_record, unpack_record as unpack_record)
from .follow import (about_time as about_time, RunStatus as RunStatus, run_status as run_status, reading as reading,
    watch_text as watch_text)
from .growth_rules import (Made as Made, GROWTH_RULES as GROWTH_RULES, FINALISTS as FINALISTS, ARMS as ARMS,
    TRIED as TRIED, Practice as Practice, RuleRow as RuleRow, register_rule as register_rule,
    growth_rule as growth_rule, as_player as as_player, liked_blueprint as liked_blueprint,
    plateau_rule as plateau_rule, gradient_norm_rule as gradient_norm_rule,
    natural_expansion_rule as natural_expansion_rule, timetable as timetable, list_schedules as list_schedules,
    kinds_of as kinds_of, ScheduleSearch as ScheduleSearch, best_schedule as best_schedule,
    OraclePlayer as OraclePlayer, search_seeds as search_seeds, first_look as first_look, shifted as shifted,
    look_arms as look_arms, best_arms as best_arms, search_arms as search_arms, play_arms as play_arms,
    net_of_room as net_of_room, try_arms as try_arms, tried_arms as tried_arms, fit_forecast as fit_forecast,
    ridge_rule as ridge_rule, forecast_rule as forecast_rule, threshold_rule as threshold_rule,
    Lookahead as Lookahead, train_player as train_player, constant_rule as constant_rule, oracle_rule as oracle_rule,
    search_constant as search_constant, search_kinds as search_kinds)
from .plugins import (GROUP as GROUP, plugin_name as plugin_name, installed_plugins as installed_plugins,
    loaded_plugins as loaded_plugins, packed_plugins as packed_plugins, load_plugin as load_plugin,
    load_plugins as load_plugins, strange_code as strange_code, check_trust as check_trust,
    open_settings as open_settings, seek_in_plugins as seek_in_plugins, load_all_installed as load_all_installed)
from .recipes import (RunConfig as RunConfig, register_recipe as register_recipe, check_changes as check_changes,
    change_settings as change_settings, list_recipes as list_recipes, task_recipe as task_recipe,
    get_recipe as get_recipe, plan_text as plan_text, command_words as command_words, fair_env as fair_env)
from .repeats import (SEARCH_PLAYS as SEARCH_PLAYS, chosen_rules as chosen_rules, compare_recipe as compare_recipe,
    RepeatStore as RepeatStore, search_rivals as search_rivals, Repeat as Repeat, practice_update as practice_update,
    RepeatPlayer as RepeatPlayer)
from .report import (DOCS as DOCS, write_report as write_report, report_html as report_html, RunSummary as RunSummary,
    moment_text as moment_text, read_run as read_run, best_text as best_text, picture_html as picture_html,
    table_html as table_html, records_html as records_html, doc_link as doc_link, settings_html as settings_html,
    beside_html as beside_html, page_html as page_html, RunPage as RunPage)
from .runs import (Makers as Makers, More as More, begin_run as begin_run, check_faults as check_faults,
    open_run as open_run, incident_text as incident_text, learnt_text as learnt_text, bar_text as bar_text,
    response_lines as response_lines, FinalPlan as FinalPlan, plan_plays as plan_plays, Run as Run,
    training_env as training_env)
from .split import (SplitVecEnv as SplitVecEnv, shard_configs as shard_configs,
    check_whole_memory as check_whole_memory, ShardFacts as ShardFacts, ShardStep as ShardStep,
    number_lanes as number_lanes, LaneShard as LaneShard, join_infos as join_infos, join_steps as join_steps,
    join_shards as join_shards)
from .web import PageReader as PageReader, watch_web as watch_web, known_host as known_host
