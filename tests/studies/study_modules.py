"""Import of the modules of studies, which are not packages."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

STUDIES = Path(__file__).parents[2] / "studies"


def modules_of(study: str, *names: str) -> dict[str, ModuleType]:
    """Load modules of a study, without conflicts with modules of other studies."""
    found = {}
    before = {name: sys.modules.pop(name, None) for name in names}
    try:
        for name in names:
            spec = importlib.util.spec_from_file_location(name, STUDIES / study / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            found[name] = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(found[name])
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module
    return found
