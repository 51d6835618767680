#!/usr/bin/env bash
# Downloads and builds Open MPI 3.1.0 into $HOME/local/openmpi: the short way in for those who want Open MPI and nothing
# else. The work is done by install_openmpi.sh: the download is kept in ${XDG_CACHE_HOME:-$HOME/.cache}/ringmaster/downloads
# and verified, a finished installation is recognised at once.
#
# Usage: download_and_install_openmpi3_ubuntu.sh [options of install_openmpi.sh, e.g. --version=V --file=F --prefix=DIR]
#
# 3.1.0 is what this script has always installed. It has a known defect: a rare crash or lost message between ranks of
# one machine (shared-memory transport, fixed in 3.1.3).
set -Eeuo pipefail

main() {
    local here prefix="" argument next=0 word
    here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)
    for argument in "$@"; do
        case $argument in
            -h | --help)
                sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
                exec "$here/install_openmpi.sh" --help
                ;;
            --prefix=*) prefix=${argument#*=} ;;
            --prefix) next=1 ;;
            *)
                ((!next)) || prefix=$argument
                next=0
                ;;
        esac
    done
    prefix=${prefix:-$HOME/local}
    word=$("$here/install_openmpi.sh" --from=source "$@")
    printf '%s\n' "$word"
    [[ $word != would-change ]] || return 0
    cat >&2 <<EOT

Open MPI is in $prefix/openmpi. To use it, add these lines to ~/.bashrc or type them now:

    export PATH=$prefix/openmpi/bin:\$PATH
    export LD_LIBRARY_PATH=$prefix/openmpi/lib:\$LD_LIBRARY_PATH
EOT
}

main "$@"
