# Sourced by fetch_*.sh: Debian packages of another release, unpacked into a directory, the system untouched.
# private_apt_init sets $work, removed on exit.

private_apt_init() {
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  mkdir -p "$work"/{state/lists/partial,cache/archives/partial,etc,debs,root}
  : >"$work/status"
  apt_options=(
    -o Dir::State="$work/state" -o Dir::Cache="$work/cache" -o Dir::Etc::sourcelist="$work/etc/sources.list"
    -o Dir::Etc::sourceparts=- -o Dir::State::status="$work/status" -o APT::Sandbox::User=root
  )
}

# private_apt_update MIRROR SUITE COMPONENT...
private_apt_update() {
  echo "deb [trusted=yes] $*" >"$work/etc/sources.list"
  apt-get "${apt_options[@]}" update -qq
}

private_apt_has() { [[ -n $(apt-cache "${apt_options[@]}" show "$1" 2>/dev/null) ]]; }

# Into $work/root.
private_apt_unpack() {
  (cd "$work/debs" && apt-get "${apt_options[@]}" download -qq "$@")
  local deb
  for deb in "$work"/debs/*.deb; do dpkg-deb -x "$deb" "$work/root"; done
}
