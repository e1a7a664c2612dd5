#!/usr/bin/env bash
# Checks and measures the Triton kernels on a GPU in less than 8 minutes, without a network:
#
#     tools/gpu.sh [FOLDER]
#
# It needs a Python (variable PYTHON, default python3) with torch, triton, numpy, pytest and
# hypothesis; powernorm need not be installed. FOLDER (default runs/gpu) gets, as they come:
#
#     parity.jsonl    every kernel and norm against eager torch, a line a test
#     training.jsonl  compilation, checkpointing, loss scaling, synchronization, a line a test
#     norms.jsonl     every norm against torch's LayerNorm, by width, tokens, type and direction
#     steps.jsonl     a training step of an encoder-decoder with each norm
#
# Failures are listed and stop nothing; the exit code is 1 if there are any. With
# TRITON_INTERPRET=1 small sizes run without a GPU, which shows that all works and measures nothing.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:-runs/gpu}
python=${PYTHON:-python3}
mkdir -p "$out"
rm -f "$out"/*.jsonl "$out"/*.log
cores=$(nproc)  # before OMP_NUM_THREADS, which it obeys
home=$(mktemp -d)
trap 'rm -rf "$home"' EXIT
export PYTHONPATH=src OMP_NUM_THREADS=1 POWERNORM_TEST_HOME="$home" PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
export TRITON_CACHE_DIR="$home/triton" TORCHINDUCTOR_CACHE_DIR="$home/inductor"

if [ "${TRITON_INTERPRET:-}" = 1 ]; then
    marks='not gpu and not slow'
    training=(-m 'not gpu' -k test_checkpointed)
    parts=$cores
    limit=1200
else
    marks='gpu or not gpu'
    training=()
    parts=$((cores < 15 ? cores : 15))
    limit=${LIMIT:-120}
fi

# What Triton compiles is kept, so that many processes compile for the one that measures.
in_parts() {  # NAME LIMIT COMMAND…, with K/N for each part
    local name=$1 limit=$2 part pids=() failed=0
    shift 2
    for part in $(seq "$parts"); do
        POWERNORM_GPU_PART="$part/$parts" POWERNORM_GPU_ROWS="$out/$name.jsonl" \
            timeout -k 5 "$limit" "${@/K\/N/$part/$parts}" >"$out/$name-$part.log" 2>&1 &
        pids+=($!)
    done
    for part in "${pids[@]}"; do wait "$part" || failed=$((failed + 1)); done
    [ "$failed" = 0 ]
}

tests() {  # NAME LIMIT FILES…
    local name=$1 limit=$2 early=
    shift 2
    in_parts "$name" "$limit" "$python" -m pytest -p no:cacheprovider -q -m "$marks" \
        -W default -W 'error:eager torch serves' "$@" ||
        early=$(grep -L ' in [0-9.]*s' "$out/$name"-*.log | tr '\n' ' ')
    "$python" - "$out/$name.jsonl" "$name" "$early" <<'PYTHON'
import json
import sys
from pathlib import Path

path = Path(sys.argv[1])
rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
failed = [row for row in rows if row["outcome"] == "failed"]
passed = sum(row["outcome"] == "passed" for row in rows)
print(f"{sys.argv[2]}: {passed} passed, {len(failed)} failed")
for row in failed:
    print(f"  {row['test']}: {row['message'].strip().splitlines()[-1][:200]}")
early = sys.argv[3].split()
if early:
    print(f"  {len(early)} processes did not end within the limit: see {early[0]}")
sys.exit(bool(failed or early) or not passed)
PYTHON
}

failures=0
begin=$SECONDS
said() { echo "== $1 (after $((SECONDS - begin)) s)"; }

"$python" -c 'import torch, triton; print(torch.__version__, triton.__version__, torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU")' || exit 2
said "kernels and norms against eager torch"
tests parity "$limit" tests/gpu/test_kernels.py tests/gpu/test_norms.py tests/gpu/test_failures.py || failures=1
said "compilation, checkpointing, loss scaling, synchronization"
tests training "$limit" tests/gpu/test_training.py "${training[@]}" || failures=1
if [ "${CHECKS_ONLY:-}" != 1 ]; then
    said "kernels are compiled"
    in_parts warm 60 "$python" benchmarks/gpu.py norms --warm K/N
    said "norms"
    timeout -k 5 180 "$python" benchmarks/gpu.py norms --out "$out/norms.jsonl" --seconds ${NORMS_SECONDS:-140} >"$out/norms.log" 2>&1 || failures=1
    tail -n 3 "$out/norms.log"
    said "training steps"
    timeout -k 5 110 "$python" benchmarks/gpu.py steps --out "$out/steps.jsonl" --seconds 70 >"$out/steps.log" 2>&1 || failures=1
    tail -n 30 "$out/steps.log"
fi
said "over: $out"
exit "$failures"
