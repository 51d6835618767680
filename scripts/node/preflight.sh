#!/usr/bin/env bash
# Asks every node, over the very path mpirun's daemons take, whether it can take part in a job.
# usage: preflight.sh TIMEOUT_S PROJECT HOST...     (run on the head; the host `localhost` is this node)
# Standard output, for each host: `HOST<TAB>STATUS<TAB>key=value` lines of node_check.sh, or the error text.
set -Eeuo pipefail

readonly AT_ONCE=32

main() {
    (($# >= 3)) || {
        echo "usage: preflight.sh TIMEOUT_S PROJECT HOST..." >&2
        exit 64
    }
    local timeout_s=$1 project=$2 prefix folder host number=0
    shift 2
    prefix=$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
    folder=$(mktemp -d)
    # shellcheck disable=SC2064  # the folder is known now and local to this function
    trap "rm -rf -- '$folder'" EXIT
    for host in "$@"; do
        check "$host" > "$folder/$number.text" 2>&1 &
        number=$((number + 1))
        ((number % AT_ONCE)) || wait
    done
    wait
    number=0
    for host in "$@"; do
        local status=125 line
        [[ -s $folder/$number.status ]] && status=$(< "$folder/$number.status")
        printf '%s\t%s\t\n' "$host" "$status"
        while IFS= read -r line || [[ -n $line ]]; do
            printf '%s\t%s\t%s\n' "$host" "$status" "$line"
        done < "$folder/$number.text"
        number=$((number + 1))
    done
}

check() {
    local host=$1 status=0 at=$number
    if [[ $host == localhost ]]; then
        timeout "$timeout_s" "$prefix/libexec/node_check.sh" "$project" < /dev/null || status=$?
    else
        timeout "$timeout_s" "$prefix/libexec/rsh_agent.sh" "$host" "$prefix/libexec/node_check.sh $project" \
            < /dev/null || status=$?
    fi
    echo "$status" > "$folder/$at.status"
}

main "$@"
