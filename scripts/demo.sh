#!/usr/bin/env bash
# Sets itself up in .venv and runs `rlk demo`: trains a small model and compares its rollout and training
# log-probabilities. Needs no GPU and downloads no model. Arguments go to `rlk demo`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

install_system_packages
enter_venv
variant=${RLK_VARIANT:-$(default_variant)}
mkdir -p build/wheels
cat <<PLAN
This machine has $(nproc) cores; the variant is $variant. What follows:
  1. torch, unless it is here: a download, some hundred MB for the CPU, gigabytes for CUDA
  2. a wheel of these sources, unless build/wheels has it: compiled on all cores. One core of an
     AMD EPYC needs 290 s for it: 2 cores need half of that, 8 an eighth
  3. the wheel, and transformers and other packages beside it
  4. rlk demo: 5 minutes at most, or what --minutes says; its responses get shorter where that is little time
Each step says every 15 seconds how far it is.
PLAN
if has_gpu && [[ $variant == cpu ]]; then
  echo "a GPU is here, but no nvcc (or RLK_VARIANT=cpu): the demo uses the CPU"
fi
with_progress "1. torch" build/demo_torch.log install_torch "$variant"
with_progress "2. wheel" build/demo_wheel.log wheel_of_tree "$variant"
wheel=$(ls build/wheels/newest/*.whl)
with_progress "3. packages" build/demo_packages.log pip install "$wheel[demo]"
pip install -q --no-deps --force-reinstall "$wheel"  # another build of the same version may have been there
exec rlk demo "$@"
