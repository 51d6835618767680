# Shared by the installer scripts: options, messages, the lock, staging, renaming into place, markers, env.sh.
#
# A script sources this file, declares its options and calls `rm_start "$@"`. From then on standard output is
# standard error, and only `emit` reaches the caller's standard output, with one word.
#
# Places under the prefix:
#   .ringmaster/locks/<component>.lock   flock; whoever holds it is alone with that component
#   .ringmaster/stage/<component>.*      half-made things; made only by the lock's holder, so the next holder may
#                                        remove whatever it finds there
#   .ringmaster/old/<component>          the previous installation, between the two renames that replace it
#   .ringmaster/logs/<component>.log     the output of the last failed build
# shellcheck shell=bash
# shellcheck disable=SC2034  # constants are read by the scripts that source this file

set -Eeuo pipefail
umask 022

readonly EX_USAGE=64 EX_DATAERR=65 EX_UNAVAILABLE=69 EX_TEMPFAIL=75
RM_SCRIPTS_DIR=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
RM_LOCK_JSON=$RM_SCRIPTS_DIR/artifacts.lock.json
RM_NAME=$(basename "$0" .sh)
declare -A OPT=()
OPT_REST=()
COMPONENT=""
STAGE=""
CHILD=""

# ---------------------------------------------------------------------------------------------- messages, ending

log() { printf '%s: %s\n' "$RM_NAME" "$*" >&2; }

# log_once: for what is found at every look.
declare -A RM_SAID=()
log_once() {
    [[ -z ${RM_SAID[$*]:-} ]] || return 0
    RM_SAID[$*]=1
    log "$@"
}

die() {
    local status=$1
    shift
    log "$*"
    exit "$status"
}

usage_error() { die "$EX_USAGE" "$*; try $RM_NAME.sh --help"; }

# emit WORD: the one word on the caller's standard output, and the end. (Ending here, the shell does not read on in a
# script that may have been replaced meanwhile.)
emit() {
    printf '%s\n' "$1" >&3
    exit 0
}

_on_err() {
    local status=$? line=$1 command=$2
    # Inside a command substitution the parent reports; twice would be noise.
    ((BASH_SUBSHELL == 0)) || return 0
    log "line $line: \`$command\` exited $status"
}

_on_exit() {
    local status=$?
    trap - EXIT ERR INT TERM HUP
    set +e
    if [[ -n $CHILD ]]; then
        kill -TERM "$CHILD" 2>/dev/null
    fi
    if [[ -n $STAGE ]]; then
        ((status == 0)) || end_tagged "$STAGE"
        remove_tree "$STAGE"
    fi
    exit "$status"
}

_on_signal() {
    log "ended by SIG$1; run again to go on"
    exit "$2"
}

# rm_start: from here on standard output belongs to `emit` alone. Call once, after parsing --help.
rm_start() {
    exec 3>&1 1>&2
    trap '_on_err "$LINENO" "$BASH_COMMAND"' ERR
    trap '_on_exit' EXIT
    trap '_on_signal HUP 129' HUP
    trap '_on_signal INT 130' INT
    trap '_on_signal TERM 143' TERM
}

# ---------------------------------------------------------------------------------------------- options

# parse_options "name name2 flag!" "$@": fills OPT; `--name=value` and `--name value`; `flag!` takes no value.
parse_options() {
    local spec=" $1 prefix lock-timeout check! help! " arg name
    shift
    while (($#)); do
        arg=$1
        shift
        case $arg in
            --) OPT_REST+=("$@") && return 0 ;;
            --*=*)
                name=${arg%%=*}
                name=${name#--}
                [[ $spec == *" $name "* ]] || _bad_option "--$name" "$spec"
                OPT[$name]=${arg#*=}
                ;;
            --*)
                name=${arg#--}
                if [[ $spec == *" $name! "* ]]; then
                    OPT[$name]=1
                elif [[ $spec == *" $name "* ]]; then
                    [[ $# -gt 0 && $1 != --* ]] || usage_error "--$name wants a value"
                    OPT[$name]=$1
                    shift
                else
                    _bad_option "$arg" "$spec"
                fi
                ;;
            -h) OPT[help]=1 ;;
            -*) _bad_option "$arg" "$spec" ;;
            *) OPT_REST+=("$arg") ;;
        esac
    done
    for name in "${!OPT[@]}"; do
        [[ -n ${OPT[$name]} ]] || usage_error "--$name has an empty value"
        [[ ${OPT[$name]} != *$'\n'* ]] || usage_error "--$name: a line break in the value"
    done
}

_bad_option() {
    local name=$1 known=${2//!/}
    if [[ $2 == *" ${name#--}! "* ]]; then
        usage_error "$name takes no value"
    fi
    known=${known# }
    known=${known% }
    usage_error "unknown option $name, expected one of --${known// / --}"
}

# no_arguments: for scripts that take options only.
no_arguments() {
    ((${#OPT_REST[@]} == 0)) || usage_error "unexpected argument '${OPT_REST[0]}', expected options only"
}

# one_of NAME VALUE WORD...: VALUE must be one of the words.
one_of() {
    local name=$1 value=$2 word
    shift 2
    for word in "$@"; do
        [[ $value != "$word" ]] || return 0
    done
    usage_error "--$name is '$value', expected one of: $*"
}

# whole_number NAME VALUE: a decimal number without sign.
whole_number() { [[ $2 =~ ^[0-9]{1,9}$ ]] || usage_error "--$1 is '$2', expected a whole number"; }

# sha256_option NAME VALUE: 64 hexadecimal digits.
sha256_option() { [[ $2 =~ ^[0-9a-fA-F]{64}$ ]] || usage_error "--$1 is '$2', expected 64 hexadecimal digits"; }

# set_prefix: PREFIX from --prefix, absolute. Only plain characters: configure, libtool, shebangs and RUNPATH all
# break on others, each in its own way and late.
set_prefix() {
    local p=${OPT[prefix]:-} home=${HOME:-}
    [[ -n $home ]] || home=$(cd ~ && pwd)
    [[ -n $p ]] || p=$home/local
    # A cluster file says "$HOME/local" for "each node's own home"; the words arrive here unexpanded.
    # shellcheck disable=SC2016,SC2088  # compared as text
    case $p in
        '$HOME') p=$home ;;
        '$HOME/'*) p=$home/${p#'$HOME/'} ;;
        '~') p=$home ;;
        '~/'*) p=$home/${p#'~/'} ;;
        /*) ;;
        *) p=$PWD/$p ;;
    esac
    while [[ $p == */ && $p != / ]]; do p=${p%/}; done
    if [[ ! $p =~ ^(/[A-Za-z0-9._+@-]+)+$ || $p =~ (^|/)\.\.?(/|$) ]]; then
        usage_error "--prefix is '$p', expected an absolute path other than / made of letters, digits and ._+@- (no spaces, no ..)"
    fi
    PREFIX=$p
    # Every installer goes on to compare checksums; without the tool a pipeline into it ends in any of several ways.
    need sha256sum
    if [[ -n ${OPT[lock-timeout]:-} ]]; then
        whole_number lock-timeout "${OPT[lock-timeout]}"
    fi
}

is_check() { [[ -n ${OPT[check]:-} ]]; }

# ---------------------------------------------------------------------------------------------- tools

# _package TOOL MANAGER: the package that brings the tool.
_package() {
    case $1:$2 in
        cc:* | gcc:*) echo gcc ;;
        c++:apt-get | g++:apt-get) echo g++ ;;
        c++:* | g++:*) echo gcc-c++ ;;
        libc-headers:apt-get) echo libc6-dev ;;
        libc-headers:*) echo glibc-devel ;;
        xz:apt-get) echo xz-utils ;;
        sha256sum:* | mktemp:* | readlink:*) echo coreutils ;;
        flock:*) echo util-linux ;;
        ssh:apt-get | ssh-keygen:apt-get) echo openssh-client ;;
        ssh:* | ssh-keygen:*) echo openssh-clients ;;
        awk:apt-get) echo mawk ;;
        awk:*) echo gawk ;;
        find:*) echo findutils ;;
        *) echo "$1" ;;
    esac
}

# install_command TOOL...: the command that brings the tools here, as text for a message.
install_command() {
    local manager="" tool packages=() line
    for tool in apt-get dnf yum zypper; do
        if command -v "$tool" >/dev/null 2>&1; then
            manager=$tool
            break
        fi
    done
    for tool in "$@"; do
        packages+=("$(_package "$tool" "${manager:-other}")")
    done
    case $manager in
        apt-get) line="as root: apt-get update && apt-get install -y --no-install-recommends" ;;
        "") line="install these packages with this system's package manager:" ;;
        *) line="as root: $manager install -y" ;;
    esac
    printf '%s %s' "$line" "${packages[*]}"
}

# need TOOL...: end with 69, naming every missing tool and its package, unless all are there.
need() {
    local tool missing=()
    for tool in "$@"; do
        command -v "$tool" >/dev/null 2>&1 || missing+=("$tool")
    done
    ((${#missing[@]})) || return 0
    die "$EX_UNAVAILABLE" "missing here: ${missing[*]}; $(install_command "${missing[@]}")"
}

# need_compiler c|c++ [STANDARD]: a compiler that compiles and links a program, headers included.
need_compiler() {
    local language=$1 standard=${2:+-std=$2} compiler header=stdio.h
    if [[ $language == c ]]; then
        compiler=${CC:-$(first_of gcc cc)} || need gcc
    else
        compiler=${CXX:-$(first_of g++ c++)} || need g++
        header=cstdio
    fi
    if ! printf '#include <%s>\nint main(void) { return 0; }\n' "$header" |
        "$compiler" ${standard:+"$standard"} -x "$language" - -o /dev/null >/dev/null 2>&1; then
        die "$EX_UNAVAILABLE" "$compiler cannot compile a program that includes <$header>${2:+ as $2};" \
            "$(install_command "$([[ $language == c ]] && echo gcc || echo g++)" libc-headers)"
    fi
}

# first_of TOOL...: the first tool on PATH; fails when there is none.
first_of() {
    local tool
    for tool in "$@"; do
        if command -v "$tool" >/dev/null 2>&1; then
            printf '%s' "$tool"
            return 0
        fi
    done
    return 1
}

cpu_count() { getconf _NPROCESSORS_ONLN 2>/dev/null || echo 1; }

# need_space DIR MIB WHAT: DIR's filesystem must have MIB mebibytes free; DIR need not exist yet.
need_space() {
    local dir=$1 want=$2 what=$3 free
    while [[ ! -d $dir ]]; do dir=$(dirname "$dir"); done
    free=$(free_mib "$dir")
    ((free >= want)) ||
        die "$EX_UNAVAILABLE" "$what needs $want MiB under $1, got $free MiB free;" \
            "free some space there or choose another --prefix"
}

free_mib() {
    local line
    line=$(df -Pk "$1" | tail -n 1)
    # shellcheck disable=SC2086  # split into columns
    set -- $line
    echo $(($4 / 1024))
}

# ---------------------------------------------------------------------------------------------- the lock, staging

# lock COMPONENT: wait for the component's lock, clear what killed runs left, make STAGE.
lock() {
    local dir=$PREFIX/.ringmaster timeout=${OPT[lock-timeout]:-1800} status=0 name=${1//\//-}
    COMPONENT=$1
    need flock mktemp sha256sum
    if ! mkdir -p "$dir/locks" "$dir/stage" "$dir/old" 2>/dev/null; then
        die "$EX_UNAVAILABLE" "cannot create $dir as $(id -un); make $PREFIX writable or choose another --prefix"
    fi
    exec 9>>"$dir/locks/$name.lock"
    flock -n 9 || {
        log "another run holds $dir/locks/$name.lock; waiting up to $timeout s"
        flock -w "$timeout" 9 &
        CHILD=$!
        wait "$CHILD" || status=$?
        CHILD=""
    }
    ((status == 0)) ||
        die "$EX_TEMPFAIL" "another run still holds $dir/locks/$name.lock after $timeout s;" \
            "wait for it, or give a longer --lock-timeout"
    clear_stale
    # Under a shared home the name says whose it is; a signal between here and the next line leaves it to clear_stale.
    STAGE=$(mktemp -d "$dir/stage/$name.$(uname -n).XXXXXXXX")
}

# clear_stale: with the lock held, every stage of the component belongs to a dead run; so do the
# processes that still work in it.
clear_stale() {
    local dir=$PREFIX/.ringmaster stale name=${COMPONENT//\//-}
    for stale in "$dir/stage/$name".*; do
        [[ -d $stale ]] || continue
        log "removing $stale, left by a run that was killed"
        end_tagged "$stale"
        remove_tree "$stale"
    done
    # The previous installation is put back when a run died between the two renames of `place`.
    local target=$PREFIX/$COMPONENT old=$dir/old/$name
    if [[ -e $old || -L $old ]]; then
        if [[ -e $target || -L $target ]]; then
            remove_tree "$old"
        else
            log "putting back $target, whose replacement was interrupted"
            mv -T "$old" "$target"
        fi
    fi
}

# end_tagged STAGE: end the processes of this machine whose environment says they work in STAGE.
end_tagged() {
    local stage=$1 pid found=1 round
    for round in 1 2 3; do
        found=0
        for pid in /proc/[0-9]*; do
            pid=${pid#/proc/}
            [[ $pid != "$$" && -r /proc/$pid/environ ]] || continue
            if grep -qzFx "RINGMASTER_STAGE=$stage" "/proc/$pid/environ" 2>/dev/null; then
                kill -KILL "$pid" 2>/dev/null || true
                found=1
            fi
        done
        ((found)) || return 0
    done
}

# remove_tree DIR: also when something still writes into it.
remove_tree() {
    local tree=$1 try
    for try in 1 2 3; do
        rm -rf -- "$tree" 2>/dev/null && return 0
        chmod -R u+rwX -- "$tree" 2>/dev/null || true
    done
    rm -rf -- "$tree" || log "could not remove $tree ($try tries)"
}

# step WHAT COMMAND...: run a long command with its output in the stage's log, ready to be ended at any time.
# On failure the log's end is shown and the log kept.
step() {
    local what=$1 status=0 begun=$SECONDS logfile=$STAGE/log
    shift
    log "$what"
    RINGMASTER_STAGE=$STAGE "$@" >>"$logfile" 2>&1 3>&- 9>&- &
    CHILD=$!
    wait "$CHILD" || status=$?
    CHILD=""
    if ((status == 0)); then
        log "$what: $((SECONDS - begun)) s"
        return 0
    fi
    failed "$what" "$status" "$logfile"
}

# failed WHAT STATUS LOGFILE: say why a step failed, then end with 1 (69 when the disk is full).
failed() {
    local what=$1 status=$2 logfile=$3 kept
    # The log lies on the same disk, so it may be cut short itself.
    if (($(free_mib "$STAGE") < 2)) ||
        tail -n 200 "$logfile" | grep -qE 'No space left on device|Disk quota exceeded|ENOSPC'; then
        tail -n 5 "$logfile" >&2
        die "$EX_UNAVAILABLE" "$what: the disk of $PREFIX is full ($(free_mib "$PREFIX") MiB free);" \
            "free some space or choose another --prefix; nothing was installed"
    fi
    kept=$PREFIX/.ringmaster/logs/${COMPONENT//\//-}.log
    mkdir -p "$(dirname "$kept")" && cp "$logfile" "$kept" 2>/dev/null || kept="(not kept)"
    tail -n 30 "$logfile" >&2
    die 1 "$what exited $status, expected 0; the whole output is in $kept"
}

# place NEW: move the finished tree NEW to PREFIX/COMPONENT. What was there moves out of the way first and
# is removed afterwards, or kept beside it when no marker says that it is ours.
place() {
    local new=$1 target=$PREFIX/$COMPONENT old=$PREFIX/.ringmaster/old/${COMPONENT//\//-} saved n=0
    mkdir -p "$(dirname "$target")"
    if [[ (-e $target || -L $target) && ! -f $target/.ringmaster.json ]]; then
        saved=$target.saved
        while [[ -e $saved ]]; do saved=$target.saved-$((++n)); done
        log "$target was not made by this script; it is kept as $saved"
        mv -T "$target" "$saved"
    fi
    remove_tree "$old"
    if [[ -e $target || -L $target ]]; then
        mv -T "$target" "$old"
    fi
    mv -T "$new" "$target"
    remove_tree "$old"
}

# write_file PATH MODE < TEXT: a file under the prefix, by rename out of the stage.
write_file() {
    local path=$1 mode=$2 temp
    mkdir -p "$(dirname "$path")"
    temp=$(umask 077 && mktemp "$STAGE/file.XXXXXXXX")
    cat >"$temp"
    chmod "$mode" "$temp"
    mv -T "$temp" "$path"
}

# converge COMPONENT: the shape every installer has. It calls is_current, preconditions and install of the script
# and leaves the one word in WORD. The second look is taken with the lock held: another run may have done the work.
converge() {
    WORD=unchanged
    if is_current && describes_itself; then
        return 0
    fi
    WORD=would-change
    # A check asks what there is to do; what it takes may be brought along only then.
    if is_check; then
        return 0
    fi
    is_current || preconditions
    WORD=unchanged
    lock "$1"
    if ! is_current; then
        install
        WORD=changed
    fi
    if ! describes_itself; then
        describe
        WORD=changed
    fi
}

# ---------------------------------------------------------------------------------------------- checksums, sources

sha256_of() {
    local line
    line=$(sha256sum -- "$1")
    line=${line#\\}
    printf '%s' "${line%% *}"
}

# sha256_text: of standard input.
sha256_text() {
    local line
    line=$(sha256sum)
    printf '%s' "${line%% *}"
}

# verify FILE SHA256: end with 65 unless they agree.
verify() {
    local file=$1 want=${2,,} got
    got=$(sha256_of "$file")
    [[ $got == "$want" ]] ||
        die "$EX_DATAERR" "$file: got sha256 $got, expected $want; it is damaged or not the file that was pinned:" \
            "delete it, bring it again, and run again"
}

# artifact NAME VERSION FIELD: a text field of one line of artifacts.lock.json; fails when there is no such line.
artifact() {
    local line
    while IFS= read -r line; do
        [[ $line == *"\"name\": \"$1\""* && $line == *"\"version\": \"$2\""* ]] || continue
        [[ $line =~ \"$3\":\ \"([^\"]*)\" ]] || return 1
        printf '%s' "${BASH_REMATCH[1]}"
        return 0
    done <"$RM_LOCK_JSON"
    return 1
}

# stack_field STACK FIELD: a text field of that stack's line in artifacts.lock.json; fails when there is no such line.
stack_field() {
    local line
    while IFS= read -r line; do
        [[ $line == *"{\"stack\": \"$1\""* ]] || continue
        [[ $line =~ \"$2\":\ \"([^\"]*)\" ]] || return 1
        printf '%s' "${BASH_REMATCH[1]}"
        return 0
    done <"$RM_LOCK_JSON"
    return 1
}

# stacks: the names of all stacks, one a line.
stacks() {
    local line
    while IFS= read -r line; do
        [[ ! $line =~ \{\"stack\":\ \"([^\"]*)\" ]] || printf '%s\n' "${BASH_REMATCH[1]}"
    done <"$RM_LOCK_JSON"
}

# json_field FILE KEY: the text value of a top-level key of one of our own markers (one key a line); else fails.
json_field() {
    local line
    [[ -r $1 ]] || return 1
    while IFS= read -r line; do
        if [[ $line =~ ^\ *\"$2\":\ \"(([^\"\\]|\\.)*)\",?$ ]]; then
            printf '%s' "${BASH_REMATCH[1]}"
            return 0
        fi
    done <"$1"
    return 1
}

# json_text TEXT: as a JSON string, quotes included.
json_text() {
    local s=$1 out="" c i bs=$'\\' dq='"'
    s=${s//"$bs"/"$bs$bs"}
    s=${s//"$dq"/"$bs$dq"}
    if [[ $s == *[[:cntrl:]]* ]]; then
        for ((i = 0; i < ${#s}; i++)); do
            c=${s:i:1}
            case $c in
                $'\n') c='\n' ;;
                $'\t') c='\t' ;;
                $'\r') c='\r' ;;
                [[:cntrl:]]) printf -v c '\\u%04x' "'$c" ;;
            esac
            out+=$c
        done
        s=$out
    fi
    printf '"%s"' "$s"
}

# download URL DEST: fails when it cannot be had; what the client says goes to standard error.
download() {
    local url=$1 dest=$2
    local client
    client=$(first_of curl wget python3) ||
        die "$EX_UNAVAILABLE" "missing here: curl; $(install_command curl)"
    log "fetching $url"
    case $client in
        curl)
            curl --fail --location --silent --show-error --retry 2 --connect-timeout 15 \
                --speed-limit 1024 --speed-time 30 --max-time 3600 --output "$dest" -- "$url" 3>&- 9>&- &
            ;;
        wget) wget --quiet --tries=2 --timeout=30 --output-document="$dest" -- "$url" 3>&- 9>&- & ;;
        python3)
            python3 -c '
import shutil, sys, urllib.request
with urllib.request.urlopen(sys.argv[1], timeout=30) as source, open(sys.argv[2], "wb") as dest:
    shutil.copyfileobj(source, dest)
' "$url" "$dest" 3>&- 9>&- &
            ;;
    esac
    CHILD=$!
    local status=0
    wait "$CHILD" || status=$?
    CHILD=""
    return "$status"
}

downloads_dir() { printf '%s' "${XDG_CACHE_HOME:-$HOME/.cache}/ringmaster/downloads"; }

# unpack FILE DIR [TAR OPTIONS]: by what the file is, not by its name; the output of `file` is not needed.
unpack() {
    local file=$1 dir=$2 magic tool filter=()
    shift 2
    magic=$(od -An -tx1 -N6 -- "$file" | tr -d ' \n')
    case $magic in
        1f8b*) filter=(gzip) ;;
        425a68*) filter=(bzip2 lbzip2 python3) ;;
        fd377a585a00) filter=(xz python3) ;;
        28b52ffd*) filter=(zstd) ;;
        *) die "$EX_DATAERR" "$file is no tar archive of a known kind (gzip, bzip2, xz, zstd); bring another" ;;
    esac
    tool=$(first_of "${filter[@]}") || need tar "${filter[0]}"
    need tar
    filter=("$tool" -dc)
    if [[ $tool == python3 ]]; then
        filter=(python3 -c '
import bz2, lzma, shutil, sys
opener = bz2.open if open(sys.argv[1], "rb").read(3) == b"BZh" else lzma.open
with opener(sys.argv[1]) as source:
    shutil.copyfileobj(source, sys.stdout.buffer, 1 << 20)
')
    fi
    mkdir -p "$dir"
    step "unpacking $(basename "$file")" _unpack "$file" "$dir" "${#filter[@]}" "${filter[@]}" "$@"
}

_unpack() {
    local file=$1 dir=$2 n=$3 filter=("${@:4:$3}")
    shift $((3 + n))
    "${filter[@]}" "$file" | tar -xf - -C "$dir" --no-same-owner "$@"
}

# ---------------------------------------------------------------------------------------------- env.sh, manifest

# env_text: env.sh. It finds its own place, so a moved prefix needs no rewriting; the path written into it is for
# shells that cannot tell (dash without /proc), and for the prefix that was not moved.
env_text() {
    cat <<EOF_ENV
# Source this file: it puts the Open MPI of this prefix first. Written by Ringmaster; POSIX sh.
# shellcheck shell=sh disable=SC3028,SC3054
_rm_prefix=
if [ -n "\${BASH_SOURCE:-}" ]; then
    _rm_prefix=\$(CDPATH='' cd -- "\$(dirname -- "\$BASH_SOURCE")" 2>/dev/null && pwd)
else
    # Other shells keep the file that they are reading open.
    for _rm_fd in "/proc/\$\$/fd/"*; do
        case \$(readlink "\$_rm_fd" 2>/dev/null) in
            */env.sh) _rm_prefix=\$(dirname -- "\$(readlink "\$_rm_fd")") ;;
        esac
    done
    unset _rm_fd
fi
if [ ! -f "\$_rm_prefix/env.sh" ]; then
    _rm_prefix=$PREFIX
fi
if [ ! -f "\$_rm_prefix/env.sh" ] && [ -f "\${RINGMASTER_PREFIX:-}/env.sh" ]; then
    _rm_prefix=\$RINGMASTER_PREFIX
fi
RINGMASTER_PREFIX=\$_rm_prefix
OPAL_PREFIX=\$_rm_prefix/openmpi
case \${PATH:-} in
    "\$_rm_prefix/openmpi/bin" | "\$_rm_prefix/openmpi/bin:"*) ;;
    *) PATH=\$_rm_prefix/openmpi/bin\${PATH:+:\$PATH} ;;
esac
case \${LD_LIBRARY_PATH:-} in
    "\$_rm_prefix/openmpi/lib" | "\$_rm_prefix/openmpi/lib:"*) ;;
    *) LD_LIBRARY_PATH=\$_rm_prefix/openmpi/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH} ;;
esac
export RINGMASTER_PREFIX OPAL_PREFIX PATH LD_LIBRARY_PATH
unset _rm_prefix
EOF_ENV
}

# manifest_text: every component's own marker in one object; undo is what removing the prefix leaves behind.
manifest_text() {
    local marker component first=1 undo=""
    printf '{\n"schema": 1,\n"components": {'
    for component in openmpi python python-3.11 stacks/tf1 stacks/tf2 ssh; do
        marker=$PREFIX/$component/.ringmaster.json
        [[ -r $marker ]] || continue
        ((first)) || printf ','
        first=0
        printf '\n"%s": ' "$component"
        cat "$marker"
        if [[ $component == ssh ]]; then
            undo=$(json_field "$marker" undo) || undo=""
        fi
    done
    printf '},\n"undo": {"paths": ["openmpi", "python", "python-3.11", "stacks", "ssh", "libexec", "projects", "env.sh",'
    printf ' "manifest.json", ".ringmaster"], "authorized_keys_comment": '
    if [[ -n $undo ]]; then printf '"%s"' "$undo"; else printf 'null'; fi
    printf '}\n}\n'
}

# describes_itself: env.sh and manifest.json are what they would be written as.
describes_itself() {
    [[ -f $PREFIX/env.sh && -f $PREFIX/manifest.json ]] &&
        [[ "$(env_text)" == "$(<"$PREFIX/env.sh")" && "$(manifest_text)" == "$(<"$PREFIX/manifest.json")" ]]
}

# describe: write both. Several installers may do so at once, hence a lock of their own, held for a moment.
describe() {
    exec 8>>"$PREFIX/.ringmaster/locks/describe.lock"
    flock -w 60 8 || die "$EX_TEMPFAIL" "another run holds $PREFIX/.ringmaster/locks/describe.lock; try again"
    env_text | write_file "$PREFIX/env.sh" 0644
    manifest_text | write_file "$PREFIX/manifest.json" 0644
    exec 8>&-
}

# ---------------------------------------------------------------------------------------------- Open MPI, Python

# openmpi_version DIR: what the mpirun in DIR says about itself; fails when there is none or it does not run.
openmpi_version() {
    local dir=$1 text
    [[ -x $dir/bin/mpirun && -x $dir/bin/orted ]] || return 1
    text=$(OPAL_PREFIX=$dir LD_LIBRARY_PATH=$dir/lib timeout 20 "$dir/bin/mpirun" --version 2>/dev/null) || return 1
    [[ $text =~ \(Open\ MPI\)\ ([0-9][^[:space:]]*) ]] || return 1
    printf '%s' "${BASH_REMATCH[1]}"
}

# The judge of a Python for a stack, given the major.minor that will do: prints version, then the real executable, then
# `ok` or the problem. It runs on any Python.
# shellcheck disable=SC2016
readonly PYTHON_JUDGE='
import os, platform, sys
version = ".".join(map(str, sys.version_info[:3]))
problem = "ok"
executable = sys.executable
base = getattr(sys, "base_prefix", sys.prefix)
if base != sys.prefix:
    executable = os.path.join(base, "bin", "python%d.%d" % sys.version_info[:2])
if "%d.%d" % sys.version_info[:2] not in sys.argv[1:]:
    problem = "version %s, expected %s" % (version, " or ".join(sys.argv[1:]))
elif platform.machine() != "x86_64" or sys.maxsize < 2 ** 32:
    problem = "%s %s-bit, expected x86_64 64-bit" % (platform.machine(), 64 if sys.maxsize > 2 ** 32 else 32)
else:
    try:
        import ctypes, hashlib, ssl, zlib
    except ImportError as error:
        problem = "built without a module: %s" % error
    else:
        import sysconfig
        header = os.path.join(sysconfig.get_path("include"), "Python.h")
        if not os.path.isfile(header):
            problem = "no %s (its development package is missing)" % header
        elif not os.path.isfile(executable):
            problem = "%s is missing" % executable
print("%s\n%s\n%s" % (version, executable, problem))
'

# judge_python PYTHON WANTED: sets PY_VERSION, PY_PATH and PY_PROBLEM (`ok` when usable).
judge_python() {
    local text
    PY_VERSION="" PY_PATH=$1 PY_PROBLEM="does not run"
    # -I: neither the working directory nor the user's variables take part.
    text=$(cd / && timeout 20 "$1" -I -c "$PYTHON_JUDGE" "$2" 2>/dev/null </dev/null) || return 0
    { IFS= read -r PY_VERSION && IFS= read -r PY_PATH && IFS= read -r PY_PROBLEM; } <<<"$text" || return 0
}

# python_component VERSION (major.minor): the folder under the prefix for an interpreter that was brought along. Each
# version has one of its own, since stacks of several versions lie side by side.
python_component() {
    if [[ $1 == 3.7 ]]; then printf 'python'; else printf 'python-%s' "$1"; fi
}

# python_candidates VERSION (major.minor): paths where one may be, best first, each once.
python_candidates() {
    local version=$1 path dir seen=:
    local home=${HOME:-/nonexistent}
    {
        printf '%s\n' "$PREFIX/$(python_component "$version")/bin/python$version"
        local IFS=:
        for dir in $PATH; do
            printf '%s\n' "$dir/python$version" "$dir/python3"
            # pyenv's shims work only with pyenv's own settings; the interpreters behind them work always.
            [[ $dir != */shims ]] || printf '%s\n' "${dir%/shims}/versions/$version".*/bin/"python$version"
        done
        printf '%s\n' "$home/.pyenv/versions/$version".*/bin/"python$version" "/usr/local/bin/python$version" \
            "/usr/bin/python$version" /opt/*/bin/"python$version" "/opt/python/cp${version/./}"-*/bin/"python$version"
    } | while IFS= read -r path; do
        [[ -x $path && ! -d $path && $seen != *":$path:"* ]] || continue
        seen+=$path:
        printf '%s\n' "$path"
    done
}

# find_python VERSION: sets PY_PATH and PY_VERSION to the first usable one; fails when there is none, with what was
# looked at and why it will not do in PY_REJECTED (one per line).
find_python() {
    local candidates candidate
    PY_REJECTED=""
    candidates=$(python_candidates "$1")
    while IFS= read -r candidate; do
        [[ -n $candidate ]] || continue
        judge_python "$candidate" "$1"
        if [[ $PY_PROBLEM == ok ]]; then
            return 0
        fi
        PY_REJECTED+="$candidate: $PY_PROBLEM"$'\n'
    done <<<"$candidates"
    return 1
}

# glibc_version: as getconf says it, else nothing.
glibc_version() {
    local text
    text=$(getconf GNU_LIBC_VERSION 2>/dev/null) || text=""
    printf '%s' "${text##* }"
}

# os_name: ID and VERSION_ID, e.g. debian12.
os_name() {
    (
        ID="" VERSION_ID=""
        # shellcheck source=/dev/null
        [[ ! -r /etc/os-release ]] || . /etc/os-release
        printf '%s%s' "${ID:-linux}" "${VERSION_ID:-}"
    )
}
