"""The front door: every name that a user needs, from one place, loaded when it is asked for.

`from esper_nb import Governor` loads what the Governor needs and nothing else; `import esper_nb` alone loads no torch.
It also makes the environment known: `gymnasium.make("esper_nb:esper_nb/Grow-v0")` works with no import of ours before.
"""
import difflib
import sys

import lazy_loader

try: import gymnasium
except ModuleNotFoundError: gymnasium = None      # all but the environments works without

__version__ = "0.1.0"
_load, _, __all__ = lazy_loader.attach_stub(__name__, __file__)      # the names stand in `__init__.pyi`


def __getattr__(name):
    "Load a name from the module that makes it."
    if name in __all__: return _load(name)
    near = difflib.get_close_matches(name, __all__, 1)
    meant = f"; did you mean {near[0]!r}?" if near else "; dir(esper_nb) lists the names it offers"
    raise AttributeError(f"esper_nb offers no {name!r}{meant}", name=name, obj=sys.modules[__name__])


def __dir__():
    "What the front door offers."
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


if gymnasium is not None and "esper_nb/Grow-v0" not in gymnasium.registry:
    gymnasium.register("esper_nb/Grow-v0", entry_point="esper_nb.control.envs:GrowEnv",
                       vector_entry_point="esper_nb.control.envs:GrowVecEnv")
