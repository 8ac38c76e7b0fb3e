#!/usr/bin/env bash
# Lays out vLLM 0.26.0 for a CPU in a folder for PYTHONPATH: tools/fetch_vllm.sh FOLDER [PYTHON]. It takes the Python
# files of the wheel and none of its libraries (rl_kernel_native.integrations.vllm.cpu says how it runs), with the
# packages of scripts/requirements-vllm.txt. torch, transformers and NumPy are the interpreter's. The wheel (290 MiB) is
# cached by its hash in RLK_CACHE, by default ~/.cache/rl_kernel_native. The exit status is 75 if something cannot be
# fetched.
set -euo pipefail
readonly kVersion=0.26.0
readonly kHash=adb1e4c9b46d0dfdb094121ae5aad670a42412dd813ed4e5db069ed6a15006de
readonly kCannotFetch=75
readonly kRoot=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

folder=${1:?FOLDER}
python=${2:-python}
cache=${RLK_CACHE:-$HOME/.cache/rl_kernel_native}
stamp="$kHash $(sha256sum <"$kRoot/scripts/requirements-vllm.txt") $("$python" -V)"
if [[ -e $folder/.stamp && $(<"$folder/.stamp") == "$stamp" ]]; then exit 0; fi

mkdir -p "$cache"
wheel=$(find "$cache" -name "vllm-$kVersion-*.whl" | head -1)
is_right() { [[ -n $wheel ]] && sha256sum --check --status <<<"$kHash  $wheel"; }
if ! is_right; then
  "$python" -m pip download -q --no-deps --only-binary=:all: --platform manylinux_2_28_x86_64 --python-version 3.12 \
    --implementation cp --abi abi3 -d "$cache" "vllm==$kVersion" || exit $kCannotFetch
  wheel=$(find "$cache" -name "vllm-$kVersion-*.whl" | head -1)
  is_right || { echo "error: $wheel has another hash than $kHash" >&2; exit 1; }
fi
rm -rf "$folder"
mkdir -p "$folder"
"$python" -m pip install -q --no-deps --no-compile --target "$folder" -r "$kRoot/scripts/requirements-vllm.txt" ||
  exit $kCannotFetch
"$python" - "$wheel" "$folder" <<'PY'
import sys, zipfile

with zipfile.ZipFile(sys.argv[1]) as wheel:
    kept = [n for n in wheel.namelist() if not n.endswith(".so") and "/third_party/deep_gemm" not in n and "vllm-rs" not in n]
    wheel.extractall(sys.argv[2], kept)
PY
printf '%s' "$stamp" >"$folder/.stamp"
