#!/usr/bin/env bash
# mpirun's remote shell: rsh_agent.sh HOST COMMAND...
# Looks HOST up in ssh/peers.tsv (name, address, port, user, prefix), replaces this node's prefix in COMMAND by that
# node's, and runs it there with the cluster's own SSH settings after that node's env.sh.
set -Eeuo pipefail

readonly EXIT_USAGE=64 EXIT_MISSING=69

fail() {
    local status=$1
    shift
    printf 'rsh_agent on %s: %s\n' "${HOSTNAME:-$(uname -n)}" "$*" >&2
    exit "$status"
}

# One word for the remote login shell, whichever it is: in single quotes.
quote() {
    local text=$1 mark="'\\''"
    printf "'%s'" "${text//\'/"$mark"}"
}

main() {
    # mpirun may put ssh's own options first; none of them is wanted here.
    while (($#)) && [[ $1 == -* ]]; do
        case $1 in
            -l | -p) shift 2 ;;
            *) shift ;;
        esac
    done
    (($# >= 2)) || fail "$EXIT_USAGE" "usage: rsh_agent.sh HOST COMMAND..."
    local host=$1 prefix peers line name address peer_prefix found=""
    shift
    prefix=$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
    peers=$prefix/ssh/peers.tsv
    [[ -r $peers ]] || fail "$EXIT_MISSING" "$peers is missing; run \`fab provision\`"
    while IFS= read -r line; do
        # A tab would swallow empty fields, since it counts as white space.
        IFS=$'\x1f' read -r name address _ _ peer_prefix _ <<< "${line//$'\t'/$'\x1f'}"
        if [[ $name == "$host" || $address == "$host" ]]; then
            found=$name
            break
        fi
    done < "$peers"
    [[ -n $found ]] || fail "$EXIT_MISSING" "no node called '$host' in $peers; run \`fab provision\` with that host"

    local command="$*"
    if [[ $peer_prefix != "$prefix" ]]; then
        # The quoted replacement keeps '&' literal in bash 5.2 and later.
        command=${command//"$prefix"/"$peer_prefix"}
    fi
    local script
    script="RINGMASTER_PREFIX=$(quote "$peer_prefix"); export RINGMASTER_PREFIX"
    script+="; [ -r \"\$RINGMASTER_PREFIX/env.sh\" ] || { echo \"$found: \$RINGMASTER_PREFIX/env.sh is missing;"
    script+=" run fab provision\" >&2; exit $EXIT_MISSING; }"
    script+="; . \"\$RINGMASTER_PREFIX/env.sh\""
    if [[ -n ${RINGMASTER_JOB:-} ]]; then
        script+="; RINGMASTER_JOB=$(quote "$RINGMASTER_JOB"); export RINGMASTER_JOB"
    fi
    script+="; $command"
    # The remote login shell sees one plain command; bash without start-up files then does the work.
    exec ssh -F "$prefix/ssh/config" -o BatchMode=yes -T "$found" \
        "exec bash --noprofile --norc -c $(quote "$script")"
}

main "$@"
