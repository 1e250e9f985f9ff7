"""The front door: every name that a user needs, from one place, loaded when it is asked for.

`from esper_nb import Governor` loads what the Governor needs and nothing else; `import esper_nb` alone loads no torch.
It also makes the environment known: `gymnasium.make("esper_nb:esper_nb/Grow-v0")` works with no import of ours before.
"""
import difflib
import sys
from importlib import import_module
from typing import TYPE_CHECKING

import gymnasium

__version__ = "0.1.0"

# names (written by `python scripts/notebooks.py door`, which looks up where the names below live now)
if TYPE_CHECKING:
    from esper_nb.core.lanes import per_lane as per_lane
    from esper_nb.guard.governor import Governor as Governor
    from esper_nb.guard.reports import (GovernorConfig as GovernorConfig, GovernorStop as GovernorStop,
        Report as Report)
    from esper_nb.guard.detector import label_entropy as label_entropy
    from esper_nb.guard.adapters import (guard_trainer as guard_trainer, lightning_governor as lightning_governor,
        bar_note as bar_note, guard_accelerator as guard_accelerator, fastai_governor as fastai_governor)
    from esper_nb.grow.module_hosts import (attach_slots as attach_slots, ModuleHostConfig as ModuleHostConfig,
        explore_host as explore_host)
    from esper_nb.grow.models import GrowingModel as GrowingModel, Decision as Decision
    from esper_nb.grow.blueprints import list_blueprints as list_blueprints, plain_blueprint as plain_blueprint
    from esper_nb.grow.export import export_model as export_model, serve_optimizer as serve_optimizer
    from esper_nb.train.tasks import (Task as Task, get_task as get_task, list_tasks as list_tasks,
        create_model as create_model, register_task as register_task, task_from_folder as task_from_folder,
        task_from_table as task_from_table, task_from_arrays as task_from_arrays,
        task_from_dataset as task_from_dataset, task_from_text as task_from_text)
    from esper_nb.train.datasets import load_digits_data as load_digits_data
    from esper_nb.train.optim import LaneOptimizer as LaneOptimizer
    from esper_nb.train.stepper import Stepper as Stepper
    from esper_nb.train.population import (FitConfig as FitConfig, Population as Population,
        new_population as new_population)
    from esper_nb.train.trainer import fit as fit, run_epoch as run_epoch
    from esper_nb.train.ablation import evaluate as evaluate
    from esper_nb.train.faults import Fault as Fault
    from esper_nb.control.gym import GrowEnv as GrowEnv
    from esper_nb.control.envs import GrowVecEnv as GrowVecEnv
    from esper_nb.control.env_config import EnvConfig as EnvConfig
    from esper_nb.control.rules import Heuristic as Heuristic, as_controller as as_controller
    from esper_nb.control.actions import HEADS as HEADS, OPS as OPS
    from esper_nb.learn.learner import Learner as Learner, train_ppo as train_ppo
    from esper_nb.learn.loss import PPOConfig as PPOConfig
    from esper_nb.learn.policies import PolicyConfig as PolicyConfig
    from esper_nb.record.rows import update_rows as update_rows, EnvRows as EnvRows
    from esper_nb.record.writers import Recorder as Recorder, read_rows as read_rows
    from esper_nb.record.analytics import (pick_rows as pick_rows, rollbacks as rollbacks, seed_lives as seed_lives,
        action_mix as action_mix, reward_mix as reward_mix)
    from esper_nb.record.alarms import find_alarms as find_alarms, find_metric as find_metric
    from esper_nb.show.plot_runs import (plot_compare as plot_compare, plot_learning as plot_learning,
        plot_rewards as plot_rewards, plot_incidents as plot_incidents, plot_lanes as plot_lanes,
        plot_slots as plot_slots)
    from esper_nb.show.session import Session as Session
    from esper_nb.show.sources import LoopSource as LoopSource, EnvSource as EnvSource
    from esper_nb.show.dashboard import Dashboard as Dashboard, watch as watch
    from esper_nb.show.views import session_text as session_text
    from esper_nb.run.recipes import get_recipe as get_recipe, list_recipes as list_recipes
    from esper_nb.run.runs import begin_run as begin_run, open_run as open_run, Run as Run
    from esper_nb.run.report import write_report as write_report
    from esper_nb.run.compare import (Comparison as Comparison, compare_controllers as compare_controllers,
        comparison_text as comparison_text, simple_controllers as simple_controllers, PolicyPlayer as PolicyPlayer,
        RandomPlayer as RandomPlayer, play_lanes as play_lanes)
    from esper_nb.run.split import SplitVecEnv as SplitVecEnv
    from esper_nb.run.engines import new_worker as new_worker
_NAMES = {
    "core.lanes": "per_lane",
    "guard.governor": "Governor",
    "guard.reports": "GovernorConfig GovernorStop Report",
    "guard.detector": "label_entropy",
    "guard.adapters": "guard_trainer lightning_governor bar_note guard_accelerator fastai_governor",
    "grow.module_hosts": "attach_slots ModuleHostConfig explore_host",
    "grow.models": "GrowingModel Decision",
    "grow.blueprints": "list_blueprints plain_blueprint",
    "grow.export": "export_model serve_optimizer",
    "train.tasks": "Task get_task list_tasks create_model register_task task_from_folder task_from_table "
        "task_from_arrays task_from_dataset task_from_text",
    "train.datasets": "load_digits_data",
    "train.optim": "LaneOptimizer",
    "train.stepper": "Stepper",
    "train.population": "FitConfig Population new_population",
    "train.trainer": "fit run_epoch",
    "train.ablation": "evaluate",
    "train.faults": "Fault",
    "control.gym": "GrowEnv",
    "control.envs": "GrowVecEnv",
    "control.env_config": "EnvConfig",
    "control.rules": "Heuristic as_controller",
    "control.actions": "HEADS OPS",
    "learn.learner": "Learner train_ppo",
    "learn.loss": "PPOConfig",
    "learn.policies": "PolicyConfig",
    "record.rows": "update_rows EnvRows",
    "record.writers": "Recorder read_rows",
    "record.analytics": "pick_rows rollbacks seed_lives action_mix reward_mix",
    "record.alarms": "find_alarms find_metric",
    "show.plot_runs": "plot_compare plot_learning plot_rewards plot_incidents plot_lanes plot_slots",
    "show.session": "Session",
    "show.sources": "LoopSource EnvSource",
    "show.dashboard": "Dashboard watch",
    "show.views": "session_text",
    "run.recipes": "get_recipe list_recipes",
    "run.runs": "begin_run open_run Run",
    "run.report": "write_report",
    "run.compare": "Comparison compare_controllers comparison_text simple_controllers PolicyPlayer "
        "RandomPlayer play_lanes",
    "run.split": "SplitVecEnv",
    "run.engines": "new_worker",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
# end of names

__all__ = sorted(_MODULES)

if not TYPE_CHECKING:      # for a checker every name is an import above, and no other name is there

    def __getattr__(name):
        "Load a name from the module that makes it."
        if name not in _MODULES:
            near = difflib.get_close_matches(name, _MODULES, 1)
            meant = f"; did you mean {near[0]!r}?" if near else "; dir(esper_nb) lists the names it offers"
            raise AttributeError(f"esper_nb offers no {name!r}{meant}", name=name, obj=sys.modules[__name__])
        value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
        return value

    def __dir__():
        "What the front door offers."
        return sorted([*_MODULES, *(name for name in globals() if name.startswith("__"))])

if "esper_nb/Grow-v0" not in gymnasium.registry:
    gymnasium.register("esper_nb/Grow-v0", entry_point="esper_nb.control.gym:GrowEnv",
                       vector_entry_point="esper_nb.control.envs:GrowVecEnv")
