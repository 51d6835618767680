#!/usr/bin/env bash
# Makes the virtual environment PREFIX/stacks/STACK: TensorFlow and what goes with it, at the exact versions of
# requirements-STACK.lock, with Horovod and mpi4py built against the Open MPI at PREFIX/openmpi. Needs no network.
# What differs between stacks is their line in artifacts.lock.json: the Python, the name of TensorFlow's package, the C++
# that its headers are written in, whether it uses GPUs.
#
# WHEELHOUSE holds: every wheel of requirements-STACK.lock and requirements-STACK-build.lock (cmake, ninja, setuptools,
# wheel: so a C++ compiler is all that the node must have), the sdists of horovod, mpi4py and what else has no wheel,
# and the program `uv`. The locks beside this script count; every file is checked against them.
#
# Horovod's and mpi4py's own wheels go to BUILT-WHEELS/<key>/. The key names everything that decides what is in them:
# their sources, Open MPI's digest, the Python ABI, the TensorFlow version, the flags, the operating system, glibc,
# and after a dash the compiler. A node without a compiler takes wheels of any compiler.
set -Eeuo pipefail
# shellcheck source=lib/common.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib/common.sh"

readonly BUILT_HERE=(horovod mpi4py)
# Horovod's controllers and frameworks; the machine's own architecture flags are left out, since the wheels travel.
# Its build takes the C++ standard from the TensorFlow it finds.
readonly BUILD_FLAGS=(
    HOROVOD_WITH_TENSORFLOW=1 HOROVOD_WITH_MPI=1
    HOROVOD_WITHOUT_GLOO=1 HOROVOD_WITHOUT_PYTORCH=1 HOROVOD_WITHOUT_MXNET=1
)

usage() {
    cat <<'EOT'
install_runtime.sh: the environment of training programs at PREFIX/stacks/STACK.

  --prefix=DIR        root of the installation (default $HOME/local); Open MPI must be there already
  --stack=NAME        tf1 (default; TensorFlow 1.15, Python 3.7) or tf2 (TensorFlow 2.15 for CPUs, Python 3.11)
  --wheelhouse=DIR    wheels, sdists and the program uv (see the head of this script)
  --built-wheels=DIR  Horovod and mpi4py wheels, by key: used if the key fits, else built into it
  --gpu=MODE          none; nccl: build Horovod's NCCL operations (CUDA toolkit and NCCL needed here);
                      auto (default): nccl where a GPU, the toolkit and NCCL are found, else none;
                      a stack for CPUs takes none only
  --jobs=N            parallel compilers (default: one per core)
  --check             change nothing; say what would happen
  --lock-timeout=S    seconds to wait for another run (default 1800)

Standard output: changed, unchanged, or (--check) would-change.
Exit status: 0 done, 64 usage, 65 wrong checksum or data, 69 something is missing, 75 locked, else failed.
EOT
}

main() {
    parse_options "stack wheelhouse built-wheels gpu jobs" "$@"
    if [[ -n ${OPT[help]:-} ]]; then
        usage
        return 0
    fi
    rm_start
    no_arguments
    set_prefix
    STACK=${OPT[stack]:-tf1}
    GPU=${OPT[gpu]:-auto}
    local known
    mapfile -t known < <(stacks)
    one_of stack "$STACK" "${known[@]}"
    one_of gpu "$GPU" auto none nccl
    PYTHON_SERIES=$(stack_field "$STACK" python)
    ABI=$(stack_field "$STACK" abi)
    CXX_STANDARD=$(stack_field "$STACK" cxx)
    TENSORFLOW=$(normal "$(stack_field "$STACK" tensorflow)")
    if [[ $(stack_field "$STACK" gpu) != yes && $GPU != none ]]; then
        [[ $GPU == auto ]] || usage_error "--gpu is '$GPU', but the stack $STACK is for CPUs (${TENSORFLOW/_/-})"
        GPU=none
    fi
    if [[ -n ${OPT[jobs]:-} ]]; then
        whole_number jobs "${OPT[jobs]}"
        ((OPT[jobs] > 0)) || usage_error "--jobs is 0, expected at least 1"
    fi
    WHEELHOUSE=${OPT[wheelhouse]:-}
    if [[ -n $WHEELHOUSE ]]; then
        [[ -d $WHEELHOUSE ]] || usage_error "--wheelhouse is '$WHEELHOUSE', expected a folder"
        WHEELHOUSE=$(cd "$WHEELHOUSE" && pwd -P)
    fi
    BUILT=${OPT[built-wheels]:-}
    if [[ -n $BUILT && $BUILT != /* ]]; then
        BUILT=$PWD/$BUILT
    fi
    TARGET=$PREFIX/stacks/$STACK
    LOCK=$RM_SCRIPTS_DIR/requirements-$STACK.lock
    OPENMPI=$PREFIX/openmpi
    want
    converge "stacks/$STACK"
    emit "$WORD"
}

# ------------------------------------------------------------------------------------------------ what is wanted

want() {
    [[ $(uname -m) == x86_64 ]] ||
        die "$EX_UNAVAILABLE" "this machine is $(uname -m); the packages of the stack $STACK are for x86_64 only"
    if ! OPENMPI_DIGEST=$(json_field "$OPENMPI/.ringmaster.json" digest); then
        OPENMPI_DIGEST=none
        is_check || die "$EX_UNAVAILABLE" "no Open MPI made by install_openmpi.sh at $OPENMPI; run install_openmpi.sh --prefix=$PREFIX first"
    fi
    read_lock
    resolve_gpu
    BASE_KEY=$(printf '%s\n' "${HASHES[horovod]}" "${HASHES[mpi4py]}" "$OPENMPI_DIGEST" "$ABI" \
        "tensorflow ${VERSIONS[$TENSORFLOW]}" "numpy ${VERSIONS[numpy]}" "${BUILD_FLAGS[*]}" "gpu $GPU $(cuda_version)" \
        "$(uname -m) $(os_name) glibc$(glibc_version)" | sha256_text)
    BASE_KEY=${BASE_KEY:0:24}
    DIGEST=$(printf '%s\n' "$STACK" "$BASE_KEY" "$(sha256_of "$LOCK")" | sha256_text)
}

# read_lock: VERSIONS and HASHES by normalised name.
read_lock() {
    declare -gA VERSIONS=() HASHES=()
    local line name=""
    while IFS= read -r line; do
        if [[ $line =~ ^([A-Za-z0-9._-]+)==([^[:space:]\;]+) ]]; then
            name=$(normal "${BASH_REMATCH[1]}")
            VERSIONS[$name]=${BASH_REMATCH[2]}
            HASHES[$name]=""
        elif [[ $line =~ --hash=sha256:([0-9a-f]{64}) && -n $name ]]; then
            HASHES[$name]+=" ${BASH_REMATCH[1]}"
        fi
    done <"$LOCK"
    ((${#VERSIONS[@]})) || die "$EX_DATAERR" "$LOCK names no package"
}

# normal NAME: as in the names of .dist-info folders, lower case, with _ for each run of - _ .
normal() {
    local name=${1,,}
    name=${name//[-.]/_}
    printf '%s' "$name"
}

resolve_gpu() {
    CUDA_HOME_FOUND="" NCCL_HOME="" NCCL_WHEEL=""
    if [[ $GPU == auto ]] && ! has_gpu; then
        GPU=none
    fi
    [[ $GPU != none ]] || return 0
    local dir wheel
    for dir in "${HOROVOD_CUDA_HOME:-}" "${CUDA_HOME:-}" /usr/local/cuda /usr/local/cuda-*; do
        if [[ -n $dir && -x $dir/bin/nvcc ]]; then
            CUDA_HOME_FOUND=$dir
            break
        fi
    done
    for dir in "${HOROVOD_NCCL_HOME:-}" "$CUDA_HOME_FOUND" /usr/local/nccl /usr/local /usr; do
        if [[ -n $dir && -f $dir/include/nccl.h ]]; then
            NCCL_HOME=$dir
            break
        fi
    done
    if [[ -z $NCCL_HOME && -n $WHEELHOUSE ]]; then
        for wheel in "$WHEELHOUSE"/nvidia_nccl_cu*.whl; do
            [[ ! -f $wheel ]] || NCCL_WHEEL=$wheel NCCL_HOME=wheel
        done
    fi
    local absent=""
    [[ -n $CUDA_HOME_FOUND ]] || absent="a CUDA toolkit with bin/nvcc (HOROVOD_CUDA_HOME or /usr/local/cuda)"
    [[ -n $NCCL_HOME ]] || absent+="${absent:+ and }NCCL with include/nccl.h (HOROVOD_NCCL_HOME, or its wheel in the wheelhouse)"
    # A look without the wheelhouse cannot know what lies in it; what was built then stands.
    if [[ -z $absent || ($GPU == auto && -z $WHEELHOUSE && $(built_gpu) == nccl) ]]; then
        GPU=nccl
    elif [[ $GPU == nccl ]]; then
        # An installation that is already there needs neither; preconditions says so when a build is due.
        GPU_MISSING=$absent
    else
        log_once "a GPU is here, but not $absent: Horovod is built without NCCL and its allreduce runs on the CPU"
        GPU=none
    fi
}
GPU_MISSING=""

# built_gpu: the mode of the installed stack.
built_gpu() {
    local line
    [[ -r $TARGET/.ringmaster.json ]] || return 0
    while IFS= read -r line; do
        if [[ $line == *'"horovod_build": {"gpu": "nccl"'* ]]; then
            printf 'nccl'
        fi
    done <"$TARGET/.ringmaster.json"
}

# cuda_version: of the toolkit that Horovod's kernels are compiled with.
cuda_version() {
    local text
    [[ $GPU == nccl && -n $CUDA_HOME_FOUND ]] || return 0
    text=$(timeout 20 "$CUDA_HOME_FOUND/bin/nvcc" --version 2>/dev/null) || return 0
    [[ ! $text =~ release\ ([0-9.]+) ]] || printf '%s' "${BASH_REMATCH[1]}"
}

has_gpu() {
    command -v nvidia-smi >/dev/null 2>&1 || return 1
    [[ $(timeout 20 nvidia-smi -L 2>/dev/null) == *"GPU 0"* ]]
}

# is_current: the marker's digest, the distributions that are really there, and a Python that runs.
is_current() {
    local digest
    digest=$(json_field "$TARGET/.ringmaster.json" digest) || return 1
    [[ $digest == "$DIGEST" ]] || return 1
    distributions_fit || return 1
    if ! timeout 20 "$TARGET/bin/python" -c pass >/dev/null 2>&1; then
        log_once "$TARGET/bin/python does not run; the stack is installed again"
        return 1
    fi
}

distributions_fit() {
    local path name version fit=0
    local -A found=()
    for path in "$TARGET"/lib/python"$PYTHON_SERIES"/site-packages/*.dist-info; do
        name=${path##*/}
        name=${name%.dist-info}
        version=${name##*-}
        found[$(normal "${name%-*}")]=$version
    done
    for name in "${!VERSIONS[@]}"; do
        if [[ ${found[$name]:-none} != "${VERSIONS[$name]}" ]]; then
            log_once "package $name: got ${found[$name]:-none}, expected ${VERSIONS[$name]}; the stack is installed again"
            fit=1
        fi
    done
    return "$fit"
}

# ------------------------------------------------------------------------------------------------ before work begins

preconditions() {
    find_python "$PYTHON_SERIES" ||
        die "$EX_UNAVAILABLE" "no usable Python $PYTHON_SERIES here; run install_python.sh --version=$PYTHON_SERIES first. Looked at:"$'\n'"$PY_REJECTED"
    need flock mktemp sha256sum awk tar gzip
    [[ -n $WHEELHOUSE ]] || usage_error "the stack must be installed, and that wants --wheelhouse=DIR"
    [[ -x $WHEELHOUSE/uv ]] || die "$EX_UNAVAILABLE" "$WHEELHOUSE holds no program uv; fill it again on the controller"
    openmpi_version "$OPENMPI" >/dev/null ||
        die "$EX_UNAVAILABLE" "$OPENMPI/bin/mpirun does not run; run install_openmpi.sh --prefix=$PREFIX first"
    find_key
    if [[ -z $KEY_DIR ]]; then
        local tools=()
        first_of gcc cc >/dev/null || [[ -n ${CC:-} ]] || tools+=(gcc)
        first_of g++ c++ >/dev/null || [[ -n ${CXX:-} ]] || tools+=(g++)
        ((${#tools[@]} == 0)) ||
            die "$EX_UNAVAILABLE" "Horovod must be built here (no wheels with key $BASE_KEY${BUILT:+ in $BUILT}), but there is no" \
                "${tools[*]}; $(install_command "${tools[@]}"), or build on another node of this platform and bring its wheels"
        need_compiler c
        need_compiler c++ "$CXX_STANDARD"
        [[ -z $GPU_MISSING ]] || die "$EX_UNAVAILABLE" "--gpu=nccl wants $GPU_MISSING; install them, or use --gpu=none"
    fi
    need_space "$PREFIX" 2500 "the $STACK stack"
}

# find_key: KEY, and KEY_DIR when wheels of that key are there and whole.
find_key() {
    local compiler dir
    KEY_DIR=""
    if compiler=$(compiler_version); then
        KEY=$BASE_KEY-$(printf '%s' "$compiler" | sha256_text | cut -c1-8)
    else
        KEY=$BASE_KEY-
    fi
    [[ -n $BUILT ]] || return 0
    for dir in "$BUILT/$KEY"*; do
        [[ -f $dir/SHA256SUMS ]] || continue
        if (cd "$dir" && sha256sum --quiet --strict -c SHA256SUMS) >/dev/null 2>&1; then
            KEY_DIR=$dir
            return 0
        fi
        log_once "$dir does not hold what was built into it; it is not used"
    done
}

compiler_version() {
    local cxx
    cxx=${CXX:-$(first_of g++ c++)} || return 1
    "$cxx" --version 2>/dev/null | head -n 1
}

# ------------------------------------------------------------------------------------------------ installation

install() {
    # What was true before the wait for the lock may not be any more.
    find_python "$PYTHON_SERIES" || die "$EX_UNAVAILABLE" "no usable Python $PYTHON_SERIES here any more"
    find_key
    NEW=$STAGE/new/$STACK
    PYTHON=$NEW/bin/python
    export UV_CACHE_DIR=$STAGE/uv-cache UV_PYTHON_DOWNLOADS=never UV_OFFLINE=1 UV_NO_CONFIG=1 UV_NO_PROGRESS=1
    export UV_LINK_MODE=hardlink PYTHONNOUSERSITE=1
    unset PYTHONPATH PYTHONHOME VIRTUAL_ENV UV_INDEX UV_INDEX_URL UV_EXTRA_INDEX_URL UV_DEFAULT_INDEX UV_FIND_LINKS \
        UV_CONSTRAINT UV_OVERRIDE PIP_CONSTRAINT PIP_REQUIRE_VIRTUALENV
    export PATH=$OPENMPI/bin:$PATH OPAL_PREFIX=$OPENMPI LD_LIBRARY_PATH=$OPENMPI/lib
    step "creating the environment with Python $PY_VERSION" \
        "$WHEELHOUSE/uv" venv --quiet --relocatable --prompt "$STACK" --python "$PY_PATH" "$NEW"
    link_python
    # What comes as source only (gast of tf1) wants setuptools in place for its build.
    split_lock setuptools wheel >"$STAGE/first.txt"
    split_lock "!" setuptools wheel "${BUILT_HERE[@]}" >"$STAGE/second.txt"
    pip_install "installing the build base" --require-hashes -r "$STAGE/first.txt"
    pip_install "installing TensorFlow ${VERSIONS[$TENSORFLOW]} and its packages" --require-hashes -r "$STAGE/second.txt"
    if [[ -n $NCCL_WHEEL ]]; then
        check_nccl_wheel
        pip_install "installing NCCL" "$NCCL_WHEEL"
        NCCL_HOME=$NEW/lib/python$PYTHON_SERIES/site-packages/nvidia/nccl
        ln -sf libnccl.so.2 "$NCCL_HOME/lib/libnccl.so"
    fi
    local reused=$KEY_DIR
    [[ -n $KEY_DIR ]] || build_wheels
    install_wheels
    if ! verify_stack; then
        [[ -n $reused ]] || failed "checking the stack" 1 "$STAGE/log"
        log "the wheels of $reused do not do what their key says; they are built again"
        remove_tree "$reused"
        need_compiler c
        need_compiler c++ "$CXX_STANDARD"
        build_wheels
        install_wheels
        verify_stack || failed "checking the stack" 1 "$STAGE/log"
    fi
    write_marker
    place "$NEW"
    log "the stack $STACK is at $TARGET"
}

# check_nccl_wheel: it stands in no requirements lock, since most nodes do without it.
check_nccl_wheel() {
    local name=${NCCL_WHEEL##*/} version pinned
    version=${name#*-}
    version=${version%%-*}
    pinned=$(artifact nccl-wheel "$version" sha256) ||
        die "$EX_DATAERR" "artifacts.lock.json pins no checksum for $name; put the pinned version into the wheelhouse"
    verify "$NCCL_WHEEL" "$pinned"
}

# link_python: an interpreter under the same prefix is named relative to here, so that both can move together.
link_python() {
    [[ $PY_PATH == "$PREFIX/"* ]] || return 0
    local link
    for link in "$NEW/bin/"python*; do
        if [[ -L $link && $(readlink "$link") == /* ]]; then
            ln -sfn "../../../${PY_PATH#"$PREFIX/"}" "$link"
        fi
    done
    # In the stage the same relative path leads elsewhere; this link stands in for it and goes away with the stage.
    local component=${PY_PATH#"$PREFIX/"}
    component=${component%%/*}
    ln -sfn "$PREFIX/$component" "$STAGE/$component"
}

# split_lock [!] NAME...: those packages' part of the lock, or with ! all but those.
split_lock() {
    awk -v names=" $* " '
        /^[A-Za-z0-9]/ { name = $1; sub(/==.*/, "", name); listed = index(names, " " name " ") > 0 }
        /^#/ { next }
        name != "" && listed != (index(names, " ! ") > 0) { print }
    ' "$LOCK"
}

pip_install() {
    local what=$1
    shift
    step "$what" "$WHEELHOUSE/uv" pip install --quiet --python "$PYTHON" --no-index --find-links "$WHEELHOUSE" \
        --no-deps --no-build-isolation "$@"
}

install_wheels() {
    pip_install "installing Horovod and mpi4py" --reinstall "$KEY_DIR"/*.whl
}

# sdist NAME: its file in the wheelhouse, checked against the lock.
sdist() {
    local file=$WHEELHOUSE/$1-${VERSIONS[$1]}.tar.gz got
    [[ -r $file ]] || die "$EX_UNAVAILABLE" "$WHEELHOUSE holds no ${file##*/}; fill it again on the controller"
    got=$(sha256_of "$file")
    [[ ${HASHES[$1]} == *"$got"* ]] ||
        die "$EX_DATAERR" "$file: got sha256 $got, expected one of${HASHES[$1]}; delete it and fill the wheelhouse again"
    printf '%s' "$file"
}

build_wheels() {
    local horovod mpi4py jobs=${OPT[jobs]:-$(cpu_count)} kit=$STAGE/tools out=$STAGE/wheels flags=()
    horovod=$(sdist horovod)
    mpi4py=$(sdist mpi4py)
    step "installing the build tools" "$WHEELHOUSE/uv" pip install --quiet --python "$PYTHON" --no-index \
        --find-links "$WHEELHOUSE" --require-hashes --target "$kit" -r "$RM_SCRIPTS_DIR/requirements-$STACK-build.lock"
    unpack "$horovod" "$STAGE/source"
    unpack "$mpi4py" "$STAGE/source"
    flags=(
        "${BUILD_FLAGS[@]}" PATH="$kit/bin:$PATH" PYTHONPATH="$kit"
        HOROVOD_CMAKE="$kit/cmake/data/bin/cmake" CMAKE_GENERATOR=Ninja
        CMAKE_MAKE_PROGRAM="$kit/bin/ninja" CMAKE_BUILD_PARALLEL_LEVEL="$jobs" MAKEFLAGS="-j$jobs"
        MPICC="$OPENMPI/bin/mpicc"
    )
    if [[ $GPU == nccl ]]; then
        flags+=(
            HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_CUDA_HOME="$CUDA_HOME_FOUND" HOROVOD_NCCL_HOME="$NCCL_HOME"
            CUDACXX="$CUDA_HOME_FOUND/bin/nvcc"
        )
        # NCCL from its wheel lies in the environment; the library finds it from its own place.
        # shellcheck disable=SC2016  # the dynamic linker expands it
        [[ -z $NCCL_WHEEL ]] || flags+=(HOROVOD_NCCL_LINK=SHARED LDFLAGS='-Wl,-rpath,\$ORIGIN/../../nvidia/nccl/lib')
    fi
    mkdir -p "$out"
    step "building Horovod ${VERSIONS[horovod]} and mpi4py ${VERSIONS[mpi4py]}" build_both "$jobs" "$out" "${flags[@]}"
    (cd "$out" && sha256sum -- *.whl >SHA256SUMS)
    printf 'compiler: %s\nopenmpi: %s\ngpu: %s\nflags: %s\nos: %s glibc%s\n' "$(compiler_version || true)" "$OPENMPI_DIGEST" \
        "$GPU" "${BUILD_FLAGS[*]}" "$(os_name)" "$(glibc_version)" >"$out/about.txt"
    KEY_DIR=$out
    [[ -n $BUILT ]] || return 0
    local temp
    mkdir -p "$BUILT"
    temp=$(mktemp -d "$BUILT/.$KEY.XXXXXXXX")
    chmod 0755 "$temp"
    cp "$out"/* "$temp/"
    if [[ -e $BUILT/$KEY ]]; then
        remove_tree "$BUILT/$KEY"
    fi
    # Another node of a shared folder may be quicker; its wheels have the same key.
    mv -T "$temp" "$BUILT/$KEY" 2>/dev/null || remove_tree "$temp"
    log "the wheels are in $BUILT/$KEY"
}

# build_both JOBS OUT FLAG...: mpi4py is one long compilation, so a second core builds Horovod meanwhile. When it fails,
# the clean-up that every failed step ends in stops Horovod's build too.
build_both() {
    local jobs=$1 out=$2 status=0 mpi4py horovod=""
    shift 2
    bdist_wheel "$STAGE/source/mpi4py-${VERSIONS[mpi4py]}" "$out" "$@" >"$STAGE/mpi4py.log" 2>&1 &
    mpi4py=$!
    if ((jobs > 1)); then
        bdist_wheel "$STAGE/source/horovod-${VERSIONS[horovod]}" "$out" "$@" >"$STAGE/horovod.log" 2>&1 &
        horovod=$!
    fi
    wait "$mpi4py" || status=$?
    cat -- "$STAGE/mpi4py.log"
    ((status == 0)) || return "$status"
    if [[ -z $horovod ]]; then
        bdist_wheel "$STAGE/source/horovod-${VERSIONS[horovod]}" "$out" "$@" >"$STAGE/horovod.log" 2>&1 &
        horovod=$!
    fi
    wait "$horovod" || status=$?
    cat -- "$STAGE/horovod.log"
    return "$status"
}

bdist_wheel() {
    local source=$1 out=$2
    shift 2
    cd "$source"
    exec env "$@" "$PYTHON" setup.py --quiet bdist_wheel --dist-dir "$out"
}

# verify_stack: everything imports, Horovod says that it was built as asked, and MPI is the one of this prefix.
verify_stack() {
    log "checking the stack: imports, horovodrun --check-build"
    local text mpi
    mpi=$(openmpi_version "$OPENMPI") || return 1
    text=$("$NEW/bin/horovodrun" --check-build 2>>"$STAGE/log") || return 1
    printf '%s\n' "$text" >>"$STAGE/log"
    local wanted=("[X] TensorFlow" "[X] MPI") word
    [[ $GPU != nccl ]] || wanted+=("[X] NCCL")
    for word in "${wanted[@]}"; do
        if [[ $text != *"$word"* ]]; then
            log "horovodrun --check-build: got no '$word', expected it"
            return 1
        fi
    done
    [[ $GPU == nccl || $text != *"[X] NCCL"* ]] || return 1
    # The list of frameworks is left out: PyTorch is marked there whenever it is not installed at all.
    HOROVOD_BUILD=$(printf '%s\n' "$text" | sed -n '/Controllers/,$ s/^ *\[X\] *\([A-Za-z]*\) *$/\1/p' | sort -u | tr '\n' ' ')
    TF_CPP_MIN_LOG_LEVEL=2 "$PYTHON" -c '
import sys
import h5py, numpy, tensorflow, tensorboard
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
import horovod.tensorflow
import horovod.tensorflow.keras
library = MPI.Get_library_version()
if not library.startswith("Open MPI v" + sys.argv[1] + ","):
    sys.exit("mpi4py loads %r, expected Open MPI v%s" % (library[:40], sys.argv[1]))
if not horovod.tensorflow.mpi_built():
    sys.exit("Horovod was built without MPI")
if tensorflow.__version__ != sys.argv[2]:
    sys.exit("this is TensorFlow %s, expected %s" % (tensorflow.__version__, sys.argv[2]))
' "$mpi" "${VERSIONS[$TENSORFLOW]}" >>"$STAGE/log" 2>&1
}

write_marker() {
    local name first=1 build listed=""
    for name in $(printf '%s\n' "${!VERSIONS[@]}" | sort); do
        ((first)) || listed+=", "
        first=0
        listed+="$(json_text "$name"): $(json_text "${VERSIONS[$name]}")"
    done
    build="\"gpu\": $(json_text "$GPU"), \"features\": $(json_text "${HOROVOD_BUILD% }"), \"key\": $(json_text "$KEY")"
    printf '{\n "stack": %s,\n "python": %s,\n "openmpi_digest": %s,\n "horovod_build": {%s},\n "packages": {%s},\n "digest": %s\n}\n' \
        "$(json_text "$STACK")" "$(json_text "$PY_VERSION")" "$(json_text "$OPENMPI_DIGEST")" "$build" "$listed" \
        "$(json_text "$DIGEST")" >"$NEW/.ringmaster.json"
}

main "$@"
