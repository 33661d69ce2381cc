#!/usr/bin/env bash
# Rehearses, on a machine without a GPU, what a user with one will do: builds this tree with all CUDA kernels against a
# CUDA build of torch (the oldest that is supported), imports it there, and runs the tests of one process on the CPU and
# of what was built. Needs nvcc of the same major release.
#
#   scripts/rehearse_cuda.sh [FOLDER]      an environment with that torch, made where there is none (several GB);
#                                          default: build/rehearsal/env
#
# It works on a copy of the files that git knows or would add, so what is built in zerox/ stays as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

torch=2.11.0
env="$(realpath -m "${1:-build/rehearsal/env}")"
py="$env/bin/python"
tree="$PWD/build/rehearsal/tree"
log="$PWD/build/rehearsal/build.log"

say() { echo "zerox: $*" >&2; }
die() { say "$*"; exit 1; }

git rev-parse --git-dir >/dev/null 2>&1 || die "this is not a clone of the repository"

# ---- the environment
if ! "$py" -W ignore -c 'import torch' 2>/dev/null; then
    say "installing torch $torch into $env"
    [[ -x "$py" ]] || python3 -m venv "$env" || die "could not make $env (python3-venv missing?)"
    # setuptools with it: what venv brings may be too old, and setup_env.sh replaces nothing in an environment that is
    # not its own. torch 2.11 refuses 82 and later.
    "$py" -m pip --disable-pip-version-check install -q "torch==$torch" 'setuptools>=77,<82' ||
        die "pip could not install torch, see above"
fi
found="$("$py" -W ignore -c 'import torch; print(torch.__version__.partition("+")[0], torch.version.cuda)')"
[[ "$found" == "$torch "[0-9]* ]] || die "$env has torch ${found/ / and CUDA }, not $torch with CUDA: name another folder"

# ---- a copy of the tree; its build folder stays, so that only what changed is compiled
mkdir -p "$tree"
find "$tree" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d '' file; do
    if [[ -e "$file" ]]; then printf '%s\0' "$file"; fi # deleted but not yet committed
done | xargs -0 cp -a --parents -t "$tree"
cd "$tree"
ZEROX_ENV="$env" scripts/setup_env.sh --no-build test >/dev/null # what the tests need
export ZEROX_CUDA=1 ZEROX_WERROR=1

say "building against torch ${found/ / of CUDA }, see $log"
if ! "$py" setup.py build_ext --inplace >"$log" 2>&1; then
    tail -n 60 "$log" >&2
    die "the build failed, see above"
fi
sed -n '/^zerox /,/^  flags .*gencode/p' "$log"

# ---- what came of it
status=0
# Whether CUDA parameters would be refused; then also whether each op has a kernel for them.
"$py" -c 'import sys; from zerox._ext import cuda_refusal; sys.exit(cuda_refusal())' || status=1
"$py" -m pytest -q -p no:cacheprovider tests/kernels tests/cuda tests/test_packaging.py || status=1
[[ "$status" == 0 ]] && say "the rehearsal went well" || say "the rehearsal FAILED, see above"
exit "$status"
