"""A home and caches of the suite's own, made when this is imported."""

import os
import tempfile
from pathlib import Path

# What a machine happens to hold (data sets, compiled kernels, models) must not decide a test. Set
# before anything is imported that reads it; processes that tests start inherit it.
CACHES = {
    "HOME": "",
    "XDG_CACHE_HOME": ".cache",
    "XDG_CONFIG_HOME": ".config",
    "XDG_DATA_HOME": ".local/share",
    "HF_HOME": ".cache/huggingface",
    "TORCH_HOME": ".cache/torch",
    "TORCHINDUCTOR_CACHE_DIR": ".cache/inductor",
    "TRITON_CACHE_DIR": ".cache/triton",
}
if "POWERNORM_TEST_HOME" not in os.environ:
    _home = tempfile.TemporaryDirectory(prefix="powernorm-tests-")  # removed when this process ends
    os.environ["POWERNORM_TEST_HOME"] = _home.name
for _variable, _place in CACHES.items():
    os.environ[_variable] = str(Path(os.environ["POWERNORM_TEST_HOME"], _place))
for _variable in ("POWERNORM_CACHE", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "MPLCONFIGDIR"):
    os.environ.pop(_variable, None)
