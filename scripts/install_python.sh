#!/usr/bin/env bash
# Makes sure that a Python for the TensorFlow 1.15 stack is here: a usable 3.7 that the machine has, else one unpacked
# from an archive into PREFIX/python.
#
# Archives: python-build-standalone (python/install/...), or a plain installation tree with bin/python3.7 at its top
# or in one folder (scripts/pack_python.sh makes one).
set -Eeuo pipefail
# shellcheck source=lib/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

usage() {
    cat <<'EOT'
install_python.sh: a usable Python 3.7, the machine's own or one at PREFIX/python.

  --prefix=DIR        root of the installation (default $HOME/local)
  --version=V         default 3.7
  --archive=FILE      an installation tree (tar.gz, tar.xz, tar.zst); used only when no usable one is here
  --sha256=H          the archive's checksum
  --check             change nothing; say what would happen
  --lock-timeout=S    seconds to wait for another run (default 1800)

Usable: x86-64, runs, has ssl, ctypes, zlib and the header Python.h.
Standard output: changed, unchanged, or (--check) would-change.
Exit status: 0 done, 64 usage, 65 wrong checksum or data, 69 something is missing, 75 locked, else failed.
EOT
}

main() {
    parse_options "version archive sha256" "$@"
    if [[ -n ${OPT[help]:-} ]]; then
        usage
        return 0
    fi
    rm_start
    no_arguments
    set_prefix
    VERSION=${OPT[version]:-3.7}
    [[ $VERSION =~ ^3\.[0-9]+$ ]] || usage_error "--version is '$VERSION', expected something like 3.7"
    ARCHIVE=${OPT[archive]:-}
    if [[ -n ${OPT[sha256]:-} ]]; then
        sha256_option sha256 "${OPT[sha256]}"
    fi
    if [[ -n $ARCHIVE && ! -r $ARCHIVE ]]; then
        usage_error "--archive is '$ARCHIVE', expected a readable file"
    fi
    [[ $VERSION != 3.7 ]] || x86_64_only
    converge python
    if [[ -n ${PY_PATH:-} && $PY_PROBLEM == ok ]]; then
        log "Python $PY_VERSION: $PY_PATH"
    fi
    emit "$WORD"
}

x86_64_only() {
    [[ $(uname -m) == x86_64 ]] ||
        die "$EX_UNAVAILABLE" "this machine is $(uname -m); TensorFlow 1.15 has packages for x86_64 only," \
            "so the tf1 stack cannot be installed here"
}

is_current() { find_python "$VERSION"; }

preconditions() {
    [[ -n $ARCHIVE ]] ||
        die "$EX_UNAVAILABLE" "no usable Python $VERSION here and no --archive was given; looked at:" \
            "${PY_REJECTED:-no candidate at all}"$'\n'"install Python $VERSION with its headers, or give --archive=FILE" \
            "($(artifact python 3.7.9 file || true), or what pack_python.sh makes on a machine that has it)"
    need tar sha256sum flock mktemp
    need_space "$PREFIX" 400 "Python $VERSION"
}

install() {
    local new=$STAGE/new/python found
    [[ -z ${OPT[sha256]:-} ]] || verify "$ARCHIVE" "${OPT[sha256]}"
    unpack "$ARCHIVE" "$STAGE/unpacked"
    found=$(find "$STAGE/unpacked" -maxdepth 4 -path "*/bin/python$VERSION" | sort | head -n 1)
    [[ -n $found ]] || die "$EX_DATAERR" "$ARCHIVE holds no bin/python$VERSION within its first folders"
    mkdir -p "$STAGE/new"
    mv -T "$(dirname "$(dirname "$found")")" "$new"
    rm -rf "$STAGE/unpacked"
    judge_python "$new/bin/python$VERSION" "$VERSION"
    [[ $PY_PROBLEM == ok ]] ||
        die "$EX_DATAERR" "the Python in $ARCHIVE will not do here: $PY_PROBLEM ($(
            "$new/bin/python$VERSION" -c pass 2>&1 | tail -n 1
        )); bring an archive made for $(uname -m) with glibc $(glibc_version) or older"
    printf '{\n "version": %s,\n "from": "archive",\n "source_sha256": %s,\n "digest": %s\n}\n' \
        "$(json_text "$PY_VERSION")" "$(json_text "$(sha256_of "$ARCHIVE")")" \
        "$(json_text "$(printf 'python\n%s\n' "$(sha256_of "$ARCHIVE")" | sha256_text)")" >"$new/.ringmaster.json"
    place "$new"
    find_python "$VERSION" || die 1 "the Python just installed at $PREFIX/python is not usable: $PY_REJECTED"
}

main "$@"
