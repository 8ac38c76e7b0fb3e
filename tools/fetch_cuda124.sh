#!/usr/bin/env bash
# Fetches a CUDA 12.4 toolkit for the cu124 wheel without touching the system. Compiler and headers come from Debian
# 13's non-free packages (1 GB to fetch, 200 MB kept), CCCL and the shared runtime from PyPI. It goes to
# ~/.cache/rl_kernel_native.
#   tools/fetch_cuda124.sh [DEBIAN_MIRROR]        default: http://deb.debian.org/debian
set -euo pipefail

target=${XDG_CACHE_HOME:-$HOME/.cache}/rl_kernel_native/cuda-12.4
[[ ! -x $target/bin/nvcc ]] || { echo "$target is there"; exit 0; }
mirror=${1:-http://deb.debian.org/debian}

source "$(dirname "${BASH_SOURCE[0]}")/private_apt.sh"
private_apt_init
private_apt_update "$mirror" trixie main contrib non-free non-free-firmware
private_apt_unpack nvidia-cuda-toolkit nvidia-cuda-dev

python3 -m pip download -q --no-deps --dest "$work/wheels" --only-binary=:all: \
  nvidia-cuda-cccl-cu12==12.4.127.post1 nvidia-cuda-runtime-cu12==12.4.127
for wheel in "$work"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work/unpacked"; done
echo "unpacked to $work/root; laying it out"

layout=$work/layout
packaged=$work/root/usr/lib/nvidia-cuda-toolkit
mkdir -p "$layout"/{bin,nvvm/bin,include,lib64}
for tool in nvcc ptxas fatbinary cudafe++ bin2c nvlink; do
  cp -aL "$packaged/bin/$tool" "$layout/bin/" 2>/dev/null || cp -aL "$work/root/usr/bin/$tool" "$layout/bin/"
done
cp -a "$packaged/bin/crt" "$layout/bin/"
cp -aL "$packaged/bin/cicc" "$layout/nvvm/bin/"
cp -a "$packaged/libdevice" "$layout/nvvm/"
cp -a "$work"/root/usr/include/. "$work"/unpacked/nvidia/cuda_cccl/include/. \
  "$work"/unpacked/nvidia/cuda_runtime/include/. "$layout/include/"
cp -a "$work"/root/usr/lib/x86_64-linux-gnu/libcud{art_static,adevrt}.a "$work"/unpacked/nvidia/cuda_runtime/lib/libcudart.so.12 \
  "$layout/lib64/"
ln -sf libcudart.so.12 "$layout/lib64/libcudart.so"
# Tells nvcc where the rest lies, relative to itself.
cat >"$layout/bin/nvcc.profile" <<'PROFILE'
TOP              = $(_HERE_)/..
CICC_PATH        = $(TOP)/nvvm/bin
NVVMIR_LIBRARY_DIR = $(TOP)/nvvm/libdevice
PATH             += $(CICC_PATH):$(_HERE_):
INCLUDES         += "-I$(TOP)/include" $(_SPACE_)
LIBRARIES        =+ $(_SPACE_) "-L$(TOP)/lib64"
CUDAFE_FLAGS     +=
PTXAS_FLAGS      +=
PROFILE
mkdir -p "$(dirname "$target")"
rm -rf "$target"
mv "$layout" "$target"
"$target/bin/nvcc" --version | tail -2
