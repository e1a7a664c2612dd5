"""What is trained: a task, of which a plain function is the smallest."""

import difflib
import hashlib
import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import PydanticUserError, TypeAdapter, ValidationError
from torch import nn

from powernorm.errors import InputError
from powernorm.norms.named_layers import imported
from powernorm_lab.engine.events import Listener
from powernorm_lab.engine.run import Run
from powernorm_lab.runs import Baseline, FunctionRecord

if TYPE_CHECKING:
    from powernorm_lab.engine.grid import Grid

Metrics = Mapping[str, Any]
TrainingFunction = Callable[..., Metrics]
SCRIPT: Final = "__mp_main__"
"""Name under which workers import a script, as those of multiprocessing do: not `__main__`, so that
what it does under that name is not done again."""
STEPS: Final = "steps"
"""The setting that is the number of steps of a run."""
RESERVED: Final = frozenset({"norms", "seeds", "norm_options", "versions", "machine", "date"})
"""What results.json says beside the settings."""


class Task:
    """What a comparison asks for; subclass it where a function is not enough.

    A subclass has a method `train(self, run, *, …)`, whose keyword parameters with defaults are the
    settings, as those of a plain function are.

    Attributes:
        name: in the tables and files; `module:name` where a subclass does not say.
    """

    name: str = ""
    train: TrainingFunction

    def prepare(self, settings: Any) -> Any:
        """Return the data of all runs, as `run.data`; called once, before the first run.

        With several processes one of each machine is first, so that the others find its cache.
        """
        del settings
        return None

    def fingerprint(self, data: Any) -> str | None:
        """Return a hash of the data, which a run that goes on has to find again."""
        del data
        return None

    def baselines(self, data: Any, settings: Any) -> list[Baseline]:
        """Return models without a network, the first of which every norm has to beat."""
        del data, settings
        return []

    def facts(self, data: Any) -> dict[str, Any]:
        """Return name, source, license and sizes of the data, for results.json."""
        del data
        return {}

    def check(self, settings: Any, norm: str) -> None:
        """Raise an InputError where the settings do not fit a norm; before anything is trained."""
        del settings, norm

    def load(self, folder: Path) -> tuple[nn.Module, Sequence[Any]]:
        """Return the trained model of a run's folder, and batches to diagnose and fold it by.

        Returns:
            The model in evaluation mode; at least two batches as it takes them, made as in
            training: tensors, tuples, or mappings of keyword arguments.

        Raises:
            InputError: the task does not say how.
        """
        raise InputError(
            f"{folder} is a run of {self.name}, which does not say how its model is loaded: let a "
            "Task have the method load, see docs/own-models.md"
        )

    # For the engine

    def announce(self, data: Any, baselines: Sequence[Baseline], listener: Listener) -> None:
        """Tell the listener what the data are, before the first run."""
        del data, baselines, listener

    def work(self, grid: "Grid") -> dict[str, Any]:
        """Return what another process has to know to train a grid of the task; JSON.

        Raises:
            InputError: it cannot import the function.
        """
        record = {
            "function": _importable(self),
            "norms": list(dict.fromkeys(line.norm for line in grid.lines)),
            "seeds": list(grid.seeds),
            "goal": {grid.goal["metric"]: grid.goal["direction"]},
            "settings": self.to_json(grid.settings),
            "norm_options": {},
            "variants": [
                {
                    "label": line.name,
                    "norm": line.norm,
                    "settings": self.to_json(line.settings),
                    "norm_options": dict(line.norm_options),
                }
                for line in grid.lines
            ],
            "device": grid.device.type,
            "num_threads": grid.num_threads,
        }
        path = [str(Path(part).absolute()) for part in sys.path]
        return {"own": record, "path": path}

    def start(self, run: Run) -> Metrics:
        """Train a run and return its metrics."""
        return self.train(run, **run.settings)

    def num_steps(self, settings: Any) -> int | None:
        """Return the number of steps of a run, where the settings have it."""
        steps = settings.get(STEPS)
        return steps if isinstance(steps, int) and not isinstance(steps, bool) else None

    def settings(self, given: Mapping[str, Any]) -> Any:
        """Return all settings, those that were given and the defaults of the others, checked.

        Args:
            given: values, or texts of the command line, by name.

        Raises:
            InputError: one is unknown or has the wrong type.
        """
        known = self._settings
        unknown = next((name for name in given if name not in known), None)
        if unknown is not None:
            near = difflib.get_close_matches(unknown, known, n=1)
            hint = f", did you mean {near[0]}?" if near else f"; known are {', '.join(known)}"
            hint = hint if known else ", which has none"
            raise InputError(f"{unknown!r} is not a setting of {self.name}{hint}")
        values = {
            name: setting.checked(given[name]) if name in given else setting.default
            for name, setting in known.items()
        }
        steps = self.num_steps(values)
        if steps is not None and steps < 1:
            raise InputError(f"{STEPS}={steps}: expected at least 1, the number of steps of a run")
        return values

    def to_json(self, settings: Any) -> dict[str, Any]:
        """Return the settings as JSON has them, for the files."""
        return {name: self._settings[name].to_json(value) for name, value in settings.items()}

    def source(self) -> FunctionRecord:
        """Return where the code is, as it was when it was imported."""
        return self._source

    @cached_property
    def _source(self) -> FunctionRecord:
        return _source_of(self.train if isinstance(self, FunctionTask) else type(self))

    @cached_property
    def _settings(self) -> dict[str, "_Setting"]:
        return _settings_of(self.train, self.name)


class FunctionTask(Task):
    """A task that is a function of a `Run` and of settings with defaults.

    Raises:
        InputError: a parameter has no default, or cannot be given by its name.
    """

    def __init__(self, function: TrainingFunction) -> None:
        self.train = function
        self.name = name_of(function)
        _ = self._settings  # raises where they cannot be read


def task_of(what: Task | TrainingFunction | str) -> Task:
    """Return a task from a task, its class, a function, or `module:name` of one.

    Raises:
        InputError: it cannot be imported or is something else.
    """
    found: Any = imported(what, base=Task) if isinstance(what, str) else what
    task: Task
    if isinstance(found, type) and issubclass(found, Task):
        found = found()
    if isinstance(found, Task):
        if not found.name:
            found.name = name_of(type(found))
        if not hasattr(found, "train"):
            raise InputError(f"{found.name} has no method train: write def train(self, run)")
        task = found
    elif callable(found):
        task = FunctionTask(found)
    else:
        raise InputError(f"{what!r} is a {type(found).__name__}, expected a function or a Task")
    task.source()  # now: the file may change while its runs are trained
    return task


def name_of(thing: Any) -> str:
    """Return `module:name` of a function or class; of a script the name of its file."""
    code = _code_of(thing)
    module = getattr(code, "__module__", None) or "?"
    if module == "__main__":
        file = _file_of(thing)
        module = file.stem if file is not None else module
    return f"{module}:{code.__qualname__}"


def _source_of(thing: Any) -> FunctionRecord:
    """Return name, file and hash of the file that defines a function or class."""
    file = _file_of(thing)
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if file is not None else None
    return FunctionRecord(
        name=name_of(thing), file=None if file is None else file.name, sha256=digest
    )


def _code_of(thing: Any) -> Any:
    """Return the function or class that says what a callable does: of a partial the inner one."""
    code = inspect.unwrap(thing)
    while isinstance(code, partial):
        code = inspect.unwrap(code.func)
    return code if hasattr(code, "__qualname__") else type(code)


def _file_of(thing: Any) -> Path | None:
    try:
        file = inspect.getsourcefile(_code_of(thing))
    except (TypeError, OSError):  # built in, or typed at a prompt
        return None
    return Path(file) if file is not None and Path(file).is_file() else None


def _importable(task: Task) -> dict[str, str]:
    """Return what says where a worker finds a task: a module or a script, and a name in it."""
    thing = task.train if isinstance(task, FunctionTask) else type(task)
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    found: dict[str, str] = {"name": name}
    if module in ("__main__", SCRIPT):
        file = getattr(sys.modules[module], "__file__", None)
        if file is None:
            raise InputError(
                f"{task.name} is written at a prompt or in a notebook, where other processes "
                "cannot import it: write it into a file for jobs"
            )
        found["script"] = str(Path(file).absolute())
    else:
        found["module"] = str(module)
    top: Any = sys.modules.get(str(module))
    with suppress(AttributeError):
        for part in name.split("."):
            top = getattr(top, part)
    own_state = set(vars(task)) - {"name", "_settings", "_source"}
    has_own_state = not isinstance(task, FunctionTask) and own_state
    if top is not thing or has_own_state:
        raise InputError(
            f"{task.name} cannot be imported by other processes: write it at the top level of its "
            "module, a task without arguments, for jobs"
        )
    return found


@dataclass(frozen=True)
class _Setting:
    """A keyword parameter of a training function."""

    name: str
    default: Any
    adapter: TypeAdapter[Any]

    def checked(self, value: Any) -> Any:
        """Return a value, or a text of the command line, as the type of the parameter."""
        failure: ValidationError | None = None
        for candidate in _readings(value):
            try:
                found = self.adapter.validate_python(candidate)
            except ValidationError as error:
                failure = failure or error
                continue
            self._check_storable(found)
            return found
        assert failure is not None
        message = failure.errors(include_url=False)[0]["msg"]
        raise InputError(f"{self.name}={value}: {message[0].lower()}{message[1:]}")

    def _check_storable(self, value: Any) -> None:
        try:
            json.dumps(self.to_json(value), allow_nan=False)
        except (ValueError, TypeError) as error:
            first_line = str(error).partition("\n")[0]
            raise InputError(
                f"{self.name}={value} cannot be stored ({first_line}): give another value"
            ) from error

    def to_json(self, value: Any) -> Any:
        """Return a value as JSON has it."""
        return self.adapter.dump_python(value, mode="json")


def _readings(value: Any) -> Iterator[Any]:
    """Yield what a text can mean: none, a JSON value, itself."""
    if not isinstance(value, str):
        yield value
        return
    if value.lower() in ("none", "null"):
        yield None
    if value[:1] in ("[", "{"):
        with suppress(ValueError):
            yield json.loads(value)
    yield value


def _settings_of(function: TrainingFunction, name: str) -> dict[str, _Setting]:
    """Return the settings of a function by the names of its parameters."""
    try:
        first, *others = inspect.signature(function).parameters.values()
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{name} is no function of a run ({error}): write def train(run, *, steps=1000)"
        ) from error
    if first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise InputError(f"{name} takes no run: write def train(run, *, steps=1000)")
    code = _code_of(function)
    names = getattr(code if inspect.isroutine(code) else code.__call__, "__globals__", {})
    return {parameter.name: _setting_of(parameter, name, names) for parameter in others}


def _setting_of(parameter: inspect.Parameter, owner: str, names: dict[str, Any]) -> _Setting:
    if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        raise InputError(
            f"{owner} takes {parameter}: name each setting, with its default, so that it can be "
            "checked and stored"
        )
    if parameter.default is parameter.empty or parameter.kind is parameter.POSITIONAL_ONLY:
        raise InputError(f"{owner} has the setting {parameter.name} without a default: give one")
    if parameter.name in RESERVED:
        raise InputError(
            f"{owner} has the setting {parameter.name}, which the files of a comparison have for "
            "their own: give it another name"
        )
    hint = parameter.annotation
    if isinstance(hint, str):
        hint = _evaluated(hint, parameter.name, owner, names)
    if hint is parameter.empty:
        hint = Any if parameter.default is None else type(parameter.default)
    try:
        setting = _Setting(parameter.name, parameter.default, TypeAdapter(hint))
        json.dumps(setting.to_json(parameter.default), allow_nan=False)
    except (PydanticUserError, ValueError, TypeError) as error:
        first_line = str(error).partition("\n")[0]
        raise InputError(
            f"the setting {parameter.name} of {owner} cannot be stored ({first_line}): let it be a "
            "number, a text or a list of them"
        ) from error
    return setting


def _evaluated(hint: str, name: str, owner: str, names: dict[str, Any]) -> Any:
    """Return the type that an annotation in quotes, or of postponed evaluation, names."""
    try:
        return eval(hint, names)  # the user's own code, as typing.get_type_hints does it
    except Exception as error:
        raise InputError(
            f"the setting {name} of {owner} has the type {hint}, which cannot be found ({error}): "
            "import it where it is also seen at run time"
        ) from error
