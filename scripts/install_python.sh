#!/usr/bin/env bash
# Makes sure that a Python for a stack is here: a usable one of that version that the machine has, else one unpacked from
# an archive into PREFIX/python (3.7) or PREFIX/python-VERSION.
#
# Archives: python-build-standalone (python/install/...), or a plain installation tree with bin/python3.N at its top
# or in one folder (scripts/pack_python.sh makes one).
set -Eeuo pipefail
# shellcheck source=lib/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

usage() {
    cat <<'EOT'
install_python.sh: a usable Python 3.7 or 3.11, the machine's own or one under PREFIX.

  --prefix=DIR        root of the installation (default $HOME/local)
  --version=V         3.7 (default, for the stack tf1) or 3.11 (tf2)
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
    x86_64_only
    COMPONENT=$(python_component "$VERSION")
    converge "$COMPONENT"
    if [[ -n ${PY_PATH:-} && $PY_PROBLEM == ok ]]; then
        log "Python $PY_VERSION: $PY_PATH"
    fi
    emit "$WORD"
}

x86_64_only() {
    [[ $(uname -m) == x86_64 ]] ||
        die "$EX_UNAVAILABLE" "this machine is $(uname -m); the stacks' packages are for x86_64 only"
}

is_current() { find_python "$VERSION"; }

preconditions() {
    [[ -n $ARCHIVE ]] ||
        die "$EX_UNAVAILABLE" "no usable Python $VERSION here and no --archive was given; looked at:" \
            "${PY_REJECTED:-no candidate at all}"$'\n'"install Python $VERSION with its headers, or give --archive=FILE" \
            "($(known_archive)what pack_python.sh --version=$VERSION makes on a machine that has it)"
    need tar sha256sum flock mktemp
    need_space "$PREFIX" 400 "Python $VERSION"
}

# known_archive: the name of the pinned archive of that version and `, or `; nothing where none is pinned.
known_archive() {
    local line
    while IFS= read -r line; do
        if [[ $line =~ \"name\":\ \"python\",\ \"version\":\ \"(${VERSION/./\\.}\.[0-9]+)\" ]]; then
            printf '%s, or ' "$(artifact python "${BASH_REMATCH[1]}" file)"
        fi
    done <"$RM_LOCK_JSON"
}

install() {
    local new=$STAGE/new/$COMPONENT found
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
    find_python "$VERSION" || die 1 "the Python just installed at $PREFIX/$COMPONENT is not usable: $PY_REJECTED"
}

main "$@"
