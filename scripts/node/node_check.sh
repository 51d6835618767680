#!/usr/bin/env bash
# What a job needs to know of this node, as key=value lines: node_check.sh PROJECT (`-`: no project).
set -Eeuo pipefail

# What orted says of itself, else what mpirun beside it says: orted of most releases knows no --version.
openmpi_version() {
    local program text status
    [[ -x $prefix/openmpi/bin/orted ]] || {
        printf 'broken: %s is missing' "$prefix/openmpi/bin/orted"
        return
    }
    for program in orted mpirun; do
        status=0
        text=$("$prefix/openmpi/bin/$program" --version 2>&1) || status=$?
        if ((status == 126 || status == 127)); then
            printf 'broken: %s' "${text%%$'\n'*}"
            return
        fi
        text=${text%%$'\n'*}
        if [[ $text =~ ([0-9]+\.[0-9]+\.[0-9]+[A-Za-z0-9.]*) ]]; then
            printf '%s' "${BASH_REMATCH[1]}"
            return
        fi
    done
}

# The version of the stack's Python, `missing`, or what it says instead of one.
python_version() {
    if [[ -d $1 ]]; then
        "$1/bin/python" -c 'import platform as p; print(p.python_version())' 2>&1 | tail -n 1
    else
        printf 'missing'
    fi
}

# A digest of the package versions that install_runtime.sh wrote down: the same on every platform.
stack_digest() {
    [[ -r $1 ]] || return 0
    sed -n 's/^ *"packages": *{\(.*\)}.*/\1/p' "$1" | sha256sum | cut -c 1-16
}

# Whether Horovod and mpi4py were built with the Open MPI in place: `here`, `other`, or nothing when no one wrote it down.
built_with() {
    local wanted got
    wanted=$(sed -n 's/^ *"openmpi_digest": *"\([0-9a-f]*\)".*/\1/p' "$1" 2>/dev/null) || return 0
    got=$(sed -n 's/^ *"digest": *"\([0-9a-f]*\)".*/\1/p' "$prefix/openmpi/.ringmaster.json" 2>/dev/null) || return 0
    if [[ -z $wanted || -z $got ]]; then return 0; fi
    if [[ $wanted == "$got" ]]; then printf 'here'; else printf 'other'; fi
}

gpu_count() {
    local devices=(/proc/driver/nvidia/gpus/*)
    if [[ -e ${devices[0]} ]]; then printf '%s' "${#devices[@]}"; else printf '0'; fi
}

# `ok`, `missing`, or the first file that differs from what was shipped.
project_state() {
    local sums=$prefix/projects/$1.sha256 text
    [[ -d $prefix/projects/$1 && -r $sums ]] || {
        printf 'missing'
        return
    }
    if text=$(cd -- "$prefix/projects/$1" && sha256sum -c --quiet -- "$sums" 2>&1); then
        printf 'ok %s' "$(sha256sum < "$sums" | cut -d ' ' -f 1)"
    else
        printf 'differs %s' "${text%%$'\n'*}"
    fi
}

main() {
    local project=${1:--} stack=${RINGMASTER_STACK:-tf1} ptrace=/proc/sys/kernel/yama/ptrace_scope
    prefix=$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
    if [[ -r $prefix/env.sh ]]; then
        set +u
        # shellcheck source=/dev/null
        source "$prefix/env.sh"
        set -u
    fi
    printf 'hostname=%s\n' "$(uname -n)"
    printf 'uid=%s\n' "$(id -u)"
    printf 'prefix=%s\n' "$prefix"
    printf 'openmpi=%s\n' "$(openmpi_version)"
    printf 'python=%s\n' "$(python_version "$prefix/stacks/$stack")"
    printf 'stack=%s\n' "$(stack_digest "$prefix/stacks/$stack/.ringmaster.json")"
    printf 'built_with=%s\n' "$(built_with "$prefix/stacks/$stack/.ringmaster.json")"
    printf 'gpus=%s\n' "$(gpu_count)"
    printf 'ptrace_scope=%s\n' "$(cat "$ptrace" 2>/dev/null || echo 0)"
    [[ $project == - ]] || printf 'project=%s\n' "$(project_state "$project")"
}

main "$@"
