"""Tasks: the interface of what a comparison trains, and plain functions as tasks."""

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
"""Name under which workers import a script, as in multiprocessing: not `__main__`, so that the
script's `if __name__ == "__main__"` block does not run."""
STEPS: Final = "steps"
"""Name of the setting for the number of steps of a run."""
RESERVED: Final = frozenset({"norms", "seeds", "norm_options", "versions", "machine", "date"})
"""Fields of results.json that settings cannot be named after."""


class Task:
    """Base class of tasks; subclass it if a plain function is not enough.

    A subclass has a method `train(self, run, *, …)`. Its keyword parameters with defaults are the
    settings, as for a plain function.

    Attributes:
        name: name in tables and files; the default is `module:name` of the subclass.
    """

    name: str = ""
    train: TrainingFunction

    def prepare(self, settings: Any) -> Any:
        """Return the data of all runs, as `run.data`; called once, before the first run.

        Of several processes, one of each machine calls it first and can fill a cache.
        """
        del settings
        return None

    def fingerprint(self, data: Any) -> str | None:
        """Return a hash of the data; a resumed run must have the same one."""
        del data
        return None

    def baselines(self, data: Any, settings: Any) -> list[Baseline]:
        """Return scores of trivial models; a run that is worse than the first one has diverged."""
        del data, settings
        return []

    def facts(self, data: Any) -> dict[str, Any]:
        """Return name, source, license and sizes of the data, for results.json."""
        del data
        return {}

    def check(self, settings: Any, norm: str) -> None:
        """Raise an InputError if the settings do not fit a norm; called before any training."""
        del settings, norm

    def load(self, folder: Path) -> tuple[nn.Module, Sequence[Any]]:
        """Return the trained model of a run's folder, and batches to diagnose and fold it with.

        Returns:
            The model in evaluation mode, and at least two batches in the form that the model takes
            and made as in training: tensors, tuples, or mappings of keyword arguments.

        Raises:
            InputError: the task does not implement this method.
        """
        raise InputError(
            f"{folder} is a run of {self.name}, which does not define how to load its model: "
            "implement the method load of a Task, see docs/own-models.md"
        )

    # For the engine

    def announce(self, data: Any, baselines: Sequence[Baseline], listener: Listener) -> None:
        """Send an event that describes the data to the listener, before the first run."""
        del data, baselines, listener

    def work(self, grid: "Grid") -> dict[str, Any]:
        """Return the record from which another process can train a grid of the task, as JSON.

        Raises:
            InputError: another process cannot import the function.
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
        """Return the number of steps of a run; None if the settings do not define it."""
        steps = settings.get(STEPS)
        return steps if isinstance(steps, int) and not isinstance(steps, bool) else None

    def settings(self, given: Mapping[str, Any]) -> Any:
        """Return all settings, checked: the given values, and defaults for the others.

        Args:
            given: values, or strings of the command line, by name.

        Raises:
            InputError: a setting is unknown or has the wrong type.
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
        """Return the settings as JSON values, for the files."""
        return {name: self._settings[name].to_json(value) for name, value in settings.items()}

    def source(self) -> FunctionRecord:
        """Return name, file and hash of the task's code at the time of its import."""
        return self._source

    @cached_property
    def _source(self) -> FunctionRecord:
        return _source_of(self.train if isinstance(self, FunctionTask) else type(self))

    @cached_property
    def _settings(self) -> dict[str, "_Setting"]:
        return _settings_of(self.train, self.name)


class FunctionTask(Task):
    """A task from a function of a `Run` and of settings with defaults.

    Raises:
        InputError: a parameter has no default, or cannot be given by its name.
    """

    def __init__(self, function: TrainingFunction) -> None:
        self.train = function
        self.name = name_of(function)
        _ = self._settings  # raises an InputError if they are invalid


def task_of(what: Task | TrainingFunction | str) -> Task:
    """Return a task from a task, its class, a function, or `module:name` of one of these.

    Raises:
        InputError: the argument cannot be imported, or is of another kind.
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
    """Return `module:name` of a function or class; the module of a script is its file's name."""
    code = _code_of(thing)
    module = getattr(code, "__module__", None) or "?"
    if module == "__main__":
        file = _file_of(thing)
        module = file.stem if file is not None else module
    return f"{module}:{code.__qualname__}"


def _source_of(thing: Any) -> FunctionRecord:
    """Return name, file and hash of the file that defines a function or class, or of its code."""
    file, digest = _file_of(thing), None
    with suppress(TypeError, OSError):  # typed at a prompt
        code = inspect.getsource(_code_of(thing)).encode() if file is None else file.read_bytes()
        digest = hashlib.sha256(code).hexdigest()
    return FunctionRecord(
        name=name_of(thing), file=None if file is None else file.name, sha256=digest
    )


def _code_of(thing: Any) -> Any:
    """Return the function or class behind decorators, partials and callable objects."""
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
    """Return module or script of a task and its name there, for the import in a worker."""
    thing = task.train if isinstance(task, FunctionTask) else type(task)
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    found: dict[str, str] = {"name": name}
    if module in ("__main__", SCRIPT):
        file = getattr(sys.modules[module], "__file__", None)
        if file is None:
            raise InputError(
                f"{task.name} is defined at a prompt or in a notebook, where other processes "
                "cannot import it: write it into a file to use jobs"
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
            f"{task.name} cannot be imported by other processes: to use jobs, define it at the top "
            "level of its module, and a task without constructor arguments"
        )
    return found


@dataclass(frozen=True)
class _Setting:
    """A keyword parameter of a training function."""

    name: str
    default: Any
    adapter: TypeAdapter[Any]

    def checked(self, value: Any) -> Any:
        """Convert a value, or a string of the command line, to the type of the parameter."""
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
        """Return a setting's value as a JSON value."""
        return self.adapter.dump_python(value, mode="json")


def _readings(value: Any) -> Iterator[Any]:
    """Yield the possible meanings of a string: None, a JSON value, the string itself, a list."""
    if not isinstance(value, str):
        yield value
        return
    if value.lower() in ("none", "null"):
        yield None
    yield from _parsed(value)
    yield value
    inside = value.strip("()[]")
    yield from _parsed(f"[{inside}]")
    yield [part.strip() for part in inside.split(",")]


def _parsed(text: str) -> Iterator[Any]:
    """Yield the JSON value of a text if it is one; a quoted string is a string with its quotes."""
    with suppress(ValueError):
        found = json.loads(text)
        if not isinstance(found, str):
            yield found


def _settings_of(function: TrainingFunction, name: str) -> dict[str, _Setting]:
    """Return the settings of a function by the names of its parameters."""
    try:
        parameters = [*inspect.signature(function).parameters.values()]
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{name} is no function of a run ({error}): define def train(run, *, steps=1000)"
        ) from error
    if not parameters or parameters[0].kind in (
        inspect.Parameter.KEYWORD_ONLY,
        inspect.Parameter.VAR_KEYWORD,
    ):
        raise InputError(f"{name} takes no run: define def train(run, *, steps=1000)")
    code = _code_of(function)
    names = getattr(code if inspect.isroutine(code) else code.__call__, "__globals__", {})
    return {parameter.name: _setting_of(parameter, name, names) for parameter in parameters[1:]}


def _setting_of(parameter: inspect.Parameter, owner: str, names: dict[str, Any]) -> _Setting:
    if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
        raise InputError(
            f"{owner} takes {parameter}: name each setting with its default, so that it can be "
            "checked and stored"
        )
    if parameter.default is parameter.empty or parameter.kind is parameter.POSITIONAL_ONLY:
        raise InputError(
            f"{owner} has the setting {parameter.name}, which is no keyword with a default: define "
            f"def train(run, *, {parameter.name}=…)"
        )
    if parameter.name in RESERVED:
        raise InputError(
            f"{owner} has the setting {parameter.name}, which is reserved in the files of a "
            "comparison: give it another name"
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
            f"the setting {parameter.name} of {owner} cannot be stored ({first_line}): use a "
            "number, a string or a list of these"
        ) from error
    return setting


def _evaluated(hint: str, name: str, owner: str, names: dict[str, Any]) -> Any:
    """Return the type of an annotation that is a string, as under postponed evaluation."""
    try:
        return eval(hint, names)  # the user's code, evaluated as in typing.get_type_hints
    except Exception as error:
        raise InputError(
            f"the setting {name} of {owner} has the type {hint}, which cannot be found ({error}): "
            "import it so that it is available at run time"
        ) from error
