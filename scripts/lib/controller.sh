# shellcheck shell=bash
# The controller's own environment: what quickstart and test need before any Python of this project can run.
# Sourced; the caller has set `root` (the checkout) and `set -Eeuo pipefail`.

: "${root:?the checkout that the environment belongs to}"

controller_note() { printf '==> %s\n' "$*" >&2; }

controller_fail() {
    local status=$1
    shift
    printf 'error: %s\n' "$@" >&2
    exit "$status"
}

# Prints the newest Python >= 3.9 that can make a virtual environment.
controller_find_python() {
    local name
    for name in ${RINGMASTER_PYTHON:+"$RINGMASTER_PYTHON"} python3.13 python3.12 python3.11 python3.10 python3.9 python3; do
        command -v "$name" >/dev/null 2>&1 || continue
        if "$name" -c 'import sys, ssl, venv, ensurepip; sys.exit(not (3, 9) <= sys.version_info < (3, 15))' \
            >/dev/null 2>&1; then
            "$name" -c 'import sys; print(sys.executable)'
            return 0
        fi
    done
    return 1
}

# True when a C++ program that uses the standard library compiles and links: a compiler without headers does not count.
controller_can_compile() {
    local dir status=0
    command -v c++ >/dev/null 2>&1 || command -v g++ >/dev/null 2>&1 || return 1
    dir=$(mktemp -d)
    printf '#include <stdlib.h>\n#include <vector>\nint main() { return std::vector<int>(3, 1).size() == 3 ? 0 : 1; }\n' \
        >"$dir/probe.cc"
    { c++ -o "$dir/probe" "$dir/probe.cc" || g++ -o "$dir/probe" "$dir/probe.cc"; } >/dev/null 2>&1 || status=1
    rm -rf -- "$dir"
    return "$status"
}

# Sets `packages` to the packages that this machine lacks, in its own package manager's names.
controller_missing() {
    local manager=$1
    packages=()
    if ! controller_find_python >/dev/null; then
        if [[ $manager == apt-get ]]; then packages+=(python3 python3-venv); else packages+=(python3 python3-pip); fi
    fi
    if ! controller_can_compile; then
        if [[ $manager == apt-get ]]; then packages+=(g++); else packages+=(gcc-c++); fi
    fi
    local tool
    for tool in make tar gzip; do
        command -v "$tool" >/dev/null 2>&1 || packages+=("$tool")
    done
}

controller_manager() {
    local name
    for name in apt-get dnf yum zypper; do
        if command -v "$name" >/dev/null 2>&1; then
            printf '%s\n' "$name"
            return 0
        fi
    done
    printf 'apt-get\n'
}

# Installs packages as root or through a sudo that asks nothing; fails with the command to type otherwise.
controller_install() {
    local manager=$1
    shift
    local -a as_root=()
    if ((EUID != 0)); then
        sudo -n true 2>/dev/null ||
            controller_fail 69 "cannot install without root; type: sudo $manager install -y $*"
        as_root=(sudo -n)
    fi
    controller_note "installing: $*"
    if [[ $manager == apt-get ]]; then
        ${as_root[@]+"${as_root[@]}"} apt-get update -qq >&2
        ${as_root[@]+"${as_root[@]}"} env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$@" >&2
    else
        ${as_root[@]+"${as_root[@]}"} "$manager" install -y "$@" >&2
    fi
}

# Finds everything that is missing before anything starts. $1 is 1 when it may install.
controller_preflight() {
    local may_install=$1 manager
    [[ $(uname -s) == Linux ]] || controller_fail 69 "this is $(uname -s); Ringmaster runs on Linux"
    [[ $(uname -m) == x86_64 ]] ||
        controller_fail 69 "this machine is $(uname -m); TensorFlow 1.15 is published for x86_64 only"
    manager=$(controller_manager)
    local -a packages
    controller_missing "$manager"
    if ((${#packages[@]} == 0)); then
        return 0
    fi
    if ((may_install)); then
        controller_install "$manager" "${packages[@]}"
        controller_missing "$manager"
        ((${#packages[@]} == 0)) || controller_fail 69 "still missing after installing: ${packages[*]}"
        return 0
    fi
    local sudo=''
    ((EUID == 0)) || sudo='sudo '
    controller_fail 69 "missing on this machine: ${packages[*]}" \
        "type: ${sudo}$manager install -y ${packages[*]}" \
        "or run this again with --install-deps"
}

controller_digest() { cat -- "$1" "$root/pyproject.toml" | sha256sum | cut -d ' ' -f 1; }

# Makes or updates $root/.venv from a hash-pinned lock; quick when nothing changed. $1 is the lock; the locks
# after it are subsets of it, which the same environment therefore satisfies too.
controller_environment() {
    local venv=$root/.venv python lock
    exec 8>"$root/.venv.lock"
    flock 8
    if grep -qsxF "$(controller_digest "$1")" "$venv/.lock-digests" && "$venv/bin/fab" --version >/dev/null 2>&1; then
        exec 8>&-
        return 0
    fi
    python=$(controller_find_python)
    controller_note "making the controller's environment in .venv with $python"
    rm -rf -- "$venv"
    "$python" -m venv "$venv" >&2
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --require-hashes --no-deps -r "$1" >&2
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation -e "$root" >&2
    for lock in "$@"; do
        controller_digest "$lock"
    done >"$venv/.lock-digests"
    exec 8>&-
}
