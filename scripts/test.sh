#!/usr/bin/env bash
# Runs every check that needs no GPU: scripts/test.sh [stage ...]. By default it runs all stages except hip-isa.
#   lint      ruff, clang-format, mypy, types of public names (tools/check_types.py), sentences (tools/check_prose.py)
#   cpp       C++ tests (preset cpu)
#   python    pytest against the installed package, NumPy, torch and JAX on the CPU
#   engines   vLLM on a CPU: 0 tokens differ between its rollout, its prefill and patched trainers, TRL's with a
#             colocated engine too; skipped where its wheel cannot be fetched
#   cuda      the CUDA kernels compile without spills (preset cuda); skipped without nvcc. With RLK_CUDA_SECONDS, objects
#             that cmake/cuda_objects.json covers are compiled for that long, and it says which are left
#   hip       the HIP kernels compile without spills (preset hip) and serve Python under the emulation; skipped without
#             clang 19
#   wheel     the wheel of variant cpu for this Python, tried in an empty environment
#   site      the documentation, from docs/, docstrings and contracts; a warning is an error
#   sanitize  C++ tests under ASan and UBSan (preset sanitize), and with clang 19 those of the HIP kernels, which run
#             nowhere else
# A stage that runs only if it is named:
#   hip-isa   the HIP kernels' machine code, instruction by instruction on both architectures (hip/README.md); after any
#             change of a HIP kernel. RLK_ISA_CASES is the number of cases of each fuzz set that run (80).
# The stages setup (tools into .venv) and package (pip install .) always run first. A failed stage does not stop the
# other stages; the exit status is 1 if any stage failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

readonly kStages=(lint cpp python engines cuda hip wheel site sanitize)
readonly kNamedStages=(hip-isa)

stage_setup() {
  pip install -q 'cmake>=3.31' ninja
  # pip waits, and unpacks with one core. At the same time, the code of every build is compiled into ccache and
  # build/cpu.
  if have ccache; then
    { configure cpu && nice cmake --build build/cpu --parallel "$(nproc)" --target rlk_core; } >build/ahead.log 2>&1 &
  fi
  install_torch cpu
  pip install -q -r scripts/requirements-lint.txt jax
  # The trainers whose losses are compared with ours. verl and OpenRLHF are installed without their dependencies,
  # because
  # they pin other versions of these.
  pip install -q 'trl>=1.15' datasets ray hydra-core codetiming torchdata pylatexenc cloudpickle orjson 'pyvers<0.2'
  pip install -q --no-deps verl==0.9.1 openrlhf==0.11.2 tensordict==0.10.0 peft
  wait  # a file that does not compile fails the next stage, with its message
}

stage_package() {
  install_package cpu test
  # Python starts in another directory, so that it imports the installed package.
  (cd / && python -c 'import rl_kernel_native as rk; print(rk.__file__, rk.variant)')
}

stage_lint() {
  local status=0 sources=(bench bindings cpp cpu cuda kernels tests)  # every tool has its say
  [[ -d hip ]] && sources+=(hip)
  # These two tools take longest and use one core each, so the other tools run beside them. Their output is printed
  # last.
  mypy >build/mypy.log 2>&1 & local mypy=$!
  python tools/check_types.py >build/types.log 2>&1 & local types=$!
  ruff check . || status=1
  ruff format --check . || status=1
  find "${sources[@]}" -regex '.*\.\(cpp\|h\|cu\|cuh\|hip\)' -print0 |
    xargs -0 clang-format --dry-run -Werror || status=1
  python tools/check_prose.py || status=1
  wait $types || status=1
  wait $mypy || status=1
  cat build/types.log build/mypy.log
  return $status
}

# configure PRESET [OPTION...]
configure() {
  cmake --preset "$@" --fresh -Wno-dev >"build/$1.log" 2>&1 || { cat "build/$1.log"; return 1; }
}
# build PRESET [OPTION...]
build() {
  configure "$@"
  cmake --build "build/$1" --parallel "$(nproc)"
}

stage_cpp() {
  build cpu
  ctest --test-dir build/cpu --output-on-failure --parallel "$(nproc)" --label-exclude gpu
}

# Runs pytest in as many processes as there are cores. Each process has as many threads as it would have alone, so that
# the data that threads share are tested as in a single process. A thread that waits leaves its core to other processes.
pytest_in_parallel() {
  OMP_WAIT_POLICY=PASSIVE python -m pytest -q --durations=10 -n "$(nproc)" --dist worksteal "$@"
}

stage_python() {
  # If a trainer's source cannot be imported, tests against it fail instead of being skipped.
  export RLK_REQUIRE_FRAMEWORKS=1
  # Tests also run with the oldest declared NumPy, if it has a wheel for this Python.
  local status=0 oldest=build/oldest_numpy
  if [[ -d $oldest ]] || pip install -q --no-deps --only-binary :all: --target "$oldest" 'numpy==1.24.4'; then
    export RLK_OLDEST_NUMPY=$PWD/$oldest
  fi
  # Tests also run with the oldest supported TRL. Each case of TRL's loss runs with one of the two releases.
  local oldest_trl=build/oldest_trl
  if [[ -d $oldest_trl ]] || pip install -q --no-deps --target "$oldest_trl" 'trl==1.15.0'; then
    PYTHONPATH=$PWD/$oldest_trl RLK_TRL_TURN=oldest pytest_in_parallel tests/frameworks/test_integrations_trl*.py \
      tests/frameworks/test_presets.py -k 'integrations or trl' || status=1
    export RLK_TRL_TURN=newest
  fi
  pytest_in_parallel -m 'not gpu and not slow and not alone' || status=1
  # These tests measure time, so they run alone. Only their files are collected, because collecting all files takes half
  # a minute of one core.
  grep -lr --include='test_*.py' 'pytest\.mark\.alone' tests |
    xargs python -m pytest -q -m 'not gpu and not slow and alone' || status=1
  return $status
}

stage_engines() {
  local status=0
  export OMP_WAIT_POLICY=PASSIVE  # a thread that waits leaves its core to the compilers of stage cuda
  # torchao is installed outside the environment. Inside it, transformers and PEFT would load it, and it prints.
  if pip install -q --no-deps --no-compile --upgrade --target build/torchao torchao==0.18.0; then
    PYTHONPATH=$PWD/build/torchao python -m pytest -q tests/torch/test_patch_frameworks.py -k torchao || return 1
  else
    echo "SKIPPED: torchao cannot be fetched here, so no weight of its own was patched"
  fi
  tools/fetch_vllm.sh build/engines python || status=$?
  if ((status == 75)); then
    echo "SKIPPED: the wheel of vllm 0.26.0 or a package beside it cannot be fetched here, so no engine was run"
    return
  fi
  ((status == 0)) || return $status
  local path=$PWD/build/engines
  if pip install -q --no-deps --no-compile --upgrade --target build/megatron -r scripts/requirements-megatron.txt; then
    path=$PWD/build/megatron:$path
    export RLK_REQUIRE_MEGATRON=1
  else
    echo "SKIPPED: megatron-core cannot be fetched here, so it was no trainer"
  fi
  PYTHONPATH=$path RLK_REQUIRE_ENGINES=1 timeout 900 python -m pytest -q --durations=5 \
    tests/frameworks/test_megatron.py tests/frameworks/test_vllm.py tests/frameworks/test_vllm_second_sampler.py \
    tests/frameworks/test_vllm_shared.py tests/frameworks/test_vllm_off.py || status=1
  # TRL imports every package that it finds, so megatron-core is not on this path.
  PYTHONPATH=$PWD/build/engines RLK_REQUIRE_ENGINES=1 timeout 600 python -m pytest -q \
    tests/frameworks/test_example_grpo_vllm.py || status=1
  return $status
}

stage_cuda() {
  if ! find_nvcc; then
    echo "SKIPPED: no nvcc here, so the CUDA kernels were not compiled"
    return
  fi
  configure cuda
  # Compilers have low priority, because tests of the stages beside them have time limits. Objects whose sources changed
  # since they compiled without spills come first; the others have RLK_CUDA_SECONDS seconds (0: no limit).
  local changed status=0
  changed=$(python tools/cuda_objects.py changed)
  [[ -z $changed ]] || nice -n 10 ninja -C build/cuda $changed
  nice -n 10 timeout "${RLK_CUDA_SECONDS:-0}" bash -c \
    'ninja -C build/cuda rlk_cuda_sm90 rlk_cuda_sm80 && ninja -C build/cuda gpu_tests gpu_benches' || status=$?
  ((status == 124)) || return $status
  python tools/cuda_objects.py missing
}

# build_hip TARGET...: builds the targets and the extension with the HIP backend. build/hip/package gets the extension
# and
# the package's Python files.
build_hip() {
  pip install -q 'nanobind>=3.1,<4'
  configure hip -DRLK_BUILD_PYTHON=ON -DPython_EXECUTABLE="$VIRTUAL_ENV/bin/python"
  cmake --build build/hip --parallel "$(nproc)" --target _C "$@"
  rm -rf build/hip/package
  mkdir build/hip/package
  (cd python && find rl_kernel_native -name '*.py' -exec cp --parents {} ../build/hip/package \;)
  cp build/hip/_C*.so build/hip/package/rl_kernel_native/
}

stage_hip() {
  if ! install_hip_compiler; then
    echo "SKIPPED: no clang 19 here, so the HIP kernels were neither compiled nor run"
    return
  fi
  build_hip hip_standin hip_tiles
  PYTHONPATH=$PWD/build/hip/package LD_LIBRARY_PATH=$PWD/build/hip/hip_standin RLK_STANDIN_ORDER=forward \
    RLK_FUZZ_CASES=${RLK_HIP_FUZZ_CASES:-200} pytest_in_parallel tests/hip/test_hip.py
}

# The operators whose C++ tests also run on the machine code, because test_hip.py calls them rarely or never.
readonly kIsaTests=(kv_cache_append linear_kernels linear_logprob pack random_bits sample)

stage_hip-isa() {
  install_hip_compiler || die "no clang 19 here"
  build_hip test_hip_isa "${kIsaTests[@]/#/test_hip_}"
  ctest --test-dir build/hip --output-on-failure -L '^isa$'
  local arch test status=0 log=$PWD/build/hip/isa.log
  export LD_LIBRARY_PATH=$PWD/build/hip/hip_isa RLK_ISA_ARGUMENT_SIZES=1 RLK_ISA_LOG=$log RLK_STANDIN_ARCH
  rm -f "$log"
  for arch in gfx90a gfx942; do
    RLK_STANDIN_ARCH=$arch
    # Two tests that ask the stand-in for the runtime's version are left out, and the certificates, which take hours.
    PYTHONPATH=$PWD/build/hip/package:$PWD/tests/hip RLK_STANDIN_ORDER=forward RLK_FUZZ_CASES=${RLK_ISA_CASES:-80} \
      pytest_in_parallel -p hip_guarded_arrays tests/hip/test_hip.py -k 'not certificate and not certified and not runtime' ||
      status=1
    for test in "${kIsaTests[@]}"; do
      [[ $arch/$test != gfx90a/linear_logprob ]] || continue  # compares with the CPU's gfx942 alone
      RLK_STANDIN_ORDER=shuffled "build/hip/test_hip_$test" --gtest_brief=1 || status=1
    done
  done
  if grep '^FAULT' "$log"; then status=1; fi
  return $status
}

stage_wheel() {
  python tools/build_wheels.py --variant cpu --python "$(python -c 'import sys; print("%d.%d" % sys.version_info[:2])')" \
    --out build/dist
  python tools/build_wheels.py --check --out build/dist
}

stage_site() {
  pip install -q -r scripts/requirements-site.txt
  python tools/build_site.py
}

stage_sanitize() {
  local options=(-DRLK_VARIANT=cpu)
  if install_hip_compiler; then
    options=(-DRLK_VARIANT=rocm6)
    [[ ! -e build/hip/hip/tiles.gfx942.hsaco ]] || options+=("-DRLK_HIP_DEVICE_CODE=$PWD/build/hip/hip")
  fi
  build sanitize "${options[@]}"
  UBSAN_OPTIONS=print_stacktrace=1 \
    ctest --test-dir build/sanitize --output-on-failure --parallel "$(nproc)" --label-exclude gpu
}

# Prints the failures in a stage's log: names from pytest and ctest, and errors of compilers. Without any, the last
# lines.
failures_in() {
  grep -E '^(FAILED|ERROR) |\*\*\*(Failed|Timeout|Exception)|[ :]error: ' "$1" | cut -c1-400 | tail -20 | grep . ||
    tail -15 "$1"
}

# Files to which stages append; stages may run at the same time.
readonly kSummary=build/summary.txt kFailures=build/failures.txt
run_stage() {
  local start=$SECONDS status log=build/stage_$1.log
  printf '\n=== %s\n' "$1"
  set +e
  (set -e; "stage_$1") 2>&1 | tee "$log"
  status=${PIPESTATUS[0]}
  set -e
  ((status == 0)) || printf '=== %s failed\n%s\n' "$1" "$(failures_in "$log")" >>"$kFailures"
  printf '%-10s %-6s %4d s\n' "$1" "$( ((status)) && echo FAILED || echo ok)" $((SECONDS - start)) >>"$kSummary"
}

# These stages use little more than one core. They run one after another, beside the compiler of stage cuda.
readonly kBesideCuda=(engines wheel site)
# is_one_of STAGE STAGE...
is_one_of() { [[ " ${*:2} " == *" $1 "* ]]; }
# run_stages STAGE...: runs stages in this order. Stages of kBesideCuda run beside cuda, and their output follows
# cuda's.
run_stages() {
  local stage beside=() lane
  if is_one_of cuda "$@"; then
    for stage in "$@"; do ! is_one_of "$stage" "${kBesideCuda[@]}" || beside+=("$stage"); done
  fi
  for stage in "$@"; do
    if [[ $stage == cuda ]]; then
      for stage in ${beside[@]+"${beside[@]}"}; do run_stage "$stage"; done >build/beside.log 2>&1 & lane=$!
      run_stage cuda
      wait $lane
      cat build/beside.log
    elif ! is_one_of "$stage" ${beside[@]+"${beside[@]}"}; then
      run_stage "$stage"
    fi
  done
}

stages=("$@")
((${#stages[@]})) || stages=("${kStages[@]}")
for stage in "${stages[@]}"; do
  is_one_of "$stage" "${kStages[@]}" "${kNamedStages[@]}" ||
    die "no stage '$stage'; there are: ${kStages[*]} ${kNamedStages[*]}"
done

install_system_packages tests
enter_venv
export CXX=${CXX:-g++}  # by one name in all stages, CMake's and pip's: ccache takes c++ for another compiler
mkdir -p build
rm -f "$kSummary" "$kFailures"
run_stage setup
[[ -e $kFailures ]] || run_stage package
[[ -e $kFailures ]] || run_stages "${stages[@]}"

printf '\n=== summary\n'
[[ ! -e $kFailures ]] || cat "$kFailures"
cat "$kSummary"
python tests/check_gpu_log.py  # only says whether the GPU tests were run on these sources
[[ ! -e $kFailures ]]
