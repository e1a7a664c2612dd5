"""Laboratory behind `powernorm compare`: train the same model with each norm, and compare them.

    def train(run, *, learning_rate: float = 1e-3, steps: int = 1000):
        model = run.swap(MyModel())
        ...
        return {"accuracy": accuracy}

    lab.compare(train, "runs/mine", norms=["ln", "rbn", "pn"], seeds=3, goal={"accuracy": "max"})

or one of the built-in tasks:

    config = lab.override(lab.recipe("lm", "smoke"), ["norms=ln,rbn", "seeds=0,1"])
    lab.compare(config, "runs/lm")

The interface is provisional: it may change with any release. The names below are imported on first
use, so that `import powernorm_lab` is fast.
"""

from typing import TYPE_CHECKING

__all__ = [
    "Comparison",
    "ComparisonProgress",
    "ComparisonSettings",
    "Notes",
    "OptimizerSettings",
    "Race",
    "RemovalSettings",
    "Run",
    "Study",
    "Task",
    "TrainingSettings",
    "Variant",
    "compare",
    "embedded_sentences",
    "holm",
    "load_trained",
    "override",
    "read_comparison",
    "recipe",
    "remove",
    "replay_race",
    "run_data",
    "saved_states",
    "settings_from",
    "study_config",
    "tune",
]

if TYPE_CHECKING:
    from powernorm_lab.comparing import compare
    from powernorm_lab.data.embedded import embedded_sentences
    from powernorm_lab.engine.grid import Race
    from powernorm_lab.engine.progress import ComparisonProgress
    from powernorm_lab.engine.race import replay_race
    from powernorm_lab.engine.run import Run
    from powernorm_lab.engine.state import saved_states
    from powernorm_lab.engine.tasks import Task
    from powernorm_lab.recipes import recipe
    from powernorm_lab.recipes.studies import study_config
    from powernorm_lab.removal.removing import remove
    from powernorm_lab.removal.settings import RemovalSettings
    from powernorm_lab.report import Comparison, read_comparison
    from powernorm_lab.report.statistics import holm
    from powernorm_lab.settings.comparison import ComparisonSettings, Notes, Study, Variant
    from powernorm_lab.settings.overrides import override
    from powernorm_lab.settings.training import OptimizerSettings, TrainingSettings
    from powernorm_lab.tasks.registry import settings_from
    from powernorm_lab.tasks.trained_models import load_trained, run_data
    from powernorm_lab.tuning.tuner import tune
else:
    _MODULES = {
        "Comparison": "report",
        "ComparisonProgress": "engine.progress",
        "ComparisonSettings": "settings.comparison",
        "Notes": "settings.comparison",
        "OptimizerSettings": "settings.training",
        "Race": "engine.grid",
        "RemovalSettings": "removal.settings",
        "Run": "engine.run",
        "Study": "settings.comparison",
        "Task": "engine.tasks",
        "TrainingSettings": "settings.training",
        "Variant": "settings.comparison",
        "compare": "comparing",
        "embedded_sentences": "data.embedded",
        "holm": "report.statistics",
        "load_trained": "tasks.trained_models",
        "override": "settings.overrides",
        "read_comparison": "report",
        "recipe": "recipes",
        "remove": "removal.removing",
        "replay_race": "engine.race",
        "run_data": "tasks.trained_models",
        "saved_states": "engine.state",
        "settings_from": "tasks.registry",
        "study_config": "recipes.studies",
        "tune": "tuning.tuner",
    }

    def __getattr__(name):
        """Import a public name from its module on first use."""
        if name not in __all__:
            raise AttributeError(f"module 'powernorm_lab' has no attribute {name!r}")
        from importlib import import_module

        module = import_module(f"powernorm_lab.{_MODULES[name]}")
        globals()[name] = value = getattr(module, name)
        return value

    def __dir__():
        return sorted({*globals(), *__all__})
