#!/usr/bin/env bash
# Readies a Python environment with torch and, unless told otherwise, a built zerox. Prints the environment's python on
# stdout and everything else on stderr. Quick where nothing is left to do.
#
#   scripts/setup_env.sh [--no-build] [EXTRA...]      extras of pyproject.toml: test, lint, demo
#
# The environment is ./.venv, which is made where there is none, kept, and belongs to this script. An active one (VIRTUAL_ENV,
# CONDA_PREFIX) is left alone, since zerox would be installed into it in place of what is there.
#
# ZEROX_ENV           folder of another environment, which has torch 2.11 to 2.14: what it lacks is added, zerox is installed
#                     into it in editable mode, and nothing else that it has is replaced
# ZEROX_TORCH_INDEX   package index to take torch from when making ./.venv, for example
#                     https://download.pytorch.org/whl/cpu for the small CPU build (PyPI's Linux build brings CUDA)
set -euo pipefail
asked="${ZEROX_ENV:+$(realpath -ms "$ZEROX_ENV")}" # before the next line, which changes what a relative path means
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { echo "zerox: $*" >&2; }
die() { say "$*"; exit 1; }

build=yes
if [[ "${1:-}" == --no-build ]]; then build=no; shift; fi

state() { "$py" scripts/env_state.py "$@"; }
pip() { "$py" -m pip --disable-pip-version-check "$@" >&2; }

# ---- what pip can't bring, looked at before gigabytes are fetched
[[ -z "${TMPDIR:-}" || (-d "$TMPDIR" && -w "$TMPDIR") ]] || die "TMPDIR=$TMPDIR is not a folder to write to: make it, or unset TMPDIR"
command -v make >/dev/null || die "no make: install make"
if [[ "$build" == yes ]]; then
    cxx="${CXX:-}"
    for name in c++ g++ clang++; do
        if [[ -z "$cxx" ]] && command -v "$name" >/dev/null; then cxx="$name"; fi
    done
    command -v "${cxx%% *}" >/dev/null || die "no C++ compiler: install g++ 11+ or clang++ 14+, or set CXX"
    # Unquoted, since CXX may hold words such as 'ccache g++'.
    printf '#include <concepts>\n#include <span>\nstatic_assert(__cplusplus >= 202002L);\n' |
        $cxx -std=c++20 -fsyntax-only -x c++ - 2>/dev/null ||
        die "$cxx does not compile C++20: install g++ 11+ or clang++ 14+, or set CXX"
fi

# need_disk FOLDER LEAST USUAL WHAT: GB without which it is sure to fail, and GB that it may take.
need_disk() {
    local free_kb
    free_kb="$(df -Pk "$1" | awk 'NR == 2 {print $4}')"
    local free="$1 has $((free_kb / 1024 / 1024)) GB of free disk, $4 may take $3"
    ((free_kb >= $2 * 1024 * 1024)) || die "$free"
    ((free_kb >= $3 * 1024 * 1024)) || say "$free"
}

# ---- an environment
owned=no
if [[ -n "$asked" ]]; then
    py="$asked/bin/python"
    [[ -x "$py" ]] || die "ZEROX_ENV=$asked has no bin/python: it is the folder of a Python environment"
    state has-torch || die "ZEROX_ENV=$asked has no torch of 2.11 to 2.14: install one there, or leave ZEROX_ENV out for" \
        "./.venv (ZEROX_ANY_TORCH=1 takes newer ones)"
    if [[ "$asked" -ef .venv ]]; then owned=yes; fi
else
    owned=yes
    py="$PWD/.venv/bin/python"
    if ! "$py" -m pip --version >/dev/null 2>&1; then
        base="" lacks_venv=""
        for name in python3 python3.13 python3.12 python3.11 python3.10; do
            "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || continue
            if "$name" -c 'import ensurepip, venv' 2>/dev/null; then base="$name"; break; fi
            lacks_venv="$name"
        done
        if [[ -z "$base" ]]; then
            [[ -z "$lacks_venv" ]] || die "$lacks_venv has no venv module: install python3-venv"
            die "no Python 3.10 or newer: install python3"
        fi
        say "making ./.venv with $("$base" -V)"
        "$base" -m venv --clear .venv >&2 || die "could not make ./.venv, see above"
    fi
    if ! state has-torch; then
        active="${VIRTUAL_ENV:-${CONDA_PREFIX:-}}"
        [[ -z "$active" ]] || say "using ./.venv; ZEROX_ENV=$active takes the active environment, and installs zerox into it"
        headers="$("$py" -c 'import sysconfig; print(sysconfig.get_path("include"))')"
        [[ "$build" == no || -e "$headers/Python.h" ]] ||
            die "Python.h is missing ($headers): install python3-dev (python3-devel)"
        need_disk "$PWD" 2 8 "torch (2 GB without CUDA)"
        need_disk "${TMPDIR:-/tmp}" 1 3 "its download (TMPDIR names another folder)"
        [[ -n "${ZEROX_TORCH_INDEX:-}" ]] || say "installing torch; PyPI's build for Linux brings CUDA, several GB:" \
            "ZEROX_TORCH_INDEX=https://download.pytorch.org/whl/cpu gets the CPU build"
        pip install -c constraints.txt ${ZEROX_TORCH_INDEX:+--extra-index-url "$ZEROX_TORCH_INDEX"} \
            "$(grep '^torch==' constraints.txt)" || die "pip could not install torch, see above (no network, no free disk?)"
    fi
fi
PATH="$(dirname "$py"):$PATH" # ninja and cmake of the environment

# ---- tools
missing="$(state missing build-system "$@")"
if [[ -n "$missing" ]]; then
    mapfile -t missing <<<"$missing"
    "$py" -m pip --version >/dev/null 2>&1 || die "no pip in ZEROX_ENV=$asked: run '$py -m ensurepip'"
    pins="$(mktemp)"
    trap 'rm -f "$pins"' EXIT
    if [[ "$owned" == yes ]]; then
        cp constraints.txt "$pins"
    else
        clash="$(state clashes build-system "$@")"
        [[ -z "$clash" ]] || die "ZEROX_ENV=$asked does not fit, leave it out or run: $py -m pip install $clash"
        state pins >"$pins"
    fi
    say "installing ${missing[*]}"
    pip install -q -c "$pins" "${missing[@]}" || die "pip could not install the above (no network?)"
fi

# ---- the extension
if [[ "$build" == yes ]]; then
    wanted="$(state fingerprint)"
    found="$(cat build/fingerprint 2>/dev/null)" || found=none
    # Whether warnings are errors changes nothing of what is built: `make demo` after CI's checks builds nothing again.
    if [[ "$found" != "$wanted" && "$found" != "$wanted-werror" ]] || ! state built; then
        say "building the C++ extension, a few minutes the first time; CUDA kernels, which a CUDA build of torch (or" \
            "ZEROX_CUDA=1) gets where there is an nvcc, take as long again"
        rm -f build/fingerprint
        pip install -q --no-build-isolation --no-deps -e . || die "the build failed, see above"
        mkdir -p build
        echo "$wanted" >build/fingerprint
    fi
fi
echo "$py"
