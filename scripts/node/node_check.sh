#!/usr/bin/env bash
# What a job needs to know of this node, as key=value lines: node_check.sh PROJECT (`-`: no project).
set -Eeuo pipefail

openmpi_version() {
    local text
    text=$("$prefix/openmpi/bin/orted" --version 2>&1 | head -n 1) || text=""
    [[ $text =~ ([0-9]+\.[0-9]+\.[0-9]+[A-Za-z0-9.]*) ]] && printf '%s' "${BASH_REMATCH[1]}"
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
    prefix=$(cd -P -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
    [[ -x $prefix/openmpi/bin/orted ]] || {
        echo "$prefix/openmpi/bin/orted is missing"
        exit 69
    }
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
    printf 'python=%s\n' "$("$prefix/stacks/$stack/bin/python" -c 'import platform as p; print(p.python_version())' 2>&1 |
        tail -n 1)"
    printf 'stack=%s\n' "$(cat "$prefix/stacks/$stack/.digest" 2>/dev/null || true)"
    printf 'gpus=%s\n' "$(gpu_count)"
    printf 'ptrace_scope=%s\n' "$(cat "$ptrace" 2>/dev/null || echo 0)"
    [[ $project == - ]] || printf 'project=%s\n' "$(project_state "$project")"
}

main "$@"
