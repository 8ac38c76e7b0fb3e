#!/usr/bin/env bash
# Fetches g++ 10 and the C library of Debian 11 without touching the system. They build wheels that run on old systems
# (manylinux). They go to ~/.cache/rl_kernel_native/gcc-10; bin/c++ there compiles against that C library and carries
# the C++ runtime.
#   tools/fetch_gcc10.sh [DEBIAN_MIRROR]        default: http://deb.debian.org/debian, then archive.debian.org
set -euo pipefail

target=${XDG_CACHE_HOME:-$HOME/.cache}/rl_kernel_native/gcc-10
[[ ! -x $target/bin/c++ ]] || { echo "$target is there"; exit 0; }

source "$(dirname "${BASH_SOURCE[0]}")/private_apt.sh"
private_apt_init
for mirror in "${1:-http://deb.debian.org/debian}" http://archive.debian.org/debian; do
  private_apt_update "$mirror" bullseye main 2>/dev/null && private_apt_has g++-10 && break
done
packages=(
  g++-10 gcc-10 cpp-10 gcc-10-base libgcc-10-dev libstdc++-10-dev libgcc-s1 libc6 libc6-dev linux-libc-dev
  libcrypt-dev libcrypt1 libnsl-dev libisl23 libmpc3 libmpfr6 libgmp10 binutils binutils-x86-64-linux-gnu
  binutils-common libbinutils libctf0 libctf-nobfd0 zlib1g libzstd1 libstdc++6
)
private_apt_unpack "${packages[@]}"
# Links of the package are absolute; below another root they must be relative.
find "$work/root" -type l -lname '/*' | while read -r link; do
  ln -sfnr "$work/root$(readlink "$link")" "$link"
done

mkdir -p "$work/root/bin.ours"
for language in c++:g++ cc:gcc; do
  cat >"$work/root/bin.ours/${language%%:*}" <<WRAPPER
#!/usr/bin/env bash
root=\$(cd "\$(dirname "\$(readlink -f "\${BASH_SOURCE[0]}")")/.." && pwd)
lib=\$root/usr/lib/x86_64-linux-gnu
link=()
for argument in "\$@"; do
  case \$argument in -c | -S | -E | -M | -MM) link=(); break ;; *) link=(-static-libstdc++ -static-libgcc) ;; esac
done
LD_LIBRARY_PATH=\$lib exec "\$root/usr/bin/${language##*:}-10" --sysroot="\$root" \\
  -B"\$root/usr/lib/gcc/x86_64-linux-gnu/10" -B"\$root/usr/bin" "\${link[@]}" "\$@"
WRAPPER
  chmod +x "$work/root/bin.ours/${language%%:*}"
done
rm -rf "$work/root/usr/share"
mkdir -p "$(dirname "$target")"
rm -rf "$target"
[[ -L $work/root/bin || ! -d $work/root/bin ]] || cp -an "$work/root/bin/." "$work/root/usr/bin/"
rm -rf "$work/root/bin"
mv "$work/root/bin.ours" "$work/root/bin"
mv "$work/root" "$target"
"$target/bin/c++" --version | head -1
