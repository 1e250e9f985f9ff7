# What a user needs, from one place; written by `python scripts/notebooks.py door`
from .core.lanes import per_lane as per_lane
from .guard.governor import Governor as Governor
from .guard.reports import GovernorConfig as GovernorConfig, GovernorStop as GovernorStop, Report as Report
from .guard.detector import label_entropy as label_entropy
from .guard.adapters import (guard_trainer as guard_trainer, lightning_governor as lightning_governor,
    bar_note as bar_note, guard_accelerator as guard_accelerator, fastai_governor as fastai_governor,
    guard_update as guard_update, skorch_governor as skorch_governor)
from .grow.module_hosts import (attach_slots as attach_slots, ModuleHostConfig as ModuleHostConfig,
    explore_host as explore_host)
from .grow.models import GrowingModel as GrowingModel, Decision as Decision
from .grow.blueprints import list_blueprints as list_blueprints, plain_blueprint as plain_blueprint
from .grow.export import export_model as export_model, serve_optimizer as serve_optimizer
from .train.tasks import (Task as Task, get_task as get_task, list_tasks as list_tasks, create_model as create_model,
    register_task as register_task, task_from_folder as task_from_folder, task_from_table as task_from_table,
    task_from_arrays as task_from_arrays, task_from_dataset as task_from_dataset, task_from_text as task_from_text)
from .train.datasets import load_digits_data as load_digits_data
from .train.optim import LaneOptimizer as LaneOptimizer
from .train.stepper import Stepper as Stepper
from .train.population import (FitConfig as FitConfig, Population as Population, new_population as new_population,
    SeedWorth as SeedWorth)
from .train.trainer import fit as fit, run_epoch as run_epoch
from .train.ablation import evaluate as evaluate
from .train.faults import Fault as Fault
from .control.envs import GrowEnv as GrowEnv, GrowVecEnv as GrowVecEnv, EnvConfig as EnvConfig
from .control.rules import (Heuristic as Heuristic, as_controller as as_controller,
    GerminationRule as GerminationRule)
from .control.actions import HEADS as HEADS, OPS as OPS
from .control.forecast import Forecast as Forecast, SeedForecast as SeedForecast, play_seeds as play_seeds
from .learn.learner import Learner as Learner, train_ppo as train_ppo
from .learn.loss import PPOConfig as PPOConfig
from .learn.policies import PolicyConfig as PolicyConfig
from .record.training_rows import update_rows as update_rows, EnvRows as EnvRows
from .record.writers import Recorder as Recorder, read_rows as read_rows
from .record.analytics import (pick_rows as pick_rows, rollbacks as rollbacks, seed_lives as seed_lives,
    action_mix as action_mix, reward_mix as reward_mix)
from .record.alarms import find_alarms as find_alarms, find_metric as find_metric
from .record.notices import apprise_notify as apprise_notify
from .show.plot_runs import (plot_compare as plot_compare, plot_learning as plot_learning,
    plot_rewards as plot_rewards, plot_incidents as plot_incidents, plot_lanes as plot_lanes,
    plot_slots as plot_slots)
from .show.session import Session as Session
from .show.sources import LoopSource as LoopSource, EnvSource as EnvSource
from .show.dashboard import Dashboard as Dashboard, watch as watch
from .show.views import session_text as session_text
from .run.recipes import get_recipe as get_recipe, list_recipes as list_recipes
from .run.runs import begin_run as begin_run, open_run as open_run, Run as Run
from .run.report import write_report as write_report
from .run.comparison import Comparison as Comparison, comparison_text as comparison_text
from .run.compare import (compare_controllers as compare_controllers, simple_controllers as simple_controllers,
    PolicyPlayer as PolicyPlayer, RandomPlayer as RandomPlayer, play_lanes as play_lanes)
from .run.split import SplitVecEnv as SplitVecEnv
from .run.engines import new_worker as new_worker
from .run.growth_rules import register_rule as register_rule, RuleRow as RuleRow
from .run.fits import begin_fit as begin_fit, open_fit as open_fit, FitRun as FitRun, fit_run as fit_run

__version__: str
__all__: list[str]
def __dir__() -> list[str]: ...
