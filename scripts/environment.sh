# demo.sh and test.sh source this file. It installs system packages, a virtual environment and torch. It works on a
# fresh machine, and changes nothing that is installed already. Variables: PYTHON (interpreter), RLK_VENV (default
# .venv), RLK_VARIANT (default below).

readonly kTorch=2.13.0
readonly kTorchCpuIndex=https://download.pytorch.org/whl/cpu  # PyTorch's own; asked only where the default index fails

die() {
  printf 'error: %s\n' "$*" >&2
  exit 1
}

have() { command -v "$1" >/dev/null 2>&1; }

has_gpu() { [[ -e /dev/nvidiactl ]] || { have nvidia-smi && nvidia-smi -L >/dev/null 2>&1; }; }

# Puts nvcc on PATH if a CUDA toolkit is installed.
find_nvcc() {
  have nvcc && return
  local dir
  for dir in "${CUDA_HOME:-}" /usr/local/cuda; do
    if [[ -n $dir && -x $dir/bin/nvcc ]]; then
      PATH=$dir/bin:$PATH
      return
    fi
  done
  return 1
}

# The variant that this machine can both build and run.
default_variant() {
  if ! has_gpu || ! find_nvcc; then
    echo cpu
  elif nvcc --version | grep -q 'release 12\.'; then
    echo cu124
  else
    echo cu130
  fi
}

# Finds a Python that can make a virtual environment and compile an extension. 3.11 is tried first, because mirrors most
# often have CPU builds of torch for it.
is_usable_python() {
  "$1" - >/dev/null 2>&1 <<'PY'
import ensurepip, os, sys, sysconfig, venv
sys.exit(not (sys.version_info >= (3, 10) and os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h"))))
PY
}
find_python() {
  local python
  for python in ${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3}; do
    if have "$python" && is_usable_python "$python"; then
      echo "$python"
      return
    fi
  done
  return 1
}

has_header() { [[ -e /usr/include/$1 || -e /usr/local/include/$1 ]]; }

# Whether apt exists and may be used.
can_use_apt() { have apt-get && { ((EUID == 0)) || sudo -n true 2>/dev/null; }; }

# apt_install PACKAGE...
apt_install() {
  local as_root=()
  ((EUID == 0)) || as_root=(sudo -n)
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}

# install_hip_compiler: installs clang 19, and the tools that link and bundle its device code, by apt if apt has them.
install_hip_compiler() {
  have clang++-19 && have ld.lld-19 && have llvm-objdump-19 && have clang-offload-bundler-19 && return
  can_use_apt || return 1
  apt_install clang-19 lld-19 llvm-19 clang-tools-19 >build/clang.log 2>&1
}

# install_system_packages [tests]: installs missing packages by apt. If apt may not be used, it prints the command.
install_system_packages() {
  local missing=()
  have g++ || missing+=(g++)
  have git || missing+=(git)
  find_python >/dev/null || missing+=(python3 python3-venv python3-dev)
  if [[ ${1:-} == tests ]]; then
    has_header gtest/gtest.h || missing+=(libgtest-dev)
    have ccache || missing+=(ccache)
  fi
  ((${#missing[@]})) || return 0
  if ! can_use_apt; then
    die "missing system packages; as an administrator: apt-get install ${missing[*]} (or your system's names for them)"
  fi
  echo "installing ${missing[*]}"
  apt_install "${missing[@]}"
}

# Makes the virtual environment and puts it on PATH.
enter_venv() {
  local venv=${RLK_VENV:-.venv} python
  if [[ ! -x $venv/bin/python ]]; then
    python=$(find_python) || die "no Python 3.10 or newer with venv and headers (Debian: python3-venv, python3-dev)"
    "$python" -m venv "$venv"
  fi
  VIRTUAL_ENV=$(cd "$venv" && pwd)
  export VIRTUAL_ENV PATH="$VIRTUAL_ENV/bin:$PATH"
  unset PYTHONPATH PYTHONHOME  # what is tested is what was installed
  export PIP_DISABLE_PIP_VERSION_CHECK=1
}

# install_torch VARIANT. The suffix "+cpu" matters: on Linux a bare version also installs gigabytes of CUDA libraries.
install_torch() {
  if python -c 'import torch' >/dev/null 2>&1; then return 0; fi
  local wanted=torch==$kTorch+cpu
  if [[ $1 != cpu || $(uname -s) != Linux ]]; then wanted=torch==$kTorch; fi
  echo "installing $wanted"
  pip install -q "$wanted" 2>/dev/null && return
  [[ $wanted == *+cpu ]] || die "pip install $wanted failed"
  echo "the default package index has no $wanted for this Python; asking $kTorchCpuIndex"
  pip install -q "$wanted" --extra-index-url "$kTorchCpuIndex" ||
    die "$wanted is not available here: use Python 3.10 to 3.14, or allow access to $kTorchCpuIndex"
}

# with_progress WORDS LOG COMMAND...: runs the command with its output in LOG. Every 15 seconds it prints the elapsed
# seconds and, if the log counts them, the compiled files. After a failure it prints the end of LOG.
with_progress() {
  local words=$1 log=$2 start=$SECONDS next=$((SECONDS + 15)) pid files
  shift 2
  "$@" >"$log" 2>&1 &
  pid=$!
  while kill -0 "$pid" 2>/dev/null; do
    sleep 0.2
    if ((SECONDS >= next)); then
      next=$((SECONDS + 15))
      files=$(grep -o '\[[0-9]*/[0-9]*\]' "$log" | tail -1 || true)
      echo "$words: $((SECONDS - start)) s${files:+, files $files}"
    fi
  done
  if ! wait "$pid"; then
    tail -30 "$log" >&2
    die "$words failed; all of it is in $log"
  fi
  echo "$words: done in $((SECONDS - start)) s"
}

# wheel_of_tree VARIANT: makes a wheel of this source tree in build/wheels/newest. It compiles only if files changed.
wheel_of_tree() {
  local key folder
  key=$({ git ls-files -s && git diff HEAD; } | sha256sum | cut -c1-16)
  key+=-$1-$(python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
  folder=build/wheels/$key
  if ! ls "$folder"/*.whl >/dev/null 2>&1; then
    rm -rf "$folder.new"
    CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)} \
      pip wheel -v --no-deps -w "$folder.new" . --config-settings="cmake.define.RLK_VARIANT=$1" || return
    rm -rf "$folder"
    mv "$folder.new" "$folder"
  fi
  ln -sfn "$key" build/wheels/newest
}

# install_package VARIANT EXTRA: compiles and installs this source tree.
install_package() {
  CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)} \
    pip install -q ".[$2]" --config-settings="cmake.define.RLK_VARIANT=$1"
}
