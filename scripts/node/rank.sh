#!/usr/bin/env bash
# Starts one rank on this node: rank.sh PROJECT SCRIPT [ARGUMENT...], run by mpirun's daemon.
# Nothing here depends on another node's paths: homes and users may differ between nodes.
set -Eeuo pipefail

readonly EXIT_MISSING=69 EXIT_USAGE=64

fail() {
    local status=$1
    shift
    printf 'rank %s on %s: %s\n' "${OMPI_COMM_WORLD_RANK:-?}" "${HOSTNAME:-$(uname -n)}" "$*" >&2
    exit "$status"
}

check_world() {
    local rank=${OMPI_COMM_WORLD_RANK:-} size=${OMPI_COMM_WORLD_SIZE:-} want=${RINGMASTER_NP:-}
    [[ -n $want ]] || fail "$EXIT_USAGE" "RINGMASTER_NP is not set: start jobs with \`fab train\`"
    if [[ -z $rank || -z $size ]]; then
        fail "$EXIT_MISSING" "was started outside MPI, expected to be one of $want ranks:" \
            "another mpirun is first in PATH, or a wrapper drops the OMPI_ variables"
    fi
    if [[ $size != "$want" ]] || ((rank >= size)); then
        fail "$EXIT_MISSING" "is rank $rank of $size, expected one of $want ranks:" \
            "separate trainings would start instead of one"
    fi
}

main() {
    (($# >= 2)) || fail "$EXIT_USAGE" "usage: rank.sh PROJECT SCRIPT [ARGUMENT...]"
    local prefix project=$1 script=$2 stack python
    shift 2
    prefix=$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
    stack=${RINGMASTER_STACK:-tf1}
    [[ $project != */* && $project != .* ]] || fail "$EXIT_USAGE" "bad project name '$project'"
    check_world

    [[ -r $prefix/env.sh ]] || fail "$EXIT_MISSING" "$prefix/env.sh is missing; run \`fab provision\`"
    set +u
    # shellcheck source=/dev/null
    source "$prefix/env.sh"
    set -u
    # mpirun passes the head's prefix on. Where it differs from OPAL_PREFIX, MPI_Init of 4.1 hangs: it wants to say so
    # while it holds the lock that saying so needs.
    if [[ -n ${PMIX_INSTALL_PREFIX:-} ]]; then
        export PMIX_INSTALL_PREFIX=$OPAL_PREFIX
    fi
    python=$prefix/stacks/$stack/bin/python
    [[ -x $python ]] || fail "$EXIT_MISSING" "the $stack stack is missing ($python); run \`fab provision\`"
    if [[ $project == - ]]; then
        cd -- "$prefix/libexec" # one of the checks that lie beside this file
    else
        cd -- "$prefix/projects/$project" 2>/dev/null ||
            fail "$EXIT_MISSING" "the project directory $prefix/projects/$project is missing; run \`fab train\` again"
    fi
    [[ -f $script ]] || fail "$EXIT_MISSING" "the script $script is missing in $PWD; run \`fab train\` again"

    export PYTHONPATH="$prefix/lib${PYTHONPATH:+:$PYTHONPATH}"
    export PYTHONUNBUFFERED=${PYTHONUNBUFFERED-1}
    exec "$python" -S -E "$prefix/libexec/rank_io.py" "$python" "$PWD/$script" "$@"
}

main "$@"
