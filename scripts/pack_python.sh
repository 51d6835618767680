#!/usr/bin/env bash
# Packs an installed Python into an archive for machines without one; install_python.sh --archive unpacks it.
#
# CPython finds its library from the place of its executable, so the tree works wherever it is put. The shared
# libraries that its modules use (OpenSSL, libffi, ...) come along and are found from the modules' own places, so the
# other machine needs none of them. Left out: tests, the editor, Tk, curses, compiled files and static libraries.
set -Eeuo pipefail
# shellcheck source=lib/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

usage() {
    cat <<'EOT'
pack_python.sh PYTHON OUT.tar.gz: pack the installation of the interpreter PYTHON (x86-64).

  --version=V         the version it must have: 3.7 (default, for the stack tf1) or 3.11 (tf2)

Needs patchelf where PYTHON uses shared libraries outside its own folder.
Standard output: changed. Exit status: 0 done, 64 usage, 69 something is missing or will not do, else failed.
EOT
}

main() {
    parse_options "version" "$@"
    if [[ -n ${OPT[help]:-} ]]; then
        usage
        return 0
    fi
    rm_start
    ((${#OPT_REST[@]} == 2)) || usage_error "expected two arguments: PYTHON and OUT.tar.gz"
    PYTHON=${OPT_REST[0]}
    OUT=${OPT_REST[1]}
    VERSION=${OPT[version]:-3.7}
    [[ -x $PYTHON ]] || usage_error "'$PYTHON' is not an executable file"
    need tar gzip ldd awk find
    judge_python "$PYTHON" "$VERSION"
    [[ $PY_PROBLEM == ok ]] || die "$EX_UNAVAILABLE" "$PYTHON: $PY_PROBLEM"
    BASE=$(cd "$(dirname "$(readlink -f "$PY_PATH")")/.." && pwd -P)
    [[ $BASE != /usr && $BASE != / ]] ||
        die "$EX_UNAVAILABLE" "$PY_PATH is part of the operating system under $BASE; pack one that has a folder of its own"
    mkdir -p "$(dirname "$OUT")"
    [[ $OUT == /* ]] || OUT=$PWD/$OUT
    # The common exit removes STAGE.
    STAGE=$(mktemp -d "$OUT.XXXXXXXX")
    TREE=$STAGE/python
    copy_tree
    bring_libraries
    judge_python "$TREE/bin/python$VERSION" "$VERSION"
    [[ $PY_PROBLEM == ok ]] ||
        die 1 "the packed Python is not usable: $PY_PROBLEM ($("$TREE/bin/python$VERSION" -c pass 2>&1 | tail -n 2))"
    find "$TREE" -name __pycache__ -prune -exec rm -rf {} +
    tar -czf "$STAGE/out" -C "$STAGE" --owner=0 --group=0 python
    chmod 0644 "$STAGE/out"
    mv -T "$STAGE/out" "$OUT"
    log "packed Python $PY_VERSION from $BASE into $OUT ($(($(stat -c %s "$OUT") / 1048576)) MiB)"
    emit changed
}

copy_tree() {
    local member members=() modules=lib/python$VERSION/lib-dynload
    mkdir "$TREE"
    cd "$BASE"
    for member in bin/"python$VERSION" bin/"python${VERSION}m" bin/python3 include/"python$VERSION"* lib/"python$VERSION" \
        lib/"libpython$VERSION"*.so*; do
        [[ ! -e $member ]] || members+=("$member")
    done
    {
        # Patterns with a slash are anchored, so that a package's own folder of a like name stays.
        tar -cf - --exclude=__pycache__ --exclude='*.a' --exclude="lib/python$VERSION/test" \
            --exclude="lib/python$VERSION/idlelib" --exclude="lib/python$VERSION/site-packages/*" \
            --exclude="lib/python$VERSION/lib2to3/tests" --exclude="lib/python$VERSION/turtledemo" \
            --exclude="lib/python$VERSION/ensurepip" --exclude="lib/python$VERSION/tkinter" \
            --exclude="lib/python$VERSION/*/test" --exclude="lib/python$VERSION/*/tests" \
            --exclude="$modules/_tkinter*" --exclude="$modules/_curses*" --exclude="$modules/readline*" \
            --exclude="$modules/nis.*" --exclude="$modules/_gdbm*" --exclude="$modules/_dbm*" \
            --exclude="$modules/ossaudiodev*" --exclude="$modules/_test*" --exclude="$modules/xxlimited*" \
            --exclude="$modules/_xxtestfuzz*" "${members[@]}"
    } | tar -xf - -C "$TREE" --no-same-owner
}

# bring_libraries: everything that ldd finds outside the tree and that is not the C library's own.
bring_libraries() {
    local libraries library objects object brought=()
    mkdir -p "$TREE/lib"
    objects=$(find "$TREE/bin" "$TREE/lib" -type f \( -perm -u+x -o -name '*.so*' \) -exec sh -c 'head -c 4 "$1" | grep -q ELF && echo "$1"' - {} \;)
    libraries=$(while IFS= read -r object; do ldd "$object" 2>/dev/null || true; done <<<"$objects" |
        awk -v base="$BASE/lib/libpython" '
            $2 == "=>" && $3 ~ /^\// && index($3, base) != 1 &&
            $1 !~ /^(lib(c|m|dl|pthread|util|rt|resolv|nsl|gcc_s|stdc\+\+)\.so|ld-)/ { print $3 }' | sort -u)
    [[ -n $libraries ]] || [[ -n $(find "$TREE/lib" -maxdepth 1 -name 'libpython*.so*' -print -quit) ]] || return 0
    need patchelf
    while IFS= read -r library; do
        [[ -n $library ]] || continue
        cp -L "$library" "$TREE/lib/"
        chmod u+w "$TREE/lib/${library##*/}"
        brought+=("${library##*/}")
    done <<<"$libraries"
    # RUNPATH from each object's own place; the machine's other programs are not affected.
    # shellcheck disable=SC2016  # the dynamic linker's own word
    while IFS= read -r object; do
        [[ -n $object ]] || continue
        case ${object#"$TREE/"} in
            bin/*) patchelf --set-rpath '$ORIGIN/../lib' "$object" ;;
            lib/python*/lib-dynload/*) patchelf --set-rpath '$ORIGIN/../..' "$object" ;;
            lib/*.so*) patchelf --set-rpath '$ORIGIN' "$object" ;;
        esac
    done < <(printf '%s\n' "$objects" && for library in ${brought[@]+"${brought[@]}"}; do echo "$TREE/lib/$library"; done)
    log "brought along: ${brought[*]:-no library}"
}

main "$@"
