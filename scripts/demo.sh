#!/usr/bin/env bash
# Sets itself up in .venv and runs `rlk demo`: trains a small model and compares its rollout and training
# log-probabilities. Needs no GPU and downloads no model. Arguments go to `rlk demo`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

install_system_packages
enter_venv
variant=${RLK_VARIANT:-$(default_variant)}
if has_gpu && [[ $variant == cpu ]]; then
  echo "a GPU is here, but no nvcc (or RLK_VARIANT=cpu): the demo uses the CPU"
fi
install_torch "$variant"
echo "building rl_kernel_native ($variant); about a minute"
install_package "$variant" demo
exec rlk demo "$@"
