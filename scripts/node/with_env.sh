#!/usr/bin/env bash
# Runs a command in this node's own environment: with_env.sh COMMAND [ARGUMENT...]
set -Eeuo pipefail

prefix=$(CDPATH="" cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
[[ -r $prefix/env.sh ]] || {
    echo "${HOSTNAME:-$(uname -n)}: $prefix/env.sh is missing; run \`fab provision\`" >&2
    exit 69
}
set +u
# shellcheck source=/dev/null
source "$prefix/env.sh"
set -u
export RINGMASTER_PREFIX=$prefix
exec "$@"
